"""Versions that come in any order: the one that others of its key wait for overtakes them."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from semel.codec import FromHeader, FromPayload, Reading
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Handled, ParkedAway, RetryStored
from semel.messaging.records import WaitingFilter
from semel.messaging.settings import ConsumerSettings, Order, RetryPolicy
from semel.operate import parking
from semel.policy.vocabulary import GapPolicy, GiveUp, RetryMode
from tests.messaging.places import InMemory, InPostgres, InSqlite
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

READING = Reading(id_from=FromHeader("message-id"), version_from=FromPayload("version"))
MOST_ROUNDS = 30


class Cases:
    """A consumer of versions, which are applied in their order or not at all."""

    def __init__(self, world: DatabaseWorld, gaps: GapPolicy = GapPolicy.RETRY) -> None:
        self.database = world.database
        self.applied: list[int] = []
        self.failures: dict[int, list[Exception]] = {}
        policy = ConsumerSettings(
            retry=RetryPolicy(
                max_attempts=MOST_ROUNDS,
                initial_delay_seconds=0.0,
                max_delay_seconds=0.0,
                mode=RetryMode.RETRY_TABLE,
            ),
            order=Order.KEY,
            holds_keys=True,
            on_exhausted=GiveUp.PARK,
            on_hopeless=GiveUp.PARK,
            versioned=True,
            gaps=gaps,
        )

        @consumer("cases", policy=policy, reading=READING)
        async def handle(message: Message, session: Any) -> None:
            if failures := self.failures.get(message.version or 0):
                raise failures.pop()
            self.applied.append(message.version or 0)

        self.consumer: Consumer = handle

    async def deliver(self, *versions: int) -> list[Any]:
        return [
            await handle_message(self.consumer, self.database, message(one)) for one in versions
        ]

    async def work_off(self) -> None:
        for _ in range(MOST_ROUNDS):
            await retry_due(self.consumer, self.database)

    async def waiting(self) -> list[str]:
        async with self.database.begin() as unit:
            found = await unit.waiting.find(WaitingFilter("cases"), 100)
        return [one.message_id for one in found]

    async def release(self, id: str) -> None:
        await parking.release(self.database, "cases", id, actor="ann", reason="mended")


def message(version: int) -> Message:
    return Message(
        f"v{version}",
        {"version": version},
        f'{{"version": {version}}}'.encode(),
        "case-7",
        headers={"message-id": f"v{version}".encode()},
        source=Coordinates("cases", 0, version),
        version=version,
    )


class Overtaking:
    @in_world
    async def test_a_missing_version_that_fails_is_tried_again_before_those_that_wait_for_it(
        self, world
    ):
        cases = Cases(world)
        cases.failures[2] = [RetryableMessageError("down")]
        *_, failed = await cases.deliver(1, 3, 2)

        await cases.work_off()

        assert isinstance(failed, RetryStored)
        assert cases.applied == [1, 2, 3]
        assert await cases.waiting() == []

    @in_world
    async def test_a_missing_version_that_fails_passes_a_parked_one(self, world):
        cases = Cases(world, GapPolicy.PARK_KEY)
        cases.failures[2] = [RetryableMessageError("down")]
        await cases.deliver(1, 3, 4, 2)

        await cases.work_off()
        waiting = await cases.waiting()
        await cases.release("v3")
        await cases.work_off()

        assert waiting == ["v3", "v4"]
        assert cases.applied == [1, 2, 3, 4]
        assert await cases.waiting() == []

    @in_world
    async def test_a_missing_version_that_is_parked_behind_others_can_be_released(self, world):
        cases = Cases(world, GapPolicy.PARK_KEY)
        cases.failures[2] = [NonRetryableMessageError("broken")]
        *_, parked = await cases.deliver(1, 3, 2)
        for id in ("v2", "v3"):
            await cases.release(id)
            await cases.work_off()

        assert isinstance(parked, ParkedAway)
        assert cases.applied == [1, 2, 3]
        assert await cases.waiting() == []

    @in_world
    async def test_versions_that_come_backwards_are_applied_in_their_order(self, world):
        cases = Cases(world)
        *_, last = await cases.deliver(5, 4, 3, 2, 1)

        await cases.work_off()

        assert isinstance(last, Handled)
        assert cases.applied == [1, 2, 3, 4, 5]
        assert await cases.waiting() == []

    @in_world
    async def test_a_version_overtakes_more_than_one_page_of_later_ones(self, world):
        cases = Cases(world)
        await cases.deliver(*range(3, 8), 2)
        first = await cases.waiting()

        await cases.deliver(1)
        await cases.work_off()

        assert first == ["v3", "v4", "v5", "v6", "v7", "v2"]
        assert cases.applied == [1, 2, 3, 4, 5, 6, 7]

    @in_world
    async def test_in_a_batch_a_version_that_fails_overtakes_later_ones(self, world):
        cases = Cases(world)
        cases.failures[2] = [RetryableMessageError("down")]
        together = [message(version) for version in (4, 3, 1, 2)]

        await consume_many(cases.consumer, cases.database, together)
        await cases.work_off()

        assert cases.applied == [1, 2, 3, 4]
        assert await cases.waiting() == []

    @in_world
    async def test_a_batch_in_reverse_order_is_applied_in_order(self, world):
        cases = Cases(world)
        together = [message(version) for version in (3, 2, 1)]

        await consume_many(cases.consumer, cases.database, together)
        await cases.work_off()

        assert cases.applied == [1, 2, 3]
        assert await cases.waiting() == []


class TestInMemory(InMemory, DatabaseContract):
    @pytest.mark.parametrize("fails", [0, 1, 2, 3, 4])
    def test_in_whatever_order_versions_come_and_whichever_fails_all_are_applied(self, fails):
        # Each order once, the version that fails in turns.
        for order in list(permutations(range(1, 5)))[fails::5]:
            self._apply(order, fails)

    def _apply(self, order: tuple[int, ...], fails: int) -> None:
        async def scenario(_: Any, world: DatabaseWorld) -> None:
            cases = Cases(world)
            cases.failures[fails] = [RetryableMessageError("down") for _ in range(3)]
            await cases.deliver(*order)
            await cases.work_off()
            assert cases.applied == [1, 2, 3, 4], order
            assert await cases.waiting() == [], order

        in_world(scenario)(self)


class TestInSqlite(InSqlite, Overtaking):
    pass


class TestInPostgres(InPostgres, Overtaking):
    pass
