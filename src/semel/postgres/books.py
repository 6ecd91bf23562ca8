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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.errors import Permanent
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.postgres.connect import Connection
from semel.postgres.names import literal, quoted
from semel.postgres.statements import PreparedToken

_KEY: Final = "scope text, sink text, generation bigint, batch bigint"

_TABLES: Final = {
    "sink_fence": """
        scope text, sink text, ledger text NOT NULL, app text NOT NULL, query text NOT NULL,
        epoch bigint NOT NULL, PRIMARY KEY (scope, sink)""",
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
    """The records of one attempt and its cycle."""

    proof: CommitProof | None
    mark: CycleId | None
    state: str | None
    mode: str
    digest: str
    pieces: tuple[str, ...]
    since: float | None
    staged: tuple[Piece, ...]


class SinkBooks:
    """The records of one sink, in one schema of its database."""

    def __init__(self, schema: str, sink: str) -> None:
        self.schema = schema
        self.sink = sink

    def table(self, name: str) -> str:
        """Return a table's full name, quoted."""
        return f"{quoted(self.schema)}.{quoted(name)}"

    def exist(self, connection: Connection) -> bool:
        """Return whether the tables exist."""
        *_, has_tables = self._rights(connection)
        return bool(has_tables)

    def check_rights(self, connection: Connection) -> None:
        """Check that tables may be created: staging needs some for every batch.

        Raises:
            Permanent: the role may not; the message has the statement.
        """
        name, user, may_create, *_ = self._rights(connection)
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
        name, _, _, exists, has_tables = self._rights(connection)
        if has_tables:
            return
        self.check_rights(connection)
        with connection.transaction():
            # Two processes may start at once, and IF NOT EXISTS fails instead of waiting.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [lock_key("books", name)])
            if not exists:
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(name)}".encode())
            for table, columns in _TABLES.items():
                statement = f"CREATE TABLE IF NOT EXISTS {self.table(table)} ({columns})"
                connection.execute(statement.encode())

    def _rights(self, connection: Connection) -> tuple[Any, ...]:
        row = connection.execute(
            """
            SELECT %(schema)s::text, current_user::text,
                   CASE WHEN n.oid IS NULL
                        THEN has_database_privilege(current_database(), 'CREATE')
                        ELSE has_schema_privilege(n.oid, 'CREATE') END,
                   n.oid IS NOT NULL,
                   n.oid IS NOT NULL AND (SELECT count(*) FROM pg_catalog.pg_class c
                       WHERE c.relnamespace = n.oid AND c.relname = ANY (%(tables)s)) = %(count)s
              FROM (SELECT 1) one LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = %(schema)s
            """,
            {"schema": self.schema, "tables": list(_TABLES), "count": len(_TABLES)},
        ).fetchone()
        assert row is not None
        return row

    def where(self, of: Scope | CycleId | SinkTxnId) -> str:
        """Return the condition that selects the rows of a scope, a cycle or an attempt."""
        scope = of if isinstance(of, Scope) else of.scope
        text = f"scope = {literal(scope.slug)} AND sink = {literal(self.sink)}"
        if isinstance(of, SinkTxnId):
            return f"{self.where(of.cycle)} AND attempt = {literal(of.attempt)}"
        if isinstance(of, CycleId):
            return f"{text} AND generation = {of.generation} AND batch = {of.batch}"
        return text

    def values(self, txn: SinkTxnId) -> str:
        """Return the first five values of a row of this attempt."""
        cycle = txn.cycle
        texts = [literal(txn.scope.slug), literal(self.sink)]
        return ", ".join([*texts, str(cycle.generation), str(cycle.batch), literal(txn.attempt)])

    def questions(self, txn: SinkTxnId) -> list[str]:
        """Return the statements whose answers `known` reads."""
        cycle, attempt = self.where(txn.cycle), self.where(txn)
        return [
            f"SELECT attempt, digest, finished, extract(epoch FROM since)::float8, rows "
            f"FROM {self.table('sink_proof')} WHERE {cycle}",
            f"SELECT generation, batch FROM {self.table('sink_proof')} "
            f"WHERE {self.where(txn.scope)} AND finished "
            f"ORDER BY generation DESC, batch DESC LIMIT 1",
            f"SELECT state, mode, digest, pieces, extract(epoch FROM since)::float8 "
            f"FROM {self.table('sink_attempt')} WHERE {attempt}",
            f"SELECT piece, task, rows, row_hash FROM {self.table('sink_staged')} WHERE {attempt}",
        ]

    def known(self, txn: SinkTxnId, answers: Sequence[list[tuple[Any, ...]]]) -> Known:
        """Read the answers to `questions`."""
        proofs, marks, attempts, staged = answers
        state, mode, digest, pieces, since = attempts[0] if attempts else (None, "", "", (), None)
        return Known(
            CommitProof(*proofs[0]) if proofs else None,
            CycleId(txn.scope, *marks[0]) if marks else None,
            state,
            mode,
            digest,
            tuple(pieces),
            since,
            tuple(Piece(name, task, rows, int(tally)) for name, task, rows, tally in staged),
        )

    def ask(self, connection: Connection, txn: SinkTxnId) -> Known:
        """Read the records of an attempt."""
        return self.known(txn, run(connection, self.questions(txn)))

    def remember(self, txn: SinkTxnId, state: str, mode: str, digest: str, pieces: Any) -> str:
        """Return the statement that records an attempt's state."""
        listed = ", ".join(literal(piece) for piece in pieces)
        return (
            f"INSERT INTO {self.table('sink_attempt')} (scope, sink, generation, batch, attempt, "
            f"state, mode, digest, pieces) VALUES ({self.values(txn)}, {literal(state)}, "
            f"{literal(mode)}, {literal(digest)}, ARRAY[{listed}]::text[]) "
            f"ON CONFLICT (scope, sink, generation, batch, attempt) DO UPDATE SET "
            f"state = EXCLUDED.state, mode = EXCLUDED.mode, digest = EXCLUDED.digest, "
            f"pieces = EXCLUDED.pieces, since = EXCLUDED.since"
        )

    def proof(self, txn: SinkTxnId, promise: PreparedToken, *, finished: bool) -> str:
        """Return the statement that records the proof of the cycle's commit."""
        return (
            f"INSERT INTO {self.table('sink_proof')} (scope, sink, generation, batch, attempt, "
            f"digest, rows, row_hash, finished) VALUES ({self.values(txn)}, "
            f"{literal(promise.digest)}, {promise.rows}, {promise.row_hash}, {finished})"
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
            statements.append(
                f"DELETE FROM {proof} WHERE {scope} AND finished AND (generation, batch) < "
                f"(SELECT generation, batch FROM {proof} WHERE {scope} AND finished "
                f"ORDER BY generation DESC, batch DESC OFFSET {KEEP_PROOFS} LIMIT 1)"
            )
        return statements

    def txn(self, scope: Scope, generation: int, batch: int, attempt: str) -> SinkTxnId:
        """Return the attempt of a row."""
        return SinkTxnId(CycleId(scope, generation, batch), attempt)


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
