"""Lean claims: 16 bytes of a message's id and 16 of its payload's hash, in a table for each day.

    yesterday and today     ask the table: its index is in memory
    days before             ask the day's Bloom filter, and the table for what it may contain

A claim is in the table of the day on which the final transaction of its cycle began.  Within a
day an id is unique by its key.  Across days it is unique because one pipeline runs the
consumer, and asks for the ids of a batch after the batch before was committed.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from semel.errors import Permanent, require
from semel.messaging.tables import lean_prefix
from semel.postgres.books import run
from semel.postgres.connect import TRUSTED, Connection
from semel.postgres.statements import literal, quoted

np: Any = require("numpy", "postgres")

# About one id in three hundred is looked up in vain.
BITS_PER_CLAIM: Final = 12
PROBES: Final = 7

_BLOCKS_AT_ONCE: Final = 8192
"""Of a table, while its filter is made: about a million ids."""


class LeanDay(NamedTuple):
    """The claims of one day."""

    table: str
    """Quoted, with its schema."""

    digest: str = ""
    """The sha256 of its filter; empty if it has none yet."""

    @property
    def filter_table(self) -> str:
        """The table with its filter, quoted."""
        return f'{self.table[:-1]}_filter"'


@dataclass(frozen=True)
class LeanClaims:
    """The tables with the lean claims of one consumer."""

    schema: str
    consumer: str

    @cached_property
    def _prefix(self) -> str:
        return lean_prefix(self.consumer)

    def _table(self, name: str) -> str:
        return f"{quoted(self.schema)}.{quoted(name)}"

    def today(self, connection: Connection) -> str:
        """Return the table that claims go to; create it in the open transaction.

        A rollback takes it away again, and the next attempt creates it.
        """
        day = "SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')"
        table = self._table(f"{self._prefix}{run(connection, [day])[0][0][0]}")
        columns = "id bytea PRIMARY KEY, hash bytea NOT NULL"
        owner = f"SELECT {TRUSTED} FROM pg_catalog.pg_class c WHERE c.oid = to_regclass"
        made = [
            f"CREATE TABLE IF NOT EXISTS {table} ({columns})",
            f"{owner}({literal(table)})",
        ]
        if run(connection, made)[1] != [(True,)]:
            raise Permanent(f"table {table} is another role's: drop it, or let that role run this")
        return table

    def days(self, connection: Connection) -> tuple[LeanDay, ...]:
        """List the days; first make the filters of those that are over.

        Yesterday has none yet: the server's clock may be set back.
        """
        listed = connection.execute(
            b"SELECT c.relname, coalesce(pg_catalog.obj_description(c.oid, 'pg_class'), ''), "
            b"right(c.relname, 8) < to_char(now() AT TIME ZONE 'UTC' - interval '1 day', "
            b"'YYYYMMDD') FROM pg_catalog.pg_class c "
            b"JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
            b"WHERE n.nspname = %s AND c.relname ~ %s AND c.relkind = 'r' AND "
            + TRUSTED.encode()
            + b" ORDER BY 1",
            [self.schema, f"^{self._prefix}[0-9]{{8}}$"],
        ).fetchall()
        return tuple(
            LeanDay(
                self._table(name),
                digest or (self._make_filter(connection, name) if is_over else ""),
            )
            for name, digest, is_over in listed
        )

    def _make_filter(self, connection: Connection, name: str) -> str:
        """Make the filter of a day that is over, and name it in the comment of its table."""
        table, filter_table = self._table(name), LeanDay(self._table(name)).filter_table
        claims, size = run(
            connection,
            [
                f"SELECT count(*) FROM {table}",
                f"SELECT pg_relation_size({literal(table)}) / "
                f"current_setting('block_size')::bigint",
            ],
        )
        bits = np.zeros(max(claims[0][0] * BITS_PER_CLAIM // 8, 8), np.uint8)
        for first in range(0, size[0][0], _BLOCKS_AT_ONCE):
            ids = connection.execute(
                f"SELECT string_agg(id, ''::bytea) FROM {table} WHERE ctid >= '({first},0)' "
                f"AND ctid < '({first + _BLOCKS_AT_ONCE},0)'".encode(),
                binary=True,
            ).fetchone()
            if ids is not None and ids[0]:
                for place in _places(ids[0], bits):
                    np.bitwise_or.at(bits, place >> 3, (1 << (place & 7)).astype(np.uint8))
        digest = hashlib.sha256(bits).hexdigest()
        with connection.transaction():
            run(
                connection,
                [
                    f"DROP TABLE IF EXISTS {filter_table}",
                    f"CREATE TABLE {filter_table} (bits bytea)",
                    f"COMMENT ON TABLE {table} IS {literal(digest)}",
                ],
            )
            connection.execute(f"INSERT INTO {filter_table} VALUES (%b)".encode(), [bits.tobytes()])
        return digest


def lean_id(stored: str) -> bytes:
    """Return the id of a claim, from the message's id as databases store it."""
    return hashlib.sha256(stored.encode()).digest()[:16]


