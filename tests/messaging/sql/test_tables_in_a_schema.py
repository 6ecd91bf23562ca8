"""On PostgreSQL semel's tables have a schema of their own, and every statement names it."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path

import psycopg
import psycopg.rows
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session
from typer.testing import CliRunner

from semel import Message, Outbox, SqlAlchemyProcessedMessageStore, SqlDatabase
from semel.cli.app import app
from semel.errors import Misuse
from semel.messaging import claim_sync, open_engine
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.claims import Claimed, ClaimRequest, Duplicate
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled
from semel.messaging.tables import SCHEMA, Tables, found, split_schema
from semel.sql.faults import TablesMissing
from semel.sql.notify import OutboxSignal
from semel.sql.schema import SchemaUnusable, check, create
from semel.sql.tables import metadata

TABLES = set(metadata.tables)
PAGE = Path(__file__).parents[3] / "docs" / "howto" / "claims.md"
MOVE = re.search(r"^(CREATE SCHEMA semel;.*?\$\$;)$", PAGE.read_text(), re.M | re.S)[1]


@pytest.fixture
def url(quick_postgres_server):
    yield quick_postgres_server.create_database("table_schemas")
    quick_postgres_server.drop_database("table_schemas")


def asked(url, *statements):
    """Return the rows of the last statement."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            answer = connection.execute(statement)
        return answer.fetchall() if answer.description else []


def tables_in(url, schema):
    return {
        name
        for (name,) in asked(url, f"SELECT tablename FROM pg_tables WHERE schemaname = '{schema}'")
    }


@asynccontextmanager
async def opened(url, **named):
    database = SqlDatabase(url, **named)
    try:
        yield database
    finally:
        await database.close()


async def made(url, **named):
    async with opened(url, **named) as database:
        await database.create_tables()


async def claim(url, message_id="m", **named):
    async with opened(url, **named) as database, database.begin() as unit:
        return await unit.claims.try_claim("billing", ClaimRequest(message_id))


def make_without_schema(url):
    """Make the tables as a version without schemas did: where the search path says."""

    async def whole():
        async with opened(url) as database:
            async with database.engine.begin() as connection:
                await connection.run_sync(metadata.create_all)
            await create(database.engine)

    asyncio.run(whole())


@pytest.mark.postgres
def test_a_new_database_gets_the_tables_in_the_schema_semel_and_none_beside_those_of_the_user(url):
    asked(url, "CREATE TABLE approval (id int)", "CREATE TABLE processed_message (id int)")

    asyncio.run(made(url))

    assert tables_in(url, "semel") == TABLES
    assert tables_in(url, "public") == {"approval", "processed_message"}
    assert isinstance(asyncio.run(claim(url)), Claimed)
    assert isinstance(asyncio.run(claim(url)), Duplicate)
    assert asked(url, "SELECT message_id FROM semel.processed_message") == [("m",)]


@pytest.mark.postgres
def test_two_services_may_have_a_schema_each_by_name_or_by_url(url):
    asyncio.run(made(url, schema="billing"))
    asyncio.run(made(f"{url}?schema=Fraud%20Check"))

    assert isinstance(asyncio.run(claim(url, schema="billing")), Claimed)
    assert isinstance(asyncio.run(claim(f"{url}?schema=Fraud%20Check")), Claimed)
    assert isinstance(asyncio.run(claim(f"{url}?schema=billing")), Duplicate)
    assert tables_in(url, "billing") == tables_in(url, "Fraud Check") == TABLES
    assert tables_in(url, "semel") == set()
    with pytest.raises(SchemaUnusable, match="semel db create"):
        asyncio.run(claim(url))


@pytest.mark.postgres
def test_tables_that_were_made_without_a_schema_are_used_where_they_are(url):
    make_without_schema(url)

    assert isinstance(asyncio.run(claim(url)), Claimed)
    asyncio.run(made(url))

    assert tables_in(url, "public") == TABLES
    assert tables_in(url, "semel") == set()
    assert asked(url, "SELECT message_id FROM processed_message") == [("m",)]
    with psycopg.connect(url) as connection:
        assert not claim_sync(connection, consumer="billing", message_id="m")


@pytest.mark.postgres
def test_tables_in_two_places_are_refused_until_one_is_named(url):
    make_without_schema(url)
    asyncio.run(claim(url))
    asyncio.run(made(url, schema=SCHEMA))

    for act in (claim(url), made(url)):
        with pytest.raises(Misuse, match=r"schemas public and semel.*\?schema=public"):
            asyncio.run(act)
    with psycopg.connect(url) as connection, pytest.raises(Misuse, match="schemas public"):
        claim_sync(connection, consumer="billing", message_id="m")

    assert isinstance(asyncio.run(claim(url, schema="public")), Duplicate)
    assert isinstance(asyncio.run(claim(url, schema=SCHEMA)), Claimed)


@pytest.mark.postgres
def test_tables_move_into_the_schema_with_their_rows(url):
    make_without_schema(url)
    asyncio.run(claim(url))

    asked(url, *MOVE.split(";", 1))

    async def differences():
        async with opened(url) as database:
            return await check(database.engine)

    assert asyncio.run(differences()) == []
    assert isinstance(asyncio.run(claim(url)), Duplicate)


