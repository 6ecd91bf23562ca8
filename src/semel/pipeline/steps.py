"""The seven steps of a cycle, and what follows if one of them fails."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Step(StrEnum):
    """The seven steps, in order."""

    BEGIN_TXN = "begin_txn"
    FLUSH = "flush"
    COMMIT_OFFSETS = "commit_offsets"
    PRE_COMMIT_2PC = "pre_commit_2pc"
    COMMIT_TXN = "commit_txn"
    COMMIT_2PC = "commit_2pc"
    STORE_COMMIT = "store_commit"


class Failure(StrEnum):
    """How a step can fail."""

    ERROR = "error"
    SINK_RETRYABLE = "SinkRetryable"
    SINK_FATAL = "SinkFatal"
    NOT_COMMITTED = "surely not committed"
    UNKNOWN = "unknown"


class Verdict(StrEnum):
    """What the failure of a step means for the cycle."""

    FATAL = "CommitFatal; nothing else is called"
    ABORT = "CommitAborted, after the abort path"
    ABORT_THEN_FATAL = "CommitFatal, after the abort path"
    WIN_ABORT = (
        "try to win ABORT by compare-and-set: won, CommitAborted; lost, the COMMIT stands and the "
        "cycle goes on; no answer, CommitFatal and the sinks stay prepared"
    )
    STRANDED = "CommitFatal naming every stranded (sink, transaction); never an abort"


FAILURES: Final[Mapping[tuple[Step, Failure], Verdict]] = {
    (Step.BEGIN_TXN, Failure.ERROR): Verdict.FATAL,
    (Step.FLUSH, Failure.ERROR): Verdict.ABORT,
    (Step.COMMIT_OFFSETS, Failure.ERROR): Verdict.ABORT,
    (Step.PRE_COMMIT_2PC, Failure.ERROR): Verdict.ABORT,
    (Step.PRE_COMMIT_2PC, Failure.SINK_RETRYABLE): Verdict.ABORT,
    (Step.PRE_COMMIT_2PC, Failure.SINK_FATAL): Verdict.ABORT_THEN_FATAL,
    (Step.COMMIT_TXN, Failure.NOT_COMMITTED): Verdict.ABORT,
    (Step.COMMIT_TXN, Failure.UNKNOWN): Verdict.WIN_ABORT,
    (Step.COMMIT_2PC, Failure.ERROR): Verdict.STRANDED,
    (Step.COMMIT_2PC, Failure.SINK_RETRYABLE): Verdict.STRANDED,
    (Step.COMMIT_2PC, Failure.SINK_FATAL): Verdict.STRANDED,
    (Step.STORE_COMMIT, Failure.ERROR): Verdict.FATAL,
}
"""The failure table.  The docs print it from here."""
