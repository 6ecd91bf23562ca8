"""Attempts at cycles as plain values, the way every report shows them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from semel.pipeline.ledger import AttemptRecord
from semel.pipeline.source import BatchRange, SourceKind


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """One attempt; times are seconds since 1970."""

    cycle: str
    attempt: str
    state: str
    epoch: int
    rows: dict[str, int]
    """By sink."""

    reason: str
    """Why it was aborted."""

    read: list[str]
    """What the batch read, in words."""

    planned_at: float
    decided_at: float | None
    finished_at: float | None
    age_seconds: float
    """Since it was planned."""

    staging_seconds: float | None
    """From the plan to the decision."""

    committing_seconds: float | None
    """From the decision until every sink showed it."""


@dataclass(frozen=True, slots=True)
class SourceReport:
    """Where one source stands."""

    source: str
    ends: dict[str, int] = field(default_factory=dict)
    """By partition: the next record to read."""

    files: int | None = None
    """How many files are committed, where that was asked for."""


def attempt_report(record: AttemptRecord, now: float) -> AttemptReport:
    """Make the report of one attempt."""
    decided, finished = record.decided_at, record.finished_at
    return AttemptReport(
        cycle=record.txn.cycle.label,
        attempt=record.txn.attempt,
        state=record.state.value,
        epoch=record.epoch,
        rows=dict(record.rows),
        reason=record.reason,
        read=range_words(record.range),
        planned_at=record.planned_at,
        decided_at=decided,
        finished_at=finished,
        age_seconds=max(0.0, now - record.planned_at),
        staging_seconds=None if decided is None else max(0.0, decided - record.planned_at),
        committing_seconds=(
            None if decided is None or finished is None else max(0.0, finished - decided)
        ),
    )


def range_words(batch: BatchRange | None) -> list[str]:
    """Say what a batch read, one line per source."""
    if batch is None:
        return []
    lines = []
    for source in batch.sources:
        if source.kind is SourceKind.FILES:
            lines.append(f"source {source.source}: {len(source.paths)} files")
        elif source.spans:
            records = sum(max(0, span.end - span.start) for span in source.spans.values())
            ends = [f"{name} {s.start}..{s.end}".strip() for name, s in source.spans.items()]
            more = f" and {len(ends) - 4} more" if len(ends) > 4 else ""
            shown = ", ".join(ends[:4])
            lines.append(f"source {source.source}: {records} offsets ({shown}{more})")
        else:
            lines.append(f"source {source.source}: {source.raw or 'nothing'}")
    return lines


def by_state(records: Iterable[AttemptRecord]) -> dict[str, int]:
    """Count attempts by state, with a key for every open state."""
    counts = {"planned": 0, "prepared": 0, "committed": 0}
    for record in records:
        counts[record.state.value] = counts.get(record.state.value, 0) + 1
    return counts
