"""A handler may be a plain function: in a thread, with a session of the same transaction."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from sqlalchemy import select, text

from semel.errors import Misuse
from semel.message import Message
from semel.messaging import dispatcher, handle_message
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handling_now
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.thread import BlockingCall
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Handled, Skipped
from semel.messaging.send.outbox import outgoing_id
from semel.messaging.settings import ConsumerSettings
from semel.outboxes import Outbox
from tests.messaging.places import InMemory, InPostgres, Scenarios
from tests.messaging.worlds import Base, Effect, memory_database


async def with_effects(database):
    async with database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    return database


async def values(database):
    async with database.begin() as unit:
        asked = select(Effect.value).order_by(Effect.number)
        return (await unit.session.execute(asked)).scalars().all()


class PlainFunctions(Scenarios):
    def test_its_rows_and_its_claim_are_committed_together(self):
        threads = []

        @consumer("billing")
        def on_paid(message, session):
            threads.append(threading.current_thread())
            before = session.execute(text("SELECT count(*) FROM test_effect")).scalar_one()
            session.add(Effect("paid", before))
            session.flush()
            assert handling_now().message.id == message.id

        async def scenario(world):
            database = await with_effects(world.database)
            outcomes = [await handle_message(on_paid, database, Message(id, {})) for id in "aab"]
            assert [type(one) for one in outcomes] == [Handled, Skipped, Handled]
            assert await values(database) == [0, 1]

        self.run(scenario)
        assert threading.main_thread() not in threads

    def test_it_sends_and_takes_back_without_await_in_the_same_transaction(self):
        outbox, sent = Outbox(), []

        @consumer("billing")
        def on_paid(message, session):
            sent.append(outbox.add(session, "invoices", {"id": message.id}))
            taken = outbox.add(session, "invoices", {}, message_id=f"taken-{message.id}")
            assert outbox.cancel(session, taken)
            if message.id == "bad":
                raise NonRetryableMessageError("no")

        async def scenario(world):
            for name in ("good", "bad"):
                await handle_message(on_paid, world.database, Message(name, {}))
            async with world.database.begin() as unit:
                found = await unit.outbox.read("outbox", 0, 10)
            assert [one.message_id for one in found] == sent[:1]
            assert sent[0] == outgoing_id("billing", "good", "invoices", 0)

        self.run(scenario)

    def test_an_error_takes_its_rows_and_its_claim_back(self):
        @consumer("billing")
        def on_paid(message, session):
            session.add(Effect("paid", 1))
            session.flush()
            raise NonRetryableMessageError("no such account")

        async def scenario(world):
            database = await with_effects(world.database)
            outcome = await handle_message(on_paid, database, Message("a", {}))
            assert isinstance(outcome, DeadLettered)
            assert await values(database) == []

        self.run(scenario)

    @pytest.mark.parametrize("end", ["commit", "rollback", "close"])
    def test_it_cannot_end_the_transaction_of_its_neighbours(self, end):
        @consumer("billing")
        def on_paid(message, session):
            session.add(Effect("paid", message.payload))
            if message.id == "b":
                getattr(session, end)()

        async def scenario(world):
            database = await with_effects(world.database)
            messages = [Message(id, number) for number, id in enumerate("abc")]
            outcomes = await consume_many(on_paid, database, messages)
            assert [type(one) for one in outcomes] == [Handled, DeadLettered, Handled]
            assert await values(database) == [0, 2]

        self.run(scenario)

    def test_it_reads_what_earlier_messages_of_its_batch_have_added(self):
        seen = []

        @consumer("billing")
        def on_paid(message, session):
            connection = session.connection()
            seen.append(connection.execute(text("SELECT count(*) FROM test_effect")).scalar_one())
            session.add(Effect("paid", message.payload))

        async def scenario(world):
            database = await with_effects(world.database)
            messages = [Message(id, number) for number, id in enumerate("abc")]
            await consume_many(on_paid, database, messages)

        self.run(scenario)
        assert seen == [0, 1, 2]


class TestPlainFunctionsInMemory(InMemory, PlainFunctions):
    pass


class TestPlainFunctionsInPostgres(InPostgres, PlainFunctions):
    def test_a_connection_that_is_lost_under_it_is_an_outage_and_the_next_one_works(self):
        lost = []

        @consumer("billing")
        def on_paid(message, session):
            if not lost:
                lost.append(True)
                session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
            session.add(Effect("paid", 1))

        async def scenario(world):
            database = await with_effects(world.database)
            first = await handle_message(on_paid, database, Message("a", {}))
            async with database.begin() as unit:
                await unit.claims.reopen("billing", "a")
            second = await handle_message(on_paid, database, Message("b", {}))
            assert first.failure.code == "CONNECTION_LOST"
            assert isinstance(second, Handled)
            assert await values(database) == [1]

        self.run(scenario)


def test_the_event_loop_goes_on_while_it_blocks():
    met = threading.Barrier(2, timeout=20)

    @consumer("billing")
    def on_paid(message):
        met.wait()

    async def scenario():
        database = memory_database(), memory_database()
        calls = [handle_message(on_paid, one, Message("a", {})) for one in database]
        return await asyncio.gather(*calls)

    assert [type(one) for one in asyncio.run(scenario())] == [Handled, Handled]


def test_past_its_time_limit_it_has_failed_and_writes_nothing_more():
    go_on, wrote = threading.Event(), []

    @consumer("billing", policy=ConsumerSettings(handler_seconds=0.05))
    def on_paid(message, session):
        go_on.wait(20)
        session.execute(text("INSERT INTO test_effect (name, value) VALUES ('late', 1)"))
        wrote.append(message.id)

    async def scenario():
        database = await with_effects(memory_database())
        asyncio.get_running_loop().call_later(0.2, go_on.set)
        outcome = await handle_message(on_paid, database, Message("a", {}))
        return outcome, await values(database)

    outcome, rows = asyncio.run(scenario())

    assert outcome.failure.code == "HANDLER_TIMEOUT"
    assert (rows, wrote) == ([], [])


def test_a_cancellation_ends_the_statement_that_it_waits_for():
    ended = []

    def function(call):
        call.refuse_if_cancelled()
        with pytest.raises(RetryableMessageError, match="cancelled"):
            call.wait(asyncio.Event().wait())
        with pytest.raises(RetryableMessageError, match="cancelled"):
            call.refuse_if_cancelled()
        ended.append(True)

    async def scenario():
        call = BlockingCall()
        running = asyncio.create_task(call.run(partial(function, call)))
        while call._waits_for is None:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())

    assert ended == [True]


def test_an_exception_that_asyncio_does_not_pass_on_is_a_failure_all_the_same():
    @consumer("billing")
    def on_paid(message):
        raise StopIteration

    async def scenario():
        async with asyncio.timeout(20):
            return await handle_message(on_paid, memory_database(), Message("a", {}))

    assert "StopIteration" in asyncio.run(scenario()).failure.reason


def test_a_coroutine_that_it_returns_is_a_mistake():
    @consumer("billing")
    def on_paid(message):
        return later()

    async def later():
        raise AssertionError("nobody awaits it")

    outcome = asyncio.run(handle_message(on_paid, memory_database(), Message("a", {})))

    assert isinstance(outcome, DeadLettered)
    assert "write `async def`" in outcome.failure.reason


def test_a_lease_needs_an_async_function():
    @consumer("billing")
    def on_paid(message, lease):
        """Do nothing."""

    with pytest.raises(Misuse, match="takes a lease must be an async function"):
        asyncio.run(on_paid.invoke(Message("a", {}), object()))


def test_a_dispatcher_may_have_both_kinds_and_tests_call_it_directly():
    billing, seen = dispatcher("billing"), []

    @billing.on("paid")
    def on_paid(message, session):
        seen.append((message.id, type(session).__name__))

    @billing.on("refunded")
    async def on_refunded(message, session):
        seen.append((message.id, type(session).__name__))

    @consumer("other")
    def other(message):
        return message.id

    async def scenario():
        database = memory_database()
        for id, kind in (("a", "paid"), ("b", "refunded")):
            await handle_message(billing, database, Message(id, {}, type=kind))
        return await other(Message("c", {}))

    assert asyncio.run(scenario()) == "c"
    assert seen == [("a", "GuardedSession"), ("b", "HandlerSession")]
