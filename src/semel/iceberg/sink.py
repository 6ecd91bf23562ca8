"""The Iceberg sink: one snapshot per cycle, and the proof in a property of the table.

The property is set in the commit that adds the snapshot, and outlives it: snapshots expire.
The commit goes to the catalog by hand, because `pyiceberg` repeats one that is refused on the
newer state of the table, without looking for the proof.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from semel.arrow.attempts import Attempts, folder_of, is_file_of
from semel.arrow.tables import (
    DEFAULT_FILE_BYTES,
    REWRITTEN,
    CommitRefused,
    TableSink,
    TableWrite,
    checked_label,
)
from semel.arrow.tally import schema_from_text, tally_all
from semel.crashpoints import CrashPoint, reach
from semel.errors import Misuse, Permanent, Retryable, SemelError, reason_of, require
from semel.iceberg.replacing import (
    Replaced,
    in_partitions,
    read_keys,
    tasks_for,
    twice,
    without_keys,
)
from semel.iceberg.staging import (
    IcebergStager,
    check_columns,
    conform_schema,
    file_from_json,
    file_system,
    stager_of,
    without_history,
)
from semel.pipeline.sink import Guarantee, Schema, Tally, Tenant, Token
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.secrets import masked, scrubbed

pa: Any = require("pyarrow", "iceberg")
catalogs: Any = require("pyiceberg.catalog", "iceberg")
exceptions: Any = require("pyiceberg.exceptions", "iceberg")
expressions: Any = require("pyiceberg.expressions", "iceberg")
locations: Any = require("pyiceberg.table.locations", "iceberg")
arrow_io: Any = require("pyiceberg.io.pyarrow", "iceberg")
snapshots: Any = require("pyiceberg.table.snapshots", "iceberg")
updates: Any = require("pyiceberg.table.update", "iceberg")
types: Any = require("pyiceberg.types", "iceberg")

ADD_COLUMNS: Final = "add-columns"

_BY_KEY: Final = (TableWrite.UPSERT, TableWrite.DELETE)

_NEWEST_FORMAT: Final = 2

# The table keeps proofs of this many cycles for each scope.  One would do: a cycle starts
# when the one before it is finished.
_PROOFS: Final = 8


class IcebergSink(TableSink):
    """Writes the rows of a cycle to an Iceberg table, as one snapshot.

    *table* is ``namespace.name``; *catalog* and *properties* are the arguments of
    `pyiceberg.catalog.load_catalog`.  Executors write the data files themselves, straight to
    where the table keeps its data, and need the same access to the storage as the driver.

    *write* is ``append``, ``upsert`` or ``delete`` by *key*, or ``overwrite`` of the partitions
    that have rows; it defaults to ``upsert`` if there is a *key*.  An upsert deletes the keys of
    the rows in whose *delete_column* is true; the table does not have this column.

    *evolve* is ``"add-columns"`` if columns that the table lacks may be added to it, before
    the first batch.  A task begins its next file when one has *file_bytes*.
    """

    kind = "iceberg"

    def __init__(
        self,
        table: str,
        rows: Any = None,
        *,
        catalog: str = "default",
        properties: Mapping[str, str] | None = None,
        name: str = "iceberg",
        write: str | None = None,
        key: Sequence[str] = (),
        delete_column: str | None = None,
        evolve: str | None = None,
        file_bytes: int = DEFAULT_FILE_BYTES,
    ) -> None:
        key = (key,) if isinstance(key, str) else tuple(key)
        write = write or (TableWrite.UPSERT if key else TableWrite.APPEND)
        super().__init__(table, rows, name, write, file_bytes)
        if bool(key) != (self.write in _BY_KEY):
            raise Misuse(f"iceberg sink {name}: key=[…] belongs to write='upsert' and 'delete'")
        if delete_column and self.write is not TableWrite.UPSERT:
            raise Misuse(f"iceberg sink {name}: a delete_column belongs to write='upsert'")
        self.key = key
        self.delete_column = delete_column or ""
        if "." not in table:
            raise Misuse(f"iceberg sink {name}: {table!r} has no namespace; write namespace.table")
        if evolve not in (None, ADD_COLUMNS):
            raise Misuse(f"iceberg sink {name}: evolve is {ADD_COLUMNS!r} or None, got {evolve!r}")
        self.evolve = evolve
        self._catalog_name = catalog
        self._properties = dict(properties or {})
        self._catalog: Any = None

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
        loaded = self._load_writable()
        with self._storage_faults():
            loaded.attempts(Scope("probe", "probe", "probe")).raise_epoch(1)
        if schema is None:
            return
        table = loaded.table
        schema = self._stored(schema)
        missing = [column for column in schema if column.name not in table.schema().column_names]
        if missing and self.evolve == ADD_COLUMNS:
            with self._catalog_faults(), table.update_schema() as change:
                change.union_by_name(conform_schema(pa.schema(missing), table))
            table = self._load().table
        self._check_write(table)
        if self.write is not TableWrite.DELETE:
            check_columns(table.metadata, conform_schema(schema, table))

    def _stored(self, schema: Schema) -> Schema:
        """Return the columns of the rows that go into the table, after a look at the others."""
        absent = [
            name for name in (*self.key, self.delete_column) if name not in ("", *schema.names)
        ]
        if absent:
            raise Permanent(f"iceberg sink {self.name}: the rows have no column {absent[0]}")
        if self.write is TableWrite.DELETE and len(self.key) < len(schema.names):
            raise Permanent(
                f"iceberg sink {self.name}: a delete takes the columns of its key alone; give "
                f"rows=F.struct({', '.join(map(repr, self.key))})"
            )
        if self.delete_column and not pa.types.is_boolean(schema.field(self.delete_column).type):
            raise Permanent(f"iceberg sink {self.name}: {self.delete_column} is not a boolean")
        return pa.schema([column for column in schema if column.name != self.delete_column])

    def _check_write(self, table: Any) -> None:
        for name in self.key:
            kind = table.schema().find_type(name)
            if not kind.is_primitive or isinstance(kind, types.FloatType | types.DoubleType):
                raise Permanent(
                    f"iceberg sink {self.name}: column {name} ({kind}) cannot be a part of a key"
                )
        if self.write is TableWrite.OVERWRITE and table.spec().is_unpartitioned():
            raise Permanent(
                f"iceberg sink {self.name}: {self.table} has no partitions, so an overwrite would "
                f"replace all of it in every cycle; partition it, or use write='upsert'"
            )

    def stager(self, txn: SinkTxnId) -> IcebergStager:
        loaded = self._load_writable()
        folder = f"{loaded.root}/{folder_of(checked_label(txn))}"
        return stager_of(
            txn,
            loaded.table,
            folder,
            self.file_bytes,
            write=self.write,
            key=self.key,
            delete_column=self.delete_column,
        )

    def find_place(self) -> str:
        return f"iceberg table {self._load().identity}"

    def tenants(self) -> list[Tenant]:
        found = [Marks.parse(text) for text in _marks_in(self._load().table).values()]
        return [
            Tenant(marks.scope, marks.sink, marks.newest.label)
            for marks in found
            if marks.newest is not None
        ]

    def rename(self, old: Tenant, new: Tenant) -> None:
        """Give the mark and the epoch to the new name, in one change of the table's properties."""
        loaded = self._load()
        marks = _marks_in(loaded.table).get(_key(old.scope))
        if marks is None:
            return
        with self._storage_faults():
            loaded.attempts(new.scope).raise_epoch(loaded.attempts(old.scope).epoch())
        with self._catalog_faults(), loaded.table.transaction() as change:
            if old.scope != new.scope:
                change.remove_properties(_key(old.scope))
            change.set_properties({_key(new.scope): Marks.parse(marks).renamed(new)})

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        """Read the cycle's files through the table again; None once they were rewritten.

        None for writes by key, too: later cycles replace and delete rows.
        """
        if self.write in _BY_KEY:
            return None
        table = self._load().table
        txn = cycle.attempt(str(token["attempt"]))
        rewritten = any(
            snapshot.summary and snapshot.summary.operation is snapshots.Operation.REPLACE
            for snapshot in table.metadata.snapshots
        )
        with self._storage_faults():
            scan = table.scan()
            files = [one for one in scan.plan_files() if is_file_of(txn, one.file.file_path)]
            if self.write is TableWrite.OVERWRITE:
                # A later cycle has replaced some of its partitions.
                rewritten = sum(one.file.record_count for one in files) != token["rows"]
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
            effect=f"{_EFFECTS[self.write]} Iceberg table {self.table}, once each",
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

    def _load_writable(self) -> IcebergTable:
        loaded = self._load()
        version = loaded.table.format_version
        if version > _NEWEST_FORMAT:
            raise Permanent(
                f"iceberg sink {self.name}: {self.table} has format version {version}, which "
                f"pyiceberg does not write; a table cannot go back, so write to one that was "
                f"created with the property format-version={_NEWEST_FORMAT}"
            )
        return loaded

    def _load(self) -> IcebergTable:
        with self._catalog_faults():
            if self._catalog is None:
                self._catalog = catalogs.load_catalog(self._catalog_name, **self._properties)
            return IcebergTable(self._catalog, self._catalog.load_table(self.table), self.name)

    @contextlib.contextmanager
    def _catalog_faults(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.NoSuchTableError, exceptions.NoSuchNamespaceError) as error:
            raise Permanent(
                f"iceberg sink {self.name}: table {self.table} does not exist in catalog "
                f"{self._catalog_name}; create it with catalog.create_table({self.table!r}, schema)"
            ) from error
        except arrow_io.UnsupportedPyArrowTypeException as error:
            raise Permanent(
                f"iceberg sink {self.name}: the rows do not fit the table: {error}"
            ) from error
        except (exceptions.ForbiddenError, exceptions.UnauthorizedError) as error:
            raise Permanent(f"iceberg sink {self.name}: the catalog refuses: {error}") from error
        except SemelError:
            raise
        except Exception as error:  # a catalog raises the errors of its own driver
            catalog = f"iceberg sink {self.name}: catalog {self._catalog_name}"
            reason = scrubbed(reason_of(error), self._properties.get("uri", ""))
            # Without a catalog none was asked.  Its answer may raise a subclass of ValueError.
            if self._catalog is None and _SET_UP_WRONGLY & {type(error), *_names_of(error)}:
                raise Misuse(f"{catalog} is not set up: {reason}") from error
            raise Retryable(f"{catalog} does not answer: {reason}") from error


