"""Completing: what a handler has done is not done again because an answer was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from semel.errors import InDoubt, Permanent, Retryable
from semel.message import Message
from semel.messaging.handle.claims import ClaimLost, ClaimRequest, ClaimState, Locked
from semel.messaging.handle.lease import Lease, handle_leased
from semel.messaging.outcome import Handled, RetryLater
from semel.messaging.settings import RetryPolicy
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from tests.messaging.leases import leased, message
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.worlds import Effect, effects, memory_database

ONCE = RetryPolicy(max_attempts=1, jitter=False)
SHORT = 0.3
"""Seconds of a lease whose end a test waits for."""

SOON = 10.0


class Blips:
    """A database whose next transactions fail: before they begin, or behind their commit."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside
        self.classification = inside.classification
        self.before: list[Exception] = []
        self.after: list[Exception] = []

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        if self.before:
            raise self.before.pop(0)
        async with self.inside.begin() as unit:
            yield unit
        if self.after:
            raise self.after.pop(0)


class Completions:
    world: Callable[[], Any]

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ([Retryable("no connection")], []),
            ([Locked("the row"), InDoubt("no answer")], []),
            ([], [InDoubt("no answer")]),
            ([], [InDoubt("no answer"), Retryable("no connection")]),
        ],
        ids=["refused", "twice", "answer lost", "answer lost twice"],
    )
    def test_a_handler_that_succeeded_is_completed_when_the_database_answers_again(
        self, before, after
    ):
        async def scenario() -> None:
            async with self.world() as world:
                database = Blips(world.database)
                calls: list[int] = []

                async def work(message: Message, lease: Lease) -> str:
                    calls.append(message.attempt)
                    database.before, database.after = list(before), list(after)
                    return "exported"

                export = leased(work, retry=ONCE, keeps_results=True)

                outcome = await handle_leased(export, database, message(), "a")

                assert outcome == Handled("exported")
                assert calls == [1]
                async with world.database.begin() as unit:
                    row = await unit.claims.look_up("exports", "m1")
                    letter = await unit.dead_letters.get("exports", "m1")
                assert row is not None
                assert (row.state, row.result) == (ClaimState.COMPLETED, '"exported"')
                assert letter is None

        asyncio.run(scenario())


class TestCompletionsInSqlite(InSqlite, Completions):
    pass


class TestCompletionsInPostgres(InPostgres, Completions):
    pass


class Refuses(SqlAlchemyProcessedMessageStore):
    """Completes nothing for as long as *error* is set, and renews all the same."""

    error: Exception | None = None
    asked: int = 0

    async def mark_completed(
        self, consumer: str, message_id: str, fence: int | None = None, result: str | None = None
    ) -> bool:
        Refuses.asked += 1
        if Refuses.error is not None:
            raise Refuses.error
        return await super().mark_completed(consumer, message_id, fence, result)


class Place:
    """A database in memory that refuses completions, and a handler that succeeds."""

    def __init__(self, error: Exception, **settings: Any) -> None:
        self.inside = memory_database()
        self.classification = self.inside.classification
        Refuses.error, Refuses.asked = error, 0
        self.calls: list[int] = []
        self.consumer = leased(self._work, retry=ONCE, **settings)

    async def _work(self, message: Message, lease: Lease) -> None:
        self.calls.append(message.attempt)

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        async with self.inside.begin() as unit:
            unit.claims = Refuses(unit.session)
            yield unit

    async def deliver(self, owner: str = "a") -> Any:
        return await handle_leased(self.consumer, self, message(), owner)  # type: ignore[arg-type]

    async def row(self) -> Any:
        async with self.inside.begin() as unit:
            return await unit.claims.look_up("exports", "m1")


def test_a_lease_is_renewed_for_as_long_as_its_completion_is_tried():
    async def scenario() -> None:
        place = Place(Locked("the row"), lease_seconds=1.0)
        running = asyncio.create_task(place.deliver())
        await asyncio.sleep(1.5)

        other = await place.deliver("b")
        Refuses.error = None
        outcome = await asyncio.wait_for(running, SOON)

        assert isinstance(other, RetryLater)
        assert isinstance(outcome, Handled)
        assert place.calls == [1]
        assert Refuses.asked > 2

    asyncio.run(scenario())