@pytest.mark.postgres
def test_a_handler_that_changes_its_search_path_does_not_move_claims_and_outgoing_messages(url):
    asyncio.run(made(url))
    # A table of the same names, where such a handler's path would find it first.
    asked(
        url,
        "CREATE SCHEMA trap",
        "CREATE TABLE trap.processed_message (LIKE semel.processed_message)",
        "CREATE TABLE trap.outbox_message (LIKE semel.outbox_message)",
    )

    outbox = Outbox()

    @consumer("billing")
    async def billing(message, session):
        await session.execute(text("SET LOCAL search_path = trap"))
        await outbox.add(session, "invoices", message.payload)

    async def whole():
        messages = [Message(f"m{n}", n) for n in range(3)]
        async with opened(url) as database:
            return await consume_many(billing, database, messages)

    outcomes = asyncio.run(whole())

    assert [type(one) for one in outcomes] == [Handled] * 3
    assert len(asked(url, "SELECT message_id FROM semel.processed_message")) == 3
    assert len(asked(url, "SELECT message_id FROM semel.outbox_message")) == 3
    assert asked(url, "SELECT message_id FROM trap.processed_message") == []
    assert asked(url, "SELECT message_id FROM trap.outbox_message") == []


@pytest.mark.postgres
@pytest.mark.parametrize("schema", [None, "billing"])
def test_sessions_and_connections_of_the_users_own_find_the_tables(url, schema):
    asyncio.run(made(url, schema=schema))

    async def own_session():
        engine = open_engine(url)
        async with AsyncSession(engine) as session:
            store = SqlAlchemyProcessedMessageStore(session, schema=schema)
            won = await store.claim(consumer_name="billing", event_id="a")
            await Outbox(schema=schema).add(session, "invoices", {"id": 7})
            await session.commit()
        await engine.dispose()
        return won

    def blocking():
        for number, rows in enumerate((psycopg.rows.tuple_row, psycopg.rows.dict_row)):
            with psycopg.connect(url, row_factory=rows) as connection:
                yield claim_sync(
                    connection, consumer="billing", message_id=f"b{number}", schema=schema
                )
        engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
        with Session(engine) as session, session.begin():
            yield claim_sync(session, consumer="billing", message_id="c", schema=schema)
        engine.dispose()

    assert asyncio.run(own_session())
    assert list(blocking()) == [True] * 3
    place = schema or SCHEMA
    ids = asked(url, f"SELECT message_id FROM {place}.processed_message ORDER BY 1")
    assert [id for (id,) in ids] == ["a", "b0", "b1", "c"]
    assert asked(url, f"SELECT topic FROM {place}.outbox_message") == [("invoices",)]


TENANTS = ("tenant_a", "tenant_b")


def ids_of_tenants(url):
    return {
        tenant: [
            [id for (id,) in asked(url, f"SELECT {column} FROM {tenant}.{table} ORDER BY 1")]
            for table, column in (("processed_message", "message_id"), ("outbox_message", "topic"))
        ]
        for tenant in TENANTS
    }


async def _claim_and_send(session, tenant):
    store = SqlAlchemyProcessedMessageStore(session)
    assert await store.claim(consumer_name="billing", event_id="m")
    await Outbox().add(session, tenant, {"id": 7})
    await session.commit()


@pytest.mark.postgres
@pytest.mark.parametrize("way", ["engine", "session", "search path"])
def test_each_tenant_of_a_service_has_its_own_claims_and_outbox_on_the_same_connections(url, way):
    for tenant in TENANTS:
        asyncio.run(made(url, schema=tenant))
    engine = open_engine(url, pool_size=1, max_overflow=0)

    async def claim_for(tenant):
        of_tenant = {"schema_translate_map": {None: tenant}}
        bind = engine.execution_options(**of_tenant) if way == "engine" else engine
        async with AsyncSession(bind) as session:
            if way == "session":
                await session.connection(execution_options=of_tenant)
            if way == "search path":
                await session.execute(text(f"SET search_path = {tenant}"))
            await _claim_and_send(session, tenant)

    async def whole():
        for tenant in TENANTS:
            await claim_for(tenant)
        await engine.dispose()

    asyncio.run(whole())

    assert ids_of_tenants(url) == {tenant: [["m"], [tenant]] for tenant in TENANTS}


