"""The books: the tables in which a sink keeps its own records, beside the target.

    sink_fence        the newest owner of a scope
    sink_attempt      prepared and aborted attempts
    sink_staged       staging tables, one per task; a row appears with its table
    sink_task_proof   the prepared tasks that were committed
    sink_proof        the proof of commit: one row per cycle, never two

Every row names its scope and sink: two sinks of one pipeline may share a database,
and two pipelines a schema.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from semel.errors import Permanent
from semel.pipeline.sink import SinkFatal, SinkOK, SinkOutcome, Tenant
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.postgres.connect import PLAIN, TRUSTED, Connection
from semel.postgres.statements import PreparedToken, literal, quoted

_KEY: Final = "scope text, sink text, generation bigint, batch bigint"

_TABLES: Final = {
    "sink_fence": """
        scope text, sink text, ledger text NOT NULL, app text NOT NULL, query text NOT NULL,
        epoch bigint NOT NULL, PRIMARY KEY (scope, sink)""",
    # Which sinks have written to which table; a sink that moved has several.
    "sink_place": "place text, scope text, sink text, PRIMARY KEY (place, scope, sink)",
    "sink_attempt": f"""
        {_KEY}, attempt text, mode text NOT NULL, state text NOT NULL
        CHECK (state IN ('prepared', 'aborted')), digest text NOT NULL, pieces text[] NOT NULL,
        since timestamptz NOT NULL DEFAULT clock_timestamp(),
        PRIMARY KEY (scope, sink, generation, batch, attempt)""",
    "sink_staged": f"""
        {_KEY}, attempt text, task text, piece text NOT NULL, rows bigint NOT NULL,
        row_hash numeric NOT NULL, since timestamptz NOT NULL DEFAULT clock_timestamp(),
        PRIMARY KEY (scope, sink, generation, batch, attempt, task)""",
    "sink_task_proof": f"""
        {_KEY}, attempt text, piece text, rows bigint NOT NULL, row_hash numeric NOT NULL,
        PRIMARY KEY (scope, sink, generation, batch, attempt, piece)""",
    "sink_proof": f"""
        {_KEY}, attempt text NOT NULL, digest text NOT NULL, rows bigint NOT NULL,
        row_hash numeric NOT NULL, diverted bigint NOT NULL DEFAULT 0,
        finished boolean NOT NULL, since timestamptz NOT NULL DEFAULT clock_timestamp(),
        PRIMARY KEY (scope, sink, generation, batch)""",
}

# A unique violation in the catalog, a duplicate schema, table or type.
_MADE_MEANWHILE: Final = ("23505", "42P06", "42P07", "42710")

# A replayed commit finds its proof; for older cycles the mark proves the commit.
KEEP_PROOFS: Final = 1000
PRUNE_EVERY: Final = 50


@dataclass(frozen=True, slots=True)
class CommitProof:
    """The proof that a cycle is committed, and by which attempt."""

    attempt: str
    digest: str
    finished: bool
    since: float
    rows: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The staged rows of one task: a table, or a prepared transaction."""

    name: str
    task: str
    rows: int
    row_hash: int


