"""The sink for what a batch of messages changes: claims, waiting messages, dead letters, outbox.

fence     ──▶ the registry: this consumer belongs to this pipeline, and to no service
come_back ──▶ what waits and is due, with the queues of its keys
reader    ──▶ claims and versions, for tasks
prepare   ──▶ the registry's row, then the list of `message_statements`, each of them checked
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psycopg

from semel.arrow.changes import arrow_schema
from semel.errors import Misuse, NeedsOperator, Permanent, Retryable
from semel.lease import Owner
from semel.messaging.changes import NAMES, TYPES, ComeBack, Op, SeenClaim, SeenWaiting
from semel.messaging.handle.claims import WITHOUT_EFFECT, ClaimState
from semel.messaging.records import Waits, stored_id
from semel.messaging.tables import lean_prefix, split_schema
from semel.pipeline.sink import (
    Guarantee,
    Receipt,
    Schema,
    SinkOutcome,
    Tenant,
    Token,
)
from semel.pipeline.txn import Scope, SinkTxnId
from semel.postgres.books import affected, run
from semel.postgres.checks import Checked, Wanted, guarantee, weaknesses
from semel.postgres.connect import (
    Address,
    Connection,
    is_permanent,
    outcome_of,
    session,
    translated,
    words,
)
from semel.postgres.lean import LeanClaims, LeanDay, asked_of, lean_id
from semel.postgres.message_statements import STATEMENTS, TABLES, MessageTables, counting
from semel.postgres.schema import Column, PgType, TargetTable
from semel.postgres.sink import LOCK_SECONDS, PostgresSink
from semel.postgres.staging import Diverted, Overtaken, Part
from semel.postgres.statements import PreparedToken, TableName, literal
from semel.secrets import Password

ENGINE: Final = "spark"
"""The engine of a pipeline's consumers in the registry."""

_UNIQUE: Final = "23505"
_BARRIER_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.1

# Transactions that began later than this after the registry's row cannot have missed it.
_COMMIT_SECONDS: Final = 60


