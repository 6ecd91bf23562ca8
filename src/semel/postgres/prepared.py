"""Prepared mode: every task writes to the target itself, in a prepared transaction.

    task: COPY, proof of the task, PREPARE TRANSACTION     prepare: verify, roll losers back
    commit: the cycle's proof, then COMMIT PREPARED one by one

The fastest mode, for appends only.  Readers may see part of a batch for a moment,
between the first COMMIT PREPARED and the last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from semel.crashpoints import CrashPoint, reach
from semel.errors import Permanent
from semel.events import log
from semel.pipeline.sink import Receipt, SinkFatal, SinkOK, SinkOutcome, SinkRetryable, Tally
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.postgres.books import SinkBooks, run
from semel.postgres.connect import UNDEFINED_OBJECT, Connection
from semel.postgres.database import SinkDatabase
from semel.postgres.encode import field_of
from semel.postgres.statements import PreparedToken, cycle_text, literal, quoted
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
    def parse(cls, scope: Scope, sink: str, name: str) -> Gid | None:
        """Read a name; None if it is not this scope's and sink's."""
        prefix = f"semel:{scope.slug}:{sink}:"
        parts = name.removeprefix(prefix).split(":")
        if not name.startswith(prefix) or len(parts) != 5:
            return None
        try:
            epoch, generation, batch = (int(part[1:]) for part in parts[:3])
            return cls(SinkTxnId(CycleId(scope, generation, batch), parts[3]), epoch, name)
        except ValueError:
            return None


class TaskTransaction:
    """One task attempt's rows, copied into the target, invisible, and prepared."""

    mode = "prepared"

    def __init__(self, stager: TaskStager, task: str) -> None:
        self._stager = stager
        self._books = SinkBooks(stager.schema, stager.sink)
        self.sink = stager.sink
        self.task = task
        self.name = Gid.of(stager.sink, stager.txn, stager.epoch, task).name

    def fit(self, schema: Any) -> RowEncoder:
        stager = self._stager
        last = field_of(cycle_text(stager.txn.cycle).encode()) if stager.filled else b""
        rows = RowEncoder(stager.target, schema, stager.filled, last, stager.key)
        _check_direct(rows)
        return rows

    def begin(self, connection: Connection, rows: RowEncoder) -> str:
        stager = self._stager
        names = map(quoted, [*(fitted.column.name for fitted in rows.fitted), *stager.filled])
        # If two tasks insert one key, the second waits for the first one's decision, which
        # waits for the second: the timeout ends this deadlock.
        timeout = f"SET LOCAL lock_timeout = '{int(stager.lock_seconds * 1000)}ms'"
        run(connection, ["BEGIN", timeout])
        return f"COPY {stager.target.name} ({', '.join(names)}) FROM STDIN (FORMAT binary)"

    def finish(self, connection: Connection, tally: Tally) -> None:
        proved = {"piece": self.name, "rows": tally.rows, "row_hash": tally.hash}
        proof = self._books.insert("sink_task_proof", self._stager.txn, **proved)
        run(connection, [proof, f"PREPARE TRANSACTION {literal(self.name)}"])
        reach(CrashPoint.POSTGRES_TASK_PREPARED, self.sink)

    def undo(self, connection: Connection) -> None:
        roll_back(connection, [self.name])


