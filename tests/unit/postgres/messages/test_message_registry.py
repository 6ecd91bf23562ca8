"""One engine per consumer: the registry, its barrier, and what a fenced or a cut owner may do."""

from __future__ import annotations

import threading
import time

import psycopg
import pyarrow as pa
import pytest

from semel.crashpoints import CrashPoint
from semel.errors import NeedsOperator, Permanent, Retryable
from semel.messaging.changes import Op
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable, Tenant
from semel.pipeline.twophase import in_groups
from semel.pipeline.txn import CycleId, Scope
from semel.postgres import messages
from semel.postgres.messages import MessagesSink
from semel.postgres.sink import PostgresSink
from semel.testing.crash import hooked
from tests.unit.postgres.messages.message_place import (
    CONSUMER,
    SCOPE,
    claim,
    committed,
    connect,
    left_behind,
    make_sink,
    of_waiting,
    prepared,
    rows_of,
    staged,
    txn,
    wait,
)

pytestmark = pytest.mark.postgres

ANOTHER = Scope("ledger-1", "another", "main")
SECONDS = 20.0


def registered(database):
    return rows_of(database, "SELECT engine, scope, epoch FROM consumer_engine")


def claims_of(database):
    return [name for (name,) in rows_of(database, "SELECT message_id FROM processed_message")]


def enter_service(database, seconds):
    database.execute(
        "INSERT INTO consumer_member (consumer, name, owner, expires_at) "
        "VALUES (%s, 'm', 'host', (extract(epoch FROM now()) * 1e6)::bigint + %s * 1000000)",
        [CONSUMER, seconds],
    )


def end_held_session(database):
    """End the sessions in a transaction, as an administrator does."""
    ended = rows_of(
        database,
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = "
        "current_database() AND application_name LIKE 'semel:%%' "
        "AND state = 'idle in transaction'",
    )
    assert ended == [(True,)]


def at_prepared(act):
    """Carry out *act* once, when the final transaction ran and is not in the books yet."""
    left = [act]

    def hook(point, sink):
        if point is CrashPoint.POSTGRES_PREPARE_RAN and left:
            left.pop()()

    return hooked(hook)


def test_a_start_enters_the_consumer_and_the_next_one_raises_its_epoch(url, database):
    for epoch in (1, 2):
        MessagesSink(url, CONSUMER).fence(SCOPE, epoch)

        assert registered(database) == [("spark", SCOPE.slug, epoch)]


def test_a_start_is_refused_while_a_service_runs_and_leaves_no_row(url, database):
    enter_service(database, 60)

    with pytest.raises(NeedsOperator, match="a service runs consumer"):
        MessagesSink(url, CONSUMER).fence(SCOPE, 1)

    assert registered(database) == []
    database.execute("UPDATE consumer_member SET expires_at = 1")
    MessagesSink(url, CONSUMER).fence(SCOPE, 1)
    assert registered(database) == [("spark", SCOPE.slug, 1)]


def test_a_refused_start_leaves_the_row_of_the_start_before(url, database):
    MessagesSink(url, CONSUMER).fence(SCOPE, 1)
    enter_service(database, 60)

    with pytest.raises(NeedsOperator, match="a service runs consumer"):
        MessagesSink(url, CONSUMER).fence(SCOPE, 2)

    assert registered(database) == [("spark", SCOPE.slug, 1)]


def test_a_consumer_of_another_pipeline_is_refused_with_the_way_out(url, database):
    MessagesSink(url, CONSUMER).fence(ANOTHER, 7)

    with pytest.raises(NeedsOperator, match=r"another/main .* `semel consumer hand-over"):
        MessagesSink(url, CONSUMER).fence(SCOPE, 9)

    assert registered(database) == [("spark", ANOTHER.slug, 7)]
    MessagesSink(url, "another-consumer").fence(SCOPE, 10)


def test_a_start_waits_for_transactions_that_may_claim_for_a_service(url, database):
    with connect(url) as service, service.transaction():
        service.execute(
            "INSERT INTO processed_message (consumer_name, message_id, state) "
            "VALUES (%s, 'a', 'COMPLETED')",
            [CONSUMER],
        )
        start = threading.Thread(target=MessagesSink(url, CONSUMER).fence, args=(SCOPE, 1))
        start.start()
        deadline = time.monotonic() + SECONDS
        while not registered(database) and time.monotonic() < deadline:
            pass
        start.join(0.3)
        assert start.is_alive()

    start.join(SECONDS)
    assert not start.is_alive()


