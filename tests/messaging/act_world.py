"""Messages that wait or are dead, for the tests of what people do with them."""

from __future__ import annotations

from typing import Any

from semel.message import digest_of
from semel.messaging.handle.claims import ClaimRow, ClaimState, Failure
from semel.messaging.records import (
    DeadLetter,
    DeadLetterFilter,
    WaitingFilter,
    WaitingMessage,
    Waits,
)
from tests.stores.world import DatabaseWorld

BILLING = "billing"
ANN = {"actor": "ann", "reason": "the address was wrong"}


async def park(world: DatabaseWorld, *ids: str, key: str | None = None, **fields: Any) -> None:
    """Park the first and queue the others up behind it, with their claims."""
    for number, message_id in enumerate(ids):
        waits = Waits.BEHIND if number and key is not None else Waits.PARKED
        payload = fields.get("payload", f'{{"id": "{message_id}"}}'.encode(errors="replace"))
        message = WaitingMessage(
            BILLING,
            message_id,
            waits,
            key=key,
            payload=payload,
            held=key is not None,
            attempts=3,
            reason="no such customer",
            error_code="PRECONDITION_FAILED",
            headers={"trace": b"t"},
            payload_hash=digest_of(payload),
        )
        async with world.database.begin() as unit:
            failure = Failure(ClaimState.PARKED, 3, message.error_code, 0.0, message.payload_hash)
            await unit.claims.mark_failed(BILLING, message_id, failure)
            await unit.waiting.put(message)


async def bury(world: DatabaseWorld, message_id: str = "m1", **fields: Any) -> None:
    """Make a dead letter with its claim."""
    payload = fields.pop("payload", f'{{"id": "{message_id}"}}'.encode(errors="replace"))
    async with world.database.begin() as unit:
        now = await unit.now()
        letter = DeadLetter(
            **{
                "consumer": BILLING,
                "message_id": message_id,
                "topic": "payments",
                "partition": 0,
                "offset": 7,
                "key": "customer-7",
                "payload": payload,
                "reason": "not a number",
                "exception": "ValueError",
                "error_code": "REJECTED",
                "attempts": 5,
                "first_failed_at": now,
                "last_failed_at": now,
                "headers": {"trace": b"t"},
                "payload_hash": digest_of(payload),
                **fields,
            }
        )
        failure = Failure(ClaimState.FAILED_TERMINAL, 5, "REJECTED", 0.0, letter.payload_hash)
        await unit.claims.mark_failed(BILLING, message_id, failure)
        await unit.dead_letters.put(letter)


async def claim_of(world: DatabaseWorld, message_id: str) -> ClaimRow | None:
    async with world.database.begin() as unit:
        return await unit.claims.look_up(BILLING, message_id)


async def waiting_of(world: DatabaseWorld, message_id: str) -> WaitingMessage | None:
    async with world.database.begin() as unit:
        return await unit.waiting.get(BILLING, message_id)


async def letter_of(world: DatabaseWorld, message_id: str) -> DeadLetter | None:
    async with world.database.begin() as unit:
        return await unit.dead_letters.get(BILLING, message_id)


async def queue(world: DatabaseWorld) -> list[tuple[str, str]]:
    async with world.database.begin() as unit:
        found = await unit.waiting.find(WaitingFilter(BILLING), 100)
    return [(message.message_id, message.waits.value) for message in found]


async def due(world: DatabaseWorld) -> list[str]:
    async with world.database.begin() as unit:
        return [message.message_id for message in await unit.waiting.take_due(BILLING, 100)]


async def letters(world: DatabaseWorld) -> int:
    async with world.database.begin() as unit:
        return await unit.dead_letters.count(DeadLetterFilter())


async def acts(world: DatabaseWorld) -> list[tuple[str, str, str]]:
    """Return who did what with which message, in order."""
    async with world.database.begin() as unit:
        entries = await unit.audit.read(0, 1000)
    return [(entry.act.actor, entry.act.act, entry.act.message_id) for entry in entries]


async def details(world: DatabaseWorld) -> dict[str, Any]:
    """Return the details of the last act."""
    async with world.database.begin() as unit:
        return dict((await unit.audit.read(0, 1000))[-1].act.details)
