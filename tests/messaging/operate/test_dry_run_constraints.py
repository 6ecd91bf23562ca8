"""A dry run fails where the commit would: constraints that are checked at its end count."""

from __future__ import annotations

from typing import Any

from sqlalchemy import event, text

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Handled
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.operate.dryrun import dry_run
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world

ONCE = ConsumerSettings(retry=RetryPolicy(max_attempts=1))

TABLES = (
    "CREATE TABLE customer (id INTEGER PRIMARY KEY)",
    "CREATE TABLE invoice (id INTEGER PRIMARY KEY, customer INTEGER REFERENCES customer (id) "
    "DEFERRABLE INITIALLY DEFERRED)",
)


def writing(*statements: str) -> Any:
    @consumer("billing", policy=ONCE, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        for statement in statements:
            await session.execute(text(statement))

    return handle


class Constraints:
    """What holds on every SQL database."""

    async def made(self, world):
        async with world.database.engine.begin() as connection:
            for statement in TABLES:
                await connection.execute(text(statement))
        return world.database

    @in_world
    async def test_what_the_commit_would_refuse_is_shown_as_it_would_become(self, world):
        database = await self.made(world)
        handler = writing("INSERT INTO invoice VALUES (1, 7)")

        tried = await dry_run(handler, database, Message("m1", {}))
        really = await handle_message(handler, database, Message("m1", {}))

        assert isinstance(tried.outcome, DeadLettered)
        assert type(tried.outcome) is type(really)
        assert tried.failure.code == really.failure.code == "CONSTRAINT_VIOLATED"
        assert [change.table for change in tried.changes] == ["invoice"]

    @in_world
    async def test_what_is_right_at_the_end_is_right(self, world):
        database = await self.made(world)
        handler = writing("INSERT INTO invoice VALUES (1, 7)", "INSERT INTO customer VALUES (7)")

        tried = await dry_run(handler, database, Message("m1", {}))

        assert (tried.outcome, tried.failure) == (Handled(), None)
        assert await handle_message(handler, database, Message("m1", {})) == Handled()


class TestConstraintsInPostgres(InPostgres, Constraints):
    @in_world
    async def test_a_unique_constraint_that_waits_counts_too(self, world):
        database = await self.made(world)
        async with database.engine.begin() as connection:
            await connection.execute(
                text("CREATE TABLE tax (id INTEGER UNIQUE DEFERRABLE INITIALLY DEFERRED)")
            )
        twice = writing("INSERT INTO tax VALUES (1)", "INSERT INTO tax VALUES (1)")

        tried = await dry_run(twice, database, Message("m1", {}))

        assert tried.failure.code == "CONSTRAINT_VIOLATED"


class TestConstraintsInSqlite(InSqlite, Constraints):
    async def made(self, world):
        def with_foreign_keys(driver: Any, record: Any) -> None:
            driver.execute("PRAGMA foreign_keys=ON")

        event.listen(world.database.engine.sync_engine, "connect", with_foreign_keys)
        await world.database.engine.dispose()
        return await super().made(world)

    @in_world
    async def test_what_was_wrong_before_is_nobodys_fault(self, world):
        database = await self.made(world)
        async with database.engine.connect() as connection:
            await connection.exec_driver_sql("SELECT 1")
            await connection.rollback()
            raw = await connection.get_raw_connection()
            await raw.driver_connection.execute("PRAGMA foreign_keys=OFF")
            await raw.driver_connection.execute("INSERT INTO invoice VALUES (1, 7)")
            await raw.driver_connection.execute("PRAGMA foreign_keys=ON")

        tried = await dry_run(
            writing("INSERT INTO customer VALUES (8)", "INSERT INTO invoice VALUES (2, 8)"),
            database,
            Message("m1", {}),
        )

        assert tried.outcome == Handled()

    @in_world
    async def test_a_database_that_checks_no_foreign_keys_refuses_none(self, world):
        database = await super().made(world)
        handler = writing("INSERT INTO invoice VALUES (1, 7)")

        tried = await dry_run(handler, database, Message("m1", {}))

        assert tried.outcome == await handle_message(handler, database, Message("m1", {}))
