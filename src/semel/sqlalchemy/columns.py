"""The metadata that the tables of the messaging half are in, and the columns that several have."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Identity, Integer, LargeBinary, MetaData, Text, text

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


def text_column(name: str, comment: str, *, key: bool = False, null: bool = False) -> Column[str]:
    """Return a column of text."""
    return Column(name, Text, primary_key=key, nullable=null, comment=comment)


def short_text(name: str, comment: str) -> Column[str]:
    """Return a column of text that is never null; empty says nothing."""
    return Column(name, Text, nullable=False, server_default="", comment=comment)


def time_us(name: str, comment: str, *, null: bool = False) -> Column[int]:
    """Return a column of a time in microseconds."""
    return Column(
        name, BigInteger, nullable=null, server_default=None if null else text("0"), comment=comment
    )


def counted(name: str, comment: str) -> Column[int]:
    """Return a column of a number that begins at 0."""
    return Column(name, BigInteger, nullable=False, server_default=text("0"), comment=comment)


def payload_bytes(comment: str) -> Column[bytes]:
    """Return the column of a message's payload."""
    return Column("payload", LargeBinary, nullable=True, comment=comment)


def place() -> Column[int]:
    """Return the column of the order of arrival."""
    return Column(
        "place", NUMBER, Identity(), primary_key=True, comment="order of arrival; given here"
    )


def originals() -> Column[str]:
    """Return the column of ids and keys that are kept hashed elsewhere in the row."""
    return text_column(
        "originals", "JSON: ids and keys as they came, where a column has a hash", null=True
    )


def origin() -> list[Column[int] | Column[str]]:
    """Return where a message came from, and what else it carried."""
    return [
        Column("partition", Integer, nullable=True, comment="of the original record"),
        Column("offset", BigInteger, nullable=True, comment="of the original record"),
        short_text("headers", "JSON object of base64; empty: none, or erased"),
        time_us("timestamp", "the broker's time of the record"),
        short_text("payload_hash", "sha256 of the payload's bytes"),
        short_text("message_type", "the event's type"),
        short_text("schema_version", "as the producer said"),
        short_text("correlation_id", "as the producer said"),
    ]
