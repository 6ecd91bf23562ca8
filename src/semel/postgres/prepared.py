"""Prepared mode: every task writes to the target itself, in a prepared transaction.

    task: COPY, proof of the task, PREPARE TRANSACTION     prepare: verify, roll losers back
    commit: the cycle's proof, then COMMIT PREPARED one by one

The fastest mode, for appends only.  Readers may see part of a batch for a moment,
between the first COMMIT PREPARED and the last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from semel.crashpoints import CrashPoint, reach
from semel.errors import Permanent
from semel.events import log
from semel.pipeline.sink import SinkFatal, SinkOK, SinkOutcome, SinkRetryable, Tally
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.postgres.books import SinkBooks, run
from semel.postgres.connect import OWN_PATH, UNDEFINED_OBJECT, Connection
from semel.postgres.database import SinkDatabase
from semel.postgres.encode import field_of
from semel.postgres.staging import Outcomes, Part, not_ok, together
from semel.postgres.statements import cycle_text, literal, quoted
from semel.postgres.writer import RowEncoder, TaskStager

_LONGEST_GID: Final = 199


@dataclass(frozen=True, slots=True)
class Gid:
    """The name of one task's prepared transaction, which contains all its ids."""

    txn: SinkTxnId
    epoch: int
    name: str

    @classmethod
    def of(cls, sink: str, txn: SinkTxnId, epoch: int, task: str) -> Gid:
        """Return the name of one task attempt's prepared transaction."""
        hashed = hashlib.sha256(task.encode()).hexdigest()[:16]
        name = f"semel:{txn.scope.slug}:{sink}:e{epoch}{cls.place(txn)}{hashed}"
        if len(name) > _LONGEST_GID:
            raise Permanent(f"{name} is too long for the name of a prepared transaction")
        return cls(txn, epoch, name)

    @staticmethod
    def place(txn: SinkTxnId) -> str:
        """Return the part of the name that all tasks of an attempt share, in every epoch."""
        return f":g{txn.cycle.generation}:b{txn.cycle.batch}:{txn.attempt}:"

    @classmethod
    def parse(cls, scope: Scope, sinks: Collection[str], name: str) -> Gid | None:
        """Read a name; None if it is not this scope's and of none of *sinks*."""
        prefix = f"semel:{scope.slug}:"
        sink, *parts = name.removeprefix(prefix).split(":")
        if not name.startswith(prefix) or sink not in sinks or len(parts) != 5:
            return None
        try:
            epoch, generation, batch = (int(part[1:]) for part in parts[:3])
            return cls(SinkTxnId(CycleId(scope, generation, batch), parts[3]), epoch, name)
        except ValueError:
            return None


def shared_name(schema: str) -> str:
    """Return what stands for the sink's name in the names of transactions that sinks share."""
    return f"+{hashlib.sha256(schema.encode()).hexdigest()[:12]}"


class TaskTransaction:
    """One task attempt's rows, copied into the target, invisible, and prepared."""

    mode = "prepared"

    def __init__(self, stager: TaskStager, task: str, first: str) -> None:
        self._stager = stager
        self._books = SinkBooks(stager.schema, stager.sink)
        self.sink = stager.sink
        self.task = task
        named = f"{first}\0{task}" if stager.shared else task
        self.name = Gid.of(stager.shared or stager.sink, stager.txn, stager.epoch, named).name

    def fit(self, schema: Any) -> RowEncoder:
        stager = self._stager
        last = field_of(cycle_text(stager.txn.cycle).encode()) if stager.filled else b""
        rows = RowEncoder(stager.target, schema, stager.filled, last, stager.key)
        _check_direct(rows)
        return rows

    @property
    def opening(self) -> Sequence[str]:
        # If two tasks insert one key, the second waits for the first one's decision, which
        # waits for the second: the timeout ends this deadlock.
        timeout = f"SET LOCAL lock_timeout = '{int(self._stager.lock_seconds * 1000)}ms'"
        return "BEGIN", timeout, OWN_PATH

    def creating(self, rows: RowEncoder) -> Sequence[str]:
        return ()

    def copying(self, rows: RowEncoder) -> str:
        stager = self._stager
        names = map(quoted, [*(fitted.column.name for fitted in rows.fitted), *stager.filled])
        return f"COPY {stager.target.name} ({', '.join(names)}) FROM STDIN (FORMAT binary)"

    def record(self, tally: Tally) -> str:
        proved = {"piece": self.name, "rows": tally.rows, "row_hash": tally.hash}
        return self._books.insert("sink_task_proof", self._stager.txn, **proved)

    @property
    def closing(self) -> str:
        return f"PREPARE TRANSACTION {literal(self.name)}"

    def closed(self) -> None:
        reach(CrashPoint.POSTGRES_TASK_PREPARED, self.sink)

    def undo(self, connection: Connection) -> None:
        roll_back(connection, [self.name])


