"""The rows of the stores as plain values: stored messages, attempts, members, gaps; and their ids.

A message that waits, a dead letter and a message of the inbox are all a `StoredMessage`: what the
message carried, and beside it what became of it.

An id that is too long for an index, or is not plain text, is stored as its hash.  Dead letters
that cannot be stored under their own id get one that is made up here:

    conflict:<16 digits of the payload's hash>:<the id it came with>   the id has another payload
    unreadable:<topic>/<partition>/<offset>                            no id could be read

Nothing is ever handled under such an id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from semel.codec import UNREADABLE, unreadable_id
from semel.message import Coordinates, Message, Partition, digest_of

LONGEST_ID_BYTES: Final = 512


def stored_id(message_id: str) -> str:
    """Return the id as databases store it: itself, or a hash if it is long or no plain text.

    An id that looks like such a hash is hashed, too, so that no two ids become one.
    """
    raw = message_id.encode("utf-8", "surrogatepass")
    plain = len(raw) <= LONGEST_ID_BYTES and is_plain_text(message_id)
    if plain and not message_id.startswith("sha256:"):
        return message_id
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def original_id(message_id: str) -> str | None:
    """Return what is stored beside a hashed id, for people; None if the id is not hashed."""
    if stored_id(message_id) == message_id:
        return None
    return message_id.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def hash_of_key(key: str) -> str:
    """Return the hash of a key, for tables that are never erased: a key may name a person."""
    return digest_of(key.encode("utf-8", "surrogatepass"))


def is_plain_text(text: str) -> bool:
    """Tell whether every database takes *text* as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


BEHIND: Final = "BEHIND"
"""The code of a claim whose message waits for an earlier one of its key."""