def test_a_start_does_not_wait_for_ever_nor_for_transactions_that_came_later(
    url, database, monkeypatch
):
    monkeypatch.setattr(messages, "_BARRIER_SECONDS", 0.0)
    with connect(url) as service, service.transaction():
        service.execute("LOCK TABLE processed_message IN ROW EXCLUSIVE MODE")

        with pytest.raises(Retryable, match="end sessions"):
            MessagesSink(url, CONSUMER).fence(SCOPE, 1)
        database.execute("UPDATE consumer_engine SET since = since - 100 * 1000000")
        MessagesSink(url, CONSUMER).fence(SCOPE, 1)


def test_a_hand_over_before_the_decision_aborts_the_attempt(sink, database):
    of = txn()
    receipts = staged(sink, of, [claim("a")])
    database.execute("DELETE FROM consumer_engine")

    outcome = sink.prepare(of, receipts)

    assert isinstance(outcome, SinkRetryable)
    assert "is not registered for this owner" in outcome.reason
    assert isinstance(sink.abort(of, None), SinkOK)
    assert claims_of(database) == []


def test_a_hand_over_waits_for_a_transaction_that_is_held(sink, database):
    of = txn()
    outcome = prepared(sink, of, claim("a"))
    database.execute("SET lock_timeout = '100ms'")

    with pytest.raises(psycopg.errors.LockNotAvailable):
        database.execute("DELETE FROM consumer_engine")

    sink.commit(of, outcome.token)
    database.execute("DELETE FROM consumer_engine")


def test_a_batch_without_changes_is_refused_after_a_hand_over_too(sink, database):
    database.execute("DELETE FROM consumer_engine")

    assert isinstance(sink.prepare(txn(), []), SinkRetryable)


def test_an_act_between_the_statements_and_the_books_is_seen_before_the_decision(sink, database):
    """The held session ends, and an act goes through: it has found no prepared attempt."""
    committed(sink, claim("w", "FAILED_RETRYABLE"), wait("w"))
    [waiting] = sink.come_back().rows
    of = txn()
    receipts = staged(sink, of, [of_waiting(Op.TAKE, waiting, "COMPLETED")])

    def skip():
        end_held_session(database)
        database.execute("UPDATE processed_message SET state = 'COMPLETED', marker = 'SKIPPED'")
        database.execute("DELETE FROM waiting_message")

    with at_prepared(skip):
        outcome = sink.prepare(of, receipts)

    assert isinstance(outcome, SinkRetryable), outcome
    assert isinstance(sink.abort(of, None), SinkOK)
    marked = "SELECT marker FROM processed_message"
    assert rows_of(database, marked) == [("SKIPPED",)]
    assert left_behind(database) == []


def plain_sink(url, database):
    database.execute("CREATE TABLE IF NOT EXISTS public.effects (id bigint)")
    database.execute("DELETE FROM effects")
    sink = PostgresSink(url, "effects", name="effects")
    sink.check(ROWS)
    sink.fence(SCOPE, 1)
    return sink


ROWS = pa.schema([("id", pa.int64())])


def stage_row(sink, of):
    writer = sink.stager(of).open("task-1")
    writer.write(pa.RecordBatch.from_pylist([{"id": 1}], schema=ROWS))
    return [writer.finish()]


def test_a_plain_sink_promises_nothing_if_its_held_session_has_ended(url, database):
    sink, of = plain_sink(url, database), txn()
    receipts = stage_row(sink, of)

    with at_prepared(lambda: end_held_session(database)):
        outcome = sink.prepare(of, receipts)

    assert isinstance(outcome, SinkRetryable), outcome
    assert isinstance(sink.abort(of, None), SinkOK)


@pytest.mark.parametrize("make", [plain_sink, lambda url, _: make_sink(url)])
def test_an_owner_that_wakes_after_its_successor_records_nothing_as_prepared(url, database, make):
    stopped, of = make(url, database), txn()
    is_plain = isinstance(stopped, PostgresSink) and stopped.name == "effects"
    receipts = stage_row(stopped, of) if is_plain else staged(stopped, of, [claim("a")])
    successor = make(url, database)

    with at_prepared(lambda: successor.fence(SCOPE, 2)):
        outcome = stopped.prepare(of, receipts)

    assert isinstance(outcome, SinkFatal), outcome
    assert "fenced" in outcome.reason
    assert rows_of(database, "SELECT state FROM semel.sink_attempt") == []


