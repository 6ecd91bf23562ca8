"""The Delta sink: one version of the table per cycle, with the proof in its transactions.

    application transaction              version
    semel-<scope>                        the mark: generation and batch of the highest cycle
    semel-<scope>-attempt-<batch % 8>    a hash of the attempt that was committed
    semel-<scope>-token-<batch % 8>      a hash of its token

Delta keeps them in its log and its checkpoints.  They are numbers only, so the attempt's name
is found in the records beside the table, and is believed if its hash is the table's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from semel.arrow.attempts import COMMITTED, PREPARED, Attempts, is_file_of
from semel.arrow.tables import (
    DEFAULT_FILE_BYTES,
    CommitRefused,
    TableSink,
    TableWrite,
    checked_label,
)
from semel.arrow.tally import schema_from_text, tally_all
from semel.delta.staging import (
    DeltaStager,
    can_partition,
    conform,
    file_system,
    partition_texts,
)
from semel.errors import Permanent, Retryable, SemelError, reason_of, require
from semel.pipeline.sink import Guarantee, Schema, Tally, Tenant, Token
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

pa: Any = require("pyarrow", "delta")
pq: Any = require("pyarrow.parquet", "delta")
delta: Any = require("deltalake", "delta")
exceptions: Any = require("deltalake.exceptions", "delta")
transaction: Any = require("deltalake.transaction", "delta")

# The table keeps proofs of this many cycles for each scope.  One would do: a cycle starts
# when the one before it is finished.
_PROOFS: Final = 8

_BATCH_BITS: Final = 40
_RENAMED: Final = -1
"""The version of a scope whose proofs have another name now: Delta forgets no transaction."""

_HASH_DIGITS: Final = 15  # sixty bits: versions are signed numbers of sixty-four


class DeltaSink(TableSink):
    """Writes the rows of a cycle to a Delta table, as one version of it.

    *table* is the folder or URL of a table that exists; *options* are the storage options of
    `deltalake.DeltaTable`.  Executors write the data files themselves, below the table, and
    need the same access to the storage as the driver.

    *write* is ``append``, or ``overwrite`` of the partitions that have rows.  A task begins its
    next file when one has *file_bytes*.
    """

    kind = "delta"
    writes = (TableWrite.APPEND, TableWrite.OVERWRITE)

    def __init__(
        self,
        table: str | os.PathLike[str],
        rows: Any = None,
        *,
        options: Mapping[str, str] | None = None,
        name: str = "delta",
        write: str = "append",
        file_bytes: int = DEFAULT_FILE_BYTES,
    ) -> None:
        uri = os.fspath(table)
        # A relative path would differ on executors, which have another working folder.
        super().__init__(
            uri if "://" in uri else os.path.abspath(uri), rows, name, write, file_bytes
        )
        self._options = dict(options or {})
        if self.table.startswith(("s3://", "s3a://")):
            # Without it two writers could both write the same version of the log.
            self._options.setdefault("aws_conditional_put", "etag")

    def __repr__(self) -> str:
        return f"DeltaSink({self.table!r}, name={self.name!r})"

    @property
    def place(self) -> str:
        """The table's folder."""
        return f"delta:{self.table.rstrip('/')}"

    def check(self, schema: Schema | None) -> None:
        """Load the table, try to write beside its data, and compare the columns."""
        loaded = self._load_writable()
        with self._storage_faults():
            loaded.attempts(Scope("probe", "probe", "probe")).raise_epoch(1)
        if schema is not None:
            nothing = [pa.nulls(0, column.type) for column in schema]
            conform(pa.RecordBatch.from_arrays(nothing, names=schema.names), loaded.schema)
            columns = loaded.table.metadata().partition_columns
            if absent := [column for column in columns if column not in schema.names]:
                raise Permanent(f"the rows do not fit the table: its partitions need {absent}")

    def fence(self, scope: Scope, epoch: int) -> None:
        super().fence(scope, epoch)
        with self._storage_faults():
            self._load().attempts(scope).name(self.name)

    def find_place(self) -> str:
        return f"delta table {self._load().identity}"

    def tenants(self) -> list[Tenant]:
        loaded = self._load()
        with self._storage_faults():
            named = loaded.attempts(Scope("probe", "probe", "probe")).named()
            marks = [(scope, sink, loaded.mark(scope)) for scope, sink in named]
        return [Tenant(scope, sink, mark.label) for scope, sink, mark in marks if mark is not None]

    def rename(self, old: Tenant, new: Tenant) -> None:
        """Give the proofs and the epoch to the new name, in one version of the table."""
        loaded = self._load()
        before, after = loaded.attempts(old.scope), loaded.attempts(new.scope)
        with self._storage_faults():
            mark = loaded.mark(old.scope)
            if mark is None:
                return
            after.name(new.sink)
            if old.scope == new.scope:
                return
            after.raise_epoch(before.epoch())
            content = before.read(COMMITTED, mark) or before.read(PREPARED, mark) or {}
            again = SinkTxnId.parse(new.scope, mark.label)
            after.write(COMMITTED, again, content)
        with self._table_faults():
            loaded.rename(old.scope, new.scope)

    def stager(self, txn: SinkTxnId) -> DeltaStager:
        loaded = self._load_writable()
        columns = tuple(loaded.table.metadata().partition_columns)
        return DeltaStager(
            checked_label(txn), self.table, loaded.schema, columns, self.file_bytes, self._options
        )

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        """Read the cycle's files again; None once they were rewritten, or rows in them deleted."""
        loaded = self._load()
        txn = cycle.attempt(str(token["attempt"]))
        with self._storage_faults():
            adds = pa.table(loaded.table.get_add_actions(flatten=True)).to_pylist()
            mine = [add for add in adds if is_file_of(txn, add["path"])]
            rows = sum(add["num_records"] for add in mine)
            # A later cycle may have replaced some of the partitions.
            replaces = self.write is TableWrite.OVERWRITE
            if rows != token["rows"] and (replaces or loaded.was_rewritten()):
                return None
            if token.get("schema") is None:
                return None if mine else Tally()
            schema = schema_from_text(token["schema"])
            return tally_all(batch for add in mine for batch in loaded.rows_of(add, schema))

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect=(
                f"the rows of a cycle{_IN_PLACE_OF[self.write]} in the Delta table {self.table}, "
                f"once each"
            ),
            readers_see="whole batches or nothing: a cycle is one version",
            not_covered=(
                "delta.setTransactionRetentionDuration: it makes the table forget its proofs",
                "a vacuum with a retention shorter than a cycle is prepared",
                "a table restored to an older version: the rows since are not written again",
            ),
        )

    def close(self) -> None:
        """Do nothing: no connection is held between calls."""

    def _load_writable(self) -> DeltaTable:
        """Load the table; raise Permanent if its rules are such that the sink would break them."""
        loaded = self._load()
        about = loaded.table.metadata()
        wrong = [
            f"{key}={value}"
            for key, value in about.configuration.items()
            if key.startswith("delta.constraints.")
            or (key == "delta.columnMapping.mode" and value != "none")
        ]
        wrong += _beyond_us(loaded.table.protocol(), self.write)
        wrong += _rules_of_columns(json.loads(loaded.table.schema().to_json()))
        wrong += [
            f"it is partitioned by {column}, a {loaded.schema.field(column).type}"
            for column in about.partition_columns
            if not can_partition(loaded.schema.field(column).type)
        ]
        if self.write is TableWrite.OVERWRITE:
            wrong += _obstacles_of_overwrite(about)
        if wrong:
            raise Permanent(
                f"delta sink {self.name}: {self.table} needs what the sink does not do for the "
                f"files it writes: {'; '.join(wrong)}"
            )
        return loaded

    def _load(self) -> DeltaTable:
        with self._table_faults():
            found = delta.DeltaTable(self.table, storage_options=self._options or None)
            return DeltaTable(found, self.table, self._options)

    @contextlib.contextmanager
    def _table_faults(self) -> Iterator[None]:
        try:
            yield
        except exceptions.TableNotFoundError as error:
            raise Permanent(
                f"delta sink {self.name}: {self.table} is not a Delta table; create it with "
                f"deltalake.DeltaTable.create({self.table!r}, schema)"
            ) from error
        except SemelError:
            raise
        except Exception as error:  # storage errors have no class of their own
            raise Retryable(
                f"delta sink {self.name}: {self.table} does not answer: {reason_of(error)}"
            ) from error


