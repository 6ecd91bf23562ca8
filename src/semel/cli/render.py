"""Records as JSON and as tables: one declaration per kind of record serves both.

    ATTEMPT = Shape(
        AttemptRecord,
        Field("cycle", "txn.cycle.label", head="cycle"),
        Field("rows", head="rows"),
        Field("planned_at", head="planned", cell=at),
        Field("epoch"),
    )

A field without *head* is in the JSON only; one without a key, a `column`, in the table only.
A record without a shape is written with its dataclass's own fields.  Cells, and lines that are
plain text, are never read as markup.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import reduce
from typing import Any, Final, TypeAlias

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from semel.cli.plain import shortened

Line: TypeAlias = RenderableType | None
"""A text, a styled text, a table; None is an empty line."""


def cell_of(value: Any) -> str:
    """Write a value into a cell: numbers with commas, lists and mappings on one line."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case Mapping():
            return pairs(value)
        case list() | tuple():
            return "; ".join(map(str, value)) or "-"
    return str(value)


def name_of(value: Any) -> str:
    """Write an id or a key that a producer chose; the middle of a long one is left out."""
    return shortened(str(value)) if value not in (None, "") else "-"


def start_of(value: str) -> str:
    """Write the first eight digits of a random id."""
    return value[:8]


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a record."""

    key: str
    """Its key in JSON."""

    of: str | Callable[[Any], Any] = ""
    """Where it comes from: a dotted path, or a function with an annotated result.

    Nothing: the attribute of the key's name.
    """

    head: str = ""
    """The heading of its column."""

    cell: Callable[[Any], str] = cell_of
    style: Callable[[Any], str] = lambda value: ""
    """The colour of its cell."""

    right: bool = False
    means: str = ""
    """What the reference says of it, where the record itself does not."""

    def read(self, record: Any) -> Any:
        """Take the value from a record."""
        if callable(self.of):
            return self.of(record)
        return reduce(getattr, (self.of or self.key).split("."), record)


def column(
    head: str, of: str | Callable[[Any], Any], cell: Callable[[Any], str] = cell_of
) -> Field:
    """Make a column that has no key of its own in JSON."""
    return Field("", of, head, cell)


Writer: TypeAlias = Callable[[Any], Any]

WRITERS: Final[dict[type, Shape | Writer]] = {}
"""How the JSON of a kind of record is written, where its own fields do not say it."""


class Shape:
    """The keys and the columns of one kind of record; making a shape is declaring it."""

    def __init__(self, kind: type, *declared: Field, whole: bool = False) -> None:
        """With *whole* every field of the dataclass is a key, too, that no path leads through."""
        self.kind = kind
        self.columns = [field for field in declared if field.head]
        self.keys = [field for field in declared if field.key]
        if whole:
            paths = {field.of.split(".")[0] for field in declared if isinstance(field.of, str)}
            known = paths | {field.key for field in declared}
            others = [Field(one.name) for one in fields(kind) if one.name not in known]
            self.keys = [*others, *self.keys]
        WRITERS[kind] = self

    def __call__(self, record: Any) -> dict[str, Any]:
        """Write a record's JSON."""
        return {field.key: document(field.read(record)) for field in self.keys}

    def table(self, records: Iterable[Any], without: Collection[str] = ()) -> Rows:
        """Make a table of *records*; columns *without* are left out."""
        return Rows([c for c in self.columns if c.head not in without], list(records))


def document(value: Any) -> Any:
    """Turn an answer into what JSON knows."""
    if (writer := WRITERS.get(type(value))) is not None:
        return writer(value)
    if is_dataclass(value):
        return {one.name: document(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): document(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [document(one) for one in value]
    return value.value if isinstance(value, Enum) else value


class Rows:
    """A table in the one look that all commands have."""

    def __init__(self, columns: list[Field], records: list[Any]) -> None:
        self.has_shortened = False
        self.table = Table(box=None, pad_edge=False, padding=(0, 2))
        for one in columns:
            justify = "right" if one.right else "left"
            self.table.add_column(Text(one.head), justify=justify, overflow="fold")  # type: ignore[arg-type]
        for record in records:
            self.table.add_row(*(self._cell(one, one.read(record)) for one in columns))

    def _cell(self, field: Field, value: Any) -> Text:
        text = field.cell(value)
        if field.cell is name_of and value is not None and text not in ("-", str(value)):
            self.has_shortened = True
        return Text(text, style=field.style(value))


def facts(values: Mapping[str, Any]) -> Table:
    """Make a table of names and values below each other; a value may be a styled text."""
    table = Table(box=None, pad_edge=False, padding=(0, 2), show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in values.items():
        table.add_row(Text(name), value if isinstance(value, Text) else Text(cell_of(value)))
    return table


def bold(text: object, style: str = "bold") -> Text:
    """Make a styled text."""
    return Text(str(text), style=style)


def red(text: object, *rest: str) -> Text:
    """Make a text that begins with what is wrong."""
    return Text.assemble((str(text), "bold red"), *rest)


def items(title: str | Text, lines: Iterable[str], indent: str = "") -> Iterator[Line]:
    """List *lines* below their title, if there are any."""
    lines = list(lines)
    if lines:
        yield Text.assemble(indent, title, ":")
    yield from (f"{indent}  - {line}" for line in lines)


def print_lines(console: Console, lines: Iterable[Line | Rows]) -> None:
    """Print an answer for people."""
    for line in lines:
        if line is None:
            console.print()
        elif isinstance(line, Rows):
            console.print(line.table)
            if line.has_shortened:
                console.print("long ids and keys are shortened; --json has them whole")
        else:
            # A terminal breaks long lines by itself; a file or a pipe gets them whole.
            console.print(line, markup=False, soft_wrap=not isinstance(line, Table))


_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def lasting(seconds: float | None) -> str:
    """Say how long: ``340 ms``, ``12 s``, ``5 min 12 s``, ``3 h 5 min``."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    left = round(seconds)
    if left < 60:
        return f"{left} s"
    for (unit, size), (smaller, part) in zip(_UNITS, (*_UNITS[1:], ("s", 1)), strict=True):
        if left >= size:
            rest = left % size // part
            return f"{left // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError(seconds)


def at(seconds: float | None) -> str:
    """Say when, in UTC, to the second."""
    if seconds is None:
        return "-"
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Say how many of what: ``1 row``, ``3,000 rows``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def some_of(shown: int, total: int, singular: str, place: str) -> str:
    """Say how many of what there are, and how many are shown: ``50 of 3,000 rows in …``."""
    first = f"{shown:,} of " if total > shown else ""
    return f"{first}{counted(total, singular)} in {place}"


def pairs(values: Mapping[str, object]) -> str:
    """Put names and values on one line."""
    shown = (f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in values.items())
    return ", ".join(shown) or "-"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Name some of many."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return (", ".join(every[:most]) or "-") + more
