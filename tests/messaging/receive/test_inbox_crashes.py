"""Whatever dies when, an inbox's messages have one effect each; a killer is found out."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress

import pytest
from sqlalchemy import text

from semel.crashpoints import CrashPoint
from semel.errors import Retryable
from semel.messaging.consumer import consumer
from semel.messaging.failure import RetryableMessageError
from semel.messaging.receive.inbox import PLACE, Inbox, InboxWorker
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


async def start(world, ours):
    """Run a new worker; say whether it survives its messages."""
    try:
        await InboxWorker(ours.consumer, world.database, batch=4).run_until_empty()
    except Crash:
        next_process()
        await pass_time(world, 61)  # the row of a process that is gone runs out
        return False
    return True


@pytest.mark.parametrize("error", [Retryable("refused for now"), ValueError("a constraint")])
def test_a_commit_that_is_refused_is_no_death(database, error):
    async def test(world):
        ours = Handling()
        await Inbox(ours.consumer, world.database).store(message("1"))
        async with world.database.begin() as unit:
            dead = Member("stock", "dead", gone(), frozenset({PLACE}), 9)
            await unit.members.enter(dead, -1)
        worker = InboxWorker(ours.consumer, Refusing(world.database, ours, error))
        for _ in range(SETTINGS.poison_attempts):
            with suppress(Retryable):
                await worker.work_once()
            async with world.database.begin() as unit:
                assert await unit.members.notes("stock", ["1"]) == {}
            await pass_time(world, 3600)

        assert len(ours.seen) == SETTINGS.poison_attempts
        dead = await letter(world, "1")
        assert dead is None or dead.error_code != "CRASHED"

    run(database, test)


class Refusing:
    """A database that refuses every commit of a transaction in which the handler ran."""

    def __init__(self, database, ours, error):
        self._database, self._ours, self._error = database, ours, error
        self.classification = database.classification

    @asynccontextmanager
    async def begin(self):
        async with self._database.begin() as unit:
            before = len(self._ours.seen)
            yield unit
            if len(self._ours.seen) > before:
                raise self._error


def test_a_message_that_kills_its_worker_is_found_out_and_buried(database):
    async def test(world):
        ours = Killing()
        inbox = Inbox(ours.consumer, world.database)
        for n in range(8):
            await inbox.store(message(str(n), key=str(n)))

        starts = 1
        while not await start(world, ours):
            starts += 1

        assert starts == 2 + SETTINGS.poison_attempts
        dead = await letter(world, "3")
        assert (dead.error_code, dead.payload) == ("CRASHED", b"1")
        processed = [(await get(world, str(n))).processed_at is not None for n in range(8)]
        assert processed == [n != 3 for n in range(8)]
        async with world.database.begin() as unit:
            assert not await unit.members.others("stock", "", [PLACE])

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
        assert (await letter(world, "3")).error_code == "CRASHED"

    run(memory, test)


def test_after_a_clean_stop_nobody_is_careful(memory, caplog):
    async def test(world):
        ours = Handling()
        for n in range(3):
            await Inbox(ours.consumer, world.database).store(message(str(n)))
            await InboxWorker(ours.consumer, world.database).run_until_empty()

    run(memory, test)

    assert "unclean stop" not in caplog.text


class Overtaken:
    """A database in which another worker handles a message behind its note."""

    def __init__(self, inside, message_id):
        self._inside = inside
        self._message_id = message_id
        self.is_noted = False
        self.classification = inside.classification

    @asynccontextmanager
    async def begin(self):
        if self.is_noted:
            self.is_noted = False
            async with self._inside.begin() as unit:
                await unit.inbox.done("stock", self._message_id)
        async with self._inside.begin() as unit:
            yield unit
            self.is_noted = bool(await unit.members.notes("stock", [self._message_id]))


def test_only_what_is_noted_is_handled_alone(memory):
    async def test(world):
        handling = Handling()
        for name in ("1", "2"):
            await Inbox(handling.consumer, world.database).store(message(name))
        member = Member("stock", "dead", gone(), frozenset({PLACE}), 1)
        async with world.database.begin() as unit:
            await unit.members.enter(member, 60.0)
        worker = InboxWorker(handling.consumer, Overtaken(world.database, "1"))

        await worker.work_once()

        assert handling.seen == [], "the other one was never noted"
        await worker.run_until_empty()
        assert handling.seen == ["2"]

    run(memory, test)