class DeltaTable:
    """A table as it is in its newest version."""

    def __init__(self, table: Any, uri: str, options: Mapping[str, str]) -> None:
        self.table = table
        self.schema: Schema = pa.schema(table.schema().to_arrow())
        self._fs = file_system(uri, options)

    @property
    def identity(self) -> str:
        return str(self.table.metadata().id)

    def attempts(self, scope: Scope) -> Attempts:
        # A vacuum removes files that the log does not name, but not from hidden folders: data
        # files of losers may go there, records may not.
        return Attempts(self._fs, "", scope, records="_semel")

    def proof(self, txn: SinkTxnId) -> str | None:
        if self._version(_slot(txn, "attempt")) != _number(_hash(txn.label)):
            return None
        token = self._version(_slot(txn, "token"))
        return None if token is None else f"{token:0{_HASH_DIGITS}x}"

    def mark(self, scope: Scope) -> SinkTxnId | None:
        """Return the highest cycle; its attempt's name comes from a record, checked by its hash.

        Raises:
            Permanent: the records beside the table are gone.
        """
        cycle = self._highest(scope)
        if cycle is None:
            return None
        attempts = self.attempts(scope)
        for kind in (COMMITTED, PREPARED):
            for txn in attempts.records(kind):
                if txn.cycle == cycle and self.proof(txn) is not None:
                    return txn
        raise Permanent(
            f"the table has cycle {cycle}, and the folders _semel-… beside it, which name its "
            f"attempt, are gone: restore them"
        )

    def may_have_forgotten(self, txn: SinkTxnId) -> bool:
        highest = self._highest(txn.scope)
        if highest is None or highest < txn.cycle:
            return False
        same = highest.generation == txn.cycle.generation
        return not same or highest.batch - txn.cycle.batch >= _PROOFS

    def live_paths(self) -> Iterator[str]:
        return iter(self.table.file_uris())

    def refusal(self, record: Mapping[str, Any]) -> str | None:
        return None

    def files_of(self, txn: SinkTxnId, record: Mapping[str, Any]) -> set[str] | None:
        return {file["path"] for file in record["files"]}

    def commit(self, txn: SinkTxnId, record: Mapping[str, Any], digest: str) -> None:
        now = int(time.time() * 1000)
        actions = [
            transaction.AddAction(
                file["path"], file["size"], file["values"], now, True, file["stats"]
            )
            for file in record["files"]
        ]
        if record.get("write") == TableWrite.OVERWRITE:
            actions += self._removed(record["files"], now)
        versions = {
            _app(txn.scope): (txn.cycle.generation << _BATCH_BITS) + txn.cycle.batch,
            _slot(txn, "attempt"): _number(_hash(txn.label)),
            _slot(txn, "token"): _number(digest),
        }
        about = {"semel.cycle": str(txn.cycle), "semel.attempt": txn.attempt}
        self._commit(actions, versions, about)

    def rename(self, old: Scope, new: Scope) -> None:
        """Copy the transactions of one scope to another, and take the mark from the first."""
        versions = {_app(old): _RENAMED}
        apps = [f"-{what}-{n}" for what in ("attempt", "token") for n in range(_PROOFS)]
        for rest in ("", *apps):
            version = self._version(f"{_app(old)}{rest}")
            if version is not None:
                versions[f"{_app(new)}{rest}"] = version
        self._commit([], versions, {"semel.renamed": f"{old} is {new}"})

    def _commit(
        self, actions: Sequence[Any], versions: Mapping[str, int], about: Mapping[str, str]
    ) -> None:
        """Commit once, on this state of the table."""
        version = self.table.version()
        try:
            self.table.create_write_transaction(
                list(actions),
                "append",
                self.table.schema(),
                partition_by=self.table.metadata().partition_columns,
                commit_properties=delta.CommitProperties(
                    app_transactions=[delta.Transaction(*one) for one in versions.items()],
                    max_commit_retries=0,
                    custom_metadata=dict(about),
                ),
            )
        except exceptions.CommitFailedError as error:
            self.table.update_incremental()
            if self.table.version() == version:
                raise Retryable(
                    f"the commit was refused, though there was no other one: {reason_of(error)}"
                ) from error
            raise CommitRefused(str(error)) from error

    def _removed(self, files: Sequence[Mapping[str, Any]], now: int) -> list[Any]:
        """Return what removes the files in the partitions of *files*."""
        partitions = {frozenset(file["values"].items()) for file in files}
        return [
            _removal(add, now)
            for add in pa.table(self.table.get_add_actions()).to_pylist()
            if frozenset(partition_texts(add["partition"]).items()) in partitions
        ]

    def _own(self, txn: SinkTxnId) -> list[dict[str, Any]]:
        adds = pa.table(self.table.get_add_actions()).to_pylist()
        return [add for add in adds if is_file_of(txn, unquote(add["path"]))]

    def own_files(self, txn: SinkTxnId) -> Mapping[str, int]:
        return {add["path"]: add["num_records"] or 0 for add in self._own(txn)}

    def keeps_files(self) -> str:
        # An overwrite removes files, too.
        beyond = _beyond_us(self.table.protocol(), TableWrite.OVERWRITE)
        return "; ".join(beyond + _obstacles_of_removal(self.table.metadata()))

    def was_undone(self, txn: SinkTxnId) -> bool:
        return self._version(_undone(txn)) is not None

    def take_away(self, txn: SinkTxnId) -> None:
        now = int(time.time() * 1000)
        actions = [_removal(add, now) for add in self._own(txn)]
        self._commit(actions, {_undone(txn): 1}, {"semel.undone": str(txn)})

    def was_rewritten(self) -> bool:
        """Return whether somebody has rewritten files, as far as the log goes back."""
        rewrites = {"OPTIMIZE", "DELETE", "UPDATE", "MERGE", "REORG"}
        return any(entry.get("operation") in rewrites for entry in self.table.history())

    def rows_of(self, add: Mapping[str, Any], schema: Schema) -> Iterator[Any]:
        """Read the rows of one file, with the partition's values, as they were staged."""
        with self._fs.open_input_file(add["path"]) as file:
            rows = pq.ParquetFile(file).read()
        columns = [
            rows[name].combine_chunks().cast(column.type)
            if name in rows.column_names
            else pa.array([add.get(f"partition.{name}")] * rows.num_rows, column.type)
            for name, column in zip(schema.names, schema, strict=True)
        ]
        yield from pa.Table.from_arrays(columns, schema=schema).to_batches()

    def _highest(self, scope: Scope) -> CycleId | None:
        version = self._version(_app(scope))
        if version is None or version == _RENAMED:
            return None
        return CycleId(scope, version >> _BATCH_BITS, version % (1 << _BATCH_BITS))

    def _version(self, app: str) -> int | None:
        found = self.table.transaction_version(app)
        return None if found is None else int(found)


