"""A role with few rights is enough for the PostgreSQL sink; a hostile one does no harm."""

from __future__ import annotations

import time
from contextlib import contextmanager

import psycopg
import pyarrow as pa
import pytest

from semel.errors import LedgerUnusable, Permanent
from semel.lease import Owner, Takeover
from semel.ledger.sqlite import SqliteLedger
from semel.memory.ledger import MemoryLedger
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.driver import Driver
from semel.pipeline.sink import Found, SinkOK
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId, Scope
from semel.postgres.books import _TABLES, lock_key
from semel.postgres.connect import pool
from semel.postgres.database import SinkDatabase
from semel.postgres.ledger import PostgresLedger
from semel.postgres.sink import PostgresSink
from semel.postgres.statements import create_rejects
from tests.unit.postgres.postgres_place import (
    SCOPE,
    as_role,
    committed,
    create_role,
    left_behind,
    prepared,
    row,
    rows_of,
    stage,
    txn,
)

pytestmark = pytest.mark.postgres


@pytest.fixture
def roles(url, database):
    """`payer` may insert into the table and owns its schema; `mallory` may only connect."""
    for role in ("payer", "mallory"):
        create_role(url, role)
    database.execute("CREATE SCHEMA semel AUTHORIZATION payer")
    database.execute("GRANT INSERT ON entries TO payer")
    database.execute("CREATE SCHEMA trap AUTHORIZATION mallory")
    yield
    pool().close_all()
    for role in ("payer", "mallory"):
        # The server needs a moment to see that sessions are closed.
        database.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s",
            [role],
        )
        database.execute(f"DROP OWNED BY {role} CASCADE")
        database.execute(f"DROP ROLE {role}")


@contextmanager
def mallory(url, application):
    """A session that takes every lock of the newest attempts, under a name like ours."""
    with psycopg.connect(
        as_role(url, "mallory"), autocommit=True, application_name=application
    ) as session:
        yield session


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_insert_on_the_table_and_a_schema_of_its_own_are_all_that_a_role_needs(
    url, database, roles, tmp_path, mode
):
    def driver():
        sink = PostgresSink(as_role(url, "payer"), "entries", mode=mode)
        sink.check(None)
        return Driver("payments", SqliteLedger(tmp_path / "ledger"), [sink])

    def ran(owner, number):
        cycle = CycleId(owner.scope, generation, number)
        read = BatchRange.of_offsets({"topic/0": (number, number + 1)})
        rows = [row(2 * number)], [row(2 * number + 1)]
        (sink,) = owner.sinks
        return owner.run_cycle(cycle, lambda: read, lambda of: {sink.name: stage(sink, of, *rows)})

    first = driver()
    first.start()
    generation = first.ledger.open_generation(first.lease, "test").number
    assert isinstance(ran(first, 0), CommitSucceeded)
    second = driver()
    second.settings = type(second.settings)(takeover=Takeover.FORCE)
    second.start()
    assert isinstance(ran(second, 1), CommitSucceeded)

    assert len(rows_of(database)) == 4
    assert left_behind(database) == []
    second.stop()


