"""A message, the record it travels in, and where its id may come from.

    Record   what a broker delivered: bytes, headers, coordinates
    Message  what a handler gets: an id, a payload, and where it came from

An id comes only from a declared place: a header, a field of the payload, or the
coordinates.  A framework's own message id changes between deliveries, so a claim
on it would let a message be handled twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final


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
    """A header that was sent several times has its last value."""

    timestamp: float = 0.0
    """Seconds since 1970, from the broker."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message, decoded; repeated deliveries of it carry the same id."""

    id: str
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
    """The sha256 of *raw*, in hex; computed if not given."""

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", digest_of(self.raw))

    def repeated(self) -> Message:
        """Return the message marked as a duplicate."""
        return replace(self, is_duplicate=True)

    def tried(self, attempt: int) -> Message:
        """Return the message with the number of this attempt."""
        return self if attempt == self.attempt else replace(self, attempt=attempt)


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
