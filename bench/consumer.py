"""A consumer with claims: one transaction per message beside many messages in one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeAlias
from zlib import crc32

from sqlalchemy import BigInteger, Text, func, insert, select
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bench.harness import Benchmark, Row, Scale, Table, Target, Times, measure, timed
from bench.server import postgres
from bench.team import Team
from semel.message import Coordinates, Message
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import Consumer, consumer
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.sql.database import SqlDatabase

Handle: TypeAlias = Callable[[list[Message]], Coroutine[Any, Any, None]]

DOCUMENTED = "a session per message"
IN_PROCESSES = "awaiting handlers, four workers, a process each"
BATCH = 500
WORKERS = 4
FAILING_EVERY = 100

ABOUT = """\
Every message is claimed, makes one business row, and is committed, on PostgreSQL with fsync and
synchronous commits. The documented pattern opens a session per message, claims, inserts, commits,
with one worker. The others are `consume_many`, in batches of 500: the handlers are unchanged, and
the final state is the same. The awaited statement is made once, and gets each message's values;
one row shows what it costs to make a statement for each message instead. Four workers share one
loop, or have a process each. If 1 % of the messages always fail, here and there, those before
each in its savepoint run again, and a dead letter is written. One row shows what is left to gain:
the same handlers in a plain session, one commit for every 500, nothing claimed and no failure
contained. Its messages keep one core busy for most of the time, which is why four workers on one
loop gain little."""


class Base(DeclarativeBase):
    """The business tables."""


class Payment(Base):
    """What a message causes."""

    __tablename__ = "payment"
    id: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=True)
    message_id: Mapped[str] = mapped_column(Text)
    amount: Mapped[int] = mapped_column(BigInteger)


PAYMENT = Base.metadata.tables["payment"]
PAY = insert(PAYMENT)


@consumer("adds")
async def adds(message: Message, session: Any) -> None:
    """Write as an ORM user does."""
    session.add(Payment(message_id=message.id, amount=message.payload))


@consumer("awaits")
async def awaits(message: Message, session: Any) -> None:
    """Write as a Core user does, one awaited statement per message."""
    await session.execute(PAY, {"message_id": message.id, "amount": message.payload})


@consumer("builds")
async def builds(message: Message, session: Any) -> None:
    """Write the same, with a statement of its own for each message."""
    values = {"message_id": message.id, "amount": message.payload}
    await session.execute(insert(PAYMENT).values(values))


@consumer("fails")
async def fails(message: Message, session: Any) -> None:
    """Write, and refuse one message in a hundred."""
    await awaits(message, session)
    if is_refused(message):
        raise NonRetryableMessageError("one in a hundred")


def is_refused(message: Message) -> bool:
    """Tell the messages that fail: by their ids, so that they stand anywhere in a batch."""
    return crc32(message.id.encode()) % FAILING_EVERY == 0


@consumer("batches", batches=True)
async def batches(messages: Sequence[Message], session: Any) -> None:
    """Write the whole batch with one call."""
    rows = [{"message_id": message.id, "amount": message.payload} for message in messages]
    await session.execute(insert(PAYMENT).inline(), rows)


class Field:
    """A database, new messages, and one loop."""

    def __init__(self, url: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.database = SqlDatabase(url)
        self._numbers = itertools.count()
        self.loop.run_until_complete(self._make())

    async def _make(self) -> None:
        await self.database.create_tables()
        async with self.database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)

    def messages(self, count: int) -> list[Message]:
        """Make messages with new ids."""
        numbers = itertools.islice(self._numbers, count)
        return [
            Message(
                f"payment-{n:012}",
                i,
                b'{"amount": %d}' % i,
                f"account-{n % 500}",
                source=Coordinates("payments", n % 8, n // 8),
            )
            for i, n in enumerate(numbers, 1)
        ]

    def seconds_each(self, count: int, handle: Handle, *, some_fail: bool = False) -> float:
        """Time the handling of *count* messages and return the seconds per message."""
        before = self.loop.run_until_complete(self._payments())
        messages = self.messages(count)
        expected = count - sum(map(is_refused, messages)) if some_fail else count
        with timed() as watch:
            self.loop.run_until_complete(handle(messages))
        found = self.loop.run_until_complete(self._payments()) - before
        if found != expected:
            raise ValueError(f"{found} payments instead of {expected}")
        return watch.seconds / count

    async def _payments(self) -> int:
        async with self.database.begin() as unit:
            return int((await unit.session.execute(select(func.count(Payment.id)))).scalar_one())

    async def documented(self, messages: Sequence[Message]) -> None:
        """Do as the documentation of every such library says."""
        sessions = async_sessionmaker(self.database.engine)
        for message in messages:
            async with sessions() as session:
                store = SqlAlchemyProcessedMessageStore(session)
                if await store.claim(consumer_name="documented", event_id=message.id):
                    await awaits(message, session)
                    await session.commit()

    def many(self, handler: Consumer, workers: int = 1) -> Handle:
        """Handle batches with several workers at once."""

        async def handle(messages: list[Message]) -> None:
            waiting = iter([messages[i : i + BATCH] for i in range(0, len(messages), BATCH)])

            async def work() -> None:
                for batch in waiting:
                    await consume_many(handler, self.database, batch)

            await asyncio.gather(*(work() for _ in range(workers)))

        return handle

    async def unclaimed(self, messages: Sequence[Message]) -> None:
        """Send the same statements, and promise nothing."""
        sessions = async_sessionmaker(self.database.engine)
        for start in range(0, len(messages), BATCH):
            async with sessions() as session:
                for message in messages[start : start + BATCH]:
                    await awaits(message, session)
                await session.commit()

    def in_processes(self, team: Team[list[Message]], count: int) -> float:
        """Time *count* messages in processes, and return the seconds per message."""
        before = self.loop.run_until_complete(self._payments())
        messages = self.messages(count)
        seconds = team.seconds(messages[n::WORKERS] for n in range(WORKERS))
        found = self.loop.run_until_complete(self._payments()) - before
        if found != count:
            raise ValueError(f"{found} payments instead of {count}")
        return seconds / count

    def close(self) -> None:
        """Give everything back."""
        self.loop.run_until_complete(self.database.close())
        self.loop.close()


def one_of_a_team(pipe: Connection, url: str) -> None:
    """Handle messages in a process of its own, whenever told to."""
    field = Field(url)
    handle = field.many(awaits)
    field.loop.run_until_complete(handle(field.messages(0)))
    while (messages := pipe.recv()) is not None:
        pipe.send("ready")
        pipe.recv()
        field.loop.run_until_complete(handle(messages))
        pipe.send("done")
    field.close()


def run(scale: Scale) -> list[Table]:
    """Measure the ways to handle messages."""
    few, some, lots = scale.pick(500, 50), scale.pick(6_000, 600), scale.pick(20_000, 1_000)
    with postgres() as server:
        field = Field(server.url)
        team: Team[list[Message]] = Team(one_of_a_team, (server.url,), WORKERS)
        ways: dict[str, tuple[int, Handle, float | None]] = {
            DOCUMENTED: (few, field.documented, None),
            "handlers that add to the session": (lots, field.many(adds), 12),
            "handlers that await a statement": (some, field.many(awaits), 5),
            "… made for each message": (some, field.many(builds), None),
            "… with 1 % failing messages": (some, field.many(fails), 4),
            "… with four workers on one loop": (some, field.many(awaits, WORKERS), 9),
            "… without claims, on one loop": (some, field.unclaimed, None),
            "handlers that take the batch": (lots, field.many(batches), 50),
        }

        def alternative(name: str) -> Callable[[], float]:
            count, handle, _ = ways[name]
            return lambda: field.seconds_each(count, handle, some_fail="failing" in name)

        alternatives = {name: alternative(name) for name in ways}
        alternatives[IN_PROCESSES] = lambda: field.in_processes(team, some)
        times = measure(alternatives, scale.rounds_or(5))
        team.close()
        field.close()
    wanted = {name: wanted for name, (_, _, wanted) in ways.items()}
    return [_table(times, {**wanted, IN_PROCESSES: 9})]


def _table(times: Times, wanted: dict[str, float | None]) -> Table:
    rows = []
    for name in times.seconds:
        ratio = times.ratio(name, DOCUMENTED)
        each = [1 / seconds for seconds in times.seconds[name]]
        least = wanted[name]
        rows.append(
            Row(
                name,
                [f"{sorted(each)[len(each) // 2]:,.0f}", ratio.text(1)],
                None if least is None else Target.at_least(least, ratio),
            )
        )
    columns = ["messages/s", f"× {DOCUMENTED}"]
    return Table("Messages that are claimed and handled", columns, rows, times.rounds)


BENCHMARK = Benchmark("consumer", "Consuming messages", ABOUT, run)
