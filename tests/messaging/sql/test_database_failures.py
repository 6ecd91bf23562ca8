"""What a database says while a handler works: who is to blame, and whether it is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, TextClause, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from semel.codec import FromHeader
from semel.message import Coordinates, Message
from semel.messaging.failure import FailureClass
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import DeadLettered, Handled, RetryLater
from semel.messaging.settings import ConsumerSettings
from semel.sql.database import SqlDatabase
from semel.sql.faults import SQL_CLASSIFICATION
from tests.messaging.worlds import postgres_world, sqlite_world

own = MetaData()
account = Table("account", own, Column("id", Integer, primary_key=True), Column("balance", Integer))


@asynccontextmanager
async def with_accounts(world: Any) -> Any:
    async with world() as opened:
        database = opened.database
        async with database.engine.begin() as connection:
            await connection.run_sync(own.drop_all)
            await connection.run_sync(own.create_all)
            await connection.execute(
                insert(account), [{"id": 1, "balance": 0}, {"id": 2, "balance": 0}]
            )
        yield database


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def accounts(request, tmp_path) -> Iterator[Any]:
    if request.param == "sqlite":
        return partial(with_accounts, partial(sqlite_world, tmp_path))
    return request.getfixturevalue("postgres_accounts")


@pytest.fixture
def postgres_accounts(quick_postgres_server) -> Any:
    return partial(with_accounts, partial(postgres_world, quick_postgres_server))


def raising(state: str) -> TextClause:
    """Let PostgreSQL raise an error."""
    return text(f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END $$")


def paid(number: int = 1) -> Message:
    return Message(f"m{number}", {}, b"{}", source=Coordinates("t", 0, number))


def paying(work: Any, **settings: Any) -> Consumer:
    chosen = ConsumerSettings(**{"held_retry_seconds": 0.01, **settings})
    return consumer("pay", policy=chosen, id_from=FromHeader("message-id"))(work)


def test_a_unique_violation_is_poison_by_its_code_and_the_transaction_is_gone(accounts):
    async def scenario() -> None:
        async with accounts() as database:

            async def work(message: Message, session: Any) -> None:
                await session.execute(update(account).values(balance=99))
                await session.execute(insert(account).values(id=1, balance=0))

            outcome = await handle_message(paying(work), database, paid())

            assert isinstance(outcome, DeadLettered)
            assert outcome.failure.code == "CONSTRAINT_VIOLATED"
            async with database.begin() as unit:
                balances = await unit.session.execute(select(account.c.balance))
            assert set(balances.scalars()) == {0}

    asyncio.run(scenario())


def test_a_violation_that_a_handler_catches_in_a_savepoint_is_its_own_affair(accounts):
    async def scenario() -> None:
        async with accounts() as database:

            async def work(message: Message, session: Any) -> None:
                try:
                    async with session.begin_nested():
                        await session.execute(insert(account).values(id=1, balance=0))
                except IntegrityError:
                    await session.execute(update(account).values(balance=7))

            assert isinstance(await handle_message(paying(work), database, paid()), Handled)

    asyncio.run(scenario())


@pytest.mark.postgres
def test_a_lock_timeout_is_transient_and_tried_again(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as database:

            async def work(message: Message, session: Any) -> None:
                await session.execute(update(account).where(account.c.id == 1).values(balance=1))

            async with database.engine.begin() as blocker:
                await blocker.execute(update(account).where(account.c.id == 1).values(balance=2))
                outcome = await handle_message(paying(work), database, paid())

            assert isinstance(outcome, RetryLater)
            assert outcome.failure is not None
            assert outcome.failure.code == "DATABASE_TIMEOUT"
            assert outcome.attempts == 1

    asyncio.run(scenario())


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("state", "code", "kind"),
    [
        ("40001", "DATABASE_CONFLICT", FailureClass.TRANSIENT),
        ("40P01", "DATABASE_CONFLICT", FailureClass.TRANSIENT),
        ("55P03", "DATABASE_TIMEOUT", FailureClass.TRANSIENT),
        ("57014", "DATABASE_TIMEOUT", FailureClass.TRANSIENT),
        ("23505", "CONSTRAINT_VIOLATED", FailureClass.POISON),
        ("23514", "CONSTRAINT_VIOLATED", FailureClass.POISON),
        ("42501", "AUTHORIZATION_FAILED", FailureClass.AUTHORIZATION),
        *(
            (state, "CONNECTION_LOST", FailureClass.DEPENDENCY_OUTAGE)
            for state in ("25006", "53100", "53300", "57P04", "58030")
        ),
        ("57P01", "CONNECTION_LOST", FailureClass.DEPENDENCY_OUTAGE),
        ("08006", "CONNECTION_LOST", FailureClass.DEPENDENCY_OUTAGE),
        ("22012", "HANDLER_FAILED", FailureClass.POISON),
    ],
)
def test_a_postgres_error_is_classified_by_its_state(postgres_accounts, state, code, kind):
    async def scenario() -> None:
        async with postgres_accounts() as database:
            with pytest.raises(DBAPIError) as raised:
                async with database.engine.begin() as connection:
                    await connection.execute(raising(state))

            found = SQL_CLASSIFICATION.classify(raised.value)

            assert (found.code, found.failure_class) == (code, kind)

    asyncio.run(scenario())


@pytest.mark.postgres
def test_a_serialization_failure_runs_the_whole_transaction_again(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as database:
            runs: list[int] = []

            async def work(message: Message, session: Any) -> None:
                runs.append(message.attempt)
                await session.execute(update(account).values(balance=account.c.balance + 1))
                if len(runs) < 3:
                    await session.execute(raising("40001"))

            outcome = await handle_message(paying(work), database, paid())

            assert isinstance(outcome, Handled)
            assert runs == [1, 1, 1]
            async with database.begin() as unit:
                balances = await unit.session.execute(select(account.c.balance))
            assert set(balances.scalars()) == {1}

    asyncio.run(scenario())


@pytest.mark.postgres
def test_a_conflict_that_does_not_end_counts_as_an_attempt(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as database:
            runs: list[int] = []

            async def work(message: Message, session: Any) -> None:
                runs.append(message.attempt)
                await session.execute(raising("40P01"))

            outcome = await handle_message(paying(work, conflict_tries=3), database, paid())

            assert isinstance(outcome, RetryLater)
            assert outcome.attempts == 1
            assert len(runs) == 3

    asyncio.run(scenario())


@pytest.mark.postgres
def test_two_handlers_that_deadlock_are_both_handled(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as opened:
            # Without a lock timeout, so that it is the deadlock that PostgreSQL finds.
            url = opened.engine.url.render_as_string(hide_password=False)
            database = SqlDatabase(url, lock_seconds=30)
            both = asyncio.Barrier(2)
            runs: list[str] = []

            async def work(message: Message, session: Any) -> None:
                runs.append(message.id)
                rows = (1, 2) if message.id == "m1" else (2, 1)
                for number, row in enumerate(rows):
                    more = {"balance": account.c.balance + 1}
                    await session.execute(update(account).where(account.c.id == row).values(more))
                    if number == 0 and len(runs) <= 2:
                        await both.wait()

            paying_both = paying(work)
            async with asyncio.timeout(30):
                outcomes = await asyncio.gather(
                    handle_message(paying_both, database, paid(1)),
                    handle_message(paying_both, database, paid(2)),
                )

            assert [type(outcome) for outcome in outcomes] == [Handled, Handled]
            assert len(runs) == 3
            async with database.begin() as unit:
                balances = await unit.session.execute(select(account.c.balance))
            assert set(balances.scalars()) == {2}
            await database.close()

    asyncio.run(scenario())


@pytest.mark.postgres
def test_a_connection_that_is_killed_under_a_handler_is_transient(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as database:

            async def work(message: Message, session: Any) -> None:
                pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
                if message.attempt == 1:
                    async with database.engine.begin() as other:
                        await other.execute(text(f"SELECT pg_terminate_backend({pid})"))
                await session.execute(update(account).values(balance=5))

            outcome = await handle_message(paying(work), database, paid())

            assert isinstance(outcome, RetryLater)
            assert outcome.failure is not None
            assert outcome.failure.code == "CONNECTION_LOST"
            async with database.begin() as unit:
                balances = await unit.session.execute(select(account.c.balance))
                assert set(balances.scalars()) == {0}

    asyncio.run(scenario())
