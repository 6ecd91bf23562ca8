"""What the PostgreSQL sink does beyond the contract: constraints, crashes, modes, secrets."""

from __future__ import annotations

import logging
import pickle
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from itertools import count

import psycopg
import pyarrow as pa
import pytest
from pooler import Pooler

from semel.crashpoints import CrashPoint
from semel.errors import Fenced, Misuse, NeedsOperator, Permanent, Retryable
from semel.pipeline.sink import (
    Found,
    SinkFatal,
    SinkOK,
    SinkRetryable,
    Tally,
    tally_of,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.testing.services import CutProxy, PostgresServer

pytestmark = pytest.mark.postgres

SCOPE = Scope("ledger-1", "payments", "main")
SCHEMA = pa.schema([("id", pa.int64()), ("amount", pa.decimal128(12, 2)), ("note", pa.string())])
TABLE = "CREATE TABLE entries (id bigint PRIMARY KEY, amount numeric(12,2), note text)"

numbers = count()


def txn(batch: int | None = None) -> SinkTxnId:
    return CycleId(SCOPE, 1, next(numbers) if batch is None else batch).attempt()


def row(number: int, amount: str = "1.00", note: str | None = "x") -> dict:
    return {"id": number, "amount": Decimal(amount), "note": note}


def stage(sink, of, *tasks, schema=SCHEMA):
    receipts = []
    for rows in tasks:
        writer = pickle.loads(pickle.dumps(sink.stager(of))).open(f"task-{next(numbers)}")
        try:
            writer.write(pa.RecordBatch.from_pylist(rows, schema=schema))
            receipts.append(writer.finish())
        except BaseException:
            writer.discard()
            raise
    return receipts


def prepared(sink, of, *tasks, schema=SCHEMA):
    outcome = sink.prepare(of, stage(sink, of, *tasks, schema=schema))
    assert isinstance(outcome, SinkOK), outcome
    return outcome.token


def committed(sink, *tasks, schema=SCHEMA):
    of = txn()
    token = prepared(sink, of, *tasks, schema=schema)
    outcome = sink.commit(of, token)
    assert isinstance(outcome, SinkOK), outcome
    return of, token


def refused(sink, *tasks):
    of = txn()
    outcome = sink.prepare(of, stage(sink, of, *tasks))
    assert isinstance(outcome, SinkFatal), outcome
    assert isinstance(sink.abort(of, None), SinkOK)
    return outcome.reason


@pytest.fixture
def url(postgres_url) -> Iterator[str]:
    yield postgres_url
    pool().close_all()


@pytest.fixture
def database(url) -> Iterator[psycopg.Connection]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
        yield connection


def rows_of(database, query="SELECT * FROM entries ORDER BY 1"):
    return database.execute(query).fetchall()


def left_behind(database):
    tables = database.execute("SELECT tablename FROM pg_tables WHERE tablename ~ '^stg_'")
    gids = database.execute("SELECT gid FROM pg_prepared_xacts")
    return [*tables.fetchall(), *gids.fetchall()]


# Constraints are found in prepare, with the row's key.


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


# What happens to keys that are there.


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


# Lost connections, crashed servers, older owners.


def test_a_newer_owner_ends_the_session_that_holds_the_rows(url, database):
    zombie, successor = PostgresSink(url, "entries"), PostgresSink(url, "entries")
    zombie.fence(SCOPE, 1)
    of = txn()
    token = prepared(zombie, of, [row(1)])

    successor.fence(SCOPE, 2)

    held = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    assert database.execute(held, [f"semel:{SCOPE.slug}:1"]).fetchone() == (0,)
    assert isinstance(successor.commit(of, token), SinkOK)
    assert isinstance(zombie.commit(of, token), SinkOK)
    assert isinstance(zombie.prepare(txn(), []), SinkFatal)
    with pytest.raises(Fenced):
        zombie.fence(SCOPE, 1)
    assert len(rows_of(database)) == 1
    assert left_behind(database) == []


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_an_owner_whose_session_a_newer_one_ended_learns_that_it_is_fenced(
    url, database, monkeypatch, mode
):
    zombie, successor = (PostgresSink(url, "entries", mode=mode) for _ in range(2))
    zombie.fence(SCOPE, 1)
    of = txn()
    receipts = stage(zombie, of, [row(1)])
    successor.fence(SCOPE, 2)
    # The farewell is still on its way when the session is used.
    monkeypatch.setattr("semel.postgres.connect._is_alive", lambda connection: True)

    outcome = zombie.prepare(of, receipts)

    assert isinstance(outcome, SinkFatal), outcome
    assert "fenced" in outcome.reason
    assert rows_of(database) == []


@pytest.fixture
def fragile() -> Iterator[PostgresServer]:
    with PostgresServer(18) as server:
        yield server
        pool().close_all()


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_a_server_that_crashes_after_prepare_still_keeps_the_promise(fragile, mode):
    with psycopg.connect(fragile.url, autocommit=True) as connection:
        connection.execute(TABLE)
    sink = PostgresSink(fragile.url, "entries", mode=mode)
    sink.fence(SCOPE, 1)
    of = txn()
    token = prepared(sink, of, [row(1), row(2)], [row(3)])

    fragile.stop("immediate")
    assert sink.look_up(of, token).found is Found.UNREACHABLE
    with pytest.raises(Retryable):
        sink.recover(SCOPE)
    fragile.start()

    assert sink.recover(SCOPE) == [of]
    assert isinstance(sink.commit(of, token), SinkOK)
    with psycopg.connect(fragile.url, autocommit=True) as connection:
        assert len(rows_of(connection)) == 3
        assert left_behind(connection) == []


@pytest.mark.parametrize(
    ("mode", "lost"), [("staging", b"COMMIT"), ("prepared", b"COMMIT PREPARED")]
)
def test_a_commit_whose_reply_is_lost_is_found_and_not_repeated(
    postgres_server, url, database, mode, lost
):
    with CutProxy(postgres_server.port) as proxy:
        through = url.replace(str(postgres_server.port), str(proxy.port))
        sink = PostgresSink(through, "entries", mode=mode)
        of = txn()
        token = prepared(sink, of, [row(1)], [row(2)])
        proxy.swallow_reply_to(lost)

        outcome = sink.commit(of, token)

        assert proxy.wait_until_swallowed()
        if isinstance(outcome, SinkRetryable):
            outcome = sink.commit(of, token)
        assert isinstance(outcome, SinkOK)
        assert sink.look_up(of, token).found is Found.VISIBLE
        sink.close()
    assert len(rows_of(database)) == 2
    assert left_behind(database) == []


@pytest.mark.parametrize(
    "moment", [CrashPoint.POSTGRES_PROOF_WRITTEN, CrashPoint.POSTGRES_COMMIT_PREPARED_ONE]
)
def test_a_commit_that_another_process_overtakes_is_not_called_lost(
    url, database, monkeypatch, moment
):
    slow, fast = (PostgresSink(url, "entries", mode="prepared") for _ in range(2))
    of = txn()
    token = prepared(slow, of, [row(1)], [row(2)])
    overtaken = []

    def overtake(point, sink):
        if point is moment and not overtaken:
            overtaken.append(point)
            assert isinstance(fast.commit(of, token), SinkOK)

    monkeypatch.setattr("semel.postgres.prepared.reach", overtake)

    assert isinstance(slow.commit(of, token), SinkOK)
    assert overtaken
    assert len(rows_of(database)) == 2


def test_a_reader_of_a_staging_table_delays_its_removal_and_nothing_else(url, database):
    sink = PostgresSink(url, "entries")
    of = txn()
    token = prepared(sink, of, [row(1)])
    with psycopg.connect(url) as backup:
        for (table,) in left_behind(database):
            backup.execute(f'SELECT * FROM semel."{table}"')

        assert isinstance(sink.commit(of, token), SinkOK)

        assert len(left_behind(database)) == 1
    sink.sweep(SCOPE, lambda txn: False)
    assert left_behind(database) == []


# A foreign writer made a committed cycle unfinishable.


def test_a_stuck_cycle_is_named_and_can_be_retried_or_diverted(url, database):
    sink = PostgresSink(url, "entries")
    of = txn()
    token = prepared(sink, of, [row(n) for n in range(100)], [row(n) for n in range(100, 200)])
    sink.close()
    database.execute("INSERT INTO entries VALUES (42, 0, 'foreign'), (142, 0, 'foreign')")

    outcome = sink.commit(of, token)
    assert isinstance(outcome, SinkFatal)
    assert "stuck" in outcome.reason
    assert "Key (id)=(42) already exists" in outcome.reason
    assert sink.look_up(of, token).found is Found.HELD

    diverted = sink.resolve_divert(of, token, "rejected")

    assert (diverted.written, diverted.diverted) == (198, 2)
    assert len(rows_of(database)) == 200
    kept = rows_of(database, "SELECT rejected->>'id', sqlstate FROM rejected ORDER BY 1")
    assert kept == [("142", "23505"), ("42", "23505")]
    assert isinstance(sink.commit(of, token), SinkOK)
    assert sink.look_up(of, token).found is Found.VISIBLE
    assert sink.resolve_divert(of, token, "rejected").written == 0
    assert left_behind(database) == []


def test_a_stuck_cycle_can_be_finished_once_the_way_is_free(url, database):
    sink = PostgresSink(url, "entries")
    of = txn()
    token = prepared(sink, of, [row(1)])
    sink.close()
    database.execute("INSERT INTO entries VALUES (1, 0, 'foreign')")
    assert isinstance(sink.resolve_retry(of, token), SinkFatal)

    database.execute("DELETE FROM entries")

    assert isinstance(sink.resolve_retry(of, token), SinkOK)
    assert rows_of(database) == [(1, Decimal("1.00"), "x")]


def test_asking_makes_nothing(url, database):
    sink = PostgresSink(url, "entries", cycle_column="note")
    of = txn()

    sink.check(None)
    assert sink.recover(SCOPE) == []
    assert sink.mark(SCOPE) is None
    assert sink.scopes_of(SCOPE.app, SCOPE.query) == []
    assert sink.look_up(of, None).found is Found.GONE

    assert rows_of(database, "SELECT FROM pg_namespace WHERE nspname = 'semel'") == []
    committed(sink, [{"id": 1}], schema=pa.schema([("id", pa.int64())]))
    assert sink.mark(SCOPE) is not None


def test_only_what_is_held_can_be_diverted(url, database):
    sink = PostgresSink(url, "entries")
    of = txn()
    token = prepared(sink, of, [row(1)])
    sink.abort(of, token)

    with pytest.raises(NeedsOperator, match="aborted"):
        sink.resolve_divert(of, token, "rejected")


# Modes.


def test_auto_says_in_one_line_what_it_chose_and_what_readers_see(url, database, caplog):
    caplog.set_level(logging.INFO, "semel")

    PostgresSink(url, "entries", mode="auto").check(SCHEMA)
    PostgresSink(url, "entries", mode="auto", key="id").check(SCHEMA)

    chosen = [line for line in caplog.messages if "mode auto" in line]
    assert "chose prepared: it only appends" in chosen[0]
    assert "part of a batch for a moment" in chosen[0]
    assert "chose staging: prepared mode can only append" in chosen[1]
    assert "whole batches or nothing" in chosen[1]


@pytest.mark.parametrize("mode", ["auto", "prepared"])
def test_a_key_that_two_tasks_insert_ends_with_the_constraints_own_error(url, database, mode):
    sink = PostgresSink(url, "entries", mode=mode, lock_seconds=0.2)
    first = txn(1000)
    with pytest.raises(Retryable, match="lock timeout"):
        stage(sink, first, [row(1)], [row(1)])
    assert isinstance(sink.abort(first, None), SinkOK)

    second = first.cycle.attempt()
    outcome = sink.prepare(second, stage(sink, second, [row(1)], [row(1)]))

    assert isinstance(outcome, SinkFatal)
    assert "Key (id)=(1) already exists" in outcome.reason
    assert isinstance(sink.abort(second, None), SinkOK)
    assert left_behind(database) == []
    committed(sink, [row(1)])
    assert len(rows_of(database)) == 1


@pytest.mark.parametrize(
    "index",
    [
        "CREATE UNIQUE INDEX ON odd (lower(id))",
        "CREATE UNIQUE INDEX ON odd (id) WHERE id > ''",
        "ALTER TABLE odd ADD UNIQUE (id) DEFERRABLE INITIALLY DEFERRED",
        "ALTER TABLE odd ADD EXCLUDE USING btree (id WITH =)",
        "CREATE UNIQUE INDEX ON odd_rest (id)",
    ],
)
def test_whatever_makes_a_copy_of_a_task_wait_is_noticed_under_speculation(url, database, index):
    partitioned = " PARTITION BY LIST (id)" if "odd_rest" in index else ""
    database.execute(f"CREATE TABLE odd (id text){partitioned}")
    if partitioned:
        database.execute("CREATE TABLE odd_rest PARTITION OF odd DEFAULT")
    database.execute(index)
    sink = PostgresSink(url, "odd", mode="prepared")
    sink.expect_speculation()

    sink.check(pa.schema([("id", pa.string())]))

    assert sink.guarantee().readers_see == "whole batches or nothing"


@pytest.mark.parametrize("mode", ["auto", "prepared"])
def test_a_table_with_a_unique_index_is_staged_under_speculation(url, database, caplog, mode):
    caplog.set_level(logging.INFO, "semel")
    sink = PostgresSink(url, "entries", mode=mode)
    sink.expect_speculation()
    sink.check(SCHEMA)
    of = txn(3100)

    receipts = stage(sink, of, [row(6200)])

    assert receipts[0].detail["mode"] == "staging"
    assert "with speculation, a task and its copy" in caplog.text
    assert isinstance(sink.abort(of, None), SinkOK)


def test_auto_gives_prepared_mode_up_when_it_fails_again_and_again(url, database):
    def modes(batch):
        for attempt in range(2):
            of = txn(batch)
            receipts = stage(sink, of, [row(2 * batch + attempt)])
            yield receipts[0].detail["mode"]
            assert isinstance(sink.abort(of, None), SinkOK)

    sink = PostgresSink(url, "entries", mode="auto")

    assert [[*modes(batch)] for batch in range(3000, 3005)] == [
        ["prepared", "staging"],
        ["prepared", "staging"],
        ["prepared", "staging"],
        ["staging", "staging"],
        ["staging", "staging"],
    ]


def test_late_tasks_of_a_dead_owner_do_not_block_the_next_attempt(url, database):
    dead, sink = (PostgresSink(url, "entries", mode="prepared", lock_seconds=1) for _ in range(2))
    dead.fence(SCOPE, 1)
    first = txn(2000)
    late = dead.stager(first)
    sink.fence(SCOPE, 2)
    pool().close_idle()  # the late task runs elsewhere, on a connection of its own
    writer = late.open("late")
    writer.write(pa.RecordBatch.from_pylist([row(1)], schema=SCHEMA))
    writer.finish()

    second = first.cycle.attempt()
    token = prepared(sink, second, [row(1)])

    assert isinstance(sink.commit(second, token), SinkOK)
    assert len(rows_of(database)) == 1


def test_a_server_without_slots_is_refused_or_worked_around(caplog):
    caplog.set_level(logging.INFO, "semel")
    with PostgresServer(18, {"max_prepared_transactions": "0"}) as server:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(TABLE)

        with pytest.raises(Permanent, match="max_prepared_transactions"):
            PostgresSink(server.url, "entries", mode="prepared").check(None)
        PostgresSink(server.url, "entries", mode="auto").check(None)

        assert "the server has 0 slots" in caplog.text
        pool().close_all()


# The table.


@pytest.mark.parametrize("mode", ["transaction", "rotating"])
def test_a_pooler_that_lends_sessions_by_transaction_is_refused(
    postgres_server, url, database, mode
):
    with Pooler(postgres_server.port, mode) as pooler:
        sink = PostgresSink(url.replace(str(postgres_server.port), str(pooler.port)), "entries")

        with pytest.raises(Permanent, match=r"pooler.*session mode"):
            sink.check(None)

        sink.close()


def test_a_pooler_that_lends_sessions_for_good_is_welcome(postgres_server, url, database):
    with Pooler(postgres_server.port, "session") as pooler:
        sink = PostgresSink(url.replace(str(postgres_server.port), str(pooler.port)), "entries")

        sink.check(SCHEMA)

        sink.close()


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
    database.execute("DROP ROLE IF EXISTS guest")
    database.execute("CREATE ROLE guest LOGIN")
    guest = url.replace("postgres@", "guest@")
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
    assert "nowhere" in outcome.reason


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


# Attribution.


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


# Settings and secrets.


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "prepared", "key": "id"},
        {"write": "upsert"},
        {"version_column": "amount"},
        {"mode": "magic"},
        {"create_table": "always"},
        {"table": "a.b.c"},
        {"url": "host=localhost password=s3cret"},
        {"name": "Not a name"},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused_at_once(settings):
    place = {"url": "postgresql://u:s3cret@localhost/x", "table": "t"}

    with pytest.raises(Misuse) as refusal:
        PostgresSink(**{**place, **settings})

    assert "s3cret" not in str(refusal.value)


