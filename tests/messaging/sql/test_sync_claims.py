"""`claim_sync` in transactions of every kind: the same claims, without asyncio."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from semel.errors import Misuse, Retryable
from semel.messaging import NotClaimable, claim_sync, open_engine
from semel.messaging.handle.claims import (
    ClaimRequest,
    ClaimState,
    Conflict,
    Failure,
    HeldElsewhere,
    Locked,
    NotDue,
    Parked,
    Terminal,
)
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.sql.faults import DatabaseUnavailable
from tests.messaging.sql.test_sql_claims import make_tables

psycopg = pytest.importorskip("psycopg")

WAIT_SECONDS = 30.0
PAID = {"consumer": "billing", "message_id": "evt-1"}


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request, tmp_path):
    """A database with semel's tables and one of a user's own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/shop.db"
    else:
        url = request.getfixturevalue("pg")
    if request.param == "sqlite":
        asyncio.run(make_tables(url))
        with closing(sqlite3.connect(file_of(url))) as connection:
            connection.execute("CREATE TABLE payment (id text)")
    return url


@pytest.fixture
def pg(quick_postgres_server):
    url = quick_postgres_server.create_database("sync_claims")
    asyncio.run(make_tables(url))
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE payment (id text)")
    yield url
    quick_postgres_server.drop_database("sync_claims")


def file_of(url):
    return url.removeprefix("sqlite:///")


def connect(url, **options):
    if url.startswith("sqlite"):
        return closing(sqlite3.connect(file_of(url), **options))
    return closing(psycopg.connect(url, **options))


def sessions(url, **options):
    """Return an engine of SQLAlchemy for programs that block."""
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://"), **options)


def payments(url):
    with connect(url) as connection:
        return connection.execute("SELECT count(*) FROM payment").fetchone()[0]


@pytest.fixture(params=["session", "connection", "driver"])
def opened(request, url):
    """Open the caller's transaction, in each of the kinds that a claim accepts."""
    engine = sessions(url)
    kinds = {
        "session": lambda: closing(Session(engine)),
        "connection": lambda: closing(engine.connect()),
        "driver": lambda: connect(url),
    }
    yield kinds[request.param]
    engine.dispose()


def pay(transaction):
    insert = "INSERT INTO payment VALUES ('evt-1')"
    transaction.execute(insert if hasattr(transaction, "cursor") else text(insert))


def test_a_claim_is_committed_with_the_effect_and_found_by_the_next_delivery(opened, url):
    with opened() as transaction:
        assert claim_sync(transaction, **PAID) is True
        pay(transaction)
        transaction.commit()

    with opened() as transaction:
        assert claim_sync(transaction, **PAID) is False
        assert claim_sync(transaction, consumer="mail", message_id="evt-1") is True
    assert payments(url) == 1


def test_a_claim_is_rolled_back_with_the_effect(opened, url):
    with opened() as transaction:
        assert claim_sync(transaction, **PAID) is True
        pay(transaction)
        transaction.rollback()
        assert claim_sync(transaction, **PAID) is True

    assert payments(url) == 0


def test_a_connection_that_ends_between_claim_and_commit_leaves_nothing(opened, url):
    with opened() as transaction:
        assert claim_sync(transaction, **PAID) is True
        pay(transaction)

    with opened() as transaction:
        assert claim_sync(transaction, **PAID) is True
    assert payments(url) == 0


def test_both_halves_find_the_claims_of_each_other(opened, url):
    with opened() as transaction:
        claim_sync(transaction, **PAID)
        transaction.commit()

    assert asyncio.run(claimed_elsewhere(url, "evt-1")) is False
    assert asyncio.run(claimed_elsewhere(url, "x" * 600)) is True
    with opened() as transaction:
        assert claim_sync(transaction, consumer="billing", message_id="x" * 600) is False


async def claimed_elsewhere(url, message_id):
    async def claim(store):
        return await store.claim(consumer_name="billing", event_id=message_id)

    return await in_store(url, claim)


async def in_store(url, act):
    """Commit what *act* does with the claims of the asynchronous half."""
    engine = open_engine(url)
    try:
        async with AsyncSession(engine) as session:
            done = await act(SqlAlchemyProcessedMessageStore(session))
            await session.commit()
            return done
    finally:
        await engine.dispose()


def failed(state, delay_seconds=0.0):
    return lambda store: store.mark_failed(
        "billing", "evt-1", Failure(state, 1, "X", delay_seconds)
    )


@pytest.mark.parametrize(
    ("act", "answer"),
    [
        (failed(ClaimState.FAILED_RETRYABLE, 600), NotDue),
        (failed(ClaimState.PARKED), Parked),
        (failed(ClaimState.FAILED_TERMINAL), Terminal),
        (
            lambda store: store.lease("billing", ClaimRequest("evt-1"), owner="other", seconds=600),
            HeldElsewhere,
        ),
    ],
)
def test_what_is_not_ours_is_refused_and_is_no_duplicate(opened, url, act, answer):
    asyncio.run(in_store(url, act))

    with opened() as transaction, pytest.raises(NotClaimable) as refused:
        claim_sync(transaction, **PAID)

    assert isinstance(refused.value, Retryable)
    assert isinstance(refused.value.answer, answer)


