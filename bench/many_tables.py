"""Six small tables of one database in one pipeline: what a cycle costs."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from bench.harness import Alternative, Benchmark, Scale, Table, compared, measure, timed
from bench.server import Database, postgres
from semel.ledger.sqlite import SqliteLedger
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.driver import Driver
from semel.pipeline.sink import Receipt, TwoPhaseSink
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId, SinkTxnId
from semel.postgres.sink import PostgresSink
from semel.spark.staging import Tee

ROWS = 100
WARM_UPS = 5

ABOUT = """\
A pipeline of `PostgresSink`s in staging mode, each with a table of its own in one database, and
100 rows for each of them in a cycle: a local ledger, one task, without Spark. The sinks of one
bookkeeping schema share one transaction per task and one for the decision; with a schema each they
do not. A figure is the median cycle of one run."""


APART = "6 tables, a transaction each"


def run(scale: Scale) -> list[Table]:
    """Measure one table, and six with one transaction and with six."""
    cycles = scale.pick(40, 5)
    with postgres() as database:
        times = measure(
            {
                APART: _pipeline(database, 6, cycles, books=6),
                "6 tables, one transaction": _pipeline(database, 6, cycles),
                "1 table": _pipeline(database, 1, cycles),
            },
            scale.rounds_or(5),
        )
    caption = f"{ROWS} rows a table, {cycles} cycles a run"
    return [compared(caption, times, APART, {"6 tables, one transaction": 3.0})]


def _pipeline(database: Database, tables: int, cycles: int, books: int = 1) -> Alternative:
    rows = pa.RecordBatch.from_pydict({"id": list(range(ROWS)), "name": ["payment"] * ROWS})

    def alternative() -> float:
        home = Path(tempfile.mkdtemp(prefix="semel-bench-"))
        app = f"bench-{home.name[-8:].lower()}"
        names = [f"{app}-{number}" for number in range(tables)]
        database.run(*(f'CREATE TABLE "{name}" (id bigint, name text)' for name in names))
        sinks = [
            PostgresSink(database.url, name, name=name, bookkeeping_schema=f"semel{n % books}")
            for n, name in enumerate(names)
        ]
        for sink in sinks:
            sink.check(rows.schema)
        ledger = SqliteLedger(home / "bench.ledger")
        driver = Driver(app, ledger, sinks)
        driver.start()
        generation = ledger.open_generation(driver.lease, "bench").number
        found = [
            _cycle(driver, CycleId(driver.scope, generation, number), rows)
            for number in range(WARM_UPS + cycles)
        ]
        driver.stop()
        ledger.close()
        return statistics.median(found[WARM_UPS:])

    return alternative


def _cycle(driver: Driver, cycle: CycleId, rows: pa.RecordBatch) -> float:
    def stage(txn: SinkTxnId) -> Mapping[str, Sequence[Receipt]]:
        return _staged(driver.sinks, txn, rows)

    read = BatchRange.of_offsets({"payments/0": (cycle.batch, cycle.batch + 1)})
    with timed() as watch:
        outcome = driver.run_cycle(cycle, lambda: read, stage)
    if not isinstance(outcome, CommitSucceeded):
        raise TypeError(f"not committed: {outcome}")
    return watch.seconds


def _staged(
    sinks: Sequence[TwoPhaseSink], txn: SinkTxnId, rows: pa.RecordBatch
) -> dict[str, list[Receipt]]:
    """Write the same rows to every sink in one task, as a task of Spark does."""
    tee = Tee([(sink.name, sink.stager(txn)) for sink in sinks], [0] * len(sinks))
    column = rows.to_struct_array()
    receipts = tee.write([pa.RecordBatch.from_arrays([column], ["s0"])], "t0-bench")
    return {sink.name: [receipt] for sink, receipt in zip(sinks, receipts, strict=True)}


BENCHMARK = Benchmark("many-tables", "Six tables of one database", ABOUT, run)
