"""Appending to PostgreSQL: semel's two modes between Spark's JDBC writer and raw COPY."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from pyspark.sql import DataFrame

from bench.frames import Cycles, cached, payments, spark_session
from bench.harness import (
    Alternative,
    Benchmark,
    Row,
    Scale,
    Table,
    Target,
    compared,
    measure,
    timed,
)
from bench.server import Database, postgres
from semel.postgres.sink import Mode, PostgresSink

JDBC = "JDBC append"
PREPARED = "semel, prepared"
STAGING = "semel, staging"
RAW = "raw COPY"

ABOUT = """\
Rows (id text, account text, amount numeric(18,2), at timestamptz, n integer) go from a cached
DataFrame of two partitions into a table with a unique index on id, ids ascending; `fsync` and
`synchronous_commit` are on, `shared_buffers` is 1GB, `max_wal_size` 8GB; the table is emptied and
a checkpoint taken before every timing.

* **JDBC append** is Spark's own writer, tuned: `reWriteBatchedInserts=true`, `batchsize` 10000.
  It can write rows twice after a failure, and readers see half-written batches.
* **semel** is a whole cycle: staging in one `mapInArrow` job, prepare, the decision in a SQLite
  ledger (five durable transactions), commit.
* **raw COPY** sends bytes that were encoded before the clock started, on two connections, without
  Spark: the limit. The aim of 0.9 of it leaves out what Spark costs: in a prototype, bringing a
  million rows from Spark to Python took 1.6 to 1.9 s of CPU, on the same two cores."""


def run(scale: Scale) -> list[Table]:
    """Measure 100,000 and 1,000,000 rows."""
    sizes = [(100_000, 9, 1.3, 0.9), (1_000_000, 5, 1.6, 1.1)]
    if scale.is_quick:
        sizes = [(20_000, 2, 1.3, 0.9)]
    tables = []
    with spark_session() as spark, postgres() as database:
        for rows, rounds, prepared, staging in sizes:
            frame = cached(payments(spark, rows))
            times = measure(_alternatives(database, frame, rows), scale.rounds_or(rounds), 2)
            wanted = {PREPARED: prepared, STAGING: staging}
            table = compared(f"{rows:,} rows", times, JDBC, wanted, RAW)
            share = times.ratio(PREPARED, RAW)
            aim = Row(f"{PREPARED}, of {RAW}", ["", "", share.text(2)], Target.at_least(0.9, share))
            tables.append(replace(table, rows=[*table.rows, aim]))
            frame.unpersist()
    return tables


def _alternatives(database: Database, frame: DataFrame, rows: int) -> dict[str, Alternative]:
    name = f"payments_{rows}"
    database.make(name)
    arrow = frame.toArrow()
    half = arrow.num_rows // 2
    ready = database.ready_bytes(name, [arrow.slice(0, half), arrow.slice(half)])

    def jdbc() -> float:
        database.clear(name)
        with timed() as watch:
            database.jdbc_append(frame, name)
        return _checked(database, name, rows, watch.seconds)

    def raw() -> float:
        database.clear(name)
        with timed() as watch:
            database.copy_ready(name, ready)
        return _checked(database, name, rows, watch.seconds)

    return {
        JDBC: jdbc,
        PREPARED: _semel(database, name, frame, rows, "prepared"),
        STAGING: _semel(database, name, frame, rows, "staging"),
        RAW: raw,
    }


def _semel(database: Database, name: str, frame: DataFrame, rows: int, mode: Mode) -> Alternative:
    sink = PostgresSink(database.url, name, mode=mode, write="append", name=f"{mode}_{rows}")
    cycles = Cycles([sink], Path(tempfile.mkdtemp(prefix="semel-bench-")))
    cycles.check(frame)

    def alternative() -> float:
        database.clear(name)
        with timed() as watch:
            cycles.run(frame)
        return _checked(database, name, rows, watch.seconds)

    return alternative


def _checked(database: Database, name: str, rows: int, seconds: float) -> float:
    """Return the time, if it was spent on all of the rows."""
    found = database.count(name)
    if found != rows:
        raise ValueError(f"{found} rows were written instead of {rows}")
    return seconds


BENCHMARK = Benchmark("postgres-append", "Appending to PostgreSQL", ABOUT, run)
