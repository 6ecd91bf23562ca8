"""The fixed list of statements that carry out message changes, and where the tables are.

Each statement reads the changes of one kind, compares what the pass has seen, and must change
one row for each of them.  If it does not, another process has changed a row meanwhile: before
the decision the batch is read again, and after it an operator must look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from semel.errors import Permanent
from semel.messaging.records import FIRST_KEPT, LATEST_KEPT
from semel.messaging.redact import ERASED_REASON
from semel.messaging.tables import FIND, found
from semel.pipeline.txn import SinkTxnId
from semel.postgres.connect import OWN_PATH, Connection
from semel.postgres.lean import INSERT
from semel.postgres.statements import literal, quoted


class Statement(NamedTuple):
    """One statement of the list."""

    name: str
    does: str
    """What it does, for an operator."""

    rows: str
    """Which changes it reads."""

    sql: str
    is_exact: bool = True
    """It must change one row for each of the changes that it reads."""


_WAITING: Final = """
    t.consumer = {consumer} AND t.place = s.place AND t.message_id = s.message_id
    AND t.waits = s.seen_waits AND t.attempts = s.seen_attempts
    AND t.payload_hash = s.payload_hash"""

_DETAIL: Final = """
    LATERAL pg_catalog.jsonb_to_record(coalesce(s.detail, '{{}}')::jsonb) AS d (
        waits text, held integer, topic text, partition integer, "offset" bigint, payload text,
        headers text, "timestamp" bigint, message_type text, schema_version text,
        correlation_id text, originals text, reason text, exception text, error_code text,
        first_failed_at bigint, owner text, outcome text, needs_review bigint,
        expected_hash text, number bigint, failure_class text, original_key text,
        outbox text, parent text, parent_key text),
    (SELECT {now} AS now) AS n"""

_STORED: Final = """
    message_id, key, payload, topic, partition, "offset", headers, "timestamp", payload_hash,
    message_type, schema_version, correlation_id, attempts, originals, reason, exception,
    error_code"""

_STORED_VALUES: Final = """
    s.message_id, s.key, pg_catalog.decode(d.payload, 'base64'), coalesce(d.topic, s.topic),
    coalesce(d.partition, s.partition), coalesce(d."offset", s."offset"),
    coalesce(d.headers, ''), {timestamp}, s.payload_hash, coalesce(d.message_type, ''),
    coalesce(d.schema_version, ''), coalesce(d.correlation_id, ''), s.attempts, d.originals,
    coalesce(d.reason, ''), coalesce(d.exception, ''), coalesce(d.error_code, s.error_code)"""

_SOURCE_ORDER: Final = 's.topic, s.partition NULLS FIRST, s."offset" NULLS FIRST'

_HAS_CLAIM: Final = "s.op IN ('take', 'again', 'retake') AND s.seen_state <> ''"
_HAS_NO_CLAIM: Final = "(s.op = 'claim' OR s.op IN ('take', 'again') AND s.seen_state = '')"

STATEMENTS: Final = (
    Statement(
        "take",
        "delete the waiting messages that came back",
        "s.op = 'take'",
        f"DELETE FROM {{waiting_message}} AS t USING {{rows}} AND {_WAITING}",
    ),
    Statement(
        "again",
        "change the waiting messages that wait again",
        "s.op = 'again'",
        f"""
UPDATE {{waiting_message}} AS t
   SET waits = coalesce(d.waits, t.waits), held = coalesce(d.held, t.held),
       due_at = {{due}}, attempts = s.attempts,
       error_code = coalesce(d.error_code, s.error_code),
       exception = coalesce(d.exception, ''),
       reason = CASE WHEN t.erased_at IS NULL THEN coalesce(d.reason, '')
                     ELSE {literal(ERASED_REASON)} END,
       first_failed_at = CASE WHEN d.waits = 'behind' THEN t.first_failed_at
                              ELSE {{first_failed_again}} END
  FROM {{rows_of_detail}} AND {_WAITING}""",
    ),
    Statement(
        "settle",
        "change the claims that were there",
        _HAS_CLAIM,
        """
