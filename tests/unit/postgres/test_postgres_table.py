"""What the PostgreSQL sink asks of the table, and what the table's types do to rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from semel import Driver
from semel.errors import NeedsOperator, Permanent
from semel.memory.ledger import MemoryLedger
from semel.pipeline.sink import Found, SinkFatal, SinkOK, Tenant
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from tests.unit.pipeline.test_places import run_one
from tests.unit.postgres.postgres_place import (
    SCHEMA,
    SCOPE,
    committed,
    create_role,
    left_behind,
    row,
    rows_of,
    stage,
    txn,
)

pytestmark = pytest.mark.postgres


def test_asking_makes_nothing(url, database):
    sink = PostgresSink(url, "entries", cycle_column="note")
    of = txn()

    sink.check(None)
    assert sink.recover(SCOPE) == []
    assert sink.mark(SCOPE) is None
    assert sink.tenants() == []
    assert sink.look_up(of, None).found is Found.GONE

    assert rows_of(database, "SELECT FROM pg_namespace WHERE nspname = 'semel'") == []
    committed(sink, [{"id": 1}], schema=pa.schema([("id", pa.int64())]))
    assert sink.mark(SCOPE) is not None


def test_a_table_is_a_place_whatever_the_sink_is_called(url, database):
    sink = PostgresSink(url, "entries", cycle_column="note")
    sink.fence(SCOPE, 1)
    committed(sink, [{"id": 1}], schema=pa.schema([("id", pa.int64())]))
    again = PostgresSink(url, "public.entries", name="again")
    other = PostgresSink(url, "others", name=sink.name)

    assert again.find_place() == sink.find_place() != other.find_place()
    assert 'table "public"."entries" of database' in sink.find_place()
    assert [(t.scope, t.sink) for t in again.tenants()] == [(SCOPE, sink.name)]
    assert other.tenants() == []

    for _ in range(2):
        again.rename(Tenant(SCOPE, sink.name), Tenant(SCOPE, "again"))
    assert [t.sink for t in sink.tenants()] == ["again"]
    assert again.mark(SCOPE) is not None
    assert sink.mark(SCOPE) is None


def test_people_meet_only_in_one_table_and_then_with_both_facts(url, database):
    database.execute("CREATE TABLE anns (id bigint); CREATE TABLE bobs (id bigint)")
    run_one(Driver("payments", MemoryLedger(), [PostgresSink(url, "anns")]))

    run_one(Driver("payments", MemoryLedger(), [PostgresSink(url, "bobs")]))

    ledger = MemoryLedger()
    for app, name in (("payments", "x"), ("other", "postgres")):
        with pytest.raises(NeedsOperator, match="another ledger"):
            Driver(app, ledger, [PostgresSink(url, "anns", name=name)]).start()
    assert rows_of(database, "SELECT count(*) FROM anns") == [(1,)]


def test_a_missing_table_is_told_with_the_statement_that_makes_it(url, database):
    sink = PostgresSink(url, "shop.Orders", key=["id"], cycle_column="cycle")

    with pytest.raises(Permanent) as refusal:
        sink.check(SCHEMA)

    statement = (
        'CREATE TABLE "shop"."Orders" ("id" bigint, "amount" numeric(12,2), "note" text, '
        '"cycle" text, PRIMARY KEY ("id"));'
    )
    assert statement in str(refusal.value)
    database.execute("CREATE SCHEMA shop")
    database.execute(statement)
    sink.check(SCHEMA)


def test_a_missing_table_is_made_if_that_is_asked_for(url, database):
    sink = PostgresSink(url, '"Odd ""name"', create_table="if-missing", key=["id"], write="append")
    sink.check(None)

    sink.check(SCHEMA)
    sink.check(SCHEMA)

    committed(sink, [row(1)])
    assert len(rows_of(database, 'SELECT * FROM "Odd ""name"')) == 1


def test_everything_that_does_not_fit_is_told_at_once_with_the_way_out(url, database):
    database.execute("ALTER TABLE entries ADD must text NOT NULL")
    database.execute("ALTER TABLE entries ADD double bigint GENERATED ALWAYS AS (id * 2) STORED")
    schema = pa.schema(
        {
            "id": pa.string(),
            "amount": pa.decimal128(12, 4),
            "Note": pa.string(),
            "double": pa.int64(),
        }
    )

    with pytest.raises(Permanent) as refusal:
        PostgresSink(url, "entries").check(schema)

    said = str(refusal.value)
    assert 'ALTER COLUMN "amount" TYPE numeric(12,4);' in said
    assert 'ADD COLUMN "Note" text;' in said
    assert 'there is "note": case matters' in said
    assert '"double" is generated' in said
    assert '"must" is not null, has no default' in said


def test_an_upsert_needs_an_index_that_can_settle_it(url, database):
    with pytest.raises(Permanent, match="CREATE UNIQUE INDEX ON"):
        PostgresSink(url, "entries", key=["note"]).check(SCHEMA)


def test_missing_rights_are_told_with_the_grants(url, database):
    guest = create_role(url, "guest")
    try:
        with pytest.raises(Permanent, match='GRANT USAGE, CREATE ON SCHEMA "semel" TO "guest"'):
            PostgresSink(guest, "entries").check(None)
        database.execute("CREATE SCHEMA semel; GRANT USAGE, CREATE ON SCHEMA semel TO guest")
        with pytest.raises(Permanent, match=r'GRANT INSERT ON "public"\."entries" TO "guest"'):
            PostgresSink(guest, "entries").check(None)
        database.execute("GRANT INSERT ON entries TO guest")
        PostgresSink(url, "entries").fence(SCOPE, 0)  # another role has made the books
        pool().close_all()
        database.execute("GRANT ALL ON ALL TABLES IN SCHEMA semel TO guest")
        database.execute("REVOKE CREATE ON SCHEMA semel FROM guest")
        with pytest.raises(Permanent, match='GRANT USAGE, CREATE ON SCHEMA "semel" TO "guest"'):
            PostgresSink(guest, "entries").check(SCHEMA)
        PostgresSink(guest, "entries", mode="prepared").check(SCHEMA)
        database.execute("GRANT CREATE ON SCHEMA semel TO guest")
        sink = PostgresSink(guest, "entries")
        sink.check(SCHEMA)
        sink.fence(SCOPE, 1)
        sink.fence(SCOPE, 2)
        committed(sink, [row(1)])
        assert len(rows_of(database)) == 1
    finally:
        pool().close_all()
        database.execute("DROP OWNED BY guest; DROP ROLE guest")


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_defaults_numbers_and_partitions_work_by_the_columns_names(url, database, mode):
    database.execute(
        'CREATE TABLE "Parts" ("Key" bigint GENERATED ALWAYS AS IDENTITY, note text, '
        "day date DEFAULT '2024-01-01', twice text GENERATED ALWAYS AS (note || note) STORED) "
        "PARTITION BY RANGE (day)"
    )
    database.execute(
        "CREATE TABLE p1 PARTITION OF \"Parts\" FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')"
    )
    sink = PostgresSink(url, "public.Parts", mode=mode)

    committed(sink, [{"note": "a"}], schema=pa.schema([("note", pa.string())]))
    committed(
        sink,
        [{"note": "b", "Key": 77}],
        schema=pa.schema([("note", pa.string()), ("Key", pa.int64())]),
    )

    assert rows_of(database, 'SELECT "Key", note, day::text, twice FROM "Parts" ORDER BY 1') == [
        (1, "a", "2024-01-01", "aa"),
        (77, "b", "2024-01-01", "bb"),
    ]


def test_text_is_cast_to_types_that_have_no_arrow_kin_in_staging_mode_only(url, database):
    database.execute("CREATE TABLE hosts (address inet, size int4range)")
    schema = pa.schema([("address", pa.string()), ("size", pa.string())])
    rows = [{"address": "10.0.0.1", "size": "[1,5)"}]

    committed(PostgresSink(url, "hosts"), rows, schema=schema)

    assert rows_of(database, "SELECT address::text, size::text FROM hosts") == [
        ("10.0.0.1/32", "[1,5)")
    ]
    with pytest.raises(Permanent, match="staging mode only"):
        PostgresSink(url, "hosts", mode="prepared").check(schema)
    sink, of = PostgresSink(url, "hosts"), txn()
    bad = stage(sink, of, [{"address": "nowhere", "size": None}], schema=schema)
    outcome = sink.prepare(of, bad)
    assert isinstance(outcome, SinkFatal)
    assert "invalid input syntax for type inet" in outcome.reason
    assert 'column "address"' in outcome.reason


@pytest.mark.parametrize(
    ("kind", "too_long", "fits"),
    [
        ("varchar(3)[]", "{abcdef}", "{abc}"),
        ("char(2)[]", "{abcdef}", "{ab}"),
        ("bit(3)", "10101", "101"),
        ("varbit(3)", "10101", "10"),
        ("flags", "10101", "101"),
    ],
)
def test_text_that_a_cast_would_cut_off_is_refused_before_the_decision(
    url, database, kind, too_long, fits
):
    database.execute("CREATE DOMAIN flags AS bit(3)")
    database.execute(f"CREATE TABLE odd (value {kind})")
    schema = pa.schema([("value", pa.string())])
    sink, of = PostgresSink(url, "odd"), txn()

    outcome = sink.prepare(of, stage(sink, of, [{"value": too_long}], schema=schema))

    assert isinstance(outcome, SinkFatal), outcome
    assert isinstance(sink.abort(of, None), SinkOK)
    committed(sink, [{"value": fits}], schema=schema)
    assert rows_of(database, "SELECT value::text FROM odd") == [(fits,)]


def test_a_nul_character_is_refused_by_the_name_of_its_column(url, database):
    with pytest.raises(Permanent, match=r'column "note" \(text\).*NUL'):
        stage(PostgresSink(url, "entries"), txn(), [row(1, note="a\0b")])

    assert left_behind(database) == []
