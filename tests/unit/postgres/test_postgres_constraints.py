"""What the PostgreSQL sink finds out before the decision, and what it does with known keys."""

from __future__ import annotations

import traceback

import psycopg
import pyarrow as pa
import pytest

from semel.errors import Permanent
from semel.pipeline.sink import SinkRetryable, StageAnew
from semel.postgres.sink import PostgresSink
from tests.unit.postgres.postgres_place import (
    committed,
    left_behind,
    refused,
    row,
    rows_of,
    stage,
    txn,
)

pytestmark = pytest.mark.postgres


def test_a_key_that_is_there_already_is_named_before_the_decision(url, database):
    database.execute("INSERT INTO entries VALUES (7, 1, 'old')")
    sink = PostgresSink(url, "entries")

    reason = refused(sink, [row(6)], [row(7)])

    assert 'column "id"; rows (id) = (7)' in reason
    assert rows_of(database) == [(7, 1, "old")]
    assert left_behind(database) == []


def test_a_row_that_breaks_a_check_is_named_by_its_key(url, database):
    database.execute("ALTER TABLE entries ADD CHECK (amount > 0)")
    database.execute("ALTER TABLE entries ALTER note SET NOT NULL")
    sink = PostgresSink(url, "entries", key=["id"])

    assert "rows (id) = (8)" in refused(sink, [row(7)], [row(8, "-1.00")])
    assert "rows (id) = (9)" in refused(sink, [row(9, note=None)])


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_a_deferred_foreign_key_is_checked_before_the_decision(url, database, mode):
    database.execute("CREATE TABLE lines (id bigint PRIMARY KEY)")
    database.execute("INSERT INTO lines VALUES (1)")
    database.execute(
        "ALTER TABLE entries ADD FOREIGN KEY (id) REFERENCES lines DEFERRABLE INITIALLY DEFERRED"
    )
    sink = PostgresSink(url, "entries", mode=mode)
    committed(sink, [row(1)])

    if mode == "staging":
        assert 'column "id"; rows (id) = (2)' in refused(sink, [row(2)])
    else:
        with pytest.raises(StageAnew, match='violates foreign key constraint "entries_id_fkey"'):
            stage(sink, txn(), [row(2)])

    assert [number for number, _, _ in rows_of(database)] == [1]
    assert left_behind(database) == []


def test_a_trigger_that_drops_rows_is_named_before_the_decision(url, database):
    database.execute(
        "CREATE FUNCTION drop_row() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN IF NEW.id = 2 THEN RETURN NULL; END IF; RETURN NEW; END';"
        "CREATE TRIGGER dropping BEFORE INSERT ON entries FOR EACH ROW EXECUTE FUNCTION drop_row()"
    )

    reason = refused(PostgresSink(url, "entries"), [row(1), row(2)])

    assert 'table "public"."entries" took 1 of 2 rows; a trigger' in reason
    assert rows_of(database) == []


def test_a_row_that_somebody_else_holds_is_waited_for_and_then_tried_again(url, database):
    sink = PostgresSink(url, "entries", lock_seconds=0.2)
    of = txn()
    with psycopg.connect(url) as other:
        other.execute("INSERT INTO entries VALUES (1, 1, 'theirs')")

        outcome = sink.prepare(of, stage(sink, of, [row(1)]))

        assert isinstance(outcome, SinkRetryable)
        assert "lock timeout" in outcome.reason
        other.rollback()
    committed(sink, [row(1)])
    assert len(rows_of(database)) == 1


def test_an_upsert_replaces_rows_and_adds_rows(url, database):
    sink = PostgresSink(url, "entries", key="id")
    committed(sink, [row(1, "1.00"), row(2, "2.00")])

    committed(sink, [row(2, "5.00")], [row(3, "3.00")])

    assert [(n, str(a)) for n, a, _ in rows_of(database)] == [
        (1, "1.00"),
        (2, "5.00"),
        (3, "3.00"),
    ]


