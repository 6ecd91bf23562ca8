"""Consumers that do what their messages say: succeed, fail for a while, fail for ever, kill.

    {"do": "transient", "times": 2}    fails twice
    {"do": "poison"}                   fails every time
    {"do": "slow", "seconds": 0.5}     takes a while; with "once": a path, only the first time
    {"do": "kill"}                     ends its process with SIGKILL
    {"do": "transient", "times": 1, "then": "kill"}      one after the other

Whatever it does, it first writes a row and an outgoing message, without a look
whether they are there: an effect that happens twice is two rows.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Column, Integer, MetaData, Table, Text

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.lease import Lease
from semel.messaging.handler import consumer
from semel.outboxes import Outbox

NAME: Final = "worker"
RECEIPTS = "receipts"
"""Where the outgoing messages go; a service on a shared broker has a topic of its own."""

MESSAGE_ID: Final = "message-id"

metadata: Final = MetaData()

worker_effect: Final = Table(
    "worker_effect",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("message_id", Text, nullable=False),
    Column("worker", Integer, nullable=False),
    Column("attempt", Integer, nullable=False),
)

EFFECTS: Final = "SELECT message_id FROM worker_effect"
"""The effects, as `semel.testing.trial.Trial` asks for them."""

_OUTBOX: Final = Outbox()


async def effect(message: Message, session: Any) -> None:
    """Write a row and an outgoing message, then do what the message says."""
    row = {"message_id": message.id, "worker": os.getpid(), "attempt": message.attempt}
    await session.execute(worker_effect.insert().values(row))
    await _OUTBOX.add(session, RECEIPTS, {"of": message.id}, key=message.key)
    await _act(message)


async def _act(message: Message) -> None:
    said = message.payload
    do = said.get("do")
    if do == "transient":
        if message.attempt <= said["times"]:
            raise RetryableMessageError(f"attempt {message.attempt} of a transient fault")
        do = said.get("then")
    match do:
        case "poison":
            raise NonRetryableMessageError("a poison message")
        case "slow" if _is_first(said.get("once")):
            await asyncio.sleep(said["seconds"])
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            return


def _is_first(once: str | None) -> bool:
    if once is None:
        return True
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


@consumer(NAME, id_from=FromHeader(MESSAGE_ID))
async def one_by_one(message: Message, session: Any) -> None:
    """Handle a message in the transaction of its claim."""
    await effect(message, session)


@consumer(NAME, id_from=FromHeader(MESSAGE_ID), batches=True)
async def all_at_once(messages: Sequence[Message], session: Any) -> None:
    """Handle a whole batch in one call."""
    for message in messages:
        await effect(message, session)


@consumer(NAME, id_from=FromHeader(MESSAGE_ID))
async def under_lease(message: Message, lease: Lease) -> None:
    """Handle a message whose claim is committed before."""
    async with lease.completing() as session:
        await effect(message, session)
