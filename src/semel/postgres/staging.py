"""Staging mode: a table for every task, and one final transaction held across the decision.

    task: CREATE TABLE, COPY, register, COMMIT     prepare: all but COMMIT     commit: COMMIT

Readers see a whole batch or none of it.  If the held transaction is lost
(a crash, a restart, a lost connection), the same one is run again from the
staging tables, which are ordinary, logged tables.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import psycopg

from semel.crashpoints import CrashPoint, reach
from semel.errors import NeedsOperator, reason_of
from semel.events import log
from semel.pipeline.sink import Receipt, SinkFatal, SinkOK, SinkOutcome, SinkRetryable, Tally
from semel.pipeline.txn import Scope, SinkTxnId
from semel.postgres.books import Known, SinkBooks, affected, is_staging_table, run
from semel.postgres.connect import (
    OWN_PATH,
    PINNED_PATH,
    TWO_ROWS_FOR_ONE_KEY,
    Connection,
    is_of_a_row,
    is_permanent,
    outcome_of,
    words,
)
from semel.postgres.database import SinkDatabase, give_back
from semel.postgres.refusals import explained
from semel.postgres.statements import (
    REASON,
    ROW,
    PreparedToken,
    TableName,
    Write,
    as_json,
    cycle_text,
    hash_of,
    insert,
    inserts,
    literal,
    newest,
    quoted,
    reject,
    repeated_keys,
    union,
)
from semel.postgres.writer import RowEncoder, TaskStager

# Every dropped table needs a few of the server's shared locks until the transaction ends.
_TABLES_DROPPED_AT_ONCE: Final = 100
_DROP_LOCK_SECONDS: Final = 3

_ALL: Final = "ALL"


class TaskTable:
    """One task attempt's table, created, filled and registered in a single transaction."""

    mode = "staging"

    def __init__(self, stager: TaskStager, task: str, first: str) -> None:
        self._stager = stager
        self._books = SinkBooks(stager.schema, stager.sink)
        self.sink = stager.sink
        self.task = task
        named = hashlib.sha256(f"{stager.sink}\0{task}".encode()).hexdigest()[:16]
        self.name = f"stg_{stager.txn.slug}_{named}"
        self._table = self._books.table(self.name)

    def fit(self, schema: Any) -> RowEncoder:
        stager = self._stager
        return RowEncoder(
            stager.target,
            schema,
            stager.filled,
            key=stager.key,
            keeps_refused=stager.keeps_refused,
        )

    @property
    def opening(self) -> Sequence[str]:
        # `prepare` commits after all tasks have, and durably: its commit record
        # is behind theirs in the write-ahead log, so theirs are durable, too.
        return "BEGIN", "SET LOCAL synchronous_commit = off"

    def creating(self, rows: RowEncoder) -> Sequence[str]:
        notes = [f"{REASON} text", f"{ROW} text"] if rows.keeps_refused else []
        staged = (
            f"{quoted(f.column.name)} {_wide(f.staged_type) if notes else f.staged_type}"
            for f in rows.fitted
        )
        columns = ", ".join([*staged, *notes])
        return (f"CREATE TABLE {self._table} ({columns}) WITH (autovacuum_enabled = off)",)

    def copying(self, rows: RowEncoder) -> str:
        # With frozen rows the final transaction's scan need not write hint bits.
        return f"COPY {self._table} FROM STDIN (FORMAT binary, FREEZE)"

    def record(self, tally: Tally) -> str:
        staged = {"piece": self.name, "rows": tally.rows, "row_hash": tally.hash}
        return self._books.insert("sink_staged", self._stager.txn, task=self.task, **staged)

    closing = "COMMIT"

    def closed(self) -> None:
        """Nothing follows the commit."""

    def undo(self, connection: Connection) -> None:
        drop(connection, self._books, self._stager.txn, [self.name])