def test_a_failed_message_that_is_due_is_claimed_again(opened, url):
    asyncio.run(in_store(url, failed(ClaimState.FAILED_RETRYABLE)))

    with opened() as transaction:
        assert claim_sync(transaction, **PAID) is True
        assert claim_sync(transaction, **PAID) is False


def test_another_payload_under_the_same_id_is_a_conflict(opened):
    with opened() as transaction:
        assert claim_sync(transaction, **PAID, payload=b"5 EUR") is True
        assert claim_sync(transaction, **PAID, payload=b"5 EUR") is False
        with pytest.raises(NotClaimable) as refused:
            claim_sync(transaction, **PAID, payload=b"500 EUR")

    assert isinstance(refused.value.answer, Conflict)


@pytest.mark.parametrize("end", ["commit", "rollback"])
@pytest.mark.postgres
def test_a_second_claim_waits_for_the_end_of_the_first(pg, end):
    answers = []

    def second():
        with connect(pg, application_name="second") as connection:
            answers.append(claim_sync(connection, **PAID))

    with connect(pg) as first:
        assert claim_sync(first, **PAID) is True
        thread = threading.Thread(target=second)
        thread.start()
        wait_for_a_lock(pg)
        assert answers == []
        getattr(first, end)()
        thread.join(WAIT_SECONDS)

    assert answers == [end == "rollback"]