def test_a_key_that_comes_twice_in_an_upsert_is_refused_by_name(url, database):
    sink = PostgresSink(url, "entries", key=["id"])

    reason = refused(sink, [row(1), row(2, "1.00")], [row(2, "2.00")])

    assert "(id) = (2) 2 times" in reason
    assert "version_column" in reason
    assert rows_of(database) == []


def test_with_a_version_the_highest_wins_within_a_batch_and_against_the_table(url, database):
    sink = PostgresSink(url, "entries", key=["id"], version_column="amount")
    committed(sink, [row(1, "5.00", "first"), row(2, "5.00", "first")])
    database.execute("INSERT INTO entries VALUES (3, NULL, 'no version yet')")

    committed(
        sink,
        [row(1, "4.00", "late"), row(2, "7.00", "seven"), row(2, "6.00", "six")],
        [row(2, "7.00", "equal"), row(1, "4.00", "late"), row(3, "1.00", "first")],
    )

    assert [(n, note) for n, _, note in rows_of(database)] == [
        (1, "first"),
        (2, "seven"),
        (3, "first"),
    ]


def test_ignored_rows_leave_what_is_there(url, database):
    sink = PostgresSink(url, "entries", write="ignore")
    committed(sink, [row(1, note="first")])

    committed(sink, [row(1, note="second"), row(2)], [row(2)])

    assert [(n, note) for n, _, note in rows_of(database)] == [(1, "first"), (2, "x")]


CANARY = "canary-in-a-row"


@pytest.mark.parametrize(
    ("alter", "values", "names"),
    [
        ("ADD UNIQUE (note)", [(1, CANARY), (2, CANARY)], 'column "note"; rows (id) = (1); (id) ='),
        ("ADD CHECK (note <> 'canary-in-a-row')", [(3, CANARY)], "rows (id) = (3)"),
        (
            "ADD FOREIGN KEY (note) REFERENCES people",
            [(4, "ann"), (5, CANARY)],
            'column "note"; rows (id) = (5)',
        ),
        ("ALTER note TYPE varchar(9)", [(6, CANARY)], '"note" (character varying(9)): a text has'),
        (
            "ALTER note TYPE inet USING note::inet",
            [(7, "::1"), (8, CANARY)],
            'column "note"; rows (id) = (8)',
        ),
        ("ALTER note SET NOT NULL", [(9, CANARY), (10, None)], 'column "note"'),
    ],
)
def test_a_refusal_names_column_and_key_and_no_other_value(url, database, alter, values, names):
    database.execute("CREATE TABLE people (name text PRIMARY KEY)")
    database.execute("INSERT INTO people VALUES ('ann')")
    database.execute(f"ALTER TABLE entries {alter}")

    of, sink = txn(), PostgresSink(url, "entries")
    try:
        outcome = sink.prepare(of, stage(sink, of, [row(i, note=note) for i, note in values]))
        told = outcome.reason
    except Permanent as error:
        told = "".join(traceback.format_exception(error))

    assert names in told
    assert CANARY not in told


@pytest.mark.parametrize(
    ("kind", "column", "why"),
    [
        (pa.int64(), "small smallint", "out of range"),
        (pa.string(), "small text", "NUL"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named_by_column_and_key(url, database, kind, column, why):
    database.execute(f"CREATE TABLE numbers (id bigint PRIMARY KEY, {column})")
    values = [1, 2, 654_321, 3] if kind == pa.int64() else ["a", "b", f"{CANARY}\0", "c"]
    rows = [{"id": 10 + i, "small": value} for i, value in enumerate(values)]
    schema = pa.schema([("id", pa.int64()), ("small", kind)])

    with pytest.raises(Permanent, match=why) as told:
        stage(PostgresSink(url, "numbers"), txn(), rows, schema=schema)

    words = "".join(traceback.format_exception(told.value))
    assert 'column "small"' in words
    assert "row (id) = (12)" in words
    assert CANARY not in words
    assert "654321" not in words
