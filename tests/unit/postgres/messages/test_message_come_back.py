"""What comes back, what is held, what wakes an idle query, and what tasks read."""

from __future__ import annotations

import pickle

import pytest

from semel.messaging.changes import MessageChange, Op, names_of
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import Waits
from semel.postgres.messages import _due_heads
from tests.unit.postgres.messages.message_place import CONSUMER, claim, committed, wait

pytestmark = pytest.mark.postgres

HOUR = 3_600_000_000


def queue(sink, key, *waits, offset=0, delay_us=0):
    """Let messages of a key wait; the delay is the first one's."""
    for number, how in enumerate(waits):
        name, later = f"{key}{number}", 0 if number else delay_us
        state = "FAILED_RETRYABLE" if how == "retry" else "PARKED"
        # In transactions of their own, so that their places are in this order.
        waiting = wait(name, key, offset + number, how, seen_place=10**6, delay_us=later)
        committed(sink, claim(name, state), waiting)


def back(sink, **limits):
    found = sink.come_back(**limits)
    return [row.message_id for row in found.rows], sorted(found.held)


def test_a_head_that_is_due_brings_its_whole_queue(sink):
    queue(sink, "a", "retry", "behind", "behind")

    assert back(sink) == (["a0", "a1", "a2"], [])
    assert sink.is_due()


@pytest.mark.parametrize(("waits", "delay_us"), [("parked", 0), ("retry", HOUR)])
def test_a_head_that_is_parked_or_early_holds_its_key(sink, waits, delay_us):
    queue(sink, "a", waits, "behind", "retry", delay_us=delay_us)

    assert back(sink) == ([], ["a"])
    assert not sink.is_due()


def test_held_keys_come_with_the_highest_place_of_their_rows(sink, database):
    queue(sink, "a", "parked", "behind")
    highest = database.execute("SELECT max(place) FROM waiting_message").fetchone()[0]

    assert sink.come_back().held == {"a": highest}


def test_what_is_behind_a_head_that_was_skipped_comes_back_and_wakes_the_query(sink, database):
    queue(sink, "a", "parked", "behind", "behind")
    assert not sink.is_due()

    database.execute("DELETE FROM waiting_message WHERE message_id = 'a0'")

    assert sink.is_due()
    assert back(sink) == (["a1", "a2"], [])


def test_a_message_that_may_overtake_comes_without_its_queue(sink, database):
    queue(sink, "a", "parked", "behind", "behind")
    database.execute("UPDATE waiting_message SET held = 0 WHERE message_id = 'a2'")

    assert sink.is_due()
    assert back(sink) == (["a2"], ["a"])


def test_the_heads_are_read_from_their_index_alone(sink, database):
    """An idle query asks at every trigger, and payloads would make that slow."""
    database.execute(
        "INSERT INTO waiting_message (consumer, message_id, waits, held, key, payload, topic, "
        'partition, "offset", headers, "timestamp", payload_hash, message_type, schema_version, '
        "correlation_id, attempts, due_at, reason, error_code, exception, since, first_failed_at, "
        "label) SELECT %s, 'm' || n, CASE WHEN n <= 50 THEN 'parked' ELSE 'behind' END, 1, "
        "'k' || n %% 50, repeat('x', 200)::bytea, 't', 0, n, '', 0, '', '', '', '', 1, 0, '', '', "
        "'', 0, 0, '' FROM generate_series(1, 5000) AS n",
        [CONSUMER],
    )
    database.execute("VACUUM ANALYZE waiting_message")
    question = f"EXPLAIN (COSTS OFF) SELECT EXISTS ({_due_heads(sink._tables_in(database))})"

    plan = "\n".join(line for (line,) in database.execute(question, {"consumer": CONSUMER}))

    assert plan.count("Index Only Scan using ix_waiting_message_head") == 2, plan
    assert not sink.is_due()
    assert len(sink.come_back().held) == 50


def test_what_waited_for_a_version_is_due_when_its_gap_is_closed(sink, database):
    for number, key in enumerate(("a", "b", "c")):
        code = "TIMEOUT" if key == "b" else "SEQUENCE_GAP"
        committed(
            sink, claim(key, "PARKED"), wait(key, "k", number, "parked", 10**6, error_code=code)
        )
    database.execute("UPDATE waiting_message SET held = 0")
    database.execute("UPDATE waiting_message SET erased_at = 1 WHERE message_id = 'c'")
    assert not sink.is_due()

    committed(sink, MessageChange(Op.CLOSE, key="k", state="arrived", version=6))

    assert [row.message_id for row in sink.come_back().rows] == ["a"]