@dataclass(frozen=True, slots=True)
class Known:
    """The records of one attempt and its cycle, and what they answer, in either mode."""

    txn: SinkTxnId
    proof: CommitProof | None
    mark: CycleId | None
    state: str | None
    mode: str
    digest: str
    pieces: tuple[str, ...]
    since: float | None
    staged: tuple[Piece, ...]

    @property
    def is_proved(self) -> bool:
        """Whether the proof is this attempt's; with pieces left to commit it is not finished."""
        return self.proof is not None and self.proof.attempt == self.txn.attempt

    def refusal(self, promise: PreparedToken) -> SinkOutcome | None:
        """Answer a prepare; None if the rows may be accepted."""
        if self.proof is not None and not self.is_proved:
            return self._another_attempt(self.proof)
        held = self.digest if self.state == "prepared" else None
        digest = self.proof.digest if self.proof else held
        if digest not in (None, promise.seal):
            return SinkFatal(f"{self.txn} was prepared before, with other rows")
        if self.proof is not None:
            return SinkOK(promise.token())
        if self.state == "aborted":
            return SinkFatal(f"{self.txn} was aborted")
        if self.mark is not None and self.txn.cycle <= self.mark:
            return SinkFatal(
                f"{self.txn} is at or below the mark {self.mark}: another attempt was committed"
            )
        return None

    def settled(self, promise: PreparedToken) -> SinkOutcome | None:
        """Answer a commit from the cycle's proof, if there is a finished one."""
        if self.proof is None:
            return None
        if not self.is_proved:
            return self._another_attempt(self.proof)
        if self.proof.digest != promise.seal:
            return SinkFatal(f"{self.txn}: the token differs from what was committed")
        return SinkOK() if self.proof.finished else None

    def not_held(self, promise: PreparedToken) -> SinkFatal | None:
        """Refuse to commit an attempt that is not held."""
        if self.state == "aborted":
            return SinkFatal(f"{self.txn} was aborted")
        if self.state is None:
            return SinkFatal(f"{self.txn} is not held here: never prepared, or lost")
        if self.digest != promise.seal:
            return SinkFatal(f"{self.txn}: the token differs from what was prepared")
        return None

    def _another_attempt(self, proof: CommitProof) -> SinkFatal:
        return SinkFatal(
            f"{self.txn}: the cycle was committed by another attempt, {proof.attempt[:8]}"
        )


