"""The answers that a sink can give from its books alone, in either mode."""

from __future__ import annotations

from semel.pipeline.sink import SinkFatal, SinkOK, SinkOutcome
from semel.pipeline.txn import SinkTxnId
from semel.postgres.books import Known
from semel.postgres.statements import PreparedToken


def settled(txn: SinkTxnId, known: Known) -> SinkOutcome | None:
    """Answer a commit from the cycle's proof, if there is a finished one."""
    if known.proof is None:
        return None
    if known.proof.attempt != txn.attempt:
        return another_attempt(txn, known.proof.attempt)
    return SinkOK() if known.proof.finished else None


def not_prepared(txn: SinkTxnId, known: Known, promise: PreparedToken) -> SinkOutcome | None:
    """Refuse to commit an attempt that is not held."""
    if known.state == "aborted":
        return SinkFatal(f"{txn} was aborted")
    if known.state is None:
        return SinkFatal(f"{txn} is not held here: never prepared, or lost")
    if known.digest != promise.digest:
        return SinkFatal(f"{txn} is held with other rows than those of its token")
    return None


def refusal(txn: SinkTxnId, known: Known, promise: PreparedToken) -> SinkOutcome | None:
    """Answer a prepare from the books; None if the rows may be accepted."""
    proof = known.proof
    if proof is not None and proof.attempt != txn.attempt:
        return another_attempt(txn, proof.attempt)
    digest = proof.digest if proof else known.digest if known.state == "prepared" else None
    if digest not in (None, promise.digest):
        return SinkFatal(f"{txn} was prepared before, with other rows")
    if proof is not None:
        return SinkOK(promise.token())
    if known.state == "aborted":
        return SinkFatal(f"{txn} was aborted")
    if known.mark is not None and txn.cycle <= known.mark:
        return SinkFatal(
            f"{txn} is at or below the mark {known.mark}: another attempt was committed"
        )
    return None


def another_attempt(txn: SinkTxnId, attempt: str) -> SinkFatal:
    """Return the refusal of an attempt that lost."""
    return SinkFatal(f"{txn}: the cycle was committed by another attempt, {attempt[:8]}")


def committed(txn: SinkTxnId) -> SinkFatal:
    """Return the refusal to abort a committed attempt."""
    return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