UPDATE {processed_message} AS t
   SET state = s.state, attempts = s.attempts, error_code = s.error_code, marker = s.marker,
       owner = '', lease_until = {no_lease}, updated_at = n.now,
       due_at = CASE s.state WHEN 'COMPLETED' THEN {not_due} ELSE {due} END,
       failed_at = CASE s.state WHEN 'COMPLETED' THEN t.failed_at ELSE n.now END,
       payload_hash = CASE t.payload_hash WHEN '' THEN s.payload_hash ELSE t.payload_hash END
  FROM {rows_of_detail}
   AND t.consumer_name = {consumer} AND t.message_id = s.message_id AND t.state = s.seen_state
   AND (s.op <> 'retake' OR t.attempts = s.seen_attempts
        AND ('' IN (t.payload_hash, s.payload_hash) OR t.payload_hash = s.payload_hash))
   AND (s.op <> 'retake' OR t.state = 'IN_PROGRESS' AND t.lease_until <= n.now
        OR t.state = 'FAILED_RETRYABLE' AND NOT EXISTS (
           SELECT FROM {waiting_message} AS w
            WHERE w.consumer = {consumer} AND w.message_id = s.message_id))""",
    ),
    Statement(
        "claim",
        "claim the new messages",
        _HAS_NO_CLAIM,
        """
INSERT INTO {processed_message} (consumer_name, message_id, original_id, state, attempts,
       payload_hash, source, error_code, marker, due_at, failed_at, first_seen_at, updated_at)
SELECT {consumer}, s.message_id, s.original_id, s.state, s.attempts, s.payload_hash, s.source,
       s.error_code, s.marker, CASE s.state WHEN 'COMPLETED' THEN {not_due} ELSE {due} END,
       CASE s.state WHEN 'COMPLETED' THEN NULL ELSE n.now END,
       n.now, n.now
  FROM (SELECT {now} AS now) AS n, {rows}""",
    ),
    Statement("lean", "insert the lean claims of the new messages", "s.op = 'lean'", INSERT),
    Statement(
        "keys",
        "lock the keys whose messages begin to wait",
        "s.op = 'wait' AND s.key IS NOT NULL",
        """
INSERT INTO {waiting_key} AS t (consumer, key, used_at)
SELECT {consumer}, k.key, {now} FROM (SELECT DISTINCT s.key FROM {rows}) AS k
 ORDER BY k.key COLLATE "C"
    ON CONFLICT (consumer, key) DO UPDATE SET used_at = EXCLUDED.used_at""",
        is_exact=False,
    ),
    Statement(
        "wait",
        "insert the messages that begin to wait behind those of their keys that were seen",
        "s.op = 'wait'",
        f"""
INSERT INTO {{waiting_message}} (consumer, waits, held, due_at, since, first_failed_at,
       {_STORED})
SELECT {{consumer}}, d.waits, coalesce(d.held, 0), {{due}}, n.now,
       CASE WHEN d.waits = 'behind' THEN {{never_failed}} ELSE {{first_failed}} END,
       {_STORED_VALUES}
  FROM {{rows_of_detail}}
   AND NOT EXISTS (SELECT FROM {{waiting_message}} AS w WHERE w.consumer = {{consumer}}
                      AND s.state = 'held' AND w.key = s.key AND w.held = 1
                      AND w.place > coalesce(s.place, 0))
 ORDER BY {_SOURCE_ORDER}""",
    ),
    Statement(
        "letter",
        "insert the dead letters",
        "s.op = 'letter'",
        f"""
INSERT INTO {{dead_letter}} AS t (consumer, first_failed_at, last_failed_at, owner, outcome,
       needs_review, expected_hash, {_STORED})
SELECT DISTINCT ON (s.message_id) {{consumer}}, {{first_failed}}, n.now, coalesce(d.owner, ''),
       coalesce(d.outcome, 'dlq'), coalesce(d.needs_review, 0), coalesce(d.expected_hash, ''),
       {_STORED_VALUES}
  FROM {{rows_of_detail}} ORDER BY s.message_id, d.partition, d."offset"
    ON CONFLICT (consumer, message_id) DO UPDATE
   SET exception = EXCLUDED.exception, error_code = EXCLUDED.error_code,
       attempts = EXCLUDED.attempts, last_failed_at = EXCLUDED.last_failed_at,
       owner = EXCLUDED.owner, outcome = EXCLUDED.outcome, needs_review = EXCLUDED.needs_review,
       expected_hash = EXCLUDED.expected_hash,
       reason = CASE WHEN t.erased_at IS NULL THEN EXCLUDED.reason
                     ELSE {literal(ERASED_REASON)} END""",
        is_exact=False,
    ),
    Statement(
        "version",
        "raise the applied versions",
        "s.op = 'version' AND s.seen_version IS NOT NULL",
        """
