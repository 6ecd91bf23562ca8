"""A message, the record it travels in, and where its id may come from.

    Record   what a broker delivered: bytes, headers, coordinates
    Message  what a handler gets: an id, a payload, and where it came from

An id comes only from a declared place: a header, a field of the payload, or the
coordinates.  A framework's own message id changes between deliveries, so a claim
on it would let a message be handled twice.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from decimal import Decimal
from enum import Enum
from typing import Any, Final, TypeAlias
from uuid import UUID

from semel.errors import Misuse

Pairs: TypeAlias = tuple[tuple[str, bytes | None], ...]
"""Headers as they were sent: a name may repeat, and null differs from empty."""


class Headers(dict[str, bytes]):
    """Headers that a mapping alone cannot hold: a name that repeats, or a null value.

    As a mapping, a repeated name has its last value, and null is empty.  Use `headers_from` to
    make headers, and `pairs_of` to send them on.
    """

    def __init__(self, pairs: Iterable[tuple[str, bytes | None]]) -> None:
        self.pairs: Pairs = tuple(pairs)
        """All of them, in the order in which they were sent."""

        super().__init__((name, value or b"") for name, value in self.pairs)


def headers_from(pairs: Iterable[tuple[str, bytes | None]]) -> Mapping[str, bytes]:
    """Return headers that keep every pair; an ordinary mapping where that suffices."""
    found = Headers(pairs)
    is_plain = len(found) == len(found.pairs) and all(v is not None for _, v in found.pairs)
    return dict(found) if is_plain else found


def pairs_of(headers: Mapping[str, bytes]) -> Pairs:
    """Return the pairs of headers, as they were sent."""
    return headers.pairs if isinstance(headers, Headers) else tuple(headers.items())


def headers_to_text(headers: Mapping[str, bytes]) -> str:
    """Return headers as text for a column; empty if there are none."""
    if not headers:
        return ""
    texts: object = {name: _b64(value) for name, value in headers.items()}
    if isinstance(headers, Headers):
        texts = [[name, None if value is None else _b64(value)] for name, value in headers.pairs]
    return json.dumps(texts, separators=(",", ":"))


def headers_from_text(text: str) -> Mapping[str, bytes]:
    """Read what `headers_to_text` wrote."""
    if not text:
        return {}
    read = json.loads(text)
    if isinstance(read, dict):
        return {name: b64decode(value) for name, value in read.items()}
    return Headers((name, None if value is None else b64decode(value)) for name, value in read)


def _b64(value: bytes) -> str:
    return b64encode(value).decode("ascii")


@dataclass(frozen=True, slots=True, order=True)
class Partition:
    """One partition of a topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"


@dataclass(frozen=True, slots=True, order=True)
class Coordinates:
    """The position of a record in its topic."""

    topic: str
    partition: int
    offset: int

    @property
    def place(self) -> Partition:
        """The partition, without the offset."""
        return Partition(self.topic, self.partition)

    def __str__(self) -> str:
        return f"{self.topic}/{self.partition}/{self.offset}"


@dataclass(frozen=True, slots=True)
class Record:
    """What a broker delivered, not decoded."""

    at: Coordinates
    value: bytes | None
    key: bytes | None = None
    headers: Mapping[str, bytes] = field(default_factory=dict)
    """A header that was sent several times has its last value; `pairs_of` returns them all."""

    timestamp: float = 0.0
    """Seconds since 1970, from the broker."""


UNREADABLE: Final = "unreadable:"
CONFLICT: Final = "conflict:"
RESERVED: Final = (UNREADABLE, CONFLICT)
"""The prefixes of ids that semel generates for dead letters; a producer must not use them."""


def id_text(found: object) -> str:
    """Return an id as text; whole numbers and UUIDs are ids, too.

    Raises:
        Misuse: it is empty, or of another type.
    """
    is_id = isinstance(found, str | int | UUID) and not isinstance(found, bool)
    if not is_id or found == "":
        raise Misuse(f"a message id must be text, a whole number or a UUID, got {found!r}")
    return str(found)


