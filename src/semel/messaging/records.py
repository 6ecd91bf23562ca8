"""The rows of the stores as plain values, and the ids under which they are stored.

A waiting message, a dead letter and a message of the inbox are all a `StoredMessage`: the message
itself, and what became of it.

An id that is too long for an index, or is not plain text, is stored as its hash.  A dead letter
that cannot be stored under its own id gets a generated one:

    conflict:<16 digits of the payload's hash>:<the id it came with>   the id has another payload
    unreadable:<topic>/<partition>/<offset>                            no id could be read

No message is ever handled under a generated id, and a record whose producer chose such an id is
refused as unreadable: every record's bytes are in one place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import StrEnum
from typing import Any, Final

from semel.codec import unreadable_id
from semel.message import CONFLICT, RESERVED, Coordinates, Message, Partition, digest_of

LONGEST_ID_BYTES: Final = 512


def stored_id(message_id: str) -> str:
    """Return the id as databases store it: itself, or its hash if it is long or not plain text.

    An id that looks like such a hash is hashed, too, so that two ids are never stored as one.
    """
    # A pass asks several times for each message, and nearly all ids are ASCII.
    raw = message_id if message_id.isascii() else message_id.encode("utf-8", "surrogatepass")
    plain = len(raw) <= LONGEST_ID_BYTES and is_plain_text(message_id)
    if plain and not message_id.startswith("sha256:"):
        return message_id
    return f"sha256:{hash_of_key(message_id)}"


def original_id(message_id: str) -> str | None:
    """Return the text stored beside a hashed id, for people; None if the id is not hashed."""
    if stored_id(message_id) == message_id:
        return None
    return message_id.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def hash_of_key(key: str) -> str:
    """Return the hash of a key, for tables that are never erased: a key may name a person."""
    return digest_of(key.encode("utf-8", "surrogatepass"))


def is_plain_text(text: str) -> bool:
    """Return whether every database stores *text* unchanged."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return False
    return "\0" not in text


BEHIND: Final = "BEHIND"
"""The marker of a claim whose message waits for an earlier one of its key."""