class Waits(StrEnum):
    """For what a message waits."""

    RETRY = "retry"
    """For its time."""

    PARKED = "parked"
    """For a person."""

    BEHIND = "behind"
    """For an earlier message of its key that is one of the other two."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """What our tables store of a message; one row per table, consumer and message id."""

    consumer: str
    message_id: str
    _: KW_ONLY
    payload: bytes | None
    """None once it was erased."""

    key: str | None = None
    headers: Mapping[str, bytes] = field(default_factory=dict)
    topic: str = ""
    partition: int | None = None
    offset: int | None = None
    timestamp: float = 0.0
    payload_hash: str = ""
    message_type: str = ""
    schema_version: str = ""
    correlation_id: str = ""
    attempts: int = 0
    erased_at: float | None = None

    @property
    def source(self) -> Coordinates | None:
        """Where the record stood, if that is known."""
        if self.partition is None or self.offset is None:
            return None
        return Coordinates(self.topic, self.partition, self.offset)


def fields_of_message(consumer: str, message: Message) -> dict[str, Any]:
    """Return a message as the arguments of any `StoredMessage`."""
    source = message.source
    return {
        "consumer": consumer,
        "message_id": message.id,
        "payload": message.raw,
        "key": message.key,
        "headers": message.headers,
        "topic": source.topic if source else "",
        "partition": source.partition if source else None,
        "offset": source.offset if source else None,
        "timestamp": message.timestamp,
        "payload_hash": message.digest,
        "message_type": message.type,
        "schema_version": message.schema_version,
        "correlation_id": message.correlation_id,
    }


def fields_of_stored(stored: StoredMessage) -> dict[str, Any]:
    """Return what every stored message has as arguments, to store it in another table."""
    return {one.name: getattr(stored, one.name) for one in fields(StoredMessage)}


@dataclass(frozen=True, slots=True)
class WaitingMessage(StoredMessage):
    """One message in the waiting table; its payload is the original, or the newest revision."""

    waits: Waits
    _: KW_ONLY
    place: int = 0
    """The order of arrival; the table gives it."""

    held: bool = False
    """It holds its key (the consumer keeps order per key)."""

    due_at: float = 0.0
    reason: str = ""
    error_code: str = ""
    exception: str = ""
    since: float = 0.0
    first_failed_at: float = 0.0
    label: str = ""
    """What a person classified it as."""

    @classmethod
    def of(cls, consumer: str, message: Message, waits: Waits, *, held: bool) -> WaitingMessage:
        """Return *message* as the waiting table stores it."""
        return cls(**fields_of_message(consumer, message), waits=waits, held=held)


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Which messages are meant; what is None does not matter."""

    consumer: str | None = None
    message_id: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class WaitingFilter(MessageFilter):
    """Which waiting messages are meant; what is None does not matter."""

    conflicts_with: str | None = None
    """Conflicts that came with this id, and have a made-up one."""

    waits: Waits | None = None
    label: str | None = None
    error_code: str | None = None
    since: float | None = None
    until: float | None = None
    after_place: int | None = None
    held: bool | None = None


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key whose later messages queue up."""

    consumer: str
    key: str
    head: WaitingMessage
    behind: int
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter(StoredMessage):
    """One dead letter, with the thirteen fields of S3-27; its payload is as it came."""

    reason: str
    exception: str
    error_code: str
    first_failed_at: float
    last_failed_at: float
    owner: str = ""
    """The team that looks after it."""

    outcome: str = "dlq"
    """``dlq``, ``deserialization_failure``, ``schema_incompatible`` or ``conflict``."""

    needs_review: bool = False
    """A person must have looked at it before it is handled again."""

    expected_hash: str = ""
    """For a conflict: the hash of the payload that came first."""

    @property
    def was_no_message(self) -> bool:
        """Tell whether its record could not be read, and is filed under its coordinates."""
        return self.source is not None and self.message_id == unreadable_id(self.source)


@dataclass(frozen=True, slots=True)
class DeadLetterFilter(MessageFilter):
    """Which dead letters are meant; what is None does not matter."""

    conflicts_with: str | None = None
    """Conflicts that came with this id, and have a made-up one."""

    topic: str | None = None
    error_code: str | None = None
    outcome: str | None = None
    since: float | None = None
    until: float | None = None
    after: tuple[float, str] | None = None
    """Only letters behind this (first_failed_at, message_id): for pages."""


FIRST_KEPT: Final = 5
LATEST_KEPT: Final = 45
MOST_KEPT: Final = FIRST_KEPT + LATEST_KEPT
"""Of one message; how a long trouble began says more than its middle."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One try that failed."""

    consumer: str
    message_id: str
    number: int
    """Counted from the start again when somebody sends the message back."""

    error_code: str
    failure_class: str
    reason: str = ""
    """Empty once the message's payload was erased: an exception may quote it."""

    exception: str = ""
    worker: str = ""
    """Host and process that wrote it."""

    key: str | None = None
    at: float = 0.0
    """When its claim says so; 0 for now, which the store writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InboxMessage(StoredMessage):
    """One message of the inbox."""

    place: int = 0
    received_at: float = 0.0
    processed_at: float | None = None
    due_at: float | None = 0.0
    """When it may be tried; None: never again."""

    error: str = ""
    result: str | None = None

    @classmethod
    def of(cls, consumer: str, message: Message) -> InboxMessage:
        """Return *message* as the inbox stores it."""
        return cls(**fields_of_message(consumer, message))


@dataclass(frozen=True, slots=True)
class Member:
    """One running process of one consumer."""

    consumer: str
    name: str
    """Unique per start."""

    owner: str
    """`semel.lease.Owner` as JSON: whether the process still runs."""

    partitions: frozenset[Partition]
    in_flight: int
    """How many records it may have had at once, per partition."""

    expires_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """What was noted of a message that was about to be tried."""

    tries: int
    writer: str
    """Who tried it last: `semel.lease.Owner` as JSON, its instance that of the worker, if known."""

    noted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Versions of a key that did not come."""

    consumer: str
    key: str
    expected: int
    """The first version that is missing."""

    found: int
    """The version that came instead."""

    since: float = 0.0
    closed_at: float | None = None
    how: str = ""
    """How it was closed: ``arrived``, ``fetched``, ``rebuilt``, or a person's reason."""


LEFT_SECONDS: Final = 60.0
"""How old a note is when a process elsewhere that has no row as a member is gone, and one that
runs has left it behind."""

CONFLICT: Final = "conflict:"
HASH_DIGITS: Final = 16
CAME_AS_AT: Final = len(CONFLICT) + HASH_DIGITS + 1
"""Where in the id of a conflict the id begins that it came with."""

_MADE_UP: Final = re.compile(
    rf"{CONFLICT}[0-9a-f]{{{HASH_DIGITS}}}:.*|{UNREADABLE}.+/\d+/\d+", re.DOTALL
)


def is_made_up(message_id: str) -> bool:
    """Tell whether an id is one of these."""
    return _MADE_UP.fullmatch(message_id) is not None


def conflict_id(message_id: str, payload_hash: str) -> str:
    """Return what a payload is filed under that came with the id of another one."""
    return f"{CONFLICT}{payload_hash[:HASH_DIGITS]}:{came_as(message_id)}"


def came_as(message_id: str) -> str:
    """Return how conflicts name the id they came with; a hash of it where it is long."""
    kept = stored_id(message_id)
    if len(kept.encode()) <= LONGEST_ID_BYTES - CAME_AS_AT:
        return kept
    return f"sha256:{digest_of(message_id.encode())}"


def is_conflict_with(filed_as: str, message_id: str) -> bool:
    """Tell whether *filed_as* is the id of a conflict that came with *message_id*."""
    return filed_as.startswith(CONFLICT) and filed_as[CAME_AS_AT:] == came_as(message_id)
