"""The S3 sink: uploads under final keys that only one attempt uses, and one manifest per cycle.

    upload parts ──prepare: check, seal──▶ held ──commit: complete, then put the manifest──▶ visible

    <prefix>/
      [day=2026-01-31/]part-<scope>.<txn>.<task>.00000.parquet    what readers see
      _commits/<cycle>-<scope>.json       the proof: whose it is, and its objects
      _semel/<scope>/                     the seals of prepared attempts, the mark, the fence

Nothing rests on the upload's completion being exclusive: keys are unique per attempt,
and the manifest is put only if there is none.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from semel.arrow.formats import check_schema, checked_compression, checked_format
from semel.arrow.tally import schema_from_text, tally_all
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, Misuse, NeedsOperator, Permanent, SemelError, reason_of, require
from semel.events import log
from semel.pipeline.sink import (
    Found,
    Guarantee,
    Leftover,
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
    tally_of,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId, checked_name
from semel.s3.reading import COMMITS, rows_of
from semel.s3.staging import (
    PARTS,
    SMALLEST_PART_BYTES,
    S3Stager,
    StagedObject,
    metadata_of,
    schemas_of,
    staged_objects,
    txn_of,
)
from semel.s3.store import Missing, Upload, store_of, together

pa: Any = require("pyarrow", "s3")

# Large enough for Spark to read in a few tasks, small enough to read again.
DEFAULT_OBJECT_BYTES: Final = 512 << 20
DEFAULT_PART_BYTES: Final = 8 << 20

# Marks and fences are kept in a listing; a few older ones cost nothing.
_KEEP: Final = 8

_HIDDEN: Final = "_semel/"

_UNTRIED: Final = (
    "a store that replaces an object although If-None-Match forbids it: unknown until "
    "`check` has tried it, at the start or with `semel lint --check`"
)


@dataclass(frozen=True, slots=True)
class _Books:
    """What one listing of the scope's own folder says."""

    mark: SinkTxnId | None
    epoch: int
    prepared: Mapping[SinkTxnId, float]
    """The sealed transactions, with the times of their seals."""

    stale: tuple[str, ...]
    """Old marks and fences that are not needed any more."""