UPDATE {aggregate_version} AS t SET version = s.version FROM {rows}
   AND t.consumer = {consumer} AND t.key = s.key AND t.version = s.seen_version""",
    ),
    Statement(
        "first version",
        "insert the first versions of new keys",
        "s.op = 'version' AND s.seen_version IS NULL",
        """
INSERT INTO {aggregate_version} AS t (consumer, key, version)
SELECT {consumer}, s.key, s.version FROM {rows}
    ON CONFLICT (consumer, key) DO UPDATE SET version = EXCLUDED.version
 WHERE t.version IS NULL""",
    ),
    Statement(
        "gap",
        "insert the gaps that are not known",
        "s.op = 'gap'",
        f"""
INSERT INTO {{sequence_gap}} (consumer, key, expected, original_key, found, since)
SELECT {{consumer}}, s.key, s.version, d.original_key, s.seen_version, n.now
  FROM {{rows_of_detail}} ORDER BY {_SOURCE_ORDER} ON CONFLICT DO NOTHING""",
        is_exact=False,
    ),
    Statement(
        "close",
        "close the gaps whose versions came",
        "s.op = 'close'",
        """
UPDATE {sequence_gap} AS t SET closed_at = n.now, how = s.state
  FROM {rows_of_detail} AND t.consumer = {consumer} AND t.key = s.key AND t.closed_at IS NULL
   AND t.expected >= coalesce(s.seen_version, t.expected) AND t.expected < s.version""",
        is_exact=False,
    ),
    Statement(
        "release",
        "make the messages due that waited for these versions",
        "s.op = 'close'",
        """
UPDATE {waiting_message} AS t SET waits = 'retry', due_at = n.now
  FROM {rows_of_detail} AND t.consumer = {consumer} AND t.key = s.key
   AND t.error_code = 'SEQUENCE_GAP' AND t.waits IN ('retry', 'parked')
   AND t.erased_at IS NULL""",
        is_exact=False,
    ),
    Statement(
        "attempt",
        "insert the failed attempts",
        "s.op = 'attempt'",
        f"""
INSERT INTO {{failed_attempt}} (consumer, message_id, key, number, at, error_code, failure_class,
       exception, reason, originals)
SELECT {{consumer}}, s.message_id, s.key, coalesce(d.number, s.attempts), n.now, s.error_code,
       coalesce(d.failure_class, ''), coalesce(d.exception, ''), coalesce(d.reason, ''),
       d.originals
  FROM {{rows_of_detail}} ORDER BY {_SOURCE_ORDER}, d.number""",
    ),
    Statement(
        "thin out",
        "delete the attempts between the first and the latest ones of a message",
        "s.op = 'attempt'",
        f"""
DELETE FROM {{failed_attempt}} AS t USING (
       SELECT a.place, row_number() OVER (PARTITION BY a.message_id ORDER BY a.place) AS number,
              count(*) OVER (PARTITION BY a.message_id) AS total
         FROM {{failed_attempt}} AS a
        WHERE a.consumer = {{consumer}}
          AND a.message_id IN (SELECT s.message_id FROM {{rows}})) AS a
 WHERE t.place = a.place AND a.number > {FIRST_KEPT} AND a.number <= a.total - {LATEST_KEPT}""",
        is_exact=False,
    ),
    Statement(
        "send",
        "insert the outgoing messages",
        "s.op = 'send'",
        f"""
INSERT INTO {{outbox_message}} (outbox, message_id, original_id, topic, key, payload, headers,
       created_at, not_before, parent, parent_key)
SELECT d.outbox, s.message_id, s.original_id, d.topic, s.key,
       pg_catalog.decode(d.payload, 'base64'), coalesce(d.headers, ''), n.now,
       CASE WHEN s.delay_us > 0 THEN {{due}} END, coalesce(d.parent, ''), d.parent_key
  FROM {{rows_of_detail}} ORDER BY {_SOURCE_ORDER}, s.ordinal
    ON CONFLICT (outbox, message_id) DO NOTHING""",
        is_exact=False,
    ),
    Statement(
        "count",
        "count the outcomes of the cycle",
        "s.op = 'count'",
        """
INSERT INTO {cycle_outcome} (consumer, scope, cycle, attempt, topic, partition, first, last,
       outcome, total, at)