def test_no_password_is_told_anywhere(url, database, caplog):
    caplog.set_level(logging.DEBUG)
    secret = "pa55:w/rd"
    sink = PostgresSink(url.replace("postgres@", "postgres:pa55%3Aw%2Frd@"), "entries", mode="auto")
    asked = PostgresSink(url, "entries", password=lambda: secret, name="asked")
    of = txn()
    token = prepared(sink, of, [row(1)])
    told = [repr(sink), str(sink), repr(sink.stager(of)), repr(asked.stager(of)), repr(token)]
    told += [repr(sink.__dict__), repr(sink.look_up(of, token)), repr(sink.commit(of, token))]
    for broken in (
        PostgresSink("postgresql://u:pa55%3Aw%2Frd@127.0.0.1:1/x", "t"),
        PostgresSink("postgresql://127.0.0.1:1/x?sslmode=odd", "t", password=secret),
        PostgresSink(f"{url}?nonsense=1", "t", password=lambda: secret),
    ):
        for call in (lambda b=broken: b.check(None), lambda b=broken: b.recover(SCOPE)):
            with pytest.raises((Retryable, Misuse)) as failure:
                call()
            told += [repr(failure.value), "".join(traceback.format_exception(failure.value))]
        told.append(repr(broken.look_up(of, None)))

    for text in [*told, caplog.text]:
        assert secret not in text
        assert "pa55%3Aw%2Frd" not in text


