"""`Outbox.add` writes with the caller's transaction, under ids that a repetition gives again."""

from __future__ import annotations

import asyncio
import datetime as dt
import uuid
from dataclasses import replace

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session

from semel.errors import Misuse
from semel.message import Message, text_of
from semel.messaging.handle.attempt import handling
from semel.messaging.send.outbox import OutboxConflict, outgoing_id, parent_of
from semel.messaging.send.publish import outgoing_of
from semel.outboxes import Outbox
from tests.messaging.outgoing import DATABASES, Broker, left, opened, pending, relay, run, until

ORDER = Message("order-7", {"n": 1}, b'{"n":1}', correlation_id="visit-3")


@pytest.fixture(params=DATABASES[1:])
def sql(request):
    return opened(request.param, request)


def test_a_key_may_be_any_bytes(database):
    async def test(world):
        async with world.database.begin() as unit:
            for key in (b"\xff\x00", b"plain", "base64:x"):
                await Outbox().add(unit.session, "t", {}, key=key)
            found = [outgoing_of(entry).key for entry in await unit.outbox.read("outbox", 0, 9)]

        assert found == [b"\xff\x00", b"plain", b"base64:x"]

    run(database, test)


def test_a_handler_that_runs_again_writes_the_same_messages(database):
    async def handle(session):
        outbox = Outbox()
        return [
            await outbox.add(session, "invoices", {"total": 5}, key="c-1"),
            await outbox.add(session, "invoices", {"total": 6}, key="c-1"),
            await outbox.add(session, "emails", {"to": "c-1"}),
        ]

    async def test(world):
        ids = []
        for _ in range(2):
            async with world.database.begin() as unit:
                with handling("billing", ORDER):
                    ids.append(await handle(unit.session))

        assert ids[0] == ids[1]
        assert ids[0] == [
            outgoing_id("billing", "order-7", "invoices", 0),
            outgoing_id("billing", "order-7", "invoices", 1),
            outgoing_id("billing", "order-7", "emails", 0),
        ]
        assert [e.message_id for e in await pending(world)] == ids[0]

    run(database, test)


def test_two_consumers_of_one_message_send_two_messages(memory):
    async def test(world):
        async with world.database.begin() as unit:
            for consumer in ("billing", "audit"):
                with handling(consumer, ORDER):
                    await Outbox().add(unit.session, "invoices", b"x")

        assert len(await pending(world)) == 2

    run(memory, test)


def test_correlation_and_causation_are_inherited_and_the_parent_is_known(database):
    async def test(world):
        async with world.database.begin() as unit:
            with handling("billing", ORDER):
                await Outbox().add(unit.session, "invoices", b"", headers={"trace": "t-1"})
            with handling("billing", Message("order-8", None)):
                await Outbox().add(unit.session, "invoices", b"", headers={"own": b"\xff"})
            children = await unit.outbox.children(parent_of("billing", "order-7"))

        first, second = await pending(world)
        assert first.headers == {
            "correlation-id": b"visit-3",
            "causation-id": b"order-7",
            "trace": b"t-1",
        }
        assert second.headers == {
            "correlation-id": b"order-8",
            "causation-id": b"order-8",
            "own": b"\xff",
        }
        assert [child.message_id for child in children] == [first.message_id]

    run(database, test)


def test_a_long_inbound_id_is_no_hindrance(database):
    async def test(world):
        inbound = "x" * 5000
        async with world.database.begin() as unit:
            with handling("billing", Message(inbound, None)):
                sent = await Outbox().add(unit.session, "invoices", b"")
            [child] = await unit.outbox.children(parent_of("billing", inbound))

        assert child.message_id == sent

    run(database, test)


def test_outside_of_handlers_the_id_is_the_callers_or_random(database):
    async def test(world):
        async with world.database.begin() as unit:
            given = await Outbox().add(unit.session, "t", b"", message_id="nightly/2026-11-16")
            again = await Outbox().add(unit.session, "t", b"", message_id="nightly/2026-11-16")
            made = await Outbox().add(unit.session, "t", b"")

        assert given == again == "nightly/2026-11-16"
        assert uuid.UUID(made).version == 4
        assert [e.message_id for e in await pending(world)] == [given, made]
        assert [dict(e.headers) for e in await pending(world)] == [{}, {}]

    run(database, test)