class IcebergTable:
    """A table as the catalog has it."""

    def __init__(self, catalog: Any, table: Any, sink: str) -> None:
        self.table = table
        self._catalog = catalog
        self._sink = sink
        properties = table.metadata.properties
        provider = locations.load_location_provider(table.metadata.location, properties)
        self.root = str(provider.data_path)
        """The URL of the folder of data files."""

    @property
    def identity(self) -> str:
        return str(self.table.metadata.table_uuid)

    def attempts(self, scope: Scope) -> Attempts:
        return Attempts(*file_system(self.table.io, self.root), scope)

    def proof(self, txn: SinkTxnId) -> str | None:
        """Look into the property, then into the snapshots that have not expired."""
        for committed, proof in Marks.of(self.table, txn.scope).commits:
            if committed == txn:
                return proof
        found = self._snapshot_of(txn)
        return None if found is None else str(found.summary.get("semel.proof"))

    def _snapshot_of(self, txn: SinkTxnId) -> Any:
        """Return the snapshot of an attempt; None if there is none, or if it has expired."""
        name = _name(txn)
        for snapshot in self.table.metadata.snapshots:
            if snapshot.summary and snapshot.summary.get("semel.txn") == name:
                return snapshot
        return None

    def mark(self, scope: Scope) -> SinkTxnId | None:
        return Marks.of(self.table, scope).newest

    def may_have_forgotten(self, txn: SinkTxnId) -> bool:
        commits = Marks.of(self.table, txn.scope).commits
        return len(commits) == _PROOFS and txn.cycle < commits[0][0].cycle

    def live_paths(self) -> Iterator[str]:
        snapshot = self.table.current_snapshot()
        for listed in snapshot.manifests(self.table.io) if snapshot else ():
            for entry in listed.fetch_manifest_entry(self.table.io):
                yield entry.data_file.file_path

    def refusal(self, record: Mapping[str, Any]) -> str | None:
        if record["keys"]:
            keys = read_keys(self.table, self.root, record["keys"])
            if (again := twice(keys)) is not None:
                return f"key {again} comes twice in the batch, and which row is meant is unknown"
            try:
                list(tasks_for(self.table, keys))
            except ValueError as error:
                return f"the table's files cannot be read to replace rows: {error}"
        if record["write"] == TableWrite.OVERWRITE:
            try:
                in_partitions(self.table, self._files(record))
            except Permanent as error:
                return reason_of(error)
        return None

    def _files(self, record: Mapping[str, Any]) -> list[Any]:
        base = self.table.metadata
        return [file_from_json(file, self.root, base) for file in record["files"]]

    def files_of(self, txn: SinkTxnId, record: Mapping[str, Any]) -> set[str] | None:
        if not record.get("keys"):
            return {file["path"] for file in record["files"]}
        snapshot = self._snapshot_of(txn)
        if snapshot is None:
            return None
        return {
            entry.data_file.file_path.removeprefix(f"{self.root}/")
            for listed in snapshot.manifests(self.table.io)
            if listed.added_snapshot_id == snapshot.snapshot_id
            for entry in listed.fetch_manifest_entry(self.table.io)
        }

    def commit(self, txn: SinkTxnId, record: Mapping[str, Any], digest: str) -> None:
        """Add a snapshot, even without files: a change of properties alone is not checked."""
        found = self._files(record)
        # pyiceberg writes the manifest for the table's current partitioning, and that may have
        # changed since the files were staged.
        draft = self._draft(**({"default_spec_id": record["files"][0]["spec"]} if found else {}))
        replaced = self._replaced(txn, record, found)
        about = {"semel.txn": _name(txn), "semel.proof": digest, "semel.cycle": str(txn.cycle)}
        update = draft.update_snapshot(snapshot_properties=about)
        with update.overwrite() if replaced.gone else update.fast_append() as change:
            for file in (*found, *replaced.instead):
                change.append_data_file(file)
            for file in replaced.gone:
                change.delete_data_file(file)
        marks = Marks.of(self.table, txn.scope).raised(txn, digest, self._sink)
        draft.set_properties({_key(txn.scope): marks})
        self._send(draft)

    def _draft(self, **more: Any) -> Any:
        """Begin a commit, for which the table's metadata has the values *more*.

        pyiceberg copies the metadata at every step of a draft, a dozen times: with all snapshots,
        each commit would take longer than the one before.
        """
        found, newest = self.table.metadata, self.table.current_snapshot()
        self.table.metadata = without_history(found, *([newest] if newest else []), **more)
        return self.table.transaction()

    def _send(self, draft: Any) -> None:
        right_table = updates.AssertTableUUID(uuid=self.table.metadata.table_uuid)
        needs = (right_table, *draft._requirements)
        try:
            self._catalog.commit_table(self.table, needs, draft._updates)
        except exceptions.CommitFailedException as error:
            raise CommitRefused(str(error)) from error

    def _own(self, txn: SinkTxnId) -> list[Any]:
        found = [task.file for task in self.table.scan().plan_files()]
        return [file for file in found if is_file_of(txn, file.file_path)]

    def own_files(self, txn: SinkTxnId) -> Mapping[str, int]:
        return {file.file_path: file.record_count for file in self._own(txn)}

    def keeps_files(self) -> str:
        return ""

    def was_undone(self, txn: SinkTxnId) -> bool:
        return _undone(txn) in self.table.metadata.properties

    def take_away(self, txn: SinkTxnId) -> None:
        own, draft = self._own(txn), self._draft()
        update = draft.update_snapshot(snapshot_properties={"semel.undone": str(txn)})
        # Also without files: a change of properties alone is not checked.
        with update.overwrite() if own else update.fast_append() as change:
            for file in own:
                change.delete_data_file(file)
        draft.set_properties({_undone(txn): str(txn)})
        self._send(draft)

    def _replaced(
        self, txn: SinkTxnId, record: Mapping[str, Any], found: Sequence[Any]
    ) -> Replaced:
        if record.get("write") == TableWrite.OVERWRITE:
            return in_partitions(self.table, found)
        if not record.get("keys"):
            return Replaced()
        keys = read_keys(self.table, self.root, record["keys"])
        # A folder of its own for each try: another process may be doing the same.
        folder = f"{self.root}/{folder_of(txn)}/{REWRITTEN}{uuid.uuid4().hex}"
        replaced = without_keys(self.table, keys, folder)
        reach(CrashPoint.TABLE_COMMIT_REWRITTEN, self._sink)
        return replaced


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


