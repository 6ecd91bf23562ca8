"""Tables in memory that can take back what a transaction or a savepoint did."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from semel.clock import Clock

Key = TypeVar("Key")
Row = TypeVar("Row")

MISSING: Any = object()
"""What a key has for a row where there is none."""


class Journal:
    """What was changed, in order, with what was there before."""

    def __init__(self) -> None:
        self._changes: list[tuple[dict[Any, Any], Any, Any]] = []

    def mark(self) -> int:
        """Return a place to come back to."""
        return len(self._changes)

    def undo(self, mark: int) -> None:
        """Take back everything behind *mark*."""
        while len(self._changes) > mark:
            rows, key, before = self._changes.pop()
            if before is MISSING:
                del rows[key]
            else:
                rows[key] = before

    def forget(self) -> None:
        """Keep everything: nothing can be taken back any more."""
        self._changes.clear()

    def since(self, mark: int) -> list[tuple[dict[Any, Any], Any, Any]]:
        """Return the changes behind *mark*, in order: whose rows, which key, what was there."""
        return self._changes[mark:]

    def note(self, rows: dict[Any, Any], key: Any) -> None:
        """Remember what *key* holds, before it changes."""
        self._changes.append((rows, key, rows.get(key, MISSING)))


class Table(Generic[Key, Row]):
    """Rows by key; rows are values, and are replaced, never changed."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._rows: dict[Key, Row] = {}

    def get(self, key: Key) -> Row | None:
        """Return a row."""
        return self._rows.get(key)

    def put(self, key: Key, row: Row) -> None:
        """Write a row."""
        self._journal.note(self._rows, key)
        self._rows[key] = row

    def remove(self, key: Key) -> bool:
        """Delete a row; False where there is none."""
        if key not in self._rows:
            return False
        self._journal.note(self._rows, key)
        del self._rows[key]
        return True

    def items(self) -> list[tuple[Key, Row]]:
        """Return keys and rows; the table may change while they are looked at."""
        return list(self._rows.items())

    def rows(self) -> list[Row]:
        """Return the rows; the table may change while they are looked at."""
        return list(self._rows.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Key]:
        return iter(list(self._rows))

    def __len__(self) -> int:
        return len(self._rows)


class MemoryTables:
    """Every table, and the journal of the transaction that is open."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.journal = Journal()
        self._tables: dict[str, Table[Any, Any]] = {}
        self._numbers: dict[str, int] = {}

    def table(self, name: str) -> Table[Any, Any]:
        """Return a table, empty where nobody wrote to it yet."""
        if name not in self._tables:
            self._tables[name] = Table(self.journal)
        return self._tables[name]

    def next_number(self, name: str) -> int:
        """Count up; numbers that a rolled-back transaction took are not given again."""
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return self._numbers[name]

    def changed_since(self, mark: int) -> list[tuple[str, Any, Any, Any]]:
        """Return table, key, and the row before and now of whatever changed, each key once."""
        names = {id(table._rows): name for name, table in self._tables.items()}
        found: dict[tuple[str, Any], tuple[str, Any, Any, Any]] = {}
        for rows, key, before in self.journal.since(mark):
            name = names[id(rows)]
            found.setdefault((name, key), (name, key, before, rows.get(key, MISSING)))
        return list(found.values())
