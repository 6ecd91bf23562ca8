"""What it would mean to go on with a checkpoint, in words, before anything is changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from semel.cli.reports.ownership import OwnerReport, owner_report
from semel.pipeline.adopt import Adoptable
from semel.pipeline.ledger import Ledger
from semel.pipeline.positions import Position, Positions
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


@dataclass(frozen=True, slots=True)
class PositionChange:
    """One partition, before and after."""

    source: str
    partition: str
    before: int | None
    after: int | None
    means: str
    """continues, overlap, gap, new or dropped."""

    words: str


@dataclass(frozen=True, slots=True)
class AdoptionPlan:
    """What `semel adopt` is about to do."""

    scope: str
    ledger: str
    checkpoint: str
    checkpoint_id: str
    first_batch: int
    """The first batch that will be semel's."""

    is_stateful: bool
    owner: OwnerReport
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
class AdoptReport:
    """The answer to `semel adopt`."""

    adopted: bool
    who: str
    why: str
    generation: int | None
    """The new generation's number; null if it was only looked at."""

    plan: AdoptionPlan

    @property
    def needs_attention(self) -> bool:
        """An adoption that was asked for and done needs none."""
        return False


def adoption_plan(
    ledger: Ledger, scope: Scope, path: str, checkpoint: ReadsCheckpoint, found: Adoptable
) -> AdoptionPlan:
    """Compare where *checkpoint* would go on with where the ledger ends."""
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
    return AdoptionPlan(
        scope=str(scope),
        ledger=ledger.url,
        checkpoint=path,
        checkpoint_id=found.checkpoint,
        first_batch=found.first_batch,
        is_stateful=found.is_stateful,
        owner=owner_report(record),
        generation_before=generations[-1].number if generations else 0,
        is_known=bool(generations) and generations[-1].checkpoint == found.checkpoint,
        positions=list(changes(positions, found.positions)),
        files_repeated=again,
        open_cycles=[
            f"{attempt.txn.cycle.label} is {attempt.state}"
            for attempt in ledger.open_attempts(scope)
        ],
    )


def changes(
    before: Positions, after: Mapping[tuple[str, str], Position]
) -> Iterable[PositionChange]:
    """Say for every partition what adopting *after* means."""
    for where in sorted({*before.ends, *after}):
        old, new = before.ends.get(where), after.get(where)
        was, will = (old.end if old else None), (new.end if new else None)
        if was is None:
            means, words = "new", f"starts at {will}"
        elif will is None:
            means, words = "dropped", f"its end {was} is forgotten: the checkpoint does not read it"
        elif will < was:
            means = "overlap"
            words = f"{was - will} offsets, {will} to {was}, are processed a second time"
        elif will > was:
            means = "gap"
            words = f"{will - was} offsets, {was} to {will}, are never processed"
        else:
            means, words = "continues", "goes on where the ledger ends"
        yield PositionChange(where[0], where[1], was, will, means, words)


def _next_range(checkpoint: ReadsCheckpoint, found: Adoptable) -> BatchRange:
    planned = checkpoint.last_planned
    if planned is None or planned < found.first_batch:
        return BatchRange()
    return checkpoint.range(found.first_batch)