class SinkBooks:
    """The records of one sink, in one schema of its database.

    With *sinks*, conditions and questions are about all of these at once.
    """

    def __init__(self, schema: str, sink: str, sinks: Sequence[str] = ()) -> None:
        self.schema = schema
        self.sink = sink
        self.sinks = tuple(sinks) or (sink,)

    def of(self, sinks: Sequence[str]) -> SinkBooks:
        """Return the books of several sinks in the same schema."""
        return SinkBooks(self.schema, sinks[0], sinks)

    def table(self, name: str) -> str:
        """Return a table's full name, quoted."""
        return f"{quoted(self.schema)}.{quoted(name)}"

    def exist(self, connection: Connection) -> bool:
        """Return whether the tables exist.

        Raises:
            Permanent: the role may not read them; the message has the way out.
        """
        name, user, _, _, has_tables, may_read, _ = self._rights(connection)
        if not may_read:
            raise _refused(name, user)
        return bool(has_tables)

    def check_rights(self, connection: Connection) -> None:
        """Check that tables may be created: staging needs some for every batch.

        Raises:
            Permanent: the role may not, or another role keeps its records in the schema; the
                message has the statement.
        """
        name, user, may_create, _, _, _, may_write = self._rights(connection)
        if not may_write:
            raise _refused(name, user)
        if not may_create:
            raise Permanent(
                f"role {user} may not create tables in schema {name} for semel's own records: "
                f"CREATE SCHEMA IF NOT EXISTS {quoted(name)}; "
                f"GRANT USAGE, CREATE ON SCHEMA {quoted(name)} TO {quoted(user)};"
            )

    def create(self, connection: Connection) -> None:
        """Create the tables unless they exist.

        Raises:
            Permanent: the role may neither use nor create them; the message has the statement.
        """
        name, user, _, exists, has_tables, _, may_write = self._rights(connection)
        if has_tables:
            if not may_write:
                raise _refused(name, user)
            return
        self.check_rights(connection)
        schema = [] if exists else [f"CREATE SCHEMA IF NOT EXISTS {quoted(name)}"]
        for statement in schema + [
            f"CREATE TABLE IF NOT EXISTS {self.table(table)} ({columns})"
            for table, columns in _TABLES.items()
        ]:
            try:
                connection.execute(statement.encode())
            except psycopg.Error as error:
                # Two processes may start at once, and IF NOT EXISTS fails instead of waiting.
                if error.sqlstate not in _MADE_MEANWHILE:
                    raise

    def _rights(self, connection: Connection) -> tuple[Any, ...]:
        row = connection.execute(
            f"""
            SELECT %(schema)s::text, current_user::text,
                   CASE WHEN n.oid IS NULL
                        THEN has_database_privilege(current_database(), 'CREATE')
                        ELSE has_schema_privilege(n.oid, 'CREATE') END,
                   n.oid IS NOT NULL,
                   n.oid IS NOT NULL AND count(c.oid) = %(count)s,
                   coalesce(bool_and(may_use AND has_table_privilege(c.oid, 'SELECT')
                                     AND (is_safe OR is_plain)), true),
                   coalesce(bool_and(may_use AND has_table_privilege(c.oid, 'SELECT')
                                     AND has_table_privilege(c.oid, 'INSERT') AND is_safe), true)
              FROM (SELECT 1) one LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = %(schema)s
                   LEFT JOIN pg_catalog.pg_class c
                       ON c.relnamespace = n.oid AND c.relname = ANY (%(tables)s),
                   LATERAL (SELECT has_schema_privilege(n.oid, 'USAGE'),
                                   {TRUSTED}, {PLAIN}) of (may_use, is_safe, is_plain)
             GROUP BY n.oid
            """.encode(),
            {"schema": self.schema, "tables": list(_TABLES), "count": len(_TABLES)},
        ).fetchone()
        assert row is not None
        return row

    def where(self, of: Scope | CycleId | SinkTxnId) -> str:
        """Return the condition that selects the rows of a scope, a cycle or an attempt."""
        scope = of if isinstance(of, Scope) else of.scope
        sinks = ", ".join(map(literal, self.sinks))
        text = f"scope = {literal(scope.slug)} AND sink IN ({sinks})"
        if isinstance(of, SinkTxnId):
            return f"{self.where(of.cycle)} AND attempt = {literal(of.attempt)}"
        if isinstance(of, CycleId):
            return f"{text} AND generation = {of.generation} AND batch = {of.batch}"
        return text

    def insert(self, table: str, txn: SinkTxnId, **more: Any) -> str:
        """Return the statement that writes a row of this attempt."""
        row = {
            "scope": txn.scope.slug,
            "sink": self.sink,
            "generation": txn.cycle.generation,
            "batch": txn.cycle.batch,
            "attempt": txn.attempt,
            **more,
        }
        values = ", ".join(map(_constant, row.values()))
        return f"INSERT INTO {self.table(table)} ({', '.join(row)}) SELECT {values}"

    def questions(self, txn: SinkTxnId) -> list[str]:
        """Return the statements whose answers `known` reads."""
        cycle, attempt = self.where(txn.cycle), self.where(txn)
        return [
            f"SELECT sink, attempt, digest, finished, extract(epoch FROM since)::float8, rows "
            f"FROM {self.table('sink_proof')} WHERE {cycle}",
            self._newest(txn.scope),
            f"SELECT sink, state, mode, digest, pieces, extract(epoch FROM since)::float8 "
            f"FROM {self.table('sink_attempt')} WHERE {attempt}",
            f"SELECT sink, piece, task, rows, row_hash "
            f"FROM {self.table('sink_staged')} WHERE {attempt}",
        ]

    def known(self, txn: SinkTxnId, answers: Sequence[list[tuple[Any, ...]]]) -> dict[str, Known]:
        """Read the answers to `questions`, by sink."""
        return {sink: self._known(txn, sink, answers) for sink in self.sinks}

    def _known(self, txn: SinkTxnId, sink: str, answers: Sequence[list[tuple[Any, ...]]]) -> Known:
        proofs, marks, attempts, staged = (
            [r[1:] for r in rows if r[0] == sink] for rows in answers
        )
        state, mode, digest, pieces, since = attempts[0] if attempts else (None, "", "", (), None)
        return Known(
            txn,
            CommitProof(*proofs[0]) if proofs else None,
            self.txn(txn.scope, *marks[0]).cycle if marks else None,
            state,
            mode,
            digest,
            tuple(pieces),
            since,
            tuple(
                Piece(name, task, rows, int(tally))
                for name, task, rows, tally in staged
                if is_staging_table(txn, name)
            ),
        )

    def ask(self, connection: Connection, txn: SinkTxnId) -> Known:
        """Read the records of an attempt."""
        return self.known(txn, run(connection, self.questions(txn)))[self.sink]

    def mark(self, connection: Connection, scope: Scope) -> SinkTxnId | None:
        """Return the highest finished cycle: its proof is never pruned."""
        rows = run(connection, [self._newest(scope)])[0]
        return self.txn(scope, *rows[0][1:]) if rows else None

    def _newest(self, scope: Scope) -> str:
        # One look into the index for every sink, however many cycles are kept.
        return (
            f"SELECT s.sink, p.generation, p.batch, p.attempt "
            f"FROM unnest({_constant(self.sinks)}) AS s (sink), LATERAL ("
            f"SELECT generation, batch, attempt FROM {self.table('sink_proof')} p "
            f"WHERE p.scope = {literal(scope.slug)} AND p.sink = s.sink AND p.finished "
            f"ORDER BY generation DESC, batch DESC LIMIT 1) p"
        )

    def held(self, connection: Connection, scope: Scope) -> list[SinkTxnId]:
        """List the prepared attempts without a finished proof."""
        statement = (
            f"SELECT generation, batch, attempt FROM {self.table('sink_attempt')} a "
            f"WHERE {self.where(scope)} AND state = 'prepared' AND NOT EXISTS "
            f"(SELECT FROM {self.table('sink_proof')} p WHERE p.scope = a.scope "
            f"AND p.sink = a.sink AND p.generation = a.generation AND p.batch = a.batch "
            f"AND p.attempt = a.attempt AND p.finished) ORDER BY 1, 2, 3"
        )
        return [self.txn(scope, *row) for row in run(connection, [statement])[0]]

    def left(self, connection: Connection, scope: Scope) -> set[SinkTxnId]:
        """List the attempts that have staging tables, or are prepared."""
        where = self.where(scope)
        statement = (
            f"SELECT generation, batch, attempt FROM {self.table('sink_staged')} "
            f"WHERE {where} UNION SELECT generation, batch, attempt "
            f"FROM {self.table('sink_attempt')} WHERE {where} AND state = 'prepared'"
        )
        return {self.txn(scope, *row) for row in run(connection, [statement])[0]}

    def settle_in(self, connection: Connection, scope: Scope, place: str) -> None:
        """Record that this sink writes to *place*."""
        values = ", ".join(map(literal, (place, scope.slug, self.sink)))
        table = self.table("sink_place")
        run(connection, [f"INSERT INTO {table} VALUES ({values}) ON CONFLICT DO NOTHING"])

    def tenants(self, connection: Connection, place: str) -> list[Tenant]:
        """List the sinks of any scope that have committed to *place*."""
        statement = (
            f"SELECT DISTINCT ON (scope, sink) ledger, app, query, sink, generation, batch, "
            f"attempt FROM {self.table('sink_place')} JOIN {self.table('sink_fence')} "
            f"USING (scope, sink) JOIN {self.table('sink_proof')} USING (scope, sink) "
            f"WHERE place = {literal(place)} ORDER BY scope, sink, generation DESC, batch DESC"
        )
        found = []
        for ledger, app, query, sink, *cycle in run(connection, [statement])[0]:
            scope = Scope(ledger, app, query)
            found.append(Tenant(scope, sink, self.txn(scope, *cycle).label))
        return found

    def rename(self, connection: Connection, old: Tenant, new: Tenant) -> None:
        """Give every record of *old* to *new*."""
        of = f"scope = {literal(old.scope.slug)} AND sink = {literal(old.sink)}"
        to = f"scope = {literal(new.scope.slug)}, sink = {literal(new.sink)}"
        named = f"app = {literal(new.scope.app)}, query = {literal(new.scope.query)}"
        more = {"sink_fence": f", {named}"}
        # A start under the new name may have made these; a repetition must keep them.
        still = f"EXISTS (SELECT FROM {self.table('sink_fence')} WHERE {of})"
        new_ones = f"scope = {literal(new.scope.slug)} AND sink = {literal(new.sink)}"
        changes = [
            f"DELETE FROM {self.table('sink_place')} WHERE {new_ones} AND {still}",
            f"DELETE FROM {self.table('sink_fence')} WHERE {new_ones} AND {still}",
        ]
        changes += [
            f"UPDATE {self.table(name)} SET {to}{more.get(name, '')} WHERE {of}" for name in _TABLES
        ]
        run(connection, ["BEGIN", *changes, "COMMIT"])

    def remember(
        self,
        txn: SinkTxnId,
        state: str,
        mode: str,
        digest: str,
        pieces: Sequence[str],
        epoch: int | None = None,
    ) -> str:
        """Return the statement that records an attempt's state.

        With *epoch* it changes nothing if the attempt was aborted, or a newer owner is known:
        its own may have been stopped meanwhile.
        """
        row = {"state": state, "mode": mode, "digest": digest, "pieces": pieces}
        insert = self.insert("sink_attempt", txn, **row)
        changes = ", ".join(f"{name} = EXCLUDED.{name}" for name in (*row, "since"))
        again = f"ON CONFLICT (scope, sink, generation, batch, attempt) DO UPDATE SET {changes}"
        if epoch is None:
            return f"{insert} {again}"
        fence = f"SELECT epoch FROM {self.table('sink_fence')} WHERE {self.where(txn.scope)}"
        return (
            f"WITH fence AS ({fence} FOR SHARE) {insert} "
            f"WHERE NOT EXISTS (SELECT FROM fence WHERE epoch > {epoch}) "
            f"{again} WHERE sink_attempt.state <> 'aborted'"
        )

    def proof(self, txn: SinkTxnId, promise: PreparedToken, *, finished: bool) -> str:
        """Return the statement that records the proof of the cycle's commit."""
        return self.insert(
            "sink_proof",
            txn,
            digest=promise.seal,
            rows=promise.rows,
            row_hash=promise.row_hash,
            finished=finished,
        )

    def forget(self, txn: SinkTxnId) -> list[str]:
        """Return the statements that clean up after a finished attempt and prune old records."""
        cycle = txn.cycle
        before = f"(generation, batch) < ({cycle.generation}, {cycle.batch})"
        scope = self.where(txn.scope)
        statements = [
            f"DELETE FROM {self.table('sink_attempt')} WHERE {self.where(txn)}",
            f"DELETE FROM {self.table('sink_attempt')} "
            f"WHERE {scope} AND state = 'aborted' AND {before}",
            f"DELETE FROM {self.table('sink_task_proof')} WHERE {self.where(txn)}",
        ]
        if cycle.batch % PRUNE_EVERY == 0:
            proof = self.table("sink_proof")
            for one in (SinkBooks(self.schema, sink).where(txn.scope) for sink in self.sinks):
                statements.append(
                    f"DELETE FROM {proof} WHERE {one} AND finished AND (generation, batch) < "
                    f"(SELECT generation, batch FROM {proof} WHERE {one} AND finished "
                    f"ORDER BY generation DESC, batch DESC OFFSET {KEEP_PROOFS} LIMIT 1)"
                )
        return statements

    def txn(self, scope: Scope, generation: int, batch: int, attempt: str) -> SinkTxnId:
        """Return the attempt of a row."""
        return SinkTxnId(CycleId(scope, generation, batch), attempt)


