"""The way of ordinary messages whose rows Spark makes: columns instead of objects for each.

    whole routes ──▶ ids, keys, hashes ──▶ claims ──▶ new: claims, and rows that are picked
                           │                 │        repeated: only counted
                           └─ anything else ─┴──────▶ the whole route goes to the pass

A route with one message that is not ordinary goes to the pass with all of its messages, because
that one can make the others wait.  What is made here is what the pass would make.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from semel.arrow.changes import alike
from semel.codec import (
    FromCoordinates,
    FromHeader,
    FromKey,
    FromPayload,
    JsonCodec,
    Place,
    RawCodec,
    Undecodable,
)
from semel.message import RESERVED, Coordinates, Message, Record, digest_of, text_of
from semel.messaging.changes import MessageChange, Op
from semel.messaging.handle.claims import ClaimState
from semel.messaging.outcome import Handled, Outcome, Skipped
from semel.messaging.records import stored_id
from semel.spark.messages.handling import Arrival, MessagePass, PassSettings

if TYPE_CHECKING:
    import pyarrow as pa

FAILURE: Final = "semel_failure"
"""The column with the reason why a message cannot be handled, where Spark makes the rows."""

# Codecs that need no headers, and whose values are bytes or those of JSON.
_CODECS: Final = (JsonCodec, RawCodec)
_SCALARS: Final = frozenset((str, int, float, bool, type(None)))

_OTHER: Any = object()
"""A value that only the pass can read."""


def are_possible(settings: PassSettings) -> bool:
    """Return whether a consumer's messages may be ordinary."""
    reading = settings.reading
    return (
        settings.handler is None
        and not settings.settings.versioned
        and reading.version_from is None
        and reading.model is None
        and type(reading.codec) in _CODECS
    )


@dataclass(frozen=True, slots=True)
class Ordinary:
    """What the ordinary messages of one database make."""

    picked: Sequence[int]
    """The places of the rows that were handled, in order."""

    claims: pa.RecordBatch | None
    counted: Sequence[tuple[Arrival, Message, Outcome, int]]
    """One message for all that have the same topic, type and outcome, and their number."""

    left: Sequence[int]
    """The places of the rows that are not ordinary, in order."""