@pytest.mark.parametrize("grant", ["", "GRANT USAGE, CREATE ON SCHEMA semel TO second"])
def test_a_second_role_is_told_to_keep_records_of_its_own(url, database, roles, grant):
    PostgresSink(as_role(url, "payer"), "entries").fence(SCOPE, 1)
    second = create_role(url, "second")
    database.execute("GRANT INSERT ON entries TO second")
    if grant:
        database.execute(grant)
    sink = PostgresSink(second, "entries")
    apart = "bookkeeping_schema='semel_second'"

    with pytest.raises(Permanent, match=apart):
        Driver("other", MemoryLedger(), [sink]).start()
    with pytest.raises(Permanent, match=apart):
        sink.check(None)
    with pytest.raises(Permanent, match=apart) as refusal:
        PostgresSink(second, "entries").fence(SCOPE, 1)

    statement = 'CREATE SCHEMA "semel_second" AUTHORIZATION "second";'
    assert statement in str(refusal.value)
    database.execute(statement)
    own = PostgresSink(second, "entries", bookkeeping_schema="semel_second")
    own.check(None)
    Driver("other", MemoryLedger(), [own]).start()
    committed(own, [row(1)])
    pool().close_all()
    database.execute("DROP OWNED BY second CASCADE")


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_sessions_that_imitate_ours_block_neither_a_fence_nor_a_commit(url, database, roles, mode):
    first, second = (
        PostgresSink(as_role(url, "payer"), "entries", mode=mode, lock_seconds=20) for _ in "ab"
    )
    first.fence(SCOPE, 1)
    of = txn()
    keys = [
        lock_key("attempt", SCOPE.slug, "postgres", of.label),
        lock_key("cycle", SCOPE.slug, "postgres", of.cycle.label),
        lock_key("books", "semel"),
    ]
    began = time.monotonic()
    with mallory(url, f"semel:{SCOPE.slug}:1") as session:
        for key in keys:
            session.execute("SELECT pg_advisory_lock(%s)", [key])

        token = prepared(first, of, [row(1)])
        pool().close_all()
        second.fence(SCOPE, 2)
        assert second.look_up(of, token).found is Found.HELD
        assert isinstance(second.commit(of, token), SinkOK)
        assert isinstance(second.abort(txn(), None), SinkOK)
        assert session.execute("SELECT 1").fetchone() == (1,)

    assert time.monotonic() - began < 10
    assert len(rows_of(database)) == 1
    assert left_behind(database) == []


def test_a_lock_that_another_process_gives_back_and_takes_again_is_waited_for(
    url, database, monkeypatch
):
    first, second = (PostgresSink(url, "entries", mode="prepared") for _ in "ab")
    first.fence(SCOPE, 1)
    of = txn()
    token = prepared(first, of, [row(1)])
    pool().close_all()
    key, looked, evict = (
        lock_key("attempt", SCOPE.slug, "postgres", of.label),
        [],
        SinkDatabase._evict,
    )

    with psycopg.connect(url, autocommit=True) as committing:
        committing.execute("SELECT pg_advisory_lock(%s)", [key])

        def between(*arguments):
            looked.append(committing.execute("SELECT pg_advisory_unlock(%s)", [key]))
            found = evict(*arguments)
            if len(looked) < 3:
                committing.execute("SELECT pg_advisory_lock(%s)", [key])
            return found

        monkeypatch.setattr(SinkDatabase, "_evict", between)
        assert isinstance(second.commit(of, token), SinkOK)

    assert len(looked) == 3
    assert len(rows_of(database)) == 1


def test_sessions_that_imitate_a_ledgers_keep_nobody_from_making_or_taking_it(url, database, roles):
    ledgers = [PostgresLedger(as_role(url, "payer"), lock_seconds=1) for _ in "ab"]
    with mallory(url, "semel:schema") as session:
        session.execute("SELECT pg_advisory_lock(hashtext('semel_ledger'))")

        scope = Scope(ledgers[0].ledger_id, "payments", "main")
        first = ledgers[0].acquire(scope, Owner.here(), 30)
        session.execute(f"SET application_name = 'semel:{scope.slug}:{first.epoch + 9}'")
        second = ledgers[1].acquire(scope, Owner.here(), 30, Takeover.FORCE)

        assert second.epoch == first.epoch + 1
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            session.execute("SELECT FROM semel.semel_scope FOR UPDATE")


