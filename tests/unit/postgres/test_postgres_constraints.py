"""What the PostgreSQL sink finds out before the decision, and what it does with known keys."""

from __future__ import annotations

import psycopg
import pytest

from semel.errors import Permanent
from semel.pipeline.sink import SinkRetryable
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

    assert "Key (id)=(7) already exists" in reason
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
        assert "Key (id)=(2) is not present" in refused(sink, [row(2)])
    else:
        with pytest.raises(Permanent, match=r"Key \(id\)=\(2\) is not present"):
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