@dataclass(frozen=True, slots=True)
class Part:
    """One sink's part of a transaction that several sinks of a database may share."""

    books: SinkBooks
    promise: PreparedToken
    receipts: Sequence[Receipt] = ()
    bring: Bring | None = None
    """Writes the rows, of a sink that has statements of its own."""

    pieces: Sequence[str] = ()
    """Staging tables, or prepared transactions; of a token: empty until `found_in` the books."""

    most_rejected: int | None = None
    """More rejected rows refuse the prepare; None if there is no limit, as after a decision."""

    @property
    def sink(self) -> str:
        """The sink's name."""
        return self.books.sink

    @property
    def tables(self) -> list[str]:
        """The staging tables."""
        return [self.books.table(piece) for piece in self.pieces]

    def remember(self, txn: SinkTxnId, mode: str, epoch: int) -> str:
        """Return the statement that records the attempt as prepared by the owner of *epoch*."""
        return self.books.remember(txn, "prepared", mode, self.promise.seal, self.pieces, epoch)

    def found_in(self, known: Known) -> Part:
        """Return the part with the pieces that the books name.

        Raises:
            NeedsOperator: they are not those of the token.
        """
        if hash_of(known.pieces) != self.promise.pieces:
            raise NeedsOperator(
                f"{known.txn}: the books of sink {self.sink} name {len(known.pieces)} pieces that "
                f"are not those of the token"
            )
        return replace(self, pieces=known.pieces)


def pieces_of(receipts: Sequence[Receipt]) -> tuple[str, ...]:
    """Return the pieces of tasks with rows, in the order in which Spark numbers the tasks.

    A batch that is sorted by key then arrives sorted, and its index is built a third faster.
    """
    full = [receipt for receipt in receipts if receipt.tally.rows]
    # t9-… comes before t10-….
    full.sort(key=lambda receipt: (len(receipt.task), receipt.task))
    return tuple(receipt.detail["piece"] for receipt in full)


Bring: TypeAlias = Callable[[Connection, SinkTxnId, Part], SinkOutcome | None]
"""Writes the proof and the rows of a part; None if all constraints accept them."""


@dataclass(frozen=True, slots=True)
class Overtaken(SinkRetryable):
    """What the rows were computed from has changed: compute them again.

    After the decision that is impossible, and the cycle is stuck.
    """


Outcomes: TypeAlias = Mapping[str, SinkOutcome]
"""By sink."""


def not_ok(answers: Outcomes) -> tuple[str, SinkOutcome] | None:
    """Return the first sink that refuses, with its answer."""
    return next((item for item in answers.items() if not isinstance(item[1], SinkOK)), None)


def together(parts: Sequence[Part], failed: tuple[str, SinkOutcome]) -> Outcomes:
    """Return the outcomes of a transaction that was rolled back because of one sink."""
    sink, outcome = failed
    also = SinkRetryable(f"rolled back with sink {sink}, which shares the transaction")
    return {part.sink: outcome if part.sink == sink else also for part in parts}