def take_place(url, database, kind):
    """Make what another role will look for, so that it runs a function of `mallory`."""
    database.execute(f'GRANT CREATE ON DATABASE "{database.info.dbname}" TO mallory')
    with psycopg.connect(as_role(url, "mallory"), autocommit=True) as session:
        session.execute("CREATE SCHEMA ours; GRANT USAGE, CREATE ON SCHEMA ours TO PUBLIC")
        session.execute(
            "CREATE FUNCTION ours.trap() RETURNS bigint LANGUAGE plpgsql "
            "AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$"
        )
        for name, columns in _TABLES.items():
            session.execute(f"CREATE TABLE ours.{name} ({columns}, x bigint DEFAULT ours.trap())")
        meta = "only_row integer, version bigint, ledger_id text"
        session.execute(f"CREATE TABLE ours.semel_ledger_meta ({meta})")
        session.execute("INSERT INTO ours.semel_ledger_meta VALUES (1, 1, 'theirs')")
        session.execute(
            "CREATE TABLE ours.semel_scope (app text, query text, epoch bigint DEFAULT ours.trap())"
        )
        if kind == "read":
            for name in ("sink_place", "semel_ledger_meta"):
                session.execute(f"ALTER TABLE ours.{name} ENABLE ROW LEVEL SECURITY")
                session.execute(f"CREATE POLICY p ON ours.{name} USING (ours.trap() = 1)")
        session.execute("GRANT ALL ON ALL TABLES IN SCHEMA ours TO PUBLIC")


@pytest.mark.parametrize("kind", ["read", "written"])
def test_tables_that_another_role_made_in_our_place_are_not_used(url, database, roles, kind):
    take_place(url, database, kind)
    sink = PostgresSink(as_role(url, "payer"), "entries", bookkeeping_schema="ours")
    ledger = PostgresLedger(as_role(url, "payer"), "ours")

    with pytest.raises(Permanent, match="another role keeps semel's records in schema ours"):
        Driver("payments", MemoryLedger(), [sink]).start()
    with pytest.raises(Permanent, match="another role keeps semel's records in schema ours"):
        sink.check(None)
    with pytest.raises(LedgerUnusable, match="belong to another role"):
        ledger.acquire(Scope("theirs", "payments", "main"), Owner.here(), 30)


def test_a_ledger_of_another_role_is_read_with_its_grants_and_written_by_its_members(
    url, database, roles
):
    owner, other = (PostgresLedger(as_role(url, role)) for role in ("payer", "mallory"))
    scope = Scope(owner.ledger_id, "payments", "main")
    database.execute("GRANT USAGE ON SCHEMA semel TO mallory")
    database.execute("GRANT ALL ON ALL TABLES IN SCHEMA semel TO mallory")

    assert other.scopes() == []
    with pytest.raises(LedgerUnusable, match="make this role a member"):
        other.acquire(scope, Owner.here(), 30)

    database.execute("GRANT payer TO mallory")
    other.close()
    assert other.acquire(scope, Owner.here(), 30).epoch == 1


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_functions_of_another_role_are_never_called(url, database, roles, mode):
    database.execute("GRANT USAGE ON SCHEMA trap TO payer")
    for function in (
        "starts_with(text, text)",
        "pg_backend_pid()",
        "pg_try_advisory_xact_lock(bigint)",
        "unnest(text[])",
        "clock_timestamp()",
        "current_database()",
    ):
        database.execute(
            f"CREATE FUNCTION trap.{function} RETURNS bigint LANGUAGE plpgsql "
            f"AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$"
        )
    database.execute("ALTER ROLE payer SET search_path = trap, public, pg_catalog")
    sink = PostgresSink(as_role(url, "payer"), "entries", mode=mode)
    sink.fence(SCOPE, 1)
    of = txn()

    token = prepared(sink, of, [row(1)])
    assert isinstance(sink.commit(of, token), SinkOK)
    assert sink.sweep(SCOPE, lambda found: True) == []

    assert sink.mark(SCOPE) == of
    assert len(rows_of(database)) == 1


TRAPS = (
    ("=", "same", "tid, tid"),
    ("=", "same", "text, text"),
    ("=", "same", "bigint, integer"),
    ("-", "less", "jsonb, text"),
    (">", "more", "bigint, integer"),
)


