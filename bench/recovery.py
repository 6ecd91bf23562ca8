"""How long a new owner needs to settle what a thousand crashes left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from bench.harness import Benchmark, Row, Scale, Spread, Table, Target, measure, timed
from bench.server import Database, postgres
from semel.files.sink import FilesSink
from semel.ledger.sqlite import SqliteLedger
from semel.pipeline.driver import Driver
from semel.pipeline.sink import SinkOK, TwoPhaseSink
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId
from semel.postgres.sink import Mode, PostgresSink

MOST_SECONDS = 2.0

ABOUT = """\
A ledger holds 1,000 attempts that were prepared and never decided, and the sink what they had
staged: 1,000 staging tables, 1,000 prepared transactions, or 1,000 sealed folders. Timed is
`Driver.start()` in a process that is running: take the lease, fence, win ABORT for every attempt,
remove everything, sweep. (A real pipeline leaves one attempt per crash.)"""


def run(scale: Scale) -> list[Table]:
    """Measure each kind of sink by itself."""
    stranded = scale.pick(1000, 50)
    with postgres() as database:
        database.run("CREATE TABLE payments (id text)")
        times = measure(
            {
                "staging tables": lambda: _recover(lambda _: _table(database, "staging"), stranded),
                "prepared transactions": lambda: _recover(
                    lambda _: _table(database, "prepared"), stranded
                ),
                "folders of files": lambda: _recover(
                    lambda home: FilesSink(home / "files"), stranded
                ),
            },
            scale.rounds_or(3),
            warm_ups=0,
        )
    rows = []
    for name, seconds in times.seconds.items():
        found = Spread.of(seconds)
        rows.append(Row(name, [found.text(2)], Target.at_most(MOST_SECONDS, found, "s")))
    return [Table(f"{stranded:,} stranded transactions", ["s"], rows, times.rounds)]


def _table(database: Database, mode: Mode) -> PostgresSink:
    return PostgresSink(database.url, "payments", mode=mode, write="append", name=mode)


def _recover(make_sink: Callable[[Path], TwoPhaseSink], stranded: int) -> float:
    home = Path(tempfile.mkdtemp(prefix="semel-bench-"))
    sink = make_sink(home)
    ledger = SqliteLedger(home / "bench.ledger")
    driver = Driver(f"bench-{home.name[-8:].lower()}", ledger, [sink])
    driver.start()
    _strand(driver, sink, stranded)
    sink.close()
    with timed() as watch:
        report = driver.start()
    if len(report.aborted) != stranded or sink.recover(driver.scope):
        raise ValueError(f"{len(report.aborted)} of {stranded} attempts were settled")
    driver.stop()
    ledger.close()
    shutil.rmtree(home)
    return watch.seconds


def _strand(driver: Driver, sink: TwoPhaseSink, stranded: int) -> None:
    """Leave attempts as a process leaves them that dies before its decision."""
    ledger, lease = driver.ledger, driver.lease
    generation = ledger.open_generation(lease, "bench").number
    for number in range(stranded):
        txn = CycleId(driver.scope, generation, number).attempt()
        ledger.plan(lease, txn)
        writer = sink.stager(txn).open("task")
        writer.write(pa.RecordBatch.from_pydict({"id": [f"payment-{number}"]}))
        receipts = [writer.finish()]
        ledger.set_range(lease, txn, BatchRange.of_offsets({"payments/0": (0, 1)}))
        outcome = sink.prepare(txn, receipts)
        if not isinstance(outcome, SinkOK):
            raise TypeError(f"not prepared: {outcome}")
        ledger.set_prepared(lease, txn, {sink.name: outcome.token or {}}, {sink.name: 1})
        sink.close()


BENCHMARK = Benchmark("recovery", "Recovery", ABOUT, run)
