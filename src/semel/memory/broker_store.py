"""The logs and groups of a broker in SQLite: in memory for one process, in a file for several."""

from __future__ import annotations

import os
import pickle
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from semel.errors import Misuse, NeedsOperator
from semel.memory.broker_groups import Group
from semel.message import Coordinates, Partition, Record, headers_from, pairs_of
from semel.messaging.receive.broker import Outgoing

# A transaction takes well under a millisecond; this long only a stopped process holds the lock.
BUSY_SECONDS: Final = 30.0

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS topic (name TEXT PRIMARY KEY, partitions INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS bounds (
    topic TEXT, partition INTEGER, first INTEGER NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS record (
    topic TEXT, partition INTEGER, offset INTEGER, body BLOB NOT NULL,
    PRIMARY KEY (topic, partition, offset)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS producer (
    name TEXT, topic TEXT, partition INTEGER, sequence INTEGER NOT NULL,
    PRIMARY KEY (name, topic, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS consumer_group (name TEXT PRIMARY KEY, body BLOB NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message on its way into the log of one partition."""

    partition: Partition
    message: Outgoing
    timestamp: float
    producer: str
    sequence: int
    """The producer's own count; an entry that the log has already is not appended again."""


class BrokerStore:
    """Logs with offsets, and consumer groups; every call is one transaction.

    Threads may share it, and processes may share its file; a partition that does not exist is
    `Misuse`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._inherited: list[sqlite3.Connection] = []

    def topics(self) -> Mapping[str, int]:
        """Return the number of partitions of each topic."""
        return dict(self._ask("SELECT name, partitions FROM topic ORDER BY name"))

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic, or add partitions to it."""
        with self._transaction() as connection:
            before = self.topics().get(topic, 0)
            if partitions < max(before, 1):
                raise Misuse(f"topic {topic} has {before} partitions and cannot have {partitions}")
            connection.execute("INSERT OR REPLACE INTO topic VALUES (?, ?)", (topic, partitions))
            connection.executemany(
                "INSERT OR IGNORE INTO bounds VALUES (?, ?, 0, 0)",
                [(topic, number) for number in range(partitions)],
            )

    def append(self, entries: Sequence[Entry]) -> Sequence[Coordinates]:
        """Append all entries or none; return the coordinates of the new ones."""
        with self._transaction():
            return [at for entry in entries if (at := self._append(entry)) is not None]

    def _append(self, entry: Entry) -> Coordinates | None:
        topic, number = entry.partition.topic, entry.partition.number
        is_new = self._ask(
            "INSERT INTO producer VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET sequence = excluded.sequence WHERE sequence < excluded.sequence RETURNING 1",
            (entry.producer, topic, number, entry.sequence),
        )
        if not is_new:
            return None
        _, offset = self.bounds(entry.partition)
        at, sent = Coordinates(topic, number, offset), entry.message
        headers = headers_from(pairs_of(sent.headers))
        record = Record(at, sent.value, sent.key, headers, entry.timestamp)
        body = pickle.dumps(record)
        self._ask("INSERT INTO record VALUES (?, ?, ?, ?)", (topic, number, offset, body))
        self.skip(entry.partition, 1)
        return at

    def read(self, partition: Partition, first: int, last: int, limit: int) -> list[Record]:
        """Return at most *limit* records from *first* to *last*, both included."""
        rows = self._ask(
            "SELECT body FROM record WHERE topic = ? AND partition = ? "
            "AND offset BETWEEN ? AND ? ORDER BY offset LIMIT ?",
            (partition.topic, partition.number, first, last, limit),
        )
        return [pickle.loads(body) for (body,) in rows]

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset that exists and the one that the next record gets."""
        rows = self._ask(
            "SELECT first, next FROM bounds WHERE topic = ? AND partition = ?",
            (partition.topic, partition.number),
        )
        if not rows:
            raise Misuse(f"there is no partition {partition}; create its topic first")
        ((first, next_offset),) = rows
        return first, next_offset

    def check_readable(self, partition: Partition, offset: int) -> tuple[int, int]:
        """Return the bounds; refuse to read before the start of the log or beyond its end.

        Raises:
            NeedsOperator: continuing would skip records silently.
        """
        start, end = self.bounds(partition)
        if offset < start:
            raise NeedsOperator(
                f"{partition}: offset {offset} was requested and the log starts at {start}; the "
                f"records between them are gone; commit {start} to continue without them"
            )
        if offset > end:
            raise NeedsOperator(
                f"{partition}: offset {offset} was requested and the log ends at {end}; it was "
                f"truncated, or a wrong offset was committed"
            )
        return start, end

    def skip(self, partition: Partition, offsets: int) -> None:
        """Use up offsets without records."""
        self._ask(
            "UPDATE bounds SET next = next + ? WHERE topic = ? AND partition = ?",
            (offsets, partition.topic, partition.number),
        )

    def drop(self, partition: Partition, offsets: Sequence[int]) -> None:
        """Remove single records; their offsets stay used."""
        with self._transaction() as connection:
            connection.executemany(
                "DELETE FROM record WHERE topic = ? AND partition = ? AND offset = ?",
                [(partition.topic, partition.number, offset) for offset in offsets],
            )

    def trim(self, partition: Partition, up_to: int) -> None:
        """Remove every record before *up_to*; the log starts there."""
        place = (up_to, partition.topic, partition.number)
        with self._transaction() as connection:
            start, end = self.bounds(partition)
            if not start <= up_to <= end:
                raise Misuse(
                    f"{partition} has the offsets {start} to {end}; it cannot start at {up_to}"
                )
            connection.execute(
                "DELETE FROM record WHERE offset < ? AND topic = ? AND partition = ?", place
            )
            connection.execute(
                "UPDATE bounds SET first = ? WHERE topic = ? AND partition = ?", place
            )

    @contextmanager
    def group(self, name: str) -> Iterator[Group]:
        """Change a group: the changes of the block are stored, unless it raises."""
        with self._transaction() as connection:
            before, group = self.peek(name), self.peek(name)
            yield group
            if group != before:
                connection.execute(
                    "INSERT OR REPLACE INTO consumer_group VALUES (?, ?)",
                    (name, pickle.dumps(group)),
                )

    def peek(self, name: str) -> Group:
        """Return a copy of a group."""
        rows = self._ask("SELECT body FROM consumer_group WHERE name = ?", (name,))
        return pickle.loads(rows[0][0]) if rows else Group(name)

    def groups(self) -> Sequence[str]:
        """Return the names of all groups."""
        return [name for (name,) in self._ask("SELECT name FROM consumer_group ORDER BY name")]

    def close(self) -> None:
        """Close the connection to a file; the store can be used again."""
        with self._lock:
            if self._path is not None and self._connection is not None:
                self._connection.close()
                self._connection = None

    def _ask(self, statement: str, arguments: Sequence[object] = ()) -> list[Any]:
        with self._lock:
            return self._open().execute(statement, arguments).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def _open(self) -> sqlite3.Connection:
        """Return this process's connection: one that came through a fork is not it."""
        if self._connection is not None and self._pid != os.getpid():
            # Kept, because closing it here could end the parent's locks (sqlite.org/howtocorrupt).
            self._inherited.append(self._connection)
            self._connection = None
        if self._connection is None:
            self._connection = _connect(self._path)
            self._pid = os.getpid()
        return self._connection


def _connect(path: Path | None) -> sqlite3.Connection:
    """Open the database, making the tables where they are missing."""
    connection = sqlite3.connect(
        path or ":memory:", timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    # The pages of a process that is killed are in the kernel's hands already.
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
    return connection
