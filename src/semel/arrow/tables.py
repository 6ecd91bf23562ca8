"""A sink over a table that has atomic commits: the flow that Iceberg and Delta share.

    tasks write data files ──prepare: a record──▶ promised ──commit──▶ files + proof, one commit

The proof of a commit is kept by the table itself, in the commit that adds the files.  Every
commit is sent once, on the state of the table that was searched for the proof: libraries that
repeat a refused commit on a newer state would let two processes that recover one cycle both
append.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Protocol

from semel.arrow.attempts import PREPARED, Attempts, folder_of, is_file_of
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, Misuse, Permanent, Retryable, SemelError, reason_of
from semel.events import log
from semel.pipeline.sink import (
    Found,
    Leftover,
    Receipt,
    SinkFatal,
    SinkFinding,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Token,
    digest_of,
    tally_of,
)
from semel.pipeline.txn import Scope, SinkTxnId, checked_name

DEFAULT_FILE_BYTES: Final = 128 << 20

# Other writers of the table win some races; a commit that loses this many in a row waits
# for the next retry of the cycle.
_RACES: Final = 20
_LOST_REPLIES: Final = 3
_PAUSE_SECONDS: Final = 0.05


REWRITTEN: Final = "rewritten-"
"""How the folders begin in which a write by key puts the rows of others that it keeps."""


class TableWrite(StrEnum):
    """What the rows of a cycle do to those that are in the table."""

    APPEND = "append"
    """They are added to them."""

    UPSERT = "upsert"
    """They replace those with the same key."""

    DELETE = "delete"
    """They delete those with the same key."""

    OVERWRITE = "overwrite"
    """They replace all rows of the partitions that they are in."""


class CommitRefused(Exception):
    """The table has moved on since it was loaded; nothing was committed."""


class LoadedTable(Protocol):
    """A table as it was when it was loaded."""

    @property
    def identity(self) -> str:
        """What stays the same for the table's life, and differs when it is made again."""

    def attempts(self, scope: Scope) -> Attempts:
        """Return the files that are kept beside the table."""

    def proof(self, txn: SinkTxnId) -> str | None:
        """Return the beginning of the digest of the token that was committed; None: no proof."""

    def mark(self, scope: Scope) -> SinkTxnId | None:
        """Return the highest committed cycle of the scope."""

    def may_have_forgotten(self, txn: SinkTxnId) -> bool:
        """Return whether *txn* may be committed though there is no proof of it any more."""

    def live_paths(self) -> Iterable[str]:
        """List the data files that readers read now."""

    def refusal(self, record: Mapping[str, Any]) -> str | None:
        """Return why the record could never be committed, as far as one can say before."""

    def commit(self, txn: SinkTxnId, record: Mapping[str, Any], digest: str) -> None:
        """Commit the record's files and the proof, once, on this state of the table.

        Raises:
            CommitRefused, SemelError: nothing was committed; any other error: unknown.
        """

    def own_files(self, txn: SinkTxnId) -> Mapping[str, int]:
        """Return the attempt's data files that readers read now, with their numbers of rows."""

    def keeps_files(self) -> str:
        """Return why no file may be taken from the table; empty if it may."""

    def was_undone(self, txn: SinkTxnId) -> bool:
        """Return whether the table has the proof that the attempt's rows were taken away."""

    def take_away(self, txn: SinkTxnId) -> None:
        """Remove the attempt's own files, and set the proof, once, on this state of the table.

        Raises:
            CommitRefused, SemelError: nothing was committed; any other error: unknown.
        """

    def files_of(self, txn: SinkTxnId, record: Mapping[str, Any]) -> set[str] | None:
        """Return the paths of the data files that the commit of *txn* added; None if unknown."""


