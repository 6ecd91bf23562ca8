"""The files of tasks: each attempt writes into its own folder, and prepare collects the winners."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

from semel.arrow.formats import Format, RowFile, extension, open_rows
from semel.arrow.rowfiles import CountedFile, RowFiles, Values, safe_name
from semel.crashpoints import CrashPoint, reach
from semel.files.disk import faults, names_in, remove_tree
from semel.files.layout import TOKEN_FILE, Layout, StagedFile, is_hidden, seal
from semel.pipeline.sink import Batch, Receipt, Schema, tally_of
from semel.pipeline.txn import SinkTxnId


@dataclass(frozen=True, slots=True)
class FilesStager:
    """The settings that a task needs to write for one transaction."""

    path: str
    txn: SinkTxnId
    format: Format
    compression: str
    file_bytes: int

    def open(self, task: str) -> FilesWriter:
        return FilesWriter(self, task)


class FilesWriter:
    """The files of one task attempt; a task without rows has none."""

    def __init__(self, stager: FilesStager, task: str) -> None:
        self._stager = stager
        self._task = task
        self._name = safe_name(task)
        self._attempt = Layout(stager.path, stager.txn.scope).staged(stager.txn)
        self._folder = os.path.join(self._attempt, self._name)
        self._done: list[StagedFile] = []
        self._files = RowFiles(
            self._begin, self._finish, stager.file_bytes, lambda batch: [((), batch)]
        )

    def write(self, batch: Batch) -> None:
        """Write the rows, into the next file when the current one is large enough."""
        with faults(f"staging into {self._folder}"):
            self._files.write(batch)

    def _begin(self, values: Values, schema: Schema) -> tuple[HashedFile, RowFile]:
        stager = self._stager
        end = extension(stager.format, stager.compression)
        name = f"part-{self._name}-{len(self._done):05d}.{end}"
        # An abort may remove the folder between the two calls.
        for last in (False, False, True):
            os.makedirs(self._folder, exist_ok=True)
            try:
                file = HashedFile(os.path.join(self._folder, name))
            except FileNotFoundError:
                if last:
                    raise
            else:
                break
        return file, open_rows(stager.format, stager.compression, schema, file)

    def _finish(self, file: HashedFile, values: Values, rows: int) -> None:
        # Sync the data now, on this host; prepare syncs the folders, for all tasks
        # at once.
        file.sync()
        file.close()
        self._done.append(StagedFile(os.path.basename(file.path), rows, file.size, file.hash))

    def finish(self) -> Receipt:
        with faults(f"staging into {self._folder}"):
            self._files.close()
        done = [asdict(file) for file in self._done]
        return self._files.receipt(self._task, folder=self._name, files=done)

    def discard(self) -> None:
        """Remove the task's folder, as far as possible."""
        with contextlib.suppress(OSError):
            for file in self._files.abandon():
                file.abandon()
        with contextlib.suppress(OSError):
            remove_tree(self._folder)
            os.rmdir(self._attempt)  # fails if other tasks have files there


class HashedFile(CountedFile):
    """A new file that counts and hashes its bytes while they are written."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  closed by `close`
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def hash(self) -> str:
        """The hash of everything written."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        """Write all of *data*."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        done = 0
        while done < len(view) and not self._file.closed:
            done += self._file.write(view[done:]) or 0
        self.size += len(view)
        return len(view)

    def abandon(self) -> None:
        """Close the file; later writes are ignored."""
        self._file.close()

    def sync(self) -> None:
        """Make the data durable."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        super().close()


def hash_of(path: str) -> str:
    """Return the hash of a file, as `HashedFile` computes it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# Hashing releases the GIL; more threads would only wait for the disk.
_HASHING_THREADS: Final = 4


class Unpreparable(Exception):
    """A file of the receipts is missing or differs."""


def collect(
    layout: Layout,
    txn: SinkTxnId,
    receipts: Sequence[Receipt],
    digest: str,
    format: Format,
    sink: str,
) -> dict[str, Any]:
    """Move the files of *receipts* into the prepared folder and seal it; return the token.

    The folder is not yet synced.

    Raises:
        Unpreparable: a file is missing, or differs from what its task wrote.
    """
    files = _winners(receipts)
    folder = layout.prepared(txn)
    os.makedirs(folder, exist_ok=True)
    for name in names_in(folder):
        # A prepare that crashed before the seal left these.
        if name not in files and name != TOKEN_FILE:
            os.unlink(os.path.join(folder, name))
    for name, (task_folder, _) in files.items():
        _move(os.path.join(layout.staged(txn), task_folder, name), os.path.join(folder, name))
    reach(CrashPoint.FILES_PREPARE_MOVED, sink)

    winners = [file for _, file in files.values()]
    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        for _ in pool.map(lambda file: _verify(os.path.join(folder, file.name), file), winners):
            pass
    tally = tally_of(receipts)
    token = {
        "attempt": txn.attempt,
        "digest": digest,
        "rows": tally.rows,
        "hash": tally.hash,
        "format": str(format),
        "folder": os.path.basename(layout.shown(txn.cycle)),
        "schema": _schema(receipts),
    }
    seal(folder, txn, token, winners)
    return token


def token_of(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ledger's token from the content of a folder's seal."""
    return {name: value for name, value in rest.items() if name != "by"}


def _winners(receipts: Sequence[Receipt]) -> dict[str, tuple[str, StagedFile]]:
    files = {}
    for receipt in receipts:
        folder = receipt.detail["folder"]
        for fields in receipt.detail["files"]:
            file = StagedFile(**fields)
            if safe_name(receipt.task) != folder or os.path.basename(file.name) != file.name:
                raise Unpreparable(
                    f"task {receipt.task} names a file in another folder: {file.name}"
                )
            if is_hidden(file.name) or file.name in files:
                raise Unpreparable(f"two tasks wrote {file.name}; task names must be unique")
            files[file.name] = (folder, file)
    return files


def _schema(receipts: Sequence[Receipt]) -> str | None:
    schemas = {text for receipt in receipts if (text := receipt.detail["schema"]) is not None}
    if len(schemas) > 1:
        raise Unpreparable("tasks of one batch staged rows of different schemas")
    return schemas.pop() if schemas else None


def _move(source: str, target: str) -> None:
    try:
        os.rename(source, target)
    except FileNotFoundError as error:
        if not os.path.exists(target):
            raise Unpreparable(
                f"{source} is missing, though a task staged it: it was removed, or the path is "
                f"not shared between the driver and the executors; use one that all of them mount"
            ) from error


def _verify(path: str, file: StagedFile) -> None:
    size = os.stat(path).st_size
    if size != file.size:
        raise Unpreparable(f"{path} is torn: {size} bytes, but its task wrote {file.size}")
    if hash_of(path) != file.hash:
        raise Unpreparable(f"{path} has other content than its task wrote")
