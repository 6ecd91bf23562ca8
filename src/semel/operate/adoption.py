"""Adoption: an operator decides that a checkpoint goes on, though the ledger ends elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from semel.lease import Takeover
from semel.operate.status import ScopeOwner, owner_of
from semel.pipeline import generation as engine
from semel.pipeline.generation import Adoptable
from semel.pipeline.ledger import Ledger
from semel.pipeline.source import BatchRange, SourceKind
from semel.pipeline.txn import Scope


class ReadsCheckpoint(Protocol):
    """The part of `semel.spark.checkpoint.Checkpoint` that is needed here."""

    @property
    def last_planned(self) -> int | None:
        """The highest batch that Spark has begun."""
        ...

    def adoptable(self) -> Adoptable:
        """Say where the checkpoint would go on."""
        ...

    def range(self, batch: int) -> BatchRange:
        """Say what a batch reads."""
        ...


class Means(StrEnum):
    """What adopting a checkpoint means for one partition."""

    CONTINUES = "continues"
    OVERLAP = "overlap"
    """Records are processed a second time."""

    GAP = "gap"
    """Records are never processed."""

    NEW = "new"
    DROPPED = "dropped"
    """The checkpoint does not read the partition, and its end is forgotten."""


@dataclass(frozen=True, slots=True)
class PositionChange:
    """One partition, before and after."""

    source: str
    partition: str
    before: int | None
    after: int | None
    means: Means
    words: str
    """The same in a sentence."""


@dataclass(frozen=True, slots=True)
class AdoptionPlan:
    """The answer of `plan_adoption`: what going on with the checkpoint means."""

    scope: Scope
    ledger: str
    checkpoint: str
    checkpoint_id: str
    first_batch: int
    """The first batch that will be semel's."""

    is_stateful: bool
    owner: ScopeOwner
    generation_before: int
    """0: the scope has none yet."""

    is_known: bool
    """The checkpoint is the one in use already."""

    positions: list[PositionChange]
    files_repeated: list[str]
    """Files of the next batch that are committed already."""

    open_cycles: list[str]
    """Cycles that must be settled first."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """The answer of `adopt`."""

    adopted: bool
    who: str
    why: str
    generation: int | None
    """The new generation's number; null if it was only looked at."""

    plan: AdoptionPlan


def plan_adoption(
    ledger: Ledger, scope: Scope, path: str, checkpoint: ReadsCheckpoint, found: Adoptable
) -> AdoptionPlan:
    """Compare where *checkpoint* would go on with where the ledger ends; changes nothing."""
    record = ledger.scope_record(scope)
    generations = ledger.generations(scope)
    upcoming = _next_range(checkpoint, found)
    positions = ledger.positions(scope, upcoming)
    again = [
        f"source {source.source}: {name}"
        for source in upcoming.sources
        if source.kind is SourceKind.FILES
        for name in sorted(set(source.paths) & set(positions.paths.get(source.source, ())))
    ]
    before = {where: position.end for where, position in positions.ends.items()}
    after = {where: position.end for where, position in found.positions.items()}
    return AdoptionPlan(
        scope=scope,
        ledger=ledger.url,
        checkpoint=path,
        checkpoint_id=found.checkpoint,
        first_batch=found.first_batch,
        is_stateful=found.is_stateful,
        owner=owner_of(record),
        generation_before=generations[-1].number if generations else 0,
        is_known=bool(generations) and generations[-1].checkpoint == found.checkpoint,
        positions=[
            _change(*where, before.get(where), after.get(where))
            for where in sorted({*before, *after})
        ],
        files_repeated=again,
        open_cycles=[
            f"{attempt.txn.cycle.label} is {attempt.state}"
            for attempt in ledger.open_attempts(scope)
        ],
    )


def adopt(
    ledger: Ledger,
    plan: AdoptionPlan,
    found: Adoptable,
    *,
    who: str,
    why: str,
    state_lost: bool = False,
    repeat_files: bool = False,
    takeover: Takeover = Takeover.WAIT,
) -> Adoption:
    """Open the next generation with the checkpoint that *found* describes.

    The ledger keeps who and why.  See `semel.pipeline.generation.adopt` for the options.

    Raises:
        NeedsOperator, LeaseHeld: cycles are open, or the owner is alive.
    """
    generation = engine.adopt(
        ledger,
        plan.scope,
        found,
        who=who,
        why=why,
        state_lost=state_lost,
        repeat_files=repeat_files,
        takeover=takeover,
    )
    return Adoption(True, who, why, generation.number, plan)


def _change(source: str, partition: str, was: int | None, will: int | None) -> PositionChange:
    if was is None:
        means, words = Means.NEW, f"starts at {will}"
    elif will is None:
        means, words = Means.DROPPED, f"its end {was} is forgotten: the checkpoint does not read it"
    elif will < was:
        means = Means.OVERLAP
        words = f"{was - will} offsets, {will} to {was}, are processed a second time"
    elif will > was:
        means, words = Means.GAP, f"{will - was} offsets, {was} to {will}, are never processed"
    else:
        means, words = Means.CONTINUES, "goes on where the ledger ends"
    return PositionChange(source, partition, was, will, means, words)


def _next_range(checkpoint: ReadsCheckpoint, found: Adoptable) -> BatchRange:
    planned = checkpoint.last_planned
    if planned is None or planned < found.first_batch:
        return BatchRange()
    return checkpoint.range(found.first_batch)
