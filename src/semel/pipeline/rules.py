"""The checks of the ledger, as pure functions that every ledger calls in its transaction.

Each returns if the step may be written, and raises `NeedsOperator` with the reason
otherwise, unless it says another error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from semel.errors import LeaseHeld, LeaseLost, Misuse, NeedsOperator
from semel.lease import Owner, Takeover
from semel.pipeline.ledger import ARROWS, AttemptRecord, CycleState, ScopeLease
from semel.pipeline.sink import Token
from semel.pipeline.source import BatchRange, Position, Positions, SourceKind, discontinuities
from semel.pipeline.txn import CycleId, Scope, SinkTxnId


def check_scope(ledger_id: str, scope: Scope) -> None:
    """Refuse a scope of another ledger: its attempts must never be mistaken for ours.

    Raises:
        Misuse: the scope names another ledger.
    """
    if scope.ledger != ledger_id:
        raise Misuse(
            f"scope {scope} belongs to ledger {scope.ledger!r}, and this is ledger {ledger_id!r}"
        )


def check_takeover(
    scope: Scope, holder: Owner | None, left_seconds: float, owner: Owner, takeover: Takeover
) -> None:
    """Refuse to take a live lease from an owner that may still run.

    Raises:
        LeaseHeld: the holder may still run.
    """
    if holder is None or holder == owner or takeover is Takeover.FORCE or left_seconds <= 0:
        return
    if not holder.is_gone():
        raise LeaseHeld(str(scope), str(holder), left_seconds)


def check_lease(
    lease: ScopeLease, epoch: int, owner: Owner | None, txn: SinkTxnId | None = None
) -> None:
    """Refuse a lease that is not the one in force, or not for *txn*'s scope.

    The owner is compared, too: a ledger restored from a backup issues the same epochs
    again.

    Raises:
        LeaseLost: another owner, another epoch, or released.
        Misuse: the lease is for another scope.
    """
    if txn is not None and txn.scope != lease.scope:
        raise Misuse(f"{txn}: the lease is for scope {lease.scope}")
    if lease.epoch != epoch or lease.owner != owner:
        raise LeaseLost(str(lease.scope), lease.epoch, epoch)


def check_plan(
    txn: SinkTxnId,
    known: AttemptRecord | None,
    committed: SinkTxnId | None,
    mark: SinkTxnId | None,
    generation: int,
) -> None:
    """Refuse to plan a cycle that has ended, or an attempt that was aborted."""
    _refuse_ended(txn, committed, mark)
    if generation and txn.cycle.generation != generation:
        raise NeedsOperator(f"{txn}: the checkpoint generation in use is {generation}")
    if known is not None and known.state is CycleState.ABORTED:
        raise NeedsOperator(f"{txn}: the attempt is aborted and cannot be planned again")


def check_range(txn: SinkTxnId, known: AttemptRecord | None, batch: BatchRange) -> None:
    """Refuse a range for a decided attempt, and a second, different range."""
    record = _undecided(txn, known)
    if record.range is not None and record.range.digest != batch.digest:
        raise NeedsOperator(f"{txn}: the attempt has another range already")


def check_prepared(
    txn: SinkTxnId,
    known: AttemptRecord | None,
    tokens: Mapping[str, Token],
    rows: Mapping[str, int],
) -> None:
    """Refuse tokens for a decided attempt, and a second, different set of tokens."""
    record = _undecided(txn, known)
    if record.state is CycleState.PREPARED and (record.tokens, record.rows) != (tokens, rows):
        raise NeedsOperator(f"{txn}: the attempt is prepared already, with other tokens")


def check_commit(
    txn: SinkTxnId,
    known: AttemptRecord | None,
    committed: SinkTxnId | None,
    mark: SinkTxnId | None,
    positions: Positions,
) -> BatchRange:
    """Return the range whose ends become the positions, if COMMIT may be decided."""
    record = _undecided(txn, known)
    if CycleState.COMMITTED not in ARROWS[record.state]:
        raise NeedsOperator(f"{txn}: the attempt is {record.state}, not prepared")
    _refuse_ended(txn, committed, mark)
    if record.range is None:
        raise NeedsOperator(f"{txn}: the ledger has no source range of the batch")
    if found := discontinuities(positions, record.range):
        raise NeedsOperator(f"{txn}: {'; '.join(found)}")
    return record.range


def check_finish(txn: SinkTxnId, known: AttemptRecord | None) -> None:
    """Refuse to finish an attempt that is not committed."""
    record = _known(txn, known)
    if not record.state.is_committed:
        raise NeedsOperator(f"{txn}: the attempt is {record.state}, not committed")


def check_unpruned(txn: SinkTxnId, pruned: CycleId | None) -> None:
    """Refuse to decide an unknown attempt of a cycle whose attempts may be pruned.

    It may have been the committed one, and ABORT would be wrong.
    """
    if pruned is not None and txn.cycle <= pruned:
        raise NeedsOperator(f"{txn}: the cycle is finished and its attempts are pruned")


def check_rename(old: Scope, new: Scope, open_attempts: int, has_cycles: bool) -> None:
    """Refuse to rename an app whose attempts are open, or to a name that is in use."""
    if open_attempts:
        raise NeedsOperator(
            f"{old} has {open_attempts} open attempts: settle them with `semel recover` under the "
            f"old name first"
        )
    if has_cycles:
        raise NeedsOperator(f"{new} has cycles of its own, and cannot take those of {old}")


def check_keep(keep: int) -> None:
    """Refuse a negative number of cycles to keep.

    Raises:
        Misuse: it is negative.
    """
    if keep < 0:
        raise Misuse(f"keep must be at least 0 cycles, got {keep}")


def comparable(
    ends: Mapping[tuple[str, str], tuple[Position, int]], batch: BatchRange, generation: int
) -> dict[tuple[str, str], Position]:
    """Return *ends* without those, each with its generation, that *batch* need not start at.

    An ephemeral source starts again from its beginning in every generation.
    """
    ephemeral = {s.source for s in batch.sources if s.kind is SourceKind.EPHEMERAL}
    return {
        where: position
        for where, (position, since) in ends.items()
        if where[0] not in ephemeral or since == generation
    }


def next_positions(
    ends: Mapping[tuple[str, str], Position], batch: BatchRange
) -> dict[tuple[str, str], Position]:
    """Return the positions of the partitions of *batch* after its commit."""
    moved = {}
    for source in batch.sources:
        for partition, span in source.spans.items():
            known = ends.get((source.source, partition), Position(span.start))
            topic_id = source.topic_ids.get(partition.rpartition("/")[0], "")
            moved[source.source, partition] = Position(span.end, topic_id or known.topic_id)
    return moved


def as_json(what: str, value: Any) -> Any:
    """Return *value* as another process would read it back from JSON.

    Raises:
        Misuse: it is not JSON.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise Misuse(f"{what} is not JSON: {error}") from error


def _known(txn: SinkTxnId, known: AttemptRecord | None) -> AttemptRecord:
    if known is None:
        raise NeedsOperator(f"{txn}: the ledger does not know the attempt")
    return known


def _undecided(txn: SinkTxnId, known: AttemptRecord | None) -> AttemptRecord:
    record = _known(txn, known)
    if record.state.is_decided:
        raise NeedsOperator(f"{txn}: the attempt is {record.state} already")
    return record


def _refuse_ended(txn: SinkTxnId, committed: SinkTxnId | None, mark: SinkTxnId | None) -> None:
    if committed is not None:
        raise NeedsOperator(f"{txn}: the cycle is committed already, by {committed}")
    if mark is not None and txn.cycle <= mark.cycle:
        raise NeedsOperator(f"{txn}: the scope has finished {mark.cycle.label} already")
