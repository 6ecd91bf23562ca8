"""Where a files sink writes: its path, the names in it, and its hidden folder."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from semel.arrow.rowfiles import safe_name
from semel.errors import Fenced, Misuse, Permanent
from semel.files.sink import FilesSink
from semel.ledger.sqlite import SqliteLedger
from semel.memory.ledger import MemoryLedger
from semel.pipeline.driver import Driver
from semel.pipeline.sink import SinkFatal, SinkOK
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from tests.unit.files.files_place import SCHEMA, SCOPE, new_sink, place_of, prepared, read, stage

TASKS = ["../../../etc/passwd", "a/b", "a.b", "täsk", "x" * 300, "x" * 301, "", ".", "_", "a b"]


@pytest.fixture
def sink(tmp_path):
    return new_sink(tmp_path)


@pytest.fixture
def txn():
    return CycleId(SCOPE, 1, 0).attempt()


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
    "options", [{"format": "xlsx"}, {"compression": "rar"}, {"name": "Two Words"}]
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

    assert about == {"ledger": "ledger", "app": "payments", "query": "main", "sink": "files"}


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


@pytest.mark.parametrize("attempt", ["../../..", "a/b", "", "a.b", "x" * 65, "a\n"])
def test_an_attempt_of_other_characters_has_no_name(attempt):
    cycle = CycleId(Scope("ledger-1", "payments", "main"), 1, 1)

    with pytest.raises(Misuse, match="not a valid id"):
        SinkTxnId(cycle, attempt)


def test_a_ledger_row_with_a_path_for_an_attempt_deletes_no_folder(tmp_path):
    lake, outside = tmp_path / "lake", tmp_path / "precious"
    outside.mkdir()
    ledger = SqliteLedger(tmp_path / "ledger.db")
    driver = Driver("payments", ledger, [FilesSink(lake)])
    driver.start()
    ledger.plan(driver.lease, CycleId(driver.scope, 1, 0).attempt())
    driver.stop()
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as rows:
        path = f"/../../../../../{outside.name}"
        rows.execute("UPDATE semel_attempt SET attempt = ?", [path])
        rows.commit()

    with pytest.raises(Misuse, match="not a valid id"):
        Driver("payments", ledger, [FilesSink(lake)]).start()

    assert outside.is_dir()