def test_an_id_that_was_given_to_another_message_is_refused(database):
    async def test(world):
        async with world.database.begin() as unit:
            await Outbox().add(unit.session, "a", {"secret": 1}, message_id="order-1")
            with pytest.raises(OutboxConflict) as refused:
                await Outbox().add(unit.session, "b", {"secret": 2}, key="k", message_id="order-1")

        assert "'order-1'" in str(refused.value)
        assert "for topic 'a', key None" in str(refused.value)
        assert "for topic 'b', key 'k'" in str(refused.value)
        assert "secret" not in str(refused.value)
        assert [(e.topic, e.value) for e in await pending(world)] == [("a", b'{"secret":1}')]

    run(database, test)


def test_what_an_earlier_handling_wrote_stays_whatever_the_time_is_now(database):
    async def test(world):
        for payload in (b"at nine", b"at ten"):
            async with world.database.begin() as unit:
                with handling("billing", ORDER):
                    await Outbox().add(unit.session, "invoices", payload)

        assert [e.value for e in await pending(world)] == [b"at nine"]

    run(database, test)


@pytest.mark.parametrize(
    ("payload", "value"),
    [
        (b"\x00\xff", b"\x00\xff"),
        (bytearray(b"ab"), b"ab"),
        ("grün", "grün".encode()),
        ({"name": "grün", "n": [1, None]}, '{"name":"grün","n":[1,null]}'.encode()),
        ({"name": "half \ud83d", "n": "ü"}, b'{"name":"half \\ud83d","n":"\\u00fc"}'),
        ([], b"[]"),
        (7, b"7"),
        (None, None),
    ],
)
def test_payloads_are_bytes_text_or_json(memory, payload, value):
    async def test(world):
        async with world.database.begin() as unit:
            await Outbox("letters").add(unit.session, "t", payload)

        [found] = await pending(world, "letters")
        assert found.value == value

    run(memory, test)


def test_a_header_that_was_no_text_goes_on_as_it_came(memory):
    async def test(world):
        came = ORDER.headers | {"trace": b"\xff\x00"}
        async with world.database.begin() as unit:
            said = {name: text_of(value) for name, value in came.items()}
            await Outbox().add(unit.session, "t", b"", headers=said)

        [found] = await pending(world)
        assert found.headers == came

    run(memory, test)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"payload": object()}, "a value that JSON can represent"),
        ({"payload": float("nan")}, "a value that JSON can represent"),
        ({"payload": "half \ud83d"}, "lone surrogate"),
        ({"topic": ""}, "needs a topic"),
        ({"message_id": ""}, "needs a message id"),
        ({"message_id": "a\0b"}, "a text without NUL and lone surrogates"),
        ({"key": 7}, "key 7"),
        ({"key": "\ud800"}, "a text without NUL and lone surrogates"),
        ({"headers": {"message-id": "x"}}, "give message_id instead"),
    ],
)
def test_what_cannot_be_sent_is_refused(memory, wrong, says):
    async def test(world):
        asked = {"topic": "t", "payload": b"", **wrong}
        async with world.database.begin() as unit:
            with pytest.raises(Misuse, match=says):
                await Outbox().add(unit.session, asked.pop("topic"), asked.pop("payload"), **asked)

        assert await left(world) == []

    run(memory, test)


@pytest.mark.parametrize("session", [None, object(), Session()])
def test_other_sessions_are_refused_before_a_forgotten_await_loses_anything(session):
    with pytest.raises(Misuse, match="AsyncSession's transaction"):
        Outbox().add(session, "t", b"")
    with pytest.raises(Misuse, match="AsyncSession's transaction"):
        Outbox().cancel(session, "m1")


