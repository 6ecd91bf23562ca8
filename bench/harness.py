"""Alternatives timed in turns, and what is made of their times.

Times on a shared machine drift by tens of per cent within minutes.  So the
alternatives of one benchmark run in turns, in one process, every second round
backwards, and a ratio is taken within each round before the median is taken
over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Alternative: TypeAlias = Callable[[], float]
"""Does the work once, on a field that it has cleared itself; returns the seconds it took."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up *values*."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int, unit: str = "") -> str:
        """Write it as ``1.62 (1.55..1.70) ms``; a single value has no range."""
        median, low, high = (f"{x:.{digits}f}" for x in (self.median, self.low, self.high))
        unit = f" {unit}" if unit else ""
        return f"{median}{unit}" if low == high else f"{median} ({low}..{high}){unit}"


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should reach."""

    text: str
    is_met: bool

    @classmethod
    def at_least(cls, wanted: float, found: Spread) -> Target:
        """Ask for a median that is not smaller."""
        return cls(f"≥ {wanted:g}", found.median >= wanted)

    @classmethod
    def at_most(cls, wanted: float, found: Spread, unit: str = "") -> Target:
        """Ask for a median that is not larger."""
        return cls(f"≤ {wanted:g} {unit}".rstrip(), found.median <= wanted)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: an alternative, its cells, and its target if it has one."""

    name: str
    cells: Sequence[str]
    target: Target | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """What one measurement found."""

    caption: str
    columns: Sequence[str]
    """Between the name and the target."""

    rows: Sequence[Row]
    rounds: int

    def to_json(self) -> dict[str, Any]:
        """Write it as plain values."""
        rows = [
            [row.name, list(row.cells), row.target and [row.target.text, row.target.is_met]]
            for row in self.rows
        ]
        named = {"caption": self.caption, "columns": list(self.columns)}
        return {**named, "rows": rows, "rounds": self.rounds}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Table:
        """Read what `to_json` wrote."""
        rows = [
            Row(name, cells, target and Target(*target)) for name, cells, target in fields["rows"]
        ]
        return cls(fields["caption"], fields["columns"], rows, fields["rounds"])


@dataclass(frozen=True, slots=True)
class Scale:
    """How much work a run does."""

    is_quick: bool = False
    rounds: int | None = None

    def pick(self, full: int, quick: int) -> int:
        """Choose a size."""
        return quick if self.is_quick else full

    def rounds_or(self, full: int) -> int:
        """Choose how often every alternative is measured."""
        return self.rounds or self.pick(full, 2)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Something that can be measured."""

    name: str
    title: str
    about: str
    """What is compared with what, for the page."""

    run: Callable[[Scale], list[Table]]


@dataclass(slots=True)
class Times:
    """The seconds of every alternative, round by round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        """How often every alternative was timed."""
        return min(map(len, self.seconds.values()))

    def spread(self, name: str) -> Spread:
        """Sum up one alternative, in milliseconds."""
        return Spread.of([1000 * seconds for seconds in self.seconds[name]])

    def ratio(self, name: str, to: str) -> Spread:
        """Say how many times as fast as *to* an alternative is: above 1 is faster."""
        pairs = zip(self.seconds[to], self.seconds[name], strict=True)
        return Spread.of([other / own for other, own in pairs])


def measure(alternatives: Mapping[str, Alternative], rounds: int, warm_ups: int = 1) -> Times:
    """Time all alternatives in turns, *rounds* times, after rounds that do not count."""
    times = Times({name: [] for name in alternatives})
    for number in range(-warm_ups, rounds):
        names = list(alternatives) if number % 2 == 0 else list(alternatives)[::-1]
        for name in names:
            seconds = alternatives[name]()
            if number >= 0:
                times.seconds[name].append(seconds)
    return times


def compared(
    caption: str,
    times: Times,
    to: str,
    wanted: Mapping[str, float] | None = None,
    limit: str | None = None,
) -> Table:
    """Make a table of times and of ratios to one alternative, and to the *limit* if given."""
    rows = []
    for name in times.seconds:
        ratio = times.ratio(name, to)
        cells = [times.spread(name).text(0), "1" if name == to else ratio.text(2)]
        if limit is not None:
            cells.append("1" if name == limit else times.ratio(name, limit).text(2))
        target = Target.at_least(wanted[name], ratio) if wanted and name in wanted else None
        rows.append(Row(name, cells, target))
    columns = ["ms", f"× as fast as {to}"]
    return Table(caption, columns + ([f"of {limit}"] if limit else []), rows, times.rounds)


class Stopwatch:
    """Seconds between the beginning and the end of a block."""

    seconds = 0.0


@contextmanager
def timed() -> Iterator[Stopwatch]:
    """Time a block."""
    watch = Stopwatch()
    begin = time.perf_counter()
    yield watch
    watch.seconds = time.perf_counter() - begin
