"""The sink for a PostgreSQL table: every row once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, Final, Literal, TypeVar

import psycopg

from semel.arrow.tally import schema_from_text, tally
from semel.errors import Fenced, Misuse, NeedsOperator, Permanent, SemelError, reason_of, require
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
    Tenant,
    Token,
    digest_of,
    tally_of,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId, checked_name
from semel.postgres.checks import (
    Checked,
    Wanted,
    check,
    check_connections,
    guarantee,
    refuse_pooler,
    slots_of,
)
from semel.postgres.connect import OWN_PATH, Address, Connection, Login, outcome_of
from semel.postgres.database import SinkDatabase
from semel.postgres.prepared import Prepared, TaskTransaction, roll_back, shared_name
from semel.postgres.schema import find_target
from semel.postgres.staging import Diverted, Outcomes, Part, Staging, TaskTable, drop, pieces_of
from semel.postgres.statements import (
    PreparedToken,
    TableName,
    Write,
    cycle_text,
    hash_of,
    literal,
    quoted,
)
from semel.postgres.writer import TaskStager
from semel.secrets import Password

Answer = TypeVar("Answer")

Mode = Literal["staging", "prepared", "auto"]

LOCK_SECONDS: Final = 10.0

# Each attempt needs a lock, and a few more per table; the server's default allows thousands.
_ABORTED_AT_ONCE: Final = 100

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

    *rejects* names a table: rows that can never be written (a value that its column cannot hold,
    a failed constraint) go there, with the reason, in the same transaction, instead of failing
    the batch.  It is created if it is missing; without a schema it is in the target's.  Errors
    that are not about a row (a right, a column, a trigger's function) fail the batch, and so does
    a batch of a hundred rows or more of which a larger share than *most_rejects* is refused.

    *schema*, such as ``id string, version long``, says what a handler's rows have, in a pipeline
    of messages.

    Sinks of one server, database, role and bookkeeping schema share one transaction, in the
    order in which the pipeline lists them: parents first.  *connections* is the most that one
    process opens to the database, 16 if not given.
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
        rejects: str | None = None,
        most_rejects: float = 0.9,
        schema: str | None = None,
        password: Password = None,
        lock_seconds: float = LOCK_SECONDS,
        bookkeeping_schema: str = "semel",
        connections: int | None = None,
        connect: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        self.schema = schema
        self.table = TableName.parse(table).table
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
            rejects=rejects or "",
            most_rejects=most_rejects,
        )
        self._login = Login(url, password, dict(connect or {}), connections)
        self._check_settings()
        self._database = SinkDatabase(name, self._login.address, bookkeeping_schema, lock_seconds)
        self._books = self._database.books
        self._staging = Staging(self._database)
        self._prepared = Prepared(self._database)
        self._group: Sequence[PostgresSink] = (self,)
        self._checked: Checked | None = None
        self._schema: Schema | None = None
        self._hasty: set[SinkTxnId] = set()
        self._slow_cycle: CycleId | None = None
        self._failures = 0
        self._lacks_slots = False

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
        if not 0 <= wanted.most_rejects <= 1:
            raise Misuse(
                f"sink {self.name}: most_rejects is a share between 0 and 1, got "
                f"{wanted.most_rejects}"
            )
        if wanted.rejects:
            TableName.parse(wanted.rejects)
        if wanted.mode == "prepared" and wanted.rejects:
            raise Misuse(
                f"sink {self.name}: rejects= needs mode='staging' or mode='auto': in prepared mode "
                f"a task's rows are refused together"
            )
        if (most := self._login.most_connections) is not None and most < 1:
            raise Misuse(f"sink {self.name}: connections must be greater than 0, got {most}")
        Address.of(self._login.url, "", {})

    # Sinks of one database

    @property
    def transaction_key(self) -> Hashable:
        """Equal for sinks of one server, database, role and bookkeeping schema."""
        return self._login.key(self._books.schema)

    def join(self, sinks: Sequence[PostgresSink]) -> None:
        """Share one transaction with *sinks*, of which this is one, in their order."""
        self._group = tuple(sinks)
        self._database.join(sinks[0]._database)

    # Before the first batch

    def expect_speculation(self) -> None:
        """Use staging mode for a table with a unique index: a task's copy would wait for it."""
        self._wanted = replace(self._wanted, speculates=True)

    @property
    def replaces_rows(self) -> bool:
        """Whether a row takes the place of a newer one with its key, if it is written later."""
        return self._wanted.write is Write.UPSERT and not self._wanted.version_column

    def check(self, schema: Schema | None) -> None:
        """Check that rows of *schema* can be written; create the table if configured."""
        with self._database.asking() as connection, self._database.asking() as another:
            refuse_pooler(self.name, connection, another)
            if self._wanted.mode != "prepared" or not self._database.has_books(connection):
                self._books.check_rights(connection)
            check_connections(self.name, connection, self._login.most_connections)
            self._checked = self._look(connection, self._wanted, schema)
        self._schema = schema

    def _look(
        self, connection: Connection, wanted: Wanted, schema: Schema | None
    ) -> Checked | None:
        return check(connection, wanted, schema)

    def fence(self, scope: Scope, epoch: int) -> None:
        """Refuse older owners of *scope* and end their sessions."""
        self._database.fence(scope, epoch)
        with self._database.session(scope) as connection:
            self._books.settle_in(connection, scope, self._table(connection))

    # One transaction

    def stager(self, txn: SinkTxnId) -> Stager:
        with self._database.session(txn.scope) as connection:
            checked = self._check_again(connection)
            is_hasty = all(sink._is_hasty(connection, txn) for sink in self._group)
            if is_hasty and self._is_referring(connection):
                is_hasty = False
            if is_hasty:
                self._prepared.clear_way(connection, txn)
                self._hasty.add(txn)
        return TaskStager(
            TaskTransaction if is_hasty else TaskTable,
            replace(self._database.address, has_worked=True),
            self._database.application(txn.scope),
            self._books.schema,
            self.name,
            checked.target,
            txn,
            self._database.epoch(txn.scope),
            self._wanted.filled,
            self._database.lock_seconds,
            self._wanted.key or checked.target.shortest_key,
            bool(self._wanted.rejects),
            shared_name(self._books.schema) if len(self._group) > 1 else "",
        )

    def _check_again(self, connection: Connection) -> Checked:
        """Look at the table once more, if a failure has raised doubts."""
        if self._checked is None:
            # A table that was dropped since the first check is not created a second time.
            wanted = replace(self._wanted, create_table="never")
            self._checked = self._look(connection, wanted, self._schema)
            assert self._checked is not None
        return self._checked

    def _checked_now(self, scope: Scope) -> Checked:
        if self._checked is not None:
            return self._checked
        with self._database.session(scope) as connection:
            return self._check_again(connection)

    def _read(self, token: Token, txn: SinkTxnId) -> PreparedToken:
        """Read a token, which is evidence: what is done is what this sink is set to do.

        Raises:
            NeedsOperator: it differs from the settings or the table.
        """
        promise = PreparedToken.of(token, txn)
        checked, wanted = self._checked_now(txn.scope), self._wanted
        target = checked.target
        own = {
            "target": str(target.name),
            "write": wanted.write.value,
            "key": wanted.key,
            "version_column": wanted.version_column,
            "cycle_column": wanted.cycle_column,
            "rejects": checked.rejects,
        }
        differing = [name for name, value in own.items() if getattr(promise, name) != value]
        if not all(target.takes(name, cast) for name, cast in promise.columns):
            differing.append("columns")
        if promise.rejected and not promise.rejects:
            differing.append("rejected")
        if differing:
            raise NeedsOperator(
                f"{txn}: the token differs from the settings of sink {self.name}, or from its "
                f"table, in {', '.join(differing)}: set back what was changed, and start again"
            )
        return promise

    def _is_hasty(self, connection: Connection, txn: SinkTxnId) -> bool:
        """Return whether this sink can use prepared mode for this attempt."""
        return self._check_again(connection).mode == "prepared" and not self._is_slow(txn.cycle)

    def _is_referring(self, connection: Connection) -> bool:
        """Return whether a table of the group refers to another one.

        In prepared mode a child's row does not find a parent that another task has written.
        """
        targets = [sink._check_again(connection).target for sink in self._group]
        names = {target.name for target in targets}
        return any(names & (target.parents - {target.name}) for target in targets)

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        return self._prepare_these([self], txn, {self.name: receipts})[self.name]

    def prepare_all(
        self, txn: SinkTxnId, receipts: Mapping[str, Sequence[Receipt]]
    ) -> Mapping[str, SinkOutcome]:
        """Prepare the sinks of the group, in their order, in one transaction."""
        sinks = [sink for sink in self._group if sink.name in receipts]
        return self._prepare_these(sinks, txn, receipts)

    def _prepare_these(
        self,
        sinks: Sequence[PostgresSink],
        txn: SinkTxnId,
        receipts: Mapping[str, Sequence[Receipt]],
    ) -> Mapping[str, SinkOutcome]:
        def prepare() -> Outcomes:
            all_of = [(sink, receipts[sink.name]) for sink in sinks]
            parts = [
                replace(
                    sink._part(sink._promise(txn, theirs), theirs),
                    pieces=pieces_of(theirs),
                    most_rejected=sink._wanted.most_rejected(tally_of(theirs).rows),
                )
                for sink, theirs in all_of
            ]
            parts = _of_one_mode(txn, parts)
            return self._way(parts[0].promise.mode).prepare(txn, parts)

        outcomes = self._outcomes("prepare", sinks, prepare)
        if any(isinstance(outcome, SinkRetryable) for outcome in outcomes.values()):
            try:  # a newer owner ends our sessions, which looks like a lost connection
                self._database.check_fence(txn.scope)
            except Fenced as error:
                outcomes = {sink.name: SinkFatal(reason_of(error)) for sink in sinks}
        for sink in sinks:
            if isinstance(outcomes[sink.name], SinkOK):
                if txn in sink._hasty:
                    sink._failures = 0
                sink._hasty.discard(txn)
            else:
                sink._checked = None  # perhaps the table was altered
        return outcomes

    def _part(self, promise: PreparedToken, receipts: Sequence[Receipt] = ()) -> Part:
        return Part(self._books, promise, receipts)

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Make the prepared rows visible, or find the proof that they are."""
        return self._commit_these([self], txn, {self.name: token})[self.name]

    def commit_all(self, txn: SinkTxnId, tokens: Mapping[str, Token]) -> Mapping[str, SinkOutcome]:
        """Commit the sinks of the group together."""
        sinks = [sink for sink in self._group if sink.name in tokens]
        return self._commit_these(sinks, txn, tokens)

    def _commit_these(
        self, sinks: Sequence[PostgresSink], txn: SinkTxnId, tokens: Mapping[str, Token]
    ) -> Mapping[str, SinkOutcome]:
        def commit() -> Outcomes:
            parts = [sink._part(sink._read(tokens[sink.name], txn)) for sink in sinks]
            outcomes: dict[str, SinkOutcome] = {}
            for mode in sorted({part.promise.mode for part in parts}):
                same = [part for part in parts if part.promise.mode == mode]
                outcomes |= self._way(mode).commit(txn, same)
            return outcomes

        return self._outcomes("commit", sinks, commit)

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        """Drop this attempt's tables and prepared transactions."""
        was_hasty = txn in self._hasty
        self._note_failure(txn)
        called = self._outcomes("abort", [self], lambda: {self.name: self._abort(txn, was_hasty)})
        return called[self.name]

    def _abort(self, txn: SinkTxnId, was_hasty: bool) -> SinkOutcome:
        self._database.release(txn)  # first: it may hold the last connection
        with self._database.taken(txn.scope) as connection:
            if was_hasty:
                self._note_slots(connection)
            return self._drop(connection, txn)

    def _note_slots(self, connection: Connection) -> None:
        """Stay with staging mode if the failed attempt still fills the slots that there are."""
        slots, used = slots_of(connection)
        if used >= slots and not self._lacks_slots:
            self._lacks_slots = True
            log.warning(
                f"sink {self.name}: staging mode from now on: a batch needs more than the server's "
                f"{slots} slots for prepared transactions; raise max_prepared_transactions"
            )

    def _drop(self, connection: Connection, txn: SinkTxnId) -> SinkOutcome:
        """Drop what an attempt has in either mode: a database may hold some of each."""
        outcome = self._staging.abort(connection, txn)
        if isinstance(outcome, SinkOK):
            self._prepared.drop(connection, txn)
        return outcome

    def abort_together(self, txns: Sequence[SinkTxnId]) -> set[SinkTxnId]:
        """Drop the data of those attempts that are not locked and not committed, in groups."""
        gone: set[SinkTxnId] = set()
        with self._database.session(txns[0].scope) as connection:
            for txn in txns:
                self._note_failure(txn)
                self._database.release(txn)
            try:
                for first in range(0, len(txns), _ABORTED_AT_ONCE):
                    gone |= self._drop_free(connection, txns[first : first + _ABORTED_AT_ONCE])
            except psycopg.Error as error:
                reason = {"sink": self.name, "reason": reason_of(error)}
                log.warning("attempts are aborted one by one", extra=reason)
        return gone

    def _drop_free(self, connection: Connection, txns: Sequence[SinkTxnId]) -> set[SinkTxnId]:
        begun = self._database.begin_together(connection, txns)
        free = {txn: known for txn, known in begun.items() if not known.is_proved}
        if not free:
            connection.execute("ROLLBACK")
            return set()
        self._staging.give_up(connection, free)
        prepared = self._prepared.gids(connection, txns[0].scope)
        roll_back(connection, [gid.name for gid in prepared if gid.txn in free])
        return {*free}

    def _outcomes(
        self, doing: str, sinks: Sequence[PostgresSink], call: Callable[[], Outcomes]
    ) -> Outcomes:
        outcome: SinkOutcome
        try:
            return call()
        except psycopg.Error as error:
            outcome = outcome_of(error, doing)
        except (Fenced, NeedsOperator, Permanent) as error:
            outcome = SinkFatal(reason_of(error))
        return {sink.name: outcome for sink in sinks}

    def _way(self, mode: str) -> Staging | Prepared:
        return self._prepared if mode == "prepared" else self._staging

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
        return gave_up or self._lacks_slots or cycle == self._slow_cycle

    def _promise(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> PreparedToken:
        full = [receipt for receipt in receipts if receipt.tally.rows]
        kinds = {(r.detail["mode"], str(r.detail["columns"])) for r in full}
        # Empty if the rows cannot be read back exactly.
        schemas = {r.detail["schema"] for r in full}
        if len(kinds) > 1 or len(schemas - {""}) > 1:
            raise NeedsOperator(f"{txn}: its tasks have staged rows of different schemas")
        detail: Mapping[str, Any] = (
            full[0].detail if full else {"mode": "staging", "columns": [], "numbered": []}
        )
        tally, wanted, pieces = tally_of(receipts), self._wanted, pieces_of(receipts)
        checked = self._checked_now(txn.scope)
        return PreparedToken(
            mode=detail["mode"],
            cycle=txn.cycle.label,
            attempt=txn.attempt,
            digest=digest_of(receipts),
            rows=tally.rows,
            row_hash=tally.hash,
            target=str(checked.target.name),
            tasks=len(pieces),
            pieces=hash_of(pieces),
            columns=tuple((name, cast) for name, cast in detail["columns"]),
            write=wanted.write.value,
            key=wanted.key,
            version_column=wanted.version_column,
            cycle_column=wanted.cycle_column,
            overriding=bool(detail["numbered"]),
            fixed=tuple(detail["numbered"]),
            schema=min(schemas, default="") if wanted.write is Write.APPEND else "",
            rejects=checked.rejects,
        )

    # What is there

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        nothing = SinkFinding(Found.GONE, "semel has never written to this database")
        try:
            return self._ask(txn.scope, lambda connection: self._find(connection, txn), nothing)
        except SemelError as error:
            return SinkFinding(Found.UNREACHABLE, reason_of(error))

    def _find(self, connection: Connection, txn: SinkTxnId) -> SinkFinding:
        known = self._books.ask(connection, txn)
        proof = known.proof
        if proof is not None and known.is_proved and proof.finished:
            return SinkFinding(Found.VISIBLE, f"{proof.rows} rows, by its proof", proof.since)
        if known.state == "prepared":
            here = self._way(known.mode).pieces(connection, txn)
            gone = [piece for piece in known.pieces if piece not in here]
            if gone:
                lost = f"{len(gone)} of {len(known.pieces)} pieces are gone: {gone[0]}"
                return SinkFinding(Found.GONE, f"prepared, but {lost}", known.since)
            begun = "; its commit has begun" if known.is_proved else ""
            text = f"prepared in {known.mode} mode, {len(known.pieces)} pieces{begun}"
            return SinkFinding(Found.HELD, text, known.since)
        if proof is not None:
            text = f"attempt {proof.attempt[:8]} committed the cycle"
            return SinkFinding(Found.GONE, text, proof.since)
        text = known.state or f"not prepared; {len(known.staged)} tasks have staged for it"
        return SinkFinding(Found.GONE, text, known.since)

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        return self._ask(scope, lambda connection: self._books.held(connection, scope), [])

    def mark(self, scope: Scope) -> SinkTxnId | None:
        return self._ask(scope, lambda connection: self._books.mark(connection, scope), None)

    def find_place(self) -> str:
        """Return the server, the database and the table, with its schema."""
        with self._database.asking() as connection:
            return f"{self._kind} {self._table(connection)} {_where(connection)}"

    def find_parents(self) -> list[str]:
        """Return the places of the tables that this one's foreign keys refer to."""
        with self._database.asking() as connection:
            found = find_target(connection, self._wanted.table)
            if isinstance(found, str):
                return []
            where = _where(connection)
            return [f"table {name} {where}" for name in found.parents - {found.name}]

    _kind = "table"

    def _table(self, connection: Connection) -> str:
        """Return the table's full name; it need not exist yet."""
        name = self._wanted.table
        with connection.transaction():
            connection.execute(OWN_PATH)
            found = connection.execute(
                """
                SELECT coalesce((SELECT n.nspname FROM pg_catalog.pg_class c
                                   JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
                                  WHERE c.oid = pg_catalog.to_regclass(%s)), %s,
                                pg_catalog.current_schema())
                """,
                [str(name), name.schema],
            ).fetchone()
        assert found is not None
        return str(TableName(found[0], name.table))

    def tenants(self) -> list[Tenant]:
        def ask(connection: Connection) -> list[Tenant]:
            return self._books.tenants(connection, self._table(connection))

        return self._ask(None, ask, [])

    def rename(self, old: Tenant, new: Tenant) -> None:
        with self._database.session() as connection:
            self._books.rename(connection, old, new)

    def _ask(
        self, scope: Scope | None, question: Callable[[Connection], Answer], otherwise: Answer
    ) -> Answer:
        """Ask the books; *otherwise* is the answer before the first owner, when there are none."""
        with self._database.asking(scope) as connection:
            has_books = self._database.has_books(connection)
            return question(connection) if has_books else otherwise

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        """Drop the data of losers and of late tasks of finished attempts.

        Tables that cannot be dropped now, because they are being read, stay for the next sweep.
        """
        swept = []
        with self._database.session(scope) as connection:
            left = self._books.left(connection, scope)
            left |= {gid.txn for gid in self._prepared.gids(connection, scope)}
            for txn in sorted(left, key=lambda txn: (txn.cycle, txn.attempt)):
                try:
                    if self._sweep_one(connection, txn, is_loser):
                        swept.append(txn)
                except psycopg.Error as error:
                    reason = {
                        "cycle": str(txn.cycle),
                        "sink": self.name,
                        "reason": reason_of(error),
                    }
                    log.warning("leavings stay until the next sweep", extra=reason)
                    connection.execute("ROLLBACK")
        return swept

    def _sweep_one(
        self, connection: Connection, txn: SinkTxnId, is_loser: Callable[[SinkTxnId], bool]
    ) -> bool:
        known = self._books.ask(connection, txn)
        if known.proof is None or not known.is_proved:
            return is_loser(txn) and isinstance(self._drop(connection, txn), SinkOK)
        if not known.proof.finished:
            return False  # its commit has begun and can only be completed
        pieces = [piece.name for piece in known.staged]
        drop(connection, self._books, txn, pieces, self._books.forget(txn))
        self._prepared.drop(connection, txn)
        return True

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        """Count and hash the rows that *cycle* appended; None without a cycle column.

        None, too, for upserts (later cycles replace rows) and for columns that are not read
        back as they were written: nested values, jsonb, uuids from text, padded characters,
        texts whose spaces were cut off at the column's length, dates outside of the years 1 to
        9999.
        """
        promise = self._read(token, SinkTxnId(cycle, str(token.get("attempt"))))
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
        promise = self._read(token, txn)
        if promise.mode != "staging":
            raise Misuse(f"{txn} was staged in {promise.mode} mode: there is nothing to divert")
        return self._staging.divert(txn, self._part(promise), reject_table)


def _of_one_mode(txn: SinkTxnId, parts: Sequence[Part]) -> list[Part]:
    """Let sinks without rows follow the mode of the others."""
    modes = {part.promise.mode for part in parts if part.pieces} or {"staging"}
    if len(modes) > 1:
        raise NeedsOperator(f"{txn}: its sinks have staged rows in different modes")
    (mode,) = modes
    return [replace(part, promise=replace(part.promise, mode=mode)) for part in parts]


def _where(connection: Connection) -> str:
    """Name the database and the server, as they name themselves."""
    found = connection.execute(
        "SELECT system_identifier, current_database() FROM pg_catalog.pg_control_system()"
    ).fetchone()
    assert found is not None
    return f"of database {found[1]} (server {found[0]})"


pa: Any = require("pyarrow", "postgres")

_ROWS_AT_ONCE: Final = 10_000


def read_tally(connection: Connection, promise: PreparedToken, cycle: CycleId) -> Tally | None:
    """Count and hash a cycle's visible rows; None if they cannot be found or compared."""
    # With rejected rows, what is visible is not what was staged.
    if not promise.cycle_column or promise.rejected or (promise.rows and not promise.schema):
        return None
    total = Tally()
    if not promise.rows:
        return total
    schema = schema_from_text(promise.schema)
    names = ", ".join(quoted(name) for name in schema.names)
    column = quoted(promise.cycle_column)
    query = f"SELECT {names} FROM {promise.target} WHERE {column} = {literal(cycle_text(cycle))}"
    try:
        with connection.transaction(), connection.cursor(name="semel_verify") as cursor:
            cursor.execute(query.encode())
            while rows := cursor.fetchmany(_ROWS_AT_ONCE):
                total += tally(_batch(rows, schema))
    except psycopg.DataError as error:
        if error.sqlstate is not None:
            raise
        # The rows exist, but Python has no date before year 1 or after 9999.
        return None
    return total


def _batch(rows: Sequence[tuple[Any, ...]], schema: Any) -> Any:
    columns = [
        pa.array(_plain(values, field.type), field.type)
        for values, field in zip(zip(*rows, strict=True), schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain(values: Sequence[Any], kind: Any) -> Sequence[Any]:
    """Convert decimals to integers for an integer column: numeric may hold integers."""
    if not pa.types.is_integer(kind):
        return values
    return [int(value) if isinstance(value, Decimal) else value for value in values]