class Columns:
    """The rows of whole routes, as columns."""

    def __init__(self, settings: PassSettings, rows: pa.Table) -> None:
        self._of, self._rows = settings, rows
        self._routes = self._column("route")
        self._topics, self._partitions = self._column("topic"), self._column("partition")
        self._offsets = self._column("offset")
        at = zip(self._topics, self._partitions, self._offsets, strict=True)
        self._sources = [f"{topic}/{partition}/{offset}" for topic, partition, offset in at]
        values = self._column("value")
        self._digests, self._payloads = [*map(digest_of, values)], [*map(self._decoded, values)]
        reading, found = settings.reading, self._found
        self._ids = [_plain(one) for one in found(reading.id_from)]
        self._keys = [_plain(one) for one in found(reading.key_from)]
        self._types = [
            one if type(one) is str else "" if one is None else _OTHER
            for one in found(reading.type_from)
        ]
        self._first: dict[str, int] = {}
        """By id: the place of its first row."""

        self._others = set(self._mixed())
        """Routes with a row that is not ordinary, before the database is asked."""

        for flags in self._reasons():
            self._others.update(compress(self._routes, flags))
        if self._are_elsewhere():
            self._others.update(self._routes)

    def of(self, passed: MessagePass, number: int = 0, shards: int = 1) -> Ordinary:
        """Return what the rows of one database, by its number, make beside its pass."""
        places: Sequence[int] = range(len(self._routes))
        if shards > 1:
            hashes = [crc32((route or "").encode()) for route in self._routes]
            places = [place for place in places if hashes[place] % shards == number]
        others, routes, ids = set(self._others), self._routes, self._ids
        if passed.stuck:
            others.update(route for route in routes if route in passed.stuck)
        asked = sorted({ids[place] for place in places if routes[place] not in others})
        known = passed.reader.claims(asked) if asked else {}
        for one, claim in known.items():
            place = self._first[one]
            is_same = self._digests[place].startswith(claim.payload_hash)
            if not is_same or claim.state is not ClaimState.COMPLETED:
                others.add(routes[place])
        left = [place for place in places if routes[place] in others]
        ordinary = [place for place in places if routes[place] not in others]
        picked = [p for p in ordinary if self._first[ids[p]] == p and ids[p] not in known]
        repeated = sorted({*ordinary} - {*picked})
        counted = [*self._counted(passed, picked, Handled())]
        counted += self._counted(passed, repeated, Skipped())
        return Ordinary(picked, self._claims(picked), counted, left)

    def _column(self, name: str) -> list[Any]:
        return self._rows.column(name).to_pylist()  # type: ignore[no-any-return]

    def _decoded(self, value: bytes | None) -> Any:
        try:
            return None if value is None else self._of.reading.codec.decode(value, {})
        except Undecodable:
            return _OTHER

    def _found(self, place: Place) -> Iterable[Any]:
        match place:
            case FromKey():
                return (None if key is None else text_of(key) for key in self._column("key"))
            case FromHeader(name):
                return self._header(name)
            case FromCoordinates():
                return self._sources
            case FromPayload(path):
                return (_field(payload, path.split(".")) for payload in self._payloads)

    def _header(self, name: str) -> list[str | None]:
        import pyarrow.compute as pc

        found: list[str | None] = [None] * len(self._routes)
        before = 0
        for chunk in self._rows.column("headers").chunks:
            pairs, places = chunk.flatten(), pc.list_parent_indices(chunk)
            named = pc.equal(pc.struct_field(pairs, "key"), name)
            values = pc.struct_field(pairs, "value").filter(named).to_pylist()
            # A header that was sent several times has its last value.
            for place, value in zip(places.filter(named).to_pylist(), values, strict=True):
                found[before + place] = text_of(value or b"")
            before += len(chunk)
        return found

    def _reasons(self) -> Iterator[Iterable[bool]]:
        """Yield, for each reason not to be ordinary, which rows have it."""
        rows = self._rows
        for name in ("topic", "partition", "offset", "route"):
            yield rows.column(name).is_null().to_pylist()
        yield rows.column(FAILURE).is_valid().to_pylist()
        for found in (self._payloads, self._ids, self._keys, self._types):
            yield (one is _OTHER for one in found)
        yield (not one or (one is not _OTHER and one.startswith(RESERVED)) for one in self._ids)
        reading = self._of.reading
        for place in (reading.schema_version_from, reading.correlation_from):
            if isinstance(place, FromPayload):
                yield (type(one) not in _SCALARS for one in self._found(place))
        yield rows.column("waiting").is_valid().to_pylist()

    def _are_elsewhere(self) -> bool:
        """Return whether Spark reads another key than Python; then the pass raises."""
        read = zip(self._routes, self._keys, self._ids, strict=True)
        return any(
            route != (one if key is None else key)
            for route, key, one in read
            if route not in self._others
        )

    def _mixed(self) -> Iterator[str]:
        """Yield the routes with an id that comes with another payload, or in another route, too."""
        routes, digests, ids = self._routes, self._digests, list(self._ids)
        for place, waiting in enumerate(self._column("waiting")):
            if waiting is not None:
                # As it is stored: where that is not the id itself, no ordinary one is the same.
                ids[place] = json.loads(waiting)["message_id"]
        for place, one in enumerate(ids):
            first = self._first.setdefault(one, place)
            if first != place and (routes[first], digests[first]) != (
                routes[place],
                digests[place],
            ):
                yield from (routes[first], routes[place])

    def _claims(self, picked: Sequence[int]) -> pa.RecordBatch | None:
        if not picked or not self._of.keeps_claims:
            return None
        op = Op.LEAN if self._of.is_lean else Op.CLAIM
        claim = MessageChange(op, state=ClaimState.COMPLETED, attempts=1)
        columns = {
            "message_id": self._ids,
            "key": self._keys,
            "payload_hash": self._digests,
            "source": self._sources,
        }
        own = {name: [column[place] for place in picked] for name, column in columns.items()}
        return alike(claim, own, len(picked))

    def _counted(
        self, passed: MessagePass, places: Sequence[int], outcome: Outcome
    ) -> Iterator[tuple[Arrival, Message, Outcome, int]]:
        """Count rows for an audit, and yield one for all that are the same in metrics."""
        offsets: dict[tuple[str, int], list[int]] = {}
        for place in places:
            at = self._topics[place], self._partitions[place]
            offsets.setdefault(at, []).append(self._offsets[place])
        for (topic, partition), some in offsets.items():
            passed.count(topic, partition, outcome, some)
        kinds = Counter((self._topics[place], self._types[place]) for place in places)
        for (topic, kind), times in kinds.items():
            source = Coordinates(topic, 0, 0)
            message = Message("alike", None, type=kind, source=source)
            yield Arrival(Record(source, None)), message, outcome, times


def _plain(found: Any) -> Any:
    """Return an id or a key that is stored as it is; None if there is none."""
    if found is None:
        return None
    if type(found) is int:
        found = str(found)
    is_plain = type(found) is str and stored_id(found) == found
    return found if is_plain else _OTHER


def _field(payload: Any, steps: Sequence[str]) -> Any:
    # Values of JSON, and bytes, have no other fields.
    for step in steps:
        payload = payload.get(step) if type(payload) is dict else None
    return payload
