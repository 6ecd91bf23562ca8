"""Sinks of one database share one transaction: parents and children, many tables, many queries."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import count

import psycopg
import pyarrow as pa
import pytest

from semel.crashpoints import CrashPoint
from semel.errors import Misuse, Permanent
from semel.memory.ledger import MemoryLedger
from semel.pipeline.cycle import CommitFatal, CommitSucceeded
from semel.pipeline.driver import Driver, Settings
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff, in_groups
from semel.pipeline.txn import CycleId
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.spark.staging import Tee
from semel.testing import Crash
from semel.testing.crash import crash_at
from semel.testing.services import PostgresServer
from tests.unit.postgres.postgres_place import left_behind, prepared, row, rows_of, txn

pytestmark = pytest.mark.postgres

PARENT = pa.schema([("id", pa.int64())])
CHILD = pa.schema([("id", pa.int64()), ("parent", pa.int64())])
QUICK = Settings(cycle_backoff=Backoff(tries=1), commit_backoff=Backoff(tries=1))
numbers = count()


@pytest.fixture
def family(database):
    """A parent and a child table with a foreign key."""
    database.execute("CREATE TABLE parents (id bigint PRIMARY KEY)")
    database.execute("CREATE TABLE children (id bigint, parent bigint REFERENCES parents)")


def couple(url, **settings):
    sinks = [
        PostgresSink(url, "parents", name="parents", **settings),
        PostgresSink(url, "children", name="children", **settings),
    ]
    in_groups(sinks)
    return sinks


def staged(sinks, of, *batches, task=""):
    """Stage one batch per sink by one task, as a task of Spark does."""
    rows = [pa.RecordBatch.from_struct_array(batch.to_struct_array()) for batch in batches]
    length = max(batch.num_rows for batch in rows)
    columns = [_padded(batch, length) for batch in rows]
    tee = Tee([(sink.name, sink.stager(of)) for sink in sinks])
    names = [f"s{number}" for number in range(len(sinks))]
    both = pa.RecordBatch.from_arrays(columns, names)
    receipts = tee.write([both], task or f"task-{next(numbers)}")
    return {sink.name: [receipt] for sink, receipt in zip(sinks, receipts, strict=True)}


def _padded(batch, length):
    column = batch.to_struct_array()
    return pa.concat_arrays([column, pa.nulls(length - len(column), column.type)])


def family_rows(*pairs):
    """One parent, and a child of it, per pair of ids."""
    parents = pa.RecordBatch.from_pylist([{"id": parent} for parent, _ in pairs], schema=PARENT)
    children = [{"id": child, "parent": parent} for parent, child in pairs]
    return parents, pa.RecordBatch.from_pylist(children, schema=CHILD)


def prepared_family(sinks, of, *pairs):
    outcomes = sinks[0].prepare_all(of, staged(sinks, of, *family_rows(*pairs)))
    assert all(isinstance(outcome, SinkOK) for outcome in outcomes.values()), outcomes
    return {name: outcome.token for name, outcome in outcomes.items()}


def counts(database):
    return rows_of(
        database, "SELECT (SELECT count(*) FROM parents), (SELECT count(*) FROM children)"
    )[0]


@pytest.mark.parametrize("mode", ["staging", "prepared", "auto"])
def test_a_parent_and_its_child_come_in_one_batch(url, database, family, mode):
    sinks, of = couple(url, mode=mode), txn()

    tokens = prepared_family(sinks, of, (1, 10), (2, 20))
    assert counts(database) == (0, 0)
    outcomes = sinks[0].commit_all(of, tokens)

    assert [*outcomes] == ["parents", "children"]
    assert all(isinstance(outcome, SinkOK) for outcome in outcomes.values())
    assert counts(database) == (2, 2)
    assert left_behind(database) == []
    for sink in sinks:
        assert sink.look_up(of, tokens[sink.name]).found is Found.VISIBLE
        assert sink.mark(of.scope) == of


def test_sinks_of_one_database_hold_one_connection(url, database, family):
    sinks, of = couple(url), txn()

    prepared_family(sinks, of, (1, 10))

    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'semel%' "
        "AND datname = current_database() AND state = 'idle in transaction'"
    )
    assert database.execute(query).fetchone() == (1,)
    for sink in sinks:
        assert isinstance(sink.abort(of, None), SinkOK)
    assert left_behind(database) == []


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_after_a_crash_the_group_commits_together_and_parents_first(url, database, family, mode):
    if mode == "prepared":  # a foreign key in the group means staging
        database.execute("ALTER TABLE children DROP CONSTRAINT children_parent_fkey")
    sinks, of = couple(url, mode=mode), txn()
    tokens = prepared_family(sinks, of, (1, 10))
    pool().close_all()

    successor = couple(url, mode=mode)
    outcomes = successor[1].commit_all(of, tokens)

    assert all(isinstance(outcome, SinkOK) for outcome in outcomes.values()), outcomes
    assert counts(database) == (1, 1)
    assert left_behind(database) == []


def test_one_prepared_transaction_holds_the_rows_of_all_sinks_of_a_task(url, database, family):
    database.execute("ALTER TABLE children DROP CONSTRAINT children_parent_fkey")
    sinks, of = couple(url, mode="prepared"), txn()

    receipts = staged(sinks, of, *family_rows((1, 10)))
    more = staged(sinks, of, *family_rows((2, 20)))

    gids = database.execute("SELECT gid FROM pg_prepared_xacts").fetchall()
    assert len(gids) == 2
    both = {name: receipts[name] + more[name] for name in receipts}
    outcomes = sinks[0].prepare_all(of, both)
    tokens = {name: outcome.token for name, outcome in outcomes.items()}
    assert all(isinstance(o, SinkOK) for o in sinks[0].commit_all(of, tokens).values())
    assert counts(database) == (2, 2)
    assert left_behind(database) == []


def test_a_task_may_stage_one_sink_after_another(url, database, family):
    database.execute("ALTER TABLE children DROP CONSTRAINT children_parent_fkey")
    sinks, of = couple(url, mode="prepared"), txn()
    receipts = {}
    for sink, batch in zip(sinks, family_rows((1, 10)), strict=True):
        writer = sink.stager(of).open("task")
        writer.write(batch)
        receipts[sink.name] = [writer.finish()]

    outcomes = sinks[0].prepare_all(of, receipts)
    tokens = {name: outcome.token for name, outcome in outcomes.items()}

    assert {token["mode"] for token in tokens.values()} == {"prepared"}
    assert all(isinstance(o, SinkOK) for o in sinks[0].commit_all(of, tokens).values())
    assert counts(database) == (1, 1)
    assert left_behind(database) == []


def test_a_task_with_rows_for_one_sink_of_the_group_only_loses_nothing(url, database, family):
    database.execute("ALTER TABLE children DROP CONSTRAINT children_parent_fkey")
    sinks, of = couple(url, mode="prepared"), txn()
    parents, children = family_rows((1, 10))
    empty = children.slice(0, 0)
    first = staged(sinks, of, parents, empty)
    second = staged(sinks, of, parents.slice(0, 0), children)

    outcomes = sinks[0].prepare_all(of, {n: first[n] + second[n] for n in first})
    tokens = {name: outcome.token for name, outcome in outcomes.items()}
    # An operator commits one sink by itself; a sweep must keep what the other one needs.
    assert isinstance(sinks[0].commit(of, tokens["parents"]), SinkOK)
    sinks[0].sweep(of.scope, lambda found: False)

    assert isinstance(sinks[1].commit(of, tokens["children"]), SinkOK)
    assert counts(database) == (1, 1)
    assert left_behind(database) == []


@pytest.mark.parametrize("mode", ["staging", "auto"])
def test_a_refused_sink_rolls_all_back_and_is_named(url, database, family, mode):
    driver, generation = started(couple(url, mode=mode))
    orphan = family_rows((1, 10))[1]
    nobody = pa.RecordBatch.from_pylist([], schema=PARENT)

    outcome = ran(driver, generation, 0, nobody, orphan)

    assert isinstance(outcome, CommitFatal)
    assert "children: " in outcome.reason
    assert "foreign key" in outcome.reason
    assert "parents: rolled back with sink children" in outcome.reason
    assert counts(database) == (0, 0)
    assert left_behind(database) == []


def test_a_deferred_constraint_is_reported_by_the_sink_of_its_table(url, database):
    database.execute("CREATE TABLE parents (id bigint PRIMARY KEY)")
    database.execute(
        "CREATE TABLE children (id bigint, parent bigint "
        "REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
    )
    parents, children = couple(url)
    sinks = [children, parents]
    in_groups(sinks)
    of = txn()
    wrong, _ = family_rows((2, 20))
    _, orphan = family_rows((1, 10))

    outcomes = sinks[0].prepare_all(of, staged(sinks, of, orphan, wrong))

    assert isinstance(outcomes["children"], SinkFatal)
    assert isinstance(outcomes["parents"], SinkRetryable)


@pytest.mark.parametrize("bad", [0, -1])
def test_a_sink_with_rejects_leaves_the_deferred_constraints_of_the_others_deferred(
    url, database, bad
):
    database.execute("CREATE TABLE parents (id bigint PRIMARY KEY CHECK (id >= 0))")
    database.execute(
        "CREATE TABLE tree (id bigint PRIMARY KEY, "
        "parent bigint CONSTRAINT up REFERENCES tree DEFERRABLE INITIALLY DEFERRED)"
    )
    # Another table's constraint of this name must not stop the statement for the first one.
    database.execute("CREATE TABLE other (id bigint CONSTRAINT up REFERENCES tree)")
    before = PostgresSink(url, "tree", name="before")
    rejecting = PostgresSink(url, "parents", name="rejecting", rejects="bad")
    after = PostgresSink(url, "tree", name="after", rejects="bad")
    sinks = [before, rejecting, after]
    for sink, schema in zip(sinks, (CHILD, PARENT, CHILD), strict=True):
        sink.check(schema)
    in_groups(sinks)
    of = txn()
    batches = (
        pa.RecordBatch.from_pylist([{"id": 2, "parent": 1}], schema=CHILD),
        pa.RecordBatch.from_pylist([{"id": 7}, {"id": bad}], schema=PARENT),
        pa.RecordBatch.from_pylist([{"id": 1, "parent": None}], schema=CHILD),
    )

    outcomes = sinks[0].prepare_all(of, staged(sinks, of, *batches))

    tokens = {name: outcome.token for name, outcome in outcomes.items()}
    assert all(isinstance(one, SinkOK) for one in sinks[0].commit_all(of, tokens).values())
    assert database.execute("SELECT count(*) FROM tree").fetchone() == (2,)
    assert tokens["rejecting"]["rejected"] == (1 if bad else 0)


def test_a_deferred_constraint_still_diverts_the_rows_of_its_own_sink(url, database):
    database.execute("CREATE TABLE parents (id bigint PRIMARY KEY)")
    database.execute(
        "CREATE TABLE children (id bigint, parent bigint "
        "REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
    )
    parents, _ = couple(url)
    children = PostgresSink(url, "children", name="children", rejects="bad")
    children.check(CHILD)
    sinks = [parents, children]
    in_groups(sinks)
    of = txn()
    kept, _ = family_rows((1, 10))
    rows = pa.RecordBatch.from_pylist([{"id": 1, "parent": 1}, {"id": 2, "parent": 9}], CHILD)

    outcomes = parents.prepare_all(of, staged(sinks, of, kept, rows))

    assert outcomes["children"].token["rejected"] == 1


def started(sinks, settings=QUICK, query="main"):
    driver = Driver("payments", MemoryLedger(), sinks, query, settings=settings)
    driver.start()
    return driver, driver.ledger.open_generation(driver.lease, "test").number


def ran(driver, generation, number, *batches):
    read = BatchRange.of_offsets({"topic/0": (number, number + 1)})
    cycle = CycleId(driver.scope, generation, number)
    return driver.run_cycle(cycle, lambda: read, lambda of: staged(driver.sinks, of, *batches))


def test_twenty_sinks_of_one_database_work_in_one_pipeline(url, database):
    for number in range(20):
        database.execute(f"CREATE TABLE t{number} (id bigint)")
    sinks = [PostgresSink(url, f"t{n}", name=f"t{n}", connections=2) for n in range(20)]
    driver, generation = started(sinks)
    rows = pa.RecordBatch.from_pylist([{"id": 1}], schema=PARENT)

    for number in range(2):
        assert isinstance(ran(driver, generation, number, *[rows] * 20), CommitSucceeded)

    found = [rows_of(database, f"SELECT count(*) FROM t{n}")[0][0] for n in range(20)]
    assert found == [2] * 20
    assert left_behind(database) == []
    driver.stop()


def test_twenty_queries_of_two_sinks_work_in_one_process(url, database):
    for number in range(20):
        database.execute(f"CREATE TABLE a{number} (id bigint)")
        database.execute(f"CREATE TABLE b{number} (id bigint)")

    def query(number):
        sinks = [
            PostgresSink(url, f"{name}{number}", name=name, connections=4) for name in ("a", "b")
        ]
        driver, generation = started(sinks, query=f"query-{number}")
        rows = pa.RecordBatch.from_pylist([{"id": 1}], schema=PARENT)
        outcomes = [ran(driver, generation, batch, rows, rows) for batch in range(3)]
        driver.stop()
        return outcomes

    with ThreadPoolExecutor(20) as threads:
        outcomes = [outcome for found in threads.map(query, range(20)) for outcome in found]

    assert [o for o in outcomes if not isinstance(o, CommitSucceeded)] == []
    found = [rows_of(database, f"SELECT count(*) FROM b{n}")[0][0] for n in range(20)]
    assert found == [3] * 20


def test_a_held_transaction_never_waits_for_its_own_second_statement(url, database, family):
    sinks, of = couple(url, connections=1), txn()

    prepared_family(sinks, of, (1, 10))

    for sink in sinks:
        assert isinstance(sink.abort(of, None), SinkOK)


def test_only_sinks_of_the_same_database_role_and_books_are_joined(url):
    a, b = PostgresSink(url, "a", name="a"), PostgresSink(url, "b", name="b")
    same = PostgresSink(url.replace("postgresql://", "postgres://"), "c", name="c")
    others = [
        PostgresSink(url, "d", name="d", bookkeeping_schema="other"),
        PostgresSink(url, "e", name="e", connect={"user": "another"}),
        PostgresSink(url + "x", "f", name="f"),
    ]

    assert in_groups([a, *others, b, same]) == [(a, b, same), *((other,) for other in others)]


@pytest.mark.parametrize(
    ("one", "other", "options"),
    [
        ("u@h/db", "u@h:5432/db", {}),
        ("u@h/db", "u:pw@H/db?connect_timeout=3&application_name=x&sslmode=require", {}),
        ("u@h/u", "u@h", {"keepalives_idle": 5}),
        ("u@h1,h2/db", "u@h1:5432,h2:5432/db", {}),
    ],
)
def test_sinks_are_joined_by_their_database_and_not_by_its_spelling(one, other, options):
    a = PostgresSink(f"postgresql://{one}", "a", name="a")
    b = PostgresSink(f"postgresql://{other}", "b", name="b", connect=options)

    assert in_groups([a, b]) == [(a, b)]


def test_parents_and_children_come_in_one_batch_however_their_database_is_spelled(
    url, database, family
):
    parents, children = couple(url)
    children = PostgresSink(f"{url}?connect_timeout=9&application_name=mine", "children", name="c")
    driver, generation = started([parents, children])

    assert isinstance(ran(driver, generation, 0, *family_rows((1, 10))), CommitSucceeded)

    assert counts(database) == (1, 1)
    driver.stop()


def test_a_foreign_key_between_two_transactions_is_refused_at_the_start(url, database, family):
    parents, _ = couple(url)
    other = url.replace("127.0.0.1", "localhost")

    with pytest.raises(Misuse, match="'children' refer to rows of sink 'parents' by a foreign key"):
        started([parents, PostgresSink(other, "children", name="children")])


def test_a_child_that_is_listed_before_its_parent_is_named_at_the_start(
    url, database, family, caplog
):
    parents, children = couple(url)
    advice = "list 'parents' first"

    started([parents, children])
    assert advice not in caplog.text
    started([children, parents])

    assert advice in caplog.text


def test_the_modes_of_a_group_are_one_mode(url, database):
    database.execute("CREATE TABLE parents (id bigint)")
    database.execute("CREATE TABLE children (id bigint, parent bigint)")
    sinks = [
        PostgresSink(url, "parents", name="parents", mode="prepared"),
        PostgresSink(url, "children", name="children", mode="staging"),
    ]
    in_groups(sinks)
    of = txn()

    tokens = prepared_family(sinks, of, (1, 10))

    assert {token["mode"] for token in tokens.values()} == {"staging"}
    assert all(isinstance(o, SinkOK) for o in sinks[0].commit_all(of, tokens).values())
    assert counts(database) == (1, 1)


@pytest.mark.parametrize(
    "point", [CrashPoint.POSTGRES_STAGE_COPIED, CrashPoint.POSTGRES_PREPARE_RAN]
)
def test_a_crash_before_the_decision_leaves_nothing_of_any_sink(url, database, family, point):
    sinks, of = couple(url), txn()
    for sink in sinks:
        sink.fence(of.scope, 1)

    with pytest.raises(Crash), crash_at(point, sink="children"):
        prepared_family(sinks, of, (1, 10))
    successor = couple(url)
    for sink in successor:
        sink.fence(of.scope, 2)
        assert isinstance(sink.abort(of, None), SinkOK)

    assert counts(database) == (0, 0)
    assert left_behind(database) == []


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_two_sinks_on_one_table_do_not_wait_for_each_other(url, database, mode):
    database.execute("CREATE TABLE parents (id bigint PRIMARY KEY)")
    sinks = [PostgresSink(url, "parents", name=name, mode=mode) for name in ("one", "two")]
    driver, generation = started(sinks)
    one, two = (pa.RecordBatch.from_pylist([{"id": n}], schema=PARENT) for n in (1, 2))

    assert isinstance(ran(driver, generation, 0, one, two), CommitSucceeded)
    same = ran(driver, generation, 1, one, one)

    assert not isinstance(same, CommitSucceeded)
    assert rows_of(database, "SELECT id FROM parents ORDER BY 1") == [(1,), (2,)]
    driver.stop()


@pytest.mark.parametrize("differing", ["books", "host"])
def test_two_sinks_on_one_table_with_a_transaction_each_are_refused_at_the_start(
    url, database, differing
):
    database.execute("CREATE TABLE parents (id bigint PRIMARY KEY)")
    other = (
        PostgresSink(url, "public.parents", name="two", bookkeeping_schema="other")
        if differing == "books"
        else PostgresSink(url.replace("127.0.0.1", "localhost"), "parents", name="two")
    )

    with pytest.raises(Misuse, match=r"'one' and 'two' both write to table .*would wait"):
        started([PostgresSink(url, "parents", name="one"), other])

    assert rows_of(database, "SELECT count(*) FROM pg_namespace WHERE nspname = 'other'") == [(0,)]


def test_a_record_of_pieces_that_were_not_prepared_writes_nothing(url, database):
    sink, of = PostgresSink(url, "entries"), txn()
    sink.fence(of.scope, 1)
    token = prepared(sink, of, [row(1)], [row(2)])
    pool().close_all()
    database.execute("UPDATE semel.sink_attempt SET pieces = pieces[1:1]")
    successor = PostgresSink(url, "entries")
    successor.fence(of.scope, 2)

    outcome = successor.commit(of, token)

    assert isinstance(outcome, SinkFatal)
    assert "1 pieces that are not those of the token" in outcome.reason
    assert rows_of(database) == []


def test_a_limit_of_connections_beyond_the_servers_is_refused_at_the_start(url, database):
    database.execute("CREATE TABLE parents (id bigint)")
    with pytest.raises(Permanent, match=r"connections=5000 .*server allows \d+"):
        PostgresSink(url, "parents", connections=5000).check(PARENT)
    with pytest.raises(Misuse, match="connections must be greater than 0"):
        PostgresSink(url, "parents", connections=0)


def test_a_task_waits_while_the_server_has_too_many_clients(tmp_path):
    with PostgresServer(18, {"max_connections": "8"}).start() as server, ExitStack() as stack:
        database = stack.enter_context(psycopg.connect(server.url, autocommit=True))
        database.execute("CREATE TABLE parents (id bigint)")
        sink = PostgresSink(server.url, "parents", connections=2)
        of = txn()
        stager = sink.stager(of)
        sink.close()
        others = []
        with suppress(psycopg.OperationalError):
            while True:
                others.append(psycopg.connect(server.url))
        writer = stager.open("task")
        rows = pa.RecordBatch.from_pylist([{"id": 1}], schema=PARENT)

        with ThreadPoolExecutor(1) as thread:
            written = thread.submit(writer.write, rows)
            assert not written.done()
            for other in others:
                other.close()
            written.result(timeout=20)

        assert writer.finish().tally.rows == 1
        pool().close_all()


def test_a_record_that_names_a_foreign_table_drops_nothing(url, database):
    sink, of = PostgresSink(url, "entries"), txn()
    sink.fence(of.scope, 1)
    database.execute("CREATE TABLE semel.stg_precious (id bigint)")
    forged = ("sink_fence", "stg_precious", 'stg_precious", "sink_fence')
    for number, name in enumerate(forged):
        database.execute(
            "INSERT INTO semel.sink_staged VALUES (%s, 'postgres', 1, %s, %s, %s, %s, 1, 1)",
            [of.scope.slug, of.cycle.batch, of.attempt, f"task-{number}", name],
        )

    assert isinstance(sink.abort(of, None), SinkOK)
    sink.sweep(of.scope, lambda found: True)

    left = "SELECT count(*) FROM pg_tables WHERE schemaname = 'semel' AND tablename = ANY (%s)"
    assert database.execute(left, [["sink_fence", "stg_precious"]]).fetchone() == (2,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", '"public"."precious"'),
        ("columns", [["id", "bigint); DROP TABLE precious; --"], ["amount", ""], ["note", ""]]),
        ("columns", 5),
        ("columns", [["id"]]),
        ("write", "ignore"),
        ("pieces", "of other tables"),
    ],
)
@pytest.mark.parametrize("is_held", [True, False])
def test_a_token_that_was_changed_in_the_ledger_writes_nothing(
    url, database, field, value, is_held
):
    database.execute("CREATE TABLE precious (id bigint, amount numeric, note text)")
    sink, of = PostgresSink(url, "entries"), txn()
    sink.fence(of.scope, 1)
    token = prepared(sink, of, [row(1)])
    if not is_held:
        pool().close_all()
        sink = PostgresSink(url, "entries")
        sink.fence(of.scope, 2)

    outcome = sink.commit(of, {**token, field: value})

    assert isinstance(outcome, SinkFatal)
    assert rows_of(database, "SELECT * FROM precious") == rows_of(database) == []
    assert isinstance(sink.commit(of, token), SinkOK)
    assert len(rows_of(database)) == 1


def test_a_setting_that_was_changed_while_a_cycle_is_open_is_refused_and_named(url, database):
    of = txn()
    token = prepared(PostgresSink(url, "entries"), of, [row(1)])
    pool().close_all()

    outcome = PostgresSink(url, "entries", key=["id"]).commit(of, token)

    assert isinstance(outcome, SinkFatal)
    assert "in write, key" in outcome.reason
    assert isinstance(PostgresSink(url, "entries").commit(of, token), SinkOK)
