"""The tables of the messaging half, as metadata that Alembic can compare with a database.

    processed_message   the claims
    failed_attempt      each failed attempt: when, and why
    dead_letter         messages that could not be handled
    waiting_message     retries, parked messages, and what waits behind them
    waiting_key         the locks of keys, taken with each claim
    message_revision    what people changed in a parked message
    approval            deletions that wait for a second person
    inbox_message       messages stored first and handled later
    outbox_message      messages on their way out
    outbox_leader       who relays an outbox
    consumer_member     the running processes
    crash_suspect       messages that are being tried, and may kill the process
    consumer_outcome    the outcome of every offset, as ranges
    consumer_engine     the consumers that Spark runs: no service may claim for them
    cycle_outcome       the outcomes of every cycle on Spark: how many of each, per partition
    aggregate_version   the applied versions of aggregates
    sequence_gap        versions that did not come
    replay_run          replays, and the progress of each
    audit_entry         what operators did, as a chain
    audit_head          the end of that chain
    semel_messaging     the version of these tables

Times are microseconds since 1970 on the database's clock: the same statements run on SQLite, which
has no type for a time.  People read them with ``to_timestamp(updated_at / 1e6)``.  JSON is text,
headers are JSON objects of base64.
"""

from __future__ import annotations

import json
from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Identity,
    Index,
    Integer,
    Table,
    text,
)

from semel.sql.types import (
    CONVERSION,
    NUMBER,
    counted,
    originals,
    partial_index,
    partitions_text,
    payload_bytes,
    place,
    short_text,
    stored_message,
    text_column,
    time_us,
)
from semel.sql.types import metadata as metadata

processed_message: Final = Table(
    "processed_message",
    metadata,
    text_column("consumer_name", "each consumer claims for itself", key=True),
    text_column("message_id", "the producer's id; sha256:… where it is long", key=True),
    text_column("original_id", "the id itself, where message_id is a hash", null=True),
    text_column("state", "IN_PROGRESS, COMPLETED, FAILED_RETRYABLE, FAILED_TERMINAL or PARKED"),
    Column("attempts", Integer, nullable=False, server_default=text("1"), comment="tries so far"),
    short_text("owner", "who holds the lease"),
    counted("fence", "rises with every lease; a stale owner's completion shows an old one"),
    time_us("lease_until", "end of the lease"),
    time_us("due_at", "when a failed message may be tried again"),
    short_text(
        "payload_hash", "sha256 of the payload; another one under the same id is a conflict"
    ),
    time_us("first_seen_at", "when it was claimed first"),
    time_us("updated_at", "when its state changed last; retention counts from here"),
    short_text("error_code", "of the last failure; empty after a success"),
    short_text("marker", "why it was not tried: SKIPPED, DELETED, REPLACED, ERASED, …"),
    time_us("failed_at", "when an attempt failed last", null=True),
    short_text("source", "topic/partition/offset of the delivery that was claimed first"),
    text_column(
        "result", "what the handler returned, as JSON, where the consumer keeps it", null=True
    ),
    text_column("result_key", "the message's key, where a result is kept", null=True),
    time_us("erased_at", "when the message's payload was erased", null=True),
    CheckConstraint(
        "state IN ('IN_PROGRESS','COMPLETED','FAILED_RETRYABLE','FAILED_TERMINAL','PARKED')",
        name="state",
    ),
    # Retention walks a consumer's terminal claims by age.
    Index("ix_processed_message_age", "consumer_name", "state", "updated_at"),
    # Erasing by key looks for results; consumers that keep none pay nothing for it.
    partial_index("ix_processed_message_result_key", "result_key", where="result_key IS NOT NULL"),
    comment="which consumer took which message, and what became of it",
)

failed_attempt: Final = Table(
    "failed_attempt",
    metadata,
    place(),
    text_column("consumer", "who failed at it"),
    text_column("message_id", "which message; sha256:… where its id is long"),
    text_column("key", "of the message; erasing goes by it", null=True),
    counted("number", "of the attempt; begins anew when somebody sends the message back"),
    time_us("at", "when it failed"),
    short_text("error_code", "by which policies decide"),
    short_text("failure_class", "transient, poison, dependency_outage, …"),
    short_text("exception", "class of the exception"),
    short_text("reason", "why it failed, in words; empty once erased"),
    short_text("worker", "host and process that wrote it"),
    originals(),
    Index("ix_failed_attempt_message", "consumer", "message_id", "place"),
    # Retention looks for old attempts whose message is gone.
    Index("ix_failed_attempt_age", "consumer", "at"),
    comment="tries that failed: the first and the latest of each message",
)