class TableSink:
    """What every sink over a table does; a subclass loads the table."""

    kind = "table"
    writes: tuple[TableWrite, ...] = tuple(TableWrite)

    def __init__(self, table: str, rows: Any, name: str, write: str, file_bytes: int) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        self.table = table
        self.file_bytes = file_bytes
        if write not in self.writes:
            raise Misuse(
                f"{self.kind} sink {name}: write is one of {', '.join(self.writes)}, got {write!r}"
            )
        self.write = TableWrite(write)
        self._epochs: dict[Scope, int] = {}

    @property
    def replaces_rows(self) -> bool:
        """Whether a later cycle's rows may take the place of earlier ones."""
        return self.write is not TableWrite.APPEND

    def _load(self) -> LoadedTable:
        raise NotImplementedError

    def fence(self, scope: Scope, epoch: int) -> None:
        attempts = self._load().attempts(scope)
        with self._storage_faults():
            newest = attempts.epoch()
            if epoch < newest:
                raise Fenced(self._fenced(scope, epoch, newest))
            attempts.raise_epoch(epoch)
        self._epochs[scope] = epoch

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Check that the winners' files are there, and keep a record of them."""
        return _outcome(lambda: self._prepare(txn, receipts))

    def _prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        table = self._load()
        attempts = table.attempts(txn.scope)
        with self._storage_faults():
            mine, newest = self._epochs.get(txn.scope, 0), attempts.epoch()
            if mine < newest:
                return SinkFatal(self._fenced(txn.scope, mine, newest))
            try:
                token, record = _record(table, self.write, txn, receipts)
            except ValueError as error:
                return SinkFatal(f"{txn}: {error}")
            proof, known = table.proof(txn), attempts.read(PREPARED, txn)
            if proof is not None or known is not None:
                if _proves(proof, token) or (known is not None and known["token"] == token):
                    return SinkOK(token)
                return SinkFatal(f"{txn} was prepared before, with other rows")
            mark = table.mark(txn.scope)
            if mark is not None and txn.cycle <= mark.cycle:
                return SinkFatal(f"{txn} is at or below the mark {mark}: another attempt committed")
            lost = _missing(attempts, txn, record)
            if lost:
                return SinkFatal(f"{txn}: {lost}, though a task staged it")
            if (never := table.refusal(record)) is not None:
                return SinkFatal(f"{self.kind} sink {self.name}, {txn}: {never}")
            attempts.write(PREPARED, txn, record)
            reach(CrashPoint.TABLE_PREPARE_RECORDED, self.name)
        return SinkOK(token)

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Add the recorded files and set the proof, in one commit of the table."""
        return _outcome(lambda: self._commit(txn, token))

    def _commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        lost_replies = 0
        reason = f"other writers won {_RACES} races"
        for race in range(_RACES):
            time.sleep(random.uniform(0, _PAUSE_SECONDS) * min(race, 10))
            record, table = self._read(txn)
            if (said := self._settled(table, txn, token)) is not None:
                if isinstance(said, SinkOK):
                    self._tidy(table, txn, record)
                return said
            if record is None:
                return SinkFatal(
                    f"{txn} cannot be committed: it was not prepared, was aborted, or its record "
                    f"is lost"
                )
            if (wrong := self._broken_promise(table, txn, token, record)) is not None:
                # Another process may have committed it since, and removed what is used no more.
                said = self._settled(self._load(), txn, token)
                return said or SinkFatal(f"{txn} cannot be committed: {wrong}")
            try:
                self._send(table, txn, record)
            except CommitRefused:
                continue
            except SemelError:
                raise
            except Exception as error:  # noqa: BLE001  after any error the commit may have landed
                lost_replies += 1
                reason = f"the answer to the commit is unknown: {reason_of(error)}"
                if lost_replies == _LOST_REPLIES:
                    break
            else:
                reach(CrashPoint.TABLE_COMMIT_SENT, self.name)
                self._tidy(table, txn, record)
                return SinkOK()
        return SinkRetryable(f"{txn}: {reason}; it is looked up again at the next try")

    def _read(self, txn: SinkTxnId) -> tuple[dict[str, Any] | None, LoadedTable]:
        """Read the table and the record.

        Another process removes the record after its commit, and a table that was loaded earlier
        does not have that commit.
        """
        table = self._load()
        with self._storage_faults():
            record = table.attempts(txn.scope).read(PREPARED, txn)
        return record, self._load() if record is None else table

    def _settled(self, table: LoadedTable, txn: SinkTxnId, token: Token) -> SinkOutcome | None:
        """Return the answer that the table itself gives about *txn*; None if it is still open."""
        if token.get("table") != table.identity:
            return SinkFatal(
                f"{txn} was prepared for another table than {self.table} is now: the token "
                f"belongs to another sink, or the table was dropped and made again"
            )
        proof = table.proof(txn)
        if proof is not None:
            if not _proves(proof, token):
                return SinkFatal(f"{txn} was committed with another token than this one")
            return SinkOK()
        mark = table.mark(txn.scope)
        if mark is not None and txn.cycle <= mark.cycle:
            return SinkFatal(
                f"{txn} is at or below the mark {mark} of {self.table}, which has no proof of it: "
                f"another attempt was committed"
            )
        return None

    def _broken_promise(
        self, table: LoadedTable, txn: SinkTxnId, token: Token, record: Mapping[str, Any]
    ) -> str | None:
        if record["token"] != token:
            return "the token is not the one that was given when it was prepared"
        with self._storage_faults():
            return _missing(table.attempts(txn.scope), txn, record)

    def _send(self, table: LoadedTable, txn: SinkTxnId, record: Mapping[str, Any]) -> None:
        table.commit(txn, record, _digest(record["token"]))

    def _tidy(self, table: LoadedTable, txn: SinkTxnId, record: Mapping[str, Any] | None) -> None:
        """Drop the promise and what losing tasks wrote; a failure leaves them for a sweep."""
        if record is None:
            return
        try:
            attempts = table.attempts(txn.scope)
            # Which files a write by key added is read from its commit.
            now = self._load() if record.get("keys") else table
            attempts.remove_paths(_others(now, txn, record))
            attempts.keep_committed(txn, record)
        except (OSError, SemelError) as error:
            log.warning(
                "staged files left for the next sweep",
                extra={"cycle": str(txn.cycle), "sink": self.name, "reason": reason_of(error)},
            )

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return _outcome(lambda: self._abort(txn, token))

    def _abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        table = self._load()
        attempts = table.attempts(txn.scope)
        with self._storage_faults():
            if _is_committed(table, txn):
                return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
            known = attempts.read(PREPARED, txn)
            if token is not None and known is not None and known["token"] != token:
                return SinkFatal(f"{txn} was prepared with another token; nothing was deleted")
            if token is not None and token.get("table") != table.identity:
                return SinkFatal(f"{txn} was prepared for another table; nothing was deleted")
            _remove(attempts, txn)
        return SinkOK()

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        """Look for the proof in the table, then for the record of the promise."""
        try:
            record, table = self._read(txn)
            if table.was_undone(txn):
                return SinkFinding(Found.GONE, f"{self.table} has the proof that it was undone")
            if table.proof(txn) is not None:
                return SinkFinding(Found.VISIBLE, f"{self.table} has the proof of its commit")
            attempts = table.attempts(txn.scope)
            if record is not None:
                wrong = _missing(attempts, txn, record)
                if record["token"]["table"] != table.identity:
                    wrong = "it was prepared for the table that was here before"
                evidence = wrong or f"{len(record['files'])} data files, recorded by prepare"
                return SinkFinding(Found.GONE if wrong else Found.HELD, evidence)
            staged, mark = len(attempts.files(txn)), table.mark(txn.scope)
            evidence = f"no record of it; {staged} staged files; the mark is {mark}"
            return SinkFinding(Found.GONE, evidence)
        except (SemelError, OSError) as error:
            return SinkFinding(Found.UNREACHABLE, reason_of(error))

    def check_undo(self, txn: SinkTxnId, token: Token) -> str:
        table = self._load()
        with self._storage_faults():
            if table.was_undone(txn):
                return "its rows were taken away before"
            return self._irreversible(table, txn, token)

    def _irreversible(self, table: LoadedTable, txn: SinkTxnId, token: Token) -> str:
        if self.replaces_rows:
            return f"write='{self.write}' replaces rows, and those that it replaced are not kept"
        if token.get("table") != table.identity:
            return "the table was dropped and made again"
        if kept := table.keeps_files():
            return kept
        own = table.own_files(txn)
        rows = sum(own.values())
        if rows != token["rows"] or any(f"/{REWRITTEN}" in path for path in own):
            return (
                f"its own files have {rows} rows now, and it wrote {token['rows']}: files were "
                f"rewritten since, as by a compaction, or rows were deleted; delete its rows by key"
            )
        return ""

    def undo(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Remove the attempt's own data files from the table, and set a proof, in one commit."""
        return _outcome(lambda: self._undo(txn, token))

    def _undo(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        reason = f"other writers won {_RACES} races"
        for race in range(_RACES):
            time.sleep(random.uniform(0, _PAUSE_SECONDS) * min(race, 10))
            table = self._load()
            with self._storage_faults():
                if table.was_undone(txn):
                    return SinkOK()
                if wrong := self._irreversible(table, txn, token):
                    return SinkFatal(f"{txn} cannot be undone: {wrong}")
            try:
                table.take_away(txn)
            except CommitRefused:
                continue
            except SemelError:
                raise
            except Exception as error:  # noqa: BLE001  it may have landed: the table is asked again
                reason = f"the answer of the table is unknown: {reason_of(error)}"
            else:
                return SinkOK()
        return SinkRetryable(f"{txn}: {reason}")

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        """List this scope's records whose cycles the table does not have."""
        table = self._load()
        attempts = table.attempts(scope)
        with self._storage_faults():
            return [
                txn
                for txn in attempts.records(PREPARED)
                if attempts.read(PREPARED, txn) is not None and table.proof(txn) is None
            ]

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        table = self._load()
        attempts = table.attempts(scope)
        swept = []
        with self._storage_faults():
            for txn in {*attempts.records(PREPARED), *attempts.with_files(table.mark(scope))}:
                if table.proof(txn) is not None:
                    if _sweep_committed(table, txn):
                        swept.append(txn)
                elif is_loser(txn) and not _is_committed(table, txn):
                    _remove(attempts, txn)
                    swept.append(txn)
        return sorted(swept, key=lambda txn: (txn.cycle, txn.attempt))

    def leftovers(self, scope: Scope) -> list[Leftover]:
        table = self._load()
        with self._storage_faults():
            mark = table.mark(scope)
            return table.attempts(scope).leftovers(mark, lambda txn: _is_committed(table, txn))

    def mark(self, scope: Scope) -> SinkTxnId | None:
        with self._storage_faults():
            return self._load().mark(scope)

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"{self.kind} sink {self.name}: scope {scope} belongs to epoch {newest}, this process "
            f"holds {mine}; it was fenced and must stop"
        )

    def _storage_faults(self) -> contextlib.AbstractContextManager[None]:
        return storage_faults(f"{self.kind} sink {self.name}")


