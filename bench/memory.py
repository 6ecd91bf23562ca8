"""The memory of a staging task, by the number of its rows."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from bench.harness import Benchmark, Row, Scale, Spread, Table, Target
from bench.server import postgres

# A Parquet writer keeps a row group of 131,072 rows; from the second size on, it is full.
SIZES = (100_000, 500_000, 2_000_000)
QUICK_SIZES = (20_000, 200_000, 400_000)
# What the allocators of one and the same program differ by from run to run.
MOST_GROWTH = 1.15

ABOUT = """\
A process that does what a staging task does, without Spark: it is given Arrow batches of 20,000
rows and writes them to one sink. Its peak resident memory must not grow with the rows; a Parquet
writer keeps one row group (131,072 rows or 64 MB) until it is full, which a small task never
fills. The ratio is that of the largest task to the middle one."""


def run(scale: Scale) -> list[Table]:
    """Measure tasks of three sizes."""
    sizes = QUICK_SIZES if scale.is_quick else SIZES
    rounds = scale.rounds_or(3)
    rows = []
    with postgres() as database:
        database.make("payments")
        for kind in ("postgres-staging", "postgres-prepared", "parquet", "jsonl"):
            peaks = [[_peak_mb(kind, n, database.url) for n in sizes] for _ in range(rounds)]
            growth = Spread.of([large / middle for _, middle, large in peaks])
            cells = [Spread.of(column).text(0) for column in zip(*peaks, strict=True)]
            target = Target.at_most(MOST_GROWTH, growth)
            rows.append(Row(kind, [*cells, growth.text(2)], target))
    columns = [*(f"{n:,} rows" for n in sizes), "ratio"]
    return [Table("peak resident memory in MB", columns, rows, rounds)]


def _peak_mb(kind: str, rows: int, url: str) -> float:
    with tempfile.TemporaryDirectory(prefix="semel-bench-") as folder:
        command = [sys.executable, "-m", "bench.memory_task", kind, str(rows), url, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


BENCHMARK = Benchmark("memory", "Memory of a task", ABOUT, run)
