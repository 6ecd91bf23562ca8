"""The tables of the messaging half, as metadata that Alembic can compare with a database.

    processed_message   the claims
    dead_letter         what could not be handled
    waiting_message     retries, parked messages, and what waits behind them
    waiting_key         the keys that are locked with the claim, and whether they are held
    message_revision    what people changed in a parked message
    approval            deletions that wait for a second person
    inbox_message       messages stored first and handled later
    outbox_message      messages on their way out
    outbox_leader       who relays an outbox
    consumer_member     the running processes
    crash_suspect       messages that are tried alone after a crash
    consumer_outcome    what became of every offset, as ranges
    aggregate_version   the applied versions of aggregates
    sequence_gap        versions that did not come
    replay_run          replays, and how far each is
    audit_entry         what operators did, as a chain
    audit_head          the end of that chain
    semel_messaging     the version of these tables

Times are microseconds since 1970 on the database's clock.  JSON is text, headers
are JSON objects of base64.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)

metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)
"""What `semel db create` makes; give it to Alembic's ``target_metadata`` beside your own."""

# SQLite numbers rows only in a column of exactly this type.
NUMBER: Final = BigInteger().with_variant(Integer(), "sqlite")


def _text(name: str, comment: str, *, key: bool = False, null: bool = False) -> Column[str]:
    return Column(name, Text, primary_key=key, nullable=null, comment=comment)


def _short(name: str, comment: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default="", comment=comment)


def _us(name: str, comment: str, *, null: bool = False) -> Column[int]:
    return Column(
        name, BigInteger, nullable=null, server_default=None if null else text("0"), comment=comment
    )


def _count(name: str, comment: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default=text("0"), comment=comment)


def _bytes(comment: str) -> Column[bytes]:
    return Column("payload", LargeBinary, nullable=True, comment=comment)


def _place() -> Column[int]:
    return Column(
        "place", NUMBER, Identity(), primary_key=True, comment="order of arrival; given here"
    )


def _originals() -> Column[str]:
    return _text(
        "originals", "JSON: ids and keys as they came, where a column has a hash", null=True
    )


def _origin() -> list[Column[int] | Column[str]]:
    """Return where a message came from, and what else it carried."""
    return [
        Column("partition", Integer, nullable=True, comment="of the original record"),
        Column("offset", BigInteger, nullable=True, comment="of the original record"),
        _short("headers", "JSON object of base64; empty: none, or erased"),
        _us("timestamp", "the broker's time of the record"),
        _short("payload_hash", "sha256 of the payload's bytes"),
        _short("message_type", "the event's type"),
        _short("schema_version", "as the producer said"),
        _short("correlation_id", "as the producer said"),
    ]


processed_message: Final = Table(
    "processed_message",
    metadata,
    _text("consumer_name", "each consumer claims for itself", key=True),
    _text("message_id", "the producer's id; sha256:… where it is long", key=True),
    _text("original_id", "the id itself, where message_id is a hash", null=True),
    _text("state", "IN_PROGRESS, COMPLETED, FAILED_RETRYABLE, FAILED_TERMINAL or PARKED"),
    Column("attempts", Integer, nullable=False, server_default=text("1"), comment="tries so far"),
    _short("owner", "who holds the lease"),
    _count("fence", "rises with every lease; a stale owner's completion shows an old one"),
    _us("lease_until", "end of the lease"),
    _us("due_at", "when a failed message may be tried again"),
    _short("payload_hash", "sha256 of the payload; another one under the same id is a conflict"),
    _us("first_seen_at", "when it was claimed first"),
    _us("updated_at", "when its state changed last; retention counts from here"),
    _short("error_code", "of the last failure"),
    _us("failed_at", "when an attempt failed last", null=True),
    # Not for claims of batches: it would cost them a twelfth of their speed.
    _short("source", "topic/partition/offset of the delivery that was claimed first"),
    _text("result", "what the handler returned, as JSON, where the consumer keeps it", null=True),
    _text("result_key", "the message's key, where a result is kept", null=True),
    _us("erased_at", "when the message's payload was erased", null=True),
    CheckConstraint(
        "state IN ('IN_PROGRESS','COMPLETED','FAILED_RETRYABLE','FAILED_TERMINAL','PARKED')",
        name="state",
    ),
    # Retention walks a consumer's terminal claims by age.
    Index("ix_processed_message_age", "consumer_name", "state", "updated_at"),
    # Erasing by key looks for results; consumers that keep none pay nothing for it.
    Index(
        "ix_processed_message_result_key",
        "result_key",
        postgresql_where=text("result_key IS NOT NULL"),
        sqlite_where=text("result_key IS NOT NULL"),
    ),
    comment="which consumer took which message, and what became of it",
)

