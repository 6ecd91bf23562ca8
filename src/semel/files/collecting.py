"""The prepare step of the files sink: the winners' files, checked, in one sealed folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from semel.crashpoints import CrashPoint, reach
from semel.files.disk import names_in
from semel.files.formats import Format
from semel.files.layout import TOKEN_FILE, Layout, StagedFile, is_hidden, seal
from semel.files.staging import hash_of
from semel.pipeline.sink import Receipt, tally_of
from semel.pipeline.txn import SinkTxnId

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
            if os.path.basename(folder) != folder or os.path.basename(file.name) != file.name:
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
