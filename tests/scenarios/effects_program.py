"""A process that charges customers at an HTTP provider, in one of three ways.

effects_program WAY DATABASE-URL PROVIDER-URL

    key        the handler calls, with a key that is derived from the message
    no-key     the handler calls, with nothing that a repetition could be recognised by
    intent     the handler writes an intent into the outbox, and a relay calls
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from sqlalchemy import text

from semel.errors import Permanent, Retryable
from semel.message import Message
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Handled, Skipped
from semel.messaging.receive.broker import Outgoing
from semel.messaging.send.outbox import MESSAGE_ID_HEADER, idempotency_key
from semel.messaging.send.relay import Relay
from semel.outboxes import Outbox
from semel.sql.database import SqlDatabase

ORDER = Message("order-7", {"customer": "c-3", "amount": 5}, b'{"customer":"c-3","amount":5}')


def charge(url: str, key: str, body: bytes) -> None:
    """Call the provider.

    Raises:
        Permanent: it will never take this.
        Retryable: it did not answer, or not now.
    """
    try:
        urlopen(Request(url, body, {"Idempotency-Key": key}, method="POST"), timeout=5).close()
    except HTTPError as error:
        group = Permanent if error.code in (400, 401, 403, 404, 422) else Retryable
        raise group(f"the provider answered {error.code}") from error
    except (URLError, TimeoutError) as error:
        raise Retryable("the provider did not answer") from error


def calling(url: str, *, with_key: bool) -> Consumer:
    """Make a consumer that calls inside its handler."""

    @consumer("billing")
    async def handle(message: Message, session: Any) -> None:
        key = idempotency_key("billing", message.id) if with_key else uuid.uuid4().hex
        await asyncio.to_thread(charge, url, key, json.dumps(message.payload).encode())
        await write_down(message, session)

    return handle


def intending() -> Consumer:
    """Make a consumer that writes down what is to be called."""

    @consumer("billing")
    async def handle(message: Message, session: Any) -> None:
        await write_down(message, session)
        await Outbox("provider").add(session, "charges", message.payload, key="c-3")

    return handle


async def write_down(message: Message, session: Any) -> None:
    await session.execute(text("INSERT INTO charge VALUES (:id)"), {"id": message.id})


class Provider:
    """A `Publisher` whose broker is the provider: a message's id is the key of its call."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        return [await self._call(message) for message in batch]

    async def _call(self, message: Outgoing) -> Exception | None:
        key = message.headers[MESSAGE_ID_HEADER].decode()
        try:
            await asyncio.to_thread(charge, self._url, key, message.value or b"")
        except (Permanent, Retryable) as error:
            return error
        return None

    async def close(self) -> None:
        pass


def main(arguments: Sequence[str]) -> int:
    """Handle the order, as often as this program is started."""
    way, database_url, provider_url = arguments
    asyncio.run(work(way, database_url, provider_url))
    return 0


async def work(way: str, database_url: str, provider_url: str) -> None:
    database = SqlDatabase(database_url)
    try:
        handler = intending() if way == "intent" else calling(provider_url, with_key=way == "key")
        outcome = await handle_message(handler, database, ORDER)
        if not isinstance(outcome, Handled | Skipped):
            raise TypeError(f"not handled: {outcome}")
        if way == "intent":
            await Relay(database, Provider(provider_url), "provider").run_until_empty()
    finally:
        await database.close()
