"""The messages sink: every statement compares what the pass has seen, and the registry decides."""

from __future__ import annotations

import re

import pytest

from semel.errors import Misuse
from semel.messaging.changes import MessageChange, Op, detail_of
from semel.pipeline.sink import SinkFatal, SinkOK, SinkRetryable
from semel.postgres.connect import pool
from semel.postgres.message_statements import STATEMENTS, TABLES
from semel.sql.tables import metadata
from tests.unit.postgres.messages.message_place import (
    CONSUMER,
    claim,
    committed,
    left_behind,
    make_sink,
    make_tables,
    of_waiting,
    prepared,
    rows_of,
    staged,
    txn,
    wait,
)

pytestmark = pytest.mark.postgres


def claims_of(database):
    query = "SELECT message_id, state, attempts FROM processed_message ORDER BY 1"
    return rows_of(database, query)


def waiting_of(database):
    query = "SELECT message_id, key, waits, held, attempts FROM waiting_message ORDER BY place"
    return rows_of(database, query)


def test_a_batch_claims_makes_wait_and_counts_in_one_transaction(sink, database):
    of = txn()

    outcome = prepared(
        sink,
        of,
        claim("a"),
        claim("b", "FAILED_RETRYABLE"),
        wait("b", "k", 5),
        MessageChange(
            Op.COUNT, topic="events", partition=0, seen_version=4, version=5, state="done", total=2
        ),
    )
    assert claims_of(database) == []
    assert isinstance(sink.commit(of, outcome.token), SinkOK)

    assert claims_of(database) == [("a", "COMPLETED", 1), ("b", "FAILED_RETRYABLE", 1)]
    assert waiting_of(database) == [("b", "k", "retry", 1, 1)]
    counted = "SELECT cycle, attempt, topic, first, last, outcome, total FROM cycle_outcome"
    assert rows_of(database, counted) == [(of.cycle.label, of.attempt, "events", 4, 5, "done", 2)]
    assert left_behind(database) == []


def test_messages_that_wait_are_in_the_order_of_their_source_whatever_task_wrote_them(
    sink, database
):
    of = txn()
    tasks = [[wait(f"m{n}", "k", n) for n in some] for some in ((7, 3), (5, 1))]
    outcome = sink.prepare(of, staged(sink, of, *tasks))
    sink.commit(of, outcome.token)

    assert [row[0] for row in waiting_of(database)] == ["m1", "m3", "m5", "m7"]


def seen(sink, message_id):
    return next(one for one in sink.come_back().rows if one.message_id == message_id)


def take_one(sink, database):
    committed(sink, claim("w", "FAILED_RETRYABLE"), wait("w"))
    return of_waiting(Op.TAKE, seen(sink, "w"), "COMPLETED")


def again_one(sink, database):
    committed(sink, claim("w", "FAILED_RETRYABLE"), wait("w"))
    detail = detail_of(waits="retry", reason="again", error_code="E", exception="")
    return of_waiting(Op.AGAIN, seen(sink, "w"), "FAILED_RETRYABLE", detail=detail)


def retake_one(sink, database):
    committed(sink, claim("w", "FAILED_RETRYABLE"))
    return MessageChange(
        Op.RETAKE,
        "w",
        payload_hash="h-w",
        state="COMPLETED",
        attempts=2,
        seen_state="FAILED_RETRYABLE",
        seen_attempts=1,
    )


def claim_one(sink, database):
    return claim("w")


def wait_one(sink, database):
    return wait("w", "k", 3)


def version_one(sink, database):
    committed(sink, MessageChange(Op.VERSION, key="k", version=1))
    return MessageChange(Op.VERSION, key="k", version=2, seen_version=1)


def first_version_one(sink, database):
    return MessageChange(Op.VERSION, key="k", version=1)


CLAIMED = "INSERT INTO processed_message (consumer_name, message_id, state) VALUES"
WAITING = "INSERT INTO waiting_message (consumer, message_id, waits, held, key) VALUES"
OVERTAKEN = [
    # the statement that finds it, the change, and what another process has done meanwhile
    ("take", take_one, "DELETE FROM waiting_message"),
    ("take", take_one, "UPDATE waiting_message SET waits = 'parked'"),
    ("take", take_one, "UPDATE waiting_message SET attempts = 7"),
    ("take", take_one, "UPDATE waiting_message SET payload_hash = 'another'"),
    ("again", again_one, "DELETE FROM waiting_message"),
    ("again", again_one, "UPDATE waiting_message SET waits = 'parked'"),
    ("again", again_one, "UPDATE waiting_message SET attempts = 7"),
    ("settle", take_one, "UPDATE processed_message SET state = 'PARKED'"),
    ("settle", take_one, "DELETE FROM processed_message"),
    ("settle", retake_one, "UPDATE processed_message SET state = 'COMPLETED'"),
    ("settle", retake_one, "UPDATE processed_message SET attempts = 2"),
    ("settle", retake_one, "UPDATE processed_message SET payload_hash = 'another'"),
    ("settle", retake_one, f"{WAITING} ('{CONSUMER}', 'w', 'retry', 0, NULL)"),
    ("claim", claim_one, f"{CLAIMED} ('{CONSUMER}', 'w', 'COMPLETED')"),
    ("wait", wait_one, f"{WAITING} ('{CONSUMER}', 'v', 'parked', 1, 'k')"),
    ("wait", wait_one, f"{WAITING} ('{CONSUMER}', 'w', 'retry', 0, NULL)"),
    ("version", version_one, "UPDATE aggregate_version SET version = 2"),
    ("version", version_one, "DELETE FROM aggregate_version"),
    (
        "first version",
        first_version_one,
        f"INSERT INTO aggregate_version VALUES ('{CONSUMER}', 'k', 1)",
    ),
]


