"""Claims in sessions of every kind: what is sent, at which isolation, and what an outage means."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager, contextmanager

import pytest
from sqlalchemy import event, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from semel.errors import Misuse, Retryable
from semel.messaging.handle.claims import Claimed, ClaimRequest, Duplicate, Locked
from semel.sql import claims as sql
from semel.sql.claims import MOST_TURNS, SqlAlchemyProcessedMessageStore
from semel.sql.database import SqlDatabase
from semel.sql.engine import made_ready, open_engine
from semel.sql.faults import DatabaseConflict, DatabaseUnavailable
from semel.sql.schema import create
from semel.sql.tables import metadata

LEVEL = text("SELECT current_setting('transaction_isolation')")
M = ClaimRequest("m")


def with_engine(test):
    """Run an asynchronous test with an engine of a user's own, at SERIALIZABLE."""

    def run(claims_url):
        async def whole():
            url = claims_url.replace("postgresql://", "postgresql+asyncpg://")
            engine = create_async_engine(url, isolation_level="SERIALIZABLE", pool_size=1)
            try:
                await test(engine)
            finally:
                await engine.dispose()

        asyncio.run(whole())

    run.__name__ = test.__name__
    return pytest.mark.postgres(run)


@pytest.fixture
def claims_url(quick_postgres_server):
    """A database with semel's tables, for one test."""
    url = quick_postgres_server.create_database("sql_claims")
    asyncio.run(make_tables(url))
    yield url
    quick_postgres_server.drop_database("sql_claims")


async def make_tables(url):
    engine = open_engine(url)
    await create(engine)
    await engine.dispose()


async def claimed(session, message_id="m"):
    store = SqlAlchemyProcessedMessageStore(session)
    return await store.claim(consumer_name="billing", event_id=message_id)


@with_engine
async def test_a_transaction_that_begins_with_a_claim_is_read_committed(engine):
    async with AsyncSession(engine) as session:
        assert await claimed(session)
        autobegun = (await session.execute(LEVEL)).scalar_one()
    async with AsyncSession(engine) as session, session.begin():
        assert await claimed(session)
        begun = (await session.execute(LEVEL)).scalar_one()

    assert (autobegun, begun) == ("read committed", "read committed")


@with_engine
async def test_the_isolation_of_a_claim_does_not_leak_into_the_next_transaction(engine):
    async with AsyncSession(engine) as session:
        await claimed(session)
        await session.commit()
        next_of_session = (await session.execute(LEVEL)).scalar_one()
    async with AsyncSession(engine) as session:
        next_of_pool = (await session.execute(LEVEL)).scalar_one()

    assert (next_of_session, next_of_pool) == ("serializable", "serializable")


@with_engine
async def test_a_transaction_that_has_begun_keeps_its_isolation(engine):
    async with AsyncSession(engine) as session:
        await session.execute(select(1))
        assert await claimed(session)
        level = (await session.execute(LEVEL)).scalar_one()

    assert level == "serializable"


@with_engine
async def test_a_session_on_a_connection_of_the_callers_keeps_its_isolation(engine):
    async with engine.connect() as connection, AsyncSession(connection) as session:
        assert await claimed(session)
        level = (await session.execute(LEVEL)).scalar_one()

    assert level == "serializable"


@pytest.mark.postgres
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_claim_that_could_not_be_taken_back_is_refused(claims_url, driver):
    async def test():
        url = claims_url.replace("postgresql://", f"postgresql+{driver}://")
        engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
        async with AsyncSession(engine) as session:
            await session.execute(select(1))
            with pytest.raises(Misuse, match="AUTOCOMMIT"):
                await claimed(session)
        async with engine.connect() as connection, AsyncSession(connection) as session:
            with pytest.raises(Misuse, match="AUTOCOMMIT"):
                await claimed(session)
        async with AsyncSession(engine) as session:
            assert await claimed(session)
            await session.rollback()
            assert await claimed(session)
        await engine.dispose()

    asyncio.run(test())


@with_engine
async def test_a_claim_in_a_savepoint_is_taken_back_with_it(engine):
    async with AsyncSession(engine) as session:
        savepoint = await session.begin_nested()
        assert await claimed(session)
        await savepoint.rollback()
        again = await claimed(session)
        await session.commit()

    assert again


