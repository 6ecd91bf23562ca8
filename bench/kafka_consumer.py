"""A service on Kafka: FastStream's documented pattern beside semel's runner."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from faststream import AckPolicy
from faststream.kafka import KafkaBroker as FastStreamBroker
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from bench.consumer import PAY, Base, Payment
from bench.harness import Benchmark, Row, Scale, Spread, Table, Target, Times, measure
from bench.kafka_server import PARTITIONS, WAIT_SECONDS, Cluster, kafka
from bench.server import Database, postgres
from semel.codec import FromPayload
from semel.faststream.binding import Semel
from semel.kafka.broker import KafkaBroker
from semel.message import Message
from semel.messaging.handler import consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import RunnerSettings
from semel.policy.vocabulary import Mode
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.sql.database import SqlDatabase

Handler: TypeAlias = Callable[[Message, Any], Coroutine[Any, Any, None]]

DOCUMENTED: Final = "FastStream, a session per message"
ADDS: Final = "Runner, batched, handlers that add to the session"
AWAITS: Final = "Runner, batched, handlers that await a statement"
LANES: Final = "Runner, transactional, 10 lanes"
BEHIND: Final = "semel behind FastStream, batched, handlers that await"
QUICK: Final = "only quick messages"
SLOW: Final = "one slow message in each second"

BATCHED: Final = RunnerSettings(mode=Mode.BATCHED, max_records=500)
TEN_LANES: Final = RunnerSettings(concurrency=10)
SLOW_SECONDS: Final = 1.0
SLOW_EVERY_SECONDS: Final = 1.0
KEYS: Final = 500
GROUP: Final = "billing"
LEAST_BESIDE_SLOW: Final = 0.9

ABOUT = f"""\
A backlog in a topic of {PARTITIONS} partitions on a real Kafka broker. Each message is claimed,
makes one business row on PostgreSQL with fsync and synchronous commits, and its offset is
committed. The clock runs from the first call of a handler until the last offset is committed; then
rows and claims are counted. The documented pattern is FastStream's subscriber on aiokafka with the
acknowledgement that loses nothing, `AckPolicy.NACK_ON_ERROR`, and a session per message: claim,
insert, commit. The others are `KafkaBroker` and `Runner`, with batches of up to 500 or with one
transaction per message in 10 lanes, and `Semel` behind a FastStream broker.

The second table has the 10 lanes again, each message with a key of its own. Once in a second a
handler takes {SLOW_SECONDS:g} s, so one lane is never free, and the offset of its partition waits.
The clock runs until the last quick message is handled."""


class Paid(BaseModel):
    """A message."""

    id: str
    amount: int


class Calls:
    """Notes the calls of handlers: when the first began, and when the last quick one ended."""

    def __init__(self, expected: int, slow_seconds: float = 0.0) -> None:
        self.began = 0.0
        self.last_quick = 0.0
        self.quick = 0
        self.all_began = asyncio.Event()
        self._left = expected
        self._slow_seconds = slow_seconds
        self._next_slow = 0.0

    def begin(self) -> None:
        """Note a call."""
        if not self.began:
            self.began = time.perf_counter()
        self._left -= 1
        if not self._left:
            self.all_began.set()

    async def take_time(self) -> None:
        """Be slow if no slow call began in the last second, else note a quick one."""
        now = time.perf_counter()
        if self._slow_seconds and now >= self._next_slow:
            self._next_slow = now + SLOW_EVERY_SECONDS
            await asyncio.sleep(self._slow_seconds)
        else:
            self.quick += 1
            self.last_quick = now


@dataclass(frozen=True)
class Work:
    """The backlog of one round."""

    bootstrap: str
    database: SqlDatabase
    topic: str
    calls: Calls


Service: TypeAlias = Callable[[Work], AbstractAsyncContextManager[None]]
"""Handles a backlog as the group `GROUP` while its block runs."""


@asynccontextmanager
async def documented(work: Work) -> AsyncIterator[None]:
    """Do as the documentation of every such library says."""
    sessions = async_sessionmaker(work.database.engine)
    broker = FastStreamBroker(work.bootstrap, logger=None)

    @broker.subscriber(
        work.topic,
        group_id=GROUP,
        auto_offset_reset="earliest",
        ack_policy=AckPolicy.NACK_ON_ERROR,
    )
    async def on_paid(event: Paid) -> None:
        work.calls.begin()
        async with sessions() as session:
            store = SqlAlchemyProcessedMessageStore(session)
            if await store.claim(consumer_name="billing", event_id=event.id):
                await session.execute(PAY, {"message_id": event.id, "amount": event.amount})
                await session.commit()

    async with broker:
        await broker.start()
        yield


@asynccontextmanager
async def behind_faststream(work: Work) -> AsyncIterator[None]:
    """Run semel behind a subscriber of FastStream."""
    broker = FastStreamBroker(work.bootstrap, logger=None)
    semel = Semel(broker, database=work.database)

    @semel.subscriber(work.topic, consumer="billing", group_id=GROUP, runner=BATCHED)
    async def on_paid(event: Paid, session: AsyncSession) -> None:
        work.calls.begin()
        await session.execute(PAY, {"message_id": event.id, "amount": event.amount})

    async with broker:
        await broker.start()
        yield


def running(settings: RunnerSettings, handler_of: Callable[[Calls], Handler]) -> Service:
    """Run a handler with semel's own broker and runner."""

    @asynccontextmanager
    async def service(work: Work) -> AsyncIterator[None]:
        handler = consumer("billing", id_from=FromPayload("id"))(handler_of(work.calls))
        member = await KafkaBroker(work.bootstrap).subscribe(GROUP, [work.topic])
        runner = Runner(handler, member, work.database, settings)
        task = asyncio.create_task(runner.run())
        try:
            yield
        finally:
            runner.stop()
            await task

    return service


