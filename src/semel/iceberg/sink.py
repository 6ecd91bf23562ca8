"""The Iceberg sink: one snapshot per cycle, and the mark in a property of the table.

    tasks write data files ──prepare: a record──▶ promised ──commit──▶ snapshot + mark, one commit

The proof of a commit is the table's own property, which is set in the commit that adds the
snapshot and outlives it: snapshots expire.  Every commit is sent once, on the base that was
searched for the mark: `pyiceberg` itself repeats a refused commit on the newer base, and two
processes that recover the same cycle would both append.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from semel.arrow.attempts import PREPARED, Attempts, folder_of, is_file_of
from semel.arrow.tally import schema_from_text, tally_all
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, Misuse, Permanent, Retryable, SemelError, reason_of, require
from semel.events import log
from semel.iceberg.staging import (
    IcebergStager,
    check_columns,
    conform_schema,
    file_from_json,
    file_system,
    paths_of,
    stager_of,
    storage_faults,
)
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
    tally_of,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId, checked_name
from semel.secrets import masked

pa: Any = require("pyarrow", "iceberg")
catalogs: Any = require("pyiceberg.catalog", "iceberg")
exceptions: Any = require("pyiceberg.exceptions", "iceberg")
expressions: Any = require("pyiceberg.expressions", "iceberg")
locations: Any = require("pyiceberg.table.locations", "iceberg")
arrow_io: Any = require("pyiceberg.io.pyarrow", "iceberg")
snapshots: Any = require("pyiceberg.table.snapshots", "iceberg")
updates: Any = require("pyiceberg.table.update", "iceberg")

DEFAULT_FILE_BYTES: Final = 128 << 20
ADD_COLUMNS: Final = "add-columns"

# Other writers of the table win some races; a commit that loses this many in a row waits
# for the next retry of the cycle.
_RACES: Final = 20
_LOST_REPLIES: Final = 3
_PAUSE_SECONDS: Final = 0.05

# The table keeps proofs of this many cycles for each scope.  One would do: a cycle starts
# when the one before it is finished.
_PROOFS: Final = 8


class IcebergSink:
    """Appends the rows of a cycle to an Iceberg table, as one snapshot.

    *table* is ``namespace.name``; *catalog* and *properties* are the arguments of
    `pyiceberg.catalog.load_catalog`.  Executors write the data files themselves, straight to
    where the table keeps its data, and need the same access to the storage as the driver.

    *evolve* is ``"add-columns"`` if columns that the table lacks may be added to it, before
    the first batch.  A task writes a file when it has collected *file_bytes* of rows in memory.
    """

    def __init__(
        self,
        table: str,
        rows: Any = None,
        *,
        catalog: str = "default",
        properties: Mapping[str, str] | None = None,
        name: str = "iceberg",
        mode: str = "append",
        evolve: str | None = None,
        file_bytes: int = DEFAULT_FILE_BYTES,
    ) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        self.table = table
        self.file_bytes = file_bytes
        if "." not in table:
            raise Misuse(f"iceberg sink {name}: {table!r} has no namespace; write namespace.table")
        if mode != "append":
            raise Misuse(
                f"iceberg sink {name}: mode {mode!r} is not supported; it appends. Upserts and "
                f"overwrites would read and rewrite data files after the decision"
            )
        if evolve not in (None, ADD_COLUMNS):
            raise Misuse(f"iceberg sink {name}: evolve is {ADD_COLUMNS!r} or None, got {evolve!r}")
        self.evolve = evolve
        self._catalog_name = catalog
        self._properties = dict(properties or {})
        self._catalog: Any = None
        self._epochs: dict[Scope, int] = {}

    def __repr__(self) -> str:
        return f"IcebergSink({self.table!r}, catalog={self._catalog_name!r}, name={self.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_catalog": None}

    @property
    def place(self) -> str:
        """The catalog and the table."""
        where = self._properties.get("uri", "")
        return f"iceberg:{self._catalog_name}:{masked(where)}:{self.table}"

    def check(self, schema: Schema | None) -> None:
        """Load the table, try to write beside its data, and compare the columns."""
        table = self._load()
        system, root = file_system(table.io, _data_root(table))
        with storage_faults(f"iceberg sink {self.name}"):
            probe = Attempts(system, root, Scope("probe", "probe", "probe"))
            probe.raise_epoch(1)
            probe.epoch()
        if schema is None:
            return
        missing = [column for column in schema if column.name not in table.schema().column_names]
        if missing and self.evolve == ADD_COLUMNS:
            with self._catalog_faults(), table.update_schema() as change:
                change.union_by_name(pa.schema([column.with_nullable(True) for column in missing]))
            table = self._load()
        check_columns(table.metadata, conform_schema(schema, table))

    def fence(self, scope: Scope, epoch: int) -> None:
        attempts = self._attempts(self._load(), scope)
        with storage_faults(f"iceberg sink {self.name}"):
            newest = attempts.epoch()
            if epoch < newest:
                raise Fenced(self._fenced(scope, epoch, newest))
            attempts.raise_epoch(epoch)
        self._epochs[scope] = epoch

    def stager(self, txn: SinkTxnId) -> IcebergStager:
        if SinkTxnId.parse(txn.scope, txn.label) != txn:
            raise Misuse(f"{txn.label!r} cannot be the name of a folder")
        table = self._load()
        return stager_of(txn, table, _folder_url(table, txn), self.file_bytes)

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Check that the winners' files are there, and keep a record of them."""
        return _outcome(lambda: self._prepare(txn, receipts))

    def _prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        table = self._load()
        attempts = self._attempts(table, txn.scope)
        with storage_faults(f"iceberg sink {self.name}"):
            mine, newest = self._epochs.get(txn.scope, 0), attempts.epoch()
            if mine < newest:
                return SinkFatal(self._fenced(txn.scope, mine, newest))
            try:
                token, record = self._record(table, txn, receipts)
            except ValueError as error:
                return SinkFatal(f"{txn}: {error}")
            proof = _proof(table, txn)
            known = attempts.read(PREPARED, txn)
            if proof is not None or known is not None:
                if proof != _digest(token) and (known is None or known["token"] != token):
                    return SinkFatal(f"{txn} was prepared before, with other rows")
                return SinkOK(token)
            mark = Marks.of(table, txn.scope).newest
            if mark is not None and txn.cycle <= mark.cycle:
                return SinkFatal(f"{txn} is at or below the mark {mark}: another attempt committed")
            lost = _missing(attempts, txn, record, table)
            if lost:
                return SinkFatal(f"{txn}: {lost}, though a task staged it")
            attempts.write(PREPARED, txn, record)
            reach(CrashPoint.ICEBERG_PREPARE_RECORDED, self.name)
        return SinkOK(token)

    def _record(
        self, table: Any, txn: SinkTxnId, receipts: Sequence[Receipt]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the token and the record; a `ValueError` says why they cannot be made."""
        files = [file for receipt in receipts for file in receipt.detail["files"]]
        specs = {receipt.detail["spec"] for receipt in receipts if receipt.detail["files"]}
        schemas = {text for receipt in receipts if (text := receipt.detail["schema"]) is not None}
        paths = [file["file_path"] for file in files]
        if len(schemas) > 1 or len(specs) > 1:
            raise ValueError("tasks of one batch staged rows of different schemas or partitions")
        if len(set(paths)) < len(paths):
            raise ValueError("two receipts name the same file; task names must be unique")
        strange = [path for path in paths if not path.startswith(f"{_folder_url(table, txn)}/")]
        if strange:
            raise ValueError(f"a task names a file of another attempt: {strange[0]}")
        tally = tally_of(receipts)
        token = {
            "attempt": txn.attempt,
            "digest": digest_of(receipts),
            "rows": tally.rows,
            "hash": tally.hash,
            "table": str(table.metadata.table_uuid),
            "schema": schemas.pop() if schemas else None,
        }
        return token, {"token": token, "spec": specs.pop() if specs else None, "files": files}

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Append the recorded files and set the mark, in one commit of the table."""
        return _outcome(lambda: self._commit(txn, token))

    def _commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        lost_replies = 0
        reason = f"other writers won {_RACES} races"
        for race in range(_RACES):
            time.sleep(random.uniform(0, _PAUSE_SECONDS) * min(race, 10))
            # The record first: another process removes it after its commit, never before.
            record, table = self._read(txn)
            if (said := self._settled(table, txn, token)) is not None:
                if isinstance(said, SinkOK):
                    self._tidy(table, txn, record)
                return said
            if (wrong := self._broken_promise(table, txn, token, record)) is not None:
                return SinkFatal(f"{txn} cannot be committed: {wrong}")
            assert record is not None
            try:
                self._append(table, txn, record)
            except exceptions.CommitFailedException:
                continue  # refused: the base has moved on
            except Exception as error:  # noqa: BLE001  whatever it is, the commit may have landed
                lost_replies += 1
                reason = f"the catalog's answer is unknown: {reason_of(error)}"
                if lost_replies == _LOST_REPLIES:
                    break
            else:
                reach(CrashPoint.ICEBERG_COMMIT_SENT, self.name)
                self._tidy(table, txn, record)
                return SinkOK()
        return SinkRetryable(f"{txn}: {reason}; it is looked up again at the next try")

    def _read(self, txn: SinkTxnId) -> tuple[dict[str, Any] | None, Any]:
        with storage_faults(f"iceberg sink {self.name}"):
            record = self._attempts(self._load(), txn.scope).read(PREPARED, txn)
        return record, self._load()

    def _settled(self, table: Any, txn: SinkTxnId, token: Token) -> SinkOutcome | None:
        """Return the answer that the table itself gives about *txn*; None if it is still open."""
        if token.get("table") != str(table.metadata.table_uuid):
            return SinkFatal(
                f"{txn} was prepared for another table than {self.table} is now: the token "
                f"belongs to another sink, or the table was dropped and made again"
            )
        proof = _proof(table, txn)
        if proof is not None:
            if proof != _digest(token):
                return SinkFatal(f"{txn} was committed with another token than this one")
            return SinkOK()
        mark = Marks.of(table, txn.scope).newest
        if mark is not None and txn.cycle <= mark.cycle:
            return SinkFatal(
                f"{txn} is at or below the mark {mark} of {self.table}, which has no proof of it: "
                f"another attempt was committed"
            )
        return None

    def _broken_promise(
        self, table: Any, txn: SinkTxnId, token: Token, record: dict[str, Any] | None
    ) -> str | None:
        if record is None:
            return "it was not prepared, was aborted, or its record is lost"
        if record["token"] != token:
            return "the token is not the one that was given when it was prepared"
        with storage_faults(f"iceberg sink {self.name}"):
            return _missing(self._attempts(table, txn.scope), txn, record, table)

    def _append(self, table: Any, txn: SinkTxnId, record: Mapping[str, Any]) -> None:
        """Send one commit: the snapshot and the mark, on the base that was searched."""
        base = table.metadata
        files = []
        if record["files"]:
            files = [file_from_json(file, record["spec"], base) for file in record["files"]]
            # pyiceberg writes the manifest for the table's current partitioning, and that may
            # have changed since the files were staged.
            table.metadata = base.model_copy(update={"default_spec_id": record["spec"]})
        proof = _digest(record["token"])
        about = {"semel.txn": _name(txn), "semel.proof": proof, "semel.cycle": str(txn.cycle)}
        draft = table.transaction()
        with draft.update_snapshot(snapshot_properties=about).fast_append() as append:
            for file in files:
                append.append_data_file(file)
        marks = Marks.of(table, txn.scope)
        draft.set_properties({_key(txn.scope): marks.raised(txn, proof, self.name)})
        right_table = updates.AssertTableUUID(uuid=base.table_uuid)
        self._open().commit_table(table, (right_table, *draft._requirements), draft._updates)

    def _tidy(self, table: Any, txn: SinkTxnId, record: Mapping[str, Any] | None) -> None:
        """Drop the promise and what losing tasks wrote; a failure leaves them for a sweep."""
        if record is None:
            return
        attempts = self._attempts(table, txn.scope)
        try:
            attempts.remove_paths(_others(attempts, txn, record, table))
            attempts.keep_committed(txn, record)
        except OSError as error:
            log.warning(
                "staged files left for the next sweep",
                extra={"cycle": str(txn.cycle), "sink": self.name, "reason": reason_of(error)},
            )

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return _outcome(lambda: self._abort(txn, token))

    def _abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        table = self._load()
        attempts = self._attempts(table, txn.scope)
        with storage_faults(f"iceberg sink {self.name}"):
            if self._is_committed(table, txn):
                return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
            known = attempts.read(PREPARED, txn)
            if token is not None and known is not None and known["token"] != token:
                return SinkFatal(f"{txn} was prepared with another token; nothing was deleted")
            if token is not None and token.get("table") != str(table.metadata.table_uuid):
                return SinkFatal(f"{txn} was prepared for another table; nothing was deleted")
            _remove(attempts, txn)
        return SinkOK()

    def _is_committed(self, table: Any, txn: SinkTxnId) -> bool:
        if _proof(table, txn) is not None:
            return True
        marks = Marks.of(table, txn.scope)
        if not marks.may_have_forgotten(txn):
            return False
        return any(is_file_of(txn, path) for path in _live_paths(table))

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        """Look for the mark in the table, then for the record of the promise."""
        try:
            record, table = self._read(txn)
            if _proof(table, txn) is not None:
                where = f"{self.table} has its mark ({_key(txn.scope)}) or its snapshot"
                return SinkFinding(Found.VISIBLE, where)
            attempts = self._attempts(table, txn.scope)
            if record is not None:
                wrong = _missing(attempts, txn, record, table)
                evidence = wrong or f"{len(record['files'])} data files, recorded by prepare"
                return SinkFinding(Found.GONE if wrong else Found.HELD, evidence)
            staged = len(attempts.files(txn))
            mark = Marks.of(table, txn.scope).newest
            evidence = f"no record of it; {staged} staged files; the mark is {mark}"
            return SinkFinding(Found.GONE, evidence)
        except (SemelError, OSError) as error:
            return SinkFinding(Found.UNREACHABLE, reason_of(error))

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        """List this scope's records whose cycles the table does not have."""
        table = self._load()
        attempts = self._attempts(table, scope)
        with storage_faults(f"iceberg sink {self.name}"):
            return [
                txn
                for txn in attempts.records(PREPARED)
                if attempts.read(PREPARED, txn) is not None and _proof(table, txn) is None
            ]

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        table = self._load()
        attempts = self._attempts(table, scope)
        swept = []
        with storage_faults(f"iceberg sink {self.name}"):
            marks = Marks.of(table, scope)
            winners = {txn for txn, _ in marks.commits}
            for txn in {*attempts.records(PREPARED), *attempts.with_files(marks.newest)}:
                if txn in winners:
                    if self._sweep_committed(attempts, txn, table):
                        swept.append(txn)
                elif is_loser(txn) and not self._is_committed(table, txn):
                    _remove(attempts, txn)
                    swept.append(txn)
        return sorted(swept, key=lambda txn: (txn.cycle, txn.attempt))

    def _sweep_committed(self, attempts: Attempts, txn: SinkTxnId, table: Any) -> bool:
        promise = attempts.read(PREPARED, txn)
        record = promise or attempts.committed(txn)
        if record is None:
            return False  # an older one: which of its files the table uses is not known any more
        others = _others(attempts, txn, record, table)
        attempts.remove_paths(others)
        if promise is not None:
            attempts.keep_committed(txn, promise)
        return promise is not None or bool(others)

    def mark(self, scope: Scope) -> SinkTxnId | None:
        return Marks.of(self._load(), scope).newest

    def find_place(self) -> str:
        return f"iceberg table {self._load().metadata.table_uuid}"

    def tenants(self) -> list[Tenant]:
        found = [Marks.parse(text) for text in _marks_in(self._load()).values()]
        return [
            Tenant(marks.scope, marks.sink, marks.newest.label)
            for marks in found
            if marks.newest is not None
        ]

    def rename(self, old: Tenant, new: Tenant) -> None:
        """Give the mark and the epoch to the new name, in one change of the table's properties."""
        table = self._load()
        marks = _marks_in(table).get(_key(old.scope))
        if marks is None:
            return
        with storage_faults(f"iceberg sink {self.name}"):
            epoch = self._attempts(table, old.scope).epoch()
            self._attempts(table, new.scope).raise_epoch(epoch)
        with self._catalog_faults(), table.transaction() as change:
            if old.scope != new.scope:
                change.remove_properties(_key(old.scope))
            change.set_properties({_key(new.scope): Marks.parse(marks).renamed(new)})

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        """Read the cycle's files through the table again; None once they were rewritten."""
        table = self._load()
        txn = cycle.attempt(str(token["attempt"]))
        rewritten = any(
            snapshot.summary and snapshot.summary.operation is snapshots.Operation.REPLACE
            for snapshot in table.metadata.snapshots
        )
        with storage_faults(f"iceberg sink {self.name}"):
            scan = table.scan()
            files = [one for one in scan.plan_files() if is_file_of(txn, one.file.file_path)]
            if token.get("schema") is None or rewritten:
                return None if files or rewritten else Tally()
            schema = schema_from_text(token["schema"])
            if not set(schema.names) <= set(table.schema().column_names):
                return None  # a column was dropped or renamed
            reader = arrow_io.ArrowScan(
                table.metadata, table.io, scan.projection(), expressions.AlwaysTrue()
            )
            return tally_all(_cast(batch, schema) for batch in reader.to_record_batches(files))

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect=f"the rows of a cycle in the Iceberg table {self.table}, once each",
            readers_see="whole batches or nothing: a cycle is one snapshot",
            not_covered=(
                "removing the table's properties that begin with semel.",
                "orphan files are removed while a cycle is prepared: give that job an age of days",
                "a table that is rolled back: the rows of the cycles since are not written again",
                "a warehouse on a local disk that loses power: pyiceberg does not sync files",
            ),
        )

    def close(self) -> None:
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            with contextlib.suppress(AttributeError):  # not every catalog holds a connection
                catalog.close()

    def _open(self) -> Any:
        if self._catalog is None:
            self._catalog = catalogs.load_catalog(self._catalog_name, **self._properties)
        return self._catalog

    def _load(self) -> Any:
        with self._catalog_faults():
            return self._open().load_table(self.table)

    @contextlib.contextmanager
    def _catalog_faults(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.NoSuchTableError, exceptions.NoSuchNamespaceError) as error:
            raise Permanent(
                f"iceberg sink {self.name}: table {self.table} does not exist in catalog "
                f"{self._catalog_name}; create it with catalog.create_table({self.table!r}, schema)"
            ) from error
        except (exceptions.ForbiddenError, exceptions.UnauthorizedError) as error:
            raise Permanent(f"iceberg sink {self.name}: the catalog refuses: {error}") from error
        except SemelError:
            raise
        except Exception as error:  # a catalog raises the errors of its own driver
            raise Retryable(
                f"iceberg sink {self.name}: catalog {self._catalog_name} does not answer: "
                f"{reason_of(error)}"
            ) from error

    def _attempts(self, table: Any, scope: Scope) -> Attempts:
        system, root = file_system(table.io, _data_root(table))
        return Attempts(system, root, scope)

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"iceberg sink {self.name}: scope {scope} belongs to epoch {newest}, this process "
            f"holds {mine}; it was fenced and must stop"
        )