dead_letter: Final = Table(
    "dead_letter",
    metadata,
    _text("consumer", "who could not handle it", key=True),
    _text("message_id", "one dead letter per consumer and message", key=True),
    _short("topic", "original topic"),
    _text("key", "original key", null=True),
    _bytes("the bytes as they came; NULL once erased"),
    *_origin(),
    _short("reason", "why it failed, in words"),
    _short("exception", "class of the exception"),
    _short("error_code", "by which policies decide"),
    _count("attempts", "how often it was tried"),
    _us("first_failed_at", "first failure"),
    _us("last_failed_at", "last failure"),
    _short("owner", "the team that looks after it"),
    _short("outcome", "dlq, deserialization_failure, schema_incompatible or conflict"),
    _count("needs_review", "1: a person must have looked at it before it is handled again"),
    _short("expected_hash", "for a conflict: the payload that came first"),
    _us("erased_at", "when its payload was erased", null=True),
    _count("replays", "how often it was sent back; the loop guard counts it"),
    _originals(),
    Index("ix_dead_letter_age", "consumer", "first_failed_at", "message_id"),
    comment="messages that could not be handled: owned, and replayable",
)

waiting_message: Final = Table(
    "waiting_message",
    metadata,
    _place(),
    _text("consumer", "for whom it waits"),
    _text("message_id", "one per consumer and message"),
    _text("waits", "retry: for its time; parked: for a person; behind: for an earlier message"),
    _text("key", "original key", null=True),
    Column("held", Integer, nullable=False, server_default=text("0"), comment="1: holds its key"),
    _bytes("the bytes to handle: the original, or the newest revision"),
    _short("topic", "original topic"),
    *_origin(),
    _us("due_at", "when a retry may be tried"),
    _count("attempts", "how often it was tried"),
    _short("reason", "why it waits, in words"),
    _short("error_code", "by which policies decide"),
    _short("exception", "class of the exception"),
    _us("since", "when it came here"),
    _us("first_failed_at", "first failure"),
    _short("label", "what a person classified it as"),
    _us("erased_at", "when its payload was erased", null=True),
    _originals(),
    CheckConstraint("waits IN ('retry','parked','behind')", name="waits"),
    Index("uq_waiting_message_id", "consumer", "message_id", unique=True),
    Index("ix_waiting_message_due", "consumer", "waits", "due_at"),
    Index("ix_waiting_message_key", "consumer", "key", "place"),
    comment="messages that are durable here and not handled yet",
)

waiting_key: Final = Table(
    "waiting_key",
    metadata,
    _text("consumer", "who keeps order per key", key=True),
    _text("key", "locked with every claim of one of its messages", key=True),
    _us("used_at", "when it was written; rows that nobody has locked may be deleted"),
    comment="locks: a key is held while waiting_message has a message of it",
)

message_revision: Final = Table(
    "message_revision",
    metadata,
    _text("consumer", "whose message", key=True),
    _text("message_id", "which message", key=True),
    Column("number", Integer, primary_key=True, comment="0 is the original, and never changes"),
    _text("key", "of the message", null=True),
    _bytes("the bytes of this revision; NULL once erased"),
    _short("payload_hash", "sha256 of the payload"),
    _short("actor", "who wrote it"),
    _short("reason", "why"),
    _short("id_policy", "keep-id or new-id"),
    _text("new_id", "the id under which it is handled, for new-id", null=True),
    _us("at", "when"),
    _us("erased_at", "when its payload was erased", null=True),
    _originals(),
    comment="what people changed in a message, with what it was before",
)

