"""The executable contract of approvals."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from semel.messaging.records import InboxMessage, WaitingMessage, Waits
from semel.operate.stores import Approval, ApprovalAsked, ApprovalDecision
from tests.stores.deadletters import LETTER
from tests.stores.world import (
    DatabaseContract,
    DatabaseWorld,
    in_world,
    patiently,
)


class ApprovalsContract(DatabaseContract):
    """Everything a `semel.operate.stores.Approvals` must do."""

    @in_world
    async def test_a_request_comes_back_as_it_was_made(self, world: DatabaseWorld) -> None:
        asked = await ask(world, "m1")

        assert asked == Approval(
            asked.number,
            ApprovalAsked.DELETE_WAITING,
            "billing",
            "m1",
            "ann",
            "why",
            asked.asked_at,
            payload_hash="ab" * 32,
        )
        assert asked.asked_at > 0
        assert await get(world, asked.number) == asked
        assert await get(world, asked.number + 1) is None

    @in_world
    async def test_a_message_of_any_name_can_be_asked_for(self, world: DatabaseWorld) -> None:
        for name in ("x" * 5000, "nul\0inside", "sha256:" + "0" * 64):
            asked = await ask(world, name)
            assert asked.message_id == name
            async with world.database.begin() as unit:
                assert await unit.approvals.about("billing", name) == [asked]

    @in_world
    async def test_open_requests_are_listed_oldest_first(self, world: DatabaseWorld) -> None:
        first, second = await ask(world, "m1"), await ask(world, "m2")
        third = await ask(world, "m1", "shipping")
        await decide(world, second.number, "bob", ApprovalDecision.APPROVED)

        assert await open_ones(world, None) == [first, third]
        assert await open_ones(world, "billing") == [first]
        assert await open_ones(world, None, limit=1) == [first]

    @in_world
    async def test_a_decision_is_written_with_who_and_when(self, world: DatabaseWorld) -> None:
        asked = await ask(world, "m1")

        assert await decide(world, asked.number, "bob", ApprovalDecision.REFUSED)

        found = await get(world, asked.number)
        assert found is not None
        assert found.decided_at is not None
        assert found == replace(
            asked, decided_by="bob", decided_at=found.decided_at, decision=ApprovalDecision.REFUSED
        )

    @in_world
    async def test_a_decision_is_never_changed(self, world: DatabaseWorld) -> None:
        asked = await ask(world, "m1")
        await decide(world, asked.number, "bob", ApprovalDecision.REFUSED)

        assert not await decide(world, asked.number, "eve", ApprovalDecision.APPROVED)
        assert not await decide(world, asked.number + 1, "eve", ApprovalDecision.APPROVED)

        found = await get(world, asked.number)
        assert found is not None
        assert (found.decided_by, found.decision) == ("bob", ApprovalDecision.REFUSED)

    @in_world
    async def test_of_two_decisions_at_once_one_counts(self, world: DatabaseWorld) -> None:
        asked = await ask(world, "m1")

        both = await asyncio.gather(
            patiently(lambda: decide(world, asked.number, "bob", ApprovalDecision.REFUSED)),
            patiently(lambda: decide(world, asked.number, "eve", ApprovalDecision.APPROVED)),
        )

        assert sorted(both) == [False, True]

    @in_world
    async def test_only_old_decisions_about_messages_that_are_gone_are_deleted(
        self, world: DatabaseWorld
    ) -> None:
        long_id = "x" * 5000
        asked = {
            name: await ask(world, name)
            for name in ("gone", long_id, "claimed", "waiting", "dead", "stored", "open")
        }
        for name, request in asked.items():
            if name != "open":
                await decide(world, request.number, "bob", ApprovalDecision.REFUSED)
        async with world.database.begin() as unit:
            await unit.claims.mark_completed("billing", "claimed")
            await unit.waiting.put(WaitingMessage("billing", "waiting", Waits.PARKED, payload=b""))
            await unit.dead_letters.put(replace(LETTER, message_id="dead"))
            await unit.inbox.store(InboxMessage("billing", "stored", payload=b""))
        await world.age(1000)
        asked["new"] = await ask(world, "new")
        await decide(world, asked["new"].number, "bob", ApprovalDecision.APPROVED)

        deleted = []
        for consumer in ("shipping", "billing", "billing", "billing"):
            async with world.database.begin() as unit:
                deleted.append(await unit.approvals.delete_decided(consumer, 500, 1))

        left = {name for name, one in asked.items() if await get(world, one.number)}
        assert deleted == [0, 1, 1, 0]
        assert left == {*asked} - {"gone", long_id}


async def ask(world: DatabaseWorld, message_id: str, consumer: str = "billing") -> Approval:
    """Make a request in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.approvals.ask(
            ApprovalAsked.DELETE_WAITING, consumer, message_id, "ann", "why", "ab" * 32
        )


async def get(world: DatabaseWorld, number: int) -> Approval | None:
    """Read a committed request."""
    async with world.database.begin() as unit:
        return await unit.approvals.get(number)


async def open_ones(
    world: DatabaseWorld, consumer: str | None, limit: int = 10
) -> Sequence[Approval]:
    """Read the open requests."""
    async with world.database.begin() as unit:
        return await unit.approvals.open_ones(consumer, limit)


async def decide(world: DatabaseWorld, number: int, who: str, decision: ApprovalDecision) -> bool:
    """Decide in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.approvals.decide(number, who, decision) is not None
