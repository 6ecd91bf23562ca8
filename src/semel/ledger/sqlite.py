"""The ledger in one SQLite file: the default, for pipelines on one host."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import LedgerUnavailable, LedgerUnusable, Misuse, NeedsOperator, SemelError
from semel.lease import Owner, Takeover
from semel.ledger.database import MICROSECONDS, LedgerDatabase, Row, Session, TransactionMode
from semel.ledger.ledger import SqlLedger
from semel.secrets import create_private

FAULTS: Final[Mapping[str, tuple[type[LedgerUnavailable | LedgerUnusable], str]]] = {
    # the first word of SQLite's code    what to raise        what to say
    "BUSY": (LedgerUnavailable, "another process has it locked"),
    "LOCKED": (LedgerUnavailable, "another connection has it locked"),
    "PROTOCOL": (LedgerUnavailable, "another process has it locked"),
    "IOERR": (LedgerUnavailable, "the disk does not read or write"),
    "NOMEM": (LedgerUnavailable, "there is no memory left"),
    "INTERRUPT": (LedgerUnavailable, "the statement was interrupted"),
    "FULL": (LedgerUnusable, "the disk is full; no decision was taken; make room"),
    "READONLY": (LedgerUnusable, "the file is read-only; no decision was taken; make it writable"),
    "PERM": (LedgerUnusable, "the file may not be opened; change its permissions"),
    "CANTOPEN": (LedgerUnusable, "the file cannot be opened; look at its path and permissions"),
    "CORRUPT": (LedgerUnusable, "the file is damaged; restore a backup of it"),
    "NOTADB": (LedgerUnusable, "the file is not a SQLite database; look at its path"),
}
"""What SQLite's errors mean, by code (https://sqlite.org/rescode.html)."""

NETWORK: Final = frozenset(
    {
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "drvfs", "glusterfs", "gpfs",
        "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "vboxsf",
    }
)  # fmt: skip

NETWORK_FUSE: Final = frozenset(
    {
        "ceph", "davfs", "davfs2", "gcsfuse", "glusterfs", "goofys", "hdfs", "juicefs",
        "mount-s3", "rclone", "s3fs", "seaweedfs", "smbnetfs", "sshfs",
    }
)  # fmt: skip
"""The network file systems after ``fuse.``; FUSE itself need not be one."""

_IS_LEDGER: Final = "SELECT 1 FROM sqlite_master WHERE name = 'semel_ledger_meta'"


_TRIGGERS: Final = "SELECT name FROM sqlite_master WHERE type = 'trigger'"


class SqliteLedger(SqlLedger):
    """A ledger in a file on a local disk; pickles as its path and connects when first used.

    Every transaction is on the disk when its method returns.
    """

    def __init__(
        self,
        path_or_url: str | Path,
        *,
        clock: Clock = SYSTEM_CLOCK,
        busy_seconds: float = 5.0,
    ) -> None:
        self._path = path_of(path_or_url)
        self._clock = clock
        self._busy_seconds = busy_seconds
        super().__init__(LedgerDatabase(SqliteDriver(self._path, clock, busy_seconds)))

    def exists(self) -> bool:
        """Return whether the file exists and is a ledger, without creating or changing it."""
        if not self._path.exists():
            return False
        uri = f"{self._path.as_uri()}?mode=rw"
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=self._busy_seconds)) as connection:
                return connection.execute(_IS_LEDGER).fetchone() is not None
        except sqlite3.Error as error:
            raise self._database.driver.fault(error) from error

    def __reduce__(self) -> Any:
        made = partial(SqliteLedger, clock=self._clock, busy_seconds=self._busy_seconds)
        return made, (str(self._path),)

    def backup(self, destination: str | Path) -> None:
        """Copy a snapshot of the ledger to a new file, while it is in use.

        The file appears complete, checked and synced, or it does not appear.

        Raises:
            Misuse: the file exists already, or its folder does not.
        """
        _ = self.ledger_id  # opens the ledger, and refuses one of another version
        target = Path(destination).absolute()
        if not target.parent.is_dir():
            raise Misuse(f"the folder {target.parent} does not exist; create it")
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
        create_private(partial)
        try:
            with (
                self._database.translated(),
                closing(sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True)) as ledger,
                closing(sqlite3.connect(partial, isolation_level=None)) as made,
            ):
                ledger.backup(made)
                made.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
                _check_whole(made, str(target))
            _sync(partial)
            os.link(partial, target)  # unlike a rename, it replaces nothing
        except FileExistsError as error:
            raise Misuse(f"{target} exists already; a backup replaces nothing") from error
        finally:
            partial.unlink(missing_ok=True)
        _sync(target.parent)

    def restore(self, who: str, why: str, takeover: Takeover = Takeover.WAIT) -> None:
        """End every lease and raise every epoch, if the file is not damaged."""
        uri = f"{self._path.as_uri()}?mode=rw"  # rw does not create a missing file
        with self._database.translated(), closing(sqlite3.connect(uri, uri=True)) as connection:
            _check_whole(connection, self.url)
            # Rows are restored, and nothing that would act on them: semel has no triggers.
            for (name,) in connection.execute(_TRIGGERS).fetchall():
                quoted = name.replace('"', '""')
                connection.execute(f'DROP TRIGGER "{quoted}"')
            connection.commit()
        super().restore(who, why, takeover)