def _constant(value: Any) -> str:
    if isinstance(value, str):
        return literal(value)
    if isinstance(value, int):
        return str(value)
    return f"ARRAY[{', '.join(map(literal, value))}]::text[]"


def _refused(schema: str, user: str) -> Permanent:
    own = f"{schema}_{user}"
    return Permanent(
        f"another role keeps semel's records in schema {schema}, and {user} may not use them: a "
        f"role that writes there could forge proofs. Give the sink records of its own, with "
        f"bookkeeping_schema={own!r} and CREATE SCHEMA {quoted(own)} AUTHORIZATION {quoted(user)}; "
        f"only if the pipeline itself had the other role before, make {user} a member of that one"
    )


def is_staging_table(txn: SinkTxnId, name: str) -> bool:
    """Return whether a recorded name can be that of a staging table of this attempt.

    Tables of other names are never read and never dropped, even if a record names them.
    """
    return re.fullmatch(rf"stg_{txn.slug}_[0-9a-f]{{16}}", name) is not None


def lock_key(*parts: str) -> int:
    """Return the number of an advisory lock."""
    digest = hashlib.sha256("\0".join(("semel", *parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def run(connection: Connection, statements: Iterable[str]) -> list[list[tuple[Any, ...]]]:
    """Run several statements in one round trip; return the rows of each, or an empty list."""
    cursor = connection.execute(";\n".join(statements).encode())
    answers = []
    while True:
        answers.append(cursor.fetchall() if cursor.description else [])
        if not cursor.nextset():
            return answers


def affected(connection: Connection, statements: Iterable[str]) -> list[int]:
    """Run several statements in one round trip; return the number of rows each has changed."""
    cursor = connection.execute(";\n".join(statements).encode())
    counts = []
    while True:
        counts.append(cursor.rowcount)
        if not cursor.nextset():
            return counts