approval: Final = Table(
    "approval",
    metadata,
    Column("number", NUMBER, Identity(), primary_key=True, comment="of the request"),
    _text("act", "what is asked for"),
    _text("consumer", "whose message"),
    _text("message_id", "which message"),
    _text("asked_by", "the first person"),
    _short("reason", "why"),
    _us("asked_at", "when"),
    _text("decided_by", "the second person; never the first", null=True),
    _us("decided_at", "when", null=True),
    _short("decision", "approved or refused"),
    _short("payload_hash", "of what was to be deleted when it was asked for"),
    _originals(),
    comment="acts that need a second person",
)

inbox_message: Final = Table(
    "inbox_message",
    metadata,
    _place(),
    _text("consumer", "for whom it is stored"),
    _text("message_id", "one per consumer and message; sha256:… where it is long"),
    _text("original_id", "the id itself, where message_id is a hash", null=True),
    _text("key", "original key", null=True),
    _bytes("the bytes as they came; NULL once erased"),
    _short("topic", "original topic"),
    *_origin(),
    _us("received_at", "when it was stored"),
    _us("processed_at", "when its effect became durable", null=True),
    _us("due_at", "when it may be tried; NULL: no more", null=True),
    _count("attempts", "how often it was tried"),
    _short("error", "of the last failure"),
    _text("result", "what the handler returned, as JSON", null=True),
    _us("erased_at", "when its payload was erased", null=True),
    Index("uq_inbox_message_id", "consumer", "message_id", unique=True),
    # Most rows are processed: the worker looks at the others alone.
    Index(
        "ix_inbox_message_due",
        "consumer",
        "place",
        postgresql_where=text("processed_at IS NULL"),
        sqlite_where=text("processed_at IS NULL"),
    ),
    # Whether an earlier message of its key is left.
    Index(
        "ix_inbox_message_key",
        "consumer",
        "key",
        "place",
        postgresql_where=text("processed_at IS NULL"),
        sqlite_where=text("processed_at IS NULL"),
    ),
    comment="incoming messages, stored before they are handled",
)

outbox_message: Final = Table(
    "outbox_message",
    metadata,
    _place(),
    _text("outbox", "which relay it belongs to"),
    _text("message_id", "derived from the inbound message: handling it again writes the same"),
    _text("original_id", "the id itself, where message_id is a hash", null=True),
    _text("topic", "where it goes"),
    _text("key", "its key", null=True),
    _bytes("the bytes to send; NULL once erased"),
    _short("headers", "JSON object of base64"),
    _us("created_at", "when it was written"),
    _count("attempts", "failed publications"),
    _text("parked_reason", "why the broker will never take it", null=True),
    _short("parent", "consumer/message id of the inbound message"),
    _text("parent_key", "key of the inbound message; sha256:… where it is long", null=True),
    _us("erased_at", "when its payload was erased", null=True),
    Index("uq_outbox_message_id", "outbox", "message_id", unique=True),
    Index("ix_outbox_message_place", "outbox", "place"),
    Index("ix_outbox_message_parent", "parent"),
    # Few are parked, and every sweep asks which.
    Index(
        "ix_outbox_message_parked",
        "outbox",
        "place",
        postgresql_where=text("parked_reason IS NOT NULL"),
        sqlite_where=text("parked_reason IS NOT NULL"),
    ),
    # A place that was deleted is never given again: a delete that is repeated after an unknown
    # answer would otherwise take a message with it that was not sent.
    sqlite_autoincrement=True,
    comment="outgoing messages that became durable with their cause",
)

outbox_leader: Final = Table(
    "outbox_leader",
    metadata,
    _text("outbox", "one leader each", key=True),
    _short("owner", "who relays"),
    _count("epoch", "rises with every new leader; an old one's deletes show an old epoch"),
    _us("lease_until", "end of the lease"),
    comment="who relays an outbox",
)