def path_of(path_or_url: str | Path) -> Path:
    """Read ``sqlite:///relative``, ``sqlite:////absolute`` or a path; the answer is absolute.

    Raises:
        Misuse: it does not name a file.
    """
    text = os.fspath(path_or_url)
    if text.startswith("sqlite:"):
        head, place = text[:10], text[10:]
        if head != "sqlite:///":
            raise Misuse(f"{text!r}: use sqlite:///relative or sqlite:////absolute")
        text = place
    if text in ("", ":memory:") or text.startswith("file:"):
        raise Misuse(f"{os.fspath(path_or_url)!r} does not name a file; for a trial, use memory:")
    return Path(text).expanduser().absolute()


class SqliteDriver:
    """SQLite, by the standard library."""

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)
    words: Mapping[str, str] = {"now": ":now", "for_update": ""}

    def __init__(self, path: Path, clock: Clock, busy_seconds: float) -> None:
        self._path = path
        self._clock = clock
        self._busy_seconds = busy_seconds

    @property
    def url(self) -> str:
        return f"sqlite:///{self._path}"

    def connect(self, known: str | None) -> Session:
        """Open the file; create it unless a ledger was found there before."""
        self._check_place(known)
        is_new = not self._path.exists()
        create_private(self._path)
        connection = sqlite3.connect(
            self._path,
            timeout=self._busy_seconds,
            isolation_level=None,
            check_same_thread=False,  # the ledger's database lets one thread in at a time
        )
        try:
            connection.row_factory = sqlite3.Row
            self._set_up(connection)
        except BaseException:
            connection.close()
            raise
        if is_new:
            _sync(self._path.parent)
        return SqliteSession(connection, self._path, self._clock, self.url)

    def fault(self, error: Exception) -> SemelError:
        """Translate by SQLite's own code."""
        name = getattr(error, "sqlite_errorname", None) or ""
        word = name.removeprefix("SQLITE_").partition("_")[0]
        if word == "CONSTRAINT":
            return NeedsOperator(f"ledger {self.url}: its own constraints refused a write: {error}")
        kind, words = FAULTS.get(word, (LedgerUnusable, "SQLite refused"))
        if word in ("BUSY", "PROTOCOL"):
            words = f"{words} for {self._busy_seconds:g} s{self._owners()}"
        return kind(self.url, f"{words} ({name or type(error).__name__}: {error})")

    def leaves_doubt(self, error: Exception, session: Session) -> bool:
        """Return whether the sync failed: such a commit may be in the log after a crash."""
        name = getattr(error, "sqlite_errorname", None) or ""
        return name.startswith("SQLITE_IOERR")

    def _check_place(self, known: str | None) -> None:
        folder = self._path.parent
        if not folder.is_dir():
            raise LedgerUnusable(self.url, f"the folder {folder} does not exist; create it")
        if known is not None and not self._path.exists():
            raise LedgerUnusable(
                self.url, f"the file of ledger {known} was removed while in use; restore it"
            )
        kind = network_file_system(folder)
        if kind is not None:
            raise LedgerUnusable(
                self.url,
                f"{folder} is on a network file system ({kind}), where SQLite's locks do not "
                f"work between two hosts; use a local disk, or postgresql://…",
            )

    def _set_up(self, connection: sqlite3.Connection) -> None:
        # SQLite's busy timeout does not cover this statement, so two processes that create a
        # file at once would fail instead of waiting.
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
                break
            except sqlite3.OperationalError as error:
                is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not is_busy or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if mode != "wal":
            raise LedgerUnusable(self.url, f"its journal mode stays {mode!r}, and must be 'wal'")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA fullfsync=1")  # macOS: an ordinary fsync is not enough there

    def _owners(self) -> str:
        """Return the owners that may hold the lock; a read does not wait for it."""
        try:
            with closing(sqlite3.connect(self._path, timeout=0)) as connection:
                found = connection.execute(
                    "SELECT app, query, owner FROM semel_scope WHERE owner IS NOT NULL"
                ).fetchall()
        except sqlite3.Error:
            return ""
        owners = [
            (f"{app}/{query}", Owner.from_json(json.loads(text))) for app, query, text in found
        ]
        named = [f"{scope} is owned by {owner}{_condition(owner)}" for scope, owner in owners]
        return f"; {'; '.join(named)}" if named else ""


