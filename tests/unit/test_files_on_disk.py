"""What is particular to files: torn and foreign ones, shared paths, names, readers."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from semel.errors import Fenced, Misuse, Permanent, Retryable
from semel.files.layout import TOKEN_FILE, Layout, safe_name
from semel.files.sink import FilesSink
from semel.memory.ledger import MemoryLedger
from semel.pipeline.driver import Driver
from semel.pipeline.sink import Found, SinkFatal, SinkOK
from semel.pipeline.txn import CycleId, Scope

SCOPE = Scope("ledger", "payments", "main")
SCHEMA = pa.schema([("id", pa.int64())])


@pytest.fixture
def sink(tmp_path):
    sink = FilesSink(tmp_path / "lake")
    sink.fence(SCOPE, 1)
    return sink


@pytest.fixture
def txn():
    return CycleId(SCOPE, 1, 0).attempt()


def stage(sink, txn, ids, task="task-1"):
    writer = sink.stager(txn).open(task)
    writer.write(pa.RecordBatch.from_pydict({"id": ids}, SCHEMA))
    return writer.finish()


def prepared(sink, txn, ids=(1, 2)):
    outcome = sink.prepare(txn, [stage(sink, txn, list(ids))])
    assert isinstance(outcome, SinkOK), outcome
    return outcome.token


def committed(sink, txn, ids=(1, 2)):
    token = prepared(sink, txn, ids)
    assert isinstance(sink.commit(txn, token), SinkOK)
    return token


def place_of(sink, txn):
    return Path(Layout(sink.path, txn.scope).shown(txn.cycle))


def held_at(sink, txn):
    return Path(Layout(sink.path, txn.scope).prepared(txn))


def read(sink):
    table = ds.dataset(sink.path, format="parquet", partitioning="hive").to_table()
    return sorted(table["id"].to_pylist()) if table.num_columns else []


def staged_file(sink):
    (file,) = Path(sink.path).glob("_semel/*/staged/*/*/*")
    return file


def test_a_torn_file_is_not_prepared(sink, txn):
    receipt = stage(sink, txn, [1, 2])
    file = staged_file(sink)
    os.truncate(file, file.stat().st_size - 1)

    outcome = sink.prepare(txn, [receipt])

    assert isinstance(outcome, SinkFatal)
    assert "torn" in outcome.reason
    assert file.name in outcome.reason


def test_a_file_of_the_right_size_with_other_content_is_not_prepared(sink, txn):
    receipt = stage(sink, txn, [1, 2])
    file = staged_file(sink)
    file.write_bytes(bytes(file.stat().st_size))

    outcome = sink.prepare(txn, [receipt])

    assert isinstance(outcome, SinkFatal)
    assert "other content" in outcome.reason


def test_a_path_that_driver_and_executors_do_not_share_is_named(sink, txn, tmp_path):
    elsewhere = FilesSink(tmp_path / "another-host" / "lake")
    receipt = stage(elsewhere, txn, [1, 2])

    outcome = sink.prepare(txn, [receipt])

    assert isinstance(outcome, SinkFatal)
    assert "not shared" in outcome.reason


def empty_folder(place, txn):
    place.mkdir()


def folder_with_files(place, txn):
    place.mkdir()
    (place / "part-0.parquet").write_bytes(b"theirs")


def plain_file(place, txn):
    place.write_bytes(b"theirs")


def unreadable_token(place, txn):
    place.mkdir()
    (place / TOKEN_FILE).write_text('{"txn": ')


def token_of_somebody_else(place, txn):
    place.mkdir()
    (place / TOKEN_FILE).write_text('["hello"]')


def token_of_another_scope(place, txn):
    place.mkdir()
    fields = {"txn": txn.label, "scope": "0" * 20, "digest": "0", "files": {}}
    (place / TOKEN_FILE).write_text(json.dumps(fields))


FOREIGN = [
    empty_folder,
    folder_with_files,
    plain_file,
    unreadable_token,
    token_of_somebody_else,
    token_of_another_scope,
]


@pytest.mark.parametrize("make", FOREIGN)
def test_a_foreign_folder_in_the_cycles_place_is_found_in_prepare(make, sink, txn):
    make(place_of(sink, txn), txn)

    outcome = sink.prepare(txn, [stage(sink, txn, [1])])

    assert isinstance(outcome, SinkFatal)
    assert place_of(sink, txn).exists()


@pytest.mark.parametrize("make", FOREIGN)
def test_a_foreign_folder_is_never_replaced_nor_taken_for_ours(make, sink, txn):
    token = prepared(sink, txn)
    place = place_of(sink, txn)
    make(place, txn)
    before = sorted(place.rglob("*"))

    outcome = sink.commit(txn, token)

    assert isinstance(outcome, SinkFatal)
    assert sorted(place.rglob("*")) == before
    assert sink.look_up(txn, token).found is Found.HELD
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert isinstance(sink.commit(txn, token), SinkOK)
    assert read(sink) == [1, 2]


@pytest.mark.parametrize("renameat2", ["as it is", None])
def test_a_folder_is_renamed_safely_with_and_without_renameat2(renameat2, sink, txn, monkeypatch):
    if renameat2 is None:
        monkeypatch.setattr("semel.files.disk._renameat2", None)
    token = prepared(sink, txn)
    folder_with_files(place_of(sink, txn), txn)

    sink.check(None)
    refused = sink.commit(txn, token)
    shutil.rmtree(place_of(sink, txn))

    assert isinstance(refused, SinkFatal)
    assert isinstance(sink.commit(txn, token), SinkOK)
    assert read(sink) == [1, 2]


def test_a_file_system_without_renameat2_is_noticed(sink, txn, monkeypatch):
    import ctypes

    def refuse(*args):
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr("semel.files.disk._renameat2", refuse)

    committed(sink, txn)

    assert read(sink) == [1, 2]


def test_a_prepared_folder_that_lost_a_file_is_not_committed(sink, txn):
    token = prepared(sink, txn)
    next(held_at(sink, txn).glob("part-*")).unlink()

    outcome = sink.commit(txn, token)

    assert isinstance(outcome, SinkFatal)
    assert "lacks part-task-1-00000.parquet" in outcome.reason
    assert read(sink) == []


def test_a_prepared_folder_with_a_file_too_many_is_not_committed(sink, txn):
    token = prepared(sink, txn)
    (held_at(sink, txn) / "part-9.parquet").write_bytes(b"theirs")

    outcome = sink.commit(txn, token)

    assert isinstance(outcome, SinkFatal)
    assert "part-9.parquet" in outcome.reason


def test_a_prepared_file_that_shrank_is_not_committed(sink, txn):
    token = prepared(sink, txn)
    os.truncate(next(held_at(sink, txn).glob("part-*")), 3)

    assert isinstance(sink.commit(txn, token), SinkFatal)


def test_a_committed_folder_that_was_removed_is_lost_and_lost_is_never_ok(sink, txn):
    token = committed(sink, txn)
    shutil.rmtree(place_of(sink, txn))

    outcome = sink.commit(txn, token)

    assert isinstance(outcome, SinkFatal)
    assert "has been removed since" in outcome.reason
    assert isinstance(sink.prepare(txn, []), SinkFatal)
    assert isinstance(sink.abort(txn, token), SinkFatal)
    assert sink.look_up(txn, token).found is Found.GONE


def test_a_committed_folder_that_is_no_longer_whole_is_named(sink, txn):
    token = committed(sink, txn)
    next(place_of(sink, txn).glob("part-*")).unlink()

    outcome = sink.commit(txn, token)

    assert isinstance(outcome, SinkFatal)
    assert "no longer whole" in outcome.reason
    assert "lacks" in sink.look_up(txn, token).evidence


def test_staged_files_that_cannot_be_removed_do_not_undo_a_commit(sink, txn, monkeypatch, caplog):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    token = prepared(sink, txn)
    monkeypatch.setattr("semel.files.sink.remove_tree", refuse)

    assert isinstance(sink.commit(txn, token), SinkOK)
    assert sink.mark(SCOPE) == txn
    assert "left for the next sweep" in caplog.text


def test_a_volume_that_is_not_mounted_is_suspected(sink, txn):
    token = prepared(sink, txn)
    shutil.rmtree(sink.path)

    outcome = FilesSink(sink.path).commit(txn, token)

    assert isinstance(outcome, SinkFatal)
    assert "mounted" in outcome.reason


def test_a_disk_that_does_not_answer_makes_look_up_unreachable(sink, txn, monkeypatch):
    token = prepared(sink, txn)

    def fail(path):
        raise OSError(errno.EIO, "no answer", path)

    monkeypatch.setattr(os, "listdir", fail)

    assert sink.look_up(txn, token).found in (Found.HELD, Found.UNREACHABLE)
    assert sink.look_up(CycleId(SCOPE, 1, 9).attempt(), None).found is Found.UNREACHABLE
    with pytest.raises(Retryable):
        sink.recover(SCOPE)
    with pytest.raises(Retryable):
        sink.mark(SCOPE)


def test_arrows_reader_sees_only_committed_rows_and_their_cycle(sink):
    first, empty, held, late = (CycleId(SCOPE, 1, batch).attempt() for batch in range(4))
    committed(sink, first, [1, 2])
    sink.commit(empty, sink.prepare(empty, []).token)
    prepared(sink, held, [3])
    stage(sink, late, [4])

    table = ds.dataset(sink.path, format="parquet", partitioning="hive").to_table()

    assert sorted(table["id"].to_pylist()) == [1, 2]
    assert set(table["cycle"].to_pylist()) == {f"g1.b0-{SCOPE.slug}"}


@pytest.mark.spark
@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_sparks_reader_sees_only_committed_rows_and_their_cycle(format, tmp_path, spark):
    sink = FilesSink(tmp_path, format=format)
    first, empty, held, late = (CycleId(SCOPE, 1, batch).attempt() for batch in range(4))
    committed(sink, first, [1, 2])
    sink.commit(empty, sink.prepare(empty, []).token)
    prepared(sink, held, [3])
    stage(sink, late, [4])

    reader = spark.read.parquet if format == "parquet" else spark.read.json
    rows = [(row["id"], row["cycle"]) for row in reader(str(tmp_path)).collect()]

    assert sorted(rows) == [(1, f"g1.b0-{SCOPE.slug}"), (2, f"g1.b0-{SCOPE.slug}")]


TASKS = ["../../../etc/passwd", "a/b", "a.b", "täsk", "x" * 300, "x" * 301, "", ".", "_", "a b"]


def test_task_names_are_made_safe_and_stay_apart(sink, txn):
    receipts = [stage(sink, txn, [number], task) for number, task in enumerate(TASKS)]

    token = sink.prepare(txn, receipts).token
    assert isinstance(sink.commit(txn, token), SinkOK)

    assert read(sink) == list(range(len(TASKS)))
    assert len({safe_name(task) for task in TASKS}) == len(TASKS)
    inside = {path.relative_to(sink.path).parts[0] for path in Path(sink.path).rglob("*")}
    assert inside == {"_semel", place_of(sink, txn).name}


def test_a_receipt_that_names_a_file_elsewhere_is_refused(sink, txn):
    receipt = stage(sink, txn, [1])
    receipt.detail["files"][0]["name"] = "../../../../outside.parquet"

    assert isinstance(sink.prepare(txn, [receipt]), SinkFatal)


@pytest.mark.parametrize("path", ["s3://bucket/lake", "hdfs://host/lake", "dbfs:/lake", "gs://b"])
def test_remote_paths_are_refused_with_the_reason(path):
    with pytest.raises(Misuse, match="atomic rename"):
        FilesSink(path)


def test_two_sinks_of_a_pipeline_cannot_have_one_path(tmp_path):
    (tmp_path / "lake").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "lake")
    first = FilesSink(tmp_path / "lake", name="first")

    for path in ("lake", "other/../lake", "link"):
        with pytest.raises(Misuse, match="same place"):
            Driver("app", MemoryLedger(), [first, FilesSink(tmp_path / path, name="second")])
    Driver("app", MemoryLedger(), [first, FilesSink(tmp_path / "lake2", name="second")])


def test_local_paths_are_made_absolute_for_the_executors(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    assert FilesSink("lake").path == str(tmp_path / "lake")
    assert FilesSink(f"file://{tmp_path}/lake").path == str(tmp_path / "lake")
    assert FilesSink(f"file:{tmp_path}/lake").path == str(tmp_path / "lake")
    assert FilesSink(tmp_path / "a:b").path == str(tmp_path / "a:b")


@pytest.mark.parametrize(
    "options", [{"format": "csv"}, {"compression": "rar"}, {"name": "Two Words"}]
)
def test_wrong_settings_are_refused_at_once(options, tmp_path):
    with pytest.raises(Misuse):
        FilesSink(tmp_path, **options)


def test_a_path_that_is_a_file_is_found_before_the_first_batch(tmp_path):
    (tmp_path / "lake").write_text("not a folder")

    with pytest.raises(Permanent):
        FilesSink(tmp_path / "lake").check(None)


def test_a_check_makes_the_path_and_leaves_nothing_in_it(tmp_path):
    FilesSink(tmp_path / "deep" / "lake").check(SCHEMA)

    assert [path.name for path in (tmp_path / "deep" / "lake").rglob("*")] == ["_semel"]


def test_hundreds_of_cycles_and_epochs_leave_a_handful_of_marks(sink):
    for number in range(2, 40):
        sink.fence(SCOPE, number)
        txn = CycleId(SCOPE, 1, number).attempt()
        assert isinstance(sink.commit(txn, sink.prepare(txn, []).token), SinkOK)

    assert sink.mark(SCOPE) == txn
    with pytest.raises(Fenced):
        FilesSink(sink.path).fence(SCOPE, 38)
    home = Path(sink.path, "_semel", SCOPE.slug)
    assert len(list((home / "marks").iterdir())) == 8
    assert len(list((home / "fence").iterdir())) == 8


def test_the_hidden_folder_says_whose_it_is(sink):
    about = json.loads(Path(sink.path, "_semel", SCOPE.slug, "scope.json").read_text())

    assert about == {"ledger": "ledger", "app": "payments", "query": "main"}


def test_what_strangers_put_into_the_hidden_folder_is_left_alone(sink, txn):
    home = Path(sink.path, "_semel", SCOPE.slug)
    token = prepared(sink, txn)
    (home / "prepared" / "notes").mkdir()
    (home / "marks" / "README").touch()
    (home / "fence" / "README").touch()

    assert sink.recover(SCOPE) == [txn]
    assert sink.sweep(SCOPE, lambda found: False) == []
    assert isinstance(sink.commit(txn, token), SinkOK)
    assert (home / "prepared" / "notes").exists()
    assert (home / "fence" / "README").exists()