def producer_id(found: object) -> str:
    """Return the id that a producer gave a message, as text.

    Raises:
        Misuse: it is empty, of another type, or begins like an id that semel generates: it could
            replace the dead letter of another record.
    """
    given = id_text(found)
    if given.startswith(RESERVED):
        raise Misuse(
            f"the message id {given[:100]!r} begins with {' or '.join(map(repr, RESERVED))}, which "
            f"only semel itself uses; the producer must choose another id"
        )
    return given


@dataclass(frozen=True, slots=True)
class Message:
    """One message, decoded; repeated deliveries of it carry the same id."""

    id: str
    """A `uuid.UUID` or an `int` is kept as its text."""

    payload: Any
    """What the codec made of the record's value; None for a tombstone, which has no value."""

    raw: bytes = b""
    """The payload's bytes; their hash distinguishes a duplicate from a conflict."""

    key: str | None = None
    type: str = ""
    headers: Mapping[str, bytes] = field(default_factory=dict)
    source: Coordinates | None = None
    timestamp: float = 0.0
    version: int | None = None
    """The version of the aggregate that *key* names, for consumers that check the sequence."""

    schema_version: str = ""
    correlation_id: str = ""
    is_duplicate: bool = False
    """The message was handled before: the handler must only send its outgoing messages again."""

    attempt: int = 1
    """How often this consumer has tried the message, this time included."""

    digest: str = field(default="", compare=False)
    """The sha256 of *raw*, or without bytes of the payload as JSON; computed if not given."""

    fetched_from: Coordinates | None = field(default=None, compare=False, repr=False)
    """Where a runner read it, if that is not its *source*: its row in an inbox."""

    def __post_init__(self) -> None:
        if type(self.id) is not str or not self.id:
            object.__setattr__(self, "id", id_text(self.id))
        if not self.digest:
            object.__setattr__(self, "digest", digest_of(self.raw or json_of(self.payload)))

    def repeated(self) -> Message:
        """Return the message marked as a duplicate."""
        return replace(self, is_duplicate=True)

    def tried(self, attempt: int) -> Message:
        """Return the message with the number of this attempt."""
        return self if attempt == self.attempt else replace(self, attempt=attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord(Record):
    """A record from one of our own tables, which know all of its message but the payload."""

    message: Message


def json_of(payload: Any) -> bytes:
    """Return a payload as canonical JSON; empty if it is None, or cannot be JSON."""
    if payload is None:
        return b""
    try:
        text = json.dumps(payload, sort_keys=True, separators=(",", ":"), default=_as_json)
    except (TypeError, ValueError, RecursionError):
        return b""
    return text.encode()


def _as_json(value: Any) -> Any:
    """Return a value as JSON can hold it, the same in every process.

    Raises:
        TypeError: it may look different the next time.
    """
    if isinstance(value, UUID | Decimal | dt.date | dt.time):
        return str(value)
    if isinstance(value, bytes):
        return _b64(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=json_of)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    # A model of pydantic, which is not imported here.
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else _not_json(value)


def _not_json(value: Any) -> Any:
    raise TypeError(f"{type(value)} is no JSON")


def digest_of(raw: bytes | None) -> str:
    """Return the hash that distinguishes a duplicate from another message with the same id."""
    return TOMBSTONE if raw is None else hashlib.sha256(raw).hexdigest()


TOMBSTONE: Final = hashlib.sha256(b"semel: a record without a value").hexdigest()
"""The hash of a tombstone, which differs from that of an empty value."""


def value_of(raw: bytes | None, digest: str) -> bytes | None:
    """Return the value of a stored record; None if its hash is a tombstone's."""
    return None if not raw and digest == TOMBSTONE else raw


def text_of(raw: bytes) -> str:
    """Decode bytes as UTF-8; `raw_of` restores even bytes that are not valid UTF-8."""
    return raw.decode("utf-8", "surrogateescape")


def raw_of(text: str) -> bytes:
    """Encode any text as bytes, the reverse of `text_of`."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # JSON can contain "\ud800", half of a surrogate pair, which UTF-8 cannot encode.
        return text.encode("utf-8", "surrogatepass")
