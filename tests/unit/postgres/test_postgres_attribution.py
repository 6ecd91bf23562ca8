"""How the rows of a cycle are found again in a PostgreSQL table, and verified."""

from __future__ import annotations

import pyarrow as pa
import pytest

from semel.pipeline.sink import Tally, tally_of
from semel.postgres.sink import PostgresSink
from tests.unit.postgres.postgres_place import SCOPE, committed, row, rows_of, stage, txn

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_the_cycle_column_attributes_rows_and_verifies_them(url, database, mode):
    database.execute("ALTER TABLE entries ADD cycle text")
    sink = PostgresSink(url, "entries", mode=mode, cycle_column="cycle")
    of = txn()
    receipts = stage(sink, of, [row(1), row(2, "-3.50", None)], [row(3)])
    outcome = sink.prepare(of, receipts)
    sink.commit(of, outcome.token)
    committed(sink, [row(4)])

    labels = rows_of(database, "SELECT DISTINCT cycle FROM entries WHERE id < 4")

    assert labels == [(f"payments/main/{of.cycle.label}@{SCOPE.slug[:8]}",)]
    assert sink.visible_tally(of.cycle, outcome.token) == tally_of(receipts)
    database.execute("UPDATE entries SET note = 'changed' WHERE id = 1")
    assert sink.visible_tally(of.cycle, outcome.token) != tally_of(receipts)
    database.execute("DELETE FROM entries")
    assert sink.visible_tally(of.cycle, outcome.token) == Tally()
    plain = PostgresSink(url, "entries", name="plain")
    assert plain.visible_tally(*(lambda of, token: (of.cycle, token))(*committed(plain))) is None


@pytest.mark.parametrize(
    ("arrow", "moment"),
    [(pa.date32(), -800_000), (pa.date32(), 3_000_000), (pa.timestamp("s"), 3_000_000 * 86_400)],
    ids=["before year 1", "after year 9999", "a moment after year 9999"],
)
def test_whether_rows_that_python_cannot_read_are_equal_is_unknown(url, database, arrow, moment):
    kind, storage = ("date", pa.int32()) if arrow == pa.date32() else ("timestamp", pa.int64())
    database.execute(f"CREATE TABLE days (day {kind}, cycle text)")
    sink = PostgresSink(url, "days", cycle_column="cycle")
    of = txn()
    writer = sink.stager(of).open("task")
    writer.write(pa.RecordBatch.from_arrays([pa.array([moment], storage).view(arrow)], ["day"]))
    token = sink.prepare(of, [writer.finish()]).token
    sink.commit(of, token)

    assert sink.visible_tally(of.cycle, token) is None

    assert database.execute("SELECT count(*) FROM days").fetchone() == (1,)


@pytest.mark.parametrize("mode", ["staging", "prepared"])
@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        ("varchar(3)", "ab   ", "ab "),
        ("short", "ab   ", "ab "),
        ("varchar(3)[]", ["ab   "], ["ab "]),
        ("char(5)", "ab", "ab   "),
        ("code", "ab", "ab   "),
    ],
)
def test_texts_that_the_server_cuts_or_pads_are_not_taken_for_changed(
    url, database, mode, kind, value, kept
):
    database.execute("CREATE DOMAIN code AS char(5)")
    database.execute("CREATE DOMAIN short AS varchar(3)")
    database.execute(f"CREATE TABLE texts (note {kind}, cycle text)")
    sink = PostgresSink(url, "texts", mode=mode, cycle_column="cycle")
    schema = pa.schema([("note", pa.list_(pa.string()) if kind.endswith("[]") else pa.string())])

    of, token = committed(sink, [{"note": value}], [{"note": None}], schema=schema)

    assert rows_of(database, "SELECT note FROM texts WHERE note IS NOT NULL") == [(kept,)]
    assert sink.visible_tally(of.cycle, token) is None


def test_texts_that_fit_into_their_column_are_verified(url, database):
    database.execute("CREATE TABLE texts (note varchar(3), cycle text)")
    sink = PostgresSink(url, "texts", cycle_column="cycle")
    of = txn()
    schema = pa.schema([("note", pa.string())])
    receipts = stage(sink, of, [{"note": "äöü"}, {"note": "a  "}], [{"note": None}], schema=schema)
    token = sink.prepare(of, receipts).token

    sink.commit(of, token)

    assert sink.visible_tally(of.cycle, token) == tally_of(receipts)