# Connections.


def test_a_process_uses_few_connections_however_many_cycles_it_runs(url, database):
    sink = PostgresSink(url, "entries")
    for number in range(12):
        committed(sink, [row(2 * number)], [row(2 * number + 1)])

    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'semel%'"
    assert database.execute(query).fetchone()[0] <= 3
    sink.close()
    deadline = time.monotonic() + 10  # the server needs a moment to see that they are closed
    while database.execute(query).fetchone()[0] > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_threads_that_start_at_once_wait_for_each_others_connections(url, database, monkeypatch):
    monkeypatch.setattr("semel.postgres.connect.MOST_CONNECTIONS", 3)
    sink = PostgresSink(url, "entries")
    of = txn()
    stager = sink.stager(of)
    open_at_once = []

    def staged(number):
        writer = stager.open(f"thread-{number}")
        writer.write(pa.RecordBatch.from_pylist([row(number)], schema=SCHEMA))
        open_at_once.append(len(pool()._lent))
        time.sleep(0.01)
        return writer.finish()

    with ThreadPoolExecutor(12) as threads:
        receipts = [*threads.map(staged, range(24))]

    assert max(open_at_once) <= 3
    assert isinstance(sink.prepare(of, receipts), SinkOK)


def test_two_sinks_whose_options_name_two_databases_write_to_two(postgres_server):
    rows = {}
    for name in ("left", "right"):
        url = postgres_server.create_database(f"options_{name}")
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(TABLE)
    for name in ("left", "right"):
        database = {"dbname": f"options_{name}"}
        sink = PostgresSink(postgres_server.url, "entries", name=name, connect=database)
        committed(sink, [row(1, note=name)])

    for name in ("left", "right"):
        url = postgres_server.url_of(f"options_{name}")
        with psycopg.connect(url) as connection:
            rows[name] = rows_of(connection, "SELECT note FROM entries")

    assert rows == {"left": [("left",)], "right": [("right",)]}
    pool().close_all()
    for name in ("left", "right"):
        postgres_server.drop_database(f"options_{name}")


def test_the_guarantee_says_what_readers_see(url, database):
    staging, auto = PostgresSink(url, "entries"), PostgresSink(url, "entries", mode="auto")
    auto.check(SCHEMA)

    assert "whole batches" in staging.guarantee().readers_see
    assert "part of a batch" in auto.guarantee().readers_see
    assert "once" in staging.guarantee().effect
