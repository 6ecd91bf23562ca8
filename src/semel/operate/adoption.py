"""Adoption: an operator decides that a checkpoint goes on, though the ledger ends elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from semel.errors import NeedsOperator
from semel.lease import Owner, Takeover
from semel.operate.status import ScopeOwner, owner_of
from semel.pipeline import generation as engine
from semel.pipeline.generation import Adoptable
from semel.pipeline.ledger import Ledger
from semel.pipeline.source import BatchRange, SourceKind
from semel.pipeline.txn import Scope


class ReadsCheckpoint(Protocol):
    """The part of `semel.spark.checkpoint.Checkpoint` that is needed here."""

    @property
    def last_finished(self) -> int | None:
        """The highest batch that Spark has marked as done."""
        ...

    @property
    def last_planned(self) -> int | None:
        """The highest batch that Spark has begun."""
        ...

    def adoptable(self) -> Adoptable:
        """Say where the checkpoint would go on."""
        ...

    def leave_out(self, committed: Mapping[str, Collection[str]]) -> int:
        """Make a new checkpoint of file sources go on behind the committed files."""
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
    RECREATED = "recreated"
    """The topic was deleted and created again; needs --topic-recreated."""

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

    belongs_to: str | None = None
    """The other scope whose checkpoint it is; then it cannot be adopted."""


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
    changed = engine.changed_topics(ledger, scope)
    owner = engine.owner_of_checkpoint(ledger, scope, found.checkpoint)
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
            _change(
                *where,
                before.get(where),
                after.get(where),
                changed.get(where[1].rpartition("/")[0]),
            )
            for where in sorted({*before, *after})
        ],
        files_repeated=again,
        open_cycles=[
            f"{attempt.txn.cycle.label} is {attempt.state}"
            for attempt in ledger.open_attempts(scope)
        ],
        belongs_to=str(owner) if owner else None,
    )


def leave_out(
    ledger: Ledger,
    plan: AdoptionPlan,
    checkpoint: ReadsCheckpoint,
    takeover: Takeover = Takeover.WAIT,
) -> Adoptable:
    """Write into a new checkpoint that the committed files are done; return where it goes on.

    For a checkpoint that was lost: the query, started once with a new one, was refused.

    Raises:
        NeedsOperator: the checkpoint is not new, has state or other sources, or belongs to
            another scope; or cycles are open.
        LeaseHeld: the pipeline is running.
    """
    if plan.open_cycles or plan.belongs_to:
        found = plan.open_cycles[0] if plan.open_cycles else f"it belongs to {plan.belongs_to}"
        raise NeedsOperator(f"{plan.scope}: the checkpoint was not changed: {found}")
    lease = ledger.acquire(plan.scope, Owner.here(), engine.ADOPT_LEASE_SECONDS, takeover)
    try:
        if checkpoint.last_finished is None:  # otherwise it was done before a crash
            checkpoint.leave_out(ledger.positions(plan.scope).paths)
    finally:
        ledger.release(lease)
    return checkpoint.adoptable()


def adopt(
    ledger: Ledger,
    plan: AdoptionPlan,
    found: Adoptable,
    *,
    who: str,
    why: str,
    state_lost: bool = False,
    repeat_files: bool = False,
    topic_recreated: bool = False,
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
        topic_recreated=topic_recreated,
        takeover=takeover,
    )
    return Adoption(True, who, why, generation.number, plan)


def _change(
    source: str, partition: str, was: int | None, will: int | None, ids: list[str] | None = None
) -> PositionChange:
    if ids is not None and was is not None and will is not None:
        means = Means.RECREATED
        words = f"the topic was deleted and created again (its id was {ids[0]} and is {ids[1]}): "
        words += (
            f"offsets 0 to {will} of the new one are never processed; to read it from its "
            f"beginning, start a new checkpoint with startingOffsets earliest and adopt that"
            if will
            else "goes on at the beginning of the new one"
        )
    elif was is None:
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