class S3Sink:
    """Objects under *url* (``s3://bucket/prefix``): Parquet, JSON lines or CSV.

    Credentials come from boto3's own chain, on the driver and on the executors.  *endpoint* and
    *region* are for stores that this chain does not name.  *partition_by* names columns that
    become Hive-style folders; *object_bytes* is the size at which a task begins its next object.
    """

    def __init__(
        self,
        url: str,
        rows: Any = None,
        *,
        name: str = "s3",
        format: str = "parquet",
        compression: str | None = None,
        partition_by: Sequence[str] = (),
        object_bytes: int = DEFAULT_OBJECT_BYTES,
        part_bytes: int = DEFAULT_PART_BYTES,
        endpoint: str | None = None,
        region: str | None = None,
    ) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        self.store = store_of(url, endpoint, region)
        self.format = checked_format(f"s3 sink {name}", format)
        self.compression = checked_compression(self.format, compression)
        self.partition_by = (partition_by,) if isinstance(partition_by, str) else (*partition_by,)
        if part_bytes < SMALLEST_PART_BYTES:
            raise Misuse(f"part_bytes must be at least {SMALLEST_PART_BYTES}, got {part_bytes}")
        if not 0 < object_bytes <= part_bytes * PARTS // 2:
            raise Misuse(f"object_bytes must be 1 to {PARTS // 2} parts, got {object_bytes}")
        self.object_bytes = object_bytes
        self.part_bytes = part_bytes
        self._epochs: dict[Scope, int] = {}
        self._replaces: bool | None = None

    def __repr__(self) -> str:
        return f"S3Sink({self.store.url!r}, name={self.name!r}, format={str(self.format)!r})"

    @property
    def place(self) -> str:
        """The bucket and the prefix."""
        return self.store.url

    def check(self, schema: Schema | None) -> None:
        """Try the calls of a cycle, and whether the store refuses to replace an object."""
        with self._telling():
            name = f"{_HIDDEN}probe-{time.time_ns()}"
            self.store.put_new(name, 1)
            self.store.put_new(name, 2)
            self._replaces = self.store.get(name) == 2
            self.store.delete([name])
            upload_id = self.store.call("create_multipart_upload", name)["UploadId"]
            self.store.parts(name, upload_id)
            self.store.give_up(name, upload_id)
        for warning in self._weakened():
            log.warning("s3 sink", extra={"sink": self.name, "reason": warning})
        if schema is None:
            return
        missing = [name for name in self.partition_by if name not in schema.names]
        if missing:
            raise Permanent(f"s3 sink {self.name}: no column is named {', '.join(missing)}")
        for name in self.partition_by:
            if not _names_a_folder(schema.field(name).type):
                raise Permanent(
                    f"s3 sink {self.name}: column {name} ({schema.field(name).type}) cannot name "
                    f"a folder; partition by text, whole numbers, booleans or dates"
                )
        if schema.names and len(self.partition_by) == len(schema.names):
            raise Permanent(f"s3 sink {self.name}: partition_by names every column")
        check_schema(self.format, schema)

    def fence(self, scope: Scope, epoch: int) -> None:
        with self._telling():
            books = self._books(scope)
            if epoch < books.epoch:
                raise Fenced(self._fenced(scope, epoch, books.epoch))
            self.store.put_new(f"{_home(scope)}scope.json", _about(scope, self.name))
            self.store.put(f"{_home(scope)}fence/{epoch:012d}", epoch)
            self.store.delete(books.stale)
        self._epochs[scope] = epoch

    def stager(self, txn: SinkTxnId) -> S3Stager:
        return S3Stager(
            self.store,
            txn,
            self.format,
            self.compression,
            self.object_bytes,
            self.part_bytes,
            self.partition_by,
        )

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Check that every part of the winners' uploads is there, and write the seal."""
        return self._outcome(lambda: self._prepare(txn, receipts))

    def _prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        books = self._books(txn.scope)
        mine = self._epochs.get(txn.scope, 0)
        if mine < books.epoch:
            return SinkFatal(self._fenced(txn.scope, mine, books.epoch))
        digest = digest_of(receipts)
        shown = self.store.get(_manifest(txn.cycle))
        if shown is not None and not _is_of(shown, txn):
            return SinkFatal(_taken(txn, shown))
        known = shown or (self._seal(txn) if txn in books.prepared else None)
        if known is not None:
            if known["token"]["digest"] != digest:
                return SinkFatal(f"{txn} was prepared before, with other rows")
            return SinkOK(known["token"])
        if books.mark is not None and txn.cycle <= books.mark.cycle:
            return SinkFatal(
                f"{txn} is at or below the mark {books.mark}: another attempt was committed"
            )
        objects, schemas = staged_objects(receipts), schemas_of(receipts)
        if len(schemas) > 1:
            return SinkFatal("tasks of one batch staged rows of different schemas")
        if wrong := next(filter(None, together(lambda one: self._unheld(txn, one), objects)), None):
            return SinkFatal(f"{txn} cannot be prepared: {wrong}")
        total = tally_of(receipts)
        token = {
            "attempt": txn.attempt,
            "digest": digest,
            "rows": total.rows,
            "hash": total.hash,
            "place": self.place,
            "format": str(self.format),
            "compression": self.compression,
            "partition_by": list(self.partition_by),
            "schema": schemas.pop() if schemas else None,
        }
        self.store.put(
            _sealed(txn),
            {
                "txn": txn.label,
                "scope": txn.scope.slug,
                "by": str(txn.scope),
                "token": token,
                "objects": [asdict(one) for one in objects],
            },
        )
        reach(CrashPoint.S3_PREPARE_SEALED, self.name)
        return SinkOK(token)

    def _unheld(self, txn: SinkTxnId, one: StagedObject) -> str | None:
        """Return why an upload cannot be completed."""
        if txn_of(txn.scope, one.name) != txn:
            return f"{one.name} is not a key of this attempt"
        try:
            tags, size = self.store.parts(one.name, one.upload_id)
        except Missing:
            return f"the upload of {one.name} is gone: a lifecycle rule or a person aborted it"
        if (tags, size) != (list(one.tags), one.size):
            return f"the upload of {one.name} has other parts than its task wrote"
        return None

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Complete the uploads, then put the manifest."""
        return self._outcome(lambda: self._commit(txn, token))

    def _commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        shown, lost = self.store.get(_manifest(txn.cycle)), ""
        if shown is None:
            lost = self._show(txn, token)
            # Read again in every case: another process may have committed meanwhile.
            shown = self.store.get(_manifest(txn.cycle))
        books = self._books(txn.scope)
        if shown is None:
            if books.mark == txn:
                return SinkFatal(f"{txn} was committed, and its manifest has been removed since")
            return SinkFatal(f"{txn} cannot be committed: {lost or 'its manifest is gone'}")
        if not _is_of(shown, txn):
            return SinkFatal(_taken(txn, shown))
        if differing := _differing(shown, token):
            return SinkFatal(f"{txn}: its manifest differs from the token in {differing}")
        if torn := self._torn(txn, shown):
            return SinkFatal(f"{txn} was committed, but is no longer complete: {torn}")
        if books.mark is None or books.mark.cycle < txn.cycle:
            self.store.put(f"{_home(txn.scope)}marks/{txn.label}", txn.label)
        try:
            self.store.delete([_sealed(txn), *books.stale])
        except SemelError as error:
            # The rows are visible; an old seal does not undo the commit.
            log.warning(
                "a seal is left for the next sweep",
                extra={"cycle": str(txn.cycle), "sink": self.name, "reason": reason_of(error)},
            )
        return SinkOK()

    def _show(self, txn: SinkTxnId, token: Token) -> str:
        """Make the cycle visible; return the reason if something is missing."""
        seal = self._seal(txn)
        if seal is None:
            return "it has no seal: it was not prepared, was aborted, or is lost"
        if differing := _differing(seal, token):
            return f"its seal differs from the token in {differing}"
        objects = [StagedObject(**one) for one in seal["objects"]]
        lost = next(filter(None, together(lambda one: self._complete(txn, one), objects)), None)
        if lost:
            return lost
        reach(CrashPoint.S3_COMMIT_COMPLETED, self.name)
        shown = [
            {"name": o.name, "rows": o.rows, "size": o.size, "values": list(o.values)}
            for o in objects
        ]
        self.store.put_new(_manifest(txn.cycle), {**seal, "objects": shown, "at": time.time()})
        reach(CrashPoint.S3_COMMIT_MANIFEST, self.name)
        return ""

    def _complete(self, txn: SinkTxnId, one: StagedObject) -> str | None:
        """Complete one upload; return the reason if it is lost."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(one.tags, 1)]
        try:
            where = {"UploadId": one.upload_id, "MultipartUpload": {"Parts": parts}}
            self.store.call("complete_multipart_upload", one.name, **where)
        except Missing:
            # Completed before, or aborted: the object itself is the evidence.
            return self._unlike(txn, one.name, one.size)
        return None

    def _unlike(self, txn: SinkTxnId, name: str, size: int) -> str | None:
        """Return in what an object differs from the one that this attempt wrote."""
        try:
            found = self.store.call("head_object", name)
        except Missing:
            return f"{name} does not exist, and its upload is gone"
        if found["ContentLength"] != size:
            return f"{name} has {found['ContentLength']} bytes instead of {size}"
        if not metadata_of(txn).items() <= found["Metadata"].items():
            return f"{name} was written by another program"
        return None

    def _torn(self, txn: SinkTxnId, shown: Mapping[str, Any]) -> str | None:
        named = [(one["name"], one["size"]) for one in shown["objects"]]
        return next(filter(None, together(lambda one: self._unlike(txn, *one), named)), None)

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return self._outcome(lambda: self._abort(txn))

    def _abort(self, txn: SinkTxnId) -> SinkOutcome:
        if self._is_committed(txn):
            return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
        self._remove(
            txn, [one for one in self.store.uploads() if txn_of(txn.scope, one.key) == txn]
        )
        return SinkOK()

    def _is_committed(self, txn: SinkTxnId) -> bool:
        shown = self.store.get(_manifest(txn.cycle))
        if shown is not None:
            return _is_of(shown, txn)
        return self._books(txn.scope).mark == txn

    def _remove(self, txn: SinkTxnId, uploads: Sequence[Upload]) -> None:
        """Remove an attempt that is not committed."""
        seal = self._seal(txn)
        # The seal first, so that nothing can be committed after a crash here.
        self.store.delete([_sealed(txn)])
        list(together(lambda one: self.store.give_up(one.key, one.upload_id), uploads))
        if seal is not None:
            # A commit that lost a race may have completed them; no other attempt has these keys.
            names = [one["name"] for one in seal["objects"]]
            self.store.delete([name for name in names if txn_of(txn.scope, name) == txn])

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        """Read the manifest of the cycle, and the seal and the uploads of the attempt."""
        try:
            return self._look_up(txn)
        except SemelError as error:
            return SinkFinding(Found.UNREACHABLE, f"s3 sink {self.name}: {reason_of(error)}")

    def _look_up(self, txn: SinkTxnId) -> SinkFinding:
        manifest = _manifest(txn.cycle)
        shown = self.store.get(manifest)
        if shown is not None and _is_of(shown, txn):
            if _UNDONE in shown:
                return SinkFinding(Found.GONE, f"{manifest} says that its rows were taken away")
            torn = self._torn(txn, shown)
            return SinkFinding(Found.VISIBLE, torn or f"{manifest} names it", shown.get("at"))
        occupied = f"; {_taken(txn, shown)}" if shown is not None else ""
        books = self._books(txn.scope)
        if books.mark == txn:
            return SinkFinding(Found.GONE, f"{txn} was committed, and {manifest} was removed since")
        seal = self._seal(txn)
        if seal is None:
            return SinkFinding(Found.GONE, f"{_sealed(txn)} does not exist{occupied}")
        for one in (StagedObject(**fields) for fields in seal["objects"]):
            if (gone := self._unheld(txn, one)) and self._unlike(txn, one.name, one.size):
                return SinkFinding(Found.GONE, f"{gone}{occupied}")
        evidence = f"{_sealed(txn)} exists, and so does each of its uploads{occupied}"
        return SinkFinding(Found.HELD, evidence, books.prepared.get(txn))

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        """List this scope's sealed transactions that are not yet visible."""
        with self._telling():
            held = self._books(scope).prepared
            found = [txn for txn in held if not self._is_committed(txn)]
        return sorted(found, key=lambda txn: (txn.cycle, txn.attempt))

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        with self._telling():
            left: dict[SinkTxnId, list[Upload]] = {}
            for txn in self._books(scope).prepared:
                left.setdefault(txn, [])
            for upload in self.store.uploads():
                if (txn_or_none := txn_of(scope, upload.key)) is not None:
                    left.setdefault(txn_or_none, []).append(upload)
            swept = []
            for txn, uploads in left.items():
                if self._is_committed(txn):
                    self.store.delete([_sealed(txn)])
                    list(together(lambda one: self.store.give_up(one.key, one.upload_id), uploads))
                elif is_loser(txn):
                    self._remove(txn, uploads)
                else:
                    continue
                swept.append(txn)
        return sorted(swept, key=lambda txn: (txn.cycle, txn.attempt))

    def leftovers(self, scope: Scope) -> list[Leftover]:
        with self._telling():
            sealed, found = self._books(scope).prepared, dict[SinkTxnId, list[float]]()
            for upload in self.store.uploads():
                txn = txn_of(scope, upload.key)
                if txn is not None and txn not in sealed:
                    found.setdefault(txn, []).append(upload.since)
        left = [Leftover(t, f"{len(at):,} open upload(s)", min(at)) for t, at in found.items()]
        return sorted(left, key=lambda one: (one.txn.cycle, one.txn.attempt))

    def open_uploads(self) -> list[Upload]:
        """List every upload under the prefix that is neither completed nor aborted, with its time.

        Those of attempts that are neither held nor running cost money until `sweep` removes them.
        """
        with self._telling():
            return self.store.uploads()

    def mark(self, scope: Scope) -> SinkTxnId | None:
        with self._telling():
            return self._books(scope).mark

    def find_place(self) -> str:
        return f"prefix {self.place}"

    def tenants(self) -> list[Tenant]:
        found = []
        with self._telling():
            for name, _ in self.store.names(_HIDDEN):
                if not name.endswith("/scope.json"):
                    continue
                with contextlib.suppress(TypeError, ValueError, KeyError):
                    about = self.store.get(f"{_HIDDEN}{name}")
                    sink, scope = str(about.pop("sink")), Scope(**about)
                    if (mark := self._books(scope).mark) is not None:
                        found.append(Tenant(scope, sink, mark.label))
        return found

    def rename(self, old: Tenant, new: Tenant) -> None:
        """Copy the marks and the fence, then remove the old ones; objects keep their names."""
        before, after = _home(old.scope), _home(new.scope)
        with self._telling():
            names = [name for name, _ in self.store.names(before)] if before != after else []
            for name in names:
                if name.startswith(("marks/", "fence/")):
                    self.store.put(f"{after}{name}", name)
            if names or self.store.names(after):
                self.store.put(f"{after}scope.json", _about(new.scope, new.sink))
            self.store.delete([f"{before}{name}" for name in names])

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        """Read the cycle's objects again, and count and hash their rows."""
        with self._telling():
            shown = self.store.get(_manifest(cycle))
            if shown is None:
                return Tally()
            if _differing(shown, token):
                raise NeedsOperator(f"{cycle}: its manifest and the token differ")
            if token["schema"] is None:
                return Tally()
            schema = schema_from_text(token["schema"])
            try:
                return tally_all(rows_of(self.store, shown, schema))
            except Missing:
                return None

    def check_undo(self, txn: SinkTxnId, token: Token) -> str:
        with self._telling():
            return self._irreversible(txn, token, self.store.get(_manifest(txn.cycle)))

    def _irreversible(self, txn: SinkTxnId, token: Token, shown: Mapping[str, Any] | None) -> str:
        if shown is None or not _is_of(shown, txn):
            return f"{_manifest(txn.cycle)} does not exist, or is not of this attempt"
        if _UNDONE in shown:
            return "its rows were taken away before"
        if differing := _differing(shown, token):
            return f"its manifest differs from the token in {differing}"
        return self._torn(txn, shown) or ""

    def undo(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Replace the manifest by one without objects, then delete the objects."""
        return self._outcome(lambda: self._undo(txn, token))

    def _undo(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        shown = self.store.get(_manifest(txn.cycle))
        if shown is None or not _is_of(shown, txn) or _UNDONE not in shown:
            if wrong := self._irreversible(txn, token, shown):
                return SinkFatal(f"{txn} cannot be undone: {wrong}")
            # It is not deleted: a commit that slept meanwhile would put it again.
            names = [one["name"] for one in (shown or {})["objects"]]
            shown = {**(shown or {}), "objects": [], _UNDONE: names}
            self.store.put(_manifest(txn.cycle), shown)
        self.store.delete([name for name in shown[_UNDONE] if txn_of(txn.scope, name) == txn])
        return SinkOK()

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect=f"the rows of a cycle in {self.format} objects under {self.place}, once each",
            readers_see=(
                "whole batches, if they read the objects that the manifests name "
                "(read_committed); whole objects, one after the other, if they list the prefix"
            ),
            not_covered=(
                "a store that loses what it confirmed",
                "programs that delete or change objects under the prefix",
                *([_UNTRIED] if self._replaces is None else []),
            ),
            weakened_by=tuple(self._weakened()),
        )

    def _weakened(self) -> list[str]:
        """Name what weakens the guarantee: the store, and the bucket's lifecycle rules."""
        found = []
        if self._replaces:
            found.append(
                "the store replaces an object in spite of If-None-Match: two "
                "drivers that commit two attempts of a cycle at once are kept apart by the ledger "
                "alone; use a store with conditional PUT"
            )
        rules: list[Mapping[str, Any]] = []
        # Who may write need not be allowed to read the rules.
        with contextlib.suppress(SemelError):
            rules = self.store.lifecycle()
        for rule in rules:
            which = f"lifecycle rule {rule.get('ID') or '(without a name)'} of {self.store.bucket}"
            if days := rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation"):
                found.append(
                    f"{which} aborts uploads after {days} days: what is prepared and waits longer "
                    f"for its recovery is lost; recover before that, or exclude the prefix"
                )
            if rule.get("Expiration", {}).keys() & {"Days", "Date"}:
                found.append(
                    f"{which} deletes objects under the prefix, committed rows and their manifests "
                    f"among them; exclude it if they must stay"
                )
        return found

    def close(self) -> None:
        self.store.close()

    def _books(self, scope: Scope) -> _Books:
        txns: dict[str, dict[SinkTxnId, float]] = {"marks": {}, "prepared": {}}
        epochs = []
        for name, at in self.store.names(_home(scope)):
            folder, _, rest = name.partition("/")
            if folder == "fence" and rest.isdecimal():
                epochs.append(rest)
            elif folder in txns:
                with contextlib.suppress(ValueError):  # not ours
                    txns[folder][SinkTxnId.parse(scope, rest.removesuffix(".json"))] = at
        marks = sorted(txns["marks"], key=lambda txn: txn.cycle)
        stale = [f"marks/{txn.label}" for txn in marks[:-_KEEP]]
        stale += [f"fence/{epoch}" for epoch in sorted(epochs)[:-_KEEP]]
        return _Books(
            marks[-1] if marks else None,
            max(map(int, epochs), default=0),
            txns["prepared"],
            tuple(f"{_home(scope)}{name}" for name in stale),
        )

    def _seal(self, txn: SinkTxnId) -> dict[str, Any] | None:
        found = self.store.get(_sealed(txn))
        return found if found is not None and _is_of(found, txn) else None

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"s3 sink {self.name}: scope {scope} belongs to epoch {newest}, this process "
            f"holds {mine}; it was fenced and must stop"
        )

    @contextlib.contextmanager
    def _telling(self) -> Any:
        """Name the sink in the errors of its store."""
        try:
            yield
        except (Fenced, NeedsOperator):
            raise
        except Missing as error:
            raise Permanent(f"s3 sink {self.name}: {reason_of(error)}") from error
        except SemelError as error:
            raise type(error)(f"s3 sink {self.name}, {self.place}: {reason_of(error)}") from error

    def _outcome(self, call: Callable[[], SinkOutcome]) -> SinkOutcome:
        try:
            return call()
        except Permanent as error:
            return SinkFatal(f"s3 sink {self.name}: {reason_of(error)}")
        except SemelError as error:
            return SinkRetryable(f"s3 sink {self.name}: {reason_of(error)}")


