"""A handler cannot end the transaction of its messages, whichever way it tries."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import IntegrityError

from semel.codec import FromHeader
from semel.errors import Misuse
from semel.message import Message
from semel.messaging.database import TransactionEnded
from semel.messaging.failed.retries import RetryWorker, retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many, drain
from semel.messaging.handle.claims import ClaimState, Failure
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Handled, Refused
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.operate.dryrun import dry_run
from semel.policy.vocabulary import BatchPolicy, RetryMode
from semel.sql.database import SqlDatabase
from semel.sql.session import _refusal_of
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.worlds import postgres_world

MESSAGES = [Message(f"m{n}", {}, b"{}") for n in (1, 2, 3, 4)]
ONCE = ConsumerSettings(retry=RetryPolicy(max_attempts=1))
STORED = ConsumerSettings(
    retry=RetryPolicy(initial_delay_seconds=0, max_delay_seconds=0, mode=RetryMode.RETRY_TABLE)
)


async def by_connection(session: Any) -> None:
    await (await session.connection()).commit()


async def by_connections_rollback(session: Any) -> None:
    await (await session.connection()).rollback()


async def by_closing(session: Any) -> None:
    await (await session.connection()).close()


async def by_transaction(session: Any) -> None:
    await (await session.connection()).get_transaction().commit()


async def by_the_inside(session: Any) -> None:
    await session.run_sync(lambda inside: inside.connection().commit())


def by_statement(statement: str) -> Any:
    async def end(session: Any) -> None:
        await session.execute(text(statement))

    end.__name__ = statement
    return end


async def by_driver_sql(session: Any) -> None:
    await (await session.connection()).exec_driver_sql("commit")


WAYS = [
    by_connection,
    by_connections_rollback,
    by_closing,
    by_transaction,
    by_the_inside,
    by_driver_sql,
    *map(by_statement, ["COMMIT", "/* x */ commit;", "END", "ROLLBACK", "BEGIN"]),
]


def ending(end: Any, *, suppressed: bool = False) -> Any:
    @consumer("c", policy=ONCE, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.id})
        if message.id != "m2":
            return
        try:
            await end(session)
        except Misuse:
            if not suppressed:
                raise

    return handle


async def paid(database: Any) -> list[str]:
    async with database.begin() as unit:
        found = await unit.session.execute(text("SELECT id FROM paid ORDER BY id"))
        return list(found.scalars())


class Ends:
    """The rules, for every database that has connections."""

    def run(self, test):
        async def whole():
            async with self.world() as world:
                async with world.database.engine.begin() as connection:
                    await connection.execute(text("CREATE TABLE paid (id VARCHAR(9))"))
                await test(world.database)

        asyncio.run(whole())

    def test_a_message_alone_whose_transaction_was_ended_is_never_a_duplicate(self):
        async def by_driver(session):
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.execute("COMMIT")

        async def test(database):
            with pytest.raises(TransactionEnded, match="message 'm2'"):
                await handle_message(ending(by_driver), database, MESSAGES[1])

        self.run(test)

    @pytest.mark.parametrize("end", WAYS, ids=lambda end: end.__name__)
    def test_it_is_refused_and_the_neighbours_are_kept(self, end):
        async def test(database):
            outcomes = await consume_many(ending(end), database, MESSAGES)

            assert [type(o) for o in outcomes] == [Handled, DeadLettered, Handled, Handled]
            assert outcomes[1].failure.code == "HANDLER_MISUSE"
            assert "a handler must not" in outcomes[1].failure.reason
            assert await paid(database) == ["m1", "m3", "m4"]

        self.run(test)

    @pytest.mark.parametrize("batched", [False, True])
    def test_a_savepoint_that_a_handler_leaves_open_is_its_failure(self, batched):
        @consumer("c", policy=ONCE, id_from=FromHeader("message-id"))
        async def forgetful(message: Message, session: Any) -> None:
            if message.id == "m2":
                await session.begin_nested()
            await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.id})

        async def test(database):
            if batched:
                outcomes = await consume_many(forgetful, database, MESSAGES)
            else:
                outcomes = [await handle_message(forgetful, database, m) for m in MESSAGES]

            assert [type(o) for o in outcomes] == [Handled, DeadLettered, Handled, Handled]
            assert "open savepoint" in outcomes[1].failure.reason
            assert await paid(database) == ["m1", "m3", "m4"]

        self.run(test)

    @pytest.mark.parametrize("end", WAYS, ids=lambda end: end.__name__)
    def test_a_process_that_dies_afterwards_leaves_nothing(self, end):
        async def test(database):
            @consumer("c", policy=ONCE, id_from=FromHeader("message-id"))
            async def dies(message: Message, session: Any) -> None:
                await session.execute(text("INSERT INTO paid VALUES ('x')"))
                try:
                    await end(session)
                except Misuse:
                    raise KeyboardInterrupt from None

            with pytest.raises(KeyboardInterrupt):
                await consume_many(dies, database, MESSAGES)

            assert await paid(database) == []
            async with database.begin() as unit:
                assert await unit.claims.look_up("c", "m1") is None

        self.run(test)

    @pytest.mark.parametrize("end", WAYS, ids=lambda end: end.__name__)
    def test_a_dry_run_leaves_nothing(self, end):
        async def test(database):
            tried = await dry_run(ending(end), database, MESSAGES[1])

            assert tried.failure.code == "HANDLER_MISUSE"
            assert await paid(database) == []

        self.run(test)

    @pytest.mark.parametrize("end", WAYS, ids=lambda end: end.__name__)
    def test_whoever_catches_the_refusal_is_kept_whole_or_not_at_all(self, end):
        async def test(database):
            handler = ending(end, suppressed=True)
            outcome = await handle_message(handler, database, MESSAGES[1])

            kept = ["m2"] if isinstance(outcome, Handled) else []
            assert await paid(database) == kept
            async with database.begin() as unit:
                state = (await unit.claims.look_up("c", "m2")).state
            assert state is (ClaimState.COMPLETED if kept else ClaimState.FAILED_TERMINAL)

        self.run(test)

    def test_savepoints_of_a_handlers_own_are_free(self):
        @consumer("c", id_from=FromHeader("message-id"))
        async def careful(message: Message, session: Any) -> None:
            for divisor in (1, 0):
                with suppress(ZeroDivisionError):
                    async with session.begin_nested():
                        await session.execute(text("INSERT INTO paid VALUES ('a')"))
                        1 / divisor
            await session.execute(text("SAVEPOINT mine"))
            await session.execute(text("INSERT INTO paid VALUES ('b')"))
            await session.execute(text("ROLLBACK TO SAVEPOINT mine"))

        async def test(database):
            assert await consume_many(careful, database, MESSAGES[:2]) == [Handled(), Handled()]
            assert await paid(database) == ["a", "a"]

        self.run(test)

    def test_a_commit_that_the_database_refuses_leaves_the_connection_usable(self):
        async def test(database):
            async with database.engine.begin() as connection:
                await connection.execute(text("CREATE TABLE one (id INTEGER PRIMARY KEY)"))
                await connection.execute(
                    text(
                        "CREATE TABLE two (id INTEGER REFERENCES one (id) "
                        "DEFERRABLE INITIALLY DEFERRED)"
                    )
                )

            if not database.is_postgres:
                event.listen(database.engine.sync_engine, "connect", _with_foreign_keys)
                await database.engine.dispose()
            for _ in range(3):
                with pytest.raises(IntegrityError):
                    async with database.begin() as unit:
                        await unit.session.execute(text("INSERT INTO two VALUES (7)"))

            assert await paid(database) == []

        self.run(test)

    def test_the_retry_worker_ends_when_a_handler_commits_past_every_guard(self):
        names, calls, fails = [f"m{n}" for n in range(7)], [], [True]

        @consumer("c", policy=STORED, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            if fails[0]:
                raise RetryableMessageError("not yet")
            calls.append(message.id)
            if message.id == "m3":
                raw = await (await session.connection()).get_raw_connection()
                await raw.driver_connection.execute("COMMIT")

        async def test(database):
            for name in names:
                given = Message(name, {}, b"{}", headers={"message-id": name.encode()})
                await handle_message(handle, database, given)
            fails[0] = False
            with pytest.raises(TransactionEnded):
                await asyncio.wait_for(RetryWorker(handle, database, 0.01).run(), 10)
            async with database.begin() as unit:
                left = [await unit.waiting.get("c", name) for name in names]

            assert calls == names[:4], "nobody behind it was called, or taken for handled"
            assert [waiting is not None for waiting in left[4:]] == [True] * 3

        self.run(test)

    def test_a_commit_past_every_guard_leaves_the_neighbours_to_their_next_delivery(self):
        self._ends_with("COMMIT", kept=["m1", "m2"])

    def test_a_rollback_past_every_guard_leaves_the_neighbours_to_their_next_delivery(self):
        self._ends_with("ROLLBACK", kept=[])

    def _ends_with(self, said, kept):
        is_broken = [True]

        async def by_driver(session):
            if is_broken:
                raw = await (await session.connection()).get_raw_connection()
                await raw.driver_connection.execute(said)

        async def test(database):
            handle = ending(by_driver)
            # Handled long before: its claim stays.
            await handle_message(handle, database, MESSAGES[3])
            await fail_once(database, MESSAGES[2])
            with pytest.raises(TransactionEnded, match="message 'm2'"):
                await consume_many(handle, database, MESSAGES)
            assert await paid(database) == [*kept, "m4"]
            async with database.begin() as unit:
                rows = [await unit.claims.look_up("c", message.id) for message in MESSAGES]
            states = [None if row is None else row.state for row in rows]
            done = ClaimState.COMPLETED if kept else None
            assert states == [done, done, ClaimState.FAILED_RETRYABLE, ClaimState.COMPLETED]
            assert (rows[2].attempts, rows[2].error_code) == (1, "TIMEOUT")

            is_broken.clear()
            again = await consume_many(handle, database, MESSAGES)

            assert isinstance(again[2], Handled)
            assert await paid(database) == ["m1", "m2", "m3", "m4"]

        async def fail_once(database, message):
            failure = Failure(ClaimState.FAILED_RETRYABLE, 1, "TIMEOUT", 0.0, message.digest)
            async with database.begin() as unit:
                await unit.claims.mark_failed("c", message.id, failure)

        self.run(test)

    def test_a_commit_in_the_retry_worker_leaves_the_neighbours_in_the_waiting_table(self):
        fails = [True]
        commits = []

        @consumer("c", policy=STORED, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            if fails:
                raise RetryableMessageError("later")
            await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.id})
            if message.id == "m2" and not commits:
                commits.append(message.id)
                raw = await (await session.connection()).get_raw_connection()
                await raw.driver_connection.execute("COMMIT")

        async def test(database):
            for message in MESSAGES:
                await handle_message(handle, database, message)
            fails.clear()
            with pytest.raises(TransactionEnded, match="message 'm2'"):
                async for _ in drain(handle, database, read(), lambda: False):
                    pass
            await retry_due(handle, database)

            assert await paid(database) == ["m1", "m2", "m3", "m4"]

        def read():
            return {message.id: message for message in MESSAGES}

        self.run(test)

    def test_connections_that_are_nobodys_unit_commit_as_ever(self):
        async def test(database):
            async with database.begin() as unit:
                await unit.now()
            async with database.engine.connect() as connection:
                await connection.execute(text("INSERT INTO paid VALUES ('a')"))
                await connection.commit()
                await connection.execute(text("INSERT INTO paid VALUES ('b')"))
                await connection.rollback()

            assert await paid(database) == ["a"]

        self.run(test)


def _with_foreign_keys(driver: Any, record: Any) -> None:
    driver.execute("PRAGMA foreign_keys=ON")


class TestSqlite(Ends, InSqlite):
    @pytest.mark.parametrize("batch", [BatchPolicy.INDEPENDENT, BatchPolicy.FAIL_BATCH])
    def test_a_commit_over_the_drivers_own_connection_is_noticed(self, batch):
        async def by_driver(session):
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.execute("COMMIT")

        async def test(database):
            handle = ending(by_driver).with_settings(replace(ONCE, batch=batch))
            with pytest.raises(TransactionEnded, match="message 'm2'"):
                await consume_many(handle, database, MESSAGES)

        self.run(test)

    def test_a_transaction_that_was_ended_and_begun_again_is_noticed_in_a_batch(self):
        async def by_driver(session):
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.execute("COMMIT")
            await raw.driver_connection.execute("BEGIN")

        async def test(database):
            with pytest.raises(TransactionEnded):
                await consume_many(ending(by_driver), database, MESSAGES)

        self.run(test)


class TestPostgres(Ends, InPostgres):
    @pytest.mark.parametrize("said", ["COMMIT", "ROLLBACK", "COMMIT; BEGIN"])
    @pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
    def test_what_is_said_to_the_drivers_own_connection_is_noticed(self, said, driver):
        async def by_driver(session):
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.execute(said)

        async def test(database):
            url = database.engine.url.set(drivername=f"postgresql+{driver}")
            other = SqlDatabase(url.render_as_string(hide_password=False))
            with pytest.raises(TransactionEnded):
                await consume_many(ending(by_driver), other, MESSAGES)
            with pytest.raises(TransactionEnded):
                await alone(other)
            await other.close()

        async def alone(database):
            async with database.begin() as unit:
                await unit.now()
                await by_driver(unit.session)

        self.run(test)

    @pytest.mark.parametrize("said", ["SELECT 1; COMMIT", "SELECT 1; COMMIT; BEGIN"])
    def test_a_commit_behind_a_semicolon_is_refused_and_the_neighbours_are_kept(self, said):
        async def test(database):
            url = database.engine.url.set(drivername="postgresql+psycopg")
            other = SqlDatabase(url.render_as_string(hide_password=False))
            outcomes = await consume_many(ending(by_statement(said)), other, MESSAGES)
            alone = await handle_message(ending(by_statement(said)), other, MESSAGES[1])
            await other.close()

            refused = [isinstance(outcome, DeadLettered) for outcome in outcomes]
            assert refused == [message.id == "m2" for message in MESSAGES]
            assert isinstance(alone, Refused)

        self.run(test)

    def test_no_handler_behind_it_is_called(self):
        calls = []

        async def by_driver(session):
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.execute("ROLLBACK")

        @consumer("c", policy=ONCE, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            calls.append(message.id)
            if message.id == "m2":
                await by_driver(session)

        async def test(database):
            with pytest.raises(TransactionEnded, match="the handler of message 'm2'"):
                await consume_many(handle, database, MESSAGES)

            async with database.begin() as unit:
                found = [await unit.claims.look_up("c", one.id) for one in MESSAGES]
            assert calls == ["m1", "m2"]
            assert found == [None] * 4

        self.run(test)

    def test_nothing_is_written_beside_an_ended_transaction(self):
        async def by_driver(session):
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.execute("ROLLBACK")
            await session.execute(text("INSERT INTO paid VALUES ('late')"))

        async def test(database):
            with pytest.raises(TransactionEnded, match="message 'm2'"):
                await consume_many(ending(by_driver), database, MESSAGES)

            assert await paid(database) == []

        self.run(test)

    def test_it_is_noticed_too_where_the_handler_fails_afterwards(self):
        async def by_driver(session):
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.execute("COMMIT")
            raise ZeroDivisionError

        async def test(database):
            with pytest.raises(TransactionEnded):
                await consume_many(ending(by_driver), database, MESSAGES)

        self.run(test)

    def test_the_drivers_own_connection_may_copy(self):
        @consumer("c", policy=ONCE, id_from=FromHeader("message-id"))
        async def copies(message: Message, session: Any) -> None:
            raw = await (await session.connection()).get_raw_connection()
            await raw.driver_connection.copy_records_to_table("paid", records=[(message.id,)])
            if message.id == "m3":
                await session.execute(text("INSERT INTO paid VALUES (1 / 0)"))

        async def test(database):
            outcomes = await consume_many(copies, database, MESSAGES)

            assert [type(o) for o in outcomes] == [Handled, Handled, DeadLettered, Handled]
            assert await paid(database) == ["m1", "m2", "m4"]

        self.run(test)


@pytest.mark.parametrize(
    ("statement", "refused"),
    [
        ("COMMIT", "send COMMIT"),
        ("  -- done\n/* really */ commit work", "send COMMIT"),
        ("start   transaction", "send START"),
        ("prepare transaction 'x'", "send PREPARE TRANSACTION"),
        ("rollback and chain", "send ROLLBACK"),
        ("ABORT;", "send ABORT"),
        ("COMMIT; BEGIN", "send COMMIT"),
        ("ROLLBACK TO sa_savepoint_1", "savepoints of other messages"),
        ("SET search_path = elsewhere", "send SET"),
        ("SELECT set_config('a.b', :value, FALSE )", "send SET"),
        ("ROLLBACK TO SAVEPOINT a", ""),
        ("rollback work to a", ""),
        ("RELEASE SAVEPOINT a", ""),
        ("SAVEPOINT a", ""),
        ("SET LOCAL lock_timeout = 0", ""),
        ("SET CONSTRAINTS ALL DEFERRED", ""),
        ("SELECT set_config('a.b', :value, true)", ""),
        ("SELECT set_config, false FROM settings", ""),
        ("SELECT 'x; COMMIT'", ""),
        ("SELECT 1; COMMIT", "send COMMIT"),
        ("SELECT 'it''s'; Rollback; BEGIN", "send ROLLBACK"),
        ("SELECT 1; ROLLBACK TO a", ""),
        ("UPDATE t SET begins = 1", ""),
        ("DO $$ BEGIN PERFORM 1; END $$", ""),
        ("CREATE TRIGGER t AFTER INSERT ON a BEGIN SELECT 1; END", ""),
        ("PREPARE plan AS SELECT 1", ""),
        ("ENDPOINT", ""),
        ("", ""),
    ],
)
def test_statements_that_reach_beyond_the_handlers_message_are_known(statement, refused):
    why = _refusal_of(statement)

    assert (refused in why) if refused else why == ""


@pytest.mark.postgres
def test_a_setting_may_not_outlive_its_transaction(quick_postgres_server):
    @consumer("c", policy=ONCE, id_from=FromHeader("message-id"))
    async def sets(message: Message, session: Any) -> None:
        how = "SET" if message.id == "m2" else "SET LOCAL"
        await session.execute(text(f"{how} search_path = elsewhere"))
        await session.execute(text("SET LOCAL search_path TO DEFAULT"))

    async def test() -> None:
        async with postgres_world(quick_postgres_server) as world:
            outcomes = await consume_many(sets, world.database, MESSAGES)

            assert [type(o) for o in outcomes] == [Handled, DeadLettered, Handled, Handled]
            assert "SET LOCAL" in outcomes[1].failure.reason

    asyncio.run(test())