dead_letter: Final = Table(
    "dead_letter",
    metadata,
    text_column("consumer", "who could not handle it", key=True),
    text_column("message_id", "one dead letter per consumer and message", key=True),
    *stored_message("the bytes as they came; NULL once erased"),
    short_text("reason", "why it failed, in words"),
    short_text("exception", "class of the exception"),
    short_text("error_code", "by which policies decide"),
    time_us("first_failed_at", "first failure"),
    time_us("last_failed_at", "last failure"),
    short_text("owner", "the team that looks after it"),
    short_text("outcome", "dlq, deserialization_failure, schema_incompatible or conflict"),
    counted("needs_review", "1: a person must have looked at it before it is handled again"),
    short_text("expected_hash", "for a conflict: the payload that came first"),
    Index("ix_dead_letter_age", "consumer", "first_failed_at", "message_id"),
    # The audit of completeness asks whether a message that was dead-lettered still is there.
    Index("ix_dead_letter_source", "consumer", "partition", "offset"),
    comment="messages that could not be handled: owned, and replayable",
)

waiting_message: Final = Table(
    "waiting_message",
    metadata,
    place(),
    text_column("consumer", "for whom it waits"),
    text_column("message_id", "one per consumer and message"),
    text_column(
        "waits", "retry: for its time; parked: for a person; behind: for an earlier message"
    ),
    Column("held", Integer, nullable=False, server_default=text("0"), comment="1: holds its key"),
    *stored_message("the bytes to handle: the original, or the newest revision"),
    time_us("due_at", "when a retry may be tried"),
    short_text("reason", "why it waits, in words"),
    short_text("error_code", "by which policies decide"),
    short_text("exception", "class of the exception"),
    time_us("since", "when it came here"),
    time_us("first_failed_at", "first failure"),
    short_text("label", "what a person classified it as"),
    CheckConstraint("waits IN ('retry','parked','behind')", name="waits"),
    Index("uq_waiting_message_id", "consumer", "message_id", unique=True),
    Index("ix_waiting_message_due", "consumer", "waits", "due_at"),
    Index("ix_waiting_message_key", "consumer", "key", "place"),
    # A pipeline on Spark asks for the first message of each key before every batch.
    Index(
        "ix_waiting_message_head",
        *("consumer", "held", "key", "place"),
        postgresql_include=["waits", "due_at"],
    ),
    # The audit of completeness asks whether a message that was marked as waiting still waits.
    Index("ix_waiting_message_source", "consumer", "partition", "offset"),
    comment="messages that are durable here and not handled yet",
)

waiting_key: Final = Table(
    "waiting_key",
    metadata,
    text_column("consumer", "who keeps order per key", key=True),
    text_column("key", "locked with every claim of one of its messages", key=True),
    time_us("used_at", "when it was written; rows that no transaction has locked may be deleted"),
    comment="locks: a key is held while waiting_message has a message of it",
)

inbox_message: Final = Table(
    "inbox_message",
    metadata,
    place(),
    text_column("consumer", "for whom it is stored"),
    text_column("message_id", "one per consumer and message; sha256:… where it is long"),
    *stored_message("the bytes as they came; NULL once erased"),
    time_us("received_at", "when it was stored"),
    time_us("processed_at", "when its effect became durable", null=True),
    time_us("due_at", "when it may be handled; NULL: a worker has settled it", null=True),
    short_text("error", "of the last failure"),
    text_column("result", "what the handler returned, as JSON", null=True),
    Index("uq_inbox_message_id", "consumer", "message_id", unique=True),
    # Most rows are processed: the worker needs only the others.
    partial_index("ix_inbox_message_due", "consumer", "place", where="processed_at IS NULL"),
    comment="incoming messages, stored before they are handled",
)

