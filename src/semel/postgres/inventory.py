"""The attempts in a sink's database: look up, list, abort and sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import psycopg

from semel.events import log
from semel.pipeline.sink import Found, SinkFinding, SinkOK, SinkOutcome
from semel.pipeline.txn import Scope, SinkTxnId
from semel.postgres.books import Known, run
from semel.postgres.connect import Connection
from semel.postgres.database import SinkDatabase
from semel.postgres.names import literal
from semel.postgres.prepared import Prepared, roll_back
from semel.postgres.staging import Staging, drop

# Each attempt needs a lock, and a few more per table; the server's default allows thousands.
_ABORTED_AT_ONCE: Final = 100


class Inventory:
    """The attempts of one sink, in both modes: a database may hold some of each."""

    def __init__(self, database: SinkDatabase, staging: Staging, prepared: Prepared) -> None:
        self._database = database
        self._books = database.books
        self._staging = staging
        self._prepared = prepared

    def find(self, connection: Connection, txn: SinkTxnId) -> SinkFinding:
        """Return the state of an attempt from books, tables and prepared transactions."""
        known = self._books.ask(connection, txn)
        proof = known.proof
        if proof is not None and proof.attempt == txn.attempt and proof.finished:
            return SinkFinding(Found.VISIBLE, f"{proof.rows} rows, by its proof", proof.since)
        if known.state == "prepared":
            return self._find_prepared(connection, txn, known)
        if proof is not None:
            text = f"attempt {proof.attempt[:8]} committed the cycle"
            return SinkFinding(Found.GONE, text, proof.since)
        text = known.state or f"not prepared; {len(known.staged)} tasks have staged for it"
        return SinkFinding(Found.GONE, text, known.since)

    def _find_prepared(self, connection: Connection, txn: SinkTxnId, known: Known) -> SinkFinding:
        here = self._pieces(connection, txn, known.mode)
        gone = [piece for piece in known.pieces if piece not in here]
        if gone:
            text = f"prepared, but {len(gone)} of {len(known.pieces)} pieces are gone: {gone[0]}"
            return SinkFinding(Found.GONE, text, known.since)
        text = f"prepared in {known.mode} mode, {len(known.pieces)} pieces"
        if known.proof is not None and known.proof.attempt == txn.attempt:
            text += "; its commit has begun"
        return SinkFinding(Found.HELD, text, known.since)

    def _pieces(self, connection: Connection, txn: SinkTxnId, mode: str) -> set[str]:
        if mode == "prepared":
            present = {gid.name for gid in self._prepared.gids(connection, txn)}
            return present | self._prepared.done(connection, txn)
        rows = connection.execute(
            "SELECT c.relname FROM pg_catalog.pg_class c "
            "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND starts_with(c.relname, %s)",
            [self._books.schema, f"stg_{txn.slug}_"],
        ).fetchall()
        return {name for (name,) in rows}

    def held(self, connection: Connection, scope: Scope) -> list[SinkTxnId]:
        """List the prepared attempts without a finished proof."""
        statement = (
            f"SELECT generation, batch, attempt FROM {self._books.table('sink_attempt')} a "
            f"WHERE {self._books.where(scope)} AND state = 'prepared' AND NOT EXISTS "
            f"(SELECT FROM {self._books.table('sink_proof')} p WHERE p.scope = a.scope "
            f"AND p.sink = a.sink AND p.generation = a.generation AND p.batch = a.batch "
            f"AND p.attempt = a.attempt AND p.finished) ORDER BY 1, 2, 3"
        )
        return [self._books.txn(scope, *row) for row in run(connection, [statement])[0]]

    def mark(self, connection: Connection, scope: Scope) -> SinkTxnId | None:
        """Return the highest finished cycle: its proof is never pruned."""
        statement = (
            f"SELECT generation, batch, attempt FROM {self._books.table('sink_proof')} "
            f"WHERE {self._books.where(scope)} AND finished "
            f"ORDER BY generation DESC, batch DESC LIMIT 1"
        )
        rows = run(connection, [statement])[0]
        return self._books.txn(scope, *rows[0]) if rows else None

    def scopes_of(self, connection: Connection, app: str, query: str) -> list[Scope]:
        named = f"f.app = {literal(app)} AND f.query = {literal(query)}"
        statement = (
            f"SELECT f.ledger FROM {self._books.table('sink_fence')} f "
            f"WHERE f.sink = {literal(self._books.sink)} AND {named} "
            f"AND EXISTS (SELECT FROM {self._books.table('sink_proof')} p "
            f"WHERE p.scope = f.scope AND p.sink = f.sink) ORDER BY f.ledger"
        )
        return [Scope(ledger, app, query) for (ledger,) in run(connection, [statement])[0]]

    def abort(self, connection: Connection, txn: SinkTxnId) -> SinkOutcome:
        """Drop this attempt's tables and prepared transactions."""
        outcome = self._staging.abort(connection, txn)
        if isinstance(outcome, SinkOK):
            self._prepared.drop(connection, txn)
        return outcome

    def abort_together(
        self, connection: Connection, txns: Sequence[SinkTxnId]
    ) -> Iterator[SinkTxnId]:
        """Drop the data of those attempts that are not locked and not committed, in groups."""
        for first in range(0, len(txns), _ABORTED_AT_ONCE):
            some = txns[first : first + _ABORTED_AT_ONCE]
            for txn in some:
                self._database.release(txn)
            begun = self._database.begin_together(connection, some)
            free = {txn: known for txn, known in begun.items() if not _is_committed(txn, known)}
            if not free:
                connection.execute("ROLLBACK")
                continue
            self._staging.give_up(connection, free)
            prepared = self._prepared.gids(connection, some[0].scope)
            roll_back(connection, [gid.name for gid in prepared if gid.txn in free])
            yield from free

    def sweep(
        self, connection: Connection, scope: Scope, is_loser: Callable[[SinkTxnId], bool]
    ) -> list[SinkTxnId]:
        """Drop the data of losers and of late tasks of finished attempts.

        Tables that cannot be dropped now, because they are being read, stay for the next sweep.
        """
        swept = []
        for txn in self._leavings(connection, scope):
            try:
                if self._sweep_one(connection, txn, is_loser):
                    swept.append(txn)
            except psycopg.Error as error:
                log.warning(
                    "leavings stay until the next sweep",
                    extra={
                        "cycle": str(txn.cycle),
                        "sink": self._database.sink,
                        "reason": str(error),
                    },
                )
                connection.execute("ROLLBACK")
        return swept

    def _leavings(self, connection: Connection, scope: Scope) -> list[SinkTxnId]:
        where = self._books.where(scope)
        statement = (
            f"SELECT generation, batch, attempt FROM {self._books.table('sink_staged')} "
            f"WHERE {where} UNION SELECT generation, batch, attempt "
            f"FROM {self._books.table('sink_attempt')} WHERE {where} AND state = 'prepared'"
        )
        found = {self._books.txn(scope, *row) for row in run(connection, [statement])[0]}
        found |= {gid.txn for gid in self._prepared.gids(connection, scope)}
        return sorted(found, key=lambda txn: (txn.cycle, txn.attempt))

    def _sweep_one(
        self, connection: Connection, txn: SinkTxnId, is_loser: Callable[[SinkTxnId], bool]
    ) -> bool:
        known = self._books.ask(connection, txn)
        if known.proof is None or known.proof.attempt != txn.attempt:
            return is_loser(txn) and isinstance(self.abort(connection, txn), SinkOK)
        if not known.proof.finished:
            return False  # its commit has begun and can only be completed
        pieces = [piece.name for piece in known.staged]
        drop(connection, self._books, txn, pieces, self._books.forget(txn))
        self._prepared.drop(connection, txn)
        return True


def _is_committed(txn: SinkTxnId, known: Known) -> bool:
    return known.proof is not None and known.proof.attempt == txn.attempt
