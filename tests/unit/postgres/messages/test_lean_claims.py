"""Lean claims: a table for each day, a filter for each day that is over, and their retention."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from semel.errors import Permanent, Retryable
from semel.message import digest_of
from semel.messaging.changes import MessageChange, Op, SeenClaim
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import stored_id
from semel.messaging.tables import lean_prefix
from semel.operate.retention import Retention, prune
from semel.pipeline.sink import SinkOK, SinkRetryable
from semel.postgres import lean
from semel.postgres.lean import LeanClaims, LeanDay, asked_of, lean_id
from semel.postgres.messages import LEAN, MessagesSink
from tests.unit.postgres.messages.message_place import (
    CONSUMER,
    asked,
    claim,
    committed,
    make_sink,
    prepared,
    rows_of,
    txn,
)

pytestmark = pytest.mark.postgres

DAY = 86_400.0


@pytest.fixture(autouse=True)
def _shared(monkeypatch, tmp_path):
    """Filters of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(lean, "_filters", {})


@pytest.fixture
def sink(sink):
    sink.claims = "lean"
    return sink


def passed(message_id):
    return MessageChange(
        Op.LEAN, stored_id(message_id), state="COMPLETED", attempts=1, payload_hash=digest_of(b"x")
    )


def handled(of=b"x"):
    return SeenClaim(ClaimState.COMPLETED, 1, digest_of(of)[:32], False)


def days_of(database, what="[0-9]{8}$"):
    named = f"SELECT tablename FROM pg_tables WHERE tablename ~ '^{lean_prefix(CONSUMER)}{what}'"
    return [name for (name,) in rows_of(database, f"{named} ORDER BY 1")]


def made_older(database, days):
    """Let the claims of today be those of a day before."""
    [today] = days_of(database)
    then = datetime.now(UTC) - timedelta(days=days)
    older = f"{lean_prefix(CONSUMER)}{then:%Y%m%d}"
    database.execute(f"ALTER TABLE {today} RENAME TO {older}")
    return older


def test_a_message_that_passed_is_known_by_half_of_its_hash(sink, database):
    committed(sink, passed("a"), passed("sha256:b"), claim("c", "FAILED_TERMINAL"))

    known = sink.reader().claims(["a", "sha256:b", "c", "d"])

    assert known["a"] == known["sha256:b"] == handled()
    assert known["c"].state is ClaimState.FAILED_TERMINAL
    assert "d" not in known
    assert rows_of(database, "SELECT message_id FROM processed_message") == [("c",)]
    assert len(days_of(database)) == 1
    sizes = f"SELECT length(id), length(hash) FROM {days_of(database)[0]}"
    assert rows_of(database, sizes) == [(16, 16)] * 2


def test_lean_claims_are_read_by_a_later_start_that_keeps_others(sink):
    committed(sink, passed("a"))

    sink.claims = "all"

    assert sink.reader().claims(["a", "b"]) == {"a": handled()}


def test_one_id_twice_in_a_day_aborts_the_attempt_and_leaves_no_table(sink, database):
    of = txn()

    outcome = prepared(sink, of, passed("a"), passed("a"))

    assert isinstance(outcome, SinkRetryable)
    assert "statement lean (" in outcome.reason
    assert isinstance(sink.abort(of, None), SinkOK)
    assert days_of(database) == []


def test_a_lost_transaction_is_run_again_with_the_table_that_went_with_it(url, sink, database):
    of = txn()
    promise = prepared(sink, of, passed("a"))
    sink.close()
    assert days_of(database) == []

    successor = make_sink(url)
    successor.claims = "lean"
    outcome = successor.commit(of, promise.token)

    assert isinstance(outcome, SinkOK)
    assert successor.reader().claims(["a"]) == {"a": handled()}
    successor.close()


def test_a_day_that_is_over_is_asked_only_for_what_its_filter_may_contain(sink, database):
    names = [f"m{number}" for number in range(2000)]
    committed(sink, *map(passed, names))
    day = made_older(database, 2)

    [found] = sink.reader().days
    reader = sink.reader()

    assert found.digest == reader.days[0].digest != ""
    assert len(days_of(database, "[0-9]{8}_filter$")) == 1
    assert reader.claims(names) == dict.fromkeys(names, handled())
    strangers = [lean_id(f"stranger {number}") for number in range(2000)]
    maybe = dict(asked_of(reader.days, strangers, reader._filter_in))
    assert len(maybe.get(f'"semel"."{day}"', [])) < 40
    # And it is only the filter that keeps them out.
    assert dict(asked_of([LeanDay(found.table)], strangers, reader._filter_in)) == {
        found.table: strangers
    }


def test_yesterday_has_no_filter_yet(sink, database):
    committed(sink, passed("a"))
    made_older(database, 1)

    reader = sink.reader()

    assert [day.digest for day in reader.days] == [""]
    assert reader.claims(["a"]) == {"a": handled()}


