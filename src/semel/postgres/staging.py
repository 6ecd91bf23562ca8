"""Staging mode: a table for every task, and one final transaction held across the decision.

    task: CREATE TABLE, COPY, register, COMMIT     prepare: all but COMMIT     commit: COMMIT

Readers see a whole batch or none of it.  If the held transaction is lost
(a crash, a restart, a lost connection), the same one is run again from the
staging tables, which are ordinary, logged tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from semel.crashpoints import CrashPoint, reach
from semel.events import log
from semel.pipeline.sink import (
    Receipt,
    SinkFatal,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Tally,
)
from semel.pipeline.txn import Scope, SinkTxnId
from semel.postgres.answers import committed, not_prepared, refusal, settled
from semel.postgres.books import Known, SinkBooks, affected, run
from semel.postgres.connect import Address, Connection
from semel.postgres.database import SinkDatabase, give_back
from semel.postgres.explain import explained
from semel.postgres.faults import TWO_ROWS_FOR_ONE_KEY, is_permanent, outcome_of
from semel.postgres.names import literal, quoted
from semel.postgres.schema import TargetTable
from semel.postgres.statements import PreparedToken, Write, insert, inserts, newest, union
from semel.postgres.writer import RowEncoder, TaskWriter

# Every dropped table needs a few of the server's shared locks until the transaction ends.
_TABLES_DROPPED_AT_ONCE: Final = 100
_DROP_LOCK_SECONDS: Final = 3


@dataclass(frozen=True, slots=True)
class StagingStager:
    """The executor's side: every task attempt fills its own table."""

    address: Address
    application: str
    schema: str
    sink: str
    target: TargetTable
    txn: SinkTxnId
    filled: tuple[str, ...]

    def open(self, task: str) -> TaskWriter:
        """Start to stage for one task attempt; the table is created with the first row."""
        return TaskWriter(self.address, self.application, _TaskTable(self, task))


class _TaskTable:
    """One task attempt's table, created, filled and registered in a single transaction."""

    mode = "staging"

    def __init__(self, stager: StagingStager, task: str) -> None:
        self._stager = stager
        self._books = SinkBooks(stager.schema, stager.sink)
        self.sink = stager.sink
        self.task = task
        named = hashlib.sha256(f"{stager.sink}\0{task}".encode()).hexdigest()[:16]
        self.name = f"stg_{stager.txn.slug}_{named}"
        self._table = self._books.table(self.name)

    def fit(self, schema: Any) -> RowEncoder:
        return RowEncoder(self._stager.target, schema, self._stager.filled)

    def begin(self, connection: Connection, rows: RowEncoder) -> str:
        columns = ", ".join(f"{quoted(f.column.name)} {f.staged_type}" for f in rows.fitted)
        run(
            connection,
            [
                "BEGIN",
                # `prepare` commits after all tasks have, and durably: its commit record
                # is behind theirs in the write-ahead log, so theirs are durable, too.
                "SET LOCAL synchronous_commit = off",
                f"CREATE TABLE {self._table} ({columns}) WITH (autovacuum_enabled = off)",
            ],
        )
        # With frozen rows the final transaction's scan need not write hint bits.
        return f"COPY {self._table} FROM STDIN (FORMAT binary, FREEZE)"

    def finish(self, connection: Connection, tally: Tally) -> None:
        run(
            connection,
            [
                f"INSERT INTO {self._books.table('sink_staged')} (scope, sink, generation, "
                f"batch, attempt, task, piece, rows, row_hash) VALUES "
                f"({self._books.values(self._stager.txn)}, {literal(self.task)}, "
                f"{literal(self.name)}, {tally.rows}, {tally.hash})",
                "COMMIT",
            ],
        )

    def undo(self, connection: Connection) -> None:
        drop(connection, self._books, self._stager.txn, [self.name])


