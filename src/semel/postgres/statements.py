"""The statements that turn staged rows into visible ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from semel.errors import NeedsOperator
from semel.pipeline.txn import CycleId, SinkTxnId
from semel.postgres.names import literal, quoted


class Write(StrEnum):
    """What happens to a row whose key is there already."""

    APPEND = "append"
    """The constraint's own error, before the decision."""

    IGNORE = "ignore"
    """The row that is there stays."""

    UPSERT = "upsert"
    """The new row replaces it; with a version column, only if its version is higher."""


@dataclass(frozen=True, slots=True)
class PreparedToken:
    """What a token says: all that another process needs to carry the transaction through."""

    mode: str
    cycle: str
    attempt: str
    digest: str
    rows: int
    row_hash: int
    target: str
    pieces: tuple[str, ...]
    """Staging tables, or the names of prepared transactions."""

    columns: tuple[tuple[str, str], ...] = ()
    """Names, each with the type to cast to or an empty text."""

    write: str = Write.APPEND
    key: tuple[str, ...] = ()
    version_column: str = ""
    cycle_column: str = ""
    overriding: bool = False
    """Columns that the server numbers itself are written."""

    fixed: tuple[str, ...] = ()
    """Columns that an update must leave as they are."""

    schema: str = ""
    """The rows' Arrow schema, if they can be read back exactly."""

    def token(self) -> dict[str, Any]:
        """Write the promise as JSON can hold it."""
        fields = asdict(self)
        fields["columns"] = [list(column) for column in self.columns]
        for name in ("pieces", "key", "fixed"):
            fields[name] = list(fields[name])
        return fields

    @classmethod
    def of(cls, token: Mapping[str, Any], txn: SinkTxnId) -> PreparedToken:
        """Read a token.

        Raises:
            NeedsOperator: it is not this transaction's, or not a token at all.
        """
        try:
            fields = dict(token)
            fields["columns"] = tuple((name, cast) for name, cast in fields["columns"])
            for name in ("pieces", "key", "fixed"):
                fields[name] = tuple(fields[name])
            promise = cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise NeedsOperator(f"{txn}: the token is not one of this sink's") from error
        if (promise.cycle, promise.attempt) != (txn.cycle.label, txn.attempt):
            raise NeedsOperator(
                f"{txn}: the token belongs to {promise.cycle}.{promise.attempt[:8]}"
            )
        return promise


def cycle_text(cycle: CycleId) -> str:
    """Name a cycle in the cycle column: readable, and unique across ledgers.

    ``payments/main/g1.b42@5f0c2d1e``: app, query, generation and batch; then the scope's hash,
    because two ledgers may have an app of the same name.
    """
    return f"{cycle}@{cycle.scope.slug[:8]}"


def inserts(promise: PreparedToken, schema: str, cycle: CycleId) -> list[str]:
    """Write the statements that bring the staged rows into the target."""
    tables = [f"{quoted(schema)}.{quoted(piece)}" for piece in promise.pieces]
    if not tables:
        return []
    if promise.write == Write.UPSERT:
        # One statement, so that the server itself notices a key that comes twice.
        return [insert(promise, union(promise, tables), cycle)]
    return [insert(promise, table, cycle) for table in tables]


def insert(promise: PreparedToken, rows: str, cycle: CycleId, where: str = "") -> str:
    """Write one INSERT of *rows*, which is a table or a query in brackets."""
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
    """Put the rows of all *tables* together."""
    names = ", ".join(quoted(name) for name, _ in promise.columns)
    return f"({' UNION ALL '.join(f'SELECT {names} FROM {table}' for table in tables)})"


def newest(promise: PreparedToken, rows: str) -> str:
    """Keep only the row with the highest version of every key.

    Rows of equal version are told apart by their whole text, so that it is the same row
    every time.
    """
    keys = ", ".join(_cast(promise, name, "u") for name in promise.key)
    version = _cast(promise, promise.version_column, "u")
    return (
        f"(SELECT DISTINCT ON ({keys}) u.* FROM {rows} AS u "
        f"ORDER BY {keys}, {version} DESC NULLS LAST, u::text DESC)"
    )


def repeated_keys(promise: PreparedToken, rows: str) -> str:
    """Ask which keys come more than once."""
    keys = ", ".join(_cast(promise, name, "u") for name in promise.key)
    return (
        f"SELECT concat_ws(', ', {keys}), count(*) FROM {rows} AS u "
        f"GROUP BY {keys} HAVING count(*) > 1 ORDER BY 1 LIMIT 3"
    )


def _cast(promise: PreparedToken, name: str, alias: str) -> str:
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
    return f" WHERE t.{version} IS NULL OR EXCLUDED.{version} > t.{version}"
