"""The page about performance, written from the figures of the newest run of every benchmark."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Benchmark, Table

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "bench" / "figures.json"
PAGE = ROOT / "docs" / "performance.md"

HEAD = """\
# Performance

<!-- Written by `python -m bench --write`; do not edit. -->

Every table compares alternatives that ran in turns, in one process, on one machine, so the
**ratios** mean something; the times are that machine's. A figure is the median, with the smallest
and the largest in brackets. A ratio is taken within each round, then its median over the rounds:
above 1 is faster. Targets were set before the code was written, and stay here when they are
missed. Below each table stands how many cores other programs kept busy when it began: much more
than 0 widens the ranges, and limits in seconds are then missed more easily than on a machine of
one's own.

Do it again with your own machine's figures (all of it takes about forty minutes):

```console
$ make bench ARGS=--quick
$ make bench ARGS=--write
```
"""


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of one benchmark found, and where."""

    tables: list[Table]
    date: str
    machine: str
    versions: str
    busy_cores: float
    """How many cores others kept busy right before it began."""

    def to_json(self) -> dict[str, Any]:
        """Write it as plain values."""
        return {
            "date": self.date,
            "machine": self.machine,
            "versions": self.versions,
            "busy_cores": round(self.busy_cores, 2),
            "tables": [table.to_json() for table in self.tables],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Run:
        """Read what `to_json` wrote."""
        tables = [Table.from_json(table) for table in fields["tables"]]
        return cls(**{**fields, "tables": tables})


def load(path: Path = FIGURES) -> dict[str, Run]:
    """Read the newest run of every benchmark."""
    if not path.exists():
        return {}
    return {name: Run.from_json(run) for name, run in json.loads(path.read_text()).items()}


def save(runs: Mapping[str, Run], path: Path = FIGURES) -> None:
    """Keep the newest run of every benchmark."""
    fields = {name: run.to_json() for name, run in runs.items()}
    path.write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n")


def render(benchmarks: Iterable[Benchmark], runs: Mapping[str, Run]) -> str:
    """Write the whole page."""
    sections = [HEAD]
    for benchmark in benchmarks:
        if (run := runs.get(benchmark.name)) is None:
            continue
        parts = [f"## {benchmark.title}\n", benchmark.about + "\n"]
        parts += [render_table(table) for table in run.tables]
        parts.append(_footnote(benchmark, run))
        sections.append("\n".join(parts))
    return "\n".join(sections)


def render_table(table: Table) -> str:
    """Write one table in Markdown."""
    head = [table.caption, *table.columns, "target", "met"]
    lines = [head, ["---"] * len(head)]
    for row in table.rows:
        target = ["", ""]
        if row.target is not None:
            target = [row.target.text, "yes" if row.target.is_met else "**no**"]
        lines.append([row.name, *row.cells, *target])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _footnote(benchmark: Benchmark, run: Run) -> str:
    numbers = [str(table.rounds) for table in run.tables]
    rounds = f"{' and '.join(dict.fromkeys(numbers))} rounds"
    text = (
        f"{run.date}, `python -m bench {benchmark.name}`, {rounds}; {run.machine}; "
        f"{run.versions}; other programs kept {run.busy_cores:.1f} cores busy when it began."
    )
    return textwrap.fill(text, 98) + "\n"
