"""What a FastStream service writes, on FastStream's own test broker: without Kafka."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import pytest

pytest.importorskip("faststream")

from faststream import (
    AckPolicy,
    BaseMiddleware,
    Context,
    Depends,
    ExceptionMiddleware,
    confluent,
)
from faststream.kafka import KafkaBroker, KafkaMessage, KafkaRouter, TestKafkaBroker
from faststream.specification import AsyncAPI
from pydantic import BaseModel, Field
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from semel import Message, RetryableMessageError, SqlDatabase
from semel.errors import Misuse
from semel.messaging import (
    ConsumerSettings,
    FromCoordinates,
    FromHeader,
    Mode,
    RetryPolicy,
    RunnerSettings,
    Semel,
    handle_message,
)
from semel.messaging.handle.lease import Lease
from semel.messaging.outcome import Handled

INSERT = text("INSERT INTO payments VALUES (:id, :amount)")


class Paid(BaseModel):
    id: str
    amount: int


class Rates(BaseModel):
    eur: int


class Service:
    """A broker, its binding, and the rows of its handlers."""

    def __init__(self, database="sqlite://", make=KafkaBroker, **options):
        self.broker = make("nowhere:9092", **options)
        self.semel = Semel(self.broker, database=database)
        self.rates = 0

    def on_paid(self, **options):
        def rates() -> Rates:
            self.rates += 1
            return Rates(eur=2)

        @self.semel.subscriber("payments", consumer="billing", group_id="billing", **options)
        async def on_paid(
            event: Paid, session: AsyncSession, rates: Annotated[Rates, Depends(rates)]
        ) -> None:
            await session.execute(INSERT, {"id": event.id, "amount": event.amount * rates.eur})

        return on_paid

    async def rows(self):
        async with self.semel.database.begin() as unit:
            found = await unit.session.execute(text("SELECT id, amount FROM payments ORDER BY id"))
            return [tuple(row) for row in found]

    async def letters(self):
        async with self.semel.database.begin() as unit:
            found = await unit.session.execute(
                text("SELECT message_id, error_code FROM dead_letter ORDER BY 1")
            )
            return [tuple(row) for row in found]


def play(service, story, test_broker=TestKafkaBroker):
    """Run a story between the start of the test broker and its end."""

    async def whole():
        await service.semel.database.create_tables()
        async with service.semel.database.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE payments (id TEXT, amount INTEGER)"))
        try:
            async with test_broker(service.broker):
                return await story()
        finally:
            await service.semel.close()

    return asyncio.run(whole())


@pytest.mark.parametrize("mode", [Mode.TRANSACTIONAL, Mode.BATCHED])
def test_a_published_message_is_in_the_database_once(mode):
    service = Service()
    service.on_paid(runner=RunnerSettings(mode=mode))

    async def story():
        for _ in range(3):
            await service.broker.publish(Paid(id="p1", amount=20), "payments")
        await service.broker.publish(Paid(id="p2", amount=5), "payments")
        return await service.rows()

    assert play(service, story) == [("p1", 40), ("p2", 10)]
    assert service.rates == 2, "a dependency is resolved once for each message that is handled"


def test_one_service_serves_several_tests_with_event_loops_of_their_own(tmp_path):
    service = Service(database=f"sqlite:///{tmp_path}/shop.db")
    service.on_paid()

    async def first():
        await service.broker.publish(Paid(id="p1", amount=1), "payments")

    async def second():
        async with TestKafkaBroker(service.broker):
            await service.broker.publish(Paid(id="p1", amount=1), "payments")
            await service.broker.publish(Paid(id="p2", amount=1), "payments")
        rows = await service.rows()
        await service.semel.close()
        return rows

    play(service, first)

    assert asyncio.run(second()) == [("p1", 2), ("p2", 2)]


def test_messages_that_are_published_at_once_are_each_handled():
    service = Service()
    service.on_paid()

    async def story():
        sent = [Paid(id=f"p{number}", amount=number) for number in range(5)]
        await asyncio.gather(*(service.broker.publish(one, "payments") for one in sent * 2))
        return await service.rows()

    assert play(service, story) == [(f"p{number}", 2 * number) for number in range(5)]


def test_the_function_can_be_called_in_a_unit_test():
    service = Service()
    on_paid = service.on_paid()
    executed = []

    class Session:
        async def execute(self, statement, values):
            executed.append(values)

    asyncio.run(on_paid(Paid(id="p1", amount=3), Session(), Rates(eur=3)))

    assert executed == [{"id": "p1", "amount": 9}]


def test_a_message_that_does_not_fit_the_model_is_a_dead_letter():
    service = Service()
    service.on_paid()

    async def story():
        await service.broker.publish({"id": "p1", "amount": "much"}, "payments")
        await service.broker.publish(b"{", "payments")
        await service.broker.publish(Paid(id="p2", amount=5), "payments")
        return await service.rows(), [code for _, code in await service.letters()]

    rows, codes = play(service, story)

    assert rows == [("p2", 10)]
    assert len(codes) == 2


def test_a_transient_failure_is_tried_again():
    service = Service()
    attempts = []
    policy = ConsumerSettings(retry=RetryPolicy(initial_delay_seconds=0.01))

    @service.semel.subscriber("payments", consumer="billing", group_id="g", policy=policy)
    async def on_paid(event: Paid, session: AsyncSession) -> None:
        attempts.append(event.id)
        await session.execute(INSERT, event.model_dump())
        if len(attempts) < 3:
            raise RetryableMessageError("not yet")

    async def story():
        await service.broker.publish(Paid(id="p1", amount=20), "payments")
        return await service.rows()

    assert play(service, story) == [("p1", 20)]
    assert attempts == ["p1"] * 3


def test_a_tombstone_and_the_message_itself_arrive():
    service = Service()
    seen: list[Any] = []

    @service.semel.subscriber(
        "payments", consumer="billing", group_id="g", id_from=FromCoordinates()
    )
    async def on_paid(
        event: Paid | None, session: AsyncSession, message: Message, logged: KafkaMessage
    ) -> None:
        seen.append((event, dict(message.headers)["content-type"], logged.raw_message.value))

    async def story():
        await service.broker.publish(None, "payments", key=b"k")
        await service.broker.publish(Paid(id="p1", amount=1), "payments")

    play(service, story)

    assert [event for event, *_ in seen] == [None, Paid(id="p1", amount=1)]
    assert seen[0][2] is None


def test_a_tombstone_that_the_function_does_not_take_is_a_dead_letter():
    service = Service()
    service.on_paid(id_from=FromCoordinates())

    async def story():
        await service.broker.publish(None, "payments", key=b"k")
        return await service.letters()

    assert [code for _, code in play(service, story)] == ["TOMBSTONE"]


def test_the_ack_of_the_message_does_nothing():
    service = Service()
    acked = []

    @service.semel.subscriber("payments", consumer="billing", group_id="g")
    async def on_paid(event: Paid, message: KafkaMessage) -> None:
        await message.ack()
        acked.append(message.committed)

    async def story():
        await service.broker.publish(Paid(id="p1", amount=1), "payments")

    play(service, story)

    assert len(acked) == 1


def test_context_and_middlewares_see_every_message():
    seen = []

    class Counting(BaseMiddleware):
        async def consume_scope(self, call_next, msg):
            seen.append(msg.raw_message.topic)
            return await call_next(msg)

    service = Service(middlewares=[Counting])

    @service.semel.subscriber(
        "payments", consumer="billing", group_id="g", runner=RunnerSettings(mode="batched")
    )
    async def on_paid(event: Paid, key: Annotated[Any, Context("message.raw_message.key")]) -> None:
        seen.append(key)

    async def story():
        await service.broker.publish(Paid(id="p1", amount=1), "payments", key=b"a")
        await service.broker.publish(Paid(id="p2", amount=1), "payments", key=b"b")

    play(service, story)

    assert seen == ["payments", b"a", "payments", b"b"]


def test_an_error_that_a_middleware_swallows_is_still_a_failure():
    swallowing = ExceptionMiddleware({ValueError: lambda: None})
    service = Service(middlewares=[swallowing])

    @service.semel.subscriber(
        "payments",
        consumer="billing",
        group_id="g",
        policy=ConsumerSettings(retry=RetryPolicy(max_attempts=1)),
    )
    async def on_paid(event: Paid, session: AsyncSession) -> None:
        await session.execute(INSERT, event.model_dump())
        raise ValueError("no such account")

    async def story():
        await service.broker.publish(Paid(id="p1", amount=1), "payments")
        return await service.rows(), await service.letters()

    rows, letters = play(service, story)

    assert rows == []
    assert [name for name, _ in letters] == ["p1"]


def test_a_middleware_that_passes_nothing_on_hides_no_message():
    class Blocking(BaseMiddleware):
        async def consume_scope(self, call_next, msg):
            return None

    service = Service(middlewares=[Blocking])
    service.on_paid()

    async def story():
        await service.broker.publish(Paid(id="p1", amount=1), "payments")
        return await service.letters()

    assert play(service, story) == [("p1", "NOT_CALLED")]


def test_a_leased_function_gets_the_lease():
    service = Service(database="sqlite://")
    seen = []

    @service.semel.subscriber(
        "payments", consumer="billing", group_id="g", runner=RunnerSettings(mode=Mode.LEASED)
    )
    async def on_paid(event: Paid, lease: Lease) -> None:
        seen.append(type(lease).__name__)

    async def story():
        await service.broker.publish(Paid(id="p1", amount=1), "payments")

    play(service, story)

    assert seen == ["Lease"]


def test_a_message_is_handled_without_a_started_broker_as_a_replay_does():
    service = Service()
    service.on_paid()
    raw = json.dumps({"id": "p1", "amount": 4}).encode()
    message = Message("p1", Paid(id="p1", amount=4), raw, headers={"h": b"\xff"})

    async def story():
        await service.semel.database.create_tables()
        async with service.semel.database.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE payments (id TEXT, amount INTEGER)"))
        consumer = service.semel.consumers["billing"]
        outcome = await handle_message(consumer, service.semel.database, message)
        rows = await service.rows()
        await service.semel.close()
        return outcome, rows

    outcome, rows = asyncio.run(story())

    assert isinstance(outcome, Handled)
    assert rows == [("p1", 8)]


def test_asyncapi_shows_the_model_of_the_message_and_nothing_else():
    service = Service()
    service.on_paid()

    document = AsyncAPI(service.broker).to_specification().to_jsonable()

    assert set(document["components"]["schemas"]) == {"Paid"}
    (channel,) = document["channels"].values()
    assert channel["address"] == "payments"


def test_a_subscriber_of_a_router_is_handled_like_one_of_the_broker():
    service = Service()
    router = KafkaRouter(prefix="eu-")
    service.semel = Semel(router, database="sqlite://")
    service.on_paid()
    service.broker.include_router(router)

    async def story():
        await service.broker.publish(Paid(id="p1", amount=1), "eu-payments")
        return await service.rows()

    assert play(service, story) == [("p1", 2)]


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("ack_policy", AckPolicy.ACK, "committed after the database"),
        ("max_workers", 4, "concurrency"),
        ("batch", True, "BATCHED"),
        ("pattern", "pay.*", "name the topics"),
        ("partitions", (), "two processes"),
        ("listener", None, "before partitions are revoked"),
        ("auto_offset_reset", "none", "earliest"),
    ],
)
def test_an_option_that_breaks_the_guarantee_is_refused_with_the_reason(option, value, why):
    service = Service()

    with pytest.raises(Misuse, match=why):
        service.on_paid(**{option: value})


def test_two_subscribers_with_one_consumer_name_are_refused():
    service = Service()
    service.on_paid()

    with pytest.raises(Misuse, match="billing: a second subscriber"):
        service.on_paid()


def test_more_lanes_than_connections_are_refused_before_the_broker_starts(tmp_path):
    url = f"sqlite:///{tmp_path}/shop.db"
    many = RunnerSettings(concurrency=20)

    with pytest.raises(Misuse, match="needs 22 connections, and the pool of its database has 15"):
        Service(url).on_paid(runner=many)
    Service(SqlDatabase(url, pool_size=22)).on_paid(runner=many)


def test_a_retry_topic_is_refused_because_the_subscriber_does_not_read_it():
    service = Service()
    policy = ConsumerSettings(retry=RetryPolicy(mode="retry-topic"))

    with pytest.raises(Misuse, match="does not read the retry topic"):

        @service.semel.subscriber("payments", consumer="billing", group_id="g", policy=policy)
        async def on_paid(event: Paid) -> None: ...


def test_a_return_value_is_refused():
    service = Service()

    with pytest.raises(Misuse, match="Outbox"):

        @service.semel.subscriber("payments", consumer="billing", group_id="g")
        async def on_paid(event: Paid) -> Paid:
            return event


def test_a_publisher_below_is_refused():
    service = Service()

    with pytest.raises(Misuse, match="Outbox"):

        @service.semel.subscriber("payments", consumer="billing", group_id="g")
        @service.broker.publisher("invoices")
        async def on_paid(event: Paid) -> None:
            pass


def test_a_publisher_above_is_refused_when_the_broker_starts():
    service = Service()
    service.broker.publisher("invoices")(service.on_paid())

    async def story():
        pass

    with pytest.raises(Misuse, match="Outbox"):
        play(service, story)


def test_two_arguments_of_the_message_are_refused_when_the_broker_starts():
    service = Service()

    @service.semel.subscriber("payments", consumer="billing", group_id="g")
    async def on_paid(id: str, amount: int) -> None:
        pass

    async def story():
        pass

    with pytest.raises(Misuse, match="id, amount"):
        play(service, story)


def test_a_broker_without_injection_is_refused_when_it_starts():
    service = Service(apply_types=False)
    service.on_paid()

    async def story():
        pass

    with pytest.raises(Misuse, match="apply_types"):
        play(service, story)


def test_a_session_under_leases_is_refused():
    service = Service()

    with pytest.raises(Misuse, match="no AsyncSession"):
        service.on_paid(runner=RunnerSettings(mode=Mode.LEASED))


@pytest.mark.parametrize(
    "annotation", [Annotated[AsyncSession, Field(title="s")], AsyncSession | None]
)
def test_a_session_is_given_however_it_is_annotated(annotation):
    service = Service()

    @service.semel.subscriber("payments", consumer="billing", group_id="g")
    async def on_paid(event: Paid, session: annotation = None) -> None:
        await session.execute(INSERT, event.model_dump())

    async def story():
        await service.broker.publish(Paid(id="p1", amount=20), "payments")
        return await service.rows()

    assert play(service, story) == [("p1", 20)]


class SessionOfAnother(AsyncSession):
    """One with more methods, such as SQLModel's."""


