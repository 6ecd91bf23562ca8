"""Rows that can never be written are diverted to a reject table, inside the same decision."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from semel.errors import Misuse, Permanent
from semel.events import Events, RowsRejected
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.operate.status import status_of
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.driver import Driver
from semel.pipeline.sink import SinkFatal, SinkOK
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.postgres.statements import create_rejects
from tests.unit.postgres.postgres_place import (
    committed,
    create_role,
    left_behind,
    prepared,
    refused,
    row,
    rows_of,
    stage,
    txn,
)

pytestmark = pytest.mark.postgres

SCHEMA = pa.schema([("id", pa.int64()), ("small", pa.int64()), ("note", pa.string())])
ROWS = [
    {"id": 1, "small": 1, "note": "fine"},
    {"id": 2, "small": 99_999, "note": "too large"},
    {"id": 3, "small": 3, "note": "a NUL \0"},
    {"id": 4, "small": 4, "note": "much too long"},
    {"id": 5, "small": -5, "note": "check"},
    {"id": 6, "small": None, "note": None},
    {"id": 1, "small": 7, "note": "twice"},
]


@pytest.fixture
def numbers(database):
    database.execute(
        "CREATE TABLE numbers (id bigint PRIMARY KEY, small smallint CHECK (small > 0), "
        "note varchar(9))"
    )
    return database


def rejected(database, table="bad"):
    found = rows_of(database, f"SELECT rejected, reason, sqlstate, sink FROM {table}")
    return {(row["id"], row["note"]): rest for row, *rest in found}


def test_what_can_never_be_written_is_diverted_with_its_reason(url, numbers):
    sink = PostgresSink(url, "numbers", rejects="bad", name="numbers")
    sink.check(SCHEMA)

    _, token = committed(sink, ROWS[:4], ROWS[4:], schema=SCHEMA)

    assert rows_of(numbers, "SELECT id, small, note FROM numbers ORDER BY 1") == [
        (1, 1, "fine"),
        (6, None, None),
    ]
    bad = rejected(numbers)
    assert token["rejected"] == len(bad) == 5
    assert bad[2, "too large"] == [
        'column "small" (smallint): a value is out of range, or cannot be converted',
        "",
        "numbers",
    ]
    assert "NUL" in bad[3, "a NUL \0"][0]
    assert "more than 9 characters" in bad[4, "much too long"][0]
    assert bad[5, "check"][1] == "23514"
    assert bad[1, "twice"][1] == "23505"
    assert rows_of(numbers, "SELECT diverted FROM semel.sink_proof") == [(5,)]
    assert left_behind(numbers) == []


GRANT = ";GRANT INSERT ON bad TO payer"


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        ("SELECT", "permission denied for schema public"),
        (create_rejects("bad"), "permission denied for table bad"),
        (f"CREATE TABLE bad (sink text) {GRANT}", 'column "target" of relation "bad" does not'),
        (
            create_rejects("bad").replace(" json", " bigint") + GRANT,
            'column "rejected" is of type bigint',
        ),
    ],
)
def test_a_reject_table_that_cannot_take_rows_is_refused_at_the_start(url, numbers, made, problem):
    payer = create_role(url, "payer")
    numbers.execute("CREATE SCHEMA semel AUTHORIZATION payer; GRANT INSERT ON numbers TO payer")
    numbers.execute(made)
    sink = PostgresSink(payer, "numbers", rejects="bad", name="numbers")

    with pytest.raises(Permanent) as refusal:
        sink.check(SCHEMA)

    pool().close_all()
    numbers.execute("DROP OWNED BY payer CASCADE; DROP ROLE payer")
    assert f'numbers: rows cannot be rejected to "public"."bad": {problem}' in str(refusal.value)
    assert 'GRANT INSERT ON "public"."bad" TO "payer"' in str(refusal.value)


def test_a_batch_of_nothing_but_rejects_is_a_cycle_too(url, numbers):
    sink = PostgresSink(url, "numbers", rejects="bad")
    sink.check(SCHEMA)

    committed(sink, [ROWS[1]], [ROWS[2]], schema=SCHEMA)

    assert rows_of(numbers, "SELECT * FROM numbers") == []
    assert len(rejected(numbers)) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("REVOKE INSERT ON numbers FROM payer", "permission denied for table numbers"),
        ("ALTER TABLE numbers DROP COLUMN note", 'column "note" of relation "numbers" does not'),
        ("DROP FUNCTION checked", "function checked() does not exist"),
    ],
)
def test_what_is_not_about_a_row_fails_the_batch_and_diverts_none(url, numbers, change, words):
    payer = create_role(url, "payer")
    numbers.execute(
        "CREATE FUNCTION checked() RETURNS bigint LANGUAGE sql AS 'SELECT 1';"
        "CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql "
        "AS 'BEGIN PERFORM checked(); RETURN NEW; END';"
        "CREATE TRIGGER noting BEFORE INSERT ON numbers FOR EACH ROW EXECUTE FUNCTION noted();"
        "GRANT ALL ON ALL TABLES IN SCHEMA public TO payer;"
        "GRANT CREATE ON SCHEMA public TO payer; CREATE SCHEMA semel AUTHORIZATION payer"
    )
    sink = PostgresSink(payer, "numbers", rejects="bad")
    try:
        sink.check(SCHEMA)
        committed(sink, ROWS[:4], schema=SCHEMA)
        of = txn()
        receipts = stage(sink, of, ROWS[1:2], ROWS[4:6], schema=SCHEMA)
        numbers.execute(change)

        outcome = sink.prepare(of, receipts)

        assert isinstance(outcome, SinkFatal)
        assert words in outcome.reason
        assert len(rejected(numbers)) == 3
        assert isinstance(sink.abort(of, None), SinkOK)
    finally:
        pool().close_all()
        numbers.execute("DROP OWNED BY payer CASCADE; DROP ROLE payer")


@pytest.mark.parametrize("bad", [ROWS[1], ROWS[4]])
def test_a_batch_of_almost_nothing_but_rejects_is_refused_with_the_reason(url, numbers, bad):
    sink, of = PostgresSink(url, "numbers", rejects="bad"), txn()
    sink.check(SCHEMA)
    rows = [bad | {"id": 10 + n} for n in range(99)]
    good = [{"id": n, "small": 1, "note": "fine"} for n in range(10)]
    receipts = stage(sink, of, rows, good[:1], schema=SCHEMA)

    outcome = sink.prepare(of, receipts)

    assert isinstance(outcome, SinkFatal)
    assert "more than 90 of 100 rows would be rejected" in outcome.reason
    assert "out of range" in outcome.reason or "violates check constraint" in outcome.reason
    assert isinstance(sink.abort(of, None), SinkOK)
    sink.close()
    most = PostgresSink(url, "numbers", rejects="bad", most_rejects=1.0)
    committed(most, rows, good[:1], schema=SCHEMA)
    committed(sink, [row | {"id": row["id"] + 1000} for row in rows[:90]], good[1:], schema=SCHEMA)
    assert len(rejected(numbers)) == 99 + 90


def test_nothing_is_diverted_before_the_decision_or_after_an_abort(url, numbers):
    sink = PostgresSink(url, "numbers", rejects="bad")
    sink.check(SCHEMA)
    of = txn()

    prepared(sink, of, ROWS, schema=SCHEMA)
    assert rejected(numbers) == {}
    assert isinstance(sink.abort(of, None), SinkOK)

    assert rejected(numbers) == {}
    assert left_behind(numbers) == []


def test_another_process_diverts_the_same_rows_after_a_crash(url, numbers):
    first = PostgresSink(url, "numbers", rejects="bad")
    first.check(SCHEMA)
    of = txn()
    token = json.loads(json.dumps(prepared(first, of, ROWS, schema=SCHEMA)))
    first.close()

    changed = PostgresSink(url, "numbers", rejects="elsewhere").commit(of, token)
    assert isinstance(changed, SinkFatal)
    assert "in rejects: set back" in changed.reason
    second = PostgresSink(url, "numbers", rejects="bad")
    for _ in range(2):
        assert isinstance(second.commit(of, token), SinkOK)

    assert len(rejected(numbers)) == 5
    assert rows_of(numbers, "SELECT count(*) FROM numbers") == [(2,)]


def test_an_upsert_diverts_rows_and_still_refuses_a_key_that_comes_twice(url, numbers):
    sink = PostgresSink(url, "numbers", key="id", rejects="bad")
    sink.check(SCHEMA)

    committed(sink, ROWS[:6], schema=SCHEMA)
    assert len(rejected(numbers)) == 4
    of = txn()
    outcome = sink.prepare(of, stage(sink, of, ROWS[4:], [ROWS[0]], schema=SCHEMA))

    assert isinstance(outcome, SinkFatal)
    assert isinstance(sink.abort(of, None), SinkOK)
    assert len(rejected(numbers)) == 4


def test_it_is_off_by_default_and_needs_staging_mode(url, numbers):
    with pytest.raises(Permanent, match="row \\(id\\) = \\(2\\)"):
        stage(PostgresSink(url, "numbers"), txn(), ROWS, schema=SCHEMA)
    numbers.execute("ALTER TABLE entries ADD CHECK (amount > 0)")
    assert "rows (id) = (8)" in refused(PostgresSink(url, "entries"), [row(8, "-1.00")])
    with pytest.raises(Misuse, match="rejects= needs mode='staging'"):
        PostgresSink(url, "numbers", rejects="bad", mode="prepared")


def test_rejected_rows_are_counted_and_shown_by_the_status(url, numbers):
    ledger, events, seen = MemoryLedger(), Events(), []
    events.subscribe(seen.append)
    sink = PostgresSink(url, "numbers", rejects="bad", name="numbers")
    sink.check(SCHEMA)
    other = MemorySink("other")
    driver = Driver("app", ledger, [sink, other], events=events)
    driver.start()
    ledger.open_generation(driver.lease, "checkpoint")

    def stage_all(of):
        return {
            "numbers": stage(sink, of, ROWS, schema=SCHEMA),
            "other": stage(other, of, ROWS, schema=SCHEMA),
        }

    span = BatchRange.of_offsets({"": (0, 7)})
    outcome = driver.run_cycle(CycleId(driver.scope, 1, 0), lambda: span, stage_all)

    assert isinstance(outcome, CommitSucceeded)
    (told,) = [event for event in seen if isinstance(event, RowsRejected)]
    assert (told.sink, told.rows) == ("numbers", 5)
    (scope,) = status_of(ledger).scopes
    assert scope.rejected == {"numbers": 5}
    driver.stop()
