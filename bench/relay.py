"""How many messages a second leave an outbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from sqlalchemy import MetaData, delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from bench.harness import Benchmark, Row, Scale, Spread, Table, Target, Times, measure
from bench.server import Database, postgres
from semel.messaging.receive.broker import Outgoing
from semel.messaging.send.relay import Relay
from semel.messaging.tables import SCHEMA
from semel.sql.database import SqlDatabase
from semel.sql.tables import outbox_message

RELAY = "relay"
LOOP = "one message per transaction"
KEYS = 2000
LEAST_PER_SECOND = 80_000
LEAST_RATIO = 10.0

ABOUT = f"""\
An outbox of messages of 180 bytes with {KEYS:,} keys, on PostgreSQL with fsync and synchronous
commits, and a publisher that only counts: what is measured is semel and the database. The relay
reads, publishes and deletes in batches of 2,000, with the fence checked by every delete and the
order per key kept (a run before the timed ones checks that). The alternative is the loop that is
usually written by hand: lock the oldest message, publish it, delete it, commit. It is timed on
fewer messages."""

FILL = f"""
INSERT INTO semel.outbox_message (outbox, message_id, topic, key, payload, created_at)
SELECT 'outbox', gen_random_uuid()::text, 'payments', 'key-' || mod(i, {KEYS}),
       convert_to(rpad(i::text, 180, 'x'), 'UTF8'), 1
  FROM generate_series(1, %d) i
"""


class Counting:
    """A broker that takes everything at once."""

    def __init__(self) -> None:
        self.count = 0

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Count the batch."""
        self.count += len(batch)
        return [None] * len(batch)

    async def close(self) -> None:
        """Nothing to give back."""


class Checking(Counting):
    """A broker that sees whether every key keeps its order."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[bytes | None, int] = {}

    async def publish(self, batch: Sequence[Outgoing]) -> Sequence[Exception | None]:
        """Compare each message's number with the last one of its key."""
        for message in batch:
            number = int((message.value or b"0").rstrip(b"x"))
            if number <= self._last.get(message.key, 0):
                raise ValueError(f"{number} came behind {self._last[message.key]}")
            self._last[message.key] = number
        return await super().publish(batch)


def run(scale: Scale) -> list[Table]:
    """Measure both ways in turns."""
    many, few = scale.pick(100_000, 5_000), scale.pick(2_000, 200)
    with postgres() as server:
        _create(server)
        _timed(server, many, _relay, Checking())
        times = measure(
            {
                RELAY: lambda: _timed(server, many, _relay),
                # As if it had sent as many.
                LOOP: lambda: _timed(server, few, _loop) * many / few,
            },
            scale.rounds_or(5),
        )
    return [_table(times, many)]


def _table(times: Times, many: int) -> Table:
    rows = []
    for name, seconds in times.seconds.items():
        rate = Spread.of([many / took for took in seconds])
        ratio = times.ratio(name, LOOP)
        cells = [rate.text(0), "1" if name == LOOP else ratio.text(1)]
        rows.append(Row(name, cells))
        if name == RELAY:
            least = Target(f"≥ {LEAST_PER_SECOND:,} /s", rate.median >= LEAST_PER_SECOND)
            rows = [
                Row(name, cells, least),
                Row(
                    f"{name}, beside the loop", ["", cells[1]], Target.at_least(LEAST_RATIO, ratio)
                ),
            ]
    return Table(f"{many:,} messages", ["messages/s", f"× {LOOP}"], rows, times.rounds)


def _create(server: Database) -> None:
    async def create() -> None:
        database = SqlDatabase(server.url)
        await database.create_tables()
        await database.close()

    asyncio.run(create())


def _timed(
    server: Database,
    messages: int,
    send: Callable[[SqlDatabase, Counting], Awaitable[None]],
    broker: Counting | None = None,
) -> float:
    server.run("TRUNCATE semel.outbox_message", FILL % messages)
    server.run("VACUUM ANALYZE semel.outbox_message", "CHECKPOINT")
    counting = broker or Counting()

    async def whole() -> float:
        database = SqlDatabase(server.url)
        async with database.begin() as unit:  # a connection, before the clock runs
            await unit.now()
        begin = time.perf_counter()
        await send(database, counting)
        seconds = time.perf_counter() - begin
        await database.close()
        return seconds

    seconds = asyncio.run(whole())
    if counting.count != messages or server.count("semel.outbox_message") != 0:
        raise ValueError(f"{counting.count} of {messages} messages were sent")
    return seconds


async def _relay(database: SqlDatabase, broker: Counting) -> None:
    await Relay(database, broker).run_until_empty()


async def _loop(database: SqlDatabase, broker: Counting) -> None:
    table = outbox_message.to_metadata(MetaData(), schema=SCHEMA)
    oldest = select(table).order_by(table.c.place).limit(1).with_for_update()
    while True:
        async with AsyncSession(database.engine) as session, session.begin():
            found = (await session.execute(oldest)).one_or_none()
            if found is None:
                return
            await broker.publish([Outgoing(found.topic, found.payload, found.key.encode())])
            await session.execute(delete(table).where(table.c.place == found.place))


BENCHMARK = Benchmark("relay", "The relay of an outbox", ABOUT, run)