class Staging:
    """The driver's side."""

    def __init__(self, database: SinkDatabase) -> None:
        self._database = database
        self._books = database.books
        self._sink = database.sink

    def prepare(self, txn: SinkTxnId, parts: Sequence[Part]) -> Outcomes:
        """Run the final transaction up to its COMMIT, record the attempt, and hold it."""
        books = self._books.of([part.sink for part in parts])
        connection = self._database.take(txn.scope)
        try:
            known = self._database.begin(connection, txn, books, as_owner=True, with_cycle=True)
            answers: dict[str, SinkOutcome] = {}
            for part in parts:
                of = known[part.sink]
                answer = of.refusal(part.promise) or _missing(of, part.receipts)
                if answer is not None:
                    answers[part.sink] = answer
            new = [part for part in parts if part.sink not in answers]
            rejected: dict[str, int] = {}
            failed = not_ok(answers) or self._bring(connection, txn, new, rejected)
            if failed or not new:
                give_back(connection)
                return together(parts, failed) if failed else answers
            for part in new:
                reach(CrashPoint.POSTGRES_PREPARE_RAN, part.sink)
            if failed := self._remember(connection, txn, new):
                give_back(connection)
                return together(parts, failed)
        except BaseException:
            give_back(connection)
            raise
        self._database.hold(txn, connection, {part.sink: part.promise.seal for part in new})
        counted = {part.sink: rejected.get(part.sink, 0) for part in new}
        promises = [replace(part.promise, rejected=counted[part.sink]) for part in new]
        return answers | {
            part.sink: SinkOK(promise.token()) for part, promise in zip(new, promises, strict=True)
        }

    def _remember(
        self, connection: Connection, txn: SinkTxnId, parts: Sequence[Part]
    ) -> tuple[str, SinkOutcome] | None:
        """Record the attempt as prepared, unless it was aborted or its owner is fenced."""
        with self._database.another(txn.scope) as another:
            # This commit is synced to disk, and with it all staging before it in the log.
            epoch = self._database.epoch(txn.scope)
            counts = affected(another, [part.remember(txn, "staging", epoch) for part in parts])
        if 0 in counts:
            self._database.check_fence(txn.scope)
            return parts[0].sink, SinkFatal(f"{txn} was aborted by another process")
        # If the session ended before the record was visible, a process that waited for its rows
        # has found no record, and may have changed them.
        connection.execute("SELECT")
        return None

    def commit(self, txn: SinkTxnId, parts: Sequence[Part]) -> Outcomes:
        """Commit the held transaction; if it is lost, look for the proof or run it again."""
        seals = {part.sink: part.promise.seal for part in parts}
        connection = self._database.held(txn, seals)
        if connection is None:
            return self._run_again(txn, parts)
        try:
            answer = connection.execute("COMMIT").statusmessage
            reach(CrashPoint.POSTGRES_COMMIT_SENT, self._sink)
        except BaseException as error:
            give_back(connection)
            if not isinstance(error, psycopg.Error):
                raise
            log.warning(
                "held transaction lost",
                extra={"cycle": str(txn.cycle), "sink": self._sink, "reason": reason_of(error)},
            )
            return self._run_again(txn, parts)
        if answer != "COMMIT":
            give_back(connection)
            return self._run_again(txn, parts)
        self.tidy(connection, txn, parts)
        give_back(connection)
        return {part.sink: SinkOK() for part in parts}

    def _run_again(self, txn: SinkTxnId, parts: Sequence[Part]) -> Outcomes:
        books = self._books.of([part.sink for part in parts])
        with self._database.taken(txn.scope) as connection:
            known = self._database.begin(connection, txn, books, with_cycle=True)
            answers: dict[str, SinkOutcome] = {}
            for part in parts:
                of = known[part.sink]
                answer = of.settled(part.promise) or of.not_held(part.promise)
                if answer is not None:
                    answers[part.sink] = answer
            if failed := not_ok(answers):
                return together(parts, failed)
            left = [part for part in parts if part.sink not in answers]
            if not left:
                connection.execute("ROLLBACK")
                if any(of.state for of in known.values()):
                    self.tidy(connection, txn, parts)
                return answers
            left = [part.found_in(known[part.sink]) for part in left]
            if failed := self._bring(connection, txn, left, {}):
                return together(parts, (failed[0], _stuck(txn, failed[1])))
            connection.execute("COMMIT")
            reach(CrashPoint.POSTGRES_COMMIT_SENT, self._sink)
            self.tidy(connection, txn, parts)
        return {part.sink: SinkOK() for part in parts}

    def _bring(
        self,
        connection: Connection,
        txn: SinkTxnId,
        parts: Sequence[Part],
        rejected: dict[str, int],
    ) -> tuple[str, SinkOutcome] | None:
        """Write the proofs and the rows, in order; None if all constraints accept them.

        *rejected* gets how many rows went to reject tables, by sink.
        """
        run(connection, [OWN_PATH])
        # Sinks that find out whether they were overtaken come first: an effect that another
        # process had meanwhile may be in the way of the other sinks' rows.
        for part in sorted(parts, key=lambda part: part.bring is None):
            if part.promise.rejects:
                deferred = _deferred(connection, part) if len(parts) > 1 else _ALL
                found = self._bring_or_reject(connection, txn, part, deferred)
                if not isinstance(found, int):
                    return part.sink, found
                rejected[part.sink] = found
            elif (answer := (part.bring or self._bring_one)(connection, txn, part)) is not None:
                return part.sink, answer
        try:
            run(connection, ["SET CONSTRAINTS ALL IMMEDIATE"])
        except psycopg.Error as error:
            part = _part_of(error, parts)
            return part.sink, self._refused(connection, error, part)
        return None

    def _bring_one(self, connection: Connection, txn: SinkTxnId, part: Part) -> SinkOutcome | None:
        promise, tables = part.promise, part.tables
        proof = part.books.proof(txn, promise, finished=True)
        try:
            if promise.write == Write.UPSERT and promise.version_column:
                run(connection, [proof])
                self._bring_newest(connection, txn, promise, tables)
                return None
            _, *counts = affected(connection, [proof, *inserts(promise, tables, txn.cycle)])
        except psycopg.Error as error:
            return self._refused(connection, error, part)
        if promise.write == Write.APPEND and sum(counts) != promise.rows:
            return _dropped(txn, promise, sum(counts), promise.rows)
        return None

    def _bring_or_reject(
        self, connection: Connection, txn: SinkTxnId, part: Part, deferred: str
    ) -> int | SinkOutcome:
        """Write what the table accepts, divert the rest, and return how many rows were diverted.

        *deferred* names the constraints that are checked now, and not with the whole transaction.
        """
        promise, tables = part.promise, part.tables
        sharing = _Diversion(connection, txn, part, TableName.parse(promise.rejects), deferred)
        try:
            run(connection, [part.books.proof(txn, promise, finished=True)])
            rejected = sharing.divert_unencoded()
            run(connection, ["SAVEPOINT accepted"])
            try:
                if promise.write == Write.UPSERT and promise.version_column:
                    self._bring_newest(connection, txn, promise, tables)
                elif tables:
                    counts = affected(connection, inserts(promise, tables, txn.cycle))
                    if promise.write == Write.APPEND and sum(counts) != promise.rows - rejected:
                        return _dropped(txn, promise, sum(counts), promise.rows - rejected)
                run(connection, sharing.set_constraints("IMMEDIATE"))
            except psycopg.Error as error:
                if not is_of_a_row(error):
                    raise
                run(connection, ["ROLLBACK TO SAVEPOINT accepted"])
                repeated = repeated_keys(promise, union(promise, tables)) if promise.key else ""
                is_upsert = promise.write == Write.UPSERT and not promise.version_column
                if is_upsert and run(connection, [repeated])[0]:
                    raise  # as one statement would: in groups, the last row of a key would win
                rejected += sharing.share_out()[1]
            if (refused := sharing.too_many(rejected)) is not None:
                return refused
            sharing.count(rejected)
            if deferred != _ALL:
                run(connection, sharing.set_constraints("DEFERRED"))
        except psycopg.Error as error:
            return self._refused(connection, error, part)
        return rejected

    def _refused(self, connection: Connection, error: psycopg.Error, part: Part) -> SinkOutcome:
        if not is_permanent(error):
            return outcome_of(error, f"table {part.promise.target}")
        connection.execute("ROLLBACK")
        return SinkFatal(explained(connection, error, part.promise, part.tables))

    def _bring_newest(
        self,
        connection: Connection,
        txn: SinkTxnId,
        promise: PreparedToken,
        tables: Sequence[str],
    ) -> None:
        """Upsert by version; sort the rows only if a key occurs twice, because it is slow."""
        run(connection, ["SAVEPOINT rows"])
        try:
            run(connection, inserts(promise, tables, txn.cycle))
        except psycopg.Error as error:
            if error.sqlstate != TWO_ROWS_FOR_ONE_KEY:
                raise
            rows = newest(promise, union(promise, tables))
            run(connection, ["ROLLBACK TO SAVEPOINT rows", insert(promise, rows, txn.cycle)])

    def divert(self, txn: SinkTxnId, part: Part, reject_table: str) -> Diverted:
        """Commit what the table accepts of a stuck cycle; divert the rest to a reject table.

        A cycle is stuck if its decision is COMMIT and its rows are staged, but a constraint
        refuses some of them, because another program changed the table after a crash.
        Repeatable: a finished cycle is not changed.

        Raises:
            NeedsOperator: the transaction is not held here.
        """
        reject = TableName.parse(reject_table)
        with self._database.session(txn.scope) as connection:
            promise = part.promise
            known = self._database.begin(connection, txn, part.books, with_cycle=True)[part.sink]
            refused = known.settled(promise) or known.not_held(promise)
            if refused is not None:
                connection.execute("ROLLBACK")
                if known.is_proved:
                    return Diverted(0, 0, str(reject))
                raise NeedsOperator(getattr(refused, "reason", str(txn)))
            counts = _Diversion(connection, txn, part.found_in(known), reject).run()
            self.tidy(connection, txn, [part])
        return Diverted(*counts, str(reject))

    def pieces(self, connection: Connection, txn: SinkTxnId) -> set[str]:
        """List the staging tables of this attempt that exist."""
        rows = connection.execute(
            "SELECT c.relname FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND starts_with(c.relname, %s)",
            [self._books.schema, f"stg_{txn.slug}_"],
        ).fetchall()
        return {name for (name,) in rows}

    def abort(self, connection: Connection, txn: SinkTxnId) -> SinkOutcome:
        """Drop this attempt's tables, and record that it was aborted."""
        self._database.release(txn)
        known = self._database.begin(connection, txn, self._books)[self._sink]
        if known.is_proved:
            connection.execute("ROLLBACK")
            return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
        self.give_up(connection, {txn: known})
        return SinkOK()

    def give_up(self, connection: Connection, known: Mapping[SinkTxnId, Known]) -> None:
        """Record these attempts as aborted in the open transaction, commit, and drop the tables."""
        run(
            connection,
            [
                # If a crash of the server loses it, recovery aborts again.
                "SET LOCAL synchronous_commit = off",
                *(
                    self._books.remember(txn, "aborted", found.mode or "staging", found.digest, ())
                    for txn, found in known.items()
                ),
                "COMMIT",
            ],
        )
        pieces = [piece.name for found in known.values() for piece in found.staged]
        drop(connection, self._books, next(iter(known)).scope, pieces)

    def tidy(self, connection: Connection, txn: SinkTxnId, parts: Sequence[Part]) -> None:
        """Drop a finished attempt's tables and old records; a later sweep repeats failures."""
        books = self._books.of([part.sink for part in parts])
        try:
            staged = books.table("sink_staged")
            pieces = run(connection, [f"SELECT piece FROM {staged} WHERE {books.where(txn)}"])
            named = [piece for (piece,) in pieces[0] if is_staging_table(txn, piece)]
            drop(connection, books, txn, named, books.forget(txn))
        except psycopg.Error as error:
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")
            log.warning(
                "staging tables left for the next sweep",
                extra={"cycle": str(txn.cycle), "sink": self._sink, "reason": reason_of(error)},
            )


