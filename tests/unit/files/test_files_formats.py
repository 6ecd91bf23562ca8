"""Every type, written and read back exactly; large tasks in small memory."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import tempfile
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from semel.arrow import formats
from semel.arrow.formats import Format
from semel.arrow.rowfiles import CountedFile, RowFiles, hive_folder, split
from semel.errors import Permanent
from semel.files.sink import FilesSink
from semel.pipeline.sink import SinkOK, tally_of
from semel.pipeline.txn import CycleId, Scope
from tests.unit.pipeline.test_tally import ROWS, SCHEMA

SCOPE = Scope("ledger", "payments", "main")


def write(sink, batches, task="task"):
    txn = CycleId(SCOPE, 1, 0).attempt()
    writer = sink.stager(txn).open(task)
    for batch in batches:
        writer.write(batch)
    receipts = [writer.finish()]
    outcome = sink.prepare(txn, receipts)
    assert isinstance(outcome, SinkOK), outcome
    assert isinstance(sink.commit(txn, outcome.token), SinkOK)
    return txn, outcome.token, receipts


@pytest.mark.parametrize(
    ("format", "compression"),
    [("parquet", None), ("parquet", "zstd"), ("jsonl", None), ("jsonl", "gzip"), ("jsonl", "zstd")],
)
@settings(max_examples=10, deadline=None)
@given(rows=ROWS)
def test_visible_rows_tally_with_what_was_staged(format, compression, rows):
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA)
    with tempfile.TemporaryDirectory() as folder:
        sink = FilesSink(folder, format=format, compression=compression)
        sink.check(batch.schema)

        txn, token, receipts = write(sink, [batch])

        assert sink.visible_tally(txn.cycle, json.loads(json.dumps(token))) == tally_of(receipts)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_changed_row_no_longer_tallies(format, tmp_path):
    sink = FilesSink(tmp_path, format=format)
    txn, token, receipts = write(sink, [pa.RecordBatch.from_pydict({"id": [1, 2]})])
    other = FilesSink(tmp_path / "other", format=format)
    write(other, [pa.RecordBatch.from_pydict({"id": [1, 3]})])
    (theirs,) = Path(other.path).glob("cycle=*/part-*")
    (ours,) = Path(sink.path).glob("cycle=*/part-*")

    ours.write_bytes(theirs.read_bytes())

    assert sink.visible_tally(txn.cycle, token) != tally_of(receipts)


def test_json_lines_are_written_as_documented(tmp_path):
    at = dt.datetime(2026, 1, 31, 12, 30, 0, 1, tzinfo=dt.UTC)
    schema = pa.schema(
        [
            ("amount", pa.decimal128(9, 2)),
            ("day", pa.date32()),
            ("zoned", pa.timestamp("us", "Europe/Berlin")),
            ("naive", pa.timestamp("ms")),
            ("took", pa.duration("ms")),
            ("raw", pa.binary()),
            ("ratio", pa.float64()),
            ("tags", pa.list_(pa.decimal128(9, 2))),
            ("more", pa.struct([("day", pa.date32()), ("n", pa.int8())])),
            ("by", pa.map_(pa.string(), pa.float32())),
            ("missing", pa.string()),
        ]
    )
    row = {
        "amount": Decimal("1.50"),
        "day": dt.date(2026, 1, 31),
        "zoned": at,
        "naive": dt.datetime.fromisoformat("2026-01-31T12:30:00"),
        "took": dt.timedelta(seconds=1.5),
        "raw": b"\x00\x01\x02",
        "ratio": float("-inf"),
        "tags": [Decimal("0.10"), None],
        "more": {"day": dt.date(2026, 1, 1), "n": 1},
        "by": [("a", 0.5), ("b", None)],
        "missing": None,
    }
    batch = pa.RecordBatch.from_pylist([row], schema=schema)

    (line,) = formats.encode_lines(batch)

    assert json.loads(line) == {
        "amount": "1.50",
        "day": "2026-01-31",
        "zoned": "2026-01-31T12:30:00.000001Z",
        "naive": "2026-01-31T12:30:00",
        "took": 1500,
        "raw": "AAEC",
        "ratio": "-Infinity",
        "tags": ["0.10", None],
        "more": {"day": "2026-01-01", "n": 1},
        "by": {"a": 0.5, "b": None},
        "missing": None,
    }
    assert list(formats.decode_lines([line], schema)) == [batch]


@pytest.mark.parametrize(
    ("format", "kind", "advice"),
    [
        ("jsonl", pa.timestamp("ns"), "microseconds"),
        ("jsonl", pa.map_(pa.int32(), pa.int32()), "keys"),
        ("jsonl", pa.month_day_nano_interval(), "parquet"),
        ("jsonl", pa.list_(pa.time64("ns")), "microseconds"),
        ("parquet", pa.month_day_nano_interval(), "parquet"),
        ("parquet", pa.dense_union([pa.field("a", pa.int8())]), "parquet"),
    ],
)
def test_a_type_without_an_exact_form_is_found_before_the_first_batch(
    format, kind, advice, tmp_path
):
    schema = pa.schema([("good", pa.int64()), ("bad", kind)])

    with pytest.raises(Permanent, match=f"(?s)bad: .*{advice}") as refused:
        FilesSink(tmp_path, format=format).check(schema)

    assert "good" not in str(refused.value)


@pytest.mark.parametrize(
    ("arrow", "storage", "number"),
    [
        (pa.timestamp("us"), pa.int64(), 3_000_000 * 86_400_000_000),
        (pa.timestamp("s", "UTC"), pa.int64(), -800_000 * 86_400),
        (pa.date32(), pa.int32(), 3_000_000),
        (pa.duration("s"), pa.int64(), 10**15),
    ],
    ids=str,
)
def test_a_moment_that_json_lines_cannot_keep_is_refused_by_the_name_of_its_column(
    arrow, storage, number, tmp_path
):
    moments = pa.array([number], storage).view(arrow)
    batch = pa.RecordBatch.from_arrays([pa.array([1]), moments], ["id", "at"])
    writer = FilesSink(tmp_path, format="jsonl").stager(CycleId(SCOPE, 1, 0).attempt()).open("task")

    with pytest.raises(Permanent, match=r"column at .*write parquet"):
        writer.write(batch)

    writer.discard()
    write(FilesSink(tmp_path / "parquet"), [batch])


def test_two_columns_of_one_name_are_refused(tmp_path):
    schema = pa.schema([("a", pa.int64()), ("a", pa.int64())])

    with pytest.raises(Permanent, match="same name"):
        FilesSink(tmp_path).check(schema)


@pytest.mark.parametrize("name", ["cycle", "Cycle"])
def test_a_column_that_the_folders_names_would_hide_is_refused(name, tmp_path):
    with pytest.raises(Permanent, match="readers get a column of this name"):
        FilesSink(tmp_path).check(pa.schema([("id", pa.int64()), (name, pa.string())]))


def test_small_batches_come_together_in_one_row_group(tmp_path):
    batches = [pa.RecordBatch.from_pydict({"id": [number]}) for number in range(50)]

    write(FilesSink(tmp_path), batches)

    (file,) = tmp_path.glob("cycle=*/part-*")
    assert pq.ParquetFile(file).num_row_groups == 1


def test_row_groups_are_flushed_while_the_task_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_ROW_GROUP_ROWS", 100)
    batches = [pa.RecordBatch.from_pydict({"id": list(range(50))}) for _ in range(10)]

    write(FilesSink(tmp_path), batches)

    (file,) = tmp_path.glob("cycle=*/part-*")
    assert pq.ParquetFile(file).num_row_groups == 5


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_a_large_task_writes_several_files(format, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_ROW_GROUP_ROWS", 1000)
    sink = FilesSink(tmp_path, format=format, file_bytes=4000)
    batches = [
        pa.RecordBatch.from_pydict({"id": list(range(start, start + 1000))})
        for start in range(0, 10_000, 1000)
    ]

    txn, token, receipts = write(sink, batches)

    assert len(list(tmp_path.glob("cycle=*/part-*"))) > 2
    assert sink.visible_tally(txn.cycle, token) == tally_of(receipts)


def test_memory_of_a_task_does_not_grow_with_its_rows(tmp_path):
    sink = FilesSink(tmp_path)
    batch = pa.RecordBatch.from_pydict({"id": list(range(10_000)), "t": ["x" * 100] * 10_000})
    writer = sink.stager(CycleId(SCOPE, 1, 0).attempt()).open("task")
    held = []
    before = pa.total_allocated_bytes()

    for _ in range(60):
        writer.write(batch)
        held.append(pa.total_allocated_bytes() - before)
    writer.discard()

    assert max(held[30:]) < max(held[:30]) * 1.5 + 10_000_000


def test_compressed_json_lines_have_a_name_that_readers_know(tmp_path):
    write(
        FilesSink(tmp_path, format="jsonl", compression="gzip"),
        [pa.RecordBatch.from_pydict({"id": [1]})],
    )

    (file,) = tmp_path.glob("cycle=*/part-*.jsonl.gz")
    assert gzip.decompress(file.read_bytes()) == b'{"id":1}\n'


def test_batches_of_another_schema_are_refused(tmp_path):
    writer = FilesSink(tmp_path).stager(CycleId(SCOPE, 1, 0).attempt()).open("task")
    writer.write(pa.RecordBatch.from_pydict({"id": [1]}))

    with pytest.raises(Permanent, match="schema"):
        writer.write(pa.RecordBatch.from_pydict({"id": ["one"]}))
    writer.discard()


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_csv_is_read_back_as_it_was_written(compression, tmp_path):
    schema = pa.schema(
        [
            ("id", pa.int32()),
            ("text", pa.string()),
            ("ratio", pa.float64()),
            ("amount", pa.decimal128(9, 2)),
            ("paid", pa.bool_()),
            ("day", pa.date32()),
            ("at", pa.timestamp("us")),
            ("zoned", pa.timestamp("us", "UTC")),
        ]
    )
    at = dt.datetime.fromisoformat("2026-01-31T12:30:00.000001")
    rows = [
        dict(zip(schema.names, values, strict=True))
        for values in (
            (1, 'a "quoted",\nline', 0.1, Decimal("1.50"), True, dt.date(2026, 1, 31), at, at),
            (2, "", float("inf"), Decimal("-0.01"), False, dt.date(1, 1, 1), at, at),
            (3, "NA", 1e-300, None, None, None, None, None),
            (None, None, None, None, None, None, None, None),
        )
    ]
    sink = FilesSink(tmp_path, format="csv", compression=compression)
    sink.check(schema)

    txn, token, receipts = write(sink, [pa.RecordBatch.from_pylist(rows, schema=schema)])

    assert sink.visible_tally(txn.cycle, token) == tally_of(receipts)
    with pytest.raises(Permanent, match="tags: list<item: int64> has no form in CSV; cast it"):
        sink.check(pa.schema([("tags", pa.list_(pa.int64()))]))


class Kept(CountedFile):
    def __init__(self):
        super().__init__()
        self.content = b""

    def write(self, data):
        self.content += bytes(data)
        self.size = len(self.content)
        return len(bytes(data))


def opened(values, schema):
    file = Kept()
    return file, formats.open_rows(Format.JSONL, "none", schema, file)


def test_rows_go_into_the_files_of_their_partitions_and_the_next_file_begins_at_the_target_size():
    done = []
    files = RowFiles(
        opened,
        lambda file, values, rows: done.append((hive_folder(["by"], values), rows, file.content)),
        file_bytes=60,
        split=lambda batch: split(batch, ["by"]),
    )
    texts = ["a/b", None, "ü", "a/b", ""]
    for _ in range(3):
        files.write(pa.RecordBatch.from_pydict({"id": [1, 2, 3, 4, 5], "by": texts}))
    files.close()

    assert sum(rows for _, rows, _ in done) == 15
    null = "by=__HIVE_DEFAULT_PARTITION__"
    assert {folder for folder, _, _ in done} == {"by=a%2Fb", "by=ü", null}
    assert max(rows for _, rows, _ in done) == 6
    assert all(b"by" not in content for _, _, content in done)


def test_a_task_keeps_only_a_few_files_open_however_many_partitions_its_rows_have():
    open_now, most = set(), []
    files = RowFiles(
        lambda *about: open_now.add(about[0]) or most.append(len(open_now)) or opened(*about),
        lambda file, values, rows: open_now.remove(values),
        file_bytes=1 << 20,
        split=lambda batch: split(batch, ["by"]),
    )

    files.write(pa.RecordBatch.from_pydict({"id": range(100), "by": range(100)}))
    files.close()

    assert max(most) == 16
    assert not open_now
