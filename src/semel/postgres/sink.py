"""The sink for a PostgreSQL table: every row once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import psycopg

from semel.errors import Fenced, Misuse, NeedsOperator, Permanent, SemelError, reason_of
from semel.events import log
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
    Stager,
    Tally,
    Token,
    digest_of,
    tally_of,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId, checked_name
from semel.postgres.checks import Checked, Wanted, check, guarantee, refuse_pooler
from semel.postgres.connect import Address, Connection, Login
from semel.postgres.database import SinkDatabase
from semel.postgres.faults import outcome_of
from semel.postgres.inventory import Inventory
from semel.postgres.names import TableName
from semel.postgres.prepared import Prepared, PreparedStager
from semel.postgres.resolve import Diverted, divert
from semel.postgres.staging import Staging, StagingStager
from semel.postgres.statements import PreparedToken, Write
from semel.postgres.verify import read_tally
from semel.secrets import Password

Mode = Literal["staging", "prepared", "auto"]

_LOCK_SECONDS: Final = 10.0

# After this many failures in a row, mode auto stays with staging: each failure stages a batch
# twice.
_FAILURES_IN_A_ROW: Final = 3


class PostgresSink:
    """Appends to, or upserts into, one table; whole batches, in one decision with other sinks.

    *table* is read as written, upper and lower case kept: ``entries``, ``Shop.Entries``.
    *write* defaults to ``upsert`` if there is a *key* and to ``append`` if there is none;
    with ``append`` the key only names rows in errors and makes the primary key of a table
    that semel creates.  Naive timestamps count as UTC, and ``timestamp`` columns hold UTC.

    The password comes from *password* (a text, or a callable that is asked on the driver for
    every batch), the URL, or PGPASSWORD.  It travels to executors inside the pickled stager and
    appears in no token, repr, log or error.
    """

    def __init__(
        self,
        url: str,
        table: str,
        rows: Any = None,
        key: Sequence[str] | str | None = None,
        name: str = "postgres",
        *,
        mode: Mode = "staging",
        write: Literal["append", "ignore", "upsert"] | None = None,
        version_column: str | None = None,
        cycle_column: str | None = None,
        create_table: Literal["never", "if-missing"] = "never",
        password: Password = None,
        lock_seconds: float = _LOCK_SECONDS,
        bookkeeping_schema: str = "semel",
        connect: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        keys = (key,) if isinstance(key, str) else tuple(key or ())
        self._wanted = Wanted(
            sink=name,
            table=TableName.parse(table),
            key=keys,
            write=Write(write or (Write.UPSERT if keys else Write.APPEND)),
            version_column=version_column or "",
            cycle_column=cycle_column or "",
            mode=mode,
            create_table=create_table,
        )
        self._login = Login(url, password, dict(connect or {}))
        self._check_settings()
        self._database = SinkDatabase(name, self._login.address, bookkeeping_schema, lock_seconds)
        self._staging = Staging(self._database)
        self._prepared = Prepared(self._database)
        self._inventory = Inventory(self._database, self._staging, self._prepared)
        self._checked: Checked | None = None
        self._schema: Schema | None = None
        self._hasty: set[SinkTxnId] = set()
        self._slow_cycle: CycleId | None = None
        self._failures = 0

    def __repr__(self) -> str:
        table = str(self._wanted.table)
        return f"PostgresSink({self._login.label!r}, {table!r}, name={self.name!r})"

    def _check_settings(self) -> None:
        wanted = self._wanted
        if wanted.mode not in ("staging", "prepared", "auto"):
            raise Misuse(
                f"sink {self.name}: mode must be staging, prepared or auto, got {wanted.mode!r}"
            )
        if wanted.create_table not in ("never", "if-missing"):
            raise Misuse(f"sink {self.name}: create_table must be never or if-missing")
        if wanted.write is Write.UPSERT and not wanted.key:
            raise Misuse(f"sink {self.name}: an upsert needs key=[…]")
        if wanted.version_column and wanted.write is not Write.UPSERT:
            raise Misuse(f"sink {self.name}: a version_column needs write='upsert'")
        if wanted.mode == "prepared" and wanted.write is not Write.APPEND:
            raise Misuse(
                f"sink {self.name}: prepared mode can only append, and write is {wanted.write!r} "
                f"(the default with a key); use write='append', mode='staging' or mode='auto'"
            )
        Address.of(self._login.url, "", {})

    # Before the first batch

    def expect_speculation(self) -> None:
        """Use staging mode for a table with a unique index: a task's copy would wait for it."""
        self._wanted = replace(self._wanted, speculates=True)

    def check(self, schema: Schema | None) -> None:
        """Check that rows of *schema* can be written; create the table if configured."""
        with self._database.asking() as connection, self._database.asking() as another:
            refuse_pooler(self.name, connection, another)
            if self._wanted.mode != "prepared" or not self._database.has_books(connection):
                self._database.books.check_rights(connection)
            self._checked = check(connection, self._wanted, schema)
        self._schema = schema

    def fence(self, scope: Scope, epoch: int) -> None:
        """Refuse older owners of *scope* and end their sessions."""
        self._database.fence(scope, epoch)

    # One transaction

    def stager(self, txn: SinkTxnId) -> Stager:
        with self._database.session(txn.scope) as connection:
            checked = self._checked or check(connection, self._wanted, None)
            if checked is None:
                raise Permanent(
                    f"table {self._wanted.table} does not exist; check(schema) creates it"
                )
            self._checked = checked
            is_hasty = checked.mode == "prepared" and not self._is_slow(txn.cycle)
            if is_hasty:
                self._prepared.clear_way(connection, txn)
        place = (
            self._database.address,
            self._database.application(txn.scope),
            self._database.books.schema,
            self.name,
            checked.target,
            txn,
        )
        if not is_hasty:
            return StagingStager(*place, self._wanted.filled)
        self._hasty.add(txn)
        return PreparedStager(
            *place,
            self._database.epoch(txn.scope),
            self._wanted.cycle_column,
            self._database.lock_seconds,
        )

    def _check_again(self, connection: Connection) -> Checked:
        """Check the table again; a table that was dropped is not created a second time."""
        wanted = replace(self._wanted, create_table="never")
        self._checked = check(connection, wanted, self._schema)
        if self._checked is None:
            raise Permanent(f"table {wanted.table} does not exist")
        return self._checked

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        try:
            promise = self._promise(txn, receipts)
            way = self._prepared if promise.mode == "prepared" else self._staging
            outcome = way.prepare(txn, promise, receipts)
            if isinstance(outcome, SinkRetryable):
                self._database.check_fence(
                    txn.scope
                )  # a newer owner ends our sessions, which looks like a lost connection
        except (Fenced, NeedsOperator, Permanent) as error:
            return SinkFatal(reason_of(error))
        if isinstance(outcome, SinkOK):
            if txn in self._hasty:
                self._failures = 0
            self._hasty.discard(txn)
        else:
            self._checked = None  # perhaps the table was altered
        return outcome

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Make the prepared rows visible, or find the proof that they are."""
        try:
            promise = PreparedToken.of(token, txn)
            way = self._prepared if promise.mode == "prepared" else self._staging
            return way.commit(txn, promise)
        except NeedsOperator as error:
            return SinkFatal(reason_of(error))

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        """Drop this attempt's tables and prepared transactions."""
        self._note_failure(txn)
        with self._database.session(txn.scope) as connection:
            try:
                return self._inventory.abort(connection, txn)
            except psycopg.Error as error:
                return outcome_of(error, "abort")

    def abort_together(self, txns: Sequence[SinkTxnId]) -> set[SinkTxnId]:
        """Drop the things of many attempts of one scope in a few transactions."""
        gone: set[SinkTxnId] = set()
        with self._database.session(txns[0].scope) as connection:
            for txn in txns:
                self._note_failure(txn)
            try:
                for txn in self._inventory.abort_together(connection, txns):
                    gone.add(txn)
            except psycopg.Error as error:
                reason = {"sink": self.name, "reason": str(error)}
                log.warning("attempts are aborted one by one", extra=reason)
        return gone

    def _note_failure(self, txn: SinkTxnId) -> None:
        """Prefer staging mode for the next attempt, if this one was in prepared mode."""
        if txn in self._hasty:
            # Perhaps two tasks insert one key: staging mode reports the constraint's own error.
            self._slow_cycle = txn.cycle
            self._failures += 1
            log.warning(
                "prepared mode failed, staging mode for the next attempt",
                extra={"cycle": str(txn.cycle), "sink": self.name},
            )
        self._hasty.discard(txn)
        self._checked = None  # perhaps the table was altered

    def _is_slow(self, cycle: CycleId) -> bool:
        """Return whether prepared mode has failed for this cycle, or for too many before it."""
        gave_up = self._wanted.mode == "auto" and self._failures >= _FAILURES_IN_A_ROW
        return gave_up or cycle == self._slow_cycle

    def _promise(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> PreparedToken:
        full = [receipt for receipt in receipts if receipt.tally.rows]
        kinds = {(r.detail["mode"], str(r.detail["columns"])) for r in full}
        schemas = {
            r.detail["schema"] for r in full
        }  # empty if the rows cannot be read back exactly
        if len(kinds) > 1 or len(schemas - {""}) > 1:
            raise NeedsOperator(f"{txn}: its tasks have staged rows of different schemas")
        detail: Mapping[str, Any] = (
            full[0].detail if full else {"mode": "staging", "columns": [], "numbered": []}
        )
        tally, wanted = tally_of(receipts), self._wanted
        return PreparedToken(
            mode=detail["mode"],
            cycle=txn.cycle.label,
            attempt=txn.attempt,
            digest=digest_of(receipts),
            rows=tally.rows,
            row_hash=tally.hash,
            target=str(self._checked.target.name if self._checked else wanted.table),
            pieces=tuple(r.detail["piece"] for r in sorted(full, key=_in_order_of_tasks)),
            columns=tuple((name, cast) for name, cast in detail["columns"]),
            write=wanted.write.value,
            key=wanted.key,
            version_column=wanted.version_column,
            cycle_column=wanted.cycle_column,
            overriding=bool(detail["numbered"]),
            fixed=tuple(detail["numbered"]),
            schema=min(schemas, default="") if wanted.write is Write.APPEND else "",
        )

    # What is there

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        try:
            with self._database.asking(txn.scope) as connection:
                if not self._database.has_books(connection):
                    return SinkFinding(Found.GONE, "semel has never written to this database")
                return self._inventory.find(connection, txn)
        except SemelError as error:
            return SinkFinding(Found.UNREACHABLE, reason_of(error))

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        with self._database.asking(scope) as connection:
            if not self._database.has_books(connection):
                return []
            return self._inventory.held(connection, scope)

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        with self._database.session(scope) as connection:
            return self._inventory.sweep(connection, scope, is_loser)

    def mark(self, scope: Scope) -> SinkTxnId | None:
        with self._database.asking(scope) as connection:
            if not self._database.has_books(connection):
                return None
            return self._inventory.mark(connection, scope)

    def scopes_of(self, app: str, query: str) -> list[Scope]:
        with self._database.asking() as connection:
            if not self._database.has_books(connection):
                return []
            return self._inventory.scopes_of(connection, app, query)

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        """Count and hash the rows that *cycle* appended; None without a cycle column.

        None, too, for upserts (later cycles replace rows) and for columns that are not read
        back as they were written: nested values, jsonb, uuids from text, padded characters,
        texts whose spaces were cut off at the column's length, dates outside of the years 1 to
        9999.
        """
        promise = PreparedToken.of(token, SinkTxnId(cycle, str(token.get("attempt"))))
        with self._database.asking(cycle.scope) as connection:
            return read_tally(connection, promise, cycle)

    def guarantee(self) -> Guarantee:
        """Return the guarantee, as far as it was checked."""
        return guarantee(self._wanted, self._checked)

    def close(self) -> None:
        """Roll back what is held and close the idle connections."""
        self._database.close()

    # For `semel cycle resolve`

    def resolve_retry(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Try to commit a stuck cycle again, after the cause was removed."""
        return self.commit(txn, token)

    def resolve_divert(self, txn: SinkTxnId, token: Token, reject_table: str) -> Diverted:
        """Commit a stuck cycle without the rows that constraints refuse; divert those.

        Raises:
            NeedsOperator: the transaction is not held here.
            Misuse: it was staged in prepared mode, which cannot get stuck.
        """
        promise = PreparedToken.of(token, txn)
        if promise.mode != "staging":
            raise Misuse(f"{txn} was staged in {promise.mode} mode: there is nothing to divert")
        return divert(self._database, self._staging, txn, promise, reject_table)


def _in_order_of_tasks(receipt: Receipt) -> tuple[int, str]:
    """Sort t9-… before t10-…, as Spark numbers the tasks of a job.

    A batch that is sorted by key then arrives sorted, and its index is built a third faster.
    """
    return len(receipt.task), receipt.task
