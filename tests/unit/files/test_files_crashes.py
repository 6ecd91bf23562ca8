"""A files sink killed before and after everything it does to the disk."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from threading import Event, Thread

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from semel import crashpoints
from semel.crashpoints import CrashPoint
from semel.files import disk
from semel.files.sink import FilesSink
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable
from semel.pipeline.txn import CycleId, Scope

SCOPE = Scope("ledger", "payments", "main")
SCHEMA = pa.schema([("id", pa.int64())])
TOUCHES_THE_DISK = ("rename", "unlink", "mkdir", "rmdir", "fsync", "open")


class Crash(BaseException):
    """The end of a process; nothing can catch it by accident."""


class Disk:
    """Counts what is done to the disk, and ends the process before or after one of them."""

    def __init__(self, monkeypatch):
        self.done = 0
        self.crash_at = None
        for name in TOUCHES_THE_DISK:
            monkeypatch.setattr(os, name, self.watched(getattr(os, name)))
        monkeypatch.setattr(disk, "_renameat2", self.watched(disk._renameat2))

    def watched(self, call):
        def watched_call(*args, **kwargs):
            self.done += 1
            if self.crash_at == (self.done, "before"):
                raise Crash
            number = self.done
            try:
                return call(*args, **kwargs)
            finally:
                if self.crash_at == (number, "after"):
                    raise Crash

        return watched_call


def staged(sink, txn, *tasks):
    receipts = []
    for number, ids in enumerate(tasks):
        writer = sink.stager(txn).open(f"task-{number}")
        writer.write(pa.RecordBatch.from_pydict({"id": ids}, SCHEMA))
        receipts.append(writer.finish())
    return receipts


def shown(path):
    files = Path(path).glob("cycle=*/[!_.]*")
    return sorted(row["id"] for file in files for row in pq.ParquetFile(file).read().to_pylist())


def left_behind(path):
    return [str(found) for found in Path(path).glob("_semel/*/*ed/*")]


def crashes(path, monkeypatch, arrange, act):
    """Give a fresh folder for each point at which *act* can be killed, after killing it there."""
    with monkeypatch.context() as patch:
        watched = Disk(patch)
        world = arrange(path / "count")
        watched.done = 0
        act(*world)
        steps = watched.done
    assert steps > 3
    for number, side in product(range(1, steps + 1), ("before", "after")):
        folder = path / f"{number}-{side}"
        world = arrange(folder)
        with monkeypatch.context() as patch:
            watched = Disk(patch)
            watched.crash_at = (number, side)
            with pytest.raises(Crash):
                act(*world)
        yield folder, world


def arrange_staged(folder):
    sink = FilesSink(folder)
    sink.fence(SCOPE, 1)
    txn = CycleId(SCOPE, 1, 0).attempt()
    return sink, txn, staged(sink, txn, [1, 2], [3], [])


def arrange_prepared(folder):
    sink, txn, receipts = arrange_staged(folder)
    return sink, txn, sink.prepare(txn, receipts).token


def test_a_prepare_that_died_anywhere_is_repeated_and_committed(tmp_path, monkeypatch):
    def act(sink, txn, receipts):
        sink.prepare(txn, receipts)

    for folder, (_, txn, receipts) in crashes(tmp_path, monkeypatch, arrange_staged, act):
        assert shown(folder) == []
        sink = FilesSink(folder)
        sink.fence(SCOPE, 2)
        outcome = sink.prepare(txn, receipts)
        assert isinstance(outcome, SinkOK), outcome
        assert sink.recover(SCOPE) == [txn]
        assert isinstance(sink.commit(txn, outcome.token), SinkOK)
        assert shown(folder) == [1, 2, 3]
        assert left_behind(folder) == []


def test_a_prepare_that_died_anywhere_is_aborted_without_a_trace(tmp_path, monkeypatch):
    def act(sink, txn, receipts):
        sink.prepare(txn, receipts)

    for folder, (_, txn, _) in crashes(tmp_path, monkeypatch, arrange_staged, act):
        sink = FilesSink(folder)
        assert sink.recover(SCOPE) in ([], [txn])
        assert isinstance(sink.abort(txn, None), SinkOK)
        assert left_behind(folder) == []
        assert shown(folder) == []


def test_a_commit_that_died_anywhere_is_repeated(tmp_path, monkeypatch):
    def act(sink, txn, token):
        sink.commit(txn, token)

    for folder, (_, txn, token) in crashes(tmp_path, monkeypatch, arrange_prepared, act):
        assert shown(folder) in ([], [1, 2, 3])
        sink = FilesSink(folder)
        found = sink.look_up(txn, token).found
        assert found is (Found.VISIBLE if shown(folder) else Found.HELD)
        assert isinstance(sink.commit(txn, token), SinkOK)
        assert shown(folder) == [1, 2, 3]
        assert sink.mark(SCOPE) == txn
        assert left_behind(folder) == []


def test_an_abort_that_died_anywhere_is_repeated_and_nothing_can_be_committed(
    tmp_path, monkeypatch
):
    def act(sink, txn, token):
        sink.abort(txn, token)

    for folder, (_, txn, token) in crashes(tmp_path, monkeypatch, arrange_prepared, act):
        sink = FilesSink(folder)
        assert isinstance(sink.abort(txn, token), SinkOK)
        assert isinstance(sink.commit(txn, token), SinkFatal)
        assert left_behind(folder) == []
        assert shown(folder) == []


def test_what_a_dying_abort_left_is_whole_or_cannot_be_committed(tmp_path, monkeypatch):
    def act(sink, txn, token):
        sink.abort(txn, token)

    for folder, (_, txn, token) in crashes(tmp_path, monkeypatch, arrange_prepared, act):
        outcome = FilesSink(folder).commit(txn, token)
        assert shown(folder) == ([1, 2, 3] if isinstance(outcome, SinkOK) else [])


def test_a_sweep_that_died_anywhere_is_repeated(tmp_path, monkeypatch):
    def act(sink, txn, token):
        sink.sweep(SCOPE, lambda found: found == txn)

    for folder, (_, txn, _) in crashes(tmp_path, monkeypatch, arrange_prepared, act):
        sink = FilesSink(folder)
        sink.sweep(SCOPE, lambda found, loser=txn: found == loser)
        assert sink.recover(SCOPE) == []
        assert left_behind(folder) == []


def test_a_fence_that_died_anywhere_is_repeated(tmp_path, monkeypatch):
    for folder, _ in crashes(
        tmp_path, monkeypatch, lambda folder: (FilesSink(folder),), lambda s: s.fence(SCOPE, 7)
    ):
        FilesSink(folder).fence(SCOPE, 7)
        sink = FilesSink(folder)
        sink.fence(SCOPE, 8)
        txn = CycleId(SCOPE, 1, 0).attempt()
        assert isinstance(sink.prepare(txn, staged(sink, txn, [1])), SinkOK)


@pytest.mark.parametrize(
    "point",
    [
        CrashPoint.FILES_PREPARE_MOVED,
        CrashPoint.FILES_PREPARE_SEALED,
        CrashPoint.FILES_COMMIT_RENAMED,
    ],
)
def test_every_named_window_is_reached_and_survived(point, tmp_path):
    sink, txn, receipts = arrange_staged(tmp_path)

    def hook(reached, name):
        if reached is point:
            assert name == "files"
            raise Crash

    before = crashpoints.install(hook)
    try:
        with pytest.raises(Crash):
            sink.commit(txn, sink.prepare(txn, receipts).token)
    finally:
        crashpoints.install(before)
    sink = FilesSink(tmp_path)
    sink.fence(SCOPE, 2)
    token = sink.prepare(txn, receipts).token

    assert isinstance(sink.commit(txn, token), SinkOK)
    assert shown(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("call", ["rename", "fsync", "mkdir"])
@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (errno.ENOSPC, SinkRetryable),
        (errno.EDQUOT, SinkRetryable),
        (errno.EIO, SinkRetryable),
        (errno.EACCES, SinkFatal),
        (errno.EROFS, SinkFatal),
        (errno.EXDEV, SinkFatal),
    ],
)
def test_an_error_of_the_disk_is_named_and_shows_nothing(call, code, answer, tmp_path, monkeypatch):
    sink, txn, receipts = arrange_staged(tmp_path)

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code), str(args[0]))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        outcome = sink.prepare(txn, receipts)

    assert isinstance(outcome, answer)
    assert errno.errorcode[code] in outcome.reason
    assert shown(tmp_path) == []
    token = sink.prepare(txn, receipts).token
    assert isinstance(sink.commit(txn, token), SinkOK)
    assert shown(tmp_path) == [1, 2, 3]


def test_two_processes_that_commit_at_once_both_succeed_and_show_the_rows_once(tmp_path):
    _, txn, token = arrange_prepared(tmp_path)
    program = f"""