_IN_PLACE_OF: Final = {
    TableWrite.APPEND: "",
    TableWrite.OVERWRITE: ", in place of all others of their partitions,",
}


_RULES: Final = ("delta.invariants", "delta.generationExpression", "delta.identity.")


def _rules_of_columns(content: Any) -> list[str]:
    """Find the columns, at any depth of a schema, whose values the writer must check or make."""
    if isinstance(content, list):
        return [rule for one in content for rule in _rules_of_columns(one)]
    if not isinstance(content, dict):
        return []
    metadata = content.get("metadata", {})
    found = [
        f"{key}={value} of column {content['name']}"
        for key, value in metadata.items()
        if key.startswith(_RULES)
    ]
    return found + _rules_of_columns([content[key] for key in content.keys() - {"metadata"}])


# Those of them that have rules for rows are refused where a table or a column has such a rule.
_FEATURES: Final = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "deletionVectors",
    "generatedColumns",
    "invariants",
    "timestampNtz",
    "v2Checkpoint",
    "variantType",
}
_READER_VERSIONS: Final = (1, 2, 3)
_WRITER_VERSIONS: Final = (1, 2, 3, 4, 5, 7)  # six came with identity columns, seven lists features


def _beyond_us(protocol: Any, write: TableWrite) -> list[str]:
    """Find what the table's protocol asks of writers and the sink does not do."""
    asked = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
    # A file's removal must name its deletion vector, and the library does not tell it.
    done = _FEATURES - ({"deletionVectors"} if write is TableWrite.OVERWRITE else set())
    wrong = [f"the feature {name}" for name in sorted(asked - done)]
    if protocol.min_reader_version not in _READER_VERSIONS:
        wrong.append(f"minReaderVersion={protocol.min_reader_version}")
    if protocol.min_writer_version not in _WRITER_VERSIONS:
        wrong.append(f"minWriterVersion={protocol.min_writer_version}")
    return wrong


def _obstacles_of_overwrite(about: Any) -> list[str]:
    wrong = [] if about.partition_columns else ["it has no partitions to overwrite"]
    return wrong + _obstacles_of_removal(about)


def _obstacles_of_removal(about: Any) -> list[str]:
    is_on = about.configuration.get("delta.appendOnly", "").lower() == "true"
    return ["delta.appendOnly=true, and files would be removed"] if is_on else []


def _removal(add: Mapping[str, Any], now: int) -> Any:
    # The log has the path as a URL, and the library writes it as a URL again.
    values = partition_texts(add.get("partition") or {})  # a table without partitions has none
    return transaction.RemoveAction(unquote(add["path"]), True, now, add["size_bytes"], values)


def _app(scope: Scope) -> str:
    return f"semel-{scope.slug}"


def _slot(txn: SinkTxnId, what: str) -> str:
    return f"{_app(txn.scope)}-{what}-{txn.cycle.batch % _PROOFS}"


def _undone(txn: SinkTxnId) -> str:
    return f"{_app(txn.scope)}-undone-{txn.cycle.label}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _number(digest: str) -> int:
    return int(digest[:_HASH_DIGITS], 16)
