"""A place that the driver and all executors share, where rows wait for the decision."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semel.arrow.attempts import PREPARED, Attempts, folder_of, sync
from semel.errors import Misuse, Permanent, Retryable, require
from semel.pipeline.txn import Scope, SinkTxnId
from semel.secrets import masked

pa: Any = require("pyarrow", "files")
fs: Any = require("pyarrow.fs", "files")


@dataclass(frozen=True)
class Area:
    """A shared folder, or the prefix of a bucket."""

    uri: str = field(repr=False)
    """May carry credentials, as pyarrow reads them: ``s3://key:secret@bucket/prefix?region=…``."""

    sink: str

    def __post_init__(self) -> None:
        try:
            self.opened()
        except (pa.ArrowInvalid, ValueError, OSError):
            # Not chained: the error of pyarrow quotes the URI with its secret.
            raise Misuse(
                f"sink {self.sink}: staging must be a folder or a URI that pyarrow can open, such "
                f"as s3://bucket/prefix, with %2F for a slash in a secret; got {self.label!r}"
            ) from None

    @property
    def label(self) -> str:
        """The place without credentials."""
        text = re.sub(r"^(.*?://)(?:.*\*\*\*@|[^/@]*@)", r"\1", masked(self.uri))
        return text.partition("?")[0]

    def opened(self) -> tuple[Any, str]:
        """Return the file system, and the folder of this sink in it."""
        known: tuple[Any, str] | None = self.__dict__.get("_opened")
        if known is None:
            if "://" in self.uri:
                system, path = fs.FileSystem.from_uri(self.uri)
            else:
                system, path = fs.LocalFileSystem(), os.path.abspath(self.uri)
            known = self.__dict__["_opened"] = (system, f"{path.rstrip('/')}/{self.sink}")
        return known

    def __getstate__(self) -> dict[str, Any]:
        # Executors have another working folder, in which a relative path would mean another one.
        uri = self.uri if "://" in self.uri else os.path.abspath(self.uri)
        return {"uri": uri, "sink": self.sink}

    @contextlib.contextmanager
    def faults(self) -> Iterator[Any]:
        """Say of an error that the place does not answer; give the file system."""
        try:
            yield self.opened()[0]
        except (OSError, pa.ArrowException) as error:
            raise Retryable(f"sink {self.sink}: {self.label} does not answer: {error}") from error

    def attempts(self, scope: Scope) -> Attempts:
        """Return the fence, the promises and the shards of a scope."""
        return Attempts(*self.opened(), scope)

    def folder(self, txn: SinkTxnId) -> str:
        """Return where the tasks of an attempt write."""
        return f"{self.opened()[1]}/{folder_of(txn)}"

    def missing(self, txn: SinkTxnId, shards: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the reason why the shards are not all here as they were written."""
        here = self.attempts(txn.scope).files(txn)
        for shard in shards:
            size = here.get(f"{folder_of(txn)}/{shard['file']}")
            if size != shard["size"]:
                found = "is missing" if size is None else f"has {size} bytes, not {shard['size']}"
                return (
                    f"{shard['file']} {found}; if nothing removed it, {self.label} is not shared "
                    f"by the driver and the executors"
                )
        return None

    def write(self, txn: SinkTxnId, file: str, body: bytes) -> None:
        """Store a small file of an attempt, durably."""
        path = f"{self.folder(txn)}/{file}"
        with self.faults() as system:
            system.create_dir(path.rpartition("/")[0])
            with system.open_output_stream(path) as stream:
                stream.write(body)
            self.sealed(txn, file)

    def sealed(self, txn: SinkTxnId, file: str) -> int:
        """Make a written file durable, and return its size."""
        path = f"{self.folder(txn)}/{file}"
        with self.faults() as system:
            sync(system, path)
            sync(system, path.rpartition("/")[0])
            return int(system.get_file_info(path).size)

    def delete(self, txn: SinkTxnId, file: str) -> None:
        """Remove a file of an attempt."""
        with self.faults() as system:
            system.delete_file(f"{self.folder(txn)}/{file}")

    def batches(self, txn: SinkTxnId, file: str) -> Iterator[Any]:
        """Read a shard."""
        path = f"{self.folder(txn)}/{file}"
        with self.faults() as system, system.open_input_stream(path) as stream:
            yield from pa.ipc.open_stream(stream)

    def remove(self, txn: SinkTxnId) -> None:
        """Remove everything of an attempt; the promise first, so that no half of it is kept."""
        attempts = self.attempts(txn.scope)
        attempts.remove_record(PREPARED, txn)
        attempts.remove_files(txn)

    def check(self) -> None:
        """Try to write into the place."""
        with self.faults():
            self.attempts(Scope("probe", "probe", "probe")).raise_epoch(1)

    def check_shared(self, scope: Scope) -> None:
        """Raise Permanent unless the driver's fence is here, as on every machine that shares it."""
        with self.faults():
            if not self.attempts(scope).epoch():
                raise Permanent(
                    f"sink {self.sink}: {self.label} is not shared by the driver and the "
                    f"executors: mount the same folder on all machines, or stage in a bucket"
                )