class Prepared:
    """The driver's side."""

    def __init__(self, database: SinkDatabase) -> None:
        self._database = database
        self._books = database.books
        self._sink = database.sink

    def clear_way(self, connection: Connection, txn: SinkTxnId) -> None:
        """Roll back transactions that tasks of older owners prepared for this cycle.

        They may hold the keys that the next attempt inserts.
        """
        attempts = run(
            connection,
            [
                f"SELECT attempt FROM {self._books.table('sink_attempt')} "
                f"WHERE {self._books.where(txn.cycle)} AND state = 'prepared'"
            ],
        )[0]
        taken_up = {attempt for (attempt,) in attempts}
        epoch = self._database.epoch(txn.scope)
        roll_back(
            connection,
            [
                gid.name
                for gid in self.gids(connection, txn.scope)
                if gid.txn.cycle == txn.cycle
                and gid.epoch < epoch
                and gid.txn.attempt not in taken_up
            ],
        )

    def gids(self, connection: Connection, of: Scope | SinkTxnId) -> list[Gid]:
        """List the prepared transactions of a scope, or of one attempt."""
        scope, place = (of, "") if isinstance(of, Scope) else (of.scope, Gid.place(of))
        rows = connection.execute(
            "SELECT gid FROM pg_catalog.pg_prepared_xacts "
            "WHERE database = current_database() AND starts_with(gid, %s) AND strpos(gid, %s) > 0",
            [f"semel:{scope.slug}:{self._sink}:", place],
        ).fetchall()
        found = [Gid.parse(scope, self._sink, name) for (name,) in rows]
        return [gid for gid in found if gid is not None and of in (scope, gid.txn)]

    def prepare(
        self, txn: SinkTxnId, promise: PreparedToken, receipts: Sequence[Receipt]
    ) -> SinkOutcome:
        """Check that every winner is prepared, record the attempt, and roll the losers back."""
        with self._database.taken(txn.scope) as connection:
            known = self._database.begin(connection, txn, as_owner=True, with_cycle=True)
            if (answer := known.refusal(promise)) is not None:
                return answer
            present = {gid.name for gid in self.gids(connection, txn)}
            for receipt in receipts:
                if receipt.tally.rows and receipt.detail["piece"] not in present:
                    return SinkRetryable(
                        f"{txn}: the prepared transaction of task {receipt.task} is missing"
                    )
            reach(CrashPoint.POSTGRES_PREPARE_RAN, self._sink)
            held = self._books.remember(txn, "prepared", "prepared", promise.digest, promise.pieces)
            run(connection, [held, "COMMIT"])
            roll_back(connection, sorted(present - set(promise.pieces)))
        return SinkOK(promise.token())

    def commit(self, txn: SinkTxnId, promise: PreparedToken) -> SinkOutcome:
        """Write the cycle's proof, commit every task, and mark the cycle as finished."""
        with self._database.taken(txn.scope) as connection:
            known = self._database.begin(connection, txn, with_cycle=True)
            if (answer := known.settled() or known.not_held(promise)) is not None:
                return answer
            present = {gid.name for gid in self.gids(connection, txn)}
            lost = set(promise.pieces) - present - self.done(connection, txn)
            if lost:
                return self._settled_or_lost(connection, txn, lost)
            if known.proof is None:
                run(connection, [self._books.proof(txn, promise, finished=False), "COMMIT"])
            else:
                connection.execute("ROLLBACK")
            reach(CrashPoint.POSTGRES_PROOF_WRITTEN, self._sink)
            for piece in promise.pieces:
                if piece in present and not self._commit_one(connection, txn, piece):
                    return self._settled_or_lost(connection, txn, {piece})
            proof = self._books.table("sink_proof")
            run(
                connection,
                [
                    "BEGIN",
                    f"UPDATE {proof} SET finished = true WHERE {self._books.where(txn)}",
                    *self._books.forget(txn),
                    "COMMIT",
                ],
            )
        return SinkOK()

    def _commit_one(self, connection: Connection, txn: SinkTxnId, piece: str) -> bool:
        """Commit one task, or find that another process has."""
        try:
            connection.execute(f"COMMIT PREPARED {literal(piece)}".encode())
        except psycopg.Error as error:
            if error.sqlstate != UNDEFINED_OBJECT:
                raise
            return piece in self.done(connection, txn)
        reach(CrashPoint.POSTGRES_COMMIT_PREPARED_ONE, self._sink)
        return True

    def _settled_or_lost(
        self, connection: Connection, txn: SinkTxnId, pieces: set[str]
    ) -> SinkOutcome:
        """Look again: another process may have finished, and deleted the tasks' proofs."""
        return self._books.ask(connection, txn).settled() or SinkFatal(
            f"{txn} is lost: {len(pieces)} prepared transactions are missing and were not "
            f"committed, among them {min(pieces)}"
        )

    def pieces(self, connection: Connection, txn: SinkTxnId) -> set[str]:
        """List the tasks' transactions that are prepared or committed."""
        present = {gid.name for gid in self.gids(connection, txn)}
        return present | self.done(connection, txn)

    def done(self, connection: Connection, txn: SinkTxnId) -> set[str]:
        """List the committed tasks: a task's proof becomes visible with its transaction."""
        table = self._books.table("sink_task_proof")
        rows = run(connection, [f"SELECT piece FROM {table} WHERE {self._books.where(txn)}"])[0]
        return {piece for (piece,) in rows}

    def drop(self, connection: Connection, txn: SinkTxnId) -> None:
        """Roll back every prepared transaction of this attempt."""
        roll_back(connection, [gid.name for gid in self.gids(connection, txn)])


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
