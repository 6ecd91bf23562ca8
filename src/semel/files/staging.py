"""The executor's side of the files sink: every task attempt writes into its own folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from dataclasses import asdict, dataclass
from typing import Any

from semel.arrow.tally import schema_to_text, tally
from semel.errors import Permanent
from semel.files.disk import faults, remove_tree
from semel.files.formats import Format, RowFile, extension, open_rows
from semel.files.layout import Layout, StagedFile, safe_name
from semel.pipeline.sink import Batch, Receipt, Tally
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
        self._schema: Any = None
        self._tally = Tally()
        self._files: list[StagedFile] = []
        self._bytes: HashedFile | None = None
        self._open: RowFile | None = None
        self._rows = 0

    def write(self, batch: Batch) -> None:
        """Write the rows, into the next file when the current one is large enough."""
        if self._schema is None:
            self._schema = batch.schema.remove_metadata()
        if batch.num_rows == 0:
            return
        if not batch.schema.equals(self._schema):
            raise Permanent(f"task {self._task}: a batch has another schema than the one before")
        with faults(f"staging into {self._folder}"):
            if self._bytes is None or self._open is None:
                self._bytes, self._open = self._next_file()
            self._open.write(batch)
            self._rows += batch.num_rows
            self._tally += tally(batch)
            if self._bytes.size >= self._stager.file_bytes:
                self._close_file()

    def _next_file(self) -> tuple[HashedFile, RowFile]:
        stager = self._stager
        end = extension(stager.format, stager.compression)
        name = f"part-{self._name}-{len(self._files):05d}.{end}"
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
        return file, open_rows(stager.format, stager.compression, self._schema, file)

    def _close_file(self) -> None:
        if self._bytes is None or self._open is None:
            return
        self._open.close()
        file = self._bytes
        # Sync the data now, on this host; prepare syncs the folders, for all tasks
        # at once.
        file.sync()
        file.close()
        self._files.append(
            StagedFile(os.path.basename(file.path), self._rows, file.size, file.hash)
        )
        self._bytes, self._open, self._rows = None, None, 0

    def finish(self) -> Receipt:
        with faults(f"staging into {self._folder}"):
            self._close_file()
        detail = {
            "folder": self._name,
            "files": [asdict(file) for file in self._files],
            "schema": None if self._schema is None else schema_to_text(self._schema),
        }
        return Receipt(self._task, self._tally, detail)

    def discard(self) -> None:
        """Remove the task's folder, as far as possible."""
        with contextlib.suppress(Exception):
            if self._bytes is not None and self._open is not None:
                self._bytes.abandon()
                self._open.close()
            self._bytes = self._open = None
        with contextlib.suppress(OSError):
            remove_tree(self._folder)
            os.rmdir(self._attempt)  # fails if other tasks have files there


class HashedFile(io.RawIOBase):
    """A new file that counts and hashes its bytes while they are written."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.size = 0
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  closed by `close`
        self._hash = hashlib.blake2b(digest_size=16)

    @property
    def hash(self) -> str:
        """The hash of everything written."""
        return self._hash.hexdigest()

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of *data*."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        done = 0
        while done < len(view) and not self._file.closed:
            done += self._file.write(view[done:]) or 0
        self.size += len(view)
        return len(view)

    def tell(self) -> int:
        """Return the number of written bytes."""
        return self.size

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