@dataclass(frozen=True, slots=True)
class Marks:
    """The newest commits of one scope, in the order of their cycles, from a table's property."""

    scope: Scope
    sink: str = ""
    """The name of the sink that committed last."""

    commits: tuple[tuple[SinkTxnId, str], ...] = ()
    """Each with its proof, the digest of its token."""

    @classmethod
    def of(cls, table: Any, scope: Scope) -> Marks:
        """Read them from the loaded table."""
        text = _marks_in(table).get(_key(scope))
        marks = cls(scope) if text is None else cls.parse(text)
        if marks.scope != scope:
            raise Permanent(f"property {_key(scope)} of the table is not about {scope}: restore it")
        return marks

    @classmethod
    def parse(cls, text: str) -> Marks:
        """Read what `raised` wrote.

        Raises:
            Permanent: somebody changed the property.
        """
        try:
            content = json.loads(text)
            scope, sink = Scope(*content["scope"]), str(content["sink"])
            commits = [
                (SinkTxnId.parse(scope, label), proof) for label, proof in content["commits"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise Permanent(
                f"a property of the table holds {text!r}, which semel did not write: restore it "
                f"from an earlier metadata file"
            ) from error
        return cls(scope, sink, tuple(commits))

    @property
    def newest(self) -> SinkTxnId | None:
        """The mark."""
        return self.commits[-1][0] if self.commits else None

    def raised(self, txn: SinkTxnId, proof: str, sink: str) -> str:
        """Return the property with one more commit."""
        return replace(self, sink=sink, commits=(*self.commits, (txn, proof)))._text()

    def renamed(self, new: Tenant) -> str:
        """Return the property for another scope and sink."""
        return replace(self, scope=new.scope, sink=new.sink)._text()

    def _text(self) -> str:
        scope, newest = self.scope, self.commits[-_PROOFS:]
        return json.dumps(
            {
                "scope": [scope.ledger, scope.app, scope.query],
                "sink": self.sink,
                "commits": [[txn.label, proof] for txn, proof in newest],
            }
        )

    def may_have_forgotten(self, txn: SinkTxnId) -> bool:
        """Return whether *txn* may have been committed before the oldest commit listed."""
        return len(self.commits) == _PROOFS and txn.cycle < self.commits[0][0].cycle


def _marks_in(table: Any) -> dict[str, str]:
    return {
        key: value
        for key, value in table.metadata.properties.items()
        if key.startswith(_key_prefix)
    }


_key_prefix: Final = "semel.marks."


def _key(scope: Scope) -> str:
    return f"{_key_prefix}{scope.slug}"


def _name(txn: SinkTxnId) -> str:
    return f"{txn.scope.slug}/{txn.label}"


def _proof(table: Any, txn: SinkTxnId) -> str | None:
    """Return the digest of the token with which *txn* was committed; None if there is no proof."""
    for committed, proof in Marks.of(table, txn.scope).commits:
        if committed == txn:
            return proof
    for snapshot in table.metadata.snapshots:
        if snapshot.summary and snapshot.summary.get("semel.txn") == _name(txn):
            return str(snapshot.summary.get("semel.proof"))
    return None


def _digest(token: Mapping[str, Any]) -> str:
    text = json.dumps(dict(token), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _data_root(table: Any) -> str:
    provider = locations.load_location_provider(table.metadata.location, table.metadata.properties)
    return str(provider.data_path)


def _folder_url(table: Any, txn: SinkTxnId) -> str:
    return f"{_data_root(table)}/{folder_of(txn)}"


def _missing(
    attempts: Attempts, txn: SinkTxnId, record: Mapping[str, Any], table: Any
) -> str | None:
    present = attempts.files(txn)
    for path, size in paths_of(record["files"], _data_root(table)).items():
        if present.get(path) != size:
            return f"{path} is missing or has another size than {size} bytes"
    return None


def _others(attempts: Attempts, txn: SinkTxnId, record: Mapping[str, Any], table: Any) -> list[str]:
    winners = paths_of(record["files"], _data_root(table))
    return [path for path in attempts.files(txn) if path not in winners]


def _remove(attempts: Attempts, txn: SinkTxnId) -> None:
    # The record first, so that nothing can be committed after a crash here.
    attempts.remove_record(PREPARED, txn)
    attempts.remove_files(txn)


def _live_paths(table: Any) -> Iterator[str]:
    snapshot = table.current_snapshot()
    for listed in snapshot.manifests(table.io) if snapshot else ():
        for entry in listed.fetch_manifest_entry(table.io):
            yield entry.data_file.file_path


def _cast(batch: Any, schema: Schema) -> Any:
    columns = [batch.column(name).cast(schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _outcome(call: Callable[[], SinkOutcome]) -> SinkOutcome:
    try:
        return call()
    except Permanent as error:
        return SinkFatal(reason_of(error))
    except Retryable as error:
        return SinkRetryable(reason_of(error))