# Those of URLs are requests' and SQLAlchemy's, which not every catalog needs.
_SET_UP_WRONGLY: Final = {
    ValueError,
    "MissingSchema",
    "InvalidSchema",
    "InvalidURL",
    "ArgumentError",
}


def _names_of(error: Exception) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


_EFFECTS: Final = {
    TableWrite.APPEND: "the rows of a cycle in the",
    TableWrite.UPSERT: "the rows of a cycle, in place of those with the same key, in the",
    TableWrite.DELETE: "the deletion of the keys of a cycle from the",
    TableWrite.OVERWRITE: "the rows of a cycle, in place of all others of their partitions, in the",
}

_PREFIX: Final = "semel.marks."


def _undone(txn: SinkTxnId) -> str:
    return f"semel.undone.{txn.slug}"


def _marks_in(table: Any) -> dict[str, str]:
    found = table.metadata.properties.items()
    return {key: value for key, value in found if key.startswith(_PREFIX)}


def _key(scope: Scope) -> str:
    return f"{_PREFIX}{scope.slug}"


def _name(txn: SinkTxnId) -> str:
    return f"{txn.scope.slug}/{txn.label}"


def _cast(batch: Any, schema: Schema) -> Any:
    columns = [batch.column(name).cast(schema.field(name).type) for name in schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