import sys
from semel.files.sink import FilesSink
from semel.pipeline.txn import CycleId, Scope
txn = CycleId(Scope("ledger", "payments", "main"), 1, 0).attempt({txn.attempt!r})
sink = FilesSink({str(tmp_path)!r})
print("ready", flush=True)
sys.stdin.readline()
print(type(sink.commit(txn, {token!r})).__name__)
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=30)[0].strip() for process in processes]

    assert answers == ["SinkOK", "SinkOK"]
    assert shown(tmp_path) == [1, 2, 3]


def test_readers_that_list_while_cycles_commit_see_whole_batches_or_nothing(tmp_path):
    sink = FilesSink(tmp_path)
    sink.fence(SCOPE, 1)
    stop, seen, strange = Event(), [], []

    def read():
        while not stop.is_set():
            try:
                table = ds.dataset(tmp_path, format="parquet", partitioning="hive").to_table()
            except FileNotFoundError as error:
                # Arrow lists hidden folders, too, before it skips them.
                strange.extend([] if "/_semel/" in str(error) else [error])
                continue
            counts = table["id"].value_counts().to_pylist() if table.num_columns else []
            seen.append({count["values"]: count["counts"] for count in counts})

    txns = [CycleId(SCOPE, 1, batch).attempt() for batch in range(12)]
    sink.commit(txns[0], sink.prepare(txns[0], staged(sink, txns[0], [0], [0], [0])).token)
    reader = Thread(target=read)
    reader.start()
    try:
        for number, txn in enumerate(txns[1:], 1):
            receipts = staged(sink, txn, *([number],) * 3)
            assert isinstance(sink.commit(txn, sink.prepare(txn, receipts).token), SinkOK)
    finally:
        stop.set()
        reader.join(30)

    assert seen
    assert {count for counts in seen for count in counts.values()} == {3}
    assert strange == []


def test_a_late_task_whose_folder_was_removed_does_no_harm(tmp_path):
    sink = FilesSink(tmp_path, file_bytes=1)
    sink.fence(SCOPE, 1)
    txn = CycleId(SCOPE, 1, 0).attempt()
    writer = sink.stager(txn).open("task")
    writer.write(pa.RecordBatch.from_pydict({"id": list(range(200_000))}))
    shutil.rmtree(tmp_path / "_semel" / SCOPE.slug / "staged")
    writer.write(pa.RecordBatch.from_pydict({"id": [1]}))

    receipt = writer.finish()

    assert len(receipt.detail["files"]) == 2
    assert isinstance(sink.prepare(txn, [receipt]), SinkFatal)