SELECT {consumer}, {scope}, {cycle}, {attempt}, s.topic, s.partition, min(s.seen_version),
       max(s.version), s.state, sum(s.total), {now}
  FROM {rows} GROUP BY s.topic, s.partition, s.state ORDER BY s.topic, s.partition, s.state""",
        is_exact=False,
    ),
)
"""In this order; a statement without changes is left out."""

TABLES: Final = (
    *("processed_message", "waiting_message", "waiting_key", "dead_letter", "aggregate_version"),
    *("sequence_gap", "failed_attempt", "outbox_message", "cycle_outcome"),
    *("consumer_engine", "consumer_member", "crash_suspect"),
)
"""The messaging tables that these statements, and the registry's, name."""

_COLUMNS: Final = """
SELECT c.relname, a.attname, t.typname, pg_catalog.pg_get_expr(d.adbin, d.adrelid)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
  LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE n.nspname = %s AND c.relname = ANY (%s) AND c.relkind IN ('r', 'p')
"""


@dataclass(frozen=True, slots=True)
class MessageTables:
    """The schema of the messaging tables, and how their columns store times."""

    schema: str
    columns: Mapping[tuple[str, str], tuple[str, str | None]] = field(repr=False)
    """By table and column: its type, and its default."""

    @classmethod
    def find(cls, connection: Connection, schema: str | None) -> MessageTables:
        """Find the tables in *schema*, or where the role's search path or semel's schema has them.

        Raises:
            Permanent: a table is missing.
            Misuse: there are two sets of tables, and none is named.
        """
        with connection.transaction():
            connection.execute(OWN_PATH)
            schema = found(connection.execute(FIND).fetchall(), schema).schema
        rows = connection.execute(_COLUMNS, [schema, list(TABLES)]).fetchall()
        columns = {(table, column): (kind, default) for table, column, kind, default in rows}
        missing = sorted({*TABLES} - {table for table, _ in columns})
        if missing:
            raise Permanent(
                f"database {connection.info.dbname} has no table {', '.join(missing)} in schema "
                f"{schema}: create semel's messaging tables with `semel db create`"
            )
        return cls(schema, columns)

    def table(self, name: str) -> str:
        """Return a table's full name, quoted."""
        return f"{quoted(self.schema)}.{quoted(name)}"

    @property
    def now(self) -> str:
        """The database's clock, in microseconds since 1970 as the tables have it."""
        return "(extract(epoch FROM pg_catalog.clock_timestamp()) * 1000000)::bigint"

    def seconds(self, column: str) -> str:
        """Return a column's value in seconds since 1970, 0 if there is none."""
        return f"coalesce({column}, 0) / 1000000.0::float8"

    def none(self, table: str, column: str) -> str:
        """Return the value of a column that says that there is no time."""
        return self.columns.get((table, column), ("", None))[1] or "NULL"

    def statement(
        self,
        statement: Statement,
        consumer: str,
        txn: SinkTxnId,
        tables: Sequence[str],
        lean: str = "",
    ) -> str:
        """Return the SQL of a statement for one attempt; *lean* is the table of lean claims."""
        rows = f"{union(tables)} AS s"
        first_failed = "coalesce(nullif(d.first_failed_at, 0), n.now)"
        never = self.none("waiting_message", "first_failed_at")
        detail = _DETAIL.format(now=self.now)
        facts: dict[str, Any] = {
            **{name: self.table(name) for name in TABLES},
            "lean": lean,
            "rows": f"{rows} WHERE {statement.rows}",
            "rows_of_detail": f"{rows}, {detail} WHERE {statement.rows}",
            "consumer": literal(consumer),
            "scope": literal(txn.scope.slug),
            "cycle": literal(txn.cycle.label),
            "attempt": literal(txn.attempt),
            "now": self.now,
            "due": "n.now + s.delay_us",
            "not_due": self.none("processed_message", "due_at"),
            "no_lease": self.none("processed_message", "lease_until"),
            "never_failed": never,
            "first_failed": first_failed,
            "first_failed_again": (
                f"CASE WHEN t.first_failed_at IS NOT DISTINCT FROM {never} THEN {first_failed} "
                f"ELSE t.first_failed_at END"
            ),
            "timestamp": 'coalesce(d."timestamp", 0)',
        }
        return statement.sql.format(**facts)


def union(tables: Sequence[str]) -> str:
    """Return the changes of all tasks."""
    return f"({' UNION ALL '.join(f'SELECT * FROM {table}' for table in tables)})"


def counting(tables: Sequence[str]) -> str:
    """Return the question for the number of changes of each statement."""
    counts = (f"count(*) FILTER (WHERE {statement.rows})" for statement in STATEMENTS)
    return f"SELECT {', '.join(counts)} FROM {union(tables)} AS s"