@pytest.mark.parametrize("damage", ["cut", "gone", "no folder"])
def test_a_filter_that_is_damaged_on_a_host_hides_no_claim(
    sink, database, tmp_path, monkeypatch, damage
):
    committed(sink, *(passed(f"m{number}") for number in range(50)))
    made_older(database, 2)
    reader = sink.reader()
    assert reader.claims(["m1"]) == {"m1": handled()}
    [file] = [one for one in tmp_path.rglob("*") if one.is_file()]
    monkeypatch.setattr(lean, "_filters", {})
    match damage:
        case "cut":
            file.write_bytes(bytes(file.stat().st_size))
        case "gone":
            file.unlink()
        case _:
            monkeypatch.setattr(tempfile, "tempdir", str(Path("/proc/nowhere")))

    assert reader.claims([f"m{number}" for number in range(50)]).keys() == {
        f"m{number}" for number in range(50)
    }


def test_retention_drops_whole_days_of_this_consumer(url, sink, database):
    committed(sink, passed("old"))
    made_older(database, 20)
    assert sink.reader().claims(["old"]) == {"old": handled()}
    committed(sink, passed("new"))
    [today] = days_of(database)[1:]
    database.execute("CREATE TABLE semel.lean_claim_0000000000000000_20200101 (id bytea)")
    before = sink.reader()

    async def pruned(of):
        return await prune(of, CONSUMER, Retention())

    done = asked(url, pruned)

    assert done.days == 1
    assert days_of(database, "") == [today]
    assert sink.reader().claims(["old", "new"]) == {"new": handled()}
    kept = "SELECT count(*) FROM pg_tables WHERE tablename ~ '^lean_claim_0{16}_'"
    assert rows_of(database, kept) == [(1,)]
    with pytest.raises(Retryable, match="retention has dropped a day"):
        before.claims(["old"])
    database.execute("DROP TABLE semel.lean_claim_0000000000000000_20200101")


def test_a_role_that_may_not_create_tables_is_told_so(url, sink, database):
    database.execute("CREATE ROLE plain; CREATE SCHEMA books AUTHORIZATION plain")
    database.execute("GRANT USAGE ON SCHEMA semel TO plain")
    database.execute("GRANT ALL ON ALL TABLES IN SCHEMA semel TO plain")
    given = MessagesSink(
        url, CONSUMER, connect={"options": "-c role=plain"}, bookkeeping_schema="books"
    )
    given.claims = "lean"

    try:
        with pytest.raises(Permanent, match="GRANT CREATE ON SCHEMA semel"):
            given.check(None)
        given.claims = "all"
        given.check(None)
    finally:
        given.close()
        database.execute("DROP OWNED BY plain; DROP ROLE plain")


def test_a_table_that_another_role_made_in_our_place_is_not_used(url, sink, database):
    day = f"semel.{lean_prefix(CONSUMER)}{datetime.now(UTC):%Y%m%d}"
    database.execute("CREATE ROLE ours; GRANT USAGE, CREATE ON SCHEMA semel TO ours")
    database.execute("GRANT ALL ON ALL TABLES IN SCHEMA semel TO ours; CREATE ROLE theirs")
    database.execute(
        f"CREATE TABLE {day} (id bytea, hash bytea); ALTER TABLE {day} OWNER TO theirs"
    )
    database.execute(f"GRANT ALL ON {day} TO ours")
    given = MessagesSink(url, CONSUMER, connect={"options": "-c role=ours"})
    given.claims = "lean"

    try:
        assert given.reader().days == ()
        database.execute("SET ROLE ours")
        with pytest.raises(Permanent, match="is another role's"):
            LeanClaims("semel", CONSUMER).today(database)
    finally:
        given.close()
        database.execute("RESET ROLE; DROP OWNED BY ours, theirs; DROP ROLE ours, theirs")


def test_the_guarantee_says_who_reads_these_claims(sink):
    assert LEAN in sink.guarantee().weakened_by


@pytest.mark.parametrize(
    ("claims", "table", "most", "next_way"),
    [
        ("all", "processed_message", 5e7, "claims='lean'"),
        ("lean", "", 5e9, "claims='failed' behind dropDuplicatesWithinWatermark"),
    ],
)
def test_the_next_way_is_named_when_there_are_too_many_claims_for_this_one(
    url, sink, database, claims, table, most, next_way
):
    committed(sink, passed("a"))
    sink.claims = claims
    counted = "UPDATE pg_class SET reltuples = %s WHERE relname = %s"
    name = table or days_of(database)[0]

    told = []
    for number in (most / 2, most * 1.5):
        database.execute(counted, [number, name])
        told.append(sink.outgrown())
    database.execute(counted, [-1, name])

    assert told[0] == ""
    assert next_way in told[1]
    sink.claims = "failed"
    assert sink.outgrown() == ""
