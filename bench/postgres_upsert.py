"""Upserting into a large table: semel's staging tables beside the usual ones with a MERGE."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.frames import Cycles, cached, payments, spark_session
from bench.harness import Benchmark, Scale, Table, compared, measure, timed
from bench.server import COLUMNS, postgres
from semel.postgres.sink import PostgresSink

USUAL = "JDBC append + MERGE"
STAGING = "semel, staging"

MERGE = """
MERGE INTO target t USING staged s ON t.id = s.id
 WHEN MATCHED THEN UPDATE SET account = s.account, amount = s.amount, at = s.at, n = s.n
 WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.account, s.amount, s.at, s.n)
"""

ABOUT = """\
A batch of which half the keys exist already is upserted into a table ten times its size. The
usual way appends the batch to a staging table with Spark's JDBC writer (tuned as above) and then
runs one `MERGE`; its staging table exists before the clock starts, semel makes and drops its own
within. The target is brought back to its first state before every timing."""


def run(scale: Scale) -> list[Table]:
    """Measure 100,000 rows into 1,000,000."""
    rows = scale.pick(100_000, 10_000)
    large = 10 * rows
    with spark_session() as spark, postgres() as database:
        database.make("original")
        database.jdbc_append(payments(spark, large), "original")
        database.run(f"CREATE TABLE staged ({COLUMNS})", "VACUUM ANALYZE original")
        batch = cached(payments(spark, rows, first=large - rows // 2))

        def restore() -> None:
            database.run(
                "DROP TABLE IF EXISTS target",
                "CREATE TABLE target (LIKE original)",
                "INSERT INTO target SELECT * FROM original",
                "CREATE UNIQUE INDEX ON target (id)",
                "VACUUM ANALYZE target",
                "TRUNCATE staged",
                "CHECKPOINT",
            )

        def check(seconds: float) -> float:
            found = database.count("target")
            if found != large + rows // 2:
                raise ValueError(f"the target has {found} rows")
            return seconds

        def usual() -> float:
            restore()
            with timed() as watch:
                database.jdbc_append(batch, "staged")
                database.run(MERGE)
            return check(watch.seconds)

        restore()
        sink = PostgresSink(database.url, "target", key=["id"])
        cycles = Cycles([sink], Path(tempfile.mkdtemp(prefix="semel-bench-")))
        cycles.check(batch)

        def staging() -> float:
            restore()
            with timed() as watch:
                cycles.run(batch)
            return check(watch.seconds)

        times = measure({USUAL: usual, STAGING: staging}, scale.rounds_or(7), 2)
    caption = f"{rows:,} rows into {large:,}"
    return [compared(caption, times, USUAL, {STAGING: 1.3})]


BENCHMARK = Benchmark("postgres-upsert", "Upserting into PostgreSQL", ABOUT, run)
