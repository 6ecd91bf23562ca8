"""Writes by key, and overwrites of partitions: what they replace, and what a crash leaves."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal

import pyarrow as pa
import pytest
from pyiceberg.transforms import BucketTransform, DayTransform, IdentityTransform

from semel import crashpoints
from semel.crashpoints import CrashPoint
from semel.errors import Misuse, Permanent
from semel.pipeline.sink import Found, SinkFatal, SinkOK
from semel.sinks import IcebergSink
from semel.testing.services import SeaweedServer
from tests.unit.iceberg.iceberg_place import SCOPE, committed, prepared, rows, stage, txn
from tests.unit.iceberg.test_iceberg_commits import Overtaken, expire_all


class Crash(BaseException):
    """The end of a process."""


def texts(lake):
    return {row["id"]: row["text"] for row in lake.table().scan().to_arrow().to_pylist()}


def changed(*ids, text="new"):
    return pa.RecordBatch.from_pylist([{"id": n, "text": text} for n in ids])


def files_on_disk(lake):
    return {str(path) for path in (lake.folder / "lake").rglob("*.parquet")}


def files_in_table(lake):
    found = lake.table().inspect.files()["file_path"].to_pylist()
    return {path.removeprefix("file://") for path in found}


def test_an_upsert_replaces_the_rows_of_its_keys_and_adds_the_others(plain):
    sink = plain.sink(key="id")
    sink.check(rows(1).schema)
    committed(sink, txn(0), rows(1, 2, 3))

    committed(sink, txn(1), changed(2, 9))

    assert texts(plain) == {1: "row 1", 2: "new", 3: "row 3", 9: "new"}
    assert len(plain.table().metadata.snapshots) == 2
    assert plain.table().current_snapshot().summary["semel.cycle"] == "payments/main/g1.b1"


def test_an_upsert_rewrites_only_the_files_that_have_its_keys(plain):
    sink = plain.sink(key="id")
    committed(sink, txn(0), rows(1, 2))
    committed(sink, txn(1), rows(11, 12))
    (kept,) = [path for path in files_in_table(plain) if "b1." in path]

    committed(sink, txn(2), changed(1, 2))

    assert kept in files_in_table(plain)
    assert len(files_in_table(plain)) == 2
    assert texts(plain) == {1: "new", 2: "new", 11: "row 11", 12: "row 12"}


def test_a_delete_column_deletes_its_keys_and_is_not_stored(plain):
    sink = plain.sink(key=["id"], delete_column="gone")
    changes = pa.RecordBatch.from_pylist(
        [
            {"id": 1, "text": "ignored", "gone": True},
            {"id": 2, "text": "new", "gone": False},
            {"id": 3, "text": "new", "gone": None},
            {"id": 77, "text": None, "gone": True},
        ]
    )
    sink.check(changes.schema)
    plain.table().append(pa.Table.from_batches([rows(1, 2, 4)]))

    committed(sink, txn(), changes)

    assert texts(plain) == {2: "new", 3: "new", 4: "row 4"}


@pytest.mark.parametrize(
    ("options", "replaces"), [({}, False), ({"key": "id"}, True), ({"write": "overwrite"}, True)]
)
def test_the_order_of_cycles_matters_where_rows_are_replaced(plain, options, replaces):
    assert plain.sink(**options).replaces_rows is replaces


def test_a_delete_takes_keys_and_leaves_all_other_rows(plain):
    sink = plain.sink(write="delete", key="id")
    keys = pa.RecordBatch.from_pydict({"id": [2, 3, 50]})
    sink.check(keys.schema)
    plain.table().append(pa.Table.from_batches([rows(1, 2)]))
    plain.table().append(pa.Table.from_batches([rows(3)]))

    token = committed(sink, txn(), keys)

    assert texts(plain) == {1: "row 1"}
    assert sink.visible_tally(txn().cycle, token) is None


@pytest.mark.parametrize(
    "options", [{"write": "delete", "key": "id"}, {"key": "id", "delete_column": "gone"}]
)
def test_a_task_that_only_deletes_writes_its_keys_as_they_come(plain, options):
    sink = plain.sink(file_bytes=1000, **options)
    whole = pa.RecordBatch.from_pydict({"id": range(200), "gone": [True] * 200})
    batch = whole if "delete_column" in options else whole.select(["id"])

    receipt = stage(sink, txn(), *[batch] * 4)

    assert len(receipt.detail["keys"]) == 4
    assert receipt.detail["files"] == []


def test_deletes_and_upserts_of_an_empty_table_and_without_rows_are_snapshots(plain):
    committed(plain.sink(write="delete", key="id"), txn(0), changed(1).select(["id"]))
    committed(plain.sink(key="id"), txn(1))
    committed(plain.sink(key="id"), txn(2), changed(1))

    assert texts(plain) == {1: "new"}
    assert len(plain.table().metadata.snapshots) == 3


NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
KEYS = {
    "number": (pa.int32(), lambda n: n),
    "text": (pa.string(), lambda n: f"é {n}"),
    "day": (pa.date32(), lambda n: dt.date(2026, 1, 1) + dt.timedelta(n)),
    "at": (pa.timestamp("us", "UTC"), lambda n: NOON + dt.timedelta(hours=n)),
    "amount": (pa.decimal128(12, 2), lambda n: Decimal(n) / 4),
    "raw": (pa.binary(), lambda n: n.to_bytes(2)),
}


@pytest.mark.parametrize("column", KEYS)
def test_keys_of_many_types_find_their_rows_few_or_many(lake, column):
    kind, value = KEYS[column]
    lake.create((column, kind), ("n", pa.int64()))
    sink = lake.sink(key=column)

    def batch(ids, n):
        schema = pa.schema([(column, kind), ("n", pa.int64())])
        return pa.RecordBatch.from_pylist([{column: value(i), "n": n} for i in ids], schema=schema)

    committed(sink, txn(0), batch(range(302), 0))
    committed(sink, txn(1), batch(range(300), 1))
    committed(sink, txn(2), batch(range(3), 2))

    found = lake.table().scan().to_arrow()["n"].to_pylist()
    assert sorted(found) == [0] * 2 + [1] * 297 + [2] * 3


def test_a_key_of_several_columns_is_matched_as_a_whole(lake):
    lake.create(("a", pa.int64()), ("b", pa.string()), ("n", pa.int64()))
    sink = lake.sink(key=["a", "b"])

    def batch(n, *keys):
        return pa.RecordBatch.from_pylist([{"a": a, "b": b, "n": n} for a, b in keys])

    committed(sink, txn(0), batch(0, (1, "x"), (1, "y"), (2, "x"), (2, "y")))
    committed(sink, txn(1), batch(1, (1, "y"), (2, "x")))

    found = {(r["a"], r["b"]): r["n"] for r in lake.table().scan().to_arrow().to_pylist()}
    assert found == {(1, "x"): 0, (1, "y"): 1, (2, "x"): 1, (2, "y"): 0}


def test_an_upsert_into_a_partitioned_table_moves_a_row_to_its_new_partition(lake):
    table = lake.create(("id", pa.int64()), ("text", pa.string()))
    with table.update_spec() as change:
        change.add_field("id", BucketTransform(3), "id_bucket")
        change.add_field("text", IdentityTransform())
    sink = lake.sink(key="id")

    committed(sink, txn(0), rows(*range(20)))
    committed(sink, txn(1), changed(*range(5, 30)))

    assert texts(lake) == {n: f"row {n}" if n < 5 else "new" for n in range(30)}


def test_rows_of_tables_that_were_partitioned_anew_are_found(plain):
    sink = plain.sink(key="id")
    committed(sink, txn(0), rows(1, 2))
    token = prepared(sink, one := txn(1), changed(2, 3))
    with plain.table().update_spec() as change:
        change.add_field("id", BucketTransform(3), "id_bucket")

    assert sink.commit(one, token) == SinkOK()
    committed(sink, txn(2), changed(1, text="newest"))

    assert texts(plain) == {1: "newest", 2: "new", 3: "new"}


def test_a_key_that_comes_twice_in_a_batch_fails_before_the_decision_and_is_named(plain):
    sink, one = plain.sink(key="id"), txn()
    receipts = [stage(sink, one, rows(1, 2)), stage(sink, one, changed(2))]

    outcome = sink.prepare(one, receipts)

    assert isinstance(outcome, SinkFatal)
    assert "{'id': 2} comes twice" in outcome.reason


def test_a_row_without_a_key_stops_its_task(plain):
    nameless = pa.RecordBatch.from_pylist([{"id": None, "text": "x"}], schema=rows(1).schema)

    with pytest.raises(Permanent, match="id is a part of the key"):
        stage(plain.sink(key="id"), txn(), nameless)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"write": "upsert"}, "key"),
        ({"write": "append", "key": ["id"]}, "key"),
        ({"write": "replace"}, "append, upsert, delete, overwrite"),
        ({"delete_column": "gone"}, "delete_column"),
        ({"write": "delete", "key": ["id"], "delete_column": "gone"}, "delete_column"),
    ],
)
def test_wrong_writes_are_refused_at_once(options, reason):
    with pytest.raises(Misuse, match=reason):
        IcebergSink("db.rows", **options)


def test_rows_that_do_not_fit_a_write_are_refused_before_the_first_batch(lake):
    lake.create(("id", pa.int64()), ("text", pa.string()), ("ratio", pa.float64()))
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("ratio", pa.float64())])
    for options, reason in [
        ({"key": "nope"}, "no column nope"),
        ({"key": "ratio"}, "cannot be a part of a key"),
        ({"key": "id", "write": "delete"}, "struct"),
        ({"key": "id", "delete_column": "text"}, "not a boolean"),
        ({"write": "overwrite"}, "no partitions"),
    ]:
        with pytest.raises(Permanent, match=reason):
            lake.sink(**options).check(schema)


def test_two_recoverers_of_an_upsert_write_its_rows_once(plain):
    slow, fast, one = plain.sink(Overtaken, key="id"), plain.sink(key="id"), txn(1)
    committed(fast, txn(0), rows(1, 2, 3))
    token = prepared(slow, one, changed(2))
    slow.overtake = lambda: fast.commit(one, token)

    assert slow.commit(one, token) == SinkOK()

    assert texts(plain) == {1: "row 1", 2: "new", 3: "row 3"}
    assert len(plain.table().metadata.snapshots) == 2


def test_rows_that_a_foreign_writer_adds_meanwhile_are_replaced_too(plain):
    sink = plain.sink(Overtaken, key="id")
    token = prepared(sink, one := txn(), changed(1, 2))
    foreign = pa.Table.from_batches([rows(2, 3)])
    sink.overtake = lambda: plain.table().append(foreign)

    assert sink.commit(one, token) == SinkOK()

    assert texts(plain) == {1: "new", 2: "new", 3: "row 3"}


WINDOWS = [
    CrashPoint.TABLE_PREPARE_RECORDED,
    CrashPoint.TABLE_COMMIT_REWRITTEN,
    CrashPoint.TABLE_COMMIT_SENT,
]


@pytest.mark.parametrize("point", WINDOWS)
def test_an_upsert_that_died_half_way_is_finished_and_leaves_no_file_that_no_table_uses(
    plain, point
):
    sink, one = plain.sink(key="id"), txn(1)
    committed(sink, txn(0), rows(1, 2, 3))
    receipts = [stage(sink, one, changed(2))]

    def crash(reached, name):
        if reached is point:
            raise Crash

    before = crashpoints.install(crash)
    try:
        with pytest.raises(Crash):
            sink.commit(one, sink.prepare(one, receipts).token)
    finally:
        crashpoints.install(before)

    successor = plain.sink(key="id")
    token = successor.prepare(one, receipts).token
    assert successor.commit(one, token) == SinkOK()
    successor.sweep(SCOPE, lambda _: False)

    assert texts(plain) == {1: "row 1", 2: "new", 3: "row 3"}
    expire_all(plain)
    # The first cycle's file left the table with its rows, and older snapshots had it.
    assert {path for path in files_on_disk(plain) - files_in_table(plain) if "b1." in path} == set()


def test_what_a_rewrite_left_goes_with_its_abort(plain):
    sink, one = plain.sink(key="id"), txn(1)
    committed(sink, txn(0), rows(1, 2))
    token = prepared(sink, one, changed(2))
    before = crashpoints.install(lambda point, name: (_ for _ in ()).throw(Crash()))
    try:
        with pytest.raises(Crash):
            sink.commit(one, token)
    finally:
        crashpoints.install(before)
    assert len(files_on_disk(plain)) == 4

    assert sink.abort(one, token) == SinkOK()

    assert files_on_disk(plain) == files_in_table(plain)
    assert sink.look_up(one, token).found is Found.GONE
    assert texts(plain) == {1: "row 1", 2: "row 2"}


def test_older_snapshots_keep_the_files_that_later_upserts_replaced(plain):
    sink = plain.sink(key="id")
    for batch in range(4):
        committed(sink, txn(batch), changed(1, batch + 10, text=f"batch {batch}"))
        sink.sweep(SCOPE, lambda _: False)

    history = [
        sorted(plain.table().scan(snapshot_id=one.snapshot_id).to_arrow()["id"].to_pylist())
        for one in plain.table().metadata.snapshots
    ]

    assert history == [[1, *range(10, 11 + batch)] for batch in range(4)]


DAYS = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", "UTC")), ("to", pa.string())])


def days(first, *numbers):
    return pa.RecordBatch.from_pylist(
        [
            {"id": first + n, "at": NOON + dt.timedelta(days=day), "to": to}
            for n, (day, to) in enumerate(numbers)
        ],
        schema=DAYS,
    )


@pytest.fixture
def by_day(lake):
    table = lake.create(*DAYS)
    with table.update_spec() as change:
        change.add_field("at", DayTransform(), "at_day")
        change.add_field("to", IdentityTransform())
    return lake


def test_an_overwrite_replaces_the_partitions_that_have_rows_and_no_others(by_day):
    sink = by_day.sink(write="overwrite")
    sink.check(DAYS)
    first = committed(sink, txn(0), days(0, (1, "a"), (1, None), (1, "b"), (2, "a"), (1, "a")))
    assert sink.visible_tally(txn(0).cycle, first).rows == 5

    committed(sink, txn(1), days(10, (1, "a"), (1, None), (3, "a")))

    assert by_day.ids() == [2, 3, 10, 11, 12]
    assert sink.visible_tally(txn(0).cycle, first) is None
    committed(sink, txn(2))
    assert by_day.ids() == [2, 3, 10, 11, 12]


def test_an_overwrite_replaces_what_a_foreign_writer_adds_meanwhile(by_day):
    sink = by_day.sink(Overtaken, write="overwrite")
    token = prepared(sink, one := txn(), days(10, (1, "a")))
    foreign = pa.Table.from_batches([days(0, (1, "a"), (2, "a"))])
    sink.overtake = lambda: by_day.table().append(foreign)

    assert sink.commit(one, token) == SinkOK()

    assert by_day.ids() == [1, 10]


def test_an_overwrite_of_files_that_were_partitioned_otherwise_is_refused_in_prepare(by_day):
    committed(by_day.sink(), txn(0), days(0, (1, "a")))
    with by_day.table().update_spec() as change:
        change.remove_field("to")
    sink = by_day.sink(write="overwrite")

    outcome = sink.prepare(one := txn(1), [stage(sink, one, days(1, (1, "a")))])

    assert isinstance(outcome, SinkFatal)
    assert "earlier partitioning" in outcome.reason
    assert by_day.ids() == [0]


@pytest.mark.seaweedfs
def test_an_upsert_on_s3_by_a_rest_catalog(seaweedfs: SeaweedServer):
    from pyiceberg.catalog import load_catalog

    properties = seaweedfs.catalog_properties()
    lake, table = load_catalog("lake", **properties), "db.upserts"
    lake.create_namespace_if_not_exists("db")
    lake.create_table(table, schema=rows(1).schema)
    sink = IcebergSink(table, catalog="lake", properties=properties, key="id")

    committed(sink, txn(0), rows(1, 2, 3))
    committed(sink, txn(1), changed(2, 4))
    sink.sweep(SCOPE, lambda _: False)

    found = lake.load_table(table).scan().to_arrow().to_pylist()
    assert {row["id"]: row["text"] for row in found} == {1: "row 1", 2: "new", 3: "row 3", 4: "new"}
    sink.close()
