"""The completeness audit, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from semel.operate.completeness import PartitionAudit, Stretch, is_known


@dataclass(frozen=True, slots=True)
class StretchReport:
    """Neighbouring offsets, both ends included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """What became of a partition's offsets."""

    partition: str
    complete: bool
    first: int
    until: int
    """The first offset behind those that must be accounted for."""

    total: int
    counts: dict[str, int]
    """Each offset once: handled, skipped, deleted, dead, parked, waiting, duplicate, refused,
    hole."""

    missing: list[StretchReport]
    """Offsets that are not accounted for."""

    lost: list[StretchReport]
    """Those of them whose messages waited, were parked or dead, and are nowhere any more."""

    holes: list[StretchReport]
    """Offsets without a record: markers, compaction."""

    holes_checked: bool
    """The broker confirmed the holes."""

    repeated: int
    """Offsets that came more than once."""

    not_reached: int


@dataclass(frozen=True, slots=True)
class CompletenessReport:
    """The answer to `semel audit completeness`."""

    database: str
    consumer: str
    known: bool
    """Whether anything was ever noted for a consumer of this name."""

    partitions: list[PartitionReport]

    @property
    def needs_attention(self) -> bool:
        """Tell whether an offset is missing, or nothing is known at all."""
        return not self.known or not all(one.complete for one in self.partitions)


def completeness_report(
    database: str, consumer: str, audits: Sequence[PartitionAudit]
) -> CompletenessReport:
    """Put an audit into a JSON document."""
    partitions = [_partition(one) for one in audits]
    return CompletenessReport(database, consumer, is_known(audits), partitions)


def _partition(audit: PartitionAudit) -> PartitionReport:
    return PartitionReport(
        str(audit.partition),
        audit.is_complete,
        audit.first,
        audit.until,
        audit.total,
        {standing.value: number for standing, number in audit.counts.items()},
        _stretches(audit.missing),
        _stretches(audit.lost),
        _stretches(audit.holes),
        audit.checked_holes,
        audit.repeated,
        audit.not_reached,
    )


def _stretches(stretches: Iterable[Stretch]) -> list[StretchReport]:
    return [StretchReport(one.first, one.last) for one in stretches]
