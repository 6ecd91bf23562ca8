"""Whatever dies when, an inbox's messages have one effect each; a killer is found out."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import text

from semel.crashpoints import CrashPoint
from semel.errors import Retryable
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.receive.broker import INBOX
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.records import Member
from semel.testing.crash import Crash, crash_at
from tests.messaging.incoming import SETTINGS, Handling, get, letter, message
from tests.messaging.outgoing import pass_time, run
from tests.messaging.processes import gone, next_process

WINDOWS = [
    CrashPoint.HANDLE_AFTER,
    CrashPoint.MESSAGE_COMMIT_BEFORE,
    CrashPoint.MESSAGE_COMMIT_AFTER,
]


@pytest.mark.parametrize("point", [CrashPoint.CLAIM_AFTER, *WINDOWS])
def test_a_crash_while_a_message_is_stored_and_handled_has_one_effect(database, point):
    async def test(world):
        effects = Effects()
        await effects.create(world)
        inbox = Inbox(effects.consumer, world.database)

        with crash_at(point), pytest.raises(Crash):
            await inbox.store_and_handle(message("1"))
        await inbox.store_and_handle(message("1"))

        assert await effects.all(world) == ["1"]

    run(database, test)


@pytest.mark.parametrize("point", WINDOWS)
@pytest.mark.parametrize("occurrence", [1, 2])
def test_a_worker_that_crashes_handles_everything_once_all_the_same(database, point, occurrence):
    async def test(world):
        effects = Effects()
        await effects.create(world)
        inbox = Inbox(effects.consumer, world.database)
        for n in range(6):
            await inbox.store(message(str(n), key=str(n % 2)))
        worker = InboxWorker(effects.consumer, world.database, batch=2)

        with crash_at(point, occurrence=occurrence), pytest.raises(Crash):
            await worker.run_until_empty()
        await die(world)
        await worker.run_until_empty()

        assert sorted(await effects.all(world)) == ["0", "1", "2", "3", "4", "5"]

    run(database, test)


class Effects:
    """A handler whose effects are rows of its own table."""

    def __init__(self):
        @consumer("stock", policy=SETTINGS)
        async def handle(message, session):
            await session.execute(text("insert into effect values (:id)"), {"id": message.id})

        self.consumer = handle

    async def create(self, world):
        async with world.database.engine.begin() as connection:
            await connection.execute(text("drop table if exists effect"))
            await connection.execute(text("create table effect (id text)"))

    async def all(self, world):
        async with world.database.engine.connect() as connection:
            return (await connection.execute(text("select id from effect"))).scalars().all()


class Killing(Handling):
    """A handler whose process ends at some messages."""

    killers = frozenset({"3"})

    async def _handle(self, message, session):
        if message.id in self.killers:
            self.seen.append(message.id)
            raise Crash(message.id)
        return await super()._handle(message, session)


async def die(world):
    """Be the next process, after the lease and the row of the one before have run out."""
    next_process()
    await pass_time(world, 61)


async def parked(world, message_id):
    async with world.database.begin() as unit:
        return await unit.waiting.get("stock", message_id)


async def start(world, ours):
    """Run a new worker; say whether it survives its messages."""
    try:
        await InboxWorker(ours.consumer, world.database, batch=4).run_until_empty()
    except Crash:
        await die(world)
        return False
    return True


@pytest.mark.parametrize("error", [Retryable("refused for now"), ValueError("a constraint")])
def test_a_commit_that_is_refused_is_no_death(database, error):
    async def test(world):
        ours = Remembering()
        await Inbox(ours.consumer, world.database).store(message("1"))
        async with world.database.begin() as unit:
            dead = Member("stock", "dead", gone(), frozenset({INBOX}), 9)
            await unit.members.enter(dead, -1)
        worker = InboxWorker(ours.consumer, Refusing(world.database, ours, error))

        await worker.run_until_empty()

        assert len(ours.seen) == SETTINGS.poison_attempts
        async with world.database.begin() as unit:
            assert await unit.members.notes("stock", ["1"]) == {}
        assert (await letter(world, "1")).error_code != "CRASHED"
        assert await parked(world, "1") is None

    run(database, test)


class Remembering(Handling):
    """A handler that remembers its task, because other transactions are open beside it."""

    handles_in = None

    async def _handle(self, message, session):
        self.handles_in = asyncio.current_task()
        return await super()._handle(message, session)


class Refusing:
    """A database that refuses every commit of a transaction in which the handler ran."""

    def __init__(self, database, ours, error):
        self._database, self._ours, self._error = database, ours, error
        self.classification = database.classification

    @asynccontextmanager
    async def begin(self):
        async with self._database.begin() as unit:
            yield unit
            if self._ours.handles_in is asyncio.current_task():
                self._ours.handles_in = None
                raise self._error


def test_a_message_that_kills_its_worker_is_found_out_and_parked(database):
    async def test(world):
        ours = Killing()
        inbox = Inbox(ours.consumer, world.database)
        for n in range(8):
            await inbox.store(message(str(n), key=str(n)))

        starts = 1
        while not await start(world, ours):
            starts += 1

        assert starts == 2 + SETTINGS.poison_attempts
        killer = await parked(world, "3")
        assert (killer.error_code, killer.payload) == ("CRASHED", b"1")
        processed = [(await get(world, str(n))).processed_at is not None for n in range(8)]
        assert processed == [n != 3 for n in range(8)]
        async with world.database.begin() as unit:
            assert not await unit.members.others("stock", "", [INBOX])

    run(database, test)


def test_messages_that_fail_and_are_outlived_are_not_taken_for_killers(memory):
    async def test(world):
        ours = Killing()
        ours.failures = {"1": [RetryableMessageError("not yet")] * 3}
        for n in range(4):
            await Inbox(ours.consumer, world.database).store(message(str(n)))
        while not await start(world, ours):
            pass

        assert (await letter(world, "1")).error_code == "DEPENDENCY_UNAVAILABLE"
        assert (await parked(world, "3")).error_code == "CRASHED"

    run(memory, test)


def test_after_a_clean_stop_nobody_is_careful(memory, caplog):
    async def test(world):
        ours = Handling()
        for n in range(3):
            await Inbox(ours.consumer, world.database).store(message(str(n)))
            await InboxWorker(ours.consumer, world.database).run_until_empty()

    run(memory, test)

    assert "unclean stop" not in caplog.text
