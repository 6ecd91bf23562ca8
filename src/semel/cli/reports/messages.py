"""Messages as plain values: what a list shows of them, and what a payload looks like."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from semel.errors import SemelError, reason_of


@dataclass(frozen=True, slots=True)
class PayloadReport:
    """A payload: as text where it is text."""

    text: str | None
    base64: str | None
    """Where it is not text."""

    bytes: int
    hash: str
    """The sha256 of the original bytes; it stays when the payload is erased."""

    erased: bool


def payload_report(payload: bytes | None, payload_hash: str) -> PayloadReport:
    """Put a payload into a JSON document."""
    if payload is None:
        return PayloadReport(None, None, 0, payload_hash, True)
    try:
        return PayloadReport(payload.decode(), None, len(payload), payload_hash, False)
    except UnicodeDecodeError:
        encoded = b64encode(payload).decode("ascii")
        return PayloadReport(None, encoded, len(payload), payload_hash, False)


def headers_report(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Put headers into a JSON document; what is no text is shown with escapes."""
    return {name: value.decode("utf-8", "backslashreplace") for name, value in headers.items()}


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an act on one message."""

    message_id: str
    done: bool
    why_not: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class ActReport:
    """The answer to a command that acts on messages."""

    database: str
    act: str
    consumer: str
    actor: str
    reason: str
    messages: list[Done]

    @property
    def needs_attention(self) -> bool:
        """Tell whether it could not be done with all of them."""
        return not all(one.done for one in self.messages)


async def one_by_one(ids: Iterable[str], act: Callable[[str], Awaitable[str]]) -> list[Done]:
    """Act on each message in its own transaction; one that cannot be done stops no other."""
    results = []
    for message_id in ids:
        try:
            results.append(Done(message_id, True, note=await act(message_id)))
        except SemelError as error:
            results.append(Done(message_id, False, reason_of(error)))
    return results
