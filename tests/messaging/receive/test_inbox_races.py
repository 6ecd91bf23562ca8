"""A replay and an inbox that get one message at the same moment: its effect is there once."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from sqlalchemy import text

from semel.codec import FromHeader
from semel.errors import Misuse, Retryable
from semel.message import Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.outcome import Skipped
from semel.messaging.receive.inbox import Inbox, InboxWorker, Stored
from semel.operate.replay import Replay
from semel.operate.selection import Offsets
from semel.policy.vocabulary import Mode
from tests.messaging.act_world import BILLING, letters
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.replay_world import ALL_AT_ONCE, DEAD, P0, Service, counts, message
from tests.messaging.worlds import memory_database
from tests.stores.world import in_world

TWICE = replace(
    DEAD, retry=replace(DEAD.retry, max_attempts=2, initial_delay_seconds=0.0, max_delay_seconds=0)
)
MOST_TRANSACTIONS = 12
"""More than a replay of one message has."""

# Long enough for a transaction that nothing holds back.
PATIENCE_SECONDS = 0.2


class Watched:
    """A database that lets something happen right before one of its transactions."""

    def __init__(self, database, number, happens):
        self.database = database
        self.classification = database.classification
        self.left = number
        self.happens = happens

    @asynccontextmanager
    async def begin(self):
        if self.left == 0:
            await self.happens()
        self.left -= 1
        async with self.database.begin() as unit:
            yield unit


class Slow:
    """A database that lets something begin before one commit, and waits for it, not for ever."""

    def __init__(self, database, meanwhile=None):
        self.database = database
        self.classification = database.classification
        self.meanwhile = meanwhile
        self.began = None

    @asynccontextmanager
    async def begin(self):
        async with self.database.begin() as unit:
            yield unit
            if self.meanwhile is not None:
                self.began, self.meanwhile = asyncio.create_task(self.meanwhile()), None
                await asyncio.wait({self.began}, timeout=PATIENCE_SECONDS)


class RefusesOneCommit:
    """A database that refuses a commit, as a deferred constraint does, before somebody acts."""

    def __init__(self, database, somebody):
        self.database = database
        self.classification = database.classification
        self.somebody = somebody
        self.refuses = False

    def refuse(self):
        self.refuses = True

    @asynccontextmanager
    async def begin(self):
        try:
            async with self.database.begin() as unit:
                yield unit
                if self.refuses:
                    raise NonRetryableMessageError("no such account")
        finally:
            if self.refuses:
                self.refuses = False
                await self.somebody()


def once(act):
    """Return a hook of the handler that acts at its first call."""
    left = [act]

    def hook(message):
        if left:
            left.pop()()

    return hook


def be_down():
    raise ConnectionError("down")


def replay_of(service, database):
    return Replay(
        service.consumer,
        database,
        Offsets(P0, 0, 0),
        ALL_AT_ONCE,
        name="again",
        actor="ann",
        reader=service.broker.reader(),
        clock=service.clock,
    )


async def opened(world, settings=DEAD):
    service = await Service(world, settings).open()
    service.put("m1")
    return service


async def delivered(inbox, how):
    """Deliver the message until it is taken, as a broker does."""
    for _ in range(50):
        try:
            return await getattr(inbox, how)(message("m1"))
        except Retryable:
            await asyncio.sleep(0.01)
    raise AssertionError("nobody took the delivery")


async def work(service):
    """Let everybody finish who has something to do."""
    await InboxWorker(service.consumer, service.database).run_until_empty()
    await retry_due(service.consumer, service.database)


async def at_every_moment(world, settings, how, broken):
    """Replay a message while its inbox gets it before each of the replay's transactions."""
    moments = 0
    for number in range(MOST_TRANSACTIONS):
        service = await opened(world, settings)
        if broken is not None:
            service.broken = once(broken)

        async def happens(service=service):
            inbox = Inbox(service.consumer, world.database)
            try:
                await getattr(inbox, how)(message("m1"))
                await InboxWorker(service.consumer, world.database).run_until_empty()
            except ConnectionError:
                await delivered(inbox, how)

        watched = Watched(world.database, number, happens)
        report = await replay_of(service, watched).run()
        await work(service)

        assert (number, await service.paid()) == (number, ["m1"])
        assert broken is not None or set(counts(report)) <= {"handled", "duplicate"}
        assert await letters(world) == 0
        moments += watched.left < 0
        await forget(service)
    assert 2 < moments < MOST_TRANSACTIONS


