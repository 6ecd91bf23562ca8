"""What a batch read, per source, and whether it starts where the committed records end.

A source is identified by its place in the query, as in Spark.  An offset is the
next record to read, as in Kafka: a span holds ``start <= offset < end``.

The positions decide, not the batch number: they survive a deleted checkpoint
and show which records a new one would repeat or skip.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class SourceKind(StrEnum):
    """How a source's progress is recorded."""

    OFFSETS = "offsets"
    """Partitions with offsets that survive the checkpoint (Kafka)."""

    FILES = "files"
    """A list of paths."""

    EPHEMERAL = "ephemeral"
    """Positions that are useless without their checkpoint (rate, sockets)."""

    SIGNAL = "signal"
    """No rows at all: it only says that a batch is due, so nothing continues it."""


@dataclass(frozen=True, slots=True)
class Span:
    """One partition's part of a batch."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SourceRange:
    """What one batch read from one source."""

    source: str
    kind: SourceKind
    spans: Mapping[str, Span] = field(default_factory=dict)
    """By partition; Kafka's are called ``topic/partition``."""

    paths: tuple[str, ...] = ()
    """The files of this batch, for a file source."""

    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """Kafka's id of each topic; a topic that is created again has another id."""

    raw: str = ""
    """The positions as the source wrote them, if semel does not interpret them."""

    def to_json(self) -> dict[str, Any]:
        """Write the range as plain values, in one canonical order."""
        return {
            "source": self.source,
            "kind": self.kind.value,
            "spans": {name: [s.start, s.end] for name, s in sorted(self.spans.items())},
            "paths": sorted(self.paths),
            "topic_ids": dict(sorted(self.topic_ids.items())),
            "raw": self.raw,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SourceRange:
        """Read what `to_json` wrote."""
        return cls(
            source=fields["source"],
            kind=SourceKind(fields["kind"]),
            spans={name: Span(*ends) for name, ends in fields["spans"].items()},
            paths=tuple(fields["paths"]),
            topic_ids=dict(fields["topic_ids"]),
            raw=fields["raw"],
        )


@dataclass(frozen=True, slots=True)
class BatchRange:
    """What one batch read from all its sources."""

    sources: tuple[SourceRange, ...] = ()

    @property
    def digest(self) -> str:
        """A hash of the range: one batch id with two digests means two different batches.

        Topic ids are not part of it: they come from the broker, which may not answer.
        """
        bare = [replace(source, topic_ids={}).to_json() for source in self.sources]
        return hashlib.sha256(json.dumps(bare, separators=(",", ":")).encode()).hexdigest()

    @property
    def paths(self) -> dict[str, tuple[str, ...]]:
        """The files of the batch, by source."""
        return {s.source: s.paths for s in self.sources if s.kind is SourceKind.FILES}

    def to_json(self) -> str:
        """Write the range as canonical JSON."""
        return json.dumps([s.to_json() for s in self.sources], separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BatchRange:
        """Read what `to_json` wrote."""
        return cls(tuple(SourceRange.from_json(fields) for fields in json.loads(text)))

    @classmethod
    def of_offsets(cls, spans: Mapping[str, tuple[int, int]], source: str = "0") -> BatchRange:
        """Return the range of a single source with offsets, from (start, end) by partition."""
        named = {name: Span(start, end) for name, (start, end) in spans.items()}
        return cls((SourceRange(source, SourceKind.OFFSETS, named),))


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