def test_operators_of_another_role_are_not_called_for_rejected_rows(url, database, roles):
    database.execute("GRANT USAGE ON SCHEMA trap TO payer")
    body = "LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'trapped'; END $$"
    for operator, name, types in TRAPS:
        database.execute(f"CREATE FUNCTION trap.{name}({types}) RETURNS boolean {body}")
        left, right = types.split(", ")
        database.execute(
            f"CREATE OPERATOR trap.{operator} (leftarg = {left}, rightarg = {right}, "
            f"function = trap.{name})"
        )
    for function in ("to_jsonb(anyelement)", "concat_ws(text, bigint)", "clock_timestamp()"):
        database.execute(f"CREATE FUNCTION trap.{function} RETURNS jsonb {body}")
    database.execute("ALTER TABLE entries ADD CHECK (amount > 0)")
    database.execute(create_rejects("public.bad"))
    database.execute("GRANT INSERT ON bad TO payer")
    database.execute("ALTER ROLE payer SET search_path = trap, public, pg_catalog")
    sink = PostgresSink(as_role(url, "payer"), "entries", rejects="bad")
    sink.fence(SCOPE, 1)
    of = txn()

    token = prepared(sink, of, [row(1), row(2, "-1.00"), row(1)])
    assert isinstance(sink.commit(of, token), SinkOK)

    assert rows_of(database, "SELECT id FROM entries") == [(1,)]
    states = rows_of(database, "SELECT sqlstate FROM bad ORDER BY 1")
    assert states == [("23505",), ("23514",)]
    assert rows_of(database, "SELECT diverted FROM semel.sink_proof") == [(2,)]


def test_types_of_another_role_are_not_used(url, database, roles):
    database.execute("GRANT USAGE ON SCHEMA trap TO payer")
    for name in ("inet", "tid", "json", "text", "int8", "_inet"):
        database.execute(
            f"CREATE DOMAIN trap.{name} AS pg_catalog.{name} CONSTRAINT trapped CHECK (false)"
        )
    database.execute(
        "CREATE TABLE hosts (id bigint PRIMARY KEY, host inet, hosts inet[], version bigint)"
    )
    database.execute("GRANT ALL ON hosts TO payer")
    database.execute(create_rejects("public.bad"))
    database.execute("GRANT INSERT ON bad TO payer")
    database.execute("ALTER ROLE payer SET search_path = trap, public, pg_catalog")
    database.execute("ALTER TABLE hosts ADD CHECK (id > 0)")
    names = ("id", "host", "hosts", "version")
    schema = pa.schema([(name, pa.string()) for name in names])
    given = [dict(zip(names, (n, "10.0.0.1", "{10.0.0.1}", "1"), strict=True)) for n in ("1", "-1")]
    payer = as_role(url, "payer")

    committed(PostgresSink(payer, "hosts", rejects="bad"), given, schema=schema)
    newest = [{**given[0], "version": version} for version in ("3", "2", "2")]
    committed(
        PostgresSink(payer, "hosts", key="id", version_column="version"), newest, schema=schema
    )

    assert rows_of(database, "SELECT id, version FROM hosts") == [(1, 3)]
    assert rows_of(database, "SELECT count(*) FROM bad") == [(1,)]


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_triggers_run_with_the_roles_own_search_path(url, database, roles, mode):
    database.execute("CREATE TABLE journal (id bigint)")
    database.execute("GRANT INSERT ON journal TO payer")
    database.execute(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql "
        "AS $$ BEGIN INSERT INTO journal VALUES (NEW.id); RETURN NEW; END $$"
    )
    database.execute(
        "CREATE TRIGGER noted BEFORE INSERT ON entries FOR EACH ROW EXECUTE FUNCTION note()"
    )
    sink, of = PostgresSink(as_role(url, "payer"), "entries", mode=mode), txn()

    token = prepared(sink, of, [row(7)])
    assert isinstance(sink.commit(of, token), SinkOK)

    assert rows_of(database, "SELECT id FROM journal") == [(7,)]