consumer_member: Final = Table(
    "consumer_member",
    metadata,
    _text("consumer", "which consumer", key=True),
    _text("name", "unique per start", key=True),
    _short("owner", "host, process and start, as JSON"),
    _short("partitions", "what it works on, as JSON"),
    _count("in_flight", "records it may have had at once"),
    _us("expires_at", "renewed while it runs"),
    comment="running processes; a row without its process may mean a message that kills",
)

crash_suspect: Final = Table(
    "crash_suspect",
    metadata,
    _text("consumer", "which consumer", key=True),
    _text("message_id", "tried alone, because something in flight may kill", key=True),
    _count("tries", "that were not outlived"),
    comment="after a crash: which message was tried when the process died again",
)

consumer_outcome: Final = Table(
    "consumer_outcome",
    metadata,
    Column("number", NUMBER, Identity(), primary_key=True, comment="of the range"),
    _text("consumer", "which consumer"),
    _text("topic", "of the records"),
    Column("partition", Integer, nullable=False, comment="of the records"),
    Column("first", BigInteger, nullable=False, comment="first offset"),
    Column("last", BigInteger, nullable=False, comment="last offset, included"),
    _text("outcome", "what became of them"),
    Index("ix_consumer_outcome_place", "consumer", "topic", "partition", "first"),
    Index("ix_consumer_outcome_end", "consumer", "topic", "partition", "outcome", "last"),
    comment="what became of every offset, as ranges of neighbours",
)

aggregate_version: Final = Table(
    "aggregate_version",
    metadata,
    _text("consumer", "which consumer", key=True),
    _text("key", "of the aggregate", key=True),
    Column("version", BigInteger, nullable=True, comment="applied last; NULL: none yet"),
    comment="the applied versions of aggregates",
)

sequence_gap: Final = Table(
    "sequence_gap",
    metadata,
    _text("consumer", "which consumer", key=True),
    _text("key", "of the aggregate", key=True),
    Column("expected", BigInteger, primary_key=True, comment="first missing version"),
    _text("original_key", "the key itself, where key is a hash", null=True),
    _count("found", "the version that came instead"),
    _us("since", "when it was noticed"),
    _us("closed_at", "when it was closed", null=True),
    _short("how", "arrived, fetched, rebuilt, or a person's reason"),
    comment="versions that did not come",
)

replay_run: Final = Table(
    "replay_run",
    metadata,
    _text("name", "of the replay", key=True),
    _text("consumer", "who handles the messages again"),
    _text("selection", "which messages, as JSON"),
    _text("state", "running, stopped, failed, finished or abandoned"),
    _short("cursor", "how far it is, as JSON"),
    _count("done", "messages so far"),
    _count("failed", "failures so far"),
    _short("actor", "who began it"),
    _us("began_at", "when"),
    _us("updated_at", "when it went on last"),
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
    _us("at", "when"),
    _text("actor", "who"),
    _text("act", "what"),
    _short("consumer", "about whose message"),
    _short("message_id", "about which message"),
    _short("reason", "why"),
    _short("details", "JSON"),
    _text("previous_hash", "of the entry before"),
    _text("hash", "of this entry"),
    Index("ix_audit_entry_message", "consumer", "message_id"),
    comment="what operators did; each entry carries the hash of the one before",
)

audit_head: Final = Table(
    "audit_head",
    metadata,
    Column("only_row", Integer, primary_key=True, autoincrement=False, comment="1"),
    _count("number", "of the last entry"),
    _text("hash", "of the last entry"),
    CheckConstraint("only_row = 1", name="only_row"),
    comment="the end of the audit trail; appending locks it",
)

semel_messaging: Final = Table(
    "semel_messaging",
    metadata,
    Column("only_row", Integer, primary_key=True, autoincrement=False, comment="1"),
    _count("version", "of these tables"),
    CheckConstraint("only_row = 1", name="only_row"),
    comment="the version of semel's messaging tables",
)
