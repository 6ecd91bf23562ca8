"""What a claim costs when the table is large."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

from bench.harness import Benchmark, Row, Scale, Spread, Table, Target, measure, timed
from bench.server import Database, postgres
from semel.messaging.handle.claims import Claimed, ClaimRequest
from semel.sql.database import SqlDatabase

ABOUT = """\
The same claims, one transaction each, in a table of 100,000 and in one of 10,000,000 earlier ones
(random ids, one consumer), after VACUUM and a checkpoint."""

MOST = 1.3
CLAIMS = 1000

FILL = """
INSERT INTO semel.processed_message (consumer_name, message_id, state, payload_hash)
SELECT 'billing', md5('{salt}' || n), 'COMPLETED', md5(n::text) || md5(n::text)
FROM generate_series(1, {rows}) n
"""


def run(scale: Scale) -> list[Table]:
    """Measure claims in a small and in a large table."""
    small, large = scale.pick(100_000, 1_000), scale.pick(10_000_000, 20_000)
    claims = scale.pick(CLAIMS, 50)
    with postgres() as server:
        loop = asyncio.new_event_loop()
        places = {rows: _place(loop, server, rows) for rows in (small, large)}
        numbers = itertools.count()

        def claiming(rows: int) -> float:
            first = next(numbers)
            with timed() as watch:
                loop.run_until_complete(_claim(places[rows], claims, f"{rows}-{first}"))
            return watch.seconds / claims

        names = {f"{rows:,} rows": rows for rows in (small, large)}
        times = measure(
            {name: partial(claiming, rows) for name, rows in names.items()},
            scale.rounds_or(7),
        )
        for place in places.values():
            loop.run_until_complete(place.close())
        loop.close()
    base, other = names
    slower = Spread.of(
        [b / a for a, b in zip(times.seconds[base], times.seconds[other], strict=True)]
    )
    rows = [
        Row(base, [times.spread(base).text(2), "1"]),
        Row(other, [times.spread(other).text(2), slower.text(2)], Target.at_most(MOST, slower)),
    ]
    columns = ["ms per claim", "× its cost"]
    return [Table("A claim in a small and in a large table", columns, rows, times.rounds)]


def _place(loop: asyncio.AbstractEventLoop, server: Database, rows: int) -> SqlDatabase:
    name = f"claims_{rows}"
    server.run(f"CREATE DATABASE {name}")
    place = SqlDatabase(server.url.rsplit("/", 1)[0] + f"/{name}")

    async def make() -> None:
        await place.create_tables()
        async with place.engine.begin() as connection:
            await connection.exec_driver_sql(FILL.format(salt=rows, rows=rows))
        async with place.engine.connect() as connection:
            free = await connection.execution_options(isolation_level="AUTOCOMMIT")
            await free.exec_driver_sql("VACUUM ANALYZE semel.processed_message")
            await free.exec_driver_sql("CHECKPOINT")

    loop.run_until_complete(make())
    return place


async def _claim(place: SqlDatabase, claims: int, salt: str) -> None:
    for number in range(claims):
        async with place.begin() as unit:
            request = ClaimRequest(f"new-{salt}-{number}", "0" * 64)
            answer = await unit.claims.try_claim("billing", request)
        if not isinstance(answer, Claimed):
            raise TypeError(f"not claimed: {answer}")


BENCHMARK = Benchmark("claims-at-size", "Claims in a large table", ABOUT, run)