def test_a_session_of_the_users_own_is_committed_by_its_user(sql):
    async def test(world):
        engine = world.database.engine
        async with AsyncSession(engine) as session:
            await Outbox().add(session, "t", b"", message_id="rolled back")
            await session.rollback()
            await Outbox().add(session, "t", b"", message_id="committed")
            await session.commit()
            await Outbox().add(session, "t", b"", message_id="never committed")

        assert await left(world) == ["committed"]

    run(sql, test)


def test_a_scoped_session_is_one_too(sql):
    async def test(world):
        maker = async_sessionmaker(world.database.engine)
        scoped = async_scoped_session(maker, scopefunc=asyncio.current_task)
        await Outbox().add(scoped, "t", b"", message_id="1")
        await scoped.commit()
        await scoped.remove()

        assert await left(world) == ["1"]

    run(sql, test)


def test_a_relay_of_this_process_is_woken_by_the_commit(sql):
    async def test(world):
        broker = Broker()
        working = relay(world, broker, poll_seconds=3600)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await asyncio.sleep(0.3)
            async with AsyncSession(world.database.engine) as session:
                for number in range(3):
                    await Outbox().add(session, "t", b"", message_id=str(number))
                await session.commit()
                await until(lambda: broker.ids == ["0", "1", "2"])
                await Outbox().add(session, "t", b"", message_id="3")
                await session.commit()
                await until(lambda: broker.ids == ["0", "1", "2", "3"])
            working.stop()

    run(sql, test)


def test_a_relay_of_this_process_is_woken_by_a_handler(database):
    async def test(world):
        broker = Broker()
        working = relay(world, broker, poll_seconds=3600)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(working.run())
            await asyncio.sleep(0.3)
            async with world.database.begin() as unit:
                await Outbox().add(unit.session, "t", b"", message_id="1")
            await until(lambda: broker.ids == ["1"])
            working.stop()

    run(database, test)


def test_a_message_waits_for_its_time_and_may_be_cancelled_until_it_is_sent(database):
    async def test(world):
        outbox, broker = Outbox(), Broker()
        now = dt.datetime.now(dt.UTC)
        async with world.database.begin() as unit:
            for name, seconds in (("past", -1), ("soon", 2), ("late", 3600), ("never", 3600)):
                at = now + dt.timedelta(seconds=seconds)
                await outbox.add(unit.session, "t", {}, message_id=name, not_before=at)
            assert (await unit.outbox.numbers("outbox")).pending == 1
        async with world.database.begin() as unit:
            assert await outbox.cancel(unit.session, "never")
            assert not await outbox.cancel(unit.session, "never")

        sending = relay(world, broker)
        running = asyncio.create_task(sending.run())
        await until(lambda: len(broker.taken) == 2)
        sending.stop()
        await running

        assert [one.headers["message-id"] for one in broker.taken] == [b"past", b"soon"]
        assert await left(world) == []
        async with world.database.begin() as unit:
            assert await outbox.cancel(unit.session, "late")

    run(database, test)


@pytest.mark.parametrize(
    "when",
    [
        dt.datetime.now(dt.UTC).replace(tzinfo=None),
        1_800_000_000.0,
        dt.timedelta(hours=1),
        dt.date(2026, 1, 1),
    ],
)
def test_what_is_no_time_with_a_zone_is_refused(database, when):
    async def test(world):
        async with world.database.begin() as unit:
            with pytest.raises(Misuse, match="time zone"):
                await Outbox().add(unit.session, "t", {}, not_before=when)

    run(database, test)


def test_the_trace_of_the_inbound_message_travels_with_what_it_sends(database):
    async def test(world):
        trace = {"traceparent": b"00-1", "tracestate": b"a=1", "other": b"x"}
        async with world.database.begin() as unit:
            with handling("billing", replace(ORDER, headers=trace)):
                await Outbox().add(unit.session, "t", {})
                await Outbox().add(unit.session, "t", {}, headers={"traceparent": "00-2"})
            first, second = await unit.outbox.read("outbox", 0, 9)

        assert first.headers["traceparent"] == b"00-1"
        assert (second.headers["traceparent"], second.headers["tracestate"]) == (b"00-2", b"a=1")
        assert "other" not in first.headers

    run(database, test)