def adds(calls: Calls) -> Handler:
    """Write as an ORM user does."""

    async def on_paid(message: Message, session: Any) -> None:
        calls.begin()
        session.add(Payment(message_id=message.id, amount=message.payload["amount"]))

    return on_paid


def awaits(calls: Calls) -> Handler:
    """Write as a Core user does, one awaited statement per message."""

    async def on_paid(message: Message, session: Any) -> None:
        calls.begin()
        values = {"message_id": message.id, "amount": message.payload["amount"]}
        await session.execute(PAY, values)

    return on_paid


def takes_time(calls: Calls) -> Handler:
    """Write the same, and be slow now and then."""
    write = awaits(calls)

    async def on_paid(message: Message, session: Any) -> None:
        await write(message, session)
        await calls.take_time()

    return on_paid


class Field:
    """A broker and a database, and a new topic for each round."""

    def __init__(self, server: Database, cluster: Cluster) -> None:
        self.server = server
        self.cluster = cluster
        asyncio.run(self._make())

    async def _make(self) -> None:
        database = SqlDatabase(self.server.url)
        await database.create_tables()
        async with database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await database.close()

    def seconds_each(self, count: int, service: Service) -> float:
        """Time the handling of *count* messages and return the seconds for each."""
        seconds = asyncio.run(self._handled(count, service, Calls(count), KEYS))
        return seconds / count

    def seconds_each_quick(self, count: int, slow_seconds: float) -> float:
        """Time the quick ones among *count* messages and return the seconds for each."""
        calls = Calls(count, slow_seconds)
        # One key each: a quick message behind a slow one of its key has to wait.
        asyncio.run(self._handled(count, running(TEN_LANES, takes_time), calls, count))
        return (calls.last_quick - calls.began) / calls.quick

    async def _handled(self, count: int, service: Service, calls: Calls, keys: int) -> float:
        """Handle a new backlog, count what came of it, and return the seconds it took."""
        topic = self.cluster.new_topic()
        self.cluster.fill(topic, _backlog(topic, count, keys))
        self.server.clear("payment", "semel.processed_message")
        database = SqlDatabase(self.server.url)
        work = Work(self.cluster.bootstrap, database, topic, calls)
        with self.cluster.watch(GROUP, topic) as wait_until_committed:
            async with service(work):
                async with asyncio.timeout(WAIT_SECONDS):
                    await calls.all_began.wait()
                await asyncio.to_thread(wait_until_committed)
                seconds = time.perf_counter() - calls.began
        await database.close()
        self._check(count)
        return seconds

    def _check(self, count: int) -> None:
        rows = self.server.count("payment")
        distinct = self.server.count("(SELECT DISTINCT message_id FROM payment) p")
        claims = self.server.count("semel.processed_message")
        if {rows, distinct, claims} != {count}:
            raise ValueError(f"{rows} rows, {distinct} different, {claims} claims of {count}")


def _backlog(topic: str, count: int, keys: int) -> Iterator[tuple[str, bytes]]:
    for number in range(count):
        value = {"id": f"{topic}-{number:08}", "amount": number}
        yield f"account-{number % keys}", json.dumps(value).encode()


def run(scale: Scale) -> list[Table]:
    """Measure the ways to handle a backlog, and what a slow message costs the others."""
    few, some, lots = scale.pick(500, 50), scale.pick(6_000, 600), scale.pick(15_000, 1_000)
    ways: dict[str, tuple[int, Service, float | None]] = {
        DOCUMENTED: (few, documented, None),
        LANES: (3 * few, running(TEN_LANES, awaits), 2.5),
        AWAITS: (some, running(BATCHED, awaits), 6),
        ADDS: (lots, running(BATCHED, adds), 12),
        BEHIND: (some, behind_faststream, None),
    }
    rounds = scale.rounds_or(5)
    with postgres() as server, kafka() as cluster:
        field = Field(server, cluster)
        times = measure(
            {
                name: partial(field.seconds_each, count, service)
                for name, (count, service, _) in ways.items()
            },
            rounds,
        )
        quick = partial(field.seconds_each_quick, scale.pick(5_000, 1_000))
        beside = measure({QUICK: partial(quick, 0.0), SLOW: partial(quick, SLOW_SECONDS)}, rounds)
    wanted = {name: least for name, (_, _, least) in ways.items() if least is not None}
    return [
        _table("Messages of a backlog", times, DOCUMENTED, wanted),
        _table("Beside slow messages", beside, QUICK, {SLOW: LEAST_BESIDE_SLOW}),
    ]


def _table(caption: str, times: Times, to: str, wanted: Mapping[str, float]) -> Table:
    rows = []
    for name, seconds in times.seconds.items():
        rate, ratio = Spread.of([1 / each for each in seconds]), times.ratio(name, to)
        target = Target.at_least(wanted[name], ratio) if name in wanted else None
        rows.append(Row(name, [rate.text(0), "1" if name == to else ratio.text(2)], target))
    return Table(caption, ["messages/s", f"× {to}"], rows, times.rounds)


BENCHMARK = Benchmark("kafka-consumer", "A service on Kafka", ABOUT, run)
