"""Backups of a SQLite ledger: another SQLite file, made while the ledger is in use."""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from semel.errors import LedgerUnavailable, LedgerUnusable
from semel.sql import backup
from semel.sql.backup import Overwrite, Snapshot

if TYPE_CHECKING:
    from semel.sql.sqlite import SqliteLedger

LOCK_SECONDS: Final = 5.0


def copy(ledger: Path, destination: Path) -> None:
    """Copy the file at *ledger* as it is at one moment, checked and synced."""
    with (
        backup.new_file(destination) as partial,
        _opened(ledger) as original,
        closing(sqlite3.connect(partial, isolation_level=None)) as made,
    ):
        original.backup(made)
        # One file, without a log beside it.
        made.execute("PRAGMA journal_mode=DELETE")
        _check_whole(made, destination)


def restore(ledger: SqliteLedger, path: Path, source: Path, overwrite: Overwrite, now: int) -> None:
    """Replace the file at *path* by the backup at *source*, in one transaction of SQLite's."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".semel-restore-") as folder:
        copied = Path(folder) / "ledger"
        with _opened(source) as original, closing(sqlite3.connect(copied)) as made:
            _check_whole(original, source)
            original.backup(made)
        saved = _snapshot(copied)
        backup.check_version(str(source), saved.version)
        current = _current(ledger, path, overwrite)
        if current is not None and overwrite is Overwrite.REFUSE:
            backup.check_replaceable(ledger.url, current, saved, now)
        ledger.close()
        with (
            closing(sqlite3.connect(copied)) as made,
            closing(sqlite3.connect(path)) as target,
        ):
            same = current is not None and current.ledger_id == saved.ledger_id
            backup.disown(made.execute, saved, current.epochs() if current and same else {})
            made.commit()
            target.execute("PRAGMA journal_mode=WAL")
            target.execute("PRAGMA synchronous=FULL")
            made.backup(target, progress=_patience(ledger.url))
    backup.sync(path.parent)


def _patience(url: str) -> Callable[[int, int, int], None]:
    """Give up after a while: on a locked file the standard library would try for ever."""
    deadline = time.monotonic() + LOCK_SECONDS

    def look(status: int, remaining: int, total: int) -> None:
        if status in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) and time.monotonic() > deadline:
            raise LedgerUnavailable(url, f"another process had it locked for {LOCK_SECONDS:g} s")

    return look


def _current(ledger: SqliteLedger, path: Path, overwrite: Overwrite) -> Snapshot | None:
    """Read what is to be replaced; a damaged file is set aside if that is asked for."""
    if not path.exists():
        return None
    try:
        assert ledger.ledger_id
        return _snapshot(path)
    except LedgerUnusable:
        if overwrite is Overwrite.REFUSE:
            raise
    ledger.close()
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(path.with_name(f"{path.name}.damaged{suffix}"))
    return None


def _snapshot(path: Path) -> Snapshot:
    with _opened(path) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("BEGIN")

        def ask(statement: str) -> list[Any]:
            return connection.execute(statement).fetchall()

        try:
            return backup.take(ask)
        except (sqlite3.Error, ValueError) as error:
            raise LedgerUnusable(str(path), f"it holds no ledger ({error})") from error


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file that is there, for reading only."""
    if not path.is_file():
        raise LedgerUnusable(str(path), "there is no such file")
    address = f"file:{quote(str(path))}?mode=ro"
    with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
        yield connection


def _check_whole(connection: sqlite3.Connection, where: Path) -> None:
    try:
        found = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    except sqlite3.DatabaseError as error:
        raise LedgerUnusable(str(where), f"the file is not a whole database ({error})") from error
    if found != ["ok"]:
        raise LedgerUnusable(str(where), f"the file is damaged: {'; '.join(found[:3])}")
