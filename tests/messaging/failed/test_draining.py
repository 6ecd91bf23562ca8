"""What waits is handled many at once, and ends as if each had had a transaction of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import RetryWorker, retry_due
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import TOGETHER_SECONDS
from semel.messaging.handle.claims import ClaimRequest, ClaimState, Failure
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import (
    DeadLettered,
    Handled,
    Outcome,
    ParkedAway,
    RetryStored,
    Skipped,
)
from semel.messaging.records import WaitingFilter, WaitingMessage
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import Duplicates, RetryMode, StalePolicy
from semel.testing.clock import SimulatedClock
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.processes import next_process
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

AT_ONCE = RetryPolicy(
    max_attempts=3, initial_delay_seconds=0, max_delay_seconds=0, mode=RetryMode.RETRY_TABLE
)


class Dies(BaseException):
    """The end of a process, as far as a test can have one."""


CLOCK = SimulatedClock()
"""Only slow messages take time, however busy the machine is."""


@pytest.fixture(autouse=True)
def _simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.messaging.handle.batch.SYSTEM_CLOCK", CLOCK)


class Service:
    """A handler whose failures are given by id; counts the transactions it is called in."""

    def __init__(self, database: Any, **settings: Any) -> None:
        self.database = database
        self.failures: dict[str, BaseException] = {}
        self.acts: dict[str, Callable[[], None]] = {}
        self.slow: set[str] = set()
        self.calls: list[str] = []
        self.sessions: list[Any] = []
        chosen = ConsumerSettings(retry=AT_ONCE, holds_keys=True, **settings)

        @consumer("c", policy=chosen, id_from=FromHeader("id"))
        async def handle(message: Message, session: Any) -> None:
            self.calls.append(message.id)
            if not any(session is known for known in self.sessions):
                self.sessions.append(session)
            if message.id in self.slow:
                CLOCK.advance(1.1 * TOGETHER_SECONDS)
            self.acts.get(message.id, lambda: None)()
            if message.id in self.failures:
                raise self.failures[message.id]

        self.consumer: Consumer = handle

    async def fill(self, *names: str) -> None:
        """Let messages fail once; ``k1.2`` is the second one of the key ``k1``."""
        for number, name in enumerate(names):
            self.failures[name] = RetryableMessageError("not yet")
            headers = {"id": name.encode()}
            source = Coordinates("t", 0, number)
            given = Message(name, {}, b"{}", name.partition(".")[0], headers=headers, source=source)
            await handle_message(self.consumer, self.database, given)
        self.failures.clear()
        self.calls.clear()
        self.sessions.clear()

    async def retry(self) -> dict[str, type]:
        done = await retry_due(self.consumer, self.database)
        return {name: type(outcome) for name, outcome in done}

    async def waiting(self) -> list[str]:
        async with self.database.begin() as unit:
            found = await unit.waiting.find(WaitingFilter("c"), 100)
        return [waiting.message_id for waiting in found]

    async def noted(self, *names: str) -> frozenset[str]:
        async with self.database.begin() as unit:
            return frozenset(await unit.members.notes("c", names))


async def _alone(service: Service, message: Message, waiting: WaitingMessage | None) -> Outcome:
    return await handle_message(service.consumer, service.database, message, waiting)


async def _leased(service: Service, message: Message, waiting: WaitingMessage | None) -> Outcome:
    return await handle_leased(service.consumer, service.database, message, "me", waiting=waiting)


class Draining(DatabaseContract):
    @in_world
    async def test_whatever_its_claim_still_holds_back_stays_in_the_room(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(world.database)
        names = ["leased", "late", "parked"]
        await service.fill(*names)
        async with world.database.begin() as unit:
            await unit.claims.lease(
                "c", ClaimRequest("leased"), owner="another", seconds=60, stale=StalePolicy.WAIT
            )
            for name, failure in {
                "late": Failure(ClaimState.FAILED_RETRYABLE, 1, "X", delay_seconds=60),
                "parked": Failure(ClaimState.PARKED, 1, "X"),
            }.items():
                await unit.claims.mark_failed("c", name, failure)

        for handle in (None, partial(_alone, service), partial(_leased, service)):
            await retry_due(service.consumer, world.database, handle=handle)

            assert (await service.waiting(), service.calls) == (names, [])

    @in_world
    async def test_messages_of_different_keys_share_a_transaction(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(world.database)
        names = [f"k{number}" for number in range(8)]
        await service.fill(*names)

        done = await service.retry()

        assert done == dict.fromkeys(names, Handled)
        assert service.calls == names
        assert len(service.sessions) < len(names)
        assert await service.waiting() == []
        assert await service.noted(*names) == frozenset()

    @in_world
    async def test_messages_of_one_key_leave_in_their_order(self, world: DatabaseWorld) -> None:
        service = Service(world.database)
        await service.fill("a.1", "b.1", "a.2", "b.2", "a.3")

        while await service.retry():
            pass

        for key in ("a", "b"):
            of_key = [name for name in service.calls if name.startswith(key)]
            assert of_key == sorted(of_key), service.calls
        assert sorted(service.calls) == ["a.1", "a.2", "a.3", "b.1", "b.2"]
        assert await service.waiting() == []

    @in_world
    async def test_a_failure_is_its_own_and_calls_no_neighbour_again(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(world.database)
        await service.fill("a", "b", "c", "d", "e")
        service.failures["b"] = RetryableMessageError("still not")
        service.failures["d"] = NonRetryableMessageError("never")

        done = await service.retry()

        assert service.calls == ["a", "b", "c", "d", "e"]
        assert done == {
            "a": Handled,
            "b": RetryStored,
            "c": Handled,
            "d": DeadLettered,
            "e": Handled,
        }
        assert await service.waiting() == ["b"]
        async with world.database.begin() as unit:
            rows = {name: await unit.claims.look_up("c", name) for name in "abd"}
            letter = await unit.dead_letters.get("c", "d")
        assert letter is not None
        assert {name: (row.state, row.attempts) for name, row in rows.items() if row} == {
            "a": (ClaimState.COMPLETED, 2),
            "b": (ClaimState.FAILED_RETRYABLE, 2),
            "d": (ClaimState.FAILED_TERMINAL, 2),
        }
        assert await service.noted("a", "b", "c", "d", "e") == frozenset()

    @in_world
    async def test_attempts_run_out_among_many_as_they_do_alone(self, world: DatabaseWorld) -> None:
        service = Service(world.database)
        await service.fill("a", "b", "c")
        service.failures["b"] = RetryableMessageError("still not")

        found = [await service.retry() for _ in range(2)]

        assert [one["b"] for one in found] == [RetryStored, DeadLettered]
        assert await service.waiting() == []

    @in_world
    async def test_what_was_handled_meanwhile_is_a_duplicate(self, world: DatabaseWorld) -> None:
        service = Service(world.database)
        await service.fill("a", "b")
        async with world.database.begin() as unit:
            await unit.claims.mark_completed("c", "a")

        assert await service.retry() == {"a": Skipped, "b": Handled}
        assert service.calls == ["b"]
        assert await service.waiting() == []

    @in_world
    async def test_an_invoked_duplicate_that_fails_waits_for_its_backoff(
        self, world: DatabaseWorld
    ) -> None:
        """Among others and alone: nobody delivers it again, so its row must say when."""
        service = Service(world.database, duplicates=Duplicates.INVOKE)
        await service.fill("a", "b")
        later = replace(AT_ONCE, initial_delay_seconds=60, max_delay_seconds=60, jitter=False)
        settings = replace(service.consumer.settings, retry=later)
        service.consumer = service.consumer.with_settings(settings)
        async with world.database.begin() as unit:
            await unit.claims.mark_completed("c", "a")
        service.failures["a"] = RetryableMessageError("still not")

        found = [await service.retry() for _ in range(2)]
        await world.age(61)
        found += [await service.retry() for _ in range(2)]
        await world.age(61)
        found += [await service.retry() for _ in range(2)]

        assert found == [
            {"a": RetryStored, "b": Handled},
            {},
            {"a": RetryStored},
            {},
            {"a": DeadLettered},
            {},
        ]
        assert service.calls == ["a", "b", "a", "a"]
        assert await service.waiting() == []

    @in_world
    async def test_after_a_death_each_is_handled_alone_and_only_the_killer_is_parked(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(world.database, poison_attempts=2)
        await service.fill("a", "b", "c", "d")
        service.failures["c"] = Dies()

        deaths = 0
        found: dict[str, type] = {}
        while deaths < 10:
            try:
                found |= await service.retry()
                break
            except Dies:
                next_process()
                deaths += 1

        assert deaths == 3, "once among others, which blames nobody, and twice alone"
        assert found["c"] is ParkedAway
        assert [service.calls.count(name) for name in "abcd"][2] == 3
        assert await service.waiting() == ["c"]
        assert await service.noted("a", "b", "c", "d") == frozenset()
        async with world.database.begin() as unit:
            states = [await unit.claims.look_up("c", name) for name in "abd"]
        assert [row.state for row in states if row] == [ClaimState.COMPLETED] * 3

    @in_world
    async def test_a_crash_before_the_commit_leaves_its_messages_to_be_done_once(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(world.database)
        await service.fill("a", "b", "c")
        service.failures["c"] = Dies()

        try:
            await service.retry()
        except Dies:
            next_process()
            service.failures.clear()
        assert await service.waiting() == ["b", "c"], "the first has a transaction of its own"
        done = await service.retry()

        assert done == dict.fromkeys("bc", Handled)
        assert await service.waiting() == []
        assert await service.noted("a", "b", "c") == frozenset()

    @in_world
    async def test_only_the_keys_of_what_is_handled_now_are_locked(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(world.database)
        names = [f"k{number}" for number in range(8)]
        await service.fill(*names)
        held: list[list[str]] = []

        await retry_due(service.consumer, Watching(world.database, held))

        assert held == [["k0"], ["k1", "k2"], ["k3", "k4", "k5", "k6"], ["k7"]]

    @in_world
    async def test_behind_a_slow_message_there_is_one_to_a_transaction(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(world.database)
        names = [f"k{number}" for number in range(6)]
        await service.fill(*names)
        held: list[list[str]] = []
        service.slow = {"k2"}

        await retry_due(service.consumer, Watching(world.database, held))

        assert held == [["k0"], ["k1", "k2"], ["k3"], ["k4", "k5"]]

    @in_world
    async def test_a_stop_finishes_the_transaction_at_hand_and_leaves_the_rest(
        self, world: DatabaseWorld
    ) -> None:
        service = Service(world.database)
        names = [f"k{number}" for number in range(8)]
        await service.fill(*names)
        worker = RetryWorker(service.consumer, world.database)
        service.acts["k1"] = worker.stop

        await worker.run()

        assert service.calls == names[:3]
        assert await service.waiting() == names[3:]
        assert await service.noted(*names) == frozenset()


class Watching:
    """A database that writes down which keys each transaction holds."""

    def __init__(self, database: Any, held: list[list[str]]) -> None:
        self._database = database
        self._held = held
        self.classification = database.classification

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self._database.begin() as unit:
            hold = unit.waiting.hold

            async def watched(consumer: str, keys: Sequence[str]) -> Any:
                self._held.append(list(keys))
                return await hold(consumer, keys)

            unit.waiting.hold = watched
            yield unit


class TestInSqlite(InSqlite, Draining):
    pass


class TestInPostgres(InPostgres, Draining):
    pass
