"""The outbox: messages that become durable with the caller's transaction and are sent later.

An outgoing id is derived from the consumer, the inbound message, the destination
and a counter, so handling the message again produces the same ids.
"""

from __future__ import annotations

import json
import uuid
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

from semel.errors import Fenced, Misuse
from semel.message import Message, digest_of, raw_of, text_of
from semel.messaging.records import is_plain_text, stored_id

NAMESPACE: Final = uuid.UUID("6f0d6c1e-8a55-5d0b-9d53-7a0d5e3a1c11")
"""The UUID namespace of outgoing ids; a change would give repeated messages new ids."""


MESSAGE_ID_HEADER: Final = "message-id"

CORRELATION_HEADER: Final = "correlation-id"

CAUSATION_HEADER: Final = "causation-id"

TRACE_HEADERS: Final = ("traceparent", "tracestate")
"""The headers of W3C Trace Context, which an outgoing message inherits."""


def outgoing_id(consumer: str, message_id: str, destination: str, ordinal: int) -> str:
    """Return the id of the *ordinal*-th message to *destination* that handling a message sends."""
    parts = (consumer, stored_id(message_id), destination, str(ordinal))
    # The lengths come first, so that two different lists of parts never give the same text.
    name = "".join(f"{len(part)}:{part}" for part in parts)
    return str(uuid.uuid5(NAMESPACE, name))


def idempotency_key(consumer: str, message_id: str) -> str:
    """Return the key by which an external provider recognises a repeated call."""
    return outgoing_id(consumer, message_id, "external", 0)


def parent_of(consumer: str, message_id: str) -> str:
    """Return the parent of the entries that handling this message writes."""
    # The length comes first: consumer "a/b" and message "c" are not "a" and "b/c".
    return f"{len(consumer)}:{consumer}/{stored_id(message_id)}"


NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})


class OutboxEntry(NamedTuple):
    """One message in the outbox.

    A tuple, because a relay makes a hundred thousand of them a second: a frozen dataclass
    takes three times as long.
    """

    message_id: str
    topic: str
    value: bytes | None
    key: str | None = None
    """Bytes that are no text are here as `semel.message.text_of` returns them."""

    headers: Mapping[str, bytes] = NO_HEADERS
    place: int = 0
    """The order of writing; given by the outbox."""

    outbox: str = "outbox"
    """The name of the outbox, which decides which relay sends it."""

    created_at: float = 0.0
    attempts: int = 0
    parked_reason: str = ""
    parent: str = ""
    """The inbound message that caused it, as `parent_of` names it; for explanations."""

    erased_at: float | None = None
    parent_key: str | None = None
    """The key of the inbound message; only `erase` uses it, and reads do not return it."""

    not_before: float | None = None
    """When it may be sent (UTC); None: at once.  Reads do not return it."""


Lane: TypeAlias = tuple[str, str] | int
"""Entries that keep their order: a key of a topic; without a key, the entry's place alone."""


def lane_of(entry: OutboxEntry) -> Lane:
    """Return the lane within which this entry keeps its order."""
    return entry.place if entry.key is None else (entry.topic, entry.key)


