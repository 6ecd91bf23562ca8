"""Adoption: an operator accepts a checkpoint that the ledger would refuse."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from semel.errors import NeedsOperator
from semel.lease import Owner, Takeover
from semel.pipeline.ledger import Generation, Ledger
from semel.pipeline.positions import Position
from semel.pipeline.txn import CycleId, Scope

ADOPT_LEASE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Adoptable:
    """Where a checkpoint would continue."""

    checkpoint: str
    first_batch: int
    """The first batch that semel will run."""

    positions: Mapping[tuple[str, str], Position]
    """Where that batch starts, by (source, partition)."""

    is_stateful: bool

    paths: Mapping[str, Collection[str]] = field(default_factory=dict)
    """The files that batches before it have read, by source."""


def adopt(
    ledger: Ledger,
    scope: Scope,
    found: Adoptable,
    *,
    who: str,
    why: str,
    state_lost: bool = False,
    repeat_files: bool = False,
    takeover: Takeover = Takeover.WAIT,
) -> Generation:
    """Make *found* the scope's next generation and its start the scope's positions.

    Files that the checkpoint has read count as committed from now on.  *repeat_files*
    forgets all others, so that a file source may read them again.  Records who did it and why.

    Raises:
        LeaseHeld: the pipeline is running.
        NeedsOperator: something must be settled first, or the loss of state accepted.
    """
    earlier = ledger.generations(scope)
    new = bool(earlier) and earlier[-1].checkpoint != found.checkpoint
    if new and found.is_stateful and not state_lost:
        raise NeedsOperator(
            f"{scope}: the query keeps state, and checkpoint {found.checkpoint} does not have the "
            f"state of generation {earlier[-1].number}; accept the loss with --state-lost"
        )
    lease = ledger.acquire(scope, Owner.here(), ADOPT_LEASE_SECONDS, takeover)
    try:
        open_cycles = ledger.open_attempts(scope)
        if open_cycles:
            raise NeedsOperator(
                f"{scope}: cycle {open_cycles[0].txn.cycle} is {open_cycles[0].state}; settle it "
                f"with `semel recover` before adopting a checkpoint"
            )
        _refuse_repetition(ledger, scope, found)
        known = {} if repeat_files else ledger.positions(scope).paths
        paths = {
            source: {*known.get(source, ()), *found.paths.get(source, ())}
            for source in {*known, *found.paths}
        }
        generation = ledger.adopt_generation(
            lease, found.checkpoint, found.first_batch, found.positions, paths
        )
        detail = {
            "checkpoint": found.checkpoint,
            "generation": generation.number,
            "first_batch": found.first_batch,
            "positions": {f"{s} {p}": at.end for (s, p), at in found.positions.items()},
            "state_lost": state_lost,
            "repeat_files": repeat_files,
        }
        ledger.record_act(scope, who, "adopt", why, detail)
    finally:
        ledger.release(lease)
    return generation


def _refuse_repetition(ledger: Ledger, scope: Scope, found: Adoptable) -> None:
    """Refuse if the ledger has committed the checkpoint's next batch: a start marks it done."""
    for generation in ledger.generations(scope)[-1:]:
        if generation.checkpoint != found.checkpoint:
            continue
        cycle = CycleId(scope, generation.number, found.first_batch)
        record = ledger.scope_record(scope)
        mark = record.mark if record else None
        if ledger.committed(cycle) or (mark is not None and cycle <= mark.cycle):
            raise NeedsOperator(
                f"{scope}: cycle {cycle} is committed, and Spark has not marked it as done yet: "
                f"start the query, which skips it; adopting would repeat it"
            )
