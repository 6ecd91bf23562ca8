"""The statements that turn staged rows into visible rows, and the token that describes them.

Names are kept exactly as written, and always quoted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any, Final

from semel.errors import Misuse, NeedsOperator
from semel.pipeline.txn import CycleId, SinkTxnId

_PART: Final = r'"(?:[^"]|"")+"|[^".]+'
_TABLE: Final = re.compile(rf"(?:({_PART})\.)?({_PART})")


def quoted(name: str) -> str:
    """Return *name* as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Return *value* as a string constant, valid for any standard_conforming_strings."""
    text = "'" + value.replace("'", "''") + "'"
    return f" E{text.replace(chr(92), chr(92) * 2)}" if "\\" in text else text


@dataclass(frozen=True, slots=True)
class TableName:
    """A table, with its schema if that is known.

    Upper and lower case are kept, as if everything were quoted: ``Entries`` is not
    ``entries``.  A dot separates the schema; double quotes protect a dot in a name.
    """

    schema: str | None
    table: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read ``table``, ``schema.table`` or ``"odd.schema"."odd table"``.

        Raises:
            Misuse: it is none of these.
        """
        found = _TABLE.fullmatch(text)
        if found is None:
            raise Misuse(f"{text!r} is not the name of a table: write schema.table or table")
        return cls(_unquoted(found[1]) if found[1] else None, _unquoted(found[2]))

    def __str__(self) -> str:
        parts = [self.schema, self.table] if self.schema else [self.table]
        return ".".join(quoted(part) for part in parts)


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


class Write(StrEnum):
    """What happens to a row whose key exists already."""

    APPEND = "append"
    """The constraint refuses it, before the decision."""

    IGNORE = "ignore"
    """The existing row stays."""

    UPSERT = "upsert"
    """The new row replaces it; with a version column, only if its version is higher."""


MODES: Final = ("staging", "prepared")


@dataclass(frozen=True, slots=True)
class PreparedToken:
    """The content of a token: everything that another process needs to commit or abort."""

    mode: str
    cycle: str
    attempt: str
    digest: str
    rows: int
    row_hash: int
    target: str
    tasks: int
    """The number of pieces: of staging tables, or of prepared transactions."""

    pieces: str
    """A hash of their names, which are in the books: a thousand would not fit into a token."""

    columns: tuple[tuple[str, str], ...] = ()
    """Names, each with the type to cast to or an empty text."""

    write: str = Write.APPEND
    key: tuple[str, ...] = ()
    version_column: str = ""
    cycle_column: str = ""
    overriding: bool = False
    """Identity columns, which the server numbers, are written."""

    fixed: tuple[str, ...] = ()
    """Columns that an update must not change."""

    schema: str = ""
    """The rows' Arrow schema, if they can be read back exactly."""

    rejects: str = ""
    """The table for rows that can never be written, if the sink has one."""

    rejected: int = 0
    """How many rows went there when the attempt was prepared."""

    @property
    def seal(self) -> str:
        """A hash of the whole token: the books keep it, and a token that differs is refused.

        Without the number of rejected rows: it is known after the books are written.
        """
        told = self.token() | {"rejected": 0}
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def token(self) -> dict[str, Any]:
        """Return the token as the ledger gives it back: tuples are lists in JSON."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return fields

    @classmethod
    def of(cls, token: Mapping[str, Any], txn: SinkTxnId) -> PreparedToken:
        """Read a token.

        Raises:
            NeedsOperator: it is not this transaction's, or not a token of this sink.
        """
        if {*token} != {each.name for each in fields(cls)} or token["mode"] not in MODES:
            raise NeedsOperator(f"{txn}: the token is not one of this sink's")
        promise = cls(**{name: _as_tuples(value) for name, value in token.items()})
        if not _are_columns(promise.columns):
            raise NeedsOperator(f"{txn}: the token's columns are not pairs of texts")
        if (promise.cycle, promise.attempt) != (txn.cycle.label, txn.attempt):
            raise NeedsOperator(
                f"{txn}: the token belongs to {promise.cycle}.{str(promise.attempt)[:8]}"
            )
        return promise


def hash_of(pieces: Sequence[str]) -> str:
    """Return a hash of the names of pieces, in their order."""
    return hashlib.sha256("\n".join(pieces).encode()).hexdigest()


def _are_columns(found: Any) -> bool:
    pairs = found if isinstance(found, tuple) else [found]
    return all(isinstance(p, tuple) and [type(part) for part in p] == [str, str] for p in pairs)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def cycle_text(cycle: CycleId) -> str:
    """Return a cycle's name in the cycle column: readable, and unique across ledgers.

    ``payments/main/g1.b42@5f0c2d1e``: app, query, generation and batch; then the scope's hash,
    because two ledgers may have an app of the same name.
    """
    return f"{cycle}@{cycle.scope.slug[:8]}"


def inserts(promise: PreparedToken, tables: Sequence[str], cycle: CycleId) -> list[str]:
    """Return the statements that insert the staged rows of *tables* into the target."""
    if tables and promise.write == Write.UPSERT:
        # One statement, so that the server itself refuses a key that occurs twice.
        return [insert(promise, union(promise, tables), cycle)]
    where = f" WHERE s.{REASON} IS NULL" if promise.rejects else ""
    return [insert(promise, table, cycle, where) for table in tables]


def insert(promise: PreparedToken, rows: str, cycle: CycleId, where: str = "") -> str:
    """Return one INSERT of *rows*, which is a table or a query in brackets."""
    names = [quoted(name) for name, _ in promise.columns]
    values = [f"s.{quoted(name)}" + (f"::{to}" if to else "") for name, to in promise.columns]
    if promise.cycle_column:
        names.append(quoted(promise.cycle_column))
        values.append(literal(cycle_text(cycle)))
    overriding = " OVERRIDING SYSTEM VALUE" if promise.overriding else ""
    return (
        f"INSERT INTO {promise.target} AS t ({', '.join(names)}){overriding} "
        f"SELECT {', '.join(values)} FROM {rows} AS s{where}{_on_conflict(promise, names)}"
    )


def union(promise: PreparedToken, tables: Sequence[str]) -> str:
    """Return the union of all *tables*."""
    names = ", ".join(quoted(name) for name, _ in promise.columns)
    where = f" WHERE {REASON} IS NULL" if promise.rejects else ""
    return f"({' UNION ALL '.join(f'SELECT {names} FROM {table}{where}' for table in tables)})"


# Of a sink with rejects=, a staging table has two more columns: why a row cannot be written,
# and the row as JSON.  All other columns of such a row are null.
REASON: Final = "semel_reason"
ROW: Final = "semel_row"


def create_rejects(rejects: TableName | str) -> str:
    """Return the statement for a table of rejected rows."""
    return (
        f"CREATE TABLE {rejects} (sink text, target text, cycle text, reason text, "
        f"sqlstate text, rejected json, at timestamptz DEFAULT pg_catalog.clock_timestamp())"
    )


def insert_reject(rejects: TableName | str) -> str:
    """Return the beginning of the statement that writes a rejected row."""
    return f"INSERT INTO {rejects} (sink, target, cycle, reason, sqlstate, rejected) SELECT"


def reject(
    promise: PreparedToken, sink: str, cycle: CycleId, table: str, why: str = "", state: str = ""
) -> str:
    """Return the statement that diverts the rows that could not be encoded.

    With *why*, all rows of *table*, which the server has refused, are diverted.
    """
    facts = ", ".join(literal(fact) for fact in (sink, promise.target, cycle_text(cycle)))
    reason = literal(why) if why else f"s.{REASON}"
    row = f"{as_json(REASON, ROW)}::pg_catalog.json" if why else f"s.{ROW}::pg_catalog.json"
    where = "" if why else f" WHERE s.{REASON} IS NOT NULL"
    return (
        f"{insert_reject(promise.rejects)} "
        f"{facts}, {reason}, {literal(state)}, {row} FROM {table} AS s{where}"
    )


def as_json(*without: str) -> str:
    """Return the row *s* as JSON; it runs with the role's own path, so names are qualified."""
    less = "".join(f" OPERATOR(pg_catalog.-) '{name}'" for name in without)
    return f"(pg_catalog.to_jsonb(s){less})"


