"""What is particular to files: torn, foreign, lost and shrunken ones."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from semel.errors import Retryable
from semel.files.layout import TOKEN_FILE
from semel.files.sink import FilesSink
from semel.pipeline.sink import Found, SinkFatal, SinkOK
from semel.pipeline.txn import CycleId
from tests.unit.files.files_place import (
    SCOPE,
    committed,
    held_at,
    new_sink,
    place_of,
    prepared,
    read,
    stage,
    staged_file,
)


@pytest.fixture
def sink(tmp_path):
    return new_sink(tmp_path)


@pytest.fixture
def txn():
    return CycleId(SCOPE, 1, 0).attempt()


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
    assert "no longer complete" in outcome.reason
    assert "lacks" in sink.look_up(txn, token).evidence


def test_staged_files_that_cannot_be_removed_do_not_undo_a_commit(sink, txn, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    said = []
    token = prepared(sink, txn)
    # Not by caplog: other tests run programs that silence loggers.
    monkeypatch.setattr("semel.files.sink.log.warning", lambda text, **more: said.append(text))
    monkeypatch.setattr("semel.files.sink.remove_tree", refuse)

    assert isinstance(sink.commit(txn, token), SinkOK)
    assert sink.mark(SCOPE) == txn
    assert said == ["staged files left for the next sweep"]


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


def test_an_undo_that_died_after_its_rename_is_ended_by_the_next_one(sink, txn, monkeypatch):
    token = committed(sink, txn, [1, 2])
    unlink = os.unlink

    def dying(path):
        monkeypatch.setattr(os, "unlink", unlink)
        raise OSError(errno.EIO, "the disk is away")

    monkeypatch.setattr(os, "unlink", dying)
    assert not isinstance(sink.undo(txn, token), SinkOK)
    assert read(sink) == []

    assert sink.undo(txn, token) == SinkOK()
    proof = Path(sink.path, "_semel", SCOPE.slug, "undone", txn.label)
    assert [path.name for path in proof.iterdir()] == [TOKEN_FILE]
    assert sink.look_up(txn, token).found is Found.GONE


def test_a_folder_with_foreign_files_is_not_undone(sink, txn):
    token = committed(sink, txn, [1])
    folder = next(Path(sink.path).glob("cycle=*"))
    (folder / "added.parquet").write_bytes(b"by hand")

    assert "semel did not write" in sink.check_undo(txn, token)
    assert isinstance(sink.undo(txn, token), SinkFatal)
    assert (folder / "added.parquet").exists()
