"""The oracle: compares the source with what every sink shows, row by row.

It does not look at cycles, ledgers or recovery.  Rows are compared as they
are, so that a changed row is one missing and one foreign.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class SinkAudit:
    """What one sink shows, compared with the source."""

    sink: str
    expected: int
    found: int
    missing: tuple[Hashable, ...] = ()
    """In the source and not in the sink."""

    duplicated: tuple[Hashable, ...] = ()
    """In the sink more often than in the source."""

    foreign: tuple[Hashable, ...] = ()
    """In the sink and not in the source."""

    torn: tuple[str, ...] = ()
    """Cycles that show other rows than theirs: a part of them, or none that the source has."""

    left_behind: tuple[str, ...] = ()
    """Staged or held, and neither visible nor gone."""

    @property
    def findings(self) -> Mapping[str, tuple[Hashable, ...]]:
        """What is wrong, by the heading of its column."""
        return {
            "missing": self.missing,
            "twice": self.duplicated,
            "foreign": self.foreign,
            "torn": self.torn,
            "left behind": self.left_behind,
        }

    @property
    def is_clean(self) -> bool:
        """Whether every row exists once and nothing else is."""
        return not any(self.findings.values())


@dataclass(frozen=True, slots=True)
class Audit:
    """What all sinks show, and where the positions are."""

    sinks: tuple[SinkAudit, ...]
    positions: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """By partition: where the rows end, and where the ledger says they do, where they differ."""

    @property
    def is_clean(self) -> bool:
        """Whether no sink has a problem."""
        return not self.positions and all(sink.is_clean for sink in self.sinks)

    def table(self) -> str:
        """Print a line for every sink, and below it what was found."""
        head = ("sink", "source", "rows", *SinkAudit("", 0, 0).findings)
        lines = [head, *(_cells(sink) for sink in self.sinks)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
        text = [
            "  ".join(
                [line[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
            )
            for line in lines
        ]
        text += [
            f"{sink.sink}: {kind}: {quoted(found)}"
            for sink in self.sinks
            for kind, found in sink.findings.items()
            if found
        ]
        text += [
            f"partition {partition or '-'}: the rows end at {rows}, the ledger says {ledger}"
            for partition, (rows, ledger) in self.positions.items()
        ]
        return "\n".join(text)

    def __str__(self) -> str:
        return self.table()


def audit_sinks(
    source: Iterable[Any],
    sinks: Mapping[str, Iterable[Any]],
    *,
    left_behind: Mapping[str, Sequence[object]] | None = None,
    cycles: Mapping[str, Mapping[str, Iterable[Any]]] | None = None,
    cycle_rows: Mapping[str, Iterable[Any]] | None = None,
    ends: Mapping[str, tuple[int, int]] | None = None,
) -> Audit:
    """Compare *source* with the visible rows of *sinks*, by name.

    *left_behind* has, by sink, whatever is neither visible nor gone.  *cycles* has, by
    sink, the visible rows by cycle, to be compared with *cycle_rows*, the source's.
    *ends* has, by partition, where the source's rows end and what the ledger says.
    """
    expected = _counted(source)
    by_cycle = {name: _counted(rows) for name, rows in (cycle_rows or {}).items()}
    audits = []
    for name, rows in sinks.items():
        found = _counted(rows)
        shown = {c: _counted(r) for c, r in (cycles or {}).get(name, {}).items()}
        audits.append(
            SinkAudit(
                name,
                expected.total(),
                found.total(),
                missing=_listed(expected - found),
                duplicated=_listed(
                    Counter({k: n - expected[k] for k, n in found.items() if k in expected})
                ),
                foreign=_listed(Counter({k: n for k, n in found.items() if k not in expected})),
                torn=tuple(cycle for cycle, rows in shown.items() if rows != by_cycle.get(cycle)),
                left_behind=tuple(str(thing) for thing in (left_behind or {}).get(name, ())),
            )
        )
    differ = {name: pair for name, pair in (ends or {}).items() if pair[0] != pair[1]}
    return Audit(tuple(audits), differ)


def key_of(row: Any) -> Hashable:
    """Make a row comparable and hashable, for every type."""
    match row:
        case int() | str():
            return row
        case Mapping():
            return tuple(sorted((name, key_of(value)) for name, value in row.items()))
        case list() | tuple():
            return tuple(key_of(value) for value in row)
        case set():
            return frozenset(key_of(value) for value in row)
    return row if isinstance(row, Hashable) else repr(row)


def _counted(rows: Iterable[Any]) -> Counter[Hashable]:
    return Counter(key_of(row) for row in rows)


def _listed(counts: Counter[Hashable]) -> tuple[Hashable, ...]:
    return tuple(key for key, number in counts.items() for _ in range(number))


def _cells(sink: SinkAudit) -> tuple[str, ...]:
    counts = [str(len(found)) for found in sink.findings.values()]
    return (sink.sink, str(sink.expected), str(sink.found), *counts)


def quoted(found: Sequence[object], most: int = 5) -> str:
    """Write the first of what an audit found, and how many more there are."""
    more = f" … and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(map(str, found[:most])) + more