@pytest.mark.postgres
@pytest.mark.parametrize("way", ["engine", "search path", "driver"])
def test_each_tenant_has_its_own_claims_without_asyncio_too(url, way):
    for tenant in TENANTS:
        asyncio.run(made(url, schema=tenant))
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"), pool_size=1)

    def on_engine(tenant):
        of_tenant = {"schema_translate_map": {None: tenant}} if way == "engine" else {}
        with Session(engine.execution_options(**of_tenant)) as session, session.begin():
            if way == "search path":
                session.execute(text(f"SET search_path = {tenant}"))
            return claim_sync(session, consumer="billing", message_id="m")

    def on_driver(tenant, connection):
        connection.execute(f"SET search_path = {tenant}")
        won = claim_sync(connection, consumer="billing", message_id="m")
        connection.commit()
        return won

    if way == "driver":
        with psycopg.connect(url) as connection:
            won = [on_driver(tenant, connection) for tenant in TENANTS]
    else:
        won = [on_engine(tenant) for tenant in TENANTS]
    engine.dispose()

    assert won == [True, True]
    assert ids_of_tenants(url) == {tenant: [["m"], []] for tenant in TENANTS}


@pytest.mark.postgres
def test_without_tables_every_way_to_claim_says_how_to_get_them(url):
    async def own_session():
        engine = open_engine(url)
        try:
            async with AsyncSession(engine) as session:
                store = SqlAlchemyProcessedMessageStore(session)
                await store.claim(consumer_name="billing", event_id="a")
        finally:
            await engine.dispose()

    with pytest.raises(TablesMissing, match=r"schema semel has no tables.*semel db create"):
        asyncio.run(own_session())
    with psycopg.connect(url) as connection, pytest.raises(TablesMissing, match="semel db create"):
        claim_sync(connection, consumer="billing", message_id="m")


@pytest.mark.postgres
def test_a_dry_run_shows_changes_of_a_users_table_that_has_a_name_of_semels(url):
    asyncio.run(made(url))
    asked(url, "CREATE TABLE approval (id int)")

    async def whole():
        async with opened(url) as database, database.begin() as unit:
            async with unit.watching() as changes:
                await unit.claims.try_claim("billing", ClaimRequest("m"))
                await unit.session.execute(text("INSERT INTO approval VALUES (1)"))
            return [(change.table, change.rows) for change in changes]

    assert asyncio.run(whole()) == [("approval", 1)]


@pytest.mark.postgres
def test_a_relay_is_notified_of_messages_in_a_schema(url):
    asyncio.run(made(url, schema="billing"))

    async def whole():
        async with opened(url, schema="billing") as database:
            signal = OutboxSignal(database)
            await signal.install()
            await signal.install()
            installed = await _triggers(database)
            await signal.remove()
            return installed, await _triggers(database)

    async def _triggers(database):
        count = "SELECT count(*) FROM pg_trigger WHERE tgname = 'semel_outbox_signal'"
        async with database.begin() as unit:
            return (await unit.session.execute(text(count))).scalar_one()

    assert asyncio.run(whole()) == (1, 0)


@pytest.mark.postgres
def test_commands_take_the_schema_in_the_url(url):
    def typed(*words):
        done = CliRunner().invoke(app, [*words, "--json", "--database", f"{url}?schema=billing"])
        return done.exit_code, json.loads(done.stdout)

    assert typed("db", "create")[1]["schema"] == "billing"
    assert typed("db", "check")[0] == 0
    assert typed("dlq", "list")[0] == 0
    assert tables_in(url, "billing") == TABLES
    assert typed("db", "create")[1]["changed"] is False


def test_sqlite_has_no_schemas_and_says_so(tmp_path):
    path = f"sqlite:///{tmp_path}/shop.db"

    for act in (made(path, schema="billing"), made(f"{path}?schema=billing")):
        with pytest.raises(Misuse, match="sqlite has no schemas: leave out schema='billing'"):
            asyncio.run(act)
    assert not isinstance(asyncio.run(made(path)), Exception)


@pytest.mark.parametrize(
    ("url", "answer"),
    [
        ("postgresql://db/shop", ("postgresql://db/shop", None)),
        ("postgresql://db/shop?schema=a", ("postgresql://db/shop", "a")),
        (
            "postgresql://db/shop?sslmode=require&schema=a%20b",
            ("postgresql://db/shop?sslmode=require", "a b"),
        ),
        (
            "postgresql://db/shop?schema=a&sslmode=require",
            ("postgresql://db/shop?sslmode=require", "a"),
        ),
        ("postgresql://db/shop?sslmode=require", ("postgresql://db/shop?sslmode=require", None)),
    ],
)
def test_a_url_is_split_into_that_of_the_driver_and_the_schema(url, answer):
    assert split_schema(url) == answer


@pytest.mark.parametrize("name", ["", "x" * 64, "é" * 32])
def test_a_name_that_postgresql_would_cut_is_refused(name):
    with pytest.raises(Misuse, match="1 to 63 bytes"):
        SqlDatabase("postgresql://db/shop", schema=name)
    with pytest.raises(Misuse, match="1 to 63 bytes"):
        split_schema(f"postgresql://db/shop?schema={name}")


def test_where_the_tables_are_follows_from_the_rows_alone():
    assert found([]) == Tables("semel", are_there=False)
    assert found([("semel", False), ("other", False)]) == Tables("semel")
    assert found([("shop", True), ("other", False)]) == Tables("shop", by_search_path=True)
    assert found([("semel", True)], "shop") == Tables("shop", are_there=False)
    assert found([("semel", False), ("shop", True)], "semel") == Tables("semel")
