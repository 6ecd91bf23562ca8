"""The outbox: how full it is, who relays it, and what to do with what the broker refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semel.errors import Misuse
from semel.messaging.send.outbox import Leader, OutboxEntry, OutboxNumbers
from semel.operate.audit import acting, need_reason, write_down
from semel.operate.stores import OperatorDatabase


class NotParked(Misuse):
    """The outbox has no such parked message: it was sent, dropped, or never there."""

    def __init__(self, outbox: str, message_id: str) -> None:
        super().__init__(outbox, message_id)
        self.outbox = outbox
        self.message_id = message_id

    def __str__(self) -> str:
        return (
            f"outbox {self.outbox} has no parked message {self.message_id!r}, or its payload was "
            f"erased; nothing was changed"
        )


@dataclass(frozen=True, slots=True)
class OutboxStatus:
    """The answer of `outbox_status`."""

    outbox: str
    numbers: OutboxNumbers
    leader: Leader | None
    """Null where no relay ever ran."""

    @property
    def needs_attention(self) -> bool:
        """Messages are parked, or they wait and no relay runs."""
        is_led = self.leader is not None and self.leader.seconds_left > 0
        return self.numbers.parked > 0 or (self.numbers.pending > 0 and not is_led)


async def outbox_status(database: OperatorDatabase, outbox: str = "outbox") -> OutboxStatus:
    """Say how many messages wait in an outbox, and who relays them."""
    async with database.begin() as unit:
        numbers = await unit.outbox.numbers(outbox)
        return OutboxStatus(outbox, numbers, await unit.outbox.leader(outbox))


async def need_outbox(database: OperatorDatabase, outbox: str) -> None:
    """Check that an outbox has a row; a database without any outbox knows all.

    Raises:
        Misuse: there are other outboxes, and not this one.
    """
    async with database.begin() as unit:
        known = await unit.members.outboxes()
    if known and outbox not in {*known, "outbox"}:
        raise Misuse(f"there is no outbox {outbox!r} in this database; it has {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class ParkedEntries:
    """The answer of `parked_entries`."""

    outbox: str
    total: int
    """How many there are; the list may hold fewer."""

    messages: Sequence[OutboxEntry]


async def parked_entries(
    database: OperatorDatabase, outbox: str = "outbox", limit: int = 50
) -> ParkedEntries:
    """List the messages that the broker refused, in the order of writing."""
    async with database.begin() as unit:
        entries = await unit.outbox.parked(outbox, limit)
        numbers = await unit.outbox.numbers(outbox)
    return ParkedEntries(outbox, numbers.parked, entries)


async def parked_ids(
    database: OperatorDatabase,
    outbox: str,
    *,
    topic: str | None = None,
    refused_with: str | None = None,
) -> list[str]:
    """Return the ids of parked messages that can be sent again, in order.

    *topic* and *refused_with*, a part of the reason, select some of them.
    """
    async with database.begin() as unit:
        count = (await unit.outbox.numbers(outbox)).parked
        parked = await unit.outbox.parked(outbox, count)
    return [
        entry.message_id
        for entry in parked
        if entry.erased_at is None
        and topic in (None, entry.topic)
        and (refused_with or "").casefold() in entry.parked_reason.casefold()
    ]


async def send_again(
    database: OperatorDatabase, outbox: str, message_id: str, *, actor: str, reason: str = ""
) -> None:
    """Let the relay send a parked message again; later messages of its key follow it.

    Raises:
        NotParked: it is not parked, or its payload was erased.
    """
    async with acting(database) as unit:
        if not await unit.outbox.unpark(outbox, message_id):
            raise NotParked(outbox, message_id)
        said = {"message_id": message_id, "reason": reason, "outbox": outbox}
        await write_down(unit, actor, "outbox.retry", **said)


async def drop(
    database: OperatorDatabase, outbox: str, message_id: str, *, actor: str, reason: str
) -> None:
    """Delete a parked message: it is never sent, and later messages of its key go on.

    Raises:
        Misuse: there is no reason.
        NotParked: it is not parked.
    """
    async with acting(database) as unit:
        if not await unit.outbox.drop(outbox, message_id):
            raise NotParked(outbox, message_id)
        why = need_reason(reason, "dropping a message")
        said = {"message_id": message_id, "reason": why, "outbox": outbox}
        await write_down(unit, actor, "outbox.drop", **said)
