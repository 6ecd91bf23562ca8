"""Messages in several commands: how they are shown, and acts on one after the other."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.cli.database import Actor
from semel.cli.render import WRITERS, Field, Line, bold, counted
from semel.message import Coordinates
from semel.messaging.records import DeadLetter, StoredMessage, WaitingMessage
from semel.operate.audit import Acts, on_each
from semel.operate.deadletters import LetterInspection
from semel.operate.parking import Inspection
from semel.operate.stores import Approval

WRITERS[Coordinates] = str


@dataclass(frozen=True, slots=True)
class Payload:
    """A payload: as text where it is text."""

    text: str | None
    base64: str | None
    """Where it is not text."""

    bytes: int
    hash: str
    """The sha256 of the original bytes; it stays when the payload is erased."""

    erased: bool


def payload_of(payload: bytes | None, payload_hash: str) -> Payload:
    """Make a payload readable."""
    if payload is None:
        return Payload(None, None, 0, payload_hash, True)
    try:
        return Payload(payload.decode(), None, len(payload), payload_hash, False)
    except UnicodeDecodeError:
        encoded = b64encode(payload).decode("ascii")
        return Payload(None, encoded, len(payload), payload_hash, False)


def payload_lines(payload: Payload) -> Iterator[Line]:
    """Put a payload for people."""
    if payload.erased:
        yield f"the payload was erased; its hash was {payload.hash}"
        return
    yield f"payload, {counted(payload.bytes, 'byte')}:"
    yield payload.text if payload.text is not None else payload.base64


def reason_shown(message: WaitingMessage | DeadLetter) -> str:
    """Why it failed, and whether it was erased since."""
    return ("(erased) " if is_erased(message) else "") + message.reason


def is_erased(message: StoredMessage) -> bool:
    """Its payload was erased."""
    return message.erased_at is not None


def payload_shown(found: Inspection | LetterInspection) -> Payload:
    """What is in the message."""
    return payload_of(found.message.payload, found.message.payload_hash)


def headers_shown(found: Inspection | LetterInspection) -> dict[str, str]:
    """Bytes that are not text are escaped."""
    return headers_of(found.message.headers)


def acts_of(found: Inspection | LetterInspection) -> list[str]:
    """What people did with it, in order."""
    return [f"{entry.act.act} by {entry.act.actor}" for entry in found.acts]


CONTENT: Final = (
    Field("payload", payload_shown),
    Field("headers", headers_shown),
    Field("message_type", "message.message_type"),
    Field("schema_version", "message.schema_version"),
    Field("correlation_id", "message.correlation_id"),
)
"""What the JSON of an inspection says of the message itself."""


def content_facts(message: StoredMessage) -> dict[str, Any]:
    """Name what is known of a message besides its payload, for people."""
    return {
        "type": f"{message.message_type or '-'}, schema {message.schema_version or '-'}",
        "correlation": message.correlation_id,
        "headers": headers_of(message.headers),
    }


def headers_of(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Make headers readable; bytes that are not text become escapes."""
    return {name: value.decode("utf-8", "backslashreplace") for name, value in headers.items()}


def act_on_each(
    actor: Actor,
    act: Callable[..., Awaitable[Any]],
    messages: Sequence[str],
    note: str | Callable[[Any], str],
    **place: str,
) -> None:
    """Act on each message in its own transaction, and answer with what became of each.

    *place* is the consumer or the outbox, by its key in the answer; *act* takes the database,
    the place and the message's id.
    """
    (where,) = place.values()
    said = note if callable(note) else lambda _: note
    done = actor.ask(
        lambda database: on_each(
            messages, lambda one: act(database, where, one, **actor.given), said
        )
    )
    reply_acts(actor, done, **place)


def reply_acts(actor: Actor, done: Acts, **place: str) -> None:
    """Answer with what became of an act on each message."""
    actor.reply(done, act_lines, act=actor.answer.command, **actor.given, **place)


ACTED: Final = ("act", "actor", "reason")
"""The keys that `reply_acts` adds, besides the place."""


def act_lines(done: Acts) -> Iterator[Line]:
    """Put what became of each message for people."""
    if not done.messages:
        yield "no such parked message"
    for one in done.messages:
        word = bold(one.note, "green") if one.done else bold("not done", "bold red")
        yield bold(f"{one.message_id}: ", "").append_text(word).append(f" {one.why_not}".rstrip())


@dataclass(frozen=True, slots=True)
class Request:
    """A deletion that one person asks for and a second person decides."""

    request: Approval
    actor: str


def reply_asked(
    actor: Actor, ask: Callable[..., Awaitable[Approval]], consumer: str, message_id: str
) -> None:
    """Ask for a deletion, and answer with the number that the second person needs."""
    request = actor.ask(ask, consumer, message_id, **actor.given)
    number = request.number
    line = f"request {number} waits for a second person: semel parking approve {number}"
    actor.reply(Request(request, actor.name), lambda _: (line,))
