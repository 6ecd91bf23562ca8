"""The tables: made, checked, and left alone where they are somebody else's."""

from __future__ import annotations

import asyncio

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from semel.errors import Retryable
from semel.messaging.handle.claims import Claimed, ClaimRequest
from semel.messaging.tables import Tables
from semel.operate.stores import SchemaChange
from semel.sql import schema
from semel.sql.database import SqlDatabase
from semel.sql.engine import open_engine
from semel.sql.schema import VERSION, SchemaUnusable
from semel.sql.tables import metadata

HAND_MADE = "CREATE TABLE processed_message (id text PRIMARY KEY)"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def run(request, tmp_path):
    """Run a function of an engine on an empty database."""
    if request.param == "sqlite":
        yield on(f"sqlite:///{tmp_path}/schema.db")
    else:
        server = request.getfixturevalue("quick_postgres_server")
        run = on(server.create_database("schema_tests"))
        # So that the statements of these tests need not name the schema.
        run(do("ALTER DATABASE schema_tests SET search_path = semel, public"))
        yield run
        server.drop_database("schema_tests")


def on(url):
    def run(act):
        async def whole():
            engine = open_engine(url)
            try:
                return await act(engine)
            finally:
                await engine.dispose()

        return asyncio.run(whole())

    return run


def do(*statements):
    async def act(engine):
        async with engine.begin() as connection:
            for statement in statements:
                await connection.execute(text(statement))

    return act


async def tables_of(engine):
    async with engine.connect() as connection:
        # Those of every schema in the search path.
        return await connection.run_sync(lambda sync: set(inspect(sync).get_table_names()))


async def make_all(engine):
    async with engine.begin() as connection:
        await connection.run_sync(metadata.create_all)


def test_tables_are_made_once_and_nothing_is_wrong_with_them(run):
    first = run(schema.create)
    second = run(schema.create)

    assert first == SchemaChange(None, VERSION)
    assert (second, second.changed) == (SchemaChange(VERSION, VERSION), False)
    assert run(schema.check) == []
    assert run(schema.upgrade) == second
    assert run(schema.require_version) in (None, Tables("semel"))


def test_processes_that_make_the_tables_at_once_make_them_once(run):
    async def at_once(engine):
        return await asyncio.gather(*[schema.create(engine) for _ in range(4)])

    changes = run(at_once)

    assert sorted(change.changed for change in changes) == [False, False, False, True]
    assert run(schema.check) == []


def test_alembic_finds_nothing_to_do(run):
    run(schema.create)

    def compare(connection):
        # Alembic cannot read identities and empty defaults back from SQLite.
        deep = connection.dialect.name == "postgresql"
        options = {"compare_type": True, "compare_server_default": deep}
        context = MigrationContext.configure(connection, opts=options)
        return compare_metadata(context, metadata)

    async def differences(engine):
        async with engine.connect() as connection:
            return await connection.run_sync(compare)

    assert run(differences) == []


@pytest.mark.postgres
def test_every_table_and_column_says_what_it_is(quick_postgres_server):
    run = on(quick_postgres_server.create_database("schema_comments"))
    run(schema.create)

    def look(connection):
        inspector = inspect(connection)
        tables = inspector.get_multi_table_comment().items()
        columns = inspector.get_multi_columns().items()
        return [name for (_, name), comment in tables if not comment["text"]] + [
            f"{name}.{each['name']}"
            for (_, name), found in columns
            for each in found
            if not each["comment"]
        ]

    async def silent(engine):
        async with engine.connect() as connection:
            return await connection.run_sync(look)

    assert run(silent) == []
    quick_postgres_server.drop_database("schema_comments")


async def make_stranger(engine):
    """Make a table of semel's name, where semel makes its own."""
    if engine.dialect.name == "postgresql":
        await do("CREATE SCHEMA semel", "SET LOCAL search_path = semel", HAND_MADE)(engine)
    else:
        await do(HAND_MADE)(engine)


def test_a_table_of_somebody_elses_is_left_alone(run):
    run(make_stranger)
    run(do("INSERT INTO processed_message VALUES ('m')"))

    with pytest.raises(SchemaUnusable, match=r"processed_message that semel did not make.*rename"):
        run(schema.create)

    assert run(tables_of) <= {"processed_message"}
    (problem,) = run(schema.check)
    assert "rename it" in problem.way_out


def test_a_database_without_tables_is_told_how_to_get_them(run):
    (problem,) = run(schema.check)

    assert str(problem) == "there are no tables of semel; make them: semel db create"
    with pytest.raises(SchemaUnusable, match="semel db create"):
        run(schema.require_version)
    with pytest.raises(SchemaUnusable, match="semel db create"):
        run(claim)