class MessagesSink(PostgresSink):
    """Carries out what a batch changes in the messaging tables of one consumer.

    Its rows are message changes, as `semel.arrow.changes` makes them.  What the pass over the
    batch has read is compared in the final transaction: if another process has changed it, the
    attempt is aborted and the batch is read again.  *schema* is that of the messaging tables, if
    it is neither ``semel`` nor in the role's search path; the URL may have it as ``?schema=``.
    """

    _kind = "consumer"

    def __init__(
        self,
        url: str,
        consumer: str,
        name: str = "messages",
        *,
        schema: str | None = None,
        password: Password = None,
        lock_seconds: float = LOCK_SECONDS,
        bookkeeping_schema: str = "semel",
        connections: int | None = None,
        connect: Mapping[str, Any] | None = None,
    ) -> None:
        if not consumer:
            raise Misuse(f"sink {name}: the consumer's name must not be empty")
        url, named = split_schema(url)
        super().__init__(
            url,
            "messages",
            name=name,
            password=password,
            lock_seconds=lock_seconds,
            bookkeeping_schema=bookkeeping_schema,
            connections=connections,
            connect=connect,
        )
        self.consumer = consumer
        self.claims = "all"
        """How messages that pass at their first attempt are remembered; the pipeline's choice."""

        self._messages_schema = schema or named
        self._tables: MessageTables | None = None
        # A token names its target, so a token of another consumer is refused.
        self._wanted = replace(self._wanted, table=TableName(None, f"messages of {consumer}"))

    def __repr__(self) -> str:
        return f"MessagesSink({self._login.label!r}, {self.consumer!r}, name={self.name!r})"

    # Before the first batch

    def _look(self, connection: Connection, wanted: Wanted, schema: Schema | None) -> Checked:
        self._tables = None
        tables = self._tables_in(connection)
        if schema is not None and not schema.equals(arrow_schema()):
            raise Permanent(f"sink {self.name}: its rows are those of semel.arrow.changes.to_batch")
        rights = ("SELECT", "INSERT", "UPDATE", "DELETE")
        lacking = [
            f"{right} ON {tables.table(name)}"
            for name in TABLES
            for right in rights
            if connection.execute(
                "SELECT NOT pg_catalog.has_table_privilege(%s, %s)", [tables.table(name), right]
            ).fetchone()
            == (True,)
        ]
        makes = f"SELECT pg_catalog.has_schema_privilege({literal(tables.schema)}, 'CREATE')"
        if self.claims == "lean" and run(connection, [makes])[0] != [(True,)]:
            lacking.append(f"CREATE ON SCHEMA {tables.schema}")
        if lacking:
            raise Permanent(f"sink {self.name}: the role lacks rights: GRANT {'; '.join(lacking)}")
        return Checked(
            TargetTable(wanted.table, _CHANGES, (), False), "staging", weaknesses(connection)
        )

    def _tables_in(self, connection: Connection) -> MessageTables:
        if self._tables is None:
            self._tables = MessageTables.find(connection, self._messages_schema)
        return self._tables

    def _table(self, connection: Connection) -> str:
        return f"{self.consumer} in {self._tables_in(connection).table('processed_message')}"

    def fence(self, scope: Scope, epoch: int) -> None:
        """Refuse older owners, and enter the consumer into the registry.

        Raises:
            NeedsOperator: the consumer belongs to another pipeline, or a service runs it.
            Retryable: transactions that may have claimed for a service do not end.
        """
        super().fence(scope, epoch)
        with self._database.session(scope) as connection:
            Registry(self._tables_in(connection), self.consumer, self.name).enter(
                connection, scope, epoch, self._books.schema
            )

    def rename(self, old: Tenant, new: Tenant) -> None:
        super().rename(old, new)
        with self._database.session() as connection:
            engines = self._tables_in(connection).table("consumer_engine")
            connection.execute(
                f"UPDATE {engines} SET scope = %s, app = %s, query = %s "
                f"WHERE consumer = %s AND scope = %s".encode(),
                [new.scope.slug, new.scope.app, new.scope.query, self.consumer, old.scope.slug],
            )

    def guarantee(self) -> Guarantee:
        """Return the guarantee, as far as it was checked."""
        effect = f"each message of consumer {self.consumer} has one end, with its rows and claims"
        found = replace(guarantee(self._wanted, self._checked), effect=effect)
        return replace(found, weakened_by=(*found.weakened_by, *WEAKENED_BY[self.claims]))

    def outgrown(self) -> str:
        """Return the next way to keep claims, once there are too many for this one."""
        if self.claims not in _MOST_CLAIMS:
            return ""
        most, way = _MOST_CLAIMS[self.claims]
        names = lean_prefix(self.consumer) if self.claims == "lean" else "processed_message$"
        with self._database.asking() as connection:
            [[claims]] = connection.execute(
                b"SELECT coalesce(sum(greatest(c.reltuples, 0)), 0)::bigint "
                b"FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n "
                b"ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname ~ %s "
                b"AND c.relkind = 'r'",
                [self._tables_in(connection).schema, f"^{names}"],
            ).fetchall()
        if claims <= most:
            return ""
        return f"about {claims:,} claims, and up to {most:,} are asked quickly: {way}"

    # One transaction

    def _promise(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> PreparedToken:
        # Changes are not read back, so a token need not have their schema.
        return replace(super()._promise(txn, receipts), schema="")

    def _part(self, promise: PreparedToken, receipts: Sequence[Receipt] = ()) -> Part:
        return Part(self._books, promise, receipts, self._bring)

    def _bring(self, connection: Connection, txn: SinkTxnId, part: Part) -> SinkOutcome | None:
        """Carry out the changes; None if each statement has changed the rows that it must."""
        tables = self._tables_in(connection)
        proof = part.books.proof(txn, part.promise, finished=True)
        epoch = self._database.epoch(txn.scope)
        registered = Registry(tables, self.consumer, self.name).locked(txn.scope, epoch)
        counting_all = [counting(part.tables)] if part.tables else []
        doing = "the registry"
        try:
            _, owners, *counts = run(connection, [proof, registered, *counting_all])
            if len(owners) != 1:
                return Overtaken(
                    f"consumer {self.consumer} is not registered for this owner of {txn.scope}"
                )
            wanted = counts[0][0] if counts else [0] * len(STATEMENTS)
            for statement, rows in zip(STATEMENTS, wanted, strict=True):
                if not rows:
                    continue
                doing = f"statement {statement.name} ({statement.does})"
                lean = self._lean(tables).today(connection) if statement.name == Op.LEAN else ""
                sql = tables.statement(statement, self.consumer, txn, part.tables, lean)
                changed = affected(connection, [sql])[0]
                if statement.is_exact and changed != rows:
                    return Overtaken(
                        f"consumer {self.consumer}, {doing}: {rows - changed} of {rows} rows are "
                        f"no longer what this attempt has read"
                    )
        except psycopg.Error as error:
            where = f"consumer {self.consumer}, {doing}"
            if error.sqlstate == _UNIQUE and doing != "the registry":
                return Overtaken(f"{where}: {words(error)}")
            if is_permanent(error):
                connection.execute("ROLLBACK")
            return outcome_of(error, where)
        return None

    def resolve_divert(self, txn: SinkTxnId, token: Token, reject_table: str) -> Diverted:
        """Refuse: a claim without its effects would lose its message.

        Raises:
            Misuse: always.
        """
        raise Misuse(
            f"{txn}: changes of messages cannot be diverted; set back what was changed, and retry"
        )

    # What a pass asks

    def reader(self) -> PostgresReader:
        """Return what tasks ask for claims and versions; it can be pickled."""
        with self._database.asking() as connection:
            tables = self._tables_in(connection)
            # Also those of an earlier start that kept lean claims.
            days = self._lean(tables).days(connection) if self.claims != "failed" else ()
        address = replace(self._database.address, has_worked=True)
        return PostgresReader(address, tables, self.consumer, days)

    def _lean(self, tables: MessageTables) -> LeanClaims:
        return LeanClaims(tables.schema, self.consumer)

    def come_back(self, limit_rows: int = 10_000, limit_bytes: int = 32 * 2**20) -> ComeBack:
        """Read the queues whose heads are due, within limits; at least one message.

        A key of which some message does not come is held.
        """
        with self._database.asking() as connection:
            tables = self._tables_in(connection)
            queues, comes, held = _come_back(tables)
            with connection.transaction():
                connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
                limits = {"consumer": self.consumer, "rows": limit_rows, "bytes": limit_bytes}
                found = connection.execute(queues.encode(), limits).fetchall()
                these = {"consumer": self.consumer, "places": [place for (place,) in found]}
                rows = connection.execute(comes.encode(), these).fetchall() if found else []
                keys = connection.execute(held.encode(), these).fetchall()
        return ComeBack([_seen(row) for row in rows], dict(keys))

    def is_due(self) -> bool:
        """Return whether it is the turn of any waiting message."""
        with self._database.asking() as connection:
            question = f"SELECT EXISTS ({_due_heads(self._tables_in(connection))})"
            answer = connection.execute(question.encode(), {"consumer": self.consumer}).fetchone()
        return answer == (True,)


LEAN: Final = (
    "claims='lean': services and commands do not read these claims, so after a hand-over a service "
    "handles repetitions again; use claims='all' where one may take over"
)
ONLY_FAILED: Final = (
    "claims='failed': a repetition of a message that passed is handled again, unless the source's "
    "positions, versions or a state store keep it out; use claims='all' where they do not"
)

WEAKENED_BY: Final[Mapping[str, tuple[str, ...]]] = {
    "all": (),
    "lean": (LEAN,),
    "failed": (ONLY_FAILED,),
}

_MOST_CLAIMS: Final[Mapping[str, tuple[int, str]]] = {
    "all": (50_000_000, "keep those of this pipeline with claims='lean', or shorten claims.ttl"),
    "lean": (
        5_000_000_000,
        "use claims='failed' behind dropDuplicatesWithinWatermark, or shorten claims.ttl",
    ),
}
"""By the way claims are kept: how many one server asks while their index is in memory."""

_KINDS: Final = {"integer": "int4", "bigint": "int8", "text": "text"}


def _column(name: str) -> Column:
    kind = TYPES.get(name, "text")
    return Column(name, PgType(kind, kind, _KINDS[kind]), False, False, False, False)


_CHANGES: Final = tuple(map(_column, NAMES))
"""The columns of a staging table of changes.  There is no table of this shape beside those."""


@dataclass(frozen=True, slots=True)
class Registry:
    """Which engine handles the messages of a consumer: one row, removed only by a hand-over."""

    tables: MessageTables
    consumer: str
    sink: str

    def locked(self, scope: Scope, epoch: int) -> str:
        """Return the statement that locks the row against a hand-over, if it is this owner's.

        Without an epoch, as after the decision by a command, the scope decides.
        """
        mine = f" AND epoch = {epoch}" if epoch else ""
        return (
            f"SELECT epoch FROM {self.tables.table('consumer_engine')} "
            f"WHERE consumer = {literal(self.consumer)} AND engine = {literal(ENGINE)} "
            f"AND scope = {literal(scope.slug)}{mine} FOR KEY SHARE"
        )

    def enter(self, connection: Connection, scope: Scope, epoch: int, books: str) -> None:
        """Write the row, and then look for a service that runs the consumer.

        A service enters its member and then looks at the row: the second of the two sees the
        first.  A start that is refused leaves the row as it was.

        Raises:
            NeedsOperator: the row is another scope's, or a service runs the consumer.
            Retryable: transactions that may have claimed for a service do not end.
        """
        engines = self.tables.table("consumer_engine")
        with connection.transaction():
            before = connection.execute(
                f"SELECT engine, scope, app, query, ledger, epoch, books, since FROM {engines} "
                f"WHERE consumer = %s FOR UPDATE".encode(),
                [self.consumer],
            ).fetchone()
            if before is not None and before[:2] != (ENGINE, scope.slug):
                raise NeedsOperator(
                    f"sink {self.sink}: consumer {self.consumer} belongs to {before[0]} "
                    f"{before[2]}/{before[3]} (ledger {before[4][:8]}): stop that, and release it "
                    f"with `semel consumer hand-over {self.consumer}`"
                )
            named = scope.app, scope.query, scope.ledger
            connection.execute(
                f"INSERT INTO {engines} AS t "
                f"(consumer, engine, scope, app, query, ledger, epoch, books, since) "
                f"VALUES (%s, %s, %s, %s, %s, %s, %s, %s, {self.tables.now}) "
                f"ON CONFLICT (consumer) DO UPDATE SET epoch = EXCLUDED.epoch, "
                f"books = EXCLUDED.books WHERE t.scope = EXCLUDED.scope".encode(),
                [self.consumer, ENGINE, scope.slug, *named, epoch, books],
            )
        running = connection.execute(
            f"SELECT owner FROM {self.tables.table('consumer_member')} "
            f"WHERE consumer = %s AND expires_at > {self.tables.now} LIMIT 1".encode(),
            [self.consumer],
        ).fetchone()
        if running is not None:
            self._set_back(connection, scope, epoch, before)
            raise NeedsOperator(
                f"sink {self.sink}: a service runs consumer {self.consumer} ({running[0]}): stop "
                f"it, and start the pipeline again once it has left"
            )
        self._wait_for_claims(connection)

    def _set_back(
        self, connection: Connection, scope: Scope, epoch: int, before: Sequence[Any] | None
    ) -> None:
        engines = self.tables.table("consumer_engine")
        mine = "consumer = %s AND scope = %s AND epoch = %s"
        me = [self.consumer, scope.slug, epoch]
        if before is None:
            connection.execute(f"DELETE FROM {engines} WHERE {mine}".encode(), me)
        else:
            connection.execute(
                f"UPDATE {engines} SET epoch = %s, books = %s WHERE {mine}".encode(),
                [before[5], before[6], *me],
            )

    def _wait_for_claims(self, connection: Connection) -> None:
        """Wait for the transactions that began to claim before the row was visible.

        A service looks at the row in the statement that claims, so later ones find it.
        """
        engines = self.tables.table("consumer_engine")
        since = self.tables.seconds("e.since")
        claiming = f"""
            SELECT l.virtualtransaction, l.pid
              FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a USING (pid)
             WHERE l.relation = %s::regclass AND l.mode = 'RowExclusiveLock'
               AND l.database = (SELECT oid FROM pg_catalog.pg_database
                                  WHERE datname = current_database())
               AND coalesce(extract(epoch FROM a.xact_start) <= {_COMMIT_SECONDS} +
                   (SELECT {since} FROM {engines} e WHERE e.consumer = %s), true)"""
        asked = [self.tables.table("processed_message"), self.consumer]

        def claiming_now() -> dict[str, int | None]:
            return dict(connection.execute(claiming.encode(), asked).fetchall())

        deadline = time.monotonic() + _BARRIER_SECONDS
        left = claiming_now()
        while left:
            if time.monotonic() > deadline:
                raise Retryable(
                    f"sink {self.sink}: transactions that began before this pipeline took over "
                    f"consumer {self.consumer} have not ended: end sessions "
                    f"{sorted(filter(None, left.values()))}, or wait, and start again"
                )
            time.sleep(_PAUSE_SECONDS)
            now = claiming_now()
            left = {name: pid for name, pid in left.items() if name in now}


@dataclass(frozen=True, slots=True)
class PostgresReader:
    """The claims and versions of one consumer, for tasks: one connection per process."""

    address: Address
    tables: MessageTables
    consumer: str
    days: Sequence[LeanDay] = ()
    """Where lean claims are, too."""

    def claims(self, message_ids: Sequence[str]) -> Mapping[str, SeenClaim]:
        """Return the claims of those of these messages, by id as it was given, that have one."""
        tables, stored = self.tables, {stored_id(one): one for one in message_ids}
        rows = self._ask(
            f"SELECT t.message_id, t.state, t.attempts, t.payload_hash, "
            f"CASE t.state WHEN 'FAILED_RETRYABLE' THEN t.due_at <= n.now "
            f"WHEN 'IN_PROGRESS' THEN t.lease_until <= n.now ELSE false END, "
            f"t.state <> 'COMPLETED' AND EXISTS (SELECT FROM {tables.table('waiting_message')} w "
            f"WHERE w.consumer = t.consumer_name AND w.message_id = t.message_id), t.marker "
            f"FROM (SELECT {tables.now} AS now) AS n, unnest(%s::text[]) AS g (id) "
            f"JOIN {tables.table('processed_message')} AS t "
            f"ON t.consumer_name = %s AND t.message_id = g.id",
            [[*stored], self.consumer],
        )
        found = {
            stored[name]: SeenClaim(
                ClaimState(state), attempts, digest, is_due, waits, marker not in WITHOUT_EFFECT
            )
            for name, state, attempts, digest, is_due, waits, marker in rows
        }
        if not self.days:
            return found
        return {**found, **self._lean([one for one in message_ids if one not in found])}

    def _lean(self, message_ids: Sequence[str]) -> Mapping[str, SeenClaim]:
        """Return the lean claims of these messages; each has half of a payload's hash."""
        named = {lean_id(stored_id(one)): one for one in message_ids}
        asked = [*asked_of(self.days, [*named], self._filter_in)] if named else []
        if not asked:
            return {}
        rows = self._ask(
            " UNION ALL ".join(
                f"SELECT id, hash FROM {table} WHERE id = ANY (%b::bytea[])" for table, _ in asked
            ),
            [ids for _, ids in asked],
        )
        done = ClaimState.COMPLETED
        return {named[name]: SeenClaim(done, 1, half.hex(), False) for name, half in rows}

    def _filter_in(self, table: str) -> bytes:
        [[bits]] = self._ask(f"SELECT bits FROM {table}", [])
        return bytes(bits)

    def versions(self, keys: Iterable[str]) -> Mapping[str, int | None]:
        """Return the applied versions of those of these keys that have one, by key as given."""
        stored = {stored_id(one): one for one in keys}
        rows = self._ask(
            f"SELECT t.key, t.version FROM unnest(%s::text[]) AS g (id) "
            f"JOIN {self.tables.table('aggregate_version')} AS t "
            f"ON t.consumer = %s AND t.key = g.id",
            [[*stored], self.consumer],
        )
        return {stored[key]: version for key, version in rows}

    def suspects(self) -> Mapping[str, int]:
        """Return how often the process died at each noted message, by stored id."""
        notes = self.tables.table("crash_suspect")
        question = f"SELECT message_id, tries FROM {notes} WHERE consumer = %s"
        return dict(self._ask(question, [self.consumer]))

    def note(self, message_ids: Sequence[str]) -> None:
        """Note, durably and at once, that these messages (by stored id) are about to be tried."""
        self._ask(
            f"INSERT INTO {self.tables.table('crash_suspect')} AS t "
            f"(consumer, message_id, tries, writer, noted_at) "
            f"SELECT %s, g.id, 1, %s, {self.tables.now} FROM unnest(%s::text[]) AS g (id) "
            f"ORDER BY g.id ON CONFLICT (consumer, message_id) DO UPDATE SET "
            f"tries = t.tries + 1, writer = EXCLUDED.writer, noted_at = EXCLUDED.noted_at "
            f"RETURNING t.message_id",
            [self.consumer, json.dumps(Owner.here().to_json()), [*message_ids]],
        )

    def clear(self, message_ids: Sequence[str]) -> None:
        """Remove the notes of messages that did not kill the process."""
        self._ask(
            f"DELETE FROM {self.tables.table('crash_suspect')} "
            f"WHERE consumer = %s AND message_id = ANY (%s) RETURNING message_id",
            [self.consumer, [*message_ids]],
        )

    def _ask(self, question: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        where = f"consumer {self.consumer}, for a task"
        with translated(where), session(self.address, "semel") as connection:
            try:
                return connection.execute(question.encode(), values).fetchall()
            except psycopg.errors.UndefinedTable as error:
                if not self.days:
                    raise
                raise Retryable(f"{where}: retention has dropped a day: {words(error)}") from None


def _due_heads(tables: MessageTables) -> str:
    """Return the heads whose turn it is: retries that are due, and what stands behind no other.

    A message behind others is a head once those before it were handled or skipped.  Messages
    that hold no key are queues of one.  All of it is read from `ix_waiting_message_head`.
    """
    mine = f"FROM {tables.table('waiting_message')} AS w WHERE w.consumer = %(consumer)s"
    return f"""
SELECT h.place, h.queue
  FROM (SELECT w.place, NULL AS queue, w.waits, w.due_at {mine} AND w.held = 0
        UNION ALL
        (SELECT DISTINCT ON (w.key) w.place, w.key, w.waits, w.due_at {mine} AND w.held = 1
          ORDER BY w.key, w.place)) AS h
 WHERE h.waits = 'behind' OR h.waits = 'retry' AND h.due_at <= (SELECT {tables.now})"""


def _come_back(tables: MessageTables) -> tuple[str, str, str]:
    """Return three questions: whose turn it is, these messages, and the keys that are held."""
    waiting, claims = tables.table("waiting_message"), tables.table("processed_message")
    size = "coalesce(octet_length(w.payload), 0) AS bytes"
    queues = f"""
WITH due AS MATERIALIZED ({_due_heads(tables)} ORDER BY h.place LIMIT %(rows)s),
queued AS (
    SELECT d.place AS head, w.place, {size} FROM due AS d JOIN {waiting} AS w ON w.place = d.place
    UNION ALL
    SELECT d.place, q.place, q.bytes FROM due AS d, LATERAL (
        SELECT w.place, {size} FROM {waiting} AS w
         WHERE w.consumer = %(consumer)s AND w.held = 1 AND w.key = d.queue AND w.place > d.place
         ORDER BY w.place LIMIT %(rows)s) AS q),
limited AS (
    SELECT place, row_number() OVER o AS number, sum(bytes) OVER o AS bytes FROM queued
    WINDOW o AS (ORDER BY head, place ROWS UNBOUNDED PRECEDING))
SELECT place FROM limited
 WHERE number = 1 OR number <= %(rows)s AND bytes <= %(bytes)s ORDER BY place"""
    timestamp = tables.seconds('w."timestamp"')
    first_failed = tables.seconds("w.first_failed_at")
    comes = f"""
SELECT w.place, w.message_id, w.key, w.waits, w.attempts, w.payload, w.payload_hash,
       w.headers, w.topic, w.partition, w."offset", {timestamp}, coalesce(c.state, ''),
       w.waits <> 'retry' OR w.due_at <= {tables.now}, w.message_type, w.schema_version,
       w.correlation_id, w.originals, {first_failed}
  FROM {waiting} AS w
  LEFT JOIN {claims} AS c ON c.consumer_name = w.consumer AND c.message_id = w.message_id
 WHERE w.consumer = %(consumer)s AND w.place = ANY (%(places)s::bigint[]) ORDER BY w.place"""
    held = f"""
SELECT w.key, max(w.place) FROM {waiting} AS w
 WHERE w.consumer = %(consumer)s AND w.held = 1 AND w.key IS NOT NULL
 GROUP BY w.key HAVING NOT bool_and(w.place = ANY (%(places)s::bigint[]))"""
    return queues, comes, held


def _seen(row: Sequence[Any]) -> SeenWaiting:
    place, message_id, key, waits, *rest = row
    return SeenWaiting(place, message_id, key, Waits(waits), *rest)
