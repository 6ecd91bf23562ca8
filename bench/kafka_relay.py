"""How many messages a second get from an outbox into Kafka."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

from faststream.kafka import KafkaBroker as FastStreamBroker
from sqlalchemy import MetaData

from bench.harness import Benchmark, Row, Scale, Spread, Table, Target, Times, measure
from bench.kafka_server import PARTITIONS, WAIT_SECONDS, Cluster, kafka
from bench.server import Database, postgres
from semel.kafka.broker import KafkaBroker
from semel.messaging.send.relay import Relay
from semel.sql.database import SqlDatabase
from semel.testing.services.jars import services_folder

RELAY: Final = "relay"
TUNED: Final = "faststream-outbox, 10 workers and batches"
PLAIN: Final = "faststream-outbox, its defaults"
OTHERS: Final = "faststream-outbox>=0.19,<0.20"
KEYS: Final = 2000
WORKERS: Final = 10
LEAST_PER_SECOND: Final = 60_000
LEAST_RATIO: Final = 5.0

ABOUT = f"""\
An outbox of JSON messages of 180 bytes on PostgreSQL with fsync and synchronous commits, and a
topic of {PARTITIONS} partitions on a real Kafka broker. The clock runs until the outbox is empty;
then the topic is read, and every message must be there once. The relay sends {KEYS:,} keys with an
idempotent producer, in batches of 2,000, and the order of each key is checked, too.
As in `semel run`, what is loaded is left out of garbage collections (`gc.freeze()`), for all rows.
faststream-outbox relays with the one decorator of its documentation, without keys; once with its
defaults, and once with {WORKERS} workers that fetch 500 rows at once and delete 100 at once, which
keeps no order. It is timed on fewer messages, and installed for this benchmark only."""

PAYLOAD = """convert_to(rpad('{"n": ' || i || ', "pad": "', 178, 'x') || '"}', 'UTF8')"""

FILL_OURS = f"""
INSERT INTO semel.outbox_message (outbox, message_id, topic, key, payload, created_at)
SELECT 'outbox', gen_random_uuid()::text, '{{topic}}', 'key-' || mod(i, {KEYS}), {PAYLOAD}, 1
  FROM generate_series(1, {{count}}) i
"""

FILL_THEIRS = f"""
INSERT INTO their_outbox (queue, payload, headers)
SELECT 'payments', {PAYLOAD}, '{{"content-type": "application/json"}}'
  FROM generate_series(1, {{count}}) i
"""

Send: TypeAlias = Callable[[SqlDatabase, str], Coroutine[Any, Any, float]]
"""Sends all messages of an outbox to a topic, and returns the seconds it took."""

BrokerOf: TypeAlias = Callable[[SqlDatabase], tuple[Any, Any]]
"""Makes a broker of faststream-outbox, and the decorator of its subscriber."""


class Field:
    """An outbox and a broker, and a new topic for each round."""

    def __init__(self, server: Database, cluster: Cluster) -> None:
        self.server = server
        self.cluster = cluster

    def ours(self, count: int) -> float:
        """Time semel's relay and return the seconds per message."""
        return self._timed(count, "semel.outbox_message", FILL_OURS, self._relay)

    def theirs(self, count: int, broker_of: BrokerOf) -> float:
        """Time faststream-outbox and return the seconds per message."""
        send = partial(self._faststream_outbox, broker_of)
        return self._timed(count, "their_outbox", FILL_THEIRS, send)

    async def make(self, tables: MetaData) -> None:
        """Create their tables, and ours."""
        database = SqlDatabase(self.server.url)
        async with database.engine.begin() as connection:
            await connection.run_sync(tables.create_all)
        await database.create_tables()
        await database.close()

    def _timed(self, count: int, table: str, fill: str, send: Send) -> float:
        topic = self.cluster.new_topic()
        filled = fill.replace("{topic}", topic).replace("{count}", str(count))
        self.server.run(f"TRUNCATE {table}", filled, f"VACUUM ANALYZE {table}", "CHECKPOINT")

        async def whole() -> float:
            database = SqlDatabase(self.server.url)
            async with database.begin() as unit:  # a connection, before the clock runs
                await unit.now()
            try:
                return await send(database, topic)
            finally:
                await database.close()

        seconds = asyncio.run(whole())
        self._check(topic, count, table)
        return seconds / count

    def _check(self, topic: str, count: int, table: str) -> None:
        last: dict[bytes, int] = {}
        numbers = []
        for key, value in self.cluster.read(topic):
            number = json.loads(value)["n"]
            numbers.append(number)
            if key is not None and last.get(key, 0) >= number:
                raise ValueError(f"{number} came behind {last[key]}")
            if key is not None:
                last[key] = number
        if sorted(numbers) != list(range(1, count + 1)) or self.server.count(table):
            raise ValueError(f"{len(numbers)} messages, {len(set(numbers))} different, of {count}")

    async def _relay(self, database: SqlDatabase, topic: str) -> float:
        publisher = KafkaBroker(self.cluster.bootstrap).publisher()
        begin = time.perf_counter()
        await Relay(database, publisher).run_until_empty()
        seconds = time.perf_counter() - begin
        await publisher.close()
        return seconds

    async def _faststream_outbox(
        self, broker_of: BrokerOf, database: SqlDatabase, topic: str
    ) -> float:
        to_kafka = FastStreamBroker(self.cluster.bootstrap, logger=None)
        outbox, subscriber = broker_of(database)
        publisher = to_kafka.publisher(topic)

        @publisher
        @subscriber  # type: ignore[untyped-decorator]
        async def relay(body: dict[str, Any]) -> dict[str, Any]:
            return body

        async with to_kafka:
            await to_kafka.start()
            begin = time.perf_counter()
            async with outbox, asyncio.timeout(WAIT_SECONDS):
                while await asyncio.to_thread(self.server.count, "their_outbox"):
                    await asyncio.sleep(0.02)
                return time.perf_counter() - begin


