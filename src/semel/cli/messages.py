"""What several commands show of a message, and how they act on one message after the other."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from semel.cli.answer import Answer
from semel.cli.database import Actor, Books
from semel.cli.render import Line, bold
from semel.cli.words import counted
from semel.operate.acts import Acts, on_each
from semel.operate.stores import OperatorDatabase


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


def headers_of(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Make headers readable; bytes that are not text become escapes."""
    return {name: value.decode("utf-8", "backslashreplace") for name, value in headers.items()}


def act_on_each(
    answer: Answer,
    books: Books,
    actor: Actor,
    messages: Sequence[str],
    act: Callable[[OperatorDatabase, str], Awaitable[str | None]],
    note: str = "",
    **more: str,
) -> None:
    """Act on each message in its own transaction, and answer with what became of each."""
    done = books.ask(lambda database: on_each(messages, lambda one: act(database, one), note))
    reply_acts(answer, books, actor, done, **more)


def reply_acts(answer: Answer, books: Books, actor: Actor, done: Acts, **more: str) -> None:
    """Answer with what became of an act on each message."""
    answer.reply(done, act_lines, database=books.name, act=answer.command, **actor.given, **more)


def act_lines(done: Acts) -> Iterator[Line]:
    """Put what became of each message for people."""
    if not done.messages:
        yield "no such parked message"
    for one in done.messages:
        word = bold(one.note, "green") if one.done else bold("not done", "bold red")
        yield bold(f"{one.message_id}: ", "").append_text(word).append(f" {one.why_not}".rstrip())
