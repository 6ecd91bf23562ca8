"""A database in memory: one transaction at a time, taken back when it fails.

It is for tests of services and for trying things out, and it passes the
contracts that the SQL databases pass.  A transaction that cannot begin within
the lock timeout is held elsewhere, as with any other database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import deepcopy
from typing import Any, Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.memory.approvals import MemoryApprovals
from semel.memory.attempts import MemoryFailedAttempts
from semel.memory.audit import MemoryAuditTrail
from semel.memory.claims import MemoryProcessedMessageStore
from semel.memory.completeness import MemoryOutcomeStore
from semel.memory.deadletters import MemoryDeadLetters
from semel.memory.inbox import MemoryInboxStore
from semel.memory.members import MemoryMembers
from semel.memory.outbox import MemoryOutboxStore
from semel.memory.replays import MemoryReplays
from semel.memory.revisions import MemoryRevisions
from semel.memory.sequence import MemoryVersions
from semel.memory.session import MemorySession
from semel.memory.tables import MemoryTables
from semel.memory.waiting import MemoryWaitingRoom
from semel.memory.watching import watching
from semel.messaging.failure import CLASSIFICATION, Classification
from semel.messaging.handle.claims import Locked
from semel.operate.stores import RowChange

LOCK_SECONDS: Final = 2.0


class MemoryUnit:
    """One open transaction."""

    def __init__(self, tables: MemoryTables) -> None:
        self.tables = tables
        self.session = MemorySession(tables)
        self.claims = MemoryProcessedMessageStore(tables)
        self.attempts = MemoryFailedAttempts(tables)
        self.dead_letters = MemoryDeadLetters(tables)
        self.waiting = MemoryWaitingRoom(tables)
        self.audit = MemoryAuditTrail(tables)
        self.revisions = MemoryRevisions(tables)
        self.approvals = MemoryApprovals(tables)
        self.replays = MemoryReplays(tables)
        self.outbox = MemoryOutboxStore(tables)
        self.inbox = MemoryInboxStore(tables)
        self.members = MemoryMembers(tables)
        self.outcomes = MemoryOutcomeStore(tables)
        self.versions = MemoryVersions(tables)

    @asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Take back what the block did if it raises."""
        mark = self.tables.journal.mark()
        try:
            yield
        except BaseException:
            self.tables.journal.undo(mark)
            raise

    async def begin_message(self) -> None:
        """Nothing is kept between messages: every read is a copy of what is there."""

    def watching(self) -> AbstractAsyncContextManager[list[RowChange]]:
        """Collect what the block changes in the handlers' own tables."""
        return watching(self.tables)

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
        # As with any other database, others have their turn between two transactions.
        await asyncio.sleep(0)
        try:
            # Not with `asyncio.wait_for`, which loses a cancellation that comes with the lock.
            async with asyncio.timeout(self._lock_seconds):
                await self._lock.acquire()
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
        return deepcopy(self.tables.table(f"user:{table}").rows())

    def by_key(self, table: str) -> Mapping[Any, Any]:
        """Return the committed rows that handlers wrote to *table*, by key."""
        return deepcopy(dict(self.tables.table(f"user:{table}").items()))

    async def close(self) -> None:
        """Nothing to give back."""
