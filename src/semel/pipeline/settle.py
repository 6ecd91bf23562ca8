"""How recovery has a sink carry out decisions, and what it raises if the sink does not."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from semel.crashpoints import CrashPoint, reach
from semel.errors import NeedsOperator, Retryable, SemelError, reason_of
from semel.events import log
from semel.pipeline.sink import (
    AbortsTogether,
    SinkFatal,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Token,
    TwoPhaseSink,
)
from semel.pipeline.twophase import guarded
from semel.pipeline.txn import SinkTxnId

# One attempt may be in somebody's use; after so many in a row it is the sink that is silent,
# and a thousand timeouts would say no more.
SILENT_IN_A_ROW: Final = 3


def abort_all(
    sink: TwoPhaseSink, tokens: Mapping[SinkTxnId, Token | None]
) -> Iterator[tuple[SinkTxnId, SinkOutcome]]:
    """Abort every one of *tokens*, whose ABORT is won; one that fails does not stop the others.

    Attempts of a sink that has fallen silent are left out, for the next start.
    """
    together = _aborted_together(sink, tokens)
    yield from ((txn, SinkOK()) for txn in together)
    silent = 0
    for txn, token in tokens.items():
        if txn in together:
            continue
        outcome = _abort(sink, txn, token)
        yield txn, outcome
        silent = silent + 1 if isinstance(outcome, SinkRetryable) else 0
        if silent == SILENT_IN_A_ROW:
            return


def _aborted_together(
    sink: TwoPhaseSink, tokens: Mapping[SinkTxnId, Token | None]
) -> Collection[SinkTxnId]:
    if len(tokens) < 2 or not isinstance(sink, AbortsTogether):
        return ()
    reach(CrashPoint.RECOVER_ABORT_BEFORE, sink.name)
    try:
        together = sink.abort_together(list(tokens))
    except Exception as error:  # noqa: BLE001  each is asked for again, and answers for itself
        log.warning(
            "attempts are aborted one by one",
            extra={"sink": sink.name, "reason": reason_of(error)},
        )
        return ()
    reach(CrashPoint.RECOVER_ABORT_AFTER, sink.name)
    return together


def _abort(sink: TwoPhaseSink, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
    reach(CrashPoint.RECOVER_ABORT_BEFORE, sink.name)
    outcome = guarded(lambda: sink.abort(txn, token))
    reach(CrashPoint.RECOVER_ABORT_AFTER, sink.name)
    return outcome


class Unsettled(SemelError):
    """What recovery asked of a sink, and what came back."""

    def __init__(self, sink: str, txn: str, act: str, reason: str) -> None:
        super().__init__(sink, txn, act, reason)
        self.sink = sink
        self.txn = txn
        self.act = act
        self.reason = reason


class SinkBlocksStart(Unsettled, Retryable):
    """A sink did not carry out what recovery asked, and may do so later."""

    def __str__(self) -> str:
        return (
            f"recovery of {self.txn}: sink {self.sink!r} did not {self.act}: {self.reason}; "
            f"the start waits for it, nothing is lost"
        )


class CycleStuck(Unsettled, NeedsOperator):
    """A sink can never carry out what the decision demands."""

    def __str__(self) -> str:
        return (
            f"recovery of {self.txn}: sink {self.sink!r} cannot {self.act}: {self.reason}; "
            f"see `semel doctor`, then `semel cycle resolve`"
        )


def unsettled(
    sink: TwoPhaseSink, txn: SinkTxnId, outcome: SinkOutcome, act: str
) -> Unsettled | None:
    """Return the error for an outcome that is not OK."""
    match outcome:
        case SinkOK():
            return None
        case SinkRetryable(reason):
            return SinkBlocksStart(sink.name, str(txn), act, reason)
        case SinkFatal(reason):
            return CycleStuck(sink.name, str(txn), act, reason)
