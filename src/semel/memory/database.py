"""A database in memory: one transaction at a time, taken back when it fails.

It is for tests of services and for trying things out, and it passes the
contracts that the SQL databases pass.  A transaction that cannot begin within
the lock timeout is held elsewhere, as with any other database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cached_property
from typing import Any, Final, NoReturn

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import Misuse
from semel.memory.tables import Journal, Table
from semel.messaging.claims import Locked
from semel.messaging.failure import CLASSIFICATION, Classification

LOCK_SECONDS: Final = 2.0


class MemoryTables:
    """Every table, and the journal of the transaction that is open."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.journal = Journal()
        self._tables: dict[str, Table[Any, Any]] = {}

    def table(self, name: str) -> Table[Any, Any]:
        """Return a table, empty where nobody wrote to it yet."""
        if name not in self._tables:
            self._tables[name] = Table(self.journal)
        return self._tables[name]

    def next_number(self, name: str) -> int:
        """Count up; numbers that a rolled-back transaction took are not given again."""
        self._numbers[name] = self._numbers.get(name, 0) + 1
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {}


class MemorySession:
    """What handlers get: tables of their own, in the transaction of their message."""

    def __init__(self, tables: MemoryTables) -> None:
        self._tables = tables

    def add(self, table: str, row: Any) -> None:
        """Append a row."""
        self.put(table, self._tables.next_number(f"user:{table}"), row)

    def put(self, table: str, key: Any, row: Any) -> None:
        """Write a row under a key."""
        self._tables.table(f"user:{table}").put(key, row)

    def get(self, table: str, key: Any) -> Any:
        """Return a row, or None."""
        return self._tables.table(f"user:{table}").get(key)

    def rows(self, table: str) -> list[Any]:
        """Return all rows of a table."""
        return self._tables.table(f"user:{table}").rows()

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


class MemoryUnit:
    """One open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self.tables = tables
        self.session = MemorySession(tables)

    @cached_property
    def claims(self) -> Any:
        from semel.memory.claims import MemoryProcessedMessageStore

        return MemoryProcessedMessageStore(self.tables)

    @cached_property
    def dead_letters(self) -> Any:
        from semel.memory.deadletters import MemoryDeadLetters

        return MemoryDeadLetters(self.tables)

    @cached_property
    def waiting(self) -> Any:
        from semel.memory.waiting import MemoryWaitingRoom

        return MemoryWaitingRoom(self.tables)

    @cached_property
    def audit(self) -> Any:
        from semel.memory.audit import MemoryAuditTrail

        return MemoryAuditTrail(self.tables)

    @cached_property
    def revisions(self) -> Any:
        from semel.memory.revisions import MemoryRevisions

        return MemoryRevisions(self.tables)

    @cached_property
    def approvals(self) -> Any:
        from semel.memory.approvals import MemoryApprovals

        return MemoryApprovals(self.tables)

    @cached_property
    def replays(self) -> Any:
        from semel.memory.replays import MemoryReplays

        return MemoryReplays(self.tables)

    @cached_property
    def outbox(self) -> Any:
        from semel.memory.outbox import MemoryOutboxStore

        return MemoryOutboxStore(self.tables)

    @cached_property
    def inbox(self) -> Any:
        from semel.memory.inbox import MemoryInboxStore

        return MemoryInboxStore(self.tables)

    @cached_property
    def members(self) -> Any:
        from semel.memory.members import MemoryMembers

        return MemoryMembers(self.tables)

    @cached_property
    def outcomes(self) -> Any:
        from semel.memory.completeness import MemoryOutcomeStore

        return MemoryOutcomeStore(self.tables)

    @cached_property
    def versions(self) -> Any:
        from semel.memory.sequence import MemoryVersions

        return MemoryVersions(self.tables)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Take back what the block did if it raises."""
        mark = self.tables.journal.mark()
        try:
            yield
        except BaseException:
            self.tables.journal.undo(mark)
            raise

    async def now(self) -> float:
        """Return the database's time."""
        return self.tables.clock.now()


class MemoryDatabase:
    """Messages, claims and effects in memory, for one event loop."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK, lock_seconds: float = LOCK_SECONDS) -> None:
        self.tables = MemoryTables(clock)
        self.classification: Classification = CLASSIFICATION
        self._lock_seconds = lock_seconds
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[MemoryUnit]:
        """Open a transaction; others wait until it ends.

        Raises:
            Locked: another transaction was open for too long.
        """
        try:
            await asyncio.wait_for(self._lock.acquire(), self._lock_seconds)
        except TimeoutError as error:
            raise Locked("the database in memory") from error
        try:
            yield MemoryUnit(self.tables)
            self.tables.journal.forget()
        except BaseException:
            self.tables.journal.undo(0)
            raise
        finally:
            self._lock.release()

    def rows(self, table: str) -> list[Any]:
        """Return the committed rows that handlers wrote to *table*."""
        return self.tables.table(f"user:{table}").rows()

    def by_key(self, table: str) -> Mapping[Any, Any]:
        """Return the committed rows that handlers wrote to *table*, by key."""
        return dict(self.tables.table(f"user:{table}").items())

    async def close(self) -> None:
        """Nothing to give back."""
