"""The positions: where the committed records of each source partition end.

The positions decide, not the batch number: they survive a deleted checkpoint
and show which records a new one would repeat or skip.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from semel.pipeline.source import BatchRange, SourceKind, SourceRange


@dataclass(frozen=True, slots=True)
class Position:
    """Where one partition's committed records end."""

    end: int
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class Positions:
    """The position of every partition of every source; for file sources, the committed paths."""

    ends: Mapping[tuple[str, str], Position] = field(default_factory=dict)
    """By (source, partition)."""

    paths: Mapping[str, Collection[str]] = field(default_factory=dict)
    """By source: those of the requested paths that are committed already."""

    @property
    def is_empty(self) -> bool:
        """Whether no record was ever committed."""
        return not self.ends and not any(self.paths.values())


def discontinuities(positions: Positions, batch: BatchRange) -> list[str]:
    """Describe every place where *batch* does not start where *positions* end.

    A partition that is new to the ledger may start anywhere.
    """
    return [words for source in batch.sources for words in _of_source(positions, source)]


def _of_source(positions: Positions, source: SourceRange) -> list[str]:
    found = []
    for partition, span in source.spans.items():
        where = f"source {source.source} {partition}".rstrip()
        if span.end < span.start:
            found.append(f"{where}: the range ends at {span.end}, before its start {span.start}")
            continue
        known = positions.ends.get((source.source, partition))
        if known is None:
            continue
        topic_id = source.topic_ids.get(partition.rpartition("/")[0], "")
        if known.topic_id and not topic_id:
            found.append(
                f"{where}: the topic's id cannot be read here, so it is unknown whether it is "
                f"still the topic that was read before"
            )
        if known.topic_id and topic_id and known.topic_id != topic_id:
            found.append(f"{where}: the topic was deleted and created again (its id changed)")
        elif span.start < known.end:
            found.append(f"{where}: overlap, {span.start} to {known.end} is committed already")
        elif span.start > known.end:
            found.append(f"{where}: gap, {known.end} to {span.start} was never committed")
    if source.kind is SourceKind.FILES:
        again = sorted(set(source.paths) & set(positions.paths.get(source.source, ())))
        found += [f"source {source.source}: {path} is committed already" for path in again]
        twice = sorted(path for path, times in Counter(source.paths).items() if times > 1)
        found += [f"source {source.source}: {path} is in the batch twice" for path in twice]
    return found