async def forget(service):
    """Let the next moment find nothing of this one."""
    async with service.database.begin() as unit:
        for table in ("paid", "inbox_message", "processed_message", "replay_run"):
            await unit.session.execute(text(f"DELETE FROM {table}"))


class Races:
    @in_world
    async def test_an_inbox_stores_what_a_replay_is_about_to_handle(self, world):
        await at_every_moment(world, DEAD, "store", None)

    @in_world
    async def test_an_inbox_handles_what_a_replay_is_about_to_handle(self, world):
        await at_every_moment(world, DEAD, "store_and_handle", None)

    @in_world
    async def test_an_inbox_stores_what_a_replay_has_failed_at(self, world):
        await at_every_moment(world, TWICE, "store", be_down)

    @in_world
    async def test_an_inbox_handles_what_a_replay_has_failed_at(self, world):
        await at_every_moment(world, TWICE, "store_and_handle", be_down)

    @in_world
    async def test_a_delivery_in_the_midst_of_a_replays_transaction_is_a_duplicate(self, world):
        for how in ("store", "store_and_handle"):
            service = await opened(world)
            slow = Slow(world.database)
            deliver = partial(delivered, Inbox(service.consumer, world.database), how)
            service.broken = once(partial(setattr, slow, "meanwhile", deliver))

            report = await replay_of(service, slow).run()

            # One that is only stored does not wait for the replay: its worker finds the claim.
            answers = {"store": (Stored(), Skipped("duplicate"))}
            assert await slow.began in answers.get(how, (Skipped("duplicate"),))
            await work(service)
            assert counts(report) == {"handled": 1}
            assert await service.paid() == ["m1"]
            async with world.database.begin() as unit:
                row = await unit.inbox.get(BILLING, "m1")
            assert row is None or row.processed_at is not None
            await forget(service)

    @in_world
    async def test_a_replay_in_the_midst_of_an_inboxs_transaction_finds_a_duplicate(self, world):
        service = await opened(world)
        slow = Slow(world.database, replay_of(service, world.database).run)

        await Inbox(service.consumer, slow).store_and_handle(message("m1"))

        assert counts(await slow.began) == {"duplicate": 1}
        assert await service.paid() == ["m1"]

    @in_world
    async def test_a_replay_leaves_what_an_inbox_has_stored_to_its_worker(self, world):
        service = await opened(world)

        await Inbox(service.consumer, world.database).store(message("m1"))

        assert counts(await replay_of(service, world.database).run()) == {"left": 1}
        assert await service.paid() == []
        await work(service)
        assert await service.paid() == ["m1"]

    @in_world
    async def test_a_replay_while_an_inbox_stores_the_message_has_one_effect(self, world):
        service = await opened(world)
        slow = Slow(world.database, replay_of(service, world.database).run)

        await Inbox(service.consumer, slow).store(message("m1"))

        assert counts(await slow.began) in ({"left": 1}, {"handled": 1})
        await work(service)
        assert await service.paid() == ["m1"]

    @in_world
    async def test_what_somebody_else_handled_meanwhile_does_not_become_a_dead_letter(self, world):
        service = await opened(world)
        await Inbox(service.consumer, world.database).store(message("m1"))
        other = partial(handle_message, service.consumer, world.database, message("m1"))
        refusing = RefusesOneCommit(world.database, other)
        service.broken = once(refusing.refuse)

        await InboxWorker(service.consumer, refusing).run_until_empty()

        assert await service.paid() == ["m1"]
        assert await letters(world) == 0


class TestInSqlite(InSqlite, Races):
    pass


class TestInPostgres(InPostgres, Races):
    pass


def test_one_transaction_has_no_lease_to_give():
    service = Service(None)
    leased = replace(service.consumer, mode=Mode.LEASED)

    with pytest.raises(Misuse, match="no lease to give"):
        asyncio.run(Inbox(leased, None).store_and_handle(message("m1")))


def test_a_stop_that_comes_while_a_worker_takes_the_lead_ends_it():
    @consumer("stopped", id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        raise AssertionError(message)

    async def scenario() -> None:
        worker = InboxWorker(handle, memory_database())
        take = worker._leading.take

        async def stopped_meanwhile(outbox: Any) -> Any:
            leadership = await take(outbox)
            worker.stop()
            return leadership

        worker._leading.take = stopped_meanwhile  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            await worker.run()

    asyncio.run(scenario())