class Prepared:
    """The driver's side."""

    def __init__(self, database: SinkDatabase) -> None:
        self._database = database
        self._books = database.books
        self._sink = database.sink
        # Its own transactions, and those that it shares with other sinks of these books.
        self._sinks = {database.sink, shared_name(database.books.schema)}

    def clear_way(self, connection: Connection, txn: SinkTxnId) -> None:
        """Roll back transactions that tasks of older owners prepared for this cycle.

        They may hold the keys that the next attempt inserts.
        """
        promised = self._promised(connection, txn.cycle)
        epoch = self._database.epoch(txn.scope)
        roll_back(
            connection,
            [
                gid.name
                for gid in self.gids(connection, txn.scope)
                if gid.txn.cycle == txn.cycle and gid.epoch < epoch and gid.name not in promised
            ],
        )

    def _promised(self, connection: Connection, cycle: CycleId, but: str = "") -> set[str]:
        """List the transactions that sinks, except *but*, have promised to commit."""
        statement = (
            f"SELECT unnest(pieces) FROM {self._books.table('sink_attempt')} "
            f"WHERE scope = {literal(cycle.scope.slug)} AND generation = {cycle.generation} "
            f"AND batch = {cycle.batch} AND state = 'prepared' AND sink <> {literal(but)}"
        )
        return {piece for (piece,) in run(connection, [statement])[0]}

    def gids(self, connection: Connection, of: Scope | SinkTxnId) -> list[Gid]:
        """List the prepared transactions of a scope, or of one attempt."""
        scope, place = (of, "") if isinstance(of, Scope) else (of.scope, Gid.place(of))
        rows = connection.execute(
            "SELECT gid FROM pg_catalog.pg_prepared_xacts WHERE database = current_database() "
            "AND owner = current_user AND starts_with(gid, %s) AND strpos(gid, %s) > 0",
            [f"semel:{scope.slug}:", place],
        ).fetchall()
        found = [Gid.parse(scope, self._sinks, name) for (name,) in rows]
        return [gid for gid in found if gid is not None and of in (scope, gid.txn)]

    def prepare(self, txn: SinkTxnId, parts: Sequence[Part]) -> Outcomes:
        """Check that every winner is prepared, record the attempt, and roll the losers back."""
        books = self._books.of([part.sink for part in parts])
        with self._database.taken(txn.scope) as connection:
            known = self._database.begin(connection, txn, books, as_owner=True, with_cycle=True)
            present = {gid.name for gid in self.gids(connection, txn)}
            answers: dict[str, SinkOutcome] = {}
            for part in parts:
                answer = known[part.sink].refusal(part.promise) or _absent(txn, part, present)
                if answer is not None:
                    answers[part.sink] = answer
            if failed := not_ok(answers):
                return together(parts, failed)
            new = [part for part in parts if part.sink not in answers]
            if not new:
                return answers
            for part in new:
                reach(CrashPoint.POSTGRES_PREPARE_RAN, part.sink)
            epoch = self._database.epoch(txn.scope)
            run(connection, [*(part.remember(txn, "prepared", epoch) for part in new), "COMMIT"])
            promised = {piece for part in parts for piece in part.pieces}
            roll_back(connection, sorted(present - promised))
        return answers | {part.sink: SinkOK(part.promise.token()) for part in new}

    def commit(self, txn: SinkTxnId, parts: Sequence[Part]) -> Outcomes:
        """Write the cycle's proof, commit every task, and mark the cycle as finished."""
        books = self._books.of([part.sink for part in parts])
        with self._database.taken(txn.scope) as connection:
            known = self._database.begin(connection, txn, books, with_cycle=True)
            present = {gid.name for gid in self.gids(connection, txn)}
            answers: dict[str, SinkOutcome] = {}
            left: list[Part] = []
            for part in parts:
                of = known[part.sink]
                answer = of.settled(part.promise) or of.not_held(part.promise)
                if answer is None:
                    left.append(part.found_in(of))
                    lost = {*left[-1].pieces} - present - self.done(connection, txn, part.books)
                    if lost:
                        answer = self._settled_or_lost(connection, txn, part, lost)
                if answer is not None:
                    answers[part.sink] = answer
            if failed := not_ok(answers):
                return together(parts, failed)
            left = [part for part in left if part.sink not in answers]
            if not left:
                return answers
            proofs = [
                part.books.proof(txn, part.promise, finished=False)
                for part in left
                if known[part.sink].proof is None
            ]
            run(connection, [*proofs, "COMMIT"])
            reach(CrashPoint.POSTGRES_PROOF_WRITTEN, self._sink)
            owners = {piece: part for part in left for piece in part.pieces}
            for piece, part in owners.items():
                if piece in present and not self._commit_one(connection, txn, part, piece):
                    answer = self._settled_or_lost(connection, txn, part, {piece})
                    return together(parts, (part.sink, answer))
            finished = (
                f"UPDATE {books.table('sink_proof')} SET finished = true WHERE {books.where(txn)}"
            )
            run(connection, ["BEGIN", finished, *books.forget(txn), "COMMIT"])
        return {part.sink: SinkOK() for part in parts}

    def _commit_one(self, connection: Connection, txn: SinkTxnId, part: Part, piece: str) -> bool:
        """Commit one task, or find that another process has."""
        try:
            connection.execute(f"COMMIT PREPARED {literal(piece)}".encode())
        except psycopg.Error as error:
            if error.sqlstate != UNDEFINED_OBJECT:
                raise
            return piece in self.done(connection, txn, part.books)
        reach(CrashPoint.POSTGRES_COMMIT_PREPARED_ONE, self._sink)
        return True

    def _settled_or_lost(
        self, connection: Connection, txn: SinkTxnId, part: Part, pieces: set[str]
    ) -> SinkOutcome:
        """Look again: another process may have finished, and deleted the tasks' proofs."""
        return part.books.ask(connection, txn).settled(part.promise) or SinkFatal(
            f"{txn} is lost: {len(pieces)} prepared transactions are missing and were not "
            f"committed, among them {min(pieces)}"
        )

    def pieces(self, connection: Connection, txn: SinkTxnId) -> set[str]:
        """List the tasks' transactions that are prepared or committed."""
        present = {gid.name for gid in self.gids(connection, txn)}
        return present | self.done(connection, txn, self._books)

    def done(self, connection: Connection, txn: SinkTxnId, books: SinkBooks) -> set[str]:
        """List the committed tasks: a task's proof becomes visible with its transaction."""
        table = books.table("sink_task_proof")
        rows = run(connection, [f"SELECT piece FROM {table} WHERE {books.where(txn)}"])[0]
        return {piece for (piece,) in rows}

    def drop(self, connection: Connection, txn: SinkTxnId) -> None:
        """Roll back this attempt's prepared transactions, except those of other sinks' promises.

        The last sink that gives the attempt up rolls back what it shared.
        """
        names = {gid.name for gid in self.gids(connection, txn)}
        if names:
            names -= self._promised(connection, txn.cycle, but=self._sink)
        roll_back(connection, sorted(names))


def _absent(txn: SinkTxnId, part: Part, present: Collection[str]) -> SinkOutcome | None:
    for receipt in part.receipts:
        if receipt.tally.rows and receipt.detail["piece"] not in present:
            return SinkRetryable(
                f"{txn}: the prepared transaction of task {receipt.task} is missing"
            )
    return None


def roll_back(connection: Connection, names: Sequence[str]) -> None:
    """Roll back prepared transactions, except those that another process has settled."""
    for name in names:
        try:
            connection.execute(f"ROLLBACK PREPARED {literal(name)}".encode())
        except psycopg.Error as error:
            if error.sqlstate != UNDEFINED_OBJECT:
                raise
            log.debug("prepared transaction already gone", extra={"gid": name})


def _check_direct(rows: RowEncoder) -> None:
    """Refuse columns that only the final transaction of staging mode can cast."""
    for fitted in rows.fitted:
        if fitted.wire.is_cast:
            raise Permanent(
                f"table {rows.target.name}, column {quoted(fitted.column.name)} "
                f"({fitted.column.type.sql}): text can be cast to it in staging mode only: "
                f'use mode="staging"'
            )
