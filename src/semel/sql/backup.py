"""Copies of a ledger: what they hold, and when one may replace what is there.

A restored ledger has no owners, and its epochs are at least those it replaces:
whoever still runs is fenced.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from semel.errors import LeaseHeld, LedgerUnusable, Misuse, NeedsOperator
from semel.lease import Owner
from semel.sql import schema
from semel.sql.database import Row, Session
from semel.sql.rows import MICROSECONDS

# More starts than there are between two backups.
EPOCH_LEAP: Final = 10_000

_COLUMN: Final = re.compile(r"[a-z_]+")


class Overwrite(StrEnum):
    """What a restore does with a ledger that is in its place."""

    REFUSE = "refuse"
    """Keep it if it has a live owner, or decisions that the backup does not have."""

    FORCE = "force"
    """Replace it whatever it has: those decisions are lost."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a ledger holds at one moment."""

    ledger_id: str
    version: int
    tables: Mapping[str, Sequence[Mapping[str, Any]]]

    def epochs(self) -> dict[tuple[str, str], int]:
        """The epoch of every scope."""
        return {(row["app"], row["query"]): row["epoch"] for row in self.tables["semel_scope"]}


def take(ask: Callable[[str], list[Row]]) -> Snapshot:
    """Read everything; *ask* runs in one transaction that sees one moment."""
    (meta,) = ask("SELECT version, ledger_id FROM semel_ledger_meta")
    tables = {
        table: [dict(zip(row.keys(), tuple(_values(row)), strict=True)) for row in listed]
        for table in schema.TABLES
        for listed in [ask(f"SELECT * FROM {table}")]
    }
    return Snapshot(meta["ledger_id"], meta["version"], tables)


def check_version(where: str, version: int) -> None:
    """Refuse a backup that this code does not understand.

    Raises:
        LedgerUnusable: it is of a newer version.
    """
    if version > schema.VERSION:
        raise LedgerUnusable(
            where,
            f"the backup has schema version {version}, and this semel knows versions up to "
            f"{schema.VERSION}; upgrade semel",
        )


def check_replaceable(url: str, current: Snapshot, backup: Snapshot, now: int) -> None:
    """Refuse to replace a ledger that is in use or knows more than the backup.

    Raises:
        LeaseHeld: an owner is live.
        NeedsOperator: decisions would be lost.
    """
    for row in current.tables["semel_scope"]:
        if row["owner"] is None or row["lease_until"] <= now:
            continue
        owner = Owner.from_json(json.loads(row["owner"]))
        if not owner.is_gone():
            left = (row["lease_until"] - now) / MICROSECONDS
            raise LeaseHeld(f"{row['app']}/{row['query']}", str(owner), left)
    if lost := lost_with(current, backup):
        raise NeedsOperator(
            f"ledger {url}: the backup lacks what is there: {'; '.join(lost)}; "
            f"restore elsewhere and compare, or force it"
        )


def lost_with(current: Snapshot, backup: Snapshot) -> list[str]:
    """Say in words what *current* has decided and *backup* does not know."""
    if not current.tables["semel_scope"]:
        return []
    if current.ledger_id != backup.ledger_id:
        return [f"ledger {current.ledger_id} is another ledger than {backup.ledger_id}"]
    known = backup.epochs()
    lost = [
        f"{app}/{query} is at epoch {epoch}, in the backup at {known.get((app, query), 0)}"
        for (app, query), epoch in current.epochs().items()
        if epoch > known.get((app, query), 0)
    ]
    decided = _decisions(backup)
    pruned = {
        (row["app"], row["query"]): (row.get("pruned_generation"), row.get("pruned_batch"))
        for row in backup.tables["semel_scope"]
    }
    for decision in sorted(_decisions(current) - decided):
        app, query, generation, batch, _, verdict = decision
        forgotten = pruned.get((app, query), (None, None))
        if forgotten[0] is None or (generation, batch) > forgotten:
            lost.append(f"{app}/{query}/g{generation}.b{batch} is {verdict}")
    for row in current.tables["semel_generation"]:
        if row not in backup.tables["semel_generation"]:
            lost.append(f"{row['app']}/{row['query']} has generation {row['number']}")
    return lost


