"""What operators do with messages that the broker refused: send them again, or drop them."""

from __future__ import annotations

from semel.errors import Misuse
from semel.operate.acts import acting, need_actor, need_reason
from semel.operate.stores import Act, OperatorDatabase, OperatorUnit


class NotParked(Misuse):
    """The outbox has no such message that was set aside: it was sent, dropped, or never there."""

    def __init__(self, outbox: str, message_id: str) -> None:
        super().__init__(outbox, message_id)
        self.outbox = outbox
        self.message_id = message_id

    def __str__(self) -> str:
        return (
            f"outbox {self.outbox} has no parked message {self.message_id!r} that this can be "
            f"done with; nothing was changed"
        )


async def parked_ids(
    database: OperatorDatabase,
    outbox: str,
    *,
    topic: str | None = None,
    refused_with: str | None = None,
) -> list[str]:
    """Return the ids of parked messages that can be sent again, in order.

    Only those of *topic*, and whose reason has the words *refused_with* in it, where given.
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
    """Let the relay try a parked message again; its key goes on behind it.

    Raises:
        NotParked: it is not parked, or its payload was erased.
    """
    async with acting(database) as unit:
        if not await unit.outbox.unpark(outbox, message_id):
            raise NotParked(outbox, message_id)
        await _write_down(unit, outbox, message_id, "outbox.retry", actor, reason)


async def drop(
    database: OperatorDatabase, outbox: str, message_id: str, *, actor: str, reason: str
) -> None:
    """Give a parked message up: nobody will get it, and its key goes on without it.

    Raises:
        Misuse: there is no reason.
        NotParked: it is not parked.
    """
    async with acting(database) as unit:
        if not await unit.outbox.drop(outbox, message_id):
            raise NotParked(outbox, message_id)
        why = need_reason(reason, "dropping a message")
        await _write_down(unit, outbox, message_id, "outbox.drop", actor, why)


async def _write_down(
    unit: OperatorUnit, outbox: str, message_id: str, act: str, actor: str, reason: str
) -> None:
    written = Act(
        need_actor(actor), act, message_id=message_id, reason=reason, details={"outbox": outbox}
    )
    await unit.audit.append(written)
