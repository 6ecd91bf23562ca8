"""How the transaction begins that claims are in, in a session that may be anybody's."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import SessionTransaction

from semel.errors import Misuse
from semel.sqlalchemy.tables import processed_message


class Beginning:
    """The begin of the transaction that *session* is in, before each statement about a claim."""

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._checked: SessionTransaction | None = None

    @cached_property
    def is_postgres(self) -> bool:
        """Tell whether the claims are in PostgreSQL."""
        return self._session.get_bind(clause=processed_message).dialect.name == "postgresql"

    async def begin(self) -> None:
        """Begin the transaction as READ COMMITTED, where it is ours to begin.

        At a higher level, the second of two claims fails instead of finding the first.
        """
        if not self.is_postgres:
            return
        if self._has_connection():
            self._refuse_autocommit()
        else:
            await self._session.connection(
                bind_arguments={"clause": processed_message},
                execution_options={"isolation_level": "READ COMMITTED"},
            )

    def _has_connection(self) -> bool:
        begun = self._session.sync_session.get_transaction()
        # `session.begin()` takes no connection yet, and nothing else in SQLAlchemy tells.
        if begun is not None and begun._connections:
            return True
        # A connection of the caller's keeps its level beyond this transaction: theirs to choose.
        return isinstance(self._session.get_bind(clause=processed_message), Connection)

    def _refuse_autocommit(self) -> None:
        """See that the claim can be taken back: a message whose handler fails would be lost."""
        begun = self._session.sync_session.get_transaction()
        if begun is not None and begun is self._checked:
            return
        known = begun._connections.values() if begun is not None else ()
        used: list[Engine | Connection] = [one[0] for one in known]
        for one in used or [self._session.get_bind(clause=processed_message)]:
            driver: Any = one.connection.dbapi_connection if isinstance(one, Connection) else None
            # As SQLAlchemy's wrapper of asyncpg says it, and as psycopg does.
            level = getattr(driver, "isolation_level", None)
            if level == "autocommit" or getattr(driver, "autocommit", False):
                raise Misuse(
                    "the session's connection is in AUTOCOMMIT: a claim would be durable before "
                    "its message is handled. Claim first, or use an engine with transactions"
                )
        self._checked = begun
