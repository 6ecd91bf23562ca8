"""The files sink: one folder per cycle, which appears complete, by one rename.

    staged/<txn>/<task>/ ──prepare: move the winners──▶ prepared/<txn>/ ──commit──▶ cycle=…/

`semel.files.layout` draws the folders.  There are no locks: every step is one
atomic operation of the file system that another process may repeat.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

from semel.arrow.formats import (
    Format,
    check_schema,
    checked_compression,
    checked_format,
    read_rows,
)
from semel.arrow.tally import schema_from_text, tally_all
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, Misuse, NeedsOperator, Permanent, SemelError, reason_of
from semel.events import log
from semel.files.disk import fault, faults, names_in, remove_tree, rename_folder, sync_folder
from semel.files.layout import (
    HIDDEN,
    TOKEN_FILE,
    Foreign,
    Layout,
    Seal,
    is_hidden,
    read_seal,
    tenants_of,
    what_is_wrong,
)
from semel.files.staging import FilesStager, Unpreparable, collect, token_of
from semel.pipeline.sink import (
    Found,
    Guarantee,
    Receipt,
    Schema,
    SinkFatal,
    SinkFinding,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Tally,
    Tenant,
    Token,
    digest_of,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId, checked_name

# Readers derive a column from the folders' names, and it hides one of the same name.
PARTITION_COLUMN: Final = "cycle"

# Large enough for Spark to read in a few tasks, small enough to copy.
DEFAULT_FILE_BYTES: Final = 512 << 20


class FilesSink:
    """Parquet, JSON-lines or CSV files under *path*, which driver and executors share.

    Readers get a column ``cycle`` from the folders' names.  *compression* is one of
    the format's; *file_bytes* is the size at which a task begins its next file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        rows: Any = None,
        *,
        name: str = "files",
        format: str = "parquet",
        compression: str | None = None,
        file_bytes: int = DEFAULT_FILE_BYTES,
        schema: str | None = None,
    ) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        self.schema = schema
        self.path = _local_path(os.fspath(path))
        self.format = checked_format(f"files sink {name}", format)
        self.compression = checked_compression(self.format, compression)
        self.file_bytes = file_bytes
        self._epochs: dict[Scope, int] = {}

    def __repr__(self) -> str:
        return f"FilesSink({self.path!r}, name={self.name!r}, format={str(self.format)!r})"

    @property
    def place(self) -> str:
        """The folder, with symbolic links resolved."""
        return os.path.realpath(self.path)

    def check(self, schema: Schema | None) -> None:
        """Try the operations of a cycle: create folders, write, rename without replacing."""
        with faults(f"files sink {self.name}"):
            home = os.path.join(self.path, HIDDEN)
            os.makedirs(home, exist_ok=True)
            if os.stat(home).st_dev != os.stat(self.path).st_dev:
                raise Permanent(
                    f"files sink {self.name}: {home} is on another file system than {self.path}, "
                    f"and an atomic rename between them is impossible; unmount it"
                )
            _try_rename(home)
        if schema is not None:
            check_schema(self.format, schema, reserved=(PARTITION_COLUMN,))

    def fence(self, scope: Scope, epoch: int) -> None:
        layout = Layout(self.path, scope)
        with faults(f"files sink {self.name}"):
            layout.make(self.name)
            newest = layout.epoch()
            if epoch < newest:
                raise Fenced(self._fenced(scope, epoch, newest))
            layout.raise_epoch(epoch)
        self._epochs[scope] = epoch

    def stager(self, txn: SinkTxnId) -> FilesStager:
        return FilesStager(self.path, txn, self.format, self.compression, self.file_bytes)

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Move the winners' files into one folder, check and seal it.

        Repeatable after a crash at any point: files that were moved before are
        found in the new folder.
        """
        return self._outcome(lambda: self._prepare(txn, receipts))

    def _prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        layout = Layout(self.path, txn.scope)
        mine, newest = self._epochs.get(txn.scope, 0), layout.epoch()
        if mine < newest:
            return SinkFatal(self._fenced(txn.scope, mine, newest))
        digest = digest_of(receipts)
        shown = read_seal(layout.shown(txn.cycle))
        folder = layout.prepared(txn)
        known = shown if isinstance(shown, Seal) and shown.is_of(txn) else read_seal(folder)
        if isinstance(known, Seal):
            if known.digest != digest:
                return SinkFatal(f"{txn} was prepared before, with other rows")
            if known is not shown:
                _sync_with_parent(folder)
            return SinkOK(token_of(known.rest))
        if shown is not None:
            return SinkFatal(_taken(txn, shown))
        mark = layout.mark()
        if mark is not None and txn.cycle <= mark.cycle:
            return SinkFatal(f"{txn} is at or below the mark {mark}: another attempt was committed")

        if txn.scope not in self._epochs:  # otherwise `fence` has created the folders
            layout.make(self.name)
        try:
            token = collect(layout, txn, receipts, digest, self.format, self.name)
        except Unpreparable as error:
            return SinkFatal(str(error))
        _sync_with_parent(folder)
        reach(CrashPoint.FILES_PREPARE_SEALED, self.name)
        return SinkOK(token)

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Rename the prepared folder to the one that readers see."""
        return self._outcome(lambda: self._commit(txn, token))

    def _commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        layout = Layout(self.path, txn.scope)
        target = layout.shown(txn.cycle)
        lost = None
        if read_seal(target) is None:
            lost = self._show(txn, token, layout.prepared(txn), target)
        # Read again in every case: another process may have committed meanwhile.
        shown = read_seal(target)
        if shown is None:
            return SinkFatal(self._lost(layout, txn, lost or f"{target} is gone"))
        if not isinstance(shown, Seal) or not shown.is_of(txn):
            return SinkFatal(_taken(txn, shown))
        if differing := _differing(shown, token):
            return SinkFatal(f"{txn}: {target} differs from the token in {differing}")
        torn = what_is_wrong(target, shown.files)
        if torn:
            return SinkFatal(f"{txn} was committed, but is no longer complete: {torn}")
        sync_folder(self.path)
        sync_folder(os.path.join(layout.home, "prepared"))
        layout.raise_mark(txn)
        try:
            remove_tree(layout.staged(txn))
        except OSError as error:
            # The rows are visible; additional files do not undo the commit.
            log.warning(
                "staged files left for the next sweep",
                extra={"cycle": str(txn.cycle), "sink": self.name, "reason": reason_of(error)},
            )
        return SinkOK()

    def _show(self, txn: SinkTxnId, token: Token, folder: str, target: str) -> str | None:
        """Make the folder visible; return the reason if it is missing or incomplete."""
        held = read_seal(folder)
        if not isinstance(held, Seal) or not held.is_of(txn):
            return f"{folder} does not exist, or was never sealed: not prepared, aborted, or lost"
        if differing := _differing(held, token):
            return f"{folder} differs from the token in {differing}"
        try:
            wrong = what_is_wrong(folder, held.files)
            if wrong is None:
                rename_folder(folder, target)
                reach(CrashPoint.FILES_COMMIT_RENAMED, self.name)
        except (FileExistsError, FileNotFoundError) as error:
            return f"{folder} could not be moved: {reason_of(error)}"
        return wrong

    def _lost(self, layout: Layout, txn: SinkTxnId, why: str) -> str:
        if layout.mark() == txn:
            return f"{txn} was committed, and {layout.shown(txn.cycle)} has been removed since"
        if not os.path.isdir(layout.home):
            return f"{txn}: {layout.home} does not exist; is the volume mounted?"
        return f"{txn} cannot be committed: {why}"

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return self._outcome(lambda: self._abort(txn))

    def _abort(self, txn: SinkTxnId) -> SinkOutcome:
        layout = Layout(self.path, txn.scope)
        shown = read_seal(layout.shown(txn.cycle))
        if (isinstance(shown, Seal) and shown.is_of(txn)) or layout.mark() == txn:
            return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
        self._remove(layout, txn)
        return SinkOK()

    def _remove(self, layout: Layout, txn: SinkTxnId) -> None:
        folder = layout.prepared(txn)
        # The seal first, so that the folder cannot be committed after a crash here.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, TOKEN_FILE))
        remove_tree(folder)
        remove_tree(layout.staged(txn))

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        """Say where this attempt's folder is."""
        layout = Layout(self.path, txn.scope)
        target, folder = layout.shown(txn.cycle), layout.prepared(txn)
        try:
            shown, held = read_seal(target), read_seal(folder)
            if isinstance(shown, Seal) and shown.is_of(txn):
                torn = what_is_wrong(target, shown.files)
                return SinkFinding(Found.VISIBLE, torn or f"{target} has its token", shown.at)
            occupied = f"; {_taken(txn, shown)}" if shown else ""
            if isinstance(held, Seal) and held.is_of(txn):
                return SinkFinding(Found.HELD, f"{folder} has its token{occupied}", held.at)
            staged = len(names_in(layout.staged(txn)))
            evidence = f"{folder} is not sealed; {staged} tasks have staged for it{occupied}"
            if layout.mark() == txn:
                evidence = self._lost(layout, txn, "")
            return SinkFinding(Found.GONE, evidence)
        except OSError as error:
            return SinkFinding(Found.UNREACHABLE, reason_of(fault(f"sink {self.name}", error)))

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        """List this scope's sealed folders that are not yet visible."""
        layout = Layout(self.path, scope)
        with faults(f"files sink {self.name}"):
            found = [
                txn
                for txn in layout.txns("prepared")
                if isinstance(held := read_seal(layout.prepared(txn)), Seal) and held.is_of(txn)
            ]
        return sorted(found, key=lambda txn: (txn.cycle, txn.attempt))

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        layout = Layout(self.path, scope)
        swept = []
        with faults(f"files sink {self.name}"):
            mark = layout.mark()
            for txn in {*layout.txns("staged"), *layout.txns("prepared")}:
                shown = read_seal(layout.shown(txn.cycle))
                finished = txn == mark or (isinstance(shown, Seal) and shown.is_of(txn))
                if finished or is_loser(txn):
                    self._remove(layout, txn)
                    swept.append(txn)
        return sorted(swept, key=lambda txn: (txn.cycle, txn.attempt))

    def mark(self, scope: Scope) -> SinkTxnId | None:
        with faults(f"files sink {self.name}"):
            return Layout(self.path, scope).mark()

    def find_place(self) -> str:
        return f"folder {self.place}"

    def tenants(self) -> list[Tenant]:
        with faults(f"files sink {self.name}"):
            return tenants_of(self.path)

    def rename(self, old: Tenant, new: Tenant) -> None:
        """Give the hidden folder its new name; visible folders keep theirs."""
        before, after = Layout(self.path, old.scope), Layout(self.path, new.scope)
        with faults(f"files sink {self.name}"):
            if old.scope != new.scope and os.path.exists(before.home):
                if after.mark() is None:  # a start under the new name may have made it
                    remove_tree(after.home)
                rename_folder(before.home, after.home)
                sync_folder(os.path.dirname(after.home))
            if os.path.exists(after.home):
                after.name(new.sink)

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        """Read the cycle's files again, and count and hash their rows."""
        folder = Layout(self.path, cycle.scope).shown(cycle)
        with faults(f"files sink {self.name}"):
            names = [name for name in names_in(folder) if not is_hidden(name)]
            if not names:
                return Tally()
            shown = read_seal(folder)
            if not isinstance(shown, Seal) or _differing(shown, token):
                raise NeedsOperator(f"{cycle}: the seal of {folder} and the token differ")
            if token["schema"] is None:
                return None
            schema, format = schema_from_text(token["schema"]), Format(token["format"])
            return tally_all(
                batch
                for name in names
                for batch in read_rows(os.path.join(folder, name), format, schema)
            )

    def check_undo(self, txn: SinkTxnId, token: Token) -> str:
        folder = Layout(self.path, txn.scope).shown(txn.cycle)
        with faults(f"files sink {self.name}"):
            shown = read_seal(folder)
            if not isinstance(shown, Seal) or not shown.is_of(txn):
                return f"{folder} does not exist, or is not of this attempt"
            if differing := _differing(shown, token):
                return f"{folder} differs from the token in {differing}"
            return what_is_wrong(folder, shown.files) or ""

    def undo(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Take the folder from readers by one rename, then remove its files and keep its seal."""
        return self._outcome(lambda: self._undo(txn, token))

    def _undo(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        layout = Layout(self.path, txn.scope)
        folder, proof = layout.shown(txn.cycle), layout.undone(txn)
        if read_seal(proof) is None:
            if wrong := self.check_undo(txn, token):
                return SinkFatal(f"{txn} cannot be undone: {wrong}")
            os.makedirs(os.path.dirname(proof), exist_ok=True)
            with contextlib.suppress(FileExistsError, FileNotFoundError):  # another process did it
                rename_folder(folder, proof)
            sync_folder(self.path)
            sync_folder(os.path.dirname(proof))
            sync_folder(layout.home)
        kept = read_seal(proof)
        if not isinstance(kept, Seal) or not kept.is_of(txn):
            return SinkFatal(f"{txn}: {proof} is not the proof that it was undone")
        for name in kept.files:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(proof, name))
        return SinkOK()

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect=f"the rows of a cycle in {self.format} files under {self.path}, once each",
            readers_see="whole batches or nothing: a cycle's folder appears by one atomic rename",
            not_covered=(
                "a disk or file system that loses what fsync confirmed",
                "programs that delete or change files in cycle=… or _semel folders",
                "readers that look into names beginning with _ or .",
            ),
        )

    def close(self) -> None:
        """Do nothing: no file stays open between calls."""

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"files sink {self.name}: scope {scope} belongs to epoch {newest}, this process "
            f"holds {mine}; it was fenced and must stop"
        )

    def _outcome(self, call: Callable[[], SinkOutcome]) -> SinkOutcome:
        try:
            return call()
        except OSError as error:
            found: SemelError = fault(f"files sink {self.name}", error)
            if isinstance(found, Permanent):
                return SinkFatal(reason_of(found))
            return SinkRetryable(reason_of(found))


def _sync_with_parent(folder: str) -> None:
    sync_folder(folder)
    sync_folder(os.path.dirname(folder))


def _differing(seal: Seal, token: Token) -> str:
    """Name the fields in which a token differs from the folder's own record."""
    own = token_of(seal.rest)
    return ", ".join(f for f in sorted({*own, *token}) if own.get(f) != token.get(f))


def _taken(txn: SinkTxnId, shown: Seal | Foreign) -> str:
    if isinstance(shown, Foreign):
        return f"the folder of {txn.cycle} exists already: {shown.reason}; move it away"
    return f"{txn.cycle} was committed by another attempt, {shown.label}"


def _local_path(path: str) -> str:
    scheme, colon, rest = path.partition(":/")
    if scheme == "file" and colon:
        path = "/" + rest.lstrip("/")
    elif colon and "/" not in scheme:
        raise Misuse(
            f"{path!r} is not on a file system of this machine: a files sink needs one atomic "
            f"rename of a folder, which object stores and {scheme} do not have; mount it, or "
            f"use a sink made for it"
        )
    if not path:
        raise Misuse("a files sink needs a path")
    # A relative path would differ on executors, which have another working folder.
    return os.path.abspath(path)


def _try_rename(home: str) -> None:
    probe = os.path.join(home, f"probe-{uuid.uuid4().hex}")
    try:
        for name in ("one", "two"):
            os.makedirs(os.path.join(probe, name))
            with open(os.path.join(probe, name, "file"), "w") as file:
                file.write(name)
                file.flush()
                os.fsync(file.fileno())
        rename_folder(os.path.join(probe, "one"), os.path.join(probe, "three"))
        try:
            rename_folder(os.path.join(probe, "two"), os.path.join(probe, "three"))
        except FileExistsError:
            sync_folder(probe)
        else:
            raise Permanent(f"{home}: its file system replaces a folder that has files in it")
    finally:
        remove_tree(probe)
