"""What an Iceberg table asks of rows: columns, partitions, types; and who can read it."""

from __future__ import annotations

import datetime as dt
import json
import random
from contextlib import closing
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    TruncateTransform,
)

from semel.errors import Misuse, Permanent, Retryable
from semel.pipeline.sink import SinkFatal, SinkOK, Tally
from semel.sinks import IcebergSink
from tests.unit.iceberg.iceberg_place import SCOPE, committed, prepared, rows, stage, txn

EVENTS = pa.schema(
    [
        ("id", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("name", pa.string()),
        ("amount", pa.decimal128(12, 2)),
        ("raw", pa.binary()),
    ]
)
NOON = dt.datetime(2026, 1, 31, 12, 30, tzinfo=dt.UTC)


def events(count=40, zone="UTC"):
    found = [
        {
            "id": n,
            "at": NOON + dt.timedelta(hours=7 * n),
            "day": dt.date(2026, 1, 1) + dt.timedelta(days=n % 3),
            "name": None if n % 9 == 0 else f"name {n % 5}",
            "amount": Decimal(n) / 4,
            "raw": bytes([n]),
        }
        for n in range(count)
    ]
    schema = EVENTS.set(1, pa.field("at", pa.timestamp("us", zone)))
    return pa.RecordBatch.from_pylist(found, schema=schema)


@pytest.mark.parametrize(
    ("column", "transform", "partitions"),
    [
        ("name", IdentityTransform(), 6),
        ("day", IdentityTransform(), 3),
        ("amount", IdentityTransform(), 40),
        ("raw", IdentityTransform(), 40),
        ("id", BucketTransform(4), 4),
        ("name", TruncateTransform(4), 2),
        ("at", DayTransform(), 12),
        ("at", HourTransform(), 40),
    ],
    ids=str,
)
def test_rows_go_into_the_partitions_of_the_table(lake, column, transform, partitions):
    with lake.create(*EVENTS).update_spec() as change:
        change.add_field(column, transform, "part")
    sink, one = lake.sink(), txn()

    token = committed(sink, one, events())

    table = lake.table()
    assert table.scan().to_arrow().sort_by("id").to_pylist() == events().to_pylist()
    assert len(table.inspect.partitions()) == partitions
    assert table.scan("id = 7").to_arrow()["id"].to_pylist() == [7]
    assert sink.visible_tally(one.cycle, token) == Tally(token["rows"], token["hash"])


def test_a_table_that_is_partitioned_anew_after_prepare_gets_the_prepared_files(lake):
    lake.create(*EVENTS)
    sink, first, second = lake.sink(), txn(0), txn(1)
    token = prepared(sink, first, events(3))
    with lake.table().update_spec() as change:
        change.add_identity("name")

    assert sink.commit(first, token) == SinkOK()

    committed(sink, second, events(3))
    assert lake.ids() == [0, 0, 1, 1, 2, 2]
    assert lake.table().scan("name = 'name 1'").to_arrow()["id"].to_pylist() == [1, 1]
    assert not lake.table().spec().is_unpartitioned()


def test_statistics_let_readers_skip_files(plain):
    sink = plain.sink()
    committed(sink, txn(0), rows(1, 2))
    committed(sink, txn(1), rows(10, 11))

    assert len(list(plain.table().scan("id > 5").plan_files())) == 1


def test_a_task_writes_a_file_whenever_it_has_collected_enough(plain):
    sink, one = plain.sink(file_bytes=80), txn()

    receipt = stage(sink, one, rows(1, 2, 3, 4, 5), rows(6, 7, 8, 9, 10), rows(11))

    assert len(receipt.detail["files"]) == 3


def test_times_of_a_session_in_another_zone_are_the_same_instants(lake):
    lake.create(*EVENTS)
    sink, one = lake.sink(), txn()
    sink.check(events(1, "Asia/Tokyo").schema)

    token = committed(sink, one, events(3, "Asia/Tokyo"))

    assert lake.table().scan().to_arrow()["at"].to_pylist()[0] == NOON
    assert sink.visible_tally(one.cycle, token) == Tally(token["rows"], token["hash"])


@pytest.mark.parametrize("partitioned", [False, True])
def test_the_size_of_a_file_is_that_of_its_bytes_and_not_of_its_rows_in_memory(lake, partitioned):
    with lake.create(("n", pa.int64()), ("raw", pa.binary())).update_spec() as change:
        if partitioned:
            change.add_field("n", IdentityTransform(), "part")
    sink = lake.sink(file_bytes=50_000)

    def files(raw):
        batches = [{"n": [0] * 40, "raw": [raw(250) for _ in range(40)]} for _ in range(30)]
        return stage(sink, txn(), *map(pa.RecordBatch.from_pydict, batches)).detail["files"]

    (small,), large = files(bytes), files(random.Random(1).randbytes)

    assert (small["record_count"], small["size"] < 50_000) == (1200, True)
    assert len(large) > 2
    assert all(50_000 <= file["size"] < 110_000 for file in large[:-1])


def nested(zone):
    at = pa.timestamp("us", zone)
    return pa.struct([("at", at), ("all", pa.list_(at)), ("by", pa.map_(pa.string(), at))])


def test_times_inside_of_other_values_are_the_same_instants_in_utc(lake):
    lake.create(("id", pa.int64()), ("s", nested("UTC")))
    sink, one = lake.sink(), txn()
    value = {"at": NOON, "all": [NOON, None], "by": [("x", NOON)]}
    batch = pa.RecordBatch.from_pylist(
        [{"id": 1, "s": value}, {"id": 2, "s": None}],
        schema=pa.schema([("id", pa.int64()), ("s", nested("Asia/Tokyo"))]),
    )
    sink.check(batch.schema)

    token = committed(sink, one, batch)

    assert lake.table().scan().to_arrow()["s"].to_pylist() == [value, None]
    assert sink.visible_tally(one.cycle, token) == Tally(token["rows"], token["hash"])


def test_a_table_of_a_format_that_pyiceberg_does_not_write_is_refused(plain):
    sink = plain.sink()
    sink.check(rows(1).schema)
    metadata = Path(plain.table().metadata_location.removeprefix("file://"))
    content = json.loads(metadata.read_text()) | {"format-version": 3, "next-row-id": 0}
    metadata.write_text(json.dumps(content))

    with pytest.raises(Permanent, match=r"format version 3.* format-version=2"):
        sink.check(rows(1).schema)
    with pytest.raises(Permanent, match="format version 3"):
        sink.stager(txn())


def test_a_type_that_iceberg_does_not_have_is_refused_before_the_first_batch(plain):
    for name in ("text", "new"):
        columns = pa.schema([("id", pa.int64()), (name, pa.month_day_nano_interval())])
        with pytest.raises(Permanent, match="do not fit the table"):
            plain.sink(evolve="add-columns").check(columns)


def test_columns_that_the_table_lacks_are_refused_before_the_first_batch(plain):
    more = rows(1).append_column("more", pa.array(["x"]))

    with pytest.raises(Permanent, match="more"):
        plain.sink().check(more.schema)
    with pytest.raises(Permanent, match="id"):
        plain.sink().check(pa.schema([("id", pa.string()), ("text", pa.string())]))


def test_columns_are_added_where_that_is_asked_for(plain):
    sink = plain.sink(evolve="add-columns")
    committed(sink, txn(0), rows(1))
    more = rows(2).append_column("more", pa.array(["x"]))
    more = more.append_column("at", pa.array([NOON], pa.timestamp("us", "Asia/Tokyo")))

    sink.check(more.schema)
    sink.check(more.schema)
    committed(sink, txn(1), more)

    assert plain.table().scan().to_arrow().sort_by("id")["more"].to_pylist() == [None, "x"]


def test_required_columns_take_rows_without_nulls_and_refuse_the_others(lake):
    lake.create(pa.field("id", pa.int64(), nullable=False), pa.field("text", pa.string()))
    sink, one = lake.sink(), txn()
    sink.check(rows(1).schema)
    committed(sink, one, rows(1))

    nothing = pa.RecordBatch.from_pylist([{"id": None, "text": "x"}], schema=rows(1).schema)
    with pytest.raises(Permanent, match="id is required"):
        stage(sink, txn(1), nothing)

    assert lake.ids() == [1]


def test_a_table_that_does_not_exist_is_named_with_what_creates_it(lake):
    with pytest.raises(Permanent, match="create_table"):
        lake.sink().check(None)


@pytest.mark.parametrize(
    "properties",
    [
        {"type": "sql"},
        {"type": "rset", "uri": "http://x"},
        {"type": "rest", "uri": "localhost:1"},
        {"type": "sql", "uri": "nope://x"},
    ],
)
def test_a_catalog_that_is_set_up_wrongly_is_no_outage(properties):
    with pytest.raises(Misuse, match=r"iceberg sink iceberg: catalog default"):
        IcebergSink("db.rows", properties=properties).check(None)


def test_a_catalog_that_does_not_answer_is_an_outage():
    where = {"type": "rest", "uri": "http://127.0.0.1:9"}
    with pytest.raises(Retryable, match="does not answer"):
        IcebergSink("db.rows", properties=where).check(None)


def test_a_place_is_told_without_the_catalogs_password():
    uri = "postgresql://semel:hunter2@db/catalog"
    sink = IcebergSink("db.rows", properties={"uri": uri, "s3.secret-access-key": "hunter2"})

    assert "hunter2" not in sink.place + repr(sink)
    assert sink.place != IcebergSink("db.rows", properties={"uri": "postgresql://x/y"}).place


def test_an_old_epoch_is_fenced_even_if_its_table_was_loaded_before(plain):
    old, new = plain.sink(epoch=1), plain.sink(epoch=2)
    one = txn()

    outcome = old.prepare(one, [stage(old, one, rows(1))])

    assert "fenced" in outcome.reason
    assert new.recover(SCOPE) == []


@pytest.fixture
def chdb():
    return pytest.importorskip("chdb", reason="pip install chdb (180 MB): ClickHouse in process")


def test_a_reader_of_another_lineage_finds_the_rows(plain, monkeypatch, chdb):
    sink = plain.sink(key="id")
    for batch in range(3):
        committed(sink, txn(batch), rows(2 * batch, 2 * batch + 1))
    committed(sink, txn(3), pa.RecordBatch.from_pydict({"id": [2, 5], "text": ["z", "z"]}))

    monkeypatch.chdir(plain.folder)  # chDB reads below the working folder only
    found = chdb.query("SELECT id, text FROM icebergLocal('lake/db/rows') ORDER BY id")

    assert str(found).split() == [
        *('0,"row', '0"', '1,"row', '1"', '2,"z"', '3,"row', '3"', '4,"row', '4"', '5,"z"')
    ]


@pytest.mark.seaweedfs
def test_a_reader_of_another_lineage_finds_the_rows_on_s3(seaweedfs, chdb):
    where, name = seaweedfs.catalog_properties(), "db.seen_by_others"
    with closing(load_catalog("lake", **where)) as lake:
        lake.create_namespace_if_not_exists("db")
        place = lake.create_table(name, schema=rows(1).schema).location().removeprefix("s3://")
    with closing(IcebergSink(name, catalog="lake", properties=where)) as sink:
        for batch in range(3):
            committed(sink, txn(batch), rows(2 * batch, 2 * batch + 1))

    url = f"'{seaweedfs.endpoint}/{place}/', '{seaweedfs.access_key}', '{seaweedfs.secret_key}'"
    found = chdb.query(f"SELECT count(), sum(id), max(text) FROM icebergS3({url})")

    assert str(found).strip() == '6,15,"row 5"'


def test_a_cycle_is_undone_after_the_table_was_partitioned_anew(lake):
    lake.create(("id", pa.int64()), ("text", pa.string()))
    sink, one, two = lake.sink(), txn(0), txn(1)
    token = committed(sink, one, rows(1, 2))
    with lake.table().update_spec() as change:
        change.add_identity("text")
    committed(sink, two, rows(3))
    lake.table().append(pa.Table.from_batches([rows(4)]))

    assert sink.check_undo(one, token) == ""
    assert sink.undo(one, token) == SinkOK()

    assert lake.ids() == [3, 4]
    assert sink.visible_tally(one.cycle, token) == Tally()


def test_a_cycle_of_which_rows_were_deleted_is_not_undone(lake):
    lake.create(("id", pa.int64()), ("text", pa.string()))
    sink, one = lake.sink(), txn(0)
    token = committed(sink, one, rows(1, 2))
    lake.table().delete("id = 1")

    assert "rewritten since" in sink.check_undo(one, token)
    assert isinstance(sink.undo(one, token), SinkFatal)
    assert lake.ids() == [2]


def test_an_upsert_is_not_undone_whatever_the_sink_is_set_to_now(lake):
    lake.create(("id", pa.int64()), ("text", pa.string()))
    committed(lake.sink(), txn(0), rows(1, 2))
    sink, one = lake.sink(key="id"), txn(1)
    token = committed(sink, one, rows(2))

    assert "replaces rows" in sink.check_undo(one, token)
    assert "rewritten since" in lake.sink().check_undo(one, token)