@dataclass(frozen=True, slots=True)
class OutboxNumbers:
    """How full an outbox is."""

    pending: int
    """Messages that can be sent, or wait behind a parked one."""

    parked: int
    """Messages that the broker will never take as they are."""

    oldest_seconds: float
    """How long the oldest pending message has waited."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """The right to relay one outbox, until it is taken away."""

    outbox: str
    owner: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Leader:
    """The current leader of an outbox, for reports."""

    owner: str
    """Empty if the last leader resigned."""

    epoch: int
    seconds_left: float
    """Until the lease ends; 0 if it has ended."""


class LeadershipLost(Fenced):
    """A newer leader relays the outbox: this one deletes and parks nothing more."""

    def __init__(self, outbox: str, epoch: int) -> None:
        super().__init__(outbox, epoch)
        self.outbox = outbox
        self.epoch = epoch

    def __str__(self) -> str:
        return (
            f"outbox {self.outbox}: the leadership of epoch {self.epoch} was lost; entries that "
            f"were published and not deleted are published again, with the same ids"
        )


class OutboxConflict(Misuse):
    """Two different messages were given one id; the second was not written."""

    def __init__(self, there: OutboxEntry, new: OutboxEntry) -> None:
        super().__init__(there, new)
        self.there = there
        self.new = new

    def __str__(self) -> str:
        return (
            f"outbox {self.new.outbox} has another message with the id "
            f"{self.new.message_id!r}: it holds {_described(self.there)}, and "
            f"{_described(self.new)} was not added; give every message its own id"
        )


def refuse_another(there: OutboxEntry, new: OutboxEntry) -> None:
    """Accept an entry that is written again, and refuse another one with its id.

    Raises:
        OutboxConflict: topic, key or payload differ.
    """
    is_known = there.erased_at is not None or there.value == new.value
    if not is_known or (there.topic, there.key) != (new.topic, new.key):
        raise OutboxConflict(there, new)


def _described(entry: OutboxEntry) -> str:
    # Without the payload, which may hold personal data: errors are logged.
    payload = "a tombstone" if entry.value is None else f"{len(entry.value):,} bytes"
    if entry.value is not None:
        payload += f" (sha256 {digest_of(entry.value)[:12]})"
    return f"{payload} for topic {entry.topic!r}, key {entry.key!r}"


_BASE64: Final = "base64:"


def key_to_text(key: str | None) -> str | None:
    """Return a key as its column has it: bytes that are no plain text as base64."""
    if key is None or (is_plain_text(key) and not key.startswith(_BASE64)):
        return key
    return _BASE64 + b64encode(raw_of(key)).decode("ascii")


def key_from_text(text: str | None) -> str | None:
    """Read what `key_to_text` wrote."""
    if text is None or not text.startswith(_BASE64):
        return text
    return text_of(b64decode(text.removeprefix(_BASE64)))


def value_of_payload(payload: Any) -> bytes | None:
    """Return an outgoing payload as bytes.

    Raises:
        Misuse: it cannot be JSON.
    """
    if payload is None or isinstance(payload, bytes):
        return payload
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload)
    if isinstance(payload, str):
        if not _is_unicode(payload):
            raise Misuse("an outgoing text must not have a lone surrogate; give its bytes instead")
        return payload.encode()
    try:
        text = json.dumps(payload, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        if not _is_unicode(text):
            # JSON can escape a lone surrogate, which UTF-8 cannot encode.
            text = json.dumps(payload, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Misuse(
            f"an outgoing payload must be bytes, text, or a value that JSON can represent, "
            f"got {type(payload).__name__}: {error}"
        ) from error
    return text.encode()


def outgoing_headers(given: Mapping[str, str | bytes], cause: Message | None) -> dict[str, bytes]:
    """Return an outgoing message's own headers, and those that it inherits from its cause."""
    if MESSAGE_ID_HEADER in given:
        raise Misuse(f"the relay writes the header {MESSAGE_ID_HEADER!r}: give message_id instead")
    headers: dict[str, bytes] = {}
    if cause is not None:
        correlation_id = cause.correlation_id or cause.id
        headers[CORRELATION_HEADER] = raw_of(correlation_id)
        headers[CAUSATION_HEADER] = raw_of(cause.id)
        headers |= {name: cause.headers[name] for name in TRACE_HEADERS if name in cause.headers}
    for name, value in given.items():
        headers[name] = raw_of(value) if isinstance(value, str) else bytes(value)
    return headers


def check_outgoing(topic: str, key: str | None, message_id: str) -> None:
    """Refuse a topic, key or id that a database would refuse.

    Raises:
        Misuse: names the value.
    """
    needed: dict[str, object] = {"topic": topic, "message id": message_id}
    for what, given in needed.items():
        if not isinstance(given, str) or not given:
            raise Misuse(f"an outgoing message needs a {what}, a text that is not empty")
    texts: dict[str, object] = {**needed, "key": "" if key is None else key}
    for what, text in texts.items():
        if not isinstance(text, str) or "\0" in text or not _is_unicode(text):
            raise Misuse(f"the {what} {text!r} must be a text without NUL and lone surrogates")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