def drop(
    connection: Connection,
    books: SinkBooks,
    of: Scope | SinkTxnId,
    pieces: Sequence[str],
    more: Iterable[str] = (),
) -> None:
    """Drop staging tables with their entries in the books, then run *more*."""
    begin = [
        "BEGIN",
        "SET LOCAL synchronous_commit = off",
        f"SET LOCAL lock_timeout = '{_DROP_LOCK_SECONDS}s'",
    ]
    for first in range(0, len(pieces), _TABLES_DROPPED_AT_ONCE):
        some = pieces[first : first + _TABLES_DROPPED_AT_ONCE]
        tables = ", ".join(books.table(piece) for piece in some)
        listed = ", ".join(literal(piece) for piece in some)
        run(
            connection,
            [
                *begin,
                f"DROP TABLE IF EXISTS {tables}",
                f"DELETE FROM {books.table('sink_staged')} "
                f"WHERE {books.where(of)} AND piece IN ({listed})",
                "COMMIT",
            ],
        )
    if more:
        run(connection, [*begin, *more, "COMMIT"])


def _part_of(error: psycopg.Error, parts: Sequence[Part]) -> Part:
    """Find the sink of a deferred constraint by its table."""
    named = str(TableName(error.diag.schema_name, error.diag.table_name or ""))
    return next((part for part in parts if part.promise.target == named), parts[-1])


