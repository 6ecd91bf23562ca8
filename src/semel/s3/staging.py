"""The uploads of tasks: parts under the final keys, invisible until they are completed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from semel.arrow.formats import Format, RowFile, extension, open_rows
from semel.arrow.rowfiles import CountedFile, RowFiles, Values, hive_folder, safe_name, split
from semel.pipeline.sink import Batch, Receipt, Schema
from semel.pipeline.txn import Scope, SinkTxnId
from semel.s3.store import ObjectStore

# S3 takes 10,000 parts of an object, each but the last of 5 MiB or more.
PARTS: Final = 10_000
SMALLEST_PART_BYTES: Final = 5 << 20

_NAME: Final = re.compile(
    r"part-([0-9a-f]{20})\.(g\d+\.b\d+\.[A-Za-z0-9_-]+)\.[^./]*\.\d+\.[a-z.]+"
)


@dataclass(frozen=True, slots=True)
class StagedObject:
    """One upload of one task."""

    name: str
    """The key below the prefix."""

    upload_id: str
    tags: Sequence[str]
    """Those of its parts, in their order."""

    rows: int
    size: int
    values: Sequence[Any] = ()
    """The values of the partition columns, as JSON."""


def object_name(folder: str, txn: SinkTxnId, task: str, number: int, end: str) -> str:
    """Return a key that only this task attempt of this transaction uses."""
    name = f"part-{txn.scope.slug}.{txn.label}.{task}.{number:05d}.{end}"
    return f"{folder}/{name}" if folder else name


def txn_of(scope: Scope, name: str) -> SinkTxnId | None:
    """Return the transaction of a key; None if the key is not of this scope."""
    match = _NAME.fullmatch(name.rpartition("/")[2])
    if match is None or match[1] != scope.slug:
        return None
    return SinkTxnId.parse(scope, match[2])


def metadata_of(txn: SinkTxnId) -> dict[str, str]:
    """Return the metadata by which an object proves whose it is."""
    return {"semel-scope": txn.scope.slug, "semel-txn": txn.label}


@dataclass(frozen=True, slots=True)
class S3Stager:
    """The settings that a task needs to write for one transaction."""

    store: ObjectStore
    txn: SinkTxnId
    format: Format
    compression: str
    object_bytes: int
    part_bytes: int
    partition_by: tuple[str, ...]

    def open(self, task: str) -> S3Writer:
        return S3Writer(self, task)


class S3Writer:
    """The uploads of one task attempt; a task without rows has none."""

    def __init__(self, stager: S3Stager, task: str) -> None:
        self._stager = stager
        self._task = task
        self._name = safe_name(task)
        self._begun: list[UploadedFile] = []
        self._done: list[StagedObject] = []
        self._files = RowFiles(
            self._begin,
            self._finish,
            stager.object_bytes,
            lambda batch: split(batch, stager.partition_by),
        )

    def write(self, batch: Batch) -> None:
        """Write the rows; a part is uploaded whenever one is full."""
        self._files.write(batch)

    def _begin(self, values: Values, schema: Schema) -> tuple[UploadedFile, RowFile]:
        stager = self._stager
        end = extension(stager.format, stager.compression)
        folder = hive_folder(stager.partition_by, values)
        name = object_name(folder, stager.txn, self._name, len(self._begun), end)
        about = metadata_of(stager.txn)
        begun = stager.store.call("create_multipart_upload", name, Metadata=about)
        file = UploadedFile(stager.store, name, begun["UploadId"], stager.part_bytes)
        self._begun.append(file)
        return file, open_rows(stager.format, stager.compression, schema, file)

    def _finish(self, file: UploadedFile, values: Values, rows: int) -> None:
        file.finish()
        known = [value if isinstance(value, bool | int | None) else str(value) for value in values]
        self._done.append(
            StagedObject(file.name, file.upload_id, file.tags, rows, file.size, known)
        )

    def finish(self) -> Receipt:
        self._files.close()
        return self._files.receipt(self._task, objects=[asdict(one) for one in self._done])

    def discard(self) -> None:
        """Abort the task's uploads, as far as possible."""
        self._files.abandon()
        for file in self._begun:
            with contextlib.suppress(Exception):
                self._stager.store.give_up(file.name, file.upload_id)


class UploadedFile(CountedFile):
    """A file whose bytes are uploaded in parts while they are written."""

    def __init__(self, store: ObjectStore, name: str, upload_id: str, part_bytes: int) -> None:
        super().__init__()
        self.name = name
        self.upload_id = upload_id
        self.tags: list[str] = []
        self._store = store
        self._part_bytes = part_bytes
        self._waiting = bytearray()

    def write(self, data: Any) -> int:
        """Keep *data*, and upload the parts that are full."""
        view = memoryview(data).cast("B")
        self._waiting += view
        self.size += len(view)
        while len(self._waiting) >= self._part_bytes:
            part = bytes(self._waiting[: self._part_bytes])
            del self._waiting[: self._part_bytes]
            self._upload(part)
        return len(view)

    def _upload(self, part: bytes) -> None:
        where = {"UploadId": self.upload_id, "PartNumber": len(self.tags) + 1}
        done = self._store.call("upload_part", self.name, Body=part, **where)
        self.tags.append(done["ETag"])

    def finish(self) -> None:
        """Upload the last part, which may be small."""
        if self._waiting or not self.tags:
            self._upload(bytes(self._waiting))
        self._waiting.clear()


def staged_objects(receipts: Sequence[Receipt]) -> list[StagedObject]:
    """Return the objects of the winning tasks."""
    return [StagedObject(**one) for receipt in receipts for one in receipt.detail["objects"]]


def schemas_of(receipts: Sequence[Receipt]) -> set[str]:
    """Return the schemas of the winning tasks' rows."""
    return {text for receipt in receipts if (text := receipt.detail["schema"]) is not None}
