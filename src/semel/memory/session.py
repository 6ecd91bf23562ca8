"""The session that handlers get: tables of their own, and no way to end the transaction.

Rows are copied on their way in and out, as a database does it: what a handler
changes in a row that it read is written when it is put, and taken back with it.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NoReturn

from semel.errors import Misuse
from semel.memory.tables import MemoryTables
from semel.messaging.handle.attempt import handling_now, refuse_if_late


class MemorySession:
    """What handlers get: tables of their own, in the transaction of their message."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables
        self._opened_in = handling_now()

    def add(self, table: str, row: Any) -> None:
        """Append a row."""
        self.put(table, self._tables.next_number(f"user:{table}"), row)

    def put(self, table: str, key: Any, row: Any) -> None:
        """Write a row under a key, unless the handler has ended."""
        refuse_if_late(self._opened_in)
        self._tables.table(f"user:{table}").put(key, deepcopy(row))

    def get(self, table: str, key: Any) -> Any:
        """Return a row, or None."""
        return deepcopy(self._tables.table(f"user:{table}").get(key))

    def rows(self, table: str) -> list[Any]:
        """Return all rows of a table."""
        return deepcopy(self._tables.table(f"user:{table}").rows())

    def commit(self) -> NoReturn:
        """Refuse: the consumer commits, after the handler."""
        _refuse("commit")

    def rollback(self) -> NoReturn:
        """Refuse: raise an exception to have the message rolled back."""
        _refuse("rollback")

    def close(self) -> NoReturn:
        """Refuse: whoever made the session closes it."""
        _refuse("close")


def _refuse(what: str) -> NoReturn:
    raise Misuse(
        f"a handler must not {what} its session: claims of other messages are in the same "
        f"transaction. Return to have it committed, raise to have it rolled back"
    )
