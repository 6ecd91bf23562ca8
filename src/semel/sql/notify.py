"""NOTIFY: wakes the relays of other processes when new messages are committed.

It is an option, not the default: a notification in every transaction costs the writers about
40 % of their throughput on a busy server, because PostgreSQL commits one notifying
transaction at a time.  Without it a relay polls, and its own process wakes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from semel.errors import Misuse
from semel.messaging.redact import reason_of
from semel.messaging.send.relay import Relay
from semel.sql.database import SqlDatabase
from semel.sql.schema import naming, qualified, require_version
from semel.sql.tables import outbox_message

log = logging.getLogger("semel.messaging")
CHANNEL: Final = "semel_outbox"
RECONNECT_SECONDS: Final = 1.0

# Names in braces get the schema of the tables.
INSTALL: Final = (
    """
    CREATE OR REPLACE FUNCTION {semel_outbox_signal}() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_notify('semel_outbox', of.outbox) FROM (SELECT DISTINCT outbox FROM added) of;
        RETURN NULL;
    END $$
    """,
    """
    CREATE OR REPLACE TRIGGER semel_outbox_signal AFTER INSERT ON {outbox_message}
    REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION {semel_outbox_signal}()
    """,
)
REMOVE: Final = (
    "DROP TRIGGER IF EXISTS semel_outbox_signal ON {outbox_message}",
    "DROP FUNCTION IF EXISTS {semel_outbox_signal}()",
)


class OutboxSignal:
    """Makes a PostgreSQL database notify relays of new messages."""

    def __init__(self, database: SqlDatabase) -> None:
        """Use *database*.

        Raises:
            Misuse: it is not PostgreSQL with asyncpg.
        """
        if database.engine.dialect.driver != "asyncpg":
            raise Misuse("signals need PostgreSQL and asyncpg; without them a relay polls")
        self._database = database

    async def install(self) -> None:
        """Make every transaction that writes into an outbox notify; may be called twice."""
        await self._execute(INSTALL)

    async def remove(self) -> None:
        """Stop the notifications."""
        await self._execute(REMOVE)

    @asynccontextmanager
    async def waking(self, relay: Relay) -> AsyncIterator[None]:
        """Wake *relay* at every signal for its outbox, on a connection of its own.

        If the connection is lost, the relay polls until there is another one.
        """
        listening = asyncio.create_task(self._listen(relay))
        try:
            yield
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening

    async def _listen(self, relay: Relay) -> None:
        while True:
            try:
                await self._listen_once(relay)
            except (SQLAlchemyError, OSError) as error:
                nouns = {"outbox": relay.outbox, "reason": reason_of(error)}
                log.warning("not listening for new messages, polling", extra=nouns)
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _listen_once(self, relay: Relay) -> None:
        """Listen until the connection is lost."""
        is_lost = asyncio.Event()

        def on_signal(*said: Any) -> None:
            if said[-1] == relay.outbox:
                relay.wake()

        async with self._database.engine.connect() as connection:
            driver: Any = (await connection.get_raw_connection()).driver_connection
            driver.add_termination_listener(lambda _: is_lost.set())
            await driver.add_listener(CHANNEL, on_signal)
            # Messages written before this connection listened sent no signal to it.
            relay.wake()
            try:
                await is_lost.wait()
            finally:
                # The connection still listens, so it must not go back to the pool.
                await connection.invalidate()

    async def _execute(self, statements: tuple[str, ...]) -> None:
        engine = self._database.engine
        names = naming(await require_version(engine, self._database.schema))
        async with engine.begin() as connection:
            texts = {
                name: qualified(name, connection.dialect, names)
                for name in (outbox_message.name, "semel_outbox_signal")
            }
            for statement in statements:
                await connection.execute(text(statement.format(**texts)))
