"""One staging task in a process of its own; prints its peak memory in MB."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pyarrow as pa

from semel.files.sink import FilesSink
from semel.pipeline.sink import TwoPhaseSink
from semel.pipeline.txn import CycleId, Scope
from semel.postgres.sink import Mode, PostgresSink
from semel.spark.staging import ROWS_PER_ARROW_BATCH, Tee

SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "account": pa.string(),
        "amount": pa.decimal128(18, 2),
        "at": pa.timestamp("us", "UTC"),
        "n": pa.int32(),
    }
)


def batches(rows: int) -> Iterator[pa.RecordBatch]:
    """Generate payments as the tee gets them: one column of structs."""
    for begin in range(0, rows, ROWS_PER_ARROW_BATCH):
        numbers = range(begin, min(rows, begin + ROWS_PER_ARROW_BATCH))
        columns = [
            pa.array([f"payment-{i:012}" for i in numbers]),
            pa.array([f"account-{i % 5000}" for i in numbers]),
            pa.array([Decimal(i % 1000) for i in numbers], SCHEMA.field("amount").type),
            pa.array([1_700_000_000_000_000 + i for i in numbers], SCHEMA.field("at").type),
            pa.array([i % 1000 for i in numbers], pa.int32()),
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        yield pa.RecordBatch.from_arrays([batch.to_struct_array()], ["s0"])


def sink_of(kind: str, url: str, folder: Path) -> TwoPhaseSink:
    """Make the sink that is measured."""
    modes: dict[str, Mode] = {"postgres-staging": "staging", "postgres-prepared": "prepared"}
    if kind in modes:
        return PostgresSink(url, "payments", mode=modes[kind], write="append")
    return FilesSink(folder, format=kind)


def main() -> None:
    """Stage, measure, and leave nothing behind."""
    kind, rows, url, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    sink = sink_of(kind, url, folder)
    scope = Scope("bench", "memory", "main")
    sink.check(SCHEMA)
    sink.fence(scope, 1)
    txn = CycleId(scope, 1, 0).attempt()
    [receipt] = Tee([(sink.name, sink.stager(txn))]).write(batches(rows), "task")
    if receipt.tally.rows != rows:
        raise ValueError(f"{receipt.tally.rows} rows were staged")
    print(peak_mb())
    sink.abort(txn, None)


def peak_mb() -> float:
    """Return the most memory that this program has had since it began.

    `getrusage` would be wrong: its peak survives `exec`, and begins with the parent's.
    """
    status = Path("/proc/self/status").read_text()
    [peak] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(peak.split()[1]) / 2**10


if __name__ == "__main__":
    main()