class Staging:
    """The driver's side."""

    def __init__(self, database: SinkDatabase) -> None:
        self._database = database
        self._books = database.books
        self._sink = database.sink

    def prepare(
        self, txn: SinkTxnId, promise: PreparedToken, receipts: Sequence[Receipt]
    ) -> SinkOutcome:
        """Run the final transaction up to its COMMIT, record the attempt, and hold it."""
        connection = self._database.take(txn.scope)
        try:
            known = self._database.begin(connection, txn, as_owner=True, with_cycle=True)
            answer = refusal(txn, known, promise) or _missing(txn, known, receipts)
            if answer is None:
                answer = self._bring(connection, txn, promise)
            if answer is not None:
                give_back(connection)
                return answer
            reach(CrashPoint.POSTGRES_PREPARE_RAN, self._sink)
            with self._database.session(txn.scope) as another:
                # This commit is synced to disk, and with it all staging before it in the log.
                remembered = self._books.remember(
                    txn, "prepared", "staging", promise.digest, promise.pieces
                )
                run(another, [remembered])
        except BaseException as error:
            give_back(connection)
            if isinstance(error, psycopg.Error):
                return outcome_of(error, "prepare")
            raise
        self._database.hold(txn, connection)
        return SinkOK(promise.token())

    def commit(self, txn: SinkTxnId, promise: PreparedToken) -> SinkOutcome:
        """Commit the held transaction; if it is lost, look for the proof or run it again."""
        connection = self._database.held(txn)
        if connection is None:
            return self._run_again(txn, promise)
        try:
            answer = connection.execute("COMMIT").statusmessage
            reach(CrashPoint.POSTGRES_COMMIT_SENT, self._sink)
        except BaseException as error:
            give_back(connection)
            if not isinstance(error, psycopg.Error):
                raise
            log.warning(
                "held transaction lost",
                extra={"cycle": str(txn.cycle), "sink": self._sink, "reason": str(error)},
            )
            return self._run_again(txn, promise)
        if answer != "COMMIT":
            give_back(connection)
            return self._run_again(txn, promise)
        self.tidy(connection, txn)
        give_back(connection)
        return SinkOK()

    def _run_again(self, txn: SinkTxnId, promise: PreparedToken) -> SinkOutcome:
        connection = self._database.take(txn.scope)
        try:
            known = self._database.begin(connection, txn, with_cycle=True)
            if (answer := settled(txn, known)) is not None:
                connection.execute("ROLLBACK")
                if isinstance(answer, SinkOK) and known.state:
                    self.tidy(connection, txn)
                return answer
            if (answer := not_prepared(txn, known, promise)) is not None:
                return answer
            answer = self._bring(connection, txn, promise)
            if answer is not None:
                return _stuck(txn, answer)
            connection.execute("COMMIT")
            reach(CrashPoint.POSTGRES_COMMIT_SENT, self._sink)
            self.tidy(connection, txn)
        except psycopg.Error as error:
            return outcome_of(error, "commit")
        finally:
            give_back(connection)
        return SinkOK()

    def _bring(
        self, connection: Connection, txn: SinkTxnId, promise: PreparedToken
    ) -> SinkOutcome | None:
        """Write the proof and the rows; None if all constraints accept them."""
        statements = inserts(promise, self._books.schema, txn.cycle)
        guarded = promise.write == Write.UPSERT and promise.version_column
        try:
            run(connection, [self._books.proof(txn, promise, finished=True)])
            if guarded:
                self._bring_newest(connection, txn, promise, statements)
            elif statements:
                counts = affected(connection, statements)
                if promise.write == Write.APPEND and sum(counts) != promise.rows:
                    return SinkFatal(
                        f"{txn}: table {promise.target} took {sum(counts)} of {promise.rows} "
                        f"rows; a trigger or rule that drops or redirects rows cannot be accounted "
                        f"for: give the sink the table that they go to"
                    )
            run(connection, ["SET CONSTRAINTS ALL IMMEDIATE"])
        except psycopg.Error as error:
            if not is_permanent(error):
                return outcome_of(error, f"table {promise.target}")
            connection.execute("ROLLBACK")
            return SinkFatal(explained(connection, error, promise, self._books.schema))
        return None

    def _bring_newest(
        self, connection: Connection, txn: SinkTxnId, promise: PreparedToken, statements: list[str]
    ) -> None:
        """Upsert by version; sort the rows only if a key occurs twice, because it is slow."""
        run(connection, ["SAVEPOINT rows"])
        try:
            run(connection, statements)
        except psycopg.Error as error:
            if error.sqlstate != TWO_ROWS_FOR_ONE_KEY:
                raise
            tables = [self._books.table(piece) for piece in promise.pieces]
            rows = newest(promise, union(promise, tables))
            run(connection, ["ROLLBACK TO SAVEPOINT rows", insert(promise, rows, txn.cycle)])

    def abort(self, connection: Connection, txn: SinkTxnId) -> SinkOutcome:
        """Drop this attempt's tables, and record that it was aborted."""
        self._database.release(txn)
        known = self._database.begin(connection, txn)
        if known.proof is not None and known.proof.attempt == txn.attempt:
            connection.execute("ROLLBACK")
            return committed(txn)
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

    def tidy(self, connection: Connection, txn: SinkTxnId) -> None:
        """Drop a finished attempt's tables and old records; a later sweep repeats failures."""
        try:
            staged = self._books.table("sink_staged")
            pieces = run(connection, [f"SELECT piece FROM {staged} WHERE {self._books.where(txn)}"])
            drop(
                connection,
                self._books,
                txn,
                [piece for (piece,) in pieces[0]],
                self._books.forget(txn),
            )
        except psycopg.Error as error:
            with suppress(psycopg.Error):
                connection.execute("ROLLBACK")
            log.warning(
                "staging tables left for the next sweep",
                extra={"cycle": str(txn.cycle), "sink": self._sink, "reason": str(error)},
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


def _missing(txn: SinkTxnId, known: Known, receipts: Sequence[Receipt]) -> SinkOutcome | None:
    """Compare the receipts of the winners with the books."""
    staged = {piece.name: piece for piece in known.staged}
    for receipt in receipts:
        if not receipt.tally.rows:
            continue
        piece = staged.get(receipt.detail["piece"])
        if piece is None:
            # Before the decision the batch can be staged again without loss.
            return SinkRetryable(f"{txn}: the staging table of task {receipt.task} is missing")
        if (piece.rows, piece.row_hash) != (receipt.tally.rows, receipt.tally.hash):
            return SinkFatal(
                f"{txn}: the staging table of task {receipt.task} differs from its receipt"
            )
    return None


def _stuck(txn: SinkTxnId, answer: SinkOutcome) -> SinkOutcome:
    if not isinstance(answer, SinkFatal):
        return answer
    return SinkFatal(
        f"the decision for {txn} is COMMIT, and it is stuck: {answer.reason}; remove the cause "
        f"and retry, or divert the rows with `semel cycle resolve`"
    )