def test_a_limit_cuts_only_the_last_queue_and_its_key_is_held(sink):
    queue(sink, "a", "retry", "behind", "behind")
    queue(sink, "b", "retry", "behind", "behind", offset=10)

    assert back(sink, limit_rows=4) == (["a0", "a1", "a2", "b0"], ["b"])
    assert back(sink, limit_rows=3) == (["a0", "a1", "a2"], ["b"])
    assert back(sink, limit_rows=2) == (["a0", "a1"], ["a", "b"])
    assert back(sink, limit_bytes=5) == (["a0", "a1"], ["a", "b"])  # two bytes each
    assert back(sink, limit_bytes=1) == (["a0"], ["a", "b"])


def test_a_message_that_comes_back_has_what_its_change_compares(sink, database):
    committed(sink, claim("a", "FAILED_RETRYABLE"), wait("a", "k", 5))
    database.execute("DELETE FROM processed_message")

    [row] = sink.come_back().rows

    assert (row.message_id, row.key, row.waits, row.attempts) == ("a", "k", Waits.RETRY, 1)
    assert (row.payload, row.payload_hash, row.claim_state) == (b"a", "h-a", "")
    assert (row.topic, row.partition, row.offset, row.is_due) == ("events", 0, 5, True)


def test_a_message_without_a_claim_is_claimed_when_it_is_taken(sink, database):
    committed(sink, wait("a"))
    [row] = sink.come_back().rows

    taken = MessageChange(Op.TAKE, "a", payload_hash="h-a", state="COMPLETED", attempts=2)
    taken.place, taken.seen_attempts, taken.seen_waits = row.place, row.attempts, row.waits.value
    committed(sink, taken)

    claims = database.execute("SELECT message_id, state FROM processed_message").fetchall()
    assert claims == [("a", "COMPLETED")]
    assert back(sink) == ([], [])


def test_another_consumers_messages_are_neither_read_nor_waited_for(sink, database):
    database.execute(
        "INSERT INTO waiting_message (consumer, message_id, waits, held, key) VALUES "
        "('other', 'a', 'retry', 1, 'k')"
    )
    database.execute(
        "INSERT INTO processed_message (consumer_name, message_id, state) VALUES "
        "('other', 'a', 'COMPLETED')"
    )

    assert back(sink) == ([], [])
    assert not sink.is_due()
    assert sink.reader().claims(["a"]) == {}


def test_tasks_read_claims_and_versions_by_ids_as_they_were_given(sink):
    long_id, strange_key = "i" * 600, "sha256:key"
    names = names_of(long_id, strange_key)
    change = claim(names["message_id"], "PARKED", original_id=names["original_id"])
    committed(sink, change, MessageChange(Op.VERSION, key=names["key"], version=3))

    reader = pickle.loads(pickle.dumps(sink.reader()))

    [(found_id, found)] = reader.claims([long_id, "unknown"]).items()
    assert found_id == long_id
    assert (found.state, found.attempts, found.waits) == (ClaimState.PARKED, 1, False)
    assert reader.versions([strange_key, "unknown"]) == {strange_key: 3}
    assert reader.claims([]) == {}


def test_a_claim_says_whether_it_is_due_waits_and_had_an_effect(sink):
    committed(
        sink,
        claim("done"),
        claim("skipped", marker="SKIPPED"),
        claim("due", "FAILED_RETRYABLE"),
        claim("early", "FAILED_RETRYABLE", delay_us=HOUR),
        wait("early", delay_us=HOUR),
    )

    found = sink.reader().claims(["done", "skipped", "due", "early"])

    told = {name: (one.is_due, one.waits, one.had_effect) for name, one in found.items()}
    assert told == {
        "done": (False, False, True),
        "skipped": (False, False, False),
        "due": (True, False, True),
        "early": (False, True, True),
    }


def test_notes_of_messages_that_are_tried_are_counted_until_they_are_cleared(sink, database):
    reader = sink.reader()

    reader.note(["a", "b"])
    reader.note(["a"])
    assert reader.suspects() == {"a": 2, "b": 1}
    reader.clear(["a"])

    assert reader.suspects() == {"b": 1}
    assert database.execute("SELECT DISTINCT consumer FROM crash_suspect").fetchall() == [
        (CONSUMER,)
    ]