@contextlib.contextmanager
def storage_faults(doing: str) -> Iterator[None]:
    """Translate the errors of the table's storage.

    Raises:
        Permanent: it refuses access.
        Retryable: anything else; no row became visible.
    """
    try:
        yield
    except PermissionError as error:
        raise Permanent(f"{doing}: {error}; semel reads and writes below the table") from error
    except OSError as error:
        raise Retryable(f"{doing}: {error}; it may work later") from error


def checked_label(txn: SinkTxnId) -> SinkTxnId:
    """Return *txn* if its label can be the name of a folder.

    Raises:
        Misuse: it cannot.
    """
    if SinkTxnId.parse(txn.scope, txn.label) != txn:
        raise Misuse(f"{txn.label!r} cannot be the name of a folder")
    return txn


def _record(
    table: LoadedTable, write: TableWrite, txn: SinkTxnId, receipts: Sequence[Receipt]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the token and the record; a `ValueError` says why they cannot be made."""
    files = [file for receipt in receipts for file in receipt.detail["files"]]
    layouts = {json.dumps(receipt.detail["layout"]) for receipt in receipts if receipt.tally.rows}
    schemas = {text for receipt in receipts if (text := receipt.detail["schema"]) is not None}
    # Only writes by key have them: the keys of the rows, in files of their own.
    keys = [file for receipt in receipts for file in receipt.detail.get("keys", ())]
    paths = [file["path"] for file in (*files, *keys)]
    if len(schemas) > 1 or len(layouts) > 1:
        raise ValueError("tasks of one batch staged rows of different schemas or partitions")
    if len(set(paths)) < len(paths):
        raise ValueError("two receipts name the same file; task names must be unique")
    strange = [
        path for path in paths if not path.startswith(f"{folder_of(txn)}/") or "/../" in path
    ]
    if strange:
        raise ValueError(f"a task names a file of another attempt: {strange[0]}")
    tally = tally_of(receipts)
    token = {
        "attempt": txn.attempt,
        "digest": digest_of(receipts),
        "rows": tally.rows,
        "hash": tally.hash,
        "table": table.identity,
        "schema": schemas.pop() if schemas else None,
    }
    return token, {"token": token, "write": str(write), "files": files, "keys": keys}


def _digest(token: Mapping[str, Any]) -> str:
    text = json.dumps(dict(token), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _proves(proof: str | None, token: Mapping[str, Any]) -> bool:
    return bool(proof) and _digest(token).startswith(proof or "")


def _is_committed(table: LoadedTable, txn: SinkTxnId) -> bool:
    if table.proof(txn) is not None:
        return True
    if not table.may_have_forgotten(txn):
        return False
    return any(is_file_of(txn, path) for path in table.live_paths())


def _missing(attempts: Attempts, txn: SinkTxnId, record: Mapping[str, Any]) -> str | None:
    present = attempts.files(txn)
    for file in (*record["files"], *record.get("keys", ())):
        if present.get(file["path"]) != file["size"]:
            return f"{file['path']} is missing or has another size than {file['size']} bytes"
    return None


def _others(table: LoadedTable, txn: SinkTxnId, record: Mapping[str, Any]) -> list[str]:
    """List the files of a committed attempt that its commit did not add."""
    winners = table.files_of(txn, record)
    if winners is None:
        return []
    return [path for path in table.attempts(txn.scope).files(txn) if path not in winners]


def _sweep_committed(table: LoadedTable, txn: SinkTxnId) -> bool:
    attempts = table.attempts(txn.scope)
    promise = attempts.read(PREPARED, txn)
    record = promise or attempts.committed(txn)
    if record is None:
        return False  # an older one: which of its files the table uses is not known any more
    others = _others(table, txn, record)
    attempts.remove_paths(others)
    if promise is not None:
        attempts.keep_committed(txn, promise)
    return promise is not None or bool(others)


def _remove(attempts: Attempts, txn: SinkTxnId) -> None:
    # The record first, so that nothing can be committed after a crash here.
    attempts.remove_record(PREPARED, txn)
    attempts.remove_files(txn)


def _outcome(call: Callable[[], SinkOutcome]) -> SinkOutcome:
    try:
        return call()
    except Permanent as error:
        return SinkFatal(reason_of(error))
    except Retryable as error:
        return SinkRetryable(reason_of(error))