def test_a_completion_that_never_succeeds_ends_with_the_lease_and_is_no_failed_attempt():
    async def scenario() -> None:
        place = Place(Locked("the row"), lease_seconds=SHORT)
        running = asyncio.create_task(place.deliver())
        while not Refuses.asked:
            await asyncio.sleep(0.01)
        async with place.inside.begin() as unit:
            row = await unit.claims.look_up("exports", "m1")
            assert row is not None
            await unit.claims.renew("exports", "m1", row.fence, -1.0)
            await unit.claims.lease("exports", ClaimRequest.of(message()), owner="b", seconds=30)

        outcome = await asyncio.wait_for(running, SOON)

        assert isinstance(outcome, RetryLater)
        assert outcome.failure is not None
        assert outcome.failure.exception.endswith("ClaimLost")
        row = await place.row()
        assert (row.state, row.owner) == (ClaimState.IN_PROGRESS, "b")

    asyncio.run(scenario())


def test_a_completion_that_cannot_work_is_not_the_handlers_failure():
    async def scenario() -> None:
        place = Place(Permanent("no such column"))

        outcome = await place.deliver()

        assert isinstance(outcome, RetryLater)
        row = await place.row()
        assert (row.state, row.attempts, row.error_code) == (ClaimState.IN_PROGRESS, 1, "")
        async with place.inside.begin() as unit:
            assert await unit.dead_letters.get("exports", "m1") is None

    asyncio.run(scenario())


def test_a_cancellation_reaches_its_caller_while_a_handler_that_lost_its_lease_cleans_up():
    async def scenario() -> None:
        database = memory_database()
        cleaning, clean = asyncio.Event(), asyncio.Event()

        async def work(message: Message, lease: Lease) -> None:
            async with database.begin() as unit:
                await unit.claims.renew("exports", "m1", lease.fence, -1.0)
                await unit.claims.lease("exports", ClaimRequest.of(message), owner="b", seconds=30)
            try:
                await asyncio.Event().wait()
            finally:
                cleaning.set()
                await clean.wait()

        export = leased(work, lease_seconds=SHORT)
        running = asyncio.create_task(handle_leased(export, database, message(), "a"))
        await asyncio.wait_for(cleaning.wait(), SOON)
        running.cancel()
        await asyncio.sleep(0.01)
        waits = not running.done()
        clean.set()
        await asyncio.wait({running}, timeout=SOON)

        assert waits, "the handler still runs"
        assert running.cancelled()

    asyncio.run(scenario())


def test_a_handler_that_lost_its_lease_and_ignores_that_does_not_hold_its_partition():
    async def scenario() -> None:
        database, ends = memory_database(), asyncio.Event()
        late: list[BaseException | None] = []

        async def work(message: Message, lease: Lease) -> None:
            if message.attempt > 1:
                return
            async with database.begin() as unit:
                await unit.claims.renew("exports", "m1", lease.fence, -1.0)
                await unit.claims.lease("exports", ClaimRequest.of(message), owner="b", seconds=0)
            while not ends.is_set():
                with suppress(asyncio.CancelledError):
                    await ends.wait()
            try:
                async with lease.completing():
                    late.append(None)
            except ClaimLost as error:
                late.append(error)

        export = leased(work, lease_seconds=SHORT)
        lost = await asyncio.wait_for(handle_leased(export, database, message(), "a"), SOON)
        again = await handle_leased(export, database, message(), "a")
        ends.set()
        async with asyncio.timeout(SOON):
            while len(late) < 2:
                await asyncio.sleep(0.01)

        assert isinstance(lost, RetryLater)
        assert isinstance(again, Handled)
        assert isinstance(late[1], ClaimLost)

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [Locked("the row"), InDoubt("no answer")])
def test_a_handler_that_swallows_the_refusal_of_its_effect_has_failed(error):
    async def scenario() -> None:
        database, tries = memory_database(), []

        async def work(message: Message, lease: Lease) -> None:
            tries.append(message.attempt)
            with suppress(Retryable, InDoubt):
                async with lease.completing() as session:
                    session.add(Effect("exports", message.id))
                    if message.attempt == 1:
                        raise error

        policy = RetryPolicy(initial_delay_seconds=0.0, max_delay_seconds=0.0)
        export = leased(work, retry=policy)
        first = await handle_leased(export, database, message(), "a")
        second = await handle_leased(export, database, message(), "a")

        assert isinstance(first, RetryLater)
        assert isinstance(second, Handled)
        assert tries == [1, 2]
        assert effects(database, "exports") == ["m1"]

    asyncio.run(scenario())
