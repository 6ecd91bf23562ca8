"""The session that handlers get: it writes, and cannot end the transaction.

A handler's ``commit()`` would make the claims of messages durable that are not
handled yet, which loses them; its ``rollback()`` would undo its neighbours.

Messages that share it find what a session of their own would give them: rows as
the database has them, what their neighbours wrote included.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, AsyncSessionTransaction
from sqlalchemy.orm import Session

from semel.errors import Misuse
from semel.messaging.context import Handling, handling_now, refuse_if_late


def refuse(what: str) -> NoReturn:
    """Say why a handler must not do *what*.

    Raises:
        Misuse: always.
    """
    raise Misuse(
        f"a handler must not {what} its session: claims of other messages are in the same "
        f"transaction. Return to have it committed, raise to have it rolled back; "
        f"session.begin_nested() makes a savepoint"
    )


class GuardedSession(Session):
    """The synchronous inside of a `HandlerSession`."""

    guarded = False
    opened_in: Handling | None = None
    unsent = False
    """Earlier messages have added rows that the database has not got yet."""

    def begin_message(self) -> None:
        """Let go of whatever earlier messages have read or changed, as a closed session does.

        Objects of theirs that are still alive would hide what the database has by now.  Rows
        that they only added may wait, and are sent many at a time.
        """
        self.flush()
        super().expunge_all()
        self.unsent = False

    @property
    def has_objects(self) -> bool:
        """Earlier messages have left more behind than rows that they added."""
        return bool(self.identity_map or self._deleted or (self._new and not self.autoflush))

    def send_unsent(self) -> None:
        """Send what earlier messages have added, before this one asks the database."""
        if self.unsent:
            self.unsent = False
            self.flush()

    def execute(self, *arguments: Any, **named: Any) -> Any:
        """Execute a statement, behind what earlier messages have added."""
        self.send_unsent()
        return super().execute(*arguments, **named)

    def scalar(self, *arguments: Any, **named: Any) -> Any:
        """Execute a statement, behind what earlier messages have added."""
        self.send_unsent()
        return super().scalar(*arguments, **named)

    def scalars(self, *arguments: Any, **named: Any) -> Any:
        """Execute a statement, behind what earlier messages have added."""
        self.send_unsent()
        return super().scalars(*arguments, **named)

    def add(self, instance: object, *, _warn: bool = True) -> None:
        """Add an object, unless the handler has ended."""
        refuse_if_late(self.opened_in)
        super().add(instance, _warn=_warn)

    def commit(self) -> None:
        """Refuse."""
        refuse("commit")

    def rollback(self) -> None:
        """Refuse."""
        refuse("rollback")

    def close(self) -> None:
        """Refuse, until the consumer itself is done with the session."""
        if self.guarded:
            refuse("close")
        super().close()

    def invalidate(self) -> None:
        """Refuse."""
        refuse("invalidate")

    def reset(self) -> None:
        """Refuse."""
        refuse("reset")

    def expunge_all(self) -> None:
        """Forget all objects, unless some wait for the next flush."""
        self._refuse_if("expunge_all()", self.new or self.deleted or self.dirty)
        super().expunge_all()

    def expire_all(self) -> None:
        """Read all objects again, unless some wait for the next flush."""
        self._refuse_if("expire_all()", self.new or self.deleted or self.dirty)
        super().expire_all()

    def expunge(self, instance: object) -> None:
        """Forget an object, unless it has changed; a new one is its maker's to forget."""
        self._refuse_if("expunge()", instance in self.dirty or instance in self.deleted)
        super().expunge(instance)

    def expire(self, instance: object, attribute_names: Iterable[str] | None = None) -> None:
        """Read an object again, unless it has changed."""
        self._refuse_if("expire()", instance in self.dirty)
        super().expire(instance, attribute_names)

    def _refuse_if(self, what: str, changed: object) -> None:
        """See that no changes are thrown away: they may be those of other messages."""
        if self.guarded and changed:
            raise Misuse(
                f"{what} of a handler's session would throw away changes that were not sent yet, "
                f"and may be those of other messages: flush before"
            )


class HandlerSession(AsyncSession):
    """An `AsyncSession` inside a transaction that belongs to the consumer."""

    sync_session_class = GuardedSession

    def __init__(self, connection: AsyncConnection, **options: Any) -> None:
        # With "rollback_only", even a commit that got past the guard would not reach the
        # database: the connection's transaction is not the session's.
        super().__init__(
            connection,
            expire_on_commit=False,
            join_transaction_mode="rollback_only",
            **options,
        )
        self._inside.guarded = True
        self._inside.opened_in = handling_now()

    @property
    def _inside(self) -> GuardedSession:
        inside = self.sync_session
        if not isinstance(inside, GuardedSession):
            raise Misuse("a handler's session needs its own kind of synchronous session")
        return inside

    async def begin_message(self) -> None:
        """See that the next message finds the session as a new one would be."""
        inside = self._inside
        if inside.has_objects:
            await self.run_sync(lambda _: inside.begin_message())
        elif inside._new:
            inside.unsent = True

    async def connection(self, *arguments: Any, **named: Any) -> AsyncConnection:
        """Return the connection; what is asked there finds what earlier messages have added."""
        if self._inside.unsent and handling_now() is not None:
            await self.run_sync(lambda _: self._inside.send_unsent())
        return await super().connection(*arguments, **named)

    async def release(self) -> None:
        """Let go of the session: for the one who made it."""
        self._inside.guarded = False
        await super().close()

    def refuse_if_nested(self, within: AsyncSessionTransaction | None = None) -> None:
        """See that every savepoint inside of *within* has ended.

        Raises:
            Misuse: one is open, and would be undone with whatever was done in it.
        """
        open_one = self.get_nested_transaction()
        innermost = None if open_one is None else open_one.sync_transaction
        expected = None if within is None else within.sync_transaction
        if innermost is not expected:
            raise Misuse(
                "a handler returned with an open savepoint: what was done in it would have been "
                "undone. End it, best with `async with session.begin_nested():`"
            )

    def begin(self) -> AsyncSessionTransaction:
        """Refuse: the consumer has begun, and ends it."""
        refuse("begin a transaction of")

    async def commit(self) -> None:
        """Refuse."""
        refuse("commit")

    async def rollback(self) -> None:
        """Refuse."""
        refuse("rollback")

    async def close(self) -> None:
        """Refuse."""
        refuse("close")

    async def invalidate(self) -> None:
        """Refuse."""
        refuse("invalidate")

    async def reset(self) -> None:
        """Refuse."""
        refuse("reset")

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: ``async with session:`` in a handler does not close it."""