def load(session: Session, backup: Snapshot, epochs: Mapping[tuple[str, str], int]) -> None:
    """Replace the ledger's tables by those of *backup*, brought up to date.

    The transaction of *session* sees to it that this happens whole or not at all.
    """
    for table in (*schema.TABLES, "semel_ledger_meta"):
        session.run(f"DROP TABLE {table}")
    schema.make(session, backup.version, backup.ledger_id)
    for table in schema.TABLES:
        for row in backup.tables.get(table, ()):
            if not all(_COLUMN.fullmatch(name) for name in row):
                raise Misuse(f"the backup has a column that no ledger has: {', '.join(row)}")
            named = ", ".join(f":{name}" for name in row)
            session.run(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({named})", row)
    schema.upgrade(session, backup.version)
    disown(session.run, backup, epochs)


def disown(
    run: Callable[[str, Mapping[str, Any]], object],
    backup: Snapshot,
    epochs: Mapping[tuple[str, str], int],
) -> None:
    """End every lease of a restored ledger, and let no epoch be given out twice.

    *epochs* are those of the ledger that is replaced.  Where it is lost, nobody knows how far
    it came, and the sinks would take the restored one's owners for fenced ones: it leaps.
    """
    for (app, query), epoch in backup.epochs().items():
        known = epochs.get((app, query))
        raised = epoch + EPOCH_LEAP if known is None else max(epoch, known)
        run(
            "UPDATE semel_scope SET owner = NULL, lease_until = 0, epoch = :epoch"
            " WHERE app = :app AND query = :query",
            {"app": app, "query": query, "epoch": raised},
        )


def write_lines(snapshot: Snapshot, destination: Path) -> None:
    """Write *snapshot* as JSON lines; the last one proves that the file is whole."""
    seal = hashlib.sha256()
    with new_file(destination) as partial, partial.open("wb") as file:
        head = {"ledger_id": snapshot.ledger_id, "version": snapshot.version}
        listed = [[table, row] for table, rows in snapshot.tables.items() for row in rows]
        for line in [head, *listed]:
            text = json.dumps(line).encode() + b"\n"
            seal.update(text)
            file.write(text)
        file.write(json.dumps({"rows": len(listed), "sha256": seal.hexdigest()}).encode() + b"\n")


def read_lines(source: Path) -> Snapshot:
    """Read what `write_lines` wrote.

    Raises:
        LedgerUnusable: there is no such file, or it is not whole.
    """
    try:
        *lines, last = source.read_bytes().splitlines(keepends=True)
        seal = json.loads(last)
        whole = seal["sha256"] == hashlib.sha256(b"".join(lines)).hexdigest()
        head, *listed = [json.loads(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerUnusable(str(source), f"it is not a backup of a ledger ({error})") from error
    if not whole:
        raise LedgerUnusable(str(source), "the backup is damaged: its checksum does not match")
    tables: dict[str, list[Mapping[str, Any]]] = {table: [] for table in schema.TABLES}
    for table, row in listed:
        tables[table].append(row)
    return Snapshot(head["ledger_id"], head["version"], tables)


@contextmanager
def new_file(destination: Path) -> Iterator[Path]:
    """Give a name to write to; when the block returns, its file is *destination*, whole and synced.

    Raises:
        Misuse: there is such a file already, or no such folder.
    """
    partial = destination.with_name(f".{destination.name}.{uuid.uuid4().hex}.partial")
    if not destination.parent.is_dir():
        raise Misuse(f"the folder {destination.parent} does not exist; make it")
    if destination.exists():
        raise Misuse(f"{destination} exists already; a backup replaces nothing")
    try:
        yield partial
        sync(partial)
        os.link(partial, destination)  # unlike a rename, it replaces nothing
    except FileExistsError as error:
        raise Misuse(f"{destination} exists already; a backup replaces nothing") from error
    finally:
        partial.unlink(missing_ok=True)
    sync(destination.parent)


def sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _decisions(snapshot: Snapshot) -> set[tuple[Any, ...]]:
    return {
        (
            *(row[name] for name in ("app", "query", "generation", "batch", "attempt")),
            "aborted" if row["state"] == "aborted" else "committed",
        )
        for row in snapshot.tables["semel_attempt"]
        if row["decided_at"] is not None
    }


def _values(row: Row) -> Iterator[Any]:
    return (row[name] for name in row.keys())  # noqa: SIM118 - sqlite3.Row iterates over values