def faststream_outbox(tables: MetaData) -> Callable[..., BrokerOf]:
    """Install the package into a folder of its own, and return what makes its brokers.

    Raises:
        OSError, ImportError: it cannot be had.
    """
    folder = services_folder() / "faststream-outbox"
    if not folder.is_dir():
        _install(folder)
    sys.path.append(str(folder))
    package = import_module("faststream_outbox")
    table = package.make_outbox_table(tables, table_name="their_outbox")

    def tuned(**settings: Any) -> BrokerOf:
        def make(database: SqlDatabase) -> tuple[Any, Any]:
            broker = package.OutboxBroker(database.engine, outbox_table=table, logger=None)
            return broker, broker.subscriber("payments", **settings)

        return make

    return tuned


def _install(folder: Path) -> None:
    # Its dependencies are FastStream's and semel's own.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", OTHERS]
    unfinished = folder.with_suffix(".new")
    done = subprocess.run(
        [*command, "--target", str(unfinished)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise OSError(done.stderr.strip().rpartition("\n")[2])
    unfinished.rename(folder)


def run(scale: Scale) -> list[Table]:
    """Measure both relays in turns; without the other package, only ours."""
    many, few, fewer = scale.pick(200_000, 5_000), scale.pick(4_000, 400), scale.pick(1_000, 100)
    tables = MetaData()
    why = ""
    try:
        tuned = faststream_outbox(tables)
    except (OSError, ImportError) as error:
        why = str(error)
    with postgres() as server, kafka() as cluster:
        field = Field(server, cluster)
        asyncio.run(field.make(tables))
        alternatives = {RELAY: partial(field.ours, many)}
        if not why:
            best = tuned(max_workers=WORKERS, fetch_batch_size=500, terminal_flush_batch_size=100)
            alternatives[TUNED] = partial(field.theirs, few, best)
            alternatives[PLAIN] = partial(field.theirs, fewer, tuned())
        gc.freeze()
        times = measure(alternatives, scale.rounds_or(5))
        gc.unfreeze()
    return [_table(times, many, why)]


def _table(times: Times, many: int, why: str) -> Table:
    rates = {
        name: Spread.of([1 / each for each in seconds]) for name, seconds in times.seconds.items()
    }
    fast_enough = Target(f"≥ {LEAST_PER_SECOND:,} /s", rates[RELAY].median >= LEAST_PER_SECOND)
    if why:
        rows = [Row(RELAY, [rates[RELAY].text(0), ""], fast_enough)]
        rows.append(Row(TUNED, [f"not measured: {why}", ""]))
    else:
        ratio = times.ratio(RELAY, TUNED)
        rows = [
            Row(RELAY, [rates[RELAY].text(0), ratio.text(1)], fast_enough),
            Row(
                f"{RELAY}, beside {TUNED}",
                ["", ratio.text(1)],
                Target.at_least(LEAST_RATIO, ratio),
            ),
            Row(TUNED, [rates[TUNED].text(0), "1"]),
            Row(PLAIN, [rates[PLAIN].text(0), times.ratio(PLAIN, TUNED).text(2)]),
        ]
    return Table(f"{many:,} messages", ["messages/s", f"× {TUNED}"], rows, times.rounds)


BENCHMARK = Benchmark("kafka-relay", "The relay to Kafka", ABOUT, run)