@pytest.mark.parametrize(("statement", "change", "meanwhile"), OVERTAKEN)
def test_what_changed_since_it_was_read_aborts_the_attempt_and_nothing_stays(
    sink, database, statement, change, meanwhile
):
    overtaken = change(sink, database)
    of = txn()
    database.execute(meanwhile)
    before = claims_of(database), waiting_of(database)

    outcome = prepared(sink, of, claim("beside"), overtaken)

    assert isinstance(outcome, SinkRetryable), outcome
    assert f"statement {statement} (" in outcome.reason
    assert isinstance(sink.abort(of, None), SinkOK)
    assert (claims_of(database), waiting_of(database)) == before
    assert left_behind(database) == []


@pytest.mark.parametrize(("statement", "change", "meanwhile"), OVERTAKEN[::4])
def test_what_changed_after_the_decision_is_stuck_with_the_statement_in_words(
    url, sink, database, statement, change, meanwhile
):
    change_of_one = change(sink, database)
    of = txn()
    outcome = prepared(sink, of, change_of_one)
    sink.close()  # the held transaction ends, as in a crash
    database.execute(meanwhile)

    successor = make_sink(url)
    stuck = successor.commit(of, outcome.token)

    assert isinstance(stuck, SinkFatal)
    assert "it is stuck" in stuck.reason
    assert f"statement {statement} (" in stuck.reason
    with pytest.raises(Misuse, match="cannot be diverted"):
        successor.resolve_divert(of, outcome.token, "rejects")


def test_every_statement_that_must_change_each_row_has_a_counterexample():
    exact = {statement.name for statement in STATEMENTS if statement.is_exact}

    # These insert without a unique key, so no other process can be in their way.
    # That of a lean claim is in the tests of lean claims.
    assert exact - {"attempt", "lean"} == {name for name, _, _ in OVERTAKEN}


def test_a_claim_whose_lease_has_ended_is_retaken_and_one_with_a_live_lease_is_not(sink, database):
    leased = f"{CLAIMED.replace('state)', 'state, lease_until)')} ('{CONSUMER}', 'w', 'IN_PROGRESS'"
    database.execute(f"{leased}, 1)")
    change = MessageChange(
        Op.RETAKE, "w", state="COMPLETED", attempts=2, seen_state="IN_PROGRESS", seen_attempts=1
    )
    assert sink.reader().claims(["w"])["w"].is_due
    database.execute("UPDATE processed_message SET lease_until = 9000000000000000")
    assert not sink.reader().claims(["w"])["w"].is_due

    assert isinstance(prepared(sink, txn(), change), SinkRetryable)
    database.execute("UPDATE processed_message SET lease_until = 1")
    committed(sink, change)

    assert claims_of(database) == [("w", "COMPLETED", 2)]


def test_every_column_that_a_statement_writes_is_one_of_the_tables():
    wrong = []
    for statement in STATEMENTS:
        written = INSERTED.search(statement.sql)
        if written is None or written["table"] == "lean":  # which each day has of its own
            continue
        table = metadata.tables[written["table"]]
        names = {name.strip(' "\n') for name in written["columns"].split(",")}
        required = {c.name for c in table.c if not c.nullable and not _is_filled(c)}
        wrong += [f"{table.name}: {n}" for n in sorted(names - set(table.c.keys()))]
        wrong += [f"{table.name} lacks {n}" for n in sorted(required - names)]

    assert wrong == []
    assert {name for name in TABLES if name not in metadata.tables} == set()


INSERTED = re.compile(r"INSERT INTO \{(?P<table>\w+)\}(?: AS t)? \((?P<columns>[^)]*)\)")


def _is_filled(column):
    return column.server_default is not None or column.identity is not None


def test_tables_in_another_schema_are_written_as_well(quick_postgres_server, database):
    url = quick_postgres_server.create_database("elsewhere")
    make_tables(url, "elsewhere")
    sink = make_sink(f"{url}?schema=elsewhere")

    committed(
        sink,
        claim("a", "FAILED_RETRYABLE", delay_us=0),
        wait("a", "k", timestamp=1_700_000_000_500_000),
        claim("b", "FAILED_RETRYABLE", delay_us=HOUR),
        wait("b", delay_us=HOUR),
        MessageChange(Op.LETTER, "c", detail=detail_of(payload=b"c", timestamp=5)),
        MessageChange(Op.GAP, key="k", version=1, seen_version=3, detail=detail_of()),
        MessageChange(Op.CLOSE, key="k", version=2, state="arrived"),
        MessageChange(Op.ATTEMPT, "a", detail=detail_of(number=1)),
        MessageChange(Op.SEND, "o", detail=detail_of(outbox="out", topic="t"), delay_us=HOUR),
        MessageChange(
            Op.COUNT, topic="t", partition=0, version=1, seen_version=0, state="done", total=1
        ),
    )
    [row] = sink.come_back().rows
    again = of_waiting(Op.AGAIN, row, "FAILED_RETRYABLE", detail=detail_of(waits="retry"))
    committed(sink, again)

    assert (row.message_id, row.timestamp, row.is_due) == ("a", 1_700_000_000.5, True)
    assert row.first_failed_at > 1_700_000_000
    assert {name: one.is_due for name, one in sink.reader().claims(["a", "b"]).items()} == {
        "a": True,
        "b": False,
    }
    assert sink.is_due()
    pool().close_all()
    quick_postgres_server.drop_database("elsewhere")


HOUR = 3_600_000_000