# The key of a manifest whose cycle was undone: the names of the objects that it had.
_UNDONE: Final = "undone"


def _home(scope: Scope) -> str:
    return f"{_HIDDEN}{scope.slug}/"


def _about(scope: Scope, sink: str) -> dict[str, str]:
    return {"ledger": scope.ledger, "app": scope.app, "query": scope.query, "sink": sink}


def _sealed(txn: SinkTxnId) -> str:
    return f"{_home(txn.scope)}prepared/{txn.label}.json"


def _manifest(cycle: CycleId) -> str:
    return f"{COMMITS}{cycle.label}-{cycle.scope.slug}.json"


def _is_of(record: Mapping[str, Any], txn: SinkTxnId) -> bool:
    return (record.get("txn"), record.get("scope")) == (txn.label, txn.scope.slug)


def _taken(txn: SinkTxnId, shown: Mapping[str, Any]) -> str:
    if "txn" not in shown:
        return f"{_manifest(txn.cycle)} exists already and semel did not write it; move it away"
    return f"{txn.cycle} was committed by another attempt, {shown['txn']}"


def _differing(record: Mapping[str, Any], token: Token) -> str:
    """Name the fields in which a token differs from the store's own record."""
    own = record["token"]
    return ", ".join(f for f in sorted({*own, *token}) if own.get(f) != token.get(f))


def _names_a_folder(kind: Any) -> bool:
    types = pa.types
    return any(
        is_one(kind)
        for is_one in (types.is_string, types.is_integer, types.is_boolean, types.is_date32)
    ) and not re.match("dictionary", str(kind))