def test_an_upgrade_makes_tables_where_there_are_none_and_refuses_those_of_others(run):
    run(make_stranger)
    with pytest.raises(SchemaUnusable, match="processed_message that semel did not make"):
        run(schema.upgrade)
    run(do("DROP TABLE processed_message"))

    assert run(schema.upgrade) == SchemaChange(None, VERSION)
    assert run(schema.check) == []


def test_a_database_that_got_its_tables_meanwhile_is_used(run):
    async def late(engine):
        database = SqlDatabase(engine)
        with pytest.raises(SchemaUnusable):
            async with database.begin():
                raise AssertionError("began without tables")
        await schema.create(engine)
        async with database.begin() as unit:
            return await unit.claims.try_claim("billing", ClaimRequest("m"))

    assert isinstance(run(late), Claimed)


def test_tables_that_another_tool_made_get_their_version(run):
    run(make_all)

    (problem,) = run(schema.check)
    adopted = run(schema.upgrade)

    assert "have no version" in problem.what
    assert adopted == SchemaChange(0, VERSION)
    assert run(schema.check) == []


def test_tables_that_another_tool_made_differently_do_not(run):
    run(make_all)
    run(do("DROP INDEX ix_processed_message_age"))

    with pytest.raises(SchemaUnusable, match="index ix_processed_message_age"):
        run(schema.create)

    assert "is missing" in run(schema.check)[0].what


BROKEN = {
    "DROP TABLE dead_letter": ["table dead_letter", "index ix_dead_letter_age"],
    "ALTER TABLE audit_entry DROP COLUMN details": ["column details of table audit_entry"],
    "DROP INDEX uq_outbox_message_id": ["index uq_outbox_message_id"],
}


@pytest.mark.parametrize("harm", BROKEN)
def test_whatever_is_missing_is_named_with_a_statement_that_makes_it(run, harm):
    run(schema.create)
    run(do(harm))

    problems = run(schema.check)
    ways_out = [problem.way_out.removeprefix(ANEW) for problem in problems]

    named = [f"{name} is missing" for name in BROKEN[harm]]
    assert all(any(p.what.startswith(n.split(" is")[0]) for p in problems) for n in named)
    assert all(problem.what.endswith("is missing") for problem in problems)
    run(do(*ways_out))
    assert run(schema.check) == []


ANEW = "restore it from a backup, or make it anew, empty: "


def test_an_index_of_our_name_that_is_another_one_is_named(run):
    run(schema.create)
    run(
        do(
            "DROP INDEX uq_outbox_message_id",
            "CREATE INDEX uq_outbox_message_id ON outbox_message (message_id)",
        )
    )

    (problem,) = run(schema.check)

    assert problem.what == "index uq_outbox_message_id of table outbox_message differs from semel's"


def test_a_column_of_another_type_and_a_key_of_other_columns_are_named(run):
    run(schema.create)
    run(
        do(
            "DROP TABLE aggregate_version",
            "CREATE TABLE aggregate_version (consumer text NOT NULL, "
            "key text NOT NULL PRIMARY KEY, version text, "
            "region text NOT NULL)",
        )
    )

    problems = [problem.what for problem in run(schema.check)]

    assert problems == [
        "column version of table aggregate_version has the type TEXT, not BIGINT",
        "column region of table aggregate_version is not semel's, and every insert fails without "
        "a value for it",
        "the primary key of table aggregate_version is (key), not (consumer, key)",
    ]


def test_a_column_that_the_owner_added_harms_nobody(run):
    run(schema.create)
    run(do("ALTER TABLE processed_message ADD COLUMN tenant text"))

    assert run(schema.check) == []


async def claim(engine):
    async with SqlDatabase(engine).begin() as unit:
        return await unit.claims.try_claim("billing", ClaimRequest("m"))


def test_an_older_semel_refuses_tables_of_a_newer_one_and_leaves_them_alone(run):
    run(schema.create)
    run(do("UPDATE semel_messaging SET version = 2", "DROP TABLE dead_letter"))
    before = run(tables_of)

    for act in (schema.create, schema.upgrade, schema.require_version, claim):
        with pytest.raises(SchemaUnusable, match=r"version 2.*knows versions up to 1.*upgrade"):
            run(act)
    (problem,) = run(schema.check)
    assert problem.way_out == "upgrade semel"
    assert run(tables_of) == before


def test_a_database_that_does_not_answer_may_answer_later():
    async def ask():
        await schema.check(open_engine("postgresql://ann:secret@127.0.0.1:1/shop"))

    with pytest.raises(Retryable) as raised:
        asyncio.run(ask())
    assert "secret" not in str(raised.value)


@pytest.mark.postgres
def test_an_error_names_the_database(quick_postgres_server):
    run = on(quick_postgres_server.create_database("schema_secret"))

    with pytest.raises(SchemaUnusable) as raised:
        run(schema.require_version)
    assert "schema_secret" in str(raised.value)
    quick_postgres_server.drop_database("schema_secret")