def wait_for_a_lock(url):
    """Return when the second claim waits for the first one."""
    asked = (
        "SELECT pg_sleep(0.01), count(*) FROM pg_stat_activity "
        "WHERE application_name = 'second' AND wait_event_type = 'Lock'"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(round(WAIT_SECONDS / 0.01)):
            if connection.execute(asked).fetchone()[1]:
                return
    pytest.fail("the second claim did not wait")


def test_a_claim_that_is_held_for_longer_than_the_lock_timeout_is_no_duplicate(opened, url):
    other = {"timeout": 0.05} if url.startswith("sqlite") else {"options": "-c lock_timeout=50ms"}

    with opened() as first, connect(url, **other) as second:
        assert claim_sync(first, **PAID) is True
        with pytest.raises(Locked):
            claim_sync(second, **PAID)
        first.commit()
        second.rollback()

        assert claim_sync(second, **PAID) is False


@pytest.mark.postgres
def test_a_session_that_begins_with_a_claim_is_read_committed(pg):
    engine = sessions(pg, isolation_level="SERIALIZABLE")

    with Session(engine) as session:
        claim_sync(session, **PAID)
        level = session.scalar(text("SELECT current_setting('transaction_isolation')"))
        session.rollback()
        later = session.scalar(text("SELECT current_setting('transaction_isolation')"))
    engine.dispose()

    assert (level, later) == ("read committed", "serializable")


def test_a_session_in_autocommit_is_refused(url):
    engine = sessions(url, isolation_level="AUTOCOMMIT")

    with Session(engine) as session:
        session.execute(text("SELECT 1"))
        with pytest.raises(Misuse, match="AUTOCOMMIT"):
            claim_sync(session, **PAID)
    with engine.connect() as connection, pytest.raises(Misuse, match="AUTOCOMMIT"):
        claim_sync(connection, **PAID)
    engine.dispose()


def test_a_connection_in_autocommit_needs_an_open_transaction(url):
    options = {"isolation_level": None} if url.startswith("sqlite") else {"autocommit": True}

    with connect(url, **options) as connection:
        with pytest.raises(Misuse, match="AUTOCOMMIT"):
            claim_sync(connection, **PAID)
        connection.execute("BEGIN")
        assert claim_sync(connection, **PAID) is True
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")
        assert claim_sync(connection, **PAID) is True


def test_a_savepoint_that_sqlite_would_commit_is_refused(tmp_path):
    engine = sessions(f"sqlite:///{tmp_path}/shop.db")

    with Session(engine) as session:
        session.begin_nested()
        with pytest.raises(Misuse, match="savepoint"):
            claim_sync(session, **PAID)
    engine.dispose()


@pytest.mark.postgres
def test_a_claim_in_a_savepoint_is_rolled_back_with_it(pg):
    engine = sessions(pg)

    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            assert claim_sync(session, **PAID) is True
            savepoint.rollback()
        assert claim_sync(session, **PAID) is True
    engine.dispose()


@pytest.mark.postgres
def test_a_lost_connection_is_retryable_and_no_duplicate(pg):
    with connect(pg) as connection:
        claim_sync(connection, **PAID)
        with psycopg.connect(pg, autocommit=True) as other:
            mine = connection.info.backend_pid
            other.execute("SELECT pg_terminate_backend(%s, 10000)", [mine])
        with pytest.raises(DatabaseUnavailable):
            claim_sync(connection, **PAID)
        with pytest.raises(DatabaseUnavailable):
            claim_sync(connection, **PAID)


@pytest.mark.postgres
def test_a_claim_on_psycopg2_is_committed_refused_and_told_from_an_outage(pg):
    psycopg2 = pytest.importorskip("psycopg2")

    with closing(psycopg2.connect(pg)) as first, closing(psycopg2.connect(pg)) as second:
        assert claim_sync(first, **PAID) is True
        with second.cursor() as cursor:
            cursor.execute("SET lock_timeout = '50ms'")
        with pytest.raises(Locked):
            claim_sync(second, **PAID)
        second.rollback()
        first.commit()
        assert claim_sync(second, **PAID) is False
        second.rollback()
        second.autocommit = True
        with pytest.raises(Misuse, match="AUTOCOMMIT"):
            claim_sync(second, **PAID)
        with psycopg.connect(pg, autocommit=True) as other:
            other.execute("SELECT pg_terminate_backend(%s, 10000)", [first.info.backend_pid])
        with pytest.raises(DatabaseUnavailable):
            claim_sync(first, **PAID)


@pytest.fixture
def django_connection(pg):
    """Django's connection to the database, in settings that end with the test."""
    django = pytest.importorskip("django")
    conf = pytest.importorskip("django.conf")
    before = conf.settings._wrapped
    conf.settings._wrapped = conf.UserSettingsHolder(conf.global_settings)
    django.setup()
    from django.db import connections
    from django.db.backends.postgresql.base import DatabaseWrapper

    given = psycopg.conninfo.conninfo_to_dict(pg)
    keys = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host"}
    place = {name: given.get(key, "") for name, key in keys.items()}
    place["PORT"] = given.get("port", "")
    made = connections.configure_settings({"default": {}, "sync_claims": place})
    connections["sync_claims"] = connection = DatabaseWrapper(made["sync_claims"], "sync_claims")
    yield connection
    connection.close()
    del connections["sync_claims"]
    conf.settings._wrapped = before


@pytest.mark.postgres
def test_a_claim_in_an_atomic_block_of_django_ends_with_the_block(pg, django_connection):
    from django.db import transaction

    with transaction.atomic(using="sync_claims"):
        assert claim_sync(django_connection, **PAID) is True
        django_connection.cursor().execute("INSERT INTO payment VALUES ('evt-1')")
        transaction.set_rollback(True, using="sync_claims")
    assert payments(pg) == 0

    for is_new in (True, False):
        with transaction.atomic(using="sync_claims"):
            assert claim_sync(django_connection, **PAID) is is_new
            if is_new:
                django_connection.cursor().execute("INSERT INTO payment VALUES ('evt-1')")
    assert payments(pg) == 1

    with pytest.raises(Misuse, match=r"transaction\.atomic"):
        claim_sync(django_connection, **PAID)


@pytest.mark.postgres
def test_rows_may_be_dictionaries(pg):
    with connect(pg, row_factory=psycopg.rows.dict_row) as connection:
        assert claim_sync(connection, **PAID) is True
        assert claim_sync(connection, **PAID) is False


def test_what_is_no_connection_is_refused_with_what_would_do():
    with pytest.raises(Misuse, match="SqlAlchemyProcessedMessageStore"):
        claim_sync(AsyncSession(), **PAID)
    with pytest.raises(Misuse, match=r"builtins.object"):
        claim_sync(object(), **PAID)


def test_a_session_of_an_asynchronous_engine_is_refused():
    async def claim():
        engine = open_engine("sqlite://")
        try:
            async with AsyncSession(engine) as session:
                await session.run_sync(lambda inside: claim_sync(inside, **PAID))
        finally:
            await engine.dispose()

    with pytest.raises(Misuse, match="aiosqlite"):
        asyncio.run(claim())


def test_a_claim_on_a_users_own_connection_does_not_wait_for_ever(pg):
    with connect(pg) as first, connect(pg) as second:
        assert claim_sync(first, consumer="c", message_id="m")
        assert first.execute("SHOW lock_timeout").fetchone() == ("0",)
        with pytest.raises(Locked):
            claim_sync(second, consumer="c", message_id="m")


def test_a_new_message_costs_one_statement_on_a_users_own_connection(pg):
    sent = []

    class Counted(psycopg.Cursor):
        def execute(self, statement, *rest, **options):
            sent.append(statement.split()[0])
            return super().execute(statement, *rest, **options)

    with connect(pg, cursor_factory=Counted) as connection:
        assert claim_sync(connection, consumer="c", message_id="first")
        sent.clear()
        assert claim_sync(connection, consumer="c", message_id="m")

    assert sent == ["INSERT"]
