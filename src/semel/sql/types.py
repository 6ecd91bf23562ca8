"""The column types of the messaging half's tables, and the conversion of their values.

Times are microseconds since 1970, on the database's own clock.  The database writes and compares
leases and due times, so a wrong clock of a worker has no effect.  Headers are a JSON object of
base64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Dialect,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    bindparam,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from semel.message import Partition, headers_from_text, headers_to_text

MICROSECONDS: Final = 1_000_000
CONVERSION: Final = "semel_conversion"
"""The key in a column's ``info``: how a record's value is written, and how it is read."""

# The years 1 to 9999: the range that Python can show as a date.
FIRST_SECOND: Final = -62_135_596_800.0
LAST_SECOND: Final = 253_402_300_799.0


class now_us(FunctionElement[int]):
    """The database's current time, not the time at which the transaction began."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_us, "postgresql")
def _now_postgresql(element: now_us, compiler: Any, **options: Any) -> str:
    return "(extract(epoch from clock_timestamp()) * 1000000)::bigint"


@compiles(now_us, "sqlite")
def _now_sqlite(element: now_us, compiler: Any, **options: Any) -> str:
    # CURRENT_TIMESTAMP has whole seconds only; %f has milliseconds after the point.
    return (
        "(CAST(strftime('%s', 'now') AS INTEGER) * 1000000"
        " + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER) * 1000)"
    )


def to_us(seconds: float) -> int:
    """Turn seconds into microseconds."""
    return round(seconds * MICROSECONDS)


def time_to_us(seconds: float | None) -> int | None:
    """Turn a time into microseconds, limited to the years 1 to 9999.

    The time of a producer that writes nanoseconds for milliseconds does not fit into a BIGINT.
    """
    if seconds is None or math.isnan(seconds):
        return None if seconds is None else 0
    return to_us(min(max(seconds, FIRST_SECOND), LAST_SECOND))


def to_seconds(us: int | None) -> float:
    """Turn microseconds into seconds; 0 for None."""
    return 0.0 if us is None else us / MICROSECONDS


def seconds_or_none(us: int | None) -> float | None:
    """Turn microseconds into seconds; None for None."""
    return None if us is None else us / MICROSECONDS


class Numbers(TypeDecorator[Sequence[int]]):
    """A list of integers, sent as text that the database converts.

    asyncpg converts a real array element by element, which takes twice as long.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[int] | None, dialect: Dialect) -> str:
        """Return the list as an array literal of PostgreSQL, or as JSON for SQLite."""
        first, last = "{}" if dialect.name == "postgresql" else "[]"
        return first + ",".join(map(str, value or ())) + last


class among(FunctionElement[bool]):
    """The condition that ``column`` is one of the numbers in the parameter *name*."""

    type = Boolean()
    inherit_cache = True

    def __init__(self, column: ColumnElement[int], name: str) -> None:
        super().__init__(column, bindparam(name, type_=Numbers()))

    def self_group(self, against: Any = None) -> Any:
        """Return itself: SQLAlchemy would compare it with 1, and SQLite would use no index."""
        return self


@compiles(among, "postgresql")
def _among_postgresql(element: among, compiler: Any, **options: Any) -> str:
    column, numbers = (compiler.process(part, **options) for part in element.clauses)
    return f"{column} = ANY (({numbers})::bigint[])"


@compiles(among, "sqlite")
def _among_sqlite(element: among, compiler: Any, **options: Any) -> str:
    column, numbers = (compiler.process(part, **options) for part in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({numbers}))"


metadata: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)
"""The tables that `semel db create` creates; add it to Alembic's ``target_metadata``."""

# SQLite assigns row numbers only in a column of exactly the type INTEGER.
NUMBER: Final = BigInteger().with_variant(Integer(), "sqlite")


def text_column(name: str, comment: str, *, key: bool = False, null: bool = False) -> Column[str]:
    """Return a column of text."""
    return Column(name, Text, primary_key=key, nullable=null, comment=comment)


def short_text(name: str, comment: str, info: dict[Any, Any] | None = None) -> Column[str]:
    """Return a column of text that is never NULL; empty means unknown."""
    return Column(name, Text, nullable=False, server_default="", comment=comment, info=info or {})


def headers_text() -> Column[str]:
    """Return the column of a message's headers."""
    what = "JSON object, or list of pairs, of base64; empty: none, or erased"
    return short_text("headers", what, {CONVERSION: (headers_to_text, headers_from_text)})


def partitions_text(comment: str) -> Column[str]:
    """Return a column of partitions."""
    return short_text("partitions", comment, {CONVERSION: (partitions_to_text, _partitions)})


def partitions_to_text(partitions: Collection[Partition]) -> str:
    """Return partitions as a column has them."""
    return json.dumps(sorted([p.topic, p.number] for p in partitions))


def _partitions(text: str) -> frozenset[Partition]:
    return frozenset(Partition(*one) for one in json.loads(text))


def time_us(name: str, comment: str, *, null: bool = False) -> Column[int]:
    """Return a column of a time in microseconds."""
    return Column(
        name,
        BigInteger,
        nullable=null,
        server_default=None if null else text("0"),
        comment=comment,
        info={CONVERSION: (time_to_us, seconds_or_none)},
    )


def counted(name: str, comment: str) -> Column[int]:
    """Return a column of a number that is 0 by default."""
    return Column(name, BigInteger, nullable=False, server_default=text("0"), comment=comment)


def payload_bytes(comment: str) -> Column[bytes]:
    """Return the column of a message's payload."""
    return Column("payload", LargeBinary, nullable=True, comment=comment)


def partial_index(name: str, *columns: str, where: str) -> Index:
    """Return an index of the rows that fulfil a condition."""
    return Index(name, *columns, postgresql_where=text(where), sqlite_where=text(where))


def place() -> Column[int]:
    """Return the column of the order of arrival."""
    return Column(
        "place", NUMBER, Identity(), primary_key=True, comment="order of arrival; given here"
    )


def originals() -> Column[str]:
    """Return the column of original ids and keys whose hashes are in other columns."""
    return text_column(
        "originals", "JSON: ids and keys as they came, where a column has a hash", null=True
    )


def stored_message(payload: str) -> list[Column[Any]]:
    """Return the columns of a `StoredMessage`, without consumer and id."""
    return [
        text_column("key", "original key; sha256:… where it is long or no plain text", null=True),
        payload_bytes(payload),
        short_text("topic", "original topic"),
        Column("partition", Integer, nullable=True, comment="of the original record"),
        Column("offset", BigInteger, nullable=True, comment="of the original record"),
        headers_text(),
        time_us("timestamp", "the broker's time of the record"),
        short_text("payload_hash", "sha256 of the payload's bytes"),
        short_text("message_type", "the event's type"),
        short_text("schema_version", "as the producer said"),
        short_text("correlation_id", "as the producer said"),
        counted("attempts", "how often it was tried"),
        time_us("erased_at", "when its payload was erased", null=True),
        originals(),
    ]