outbox_message: Final = Table(
    "outbox_message",
    metadata,
    place(),
    text_column("outbox", "which relay it belongs to"),
    text_column(
        "message_id", "derived from the inbound message: handling it again writes the same"
    ),
    text_column("original_id", "the id itself, where message_id is a hash", null=True),
    text_column("topic", "where it goes"),
    text_column("key", "its key; base64:… where it is not plain text", null=True),
    payload_bytes("the bytes to send; NULL once erased"),
    short_text("headers", "JSON object, or list of pairs, of base64"),
    time_us("created_at", "when it was written"),
    time_us("not_before", "when it may be sent; NULL: at once", null=True),
    counted("attempts", "failed publications"),
    text_column("parked_reason", "why the broker will never take it", null=True),
    short_text("parent", "length:consumer/message id of the inbound message"),
    text_column("parent_key", "key of the inbound message; sha256:… where it is long", null=True),
    time_us("erased_at", "when its payload was erased", null=True),
    Index("uq_outbox_message_id", "outbox", "message_id", unique=True),
    Index("ix_outbox_message_place", "outbox", "place"),
    Index("ix_outbox_message_parent", "parent"),
    # Few entries are parked, and every pass of the relay asks which.
    partial_index("ix_outbox_message_parked", "outbox", "place", where="parked_reason IS NOT NULL"),
    # SQLite must not use a deleted place again: a delete that is repeated because its answer was
    # lost would otherwise delete a message that was not sent yet.
    sqlite_autoincrement=True,
    comment="outgoing messages that became durable with their cause",
)

outbox_leader: Final = Table(
    "outbox_leader",
    metadata,
    text_column("outbox", "one leader each", key=True),
    short_text("owner", "who relays"),
    counted("epoch", "rises with every new leader; an old one's deletes show an old epoch"),
    time_us("lease_until", "end of the lease"),
    comment="who relays an outbox",
)

consumer_member: Final = Table(
    "consumer_member",
    metadata,
    text_column("consumer", "which consumer", key=True),
    text_column("name", "unique per start", key=True),
    short_text("owner", "host, process and start, as JSON"),
    partitions_text("what it works on, as JSON"),
    counted("in_flight", "records it may have had at once"),
    time_us("expires_at", "renewed while it runs"),
    time_us("standing_since", "since when it stands still in an outage", null=True),
    Column("lag", BigInteger, nullable=True, comment="records behind, when it was renewed last"),
    short_text("refusals", "why its policy forbids replays, by topic, as JSON"),
    comment="running processes; a row without its process may mean a message that kills",
)

crash_suspect: Final = Table(
    "crash_suspect",
    metadata,
    text_column("consumer", "which consumer", key=True),
    text_column("message_id", "about to be tried, and may kill", key=True),
    counted("tries", "attempts that ended with the death of the process"),
    short_text("writer", "host, process and start, as JSON: the tries count once it is gone"),
    time_us("noted_at", "of the last try"),
    comment="messages that are being tried, and were when a process died",
)

consumer_outcome: Final = Table(
    "consumer_outcome",
    metadata,
    Column("number", NUMBER, Identity(), primary_key=True, comment="of the range"),
    text_column("consumer", "which consumer"),
    text_column("topic", "of the records"),
    Column("partition", Integer, nullable=False, comment="of the records"),
    Column("first", BigInteger, nullable=False, comment="first offset"),
    Column("last", BigInteger, nullable=False, comment="last offset, included"),
    text_column("outcome", "what became of them"),
    Index("ix_consumer_outcome_place", "consumer", "topic", "partition", "first"),
    Index("ix_consumer_outcome_end", "consumer", "topic", "partition", "outcome", "last"),
    comment="what became of every offset, as ranges of neighbours",
)

consumer_engine: Final = Table(
    "consumer_engine",
    metadata,
    text_column("consumer", "which consumer; without a row, services run it", key=True),
    text_column("engine", "spark"),
    text_column("scope", "of the pipeline, as the books of its sinks name it"),
    text_column("app", "of the pipeline"),
    text_column("query", "of the pipeline"),
    text_column("ledger", "the id of the pipeline's ledger"),
    counted("epoch", "of the pipeline's last start"),
    text_column("books", "the schema with the books of its messages sink"),
    time_us("since", "when it took the consumer over"),
    comment="which pipeline runs a consumer; only a hand-over removes a row",
)

cycle_outcome: Final = Table(
    "cycle_outcome",
    metadata,
    Column("number", NUMBER, Identity(), primary_key=True, comment="of the row"),
    text_column("consumer", "which consumer"),
    text_column("scope", "of the pipeline, as the books of its sinks name it"),
    text_column("cycle", "generation and batch: g1.b42"),
    text_column("attempt", "the attempt that was committed"),
    text_column("topic", "of the records"),
    Column("partition", Integer, nullable=False, comment="of the records"),
    Column("first", BigInteger, nullable=False, comment="first offset of the cycle"),
    Column("last", BigInteger, nullable=False, comment="last offset of the cycle, included"),
    text_column("outcome", "what became of them"),
    counted("total", "how many had this outcome"),
    time_us("at", "when the cycle was committed; retention counts from here"),
    Index("ix_cycle_outcome_place", "consumer", "topic", "partition", "first"),
    comment="what became of the offsets of every cycle, as counts",
)