@with_engine
async def test_a_claim_never_ends_the_callers_transaction(engine):
    async with AsyncSession(engine) as session:
        assert await claimed(session)
        assert session.in_transaction()
        await session.rollback()
        assert await claimed(session), "the rollback took the claim away"
        await session.commit()
        assert not await claimed(session)


@with_engine
async def test_a_serialization_failure_is_no_duplicate(engine):
    other = create_async_engine(engine.url)
    async with AsyncSession(engine) as late, AsyncSession(other) as early:
        await late.execute(text("SELECT * FROM semel.processed_message"))
        await claimed(early)
        await early.commit()

        with pytest.raises(DatabaseConflict):
            await claimed(late)
    await other.dispose()


@with_engine
async def test_an_outage_is_no_duplicate(engine):
    killer = create_async_engine(engine.url)
    async with AsyncSession(engine) as session:
        await claimed(session)
        pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
        async with killer.connect() as connection:
            await connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

        with pytest.raises(DatabaseUnavailable):
            await claimed(session)
        await session.rollback()
        assert await claimed(session), "nothing was committed"
    await killer.dispose()


def test_a_database_that_is_not_there_is_no_duplicate():
    async def ask():
        engine = create_async_engine("postgresql+asyncpg://nobody@127.0.0.1:1/nothing")
        async with AsyncSession(engine) as session:
            await claimed(session)

    with pytest.raises(Retryable):
        asyncio.run(ask())


@with_engine
async def test_a_deadlock_is_no_duplicate(engine):
    engine = create_async_engine(engine.url)
    async with AsyncSession(engine) as first, AsyncSession(engine) as second:
        await claimed(first, "a")
        await claimed(second, "b")

        answers = await asyncio.gather(
            claimed(first, "b"), claimed(second, "a"), return_exceptions=True
        )

    assert sorted(type(answer).__name__ for answer in answers) in (
        ["DatabaseConflict", "bool"],
        ["DatabaseConflict", "DatabaseConflict"],
    )
    assert False not in answers
    await engine.dispose()


@with_engine
async def test_psycopg_works_as_asyncpg_does(engine):
    url = engine.url.set(drivername="postgresql+psycopg")
    database = SqlDatabase(create_async_engine(url), lock_seconds=0.2)
    requests = [ClaimRequest(id) for id in ("a", "m", "x" * 1000)]
    async with database.begin() as unit:
        first = await unit.claims.try_claim_many("billing", requests)
        with pytest.raises(Locked):
            async with database.begin() as other:
                await other.claims.try_claim("billing", M)
    async with database.begin() as unit:
        second = await unit.claims.try_claim_many("billing", requests)
        leased = await unit.claims.lease("billing", ClaimRequest("n"), owner="o", seconds=1)

    assert first == [Claimed()] * 3
    assert second == [Duplicate()] * 3
    assert isinstance(leased, Claimed)
    await database.engine.dispose()


@contextmanager
def counting(engine):
    """Count the statements that are sent, by their first word."""
    sent = Counter()

    def count(connection, cursor, statement, *rest):
        sent[statement.split()[0]] += 1

    event.listen(engine.sync_engine, "before_cursor_execute", count)
    yield sent
    event.remove(engine.sync_engine, "before_cursor_execute", count)


@asynccontextmanager
async def database_of(url):
    database = SqlDatabase(url)
    try:
        yield database
    finally:
        await database.close()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request, tmp_path):
    if request.param == "postgres":
        return request.getfixturevalue("claims_url")
    asyncio.run(make_tables(f"sqlite:///{tmp_path}/claims.db"))
    return f"sqlite:///{tmp_path}/claims.db"


def test_a_new_message_costs_one_statement_and_a_repetition_two(url):
    async def ask():
        async with database_of(url) as database, database.begin() as unit:
            with counting(database.engine) as fresh:
                await unit.claims.try_claim("billing", M)
            with counting(database.engine) as repeated:
                await unit.claims.try_claim("billing", M)
        return fresh, repeated

    fresh, repeated = asyncio.run(ask())

    assert fresh == {"INSERT": 1}
    assert repeated == {"INSERT": 1, "SELECT": 1}


def test_a_new_batch_costs_one_statement_and_one_with_repetitions_two(url):
    async def ask():
        async with database_of(url) as database, database.begin() as unit:
            new = [ClaimRequest(f"{number}") for number in range(300)]
            with counting(database.engine) as fresh:
                await unit.claims.try_claim_many("billing", new[:200])
            with counting(database.engine) as mixed:
                await unit.claims.try_claim_many("billing", new)
        return fresh, mixed

    fresh, mixed = asyncio.run(ask())

    assert fresh == {"INSERT": 1}
    assert mixed == {"INSERT": 1, "SELECT": 1}