def _deferred(connection: Connection, part: Part) -> str:
    """Name the initially deferred constraints of a part's table.

    Without those whose name another table's constraint has that cannot be deferred: the
    statement would fail, so that they are checked with the whole transaction.
    """
    query = (
        f"SELECT n.nspname, c.conname FROM pg_catalog.pg_constraint c "
        f"JOIN pg_catalog.pg_namespace n ON n.oid = c.connamespace "
        f"WHERE c.conrelid = {literal(part.promise.target)}::regclass AND c.condeferred "
        f"AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint o WHERE o.conname = c.conname "
        f"AND o.connamespace = c.connamespace AND NOT o.condeferrable)"
    )
    named = run(connection, [PINNED_PATH, query, OWN_PATH])[1]
    return ", ".join(str(TableName(*name)) for name in named)


def _missing(known: Known, receipts: Sequence[Receipt]) -> SinkOutcome | None:
    """Compare the receipts of the winners with the books."""
    staged = {piece.name: piece for piece in known.staged}
    for receipt in receipts:
        if not receipt.tally.rows:
            continue
        piece = staged.get(receipt.detail["piece"])
        if piece is None:
            # Before the decision the batch can be staged again without loss.
            return SinkRetryable(
                f"{known.txn}: the staging table of task {receipt.task} is missing"
            )
        if (piece.rows, piece.row_hash) != (receipt.tally.rows, receipt.tally.hash):
            return SinkFatal(
                f"{known.txn}: the staging table of task {receipt.task} differs from its receipt"
            )
    return None


