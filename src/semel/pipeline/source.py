"""What a batch read: per source, the range between two durable positions.

A source is identified by its place in the query, as in Spark.  An offset is the
next record to read, as in Kafka: a span holds ``start <= offset < end``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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
