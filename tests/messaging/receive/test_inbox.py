"""The inbox handles each message once: with its delivery, or later by a worker."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import Column, ForeignKey, Integer, MetaData, String, Table, insert, text

from semel.codec import FromHeader, Reading
from semel.errors import Misuse, Retryable
from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handling_now
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Conflicted, Handled, Skipped
from semel.messaging.receive.inbox import Inbox, InboxWorker, Stored
from semel.messaging.records import InboxMessage
from semel.messaging.settings import ConsumerSettings
from semel.operate.audit import NoSuchMessage
from semel.operate.deadletters import retry_dead_letter
from semel.operate.parking import release
from semel.policy.vocabulary import Duplicates, GiveUp, Mode
from tests.messaging.incoming import AT_ONCE, SETTINGS, Handling, get, letter, message
from tests.messaging.outgoing import run, until


def test_a_message_is_stored_and_handled_in_one_transaction_and_once(database):
    async def test(world):
        ours = Handling()
        inbox = Inbox(ours.consumer, world.database)

        first = await inbox.store_and_handle(message("1"))
        second = await inbox.store_and_handle(message("1"))

        assert first == Handled({"payload": 1, "attempt": 1})
        assert second == Skipped("duplicate")
        assert ours.seen == ["1"]
        assert (await get(world, "1")).processed_at is not None

    run(database, test)


def test_the_result_is_kept_when_it_is_wanted_and_duplicates_get_it(database):
    async def test(world):
        ours = Handling(ConsumerSettings(keeps_results=True))
        inbox = Inbox(ours.consumer, world.database)

        await inbox.store_and_handle(message("1"))

        again = await inbox.store_and_handle(message("1"))
        assert again == Skipped("duplicate", '{"payload": 1, "attempt": 1}')

    run(database, test)


def test_a_handler_that_fails_leaves_nothing_behind(database):
    async def test(world):
        ours = Handling()
        ours.failures = {"1": [ZeroDivisionError()]}
        inbox = Inbox(ours.consumer, world.database)

        with pytest.raises(ZeroDivisionError):
            await inbox.store_and_handle(message("1"))
        assert await get(world, "1") is None
        ours.failures = {}

        assert isinstance(await inbox.store_and_handle(message("1")), Handled)

    run(database, test)


def test_the_same_id_with_another_payload_is_a_conflict_with_both_hashes(database):
    async def test(world):
        ours = Handling()
        inbox = Inbox(ours.consumer, world.database)
        await inbox.store_and_handle(message("1", 1))
        other = message("1", 2)

        found = [await inbox.store_and_handle(other), await inbox.store(other)]

        assert found == [Conflicted(message("1", 1).digest, other.digest)] * 2
        assert ours.seen == ["1"]
        its_own = f"conflict:{other.digest[:16]}:1"
        kept = await letter(world, its_own)
        assert (kept.payload, kept.outcome) == (b"2", "conflict")

    run(database, test)


def test_stored_messages_are_handled_later_in_order_per_key(database):
    async def test(world):
        ours = Handling()
        inbox = Inbox(ours.consumer, world.database)
        names = [f"{key}{n}" for n in range(4) for key in "ab"]

        stored = [await inbox.store(message(name, key=name[0])) for name in names]
        again = await inbox.store(message("a0", key="a"))
        await InboxWorker(ours.consumer, world.database, batch=3).run_until_empty()

        assert stored == [Stored()] * 8
        assert again == Skipped("stored before")
        assert sorted(ours.seen) == sorted(names)
        assert [n for n in ours.seen if n[0] == "a"] == ["a0", "a1", "a2", "a3"]
        assert await inbox.store_and_handle(message("a0", key="a")) == Skipped("duplicate")

    run(database, test)


def test_a_worker_hands_over_what_was_stored(memory):
    async def test(world):
        seen = []

        @consumer("stock")
        async def handle(message):
            seen.append((message, handling_now().consumer))

        sent = message("1", {"sku": "X"}, "shelf")
        sent = Message(
            sent.id,
            {"sku": "X"},
            b'{"sku":"X"}',
            "shelf",
            "reserve",
            sent.headers,
            sent.source,
            12.5,
            schema_version="2",
            correlation_id="c",
        )
        await Inbox(handle, world.database).store(sent)
        await InboxWorker(handle, world.database).run_until_empty()

        assert seen == [(sent, "stock")]
        assert seen[0][0].digest == sent.digest

    run(memory, test)


class FailsOnce(Handling):
    """A handler that fails at the first attempt of one message."""

    async def _handle(self, message, session):
        result = await super()._handle(message, session)
        if message.id == "a1" and message.attempt == 1:
            raise RetryableMessageError("not yet")
        return result


def test_a_failed_message_is_tried_again_and_its_key_waits(database):
    async def test(world):
        ours = FailsOnce(ConsumerSettings(retry=AT_ONCE, keeps_results=True))
        inbox = Inbox(ours.consumer, world.database)
        for name in ("a1", "a2", "b1"):
            await inbox.store(message(name, key=name[0]))

        await InboxWorker(ours.consumer, world.database).run_until_empty()

        assert sorted(ours.seen) == ["a1", "a1", "a2", "b1"]
        assert [name for name in ours.seen if name[0] == "a"] == ["a1", "a1", "a2"]
        done = await get(world, "a1")
        assert (done.attempts, done.error) == (2, "")
        assert done.result == '{"payload": 1, "attempt": 2}'

    run(database, test)


def test_after_the_last_attempt_the_message_stays_and_is_a_dead_letter(database):
    async def test(world):
        ours = Handling()
        ours.failures = {"a1": [RetryableMessageError("out of stock")]}
        inbox = Inbox(ours.consumer, world.database)
        await inbox.store(message("a1", key="a"))
        await inbox.store(message("a2", key="a"))

        await InboxWorker(ours.consumer, world.database, poll_seconds=0.01).run_until_empty()

        assert ours.seen == ["a1", "a1", "a1", "a2"]
        stays = await get(world, "a1")
        assert (stays.due_at, stays.processed_at, stays.attempts) == (None, None, 3)
        assert stays.error == "DEPENDENCY_UNAVAILABLE: out of stock"
        dead = await letter(world, "a1")
        assert (dead.payload, dead.reason, dead.attempts) == (b"1", "out of stock", 3)
        assert (dead.owner, dead.outcome, dead.topic, dead.offset) == (
            "warehouse",
            "dlq",
            "orders",
            7,
        )

    run(database, test)


@pytest.mark.parametrize("code", ["REJECTED", "TIMEOUT", "OF_ITS_OWN"])
def test_a_hopeless_message_is_tried_once(memory, code):
    async def test(world):
        ours = Handling()
        ours.failures = {"1": [NonRetryableMessageError("unknown sku", code)]}
        await Inbox(ours.consumer, world.database).store(message("1"))

        await InboxWorker(ours.consumer, world.database).run_until_empty()

        assert ours.seen == ["1"]
        assert (await letter(world, "1")).error_code == code

    run(memory, test)


def test_a_message_that_was_given_up_is_tried_again_when_a_person_says_so(database):
    async def test(world):
        ours = Handling()
        ours.failures = {"1": [NonRetryableMessageError("unknown sku")]}
        inbox = Inbox(ours.consumer, world.database)
        await inbox.store(message("1"))
        worker = InboxWorker(ours.consumer, world.database)
        await worker.run_until_empty()
        ours.failures = {}

        assert await retry_dead_letter(world.database, "stock", "1", actor="ann") == 1
        with pytest.raises(NoSuchMessage):
            await retry_dead_letter(world.database, "stock", "1", actor="ann")
        await worker.run_until_empty()

        assert (await get(world, "1")).processed_at is not None
        assert await letter(world, "1") is None

    run(database, test)


def test_a_payload_that_cannot_be_read_is_a_dead_letter_of_its_own_kind(memory):
    async def test(world):
        ours = Handling()
        await Inbox(ours.consumer, world.database).store(message("1", "{no json"))

        def refuse(payload):
            raise ValueError("no such field")

        await InboxWorker(ours.consumer, world.database).run_until_empty()
        reading = Reading(FromHeader("message-id"), model=refuse)
        strict = Consumer("stock", ours.consumer.handler, reading, SETTINGS)
        await Inbox(strict, world.database).store(message("2"))
        await InboxWorker(strict, world.database).run_until_empty()

        assert ours.seen == []
        for message_id in ("1", "2"):
            assert (await letter(world, message_id)).outcome == "deserialization_failure"

    run(memory, test)


def test_an_error_of_one_message_takes_back_nothing_of_its_neighbours(database):
    async def test(world):
        ours = Handling()
        ours.failures = {"2": [NonRetryableMessageError("no")]}
        inbox = Inbox(ours.consumer, world.database)
        for n in range(5):
            await inbox.store(message(str(n)))

        await InboxWorker(ours.consumer, world.database).run_until_empty()

        assert ours.seen == ["0", "1", "2", "3", "4"]
        done = [(await get(world, str(n))).processed_at is not None for n in range(5)]
        assert done == [True, True, False, True, True]

    run(database, test)


@pytest.mark.postgres
def test_a_constraint_that_fails_at_the_commit_is_blamed_on_its_message_alone(postgres):
    metadata = MetaData()
    Table("shelf", metadata, Column("name", String, primary_key=True))
    item = Table(
        "item",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("shelf", ForeignKey("shelf.name", deferrable=True, initially="DEFERRED")),
    )

    @consumer("stock", policy=SETTINGS)
    async def handle(message, session):
        shelf = "nowhere" if message.id == "2" else None
        await session.execute(insert(item).values(id=int(message.id), shelf=shelf))

    async def test(world):
        async with world.database.engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        inbox = Inbox(handle, world.database)
        for n in range(5):
            await inbox.store(message(str(n)))

        await InboxWorker(handle, world.database, poll_seconds=0.01).run_until_empty()

        assert (await letter(world, "2")).error_code == "CONSTRAINT_VIOLATED"
        async with world.database.engine.connect() as connection:
            found = (await connection.execute(text("select id from item order by id"))).scalars()
            assert found.all() == [0, 1, 3, 4]

    run(postgres, test)


@pytest.mark.postgres
def test_workers_at_once_share_the_work_and_keep_the_order_of_keys(postgres):
    async def test(world):
        ours = Handling()
        inbox = Inbox(ours.consumer, world.database)
        names = [f"{key}{n}" for n in range(5) for key in "abcd"]
        for name in names:
            await inbox.store(message(name, key=name[0]))

        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                worker = InboxWorker(ours.consumer, world.database, batch=2, poll_seconds=0.01)
                tasks.create_task(worker.run_until_empty())

        assert sorted(ours.seen) == sorted(names)
        for key in "abcd":
            assert [n for n in ours.seen if n[0] == key] == [f"{key}{n}" for n in range(5)]

    run(postgres, test)


def test_a_worker_runs_until_it_is_stopped_and_is_woken(memory):
    async def test(world):
        ours = Handling()
        inbox = Inbox(ours.consumer, world.database)
        worker = InboxWorker(ours.consumer, world.database, poll_seconds=3600)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.run())
            await asyncio.sleep(0.01)
            await inbox.store(message("1"))
            worker.wake()
            await until(lambda: ours.seen == ["1"])
            worker.stop()

    run(memory, test)


def test_a_database_that_is_away_is_no_failure_of_the_message(memory):
    async def test(world):
        ours = Handling()
        await Inbox(ours.consumer, world.database).store(message("1"))

        class Away:
            classification = world.database.classification
            calls = 0

            def begin(self):
                self.calls += 1
                if self.calls < 3:
                    raise Retryable("away")
                return world.database.begin()

        worker = InboxWorker(ours.consumer, Away(), poll_seconds=0.001)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(worker.run())
            await until(lambda: ours.seen == ["1"])
            worker.stop()

        assert (await get(world, "1")).attempts == 1

    run(memory, test)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (ConsumerSettings(versioned=True), "versions"),
        (ConsumerSettings(duplicates=Duplicates.INVOKE), "for a duplicate"),
    ],
)
def test_what_an_inbox_would_not_do_is_refused(memory, settings, why):
    @consumer("stock", policy=settings)
    async def handle(message, session):
        pass

    with pytest.raises(Misuse, match=why):
        InboxWorker(handle, memory)


def test_a_consumer_that_parks_holds_the_key_of_what_it_gave_up(database):
    async def test(world):
        ours = Handling(ConsumerSettings(retry=AT_ONCE, on_hopeless=GiveUp.PARK))
        ours.failures = {"a1": [NonRetryableMessageError("unknown sku")]}
        inbox = Inbox(ours.consumer, world.database)
        for name in ("a1", "a2", "b1"):
            await inbox.store(message(name, key=name[0]))

        await InboxWorker(ours.consumer, world.database).run_until_empty()
        ours.failures = {}
        held = list(ours.seen)
        await release(world.database, "stock", "a1", actor="ann")
        await InboxWorker(ours.consumer, world.database).run_until_empty()

        assert held == ["a1", "b1"]
        assert ours.seen == ["a1", "b1", "a1", "a2"]
        rows = [await get(world, name) for name in ("a1", "a2", "b1")]
        assert all(row.processed_at is not None for row in rows)

    run(database, test)


def test_a_handler_of_batches_gets_what_was_stored_together(database):
    async def test(world):
        seen = []

        @consumer("stock", policy=SETTINGS, batches=True)
        async def handle(messages, session):
            seen.append([message.id for message in messages])

        inbox = Inbox(handle, world.database)
        for n in range(5):
            await inbox.store(message(str(n)))
        await InboxWorker(handle, world.database, batch=3).run_until_empty()

        assert seen == [["0", "1", "2"], ["3", "4"]]
        assert (await get(world, "4")).processed_at is not None

    run(database, test)


def test_a_handler_that_takes_a_lease_works_on_an_inbox(database):
    async def test(world):
        seen = []

        @consumer("stock", policy=SETTINGS, mode=Mode.LEASED)
        async def handle(message, lease):
            seen.append(message.id)

        await Inbox(handle, world.database).store(message("1"))
        await InboxWorker(handle, world.database).run_until_empty()

        assert seen == ["1"]
        assert (await get(world, "1")).processed_at is not None

    run(database, test)


@pytest.mark.postgres
def test_a_message_whose_transaction_commits_late_is_handled_after_later_ones(postgres):
    async def test(world):
        ours = Handling()
        worker = InboxWorker(ours.consumer, world.database, poll_seconds=0.01)
        async with asyncio.TaskGroup() as tasks:
            async with world.database.begin() as unit:
                await unit.inbox.store(InboxMessage.of("stock", message("late")))
                await Inbox(ours.consumer, world.database).store(message("early"))
                tasks.create_task(worker.run())
                await until(lambda: ours.seen == ["early"])
            await until(lambda: ours.seen == ["early", "late"])
            worker.stop()

        assert (await get(world, "late")).processed_at is not None

    run(postgres, test)


def test_a_worker_that_stands_by_takes_over_when_the_leader_stops(database):
    async def test(world):
        ours = Handling()
        inbox = Inbox(ours.consumer, world.database)
        first, second = (
            InboxWorker(ours.consumer, world.database, poll_seconds=0.01) for _ in range(2)
        )
        async with asyncio.TaskGroup() as tasks:
            leading = tasks.create_task(first.run())
            await inbox.store(message("1"))
            await until(lambda: ours.seen == ["1"])
            tasks.create_task(second.run())
            await inbox.store(message("2"))
            await until(lambda: ours.seen == ["1", "2"])
            first.stop()
            await leading
            await inbox.store(message("3"))
            await until(lambda: ours.seen == ["1", "2", "3"])
            second.stop()

    run(database, test)