def own_session():
    return "a session of another database"


@pytest.mark.parametrize(
    ("annotation", "default", "why"),
    [
        (SessionOfAnother, None, "session is a SessionOfAnother.*AsyncSession of sqlalchemy"),
        (AsyncSession, Depends(own_session), "leave Depends out"),
        (Annotated[AsyncSession, Depends(own_session)], None, "leave Depends out"),
    ],
)
def test_a_session_that_semel_does_not_give_is_refused(annotation, default, why):
    service = Service()

    with pytest.raises(Misuse, match=why):

        @service.semel.subscriber("payments", consumer="billing", group_id="g")
        async def on_paid(event: Paid, session: annotation = default) -> None: ...


def test_a_session_of_another_database_is_a_dependency_like_others():
    service, seen = Service(), []

    @service.semel.subscriber("payments", consumer="billing", group_id="g")
    async def on_paid(
        event: Paid,
        session: AsyncSession,
        other: Annotated[Any, Depends(own_session)],
    ) -> None:
        seen.append((type(session), other))

    async def story():
        await service.broker.publish(Paid(id="p1", amount=20), "payments")

    play(service, story)
    assert seen[0][1] == own_session()
    assert issubclass(seen[0][0], AsyncSession)


def test_a_dependency_that_takes_the_session_is_refused_when_the_broker_starts():
    service = Service()

    def rates(session: AsyncSession) -> int:
        return 2

    @service.semel.subscriber("payments", consumer="billing", group_id="g")
    async def on_paid(event: Paid, rate: Annotated[int, Depends(rates)]) -> None: ...

    async def story():
        pass

    with pytest.raises(Misuse, match="a dependency takes session, which only the function gets"):
        play(service, story)


