"""The tables of what people do: to messages, in a replay, and as the trail of all of it."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, CheckConstraint, Column, Identity, Index, Integer, Table

from semel.sqlalchemy.columns import (
    NUMBER,
    counted,
    metadata,
    originals,
    payload_bytes,
    short_text,
    text_column,
    time_us,
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
    short_text("details", "JSON"),
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