INSERT: Final = """
INSERT INTO {lean} (id, hash)
SELECT substring(pg_catalog.sha256(pg_catalog.convert_to(s.message_id, 'UTF8')) FROM 1 FOR 16),
       substring(pg_catalog.decode(s.payload_hash, 'hex') FROM 1 FOR 16)
  FROM {rows} ORDER BY 1"""
"""The same id as `lean_id`, for every change that is a lean claim."""


def asked_of(
    days: Sequence[LeanDay],
    ids: Sequence[bytes],
    fetch: Callable[[str], bytes],
) -> Iterator[tuple[str, list[bytes]]]:
    """Yield each day's table with the ids to look for in it.

    *fetch* reads the filter of a table, once for each host.
    """
    known = {day.digest for day in days}
    for day in days:
        asked = [*ids]
        if day.digest:
            bits = _filter(day, known, fetch)
            found = np.ones(len(ids), bool)
            for place in _places(b"".join(ids), bits):
                found &= (bits[place >> 3] >> (place & 7).astype(np.uint8)) & 1 == 1
            asked = [one for one, may_be in zip(ids, found, strict=True) if may_be]
        if asked:
            yield day.table, asked


def _places(ids: bytes, bits: Any) -> Iterator[Any]:
    """Yield, for each probe, the bits of all ids: two numbers of an id give all of them."""
    pairs = np.frombuffer(ids, "<u8").reshape(-1, 2)
    first, step = pairs[:, 0], pairs[:, 1] | np.uint64(1)
    for _ in range(PROBES):
        yield (first % np.uint64(len(bits) * 8)).astype(np.int64)
        first = first + step


_filters: Final[dict[str, Any]] = {}
"""By digest: the filters that this process uses."""


def _filter(day: LeanDay, known: set[str], fetch: Callable[[str], bytes]) -> Any:
    """Return the bits of a day's filter, from a file that the processes of a host share."""
    bits = _filters.get(day.digest)
    if bits is None:
        for old in _filters.keys() - known:
            del _filters[old]
        bits = _filters[day.digest] = _mapped(day, known, fetch)
    return bits


def _mapped(day: LeanDay, known: set[str], fetch: Callable[[str], bytes]) -> Any:
    path = Path(tempfile.gettempdir()) / f"semel-filters-{os.getuid()}" / day.digest
    raw: bytes | None = None
    # Without a disk to share, each process has a copy of its own.
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.parent.stat().st_uid != os.getuid():
            raise PermissionError
        if not path.exists():
            raw = fetch(day.filter_table)
            for old in path.parent.glob(64 * "?"):
                if old.name not in known:
                    old.unlink(missing_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(raw)
            Path(file.name).replace(path)
        bits = np.memmap(path, np.uint8, "r")
        # A file that a crash has cut short would hide claims.
        if hashlib.sha256(bits).hexdigest() == day.digest:
            return bits
    return np.frombuffer(raw or fetch(day.filter_table), np.uint8)
