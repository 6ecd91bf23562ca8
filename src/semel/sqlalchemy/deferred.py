"""What a commit would refuse, asked without one: constraints that are checked at the end.

A dry run is rolled back; without this it would call a message handled that no
commit could keep.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

IMMEDIATE: Final = text("SET CONSTRAINTS ALL IMMEDIATE")
IS_ON: Final = text("PRAGMA foreign_keys")
ORPHANS: Final = text("PRAGMA foreign_key_check")


class Deferred:
    """The deferred constraints of one open transaction."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._before: Counter[Any] = Counter()

    @property
    def _is_postgres(self) -> bool:
        return self._session.get_bind().dialect.name == "postgresql"

    async def begin(self) -> None:
        """Remember what SQLite finds wrong already: a commit does not look at that."""
        if not self._is_postgres:
            self._before = await self._orphans()

    async def check(self) -> None:
        """Check now what the commit would check.

        Raises:
            IntegrityError: the commit would be refused.
        """
        if self._is_postgres:
            await self._session.execute(IMMEDIATE)
            return
        new = await self._orphans() - self._before
        for table, _, parent, _ in new:
            cause = sqlite3.IntegrityError(
                f"FOREIGN KEY constraint failed: a row of {table} names none of {parent}"
            )
            raise IntegrityError("COMMIT", None, cause)

    async def _orphans(self) -> Counter[Any]:
        """Count rows that name a row which is not there; none where SQLite does not care."""
        if not (await self._session.execute(IS_ON)).scalar_one():
            return Counter()
        return Counter(map(tuple, await self._session.execute(ORPHANS)))