class Disturbed(SqlAlchemyProcessedMessageStore):
    """Meets another transaction between taking and asking why."""

    disturbances = 1

    async def _row(self, statement, me, values):
        row = await super()._row(statement, me, values)
        if statement is sql.WHY and self.disturbances:
            self.disturbances -= 1
            return None
        return row


def test_a_claim_that_vanished_before_it_was_read_is_asked_for_again(url):
    async def ask(disturbances):
        async with database_of(url) as database, database.begin() as unit:
            await unit.claims.try_claim("billing", M)
            store = Disturbed(unit.session)
            store.disturbances = disturbances
            return await store.try_claim("billing", M)

    assert asyncio.run(ask(1)) == Duplicate()
    with pytest.raises(DatabaseConflict, match="the message comes back"):
        asyncio.run(ask(MOST_TURNS))


@pytest.mark.postgres
def test_retention_reads_no_more_of_the_index_than_it_deletes(claims_url):
    values = {"by": "'billing'", "over": "'COMPLETED'", "age_us": "1000000"}
    values |= {"at_most": "100", "since": "0"}
    statement = str(sql.DELETE_OLD.compile(dialect=postgresql.dialect())) % values

    async def plan():
        async with database_of(claims_url) as database, database.begin() as unit:
            connection = await unit.session.connection()
            await connection.exec_driver_sql("SET LOCAL enable_seqscan = off")
            await connection.exec_driver_sql("SET LOCAL enable_sort = off")
            await connection.exec_driver_sql("SET LOCAL search_path = semel")
            rows = await connection.exec_driver_sql(f"EXPLAIN {statement}")
            return "\n".join(rows.scalars())

    found = asyncio.run(plan())

    assert "Index Scan using ix_processed_message_age" in found
    assert "updated_at <= (InitPlan" in found


def test_sqlite_of_the_callers_own_is_made_ready(tmp_path):
    async def ask():
        engine = made_ready(create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/own.db"))
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        async with AsyncSession(engine) as session:
            async with session.begin_nested():
                await claimed(session)
            await session.rollback()
            again = await claimed(session)
        await engine.dispose()
        return again

    assert asyncio.run(ask()), "a released savepoint goes with its transaction"


@with_engine
async def test_a_claim_in_a_users_own_session_does_not_wait_for_ever(engine):
    shown = text("SELECT current_setting('lock_timeout')")
    other = create_async_engine(engine.url, connect_args={"timeout": 5})
    async with AsyncSession(other) as first, AsyncSession(engine) as second:
        assert await SqlAlchemyProcessedMessageStore(first).try_claim("c", M) == Claimed()
        assert (await first.execute(shown)).scalar_one() == "0", "only the claim is limited"
        async with asyncio.timeout(10):
            with pytest.raises(Locked):
                await SqlAlchemyProcessedMessageStore(second).try_claim("c", M)
        await second.rollback()
        await second.execute(text("SET LOCAL lock_timeout = '150ms'"))
        async with asyncio.timeout(1.5):
            with pytest.raises(Locked):
                await SqlAlchemyProcessedMessageStore(second).try_claim("c", M)
    await other.dispose()


@with_engine
async def test_a_new_message_costs_one_statement_in_a_users_own_session_too(engine):
    async with AsyncSession(engine) as session:
        await claimed(session, "first")
        with counting(engine) as fresh:
            assert await claimed(session)
        limit = (await session.execute(text("SHOW lock_timeout"))).scalar_one()
        with counting(engine) as repeated:
            assert not await claimed(session)
        limits = [limit, (await session.execute(text("SHOW lock_timeout"))).scalar_one()]
        await session.execute(text("SET LOCAL lock_timeout = '2s'"))
        with counting(engine) as limited:
            assert await claimed(session, "n")
        limits.append((await session.execute(text("SHOW lock_timeout"))).scalar_one())
        await session.commit()
    async with AsyncSession(engine) as session:
        with counting(engine) as later:
            assert await claimed(session, "later")

    assert fresh == limited == later == {"INSERT": 1}
    assert repeated == {"INSERT": 1, "SELECT": 2}
    assert limits == ["0", "0", "2s"], "the caller's own statements wait as the caller says"