aggregate_version: Final = Table(
    "aggregate_version",
    metadata,
    text_column("consumer", "which consumer", key=True),
    text_column("key", "of the aggregate", key=True),
    Column("version", BigInteger, nullable=True, comment="applied last; NULL: none yet"),
    comment="the applied versions of aggregates",
)

sequence_gap: Final = Table(
    "sequence_gap",
    metadata,
    text_column("consumer", "which consumer", key=True),
    text_column("key", "of the aggregate", key=True),
    Column("expected", BigInteger, primary_key=True, comment="first missing version"),
    text_column("original_key", "the key itself, where key is a hash", null=True),
    counted("found", "the version that came instead"),
    time_us("since", "when it was noticed"),
    time_us("closed_at", "when it was closed", null=True),
    short_text("how", "arrived, fetched, rebuilt, or a person's reason"),
    comment="versions that did not come",
)

semel_messaging: Final = Table(
    "semel_messaging",
    metadata,
    Column("only_row", Integer, primary_key=True, autoincrement=False, comment="1"),
    counted("version", "of these tables"),
    CheckConstraint("only_row = 1", name="only_row"),
    comment="the version of semel's messaging tables",
)

message_revision: Final = Table(
    "message_revision",
    metadata,
    text_column("consumer", "whose message", key=True),
    text_column("message_id", "which message", key=True),
    Column("number", Integer, primary_key=True, comment="0 is the original, and never changes"),
    text_column("key", "of the message", null=True),
    payload_bytes("the bytes of this revision; NULL once erased"),
    short_text("payload_hash", "sha256 of the payload"),
    short_text("actor", "who wrote it"),
    short_text("reason", "why"),
    short_text("id_policy", "keep-id or new-id"),
    text_column("new_id", "the id under which it is handled, for new-id", null=True),
    time_us("at", "when"),
    time_us("erased_at", "when its payload was erased", null=True),
    originals(),
    comment="what people changed in a message, with what it was before",
)

approval: Final = Table(
    "approval",
    metadata,
    Column("number", NUMBER, Identity(), primary_key=True, comment="of the request"),
    text_column("act", "what is asked for"),
    text_column("consumer", "whose message"),
    text_column("message_id", "which message"),
    text_column("asked_by", "the first person"),
    short_text("reason", "why"),
    time_us("asked_at", "when"),
    text_column("decided_by", "the second person; never the first", null=True),
    time_us("decided_at", "when", null=True),
    short_text("decision", "approved or refused"),
    short_text("payload_hash", "of what was to be deleted when it was asked for"),
    originals(),
    comment="acts that need a second person",
)

replay_run: Final = Table(
    "replay_run",
    metadata,
    text_column("name", "of the replay", key=True),
    text_column("consumer", "who handles the messages again"),
    text_column("selection", "which messages, as JSON"),
    text_column("state", "running, stopped, failed, finished or abandoned"),
    short_text("cursor", "how far it is, as JSON"),
    counted("done", "messages so far"),
    counted("failed", "failures so far"),
    short_text("actor", "who began it"),
    time_us("began_at", "when"),
    time_us("updated_at", "when it went on last"),
    comment="replays; claims are kept while one is neither finished nor abandoned",
)

audit_entry: Final = Table(
    "audit_entry",
    metadata,
    Column(
        "number",
        BigInteger,
        primary_key=True,
        autoincrement=False,
        comment="in the chain, without holes",
    ),
    time_us("at", "when"),
    text_column("actor", "who"),
    text_column("act", "what"),
    short_text("consumer", "about whose message"),
    short_text("message_id", "about which message"),
    short_text("reason", "why"),
    short_text("details", "JSON", {CONVERSION: (json.dumps, json.loads)}),
    text_column("previous_hash", "of the entry before"),
    text_column("hash", "of this entry"),
    Index("ix_audit_entry_message", "consumer", "message_id"),
    comment="what operators did; each entry carries the hash of the one before",
)

audit_head: Final = Table(
    "audit_head",
    metadata,
    Column("only_row", Integer, primary_key=True, autoincrement=False, comment="1"),
    counted("number", "of the last entry"),
    text_column("hash", "of the last entry"),
    CheckConstraint("only_row = 1", name="only_row"),
    comment="the end of the audit trail; appending locks it",
)