class SqliteSession:
    """One connection to the file."""

    is_lost = False

    def __init__(self, connection: sqlite3.Connection, path: Path, clock: Clock, url: str) -> None:
        self._connection = connection
        self._path = path
        self._clock = clock
        self._url = url
        self._inode = _inode(path)

    def begin(self, name: str, mode: TransactionMode) -> None:
        """Start a transaction; a writing one takes the file's write lock at once."""
        if _inode(self._path) != self._inode:
            self.is_lost = True
            raise LedgerUnusable(self._url, "the file was removed or replaced while in use")
        self._connection.execute("BEGIN IMMEDIATE" if mode is TransactionMode.WRITE else "BEGIN")

    def run(self, statement: str, values: Mapping[str, Any] | None = None) -> list[Row]:
        now = {"now": round(self._clock.now() * MICROSECONDS)}
        return self._connection.execute(statement, {**now, **(values or {})}).fetchall()

    def run_many(self, statement: str, many: Iterable[Mapping[str, Any]]) -> None:
        self._connection.executemany(statement, many)

    def has_table(self, name: str) -> bool:
        found = self._connection.execute(
            "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)
        )
        return found.fetchone() is not None

    def lock_schema(self) -> None:
        """Do nothing: the write lock is on the whole file."""

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        """Roll back, unless SQLite has done so after an error."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _condition(owner: Owner) -> str:
    """Return the state of an owner on this host, if it explains a lock."""
    if owner.is_gone():
        return ", which is gone"
    here = Owner.here()
    if (owner.host, owner.boot) != (here.host, here.boot):
        return ""
    try:
        stat = Path(f"/proc/{owner.pid}/stat").read_text()
    except OSError:
        return ""
    stopped = stat.rpartition(")")[2].split()[0] in "Tt"
    return ", which is stopped: continue it (kill -CONT) or end it" if stopped else ""


def _check_whole(connection: sqlite3.Connection, where: str) -> None:
    found = [row[0] for row in connection.execute("PRAGMA integrity_check")]
    if found != ["ok"]:
        raise LedgerUnusable(where, f"the file is damaged: {'; '.join(found[:3])}")


def _sync(path: Path) -> None:
    """Sync a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """Return the type of the network file system that *path* is on; None if it is unknown.

    *mounts* is the kernel's list of mounts; without one, the answer is None.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape")
        except OSError:
            return None
    kind = _type_of(path.resolve(), mounts)
    is_network = kind in NETWORK or kind.removeprefix("fuse.") in NETWORK_FUSE
    return kind if is_network else None


def _type_of(path: Path, mounts: str) -> str:
    """Return the type of the deepest mount above *path*; a later mount hides an earlier one."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), fields[1]))
        depth = len(point.parts)
        if depth >= best and path.is_relative_to(point):
            best, kind = depth, fields[2]
    return kind
