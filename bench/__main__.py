"""``python -m bench [NAME …] [--quick] [--rounds N] [--write]``"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module
from typing import Final

from rich.console import Console
from rich.table import Table as Printed

from bench.harness import Benchmark, Scale, Table
from bench.machine import busy_cores, machine, versions
from bench.page import PAGE, Run, load, render, save

MODULES: Final[Mapping[str, str]] = {
    "postgres-append": "bench.postgres_append",
    "postgres-upsert": "bench.postgres_upsert",
    "cycle-overhead": "bench.cycle_overhead",
    "two-sinks": "bench.two_sinks",
    "many-tables": "bench.many_tables",
    "table-sinks": "bench.table_sinks",
    "recovery": "bench.recovery",
    "memory": "bench.memory",
    "relay": "bench.relay",
    "kafka-relay": "bench.kafka_relay",
    "consumer": "bench.consumer",
    "kafka-consumer": "bench.kafka_consumer",
    "claims-at-size": "bench.claims_at_size",
    "messages-spark": "bench.messages_spark",
}


def benchmark(name: str) -> Benchmark:
    """Import the benchmark of this name."""
    found: Benchmark = import_module(MODULES[name]).BENCHMARK
    return found


def main(arguments: list[str]) -> int:
    """Run benchmarks and print their tables; with --write, write the page, too."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODULES))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see it work")
    parser.add_argument("--rounds", type=int, help="how often every alternative is measured")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} from the figures")
    parser.add_argument("--render", action="store_true", help="only write the page again")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.names) - set(MODULES))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(MODULES)}")
    if asked.write and asked.quick:
        parser.error("quick figures are not worth writing down")
    runs = load()
    if not asked.render:
        for name in asked.names or MODULES:
            runs[name] = run(benchmark(name), Scale(asked.quick, asked.rounds))
            if asked.write:
                save(runs)
    if asked.write or asked.render:
        PAGE.write_text(render([benchmark(name) for name in MODULES], runs))
    return 0


def run(found: Benchmark, scale: Scale) -> Run:
    """Run one benchmark and print what it found."""
    busy = busy_cores()
    console = Console(width=120)
    console.print(f"[bold]{found.title}[/] ({found.name}); others keep {busy:.1f} cores busy")
    tables = found.run(scale)
    for table in tables:
        console.print(printed(table))
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Run(tables, now, machine(), versions(), busy)


def printed(table: Table) -> Printed:
    """Lay a table out for a terminal."""
    laid = Printed(table.caption, *table.columns, "target", "met")
    for row in table.rows:
        target = ("", "")
        if row.target is not None:
            target = (row.target.text, "[green]yes[/]" if row.target.is_met else "[red]no[/]")
        laid.add_row(row.name, *row.cells, *target)
    return laid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
