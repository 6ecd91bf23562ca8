"""What a transaction in memory changed in the handlers' own tables: for dry runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, is_dataclass
from typing import Any, Final

from semel.memory.tables import MISSING, MemoryTables
from semel.operate.stores import Change, RowChange, all_shown

USERS: Final = "user:"


@asynccontextmanager
async def watching(tables: MemoryTables) -> AsyncIterator[list[RowChange]]:
    """Collect what the block changes; the list is filled when it ends."""
    found: list[RowChange] = []
    mark = tables.journal.mark()
    try:
        yield found
    finally:
        for table, key, before, after in tables.changed_since(mark):
            if table.startswith(USERS) and before is not after:
                found.append(_change(table.removeprefix(USERS), key, before, after))


def _change(table: str, key: Any, before: Any, after: Any) -> RowChange:
    if before is MISSING:
        return RowChange(Change.INSERT, table, str(key), after=_values(after))
    if after is MISSING:
        return RowChange(Change.DELETE, table, str(key), before=_values(before))
    return RowChange(Change.UPDATE, table, str(key), _values(before), _values(after))


def _values(row: Any) -> dict[str, Any]:
    if isinstance(row, Mapping):
        return all_shown({str(name): value for name, value in row.items()})
    if is_dataclass(row) and not isinstance(row, type):
        return all_shown(asdict(row))
    return all_shown({"row": row})