def newest(promise: PreparedToken, rows: str) -> str:
    """Return only the row with the highest version of every key.

    Rows of equal version are ordered by their whole text, so that a repeated run chooses
    the same row.
    """
    keys = ", ".join(cast(promise, name, "u") for name in promise.key)
    version = cast(promise, promise.version_column, "u")
    return (
        f"(SELECT DISTINCT ON ({keys}) u.* FROM {rows} AS u "
        f"ORDER BY {keys}, {version} DESC NULLS LAST, u::pg_catalog.text DESC)"
    )


def repeated_keys(promise: PreparedToken, rows: str) -> str:
    """Return the query for the keys that occur more than once."""
    keys = ", ".join(cast(promise, name, "u") for name in promise.key)
    return (
        f"SELECT pg_catalog.concat_ws(', ', {keys}), pg_catalog.count(*) FROM {rows} AS u "
        f"GROUP BY {keys} HAVING pg_catalog.count(*) OPERATOR(pg_catalog.>) 1 ORDER BY 1 LIMIT 3"
    )


def cast(promise: PreparedToken, name: str, alias: str) -> str:
    """Return a staged column in the type of its target."""
    to = dict(promise.columns).get(name, "")
    return f"{alias}.{quoted(name)}" + (f"::{to}" if to else "")


def _on_conflict(promise: PreparedToken, names: Sequence[str]) -> str:
    key = f" ({', '.join(map(quoted, promise.key))})" if promise.key else ""
    match promise.write:
        case Write.IGNORE:
            return f" ON CONFLICT{key} DO NOTHING"
        case Write.UPSERT:
            kept = {quoted(name) for name in (*promise.key, *promise.fixed)}
            changes = ", ".join(f"{n} = EXCLUDED.{n}" for n in names if n not in kept)
            if not changes:
                return f" ON CONFLICT{key} DO NOTHING"
            return f" ON CONFLICT{key} DO UPDATE SET {changes}{_guard(promise)}"
    return ""


def _guard(promise: PreparedToken) -> str:
    if not promise.version_column:
        return ""
    version = quoted(promise.version_column)
    return f" WHERE t.{version} IS NULL OR EXCLUDED.{version} OPERATOR(pg_catalog.>) t.{version}"