def test_another_broker_is_refused_and_told_what_to_use():
    with pytest.raises(Misuse, match=r"one of faststream\.confluent"):
        Semel(object(), database="sqlite://")


def test_the_confluent_broker_has_the_same_effects():
    service = Service(make=confluent.KafkaBroker)
    service.on_paid(title="payments")
    seen = []

    @service.semel.subscriber("raw", consumer="raw", group_id="raw", id_from=FromHeader("id"))
    async def on_raw(value: Any, message: Message, theirs: confluent.KafkaMessage) -> None:
        raw = theirs.raw_message
        seen.append((message.payload, raw.value(), raw.key(), raw.topic(), dict(raw.headers())))

    async def story():
        for _ in range(2):
            await service.broker.publish(Paid(id="p1", amount=20), "payments")
        await service.broker.publish({"id": "p2"}, "payments")
        await service.broker.publish(b"7", "raw", key=b"k", headers={"id": "r1"})
        return await service.rows(), await service.letters()

    rows, letters = play(service, story, confluent.TestKafkaBroker)

    assert rows == [("p1", 40)]
    assert [id for id, _ in letters] == ["unreadable:payments/0/2"]
    ((payload, value, key, topic, headers),) = seen
    assert (payload, value, key, topic, headers["id"]) == (7, b"7", b"k", "raw", b"r1")


@pytest.mark.parametrize("option", ["session_timeout_ms", "ack_policy", "on_assign"])
def test_options_of_the_consumer_that_is_not_made_are_refused(option):
    with pytest.raises(Misuse, match=f"{option}= is refused"):
        Service(make=confluent.KafkaBroker).on_paid(**{option: 1})


def test_the_id_comes_from_where_it_is_declared():
    service = Service()
    service.on_paid(id_from=FromHeader("message-id"))

    async def story():
        for name in ("m1", "m1", "m2"):
            await service.broker.publish(
                Paid(id="same", amount=1), "payments", headers={"message-id": name}
            )
        return await service.rows()

    assert play(service, story) == [("same", 2), ("same", 2)]