def test_an_attempt_that_was_aborted_meanwhile_stays_aborted(url, sink, database):
    of = txn()
    receipts = staged(sink, of, [claim("a")])
    beside = make_sink(url)

    with at_prepared(lambda: beside.abort(of, None)):
        outcome = sink.prepare(of, receipts)

    assert isinstance(outcome, SinkFatal)
    assert "was aborted" in outcome.reason
    assert rows_of(database, "SELECT state FROM semel.sink_attempt") == [("aborted",)]
    assert claims_of(database) == []


def family(url, database):
    effects = plain_sink(url, database)
    sinks = [effects, make_sink(url)]
    in_groups(sinks)
    return sinks


def test_messages_and_rows_of_the_same_database_are_one_transaction(url, database):
    sinks, of = family(url, database), txn()
    receipts = {"effects": stage_row(sinks[0], of), "messages": staged(sinks[1], of, [claim("a")])}

    outcomes = sinks[0].prepare_all(of, receipts)
    held = rows_of(
        database,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name LIKE 'semel:%%' AND state = 'idle in transaction'",
    )
    tokens = {name: outcome.token for name, outcome in outcomes.items()}
    committed_ones = sinks[1].commit_all(of, tokens)

    assert held == [(1,)]
    assert all(isinstance(outcome, SinkOK) for outcome in committed_ones.values())
    assert rows_of(database, "SELECT id FROM effects") == [(1,)]
    assert claims_of(database) == ["a"]
    for sink in sinks:
        assert sink.look_up(of, tokens[sink.name]).found is Found.VISIBLE
    assert left_behind(database) == []


def test_rows_are_not_promised_if_the_messages_have_changed(url, database):
    sinks, of = family(url, database), txn()
    database.execute(
        "INSERT INTO processed_message (consumer_name, message_id, state) "
        "VALUES (%s, 'a', 'COMPLETED')",
        [CONSUMER],
    )
    receipts = {"effects": stage_row(sinks[0], of), "messages": staged(sinks[1], of, [claim("a")])}

    outcomes = sinks[0].prepare_all(of, receipts)

    assert all(isinstance(outcome, SinkRetryable) for outcome in outcomes.values())
    for sink in sinks:
        assert isinstance(sink.abort(of, None), SinkOK)
    assert rows_of(database, "SELECT id FROM effects") == []
    assert left_behind(database) == []


def test_the_place_is_the_consumer_and_a_rename_takes_its_registration_along(url, sink, database):
    committed(sink, claim("a"))
    other = MessagesSink(url, "another-consumer")
    other.check(None)

    assert sink.find_place() != other.find_place()
    assert f"consumer {CONSUMER} in" in sink.find_place()
    assert [tenant.scope for tenant in sink.tenants()] == [SCOPE]
    assert other.tenants() == []
    sink.rename(Tenant(SCOPE, "messages"), Tenant(ANOTHER, "messages"))
    assert registered(database) == [("spark", ANOTHER.slug, 1)]
    MessagesSink(url, CONSUMER).fence(ANOTHER, 2)


def test_two_pipelines_on_one_database_hold_their_transactions_beside_each_other(
    url, sink, database
):
    other = MessagesSink(url, "another-consumer")
    other.check(None)
    other.fence(ANOTHER, 1)
    of, of_other = txn(), CycleId(ANOTHER, 1, 0).attempt()

    first = prepared(sink, of, claim("a"), wait("b", "k"))
    second = prepared(other, of_other, claim("a"), wait("b", "k"))

    assert isinstance(sink.commit(of, first.token), SinkOK)
    assert isinstance(other.commit(of_other, second.token), SinkOK)
    claims = rows_of(database, "SELECT consumer_name, message_id FROM processed_message ORDER BY 1")
    assert claims == [("another-consumer", "a"), (CONSUMER, "a")]
    assert [row.message_id for row in other.come_back().rows] == ["b"]


def test_a_token_of_another_consumer_is_refused(url, sink):
    of = txn()
    token = prepared(sink, of, claim("a")).token
    other = MessagesSink(url, "another-consumer")
    other.check(None)

    outcome = other.commit(of, token)

    assert isinstance(outcome, SinkFatal)
    assert "target" in outcome.reason


def test_missing_tables_and_strange_rows_are_refused_with_the_way_out(url):
    with pytest.raises(Permanent, match="semel db create"):
        MessagesSink(url, CONSUMER, schema="nowhere").check(None)
    with pytest.raises(Permanent, match="to_batch"):
        MessagesSink(url, CONSUMER).check(ROWS)
