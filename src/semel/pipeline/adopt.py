"""An operator's word that a checkpoint may go on, whatever the ledger would say by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from semel.errors import NeedsOperator
from semel.lease import Owner, Takeover
from semel.pipeline.ledger import Generation, Ledger
from semel.pipeline.positions import Position
from semel.pipeline.txn import Scope

ADOPT_LEASE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Adoptable:
    """What a checkpoint says about where it would go on."""

    checkpoint: str
    first_batch: int
    """The first batch that will be semel's."""

    positions: Mapping[tuple[str, str], Position]
    """Where that batch starts, by (source, partition)."""

    is_stateful: bool


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

    Records who and why.  *repeat_files* forgets which files were committed, so that a
    file source may read them again.

    Raises:
        LeaseHeld: the pipeline is running.
        NeedsOperator: something must be settled first, or the loss of state accepted.
    """
    earlier = ledger.generations(scope)
    new = bool(earlier) and earlier[-1].checkpoint != found.checkpoint
    if new and found.is_stateful and not state_lost:
        raise NeedsOperator(
            f"{scope}: the query keeps state, and checkpoint {found.checkpoint} does not have "
            f"what generation {earlier[-1].number} kept; accept that with --state-lost"
        )
    lease = ledger.acquire(scope, Owner.here(), ADOPT_LEASE_SECONDS, takeover)
    try:
        open_cycles = ledger.open_attempts(scope)
        if open_cycles:
            raise NeedsOperator(
                f"{scope}: cycle {open_cycles[0].txn.cycle} is {open_cycles[0].state}; settle it "
                f"with `semel recover` before adopting a checkpoint"
            )
        generation = ledger.adopt_generation(
            lease, found.checkpoint, found.first_batch, found.positions, repeat_files
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