class Waits(StrEnum):
    """What a message waits for."""

    RETRY = "retry"
    """For its time."""

    PARKED = "parked"
    """For a person."""

    BEHIND = "behind"
    """For an earlier message of its key, which is a retry or parked."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """What our tables store of a message; one row per table, consumer and message id."""

    consumer: str
    message_id: str
    _: KW_ONLY
    payload: bytes | None
    """None after it was erased."""

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
        """The coordinates of the record, if they are known."""
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
    """Return the common fields as arguments, to store the message in another table."""
    return {one.name: getattr(stored, one.name) for one in fields(StoredMessage)}


@dataclass(frozen=True, slots=True)
class WaitingMessage(StoredMessage):
    """One message in the waiting table; its payload is the original, or the newest revision."""

    waits: Waits
    _: KW_ONLY
    place: int = 0
    """The order of arrival; the table gives it."""

    held: bool = False
    """It holds its key: later messages of the key wait behind it."""

    due_at: float = 0.0
    reason: str = ""
    error_code: str = ""
    exception: str = ""
    since: float = 0.0
    first_failed_at: float = 0.0
    label: str = ""
    """The label that a person gave it."""

    @classmethod
    def of(cls, consumer: str, message: Message, waits: Waits, *, held: bool) -> WaitingMessage:
        """Return *message* as the waiting table stores it."""
        return cls(**fields_of_message(consumer, message), waits=waits, held=held)


@dataclass(frozen=True, slots=True)
class MessageFilter:
    """Selects messages; a field that is None selects all."""

    consumer: str | None = None
    message_id: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class WaitingFilter(MessageFilter):
    """Selects waiting messages; a field that is None selects all."""

    conflicts_with: str | None = None
    """Conflicts that came with this id, and are stored under a generated one."""

    waits: Waits | None = None
    label: str | None = None
    error_code: str | None = None
    since: float | None = None
    until: float | None = None
    after_place: int | None = None
    held: bool | None = None


@dataclass(frozen=True, slots=True)
class HeldKey:
    """A key whose messages wait in the waiting table."""

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
    """The team that is responsible for it."""

    outcome: str = "dlq"
    """``dlq``, ``deserialization_failure``, ``schema_incompatible`` or ``conflict``."""

    needs_review: bool = False
    """A person must review it before it is handled again."""

    expected_hash: str = ""
    """For a conflict: the hash of the payload that came first."""

    @property
    def was_no_message(self) -> bool:
        """Return whether its record could not be read: then its id is its coordinates."""
        return self.source is not None and self.message_id == unreadable_id(self.source)


@dataclass(frozen=True, slots=True)
class DeadLetterFilter(MessageFilter):
    """Selects dead letters; a field that is None selects all."""

    conflicts_with: str | None = None
    """Conflicts that came with this id, and are stored under a generated one."""

    topic: str | None = None
    error_code: str | None = None
    outcome: str | None = None
    since: float | None = None
    until: float | None = None
    after: tuple[float, str] | None = None
    """Only letters after this (first_failed_at, message_id): for pages."""


FIRST_KEPT: Final = 5
LATEST_KEPT: Final = 45
MOST_KEPT: Final = FIRST_KEPT + LATEST_KEPT
"""Of one message: the first and the latest explain a long outage better than its middle."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One failed attempt."""

    consumer: str
    message_id: str
    number: int
    """Starts at 1 again when an operator sends the message back."""

    error_code: str
    failure_class: str
    reason: str = ""
    """Empty after the message's payload was erased: an exception may quote it."""

    exception: str = ""
    worker: str = ""
    """Host and process that wrote it."""

    key: str | None = None
    at: float = 0.0
    """The time in its claim; 0 means now, and the store writes the database's time."""


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
    """`semel.lease.Owner` as JSON: shows whether the process still runs."""

    partitions: frozenset[Partition]
    in_flight: int
    """How many records it may have had at once, per partition."""

    expires_at: float = 0.0
    standing_since: float | None = None
    """When it began to stand still in an outage; None if it works."""

    lag: int | None = None
    """Records behind the ends of its partitions when the row was renewed; None if not known."""

    refusals: str = ""
    """What its policy says about replays: `ReplayRules.refusals`."""


SPARK: Final = "spark"
"""The engine of a consumer that a pipeline on Spark runs; without a row, services run it."""


@dataclass(frozen=True, slots=True)
class ConsumerEngine:
    """Which pipeline runs a consumer: only a hand-over removes this."""

    consumer: str
    engine: str
    scope: str
    """As the books of the pipeline's sinks name it."""

    app: str
    query: str
    ledger: str
    """The id of the pipeline's ledger."""

    epoch: int
    """Of the pipeline's last start."""

    books: str
    """The schema with the books of its messages sink."""

    since: float = 0.0

    @property
    def pipeline(self) -> str:
        """The pipeline's name, as people read it."""
        return f"{self.app}/{self.query}"


@dataclass(frozen=True, slots=True)
class Note:
    """The crash note of a message that was about to be tried."""

    tries: int
    writer: str
    """The last process that tried it: `semel.lease.Owner` as JSON, with the worker if known."""

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
"""From this age on a note was left behind: a writer on another host that is no member is taken
to be gone, and one that runs did not clear it."""

HASH_DIGITS: Final = 16
CAME_AS_AT: Final = len(CONFLICT) + HASH_DIGITS + 1
"""The index in the id of a conflict at which the original id begins."""


def is_made_up(message_id: str) -> bool:
    """Return whether an id is a generated one."""
    return message_id.startswith(RESERVED)


def conflict_id(message_id: str, payload_hash: str) -> str:
    """Return the id for a payload that came with the id of another payload."""
    return f"{CONFLICT}{payload_hash[:HASH_DIGITS]}:{came_as(message_id)}"


def came_as(message_id: str) -> str:
    """Return an id as the ids of conflicts contain it: unchanged, or its hash if it is long."""
    kept = stored_id(message_id)
    if len(kept.encode()) <= LONGEST_ID_BYTES - CAME_AS_AT:
        return kept
    return f"sha256:{digest_of(message_id.encode())}"