def _stuck(txn: SinkTxnId, answer: SinkOutcome) -> SinkOutcome:
    match answer:
        case Overtaken(reason):
            way = "set back what was changed, and retry with `semel cycle resolve`"
        case SinkFatal(reason):
            way = "remove the cause and retry, or divert the rows with `semel cycle resolve`"
        case _:
            return answer
    return SinkFatal(f"the decision for {txn} is COMMIT, and it is stuck: {reason}; {way}")


@dataclass(frozen=True, slots=True)
class Diverted:
    """How many rows of a stuck cycle were committed and diverted."""

    written: int
    diverted: int
    reject_table: str


def _dropped(txn: SinkTxnId, promise: PreparedToken, taken: int, rows: int) -> SinkFatal:
    return SinkFatal(
        f"{txn}: table {promise.target} took {taken} of {rows} rows; a trigger or rule that drops "
        f"or redirects rows cannot be accounted for: give the sink the table that they go to"
    )


def _wide(kind: str) -> str:
    """Return a type without its limits, so that the final transaction finds what is too large."""
    return re.sub(r"^numeric\([\d,]+\)", "numeric", kind)


@dataclass
class _Diversion:
    """The rows of a stuck cycle in one transaction: the accepted in the target, the others not."""

    connection: Connection
    txn: SinkTxnId
    part: Part
    reject: TableName
    deferred: str = _ALL
    """The constraints that are initially deferred, as SET CONSTRAINTS takes them."""

    why: str = ""
    """Of the last row that the server has refused."""

    @property
    def books(self) -> SinkBooks:
        return self.part.books

    @property
    def promise(self) -> PreparedToken:
        return self.part.promise

    def run(self) -> tuple[int, int]:
        """Commit all that the target accepts; return how many rows it has taken, and has not."""
        run(
            self.connection,
            [
                OWN_PATH,
                f"CREATE TABLE IF NOT EXISTS {self.reject} (sink_table text, cycle text, "
                f"reason text, sqlstate text, rejected jsonb, "
                f"at timestamptz DEFAULT pg_catalog.clock_timestamp())",
                self.books.proof(self.txn, self.promise, finished=True),
            ],
        )
        unencoded = self.divert_unencoded()
        written, diverted = self.share_out()
        self.count(unencoded + diverted)
        run(self.connection, ["COMMIT"])
        return written, unencoded + diverted

    def set_constraints(self, to: str) -> list[str]:
        """Return the statement, which counts until the transaction ends; none without any."""
        return [f"SET CONSTRAINTS {self.deferred} {to}"] if self.deferred else []

    def divert_unencoded(self) -> int:
        """Divert the rows that tasks could not encode; return their number."""
        if not self.promise.rejects or not self.part.pieces:
            return 0
        facts = (self.promise, self.books.sink, self.txn.cycle)
        statements = [reject(*facts, table) for table in self.part.tables]
        return sum(affected(self.connection, statements))

    def too_many(self, rejected: int) -> SinkFatal | None:
        """Refuse a batch of which so much is rejected that its rows are hardly the cause."""
        most = self.part.most_rejected
        if most is None or rejected <= most:
            return None
        noted = (f"SELECT {REASON} FROM {t} WHERE {REASON} IS NOT NULL" for t in self.part.tables)
        why = self.why or run(self.connection, [f"{' UNION ALL '.join(noted)} LIMIT 1"])[0][0][0]
        return SinkFatal(
            f"table {self.promise.target}: more than {most} of {self.promise.rows} rows would be "
            f"rejected, one of them because: {why}; a cause that most rows share is removed at its "
            f"source, or the sink is given a higher most_rejects="
        )

    def count(self, diverted: int) -> None:
        """Write the number of diverted rows into the proof."""
        where = self.books.where(self.txn.cycle)
        proof = self.books.table("sink_proof")
        change = f"UPDATE {proof} SET diverted = {diverted} WHERE {where}"
        run(self.connection, [PINNED_PATH, change, OWN_PATH])

    def share_out(self) -> tuple[int, int]:
        """Insert smaller and smaller groups of rows until the refused rows are single."""
        written = diverted = 0
        for table in self.part.tables:
            where = f" WHERE {REASON} IS NULL" if self.promise.rejects else ""
            listed = run(self.connection, [f"SELECT ctid::pg_catalog.text FROM {table}{where}"])[0]
            rows = [row for (row,) in listed]
            groups = [rows] if rows else []
            while groups:
                group = groups.pop()
                error = self._try(table, group)
                if error is None:
                    written += len(group)
                elif len(group) > 1:
                    middle = len(group) // 2
                    groups += [group[:middle], group[middle:]]
                else:
                    self._reject(table, group[0], error)
                    diverted, self.why = diverted + 1, words(error)
                    if self.part.most_rejected is not None and diverted > self.part.most_rejected:
                        return written, diverted
        return written, diverted

    def _try(self, table: str, group: Sequence[str]) -> psycopg.Error | None:
        listed = ", ".join(literal(row) for row in group)
        where = f" WHERE s.ctid OPERATOR(pg_catalog.=) ANY (ARRAY[{listed}]::pg_catalog.tid[])"
        try:
            affected(
                self.connection,
                [
                    "SAVEPOINT part",
                    insert(self.promise, table, self.txn.cycle, where),
                    *self.set_constraints("IMMEDIATE"),
                    "RELEASE SAVEPOINT part",
                ],
            )
        except psycopg.Error as error:
            if not is_of_a_row(error) and error.sqlstate != TWO_ROWS_FOR_ONE_KEY:
                raise
            run(self.connection, ["ROLLBACK TO SAVEPOINT part"])
            return error
        return None

    def _reject(self, table: str, row: str, error: psycopg.Error) -> None:
        if self.promise.rejects:
            place = f"ctid OPERATOR(pg_catalog.=) {literal(row)}::pg_catalog.tid"
            one = f"(SELECT * FROM {table} WHERE {place})"
            facts = (self.promise, self.books.sink, self.txn.cycle, one)
            run(self.connection, [reject(*facts, words(error), error.sqlstate or "")])
            return
        cycle = cycle_text(self.txn.cycle)
        values = [self.promise.target, cycle, words(error), error.sqlstate or ""]
        listed = ", ".join(literal(value) for value in values)
        run(
            self.connection,
            [
                f"INSERT INTO {self.reject} (sink_table, cycle, reason, sqlstate, rejected) "
                f"SELECT {listed}, {as_json()} FROM {table} AS s "
                f"WHERE s.ctid OPERATOR(pg_catalog.=) {literal(row)}::pg_catalog.tid"
            ],
        )
