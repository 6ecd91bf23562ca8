"""The memory broker, kept in a file: several processes of one machine share it.

For tests that kill real processes.  A process that is killed stops being heard of,
and the others get its partitions when its session has run out; a process that was
stopped meanwhile finds itself fenced.  Nothing is promised for a machine that goes
down: the file is not synced.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.memory.broker import MAX_MESSAGE_BYTES, MemoryBroker
from semel.memory.broker_groups import Group, GroupMember, Patience
from semel.memory.broker_store import Entry, check_growth, check_trim, no_such, record_of
from semel.message import Coordinates, Partition, Record, headers_from_text, headers_to_text

# A transaction takes well under a millisecond; this long only a stopped process holds the lock.
BUSY_SECONDS: Final = 30.0

SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS topic (name TEXT PRIMARY KEY, partitions INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS bounds (
    topic TEXT, partition INTEGER, first INTEGER NOT NULL, next INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS record (
    topic TEXT, partition INTEGER, offset INTEGER,
    value BLOB, key BLOB, headers TEXT NOT NULL, timestamp REAL NOT NULL,
    PRIMARY KEY (topic, partition, offset)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS producer (
    name TEXT, topic TEXT, partition INTEGER, sequence INTEGER NOT NULL,
    PRIMARY KEY (name, topic, partition)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS consumer_group (name TEXT PRIMARY KEY, body TEXT NOT NULL);
"""


class FileBroker(MemoryBroker):
    """A `MemoryBroker` whose logs and groups are in a file; pickles as its path.

    What tells the dead from the living is the machine's monotonic clock, which all of its
    processes share; a change of the wall clock changes nothing.
    """

    tick_seconds: ClassVar[float] = 0.02
    """How often a waiting member looks what other processes have done."""

    def __init__(
        self,
        path: str | Path,
        topics: Mapping[str, int] | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        patience: Patience | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Open the broker in the file at *path*, making it and its *topics* where missing."""
        self.path = Path(path).absolute()
        super().__init__(
            topics,
            clock=clock,
            patience=patience,
            max_message_bytes=max_message_bytes,
            store=FileBrokerStore(self.path),
        )

    def __reduce__(self) -> Any:
        made = partial(
            FileBroker,
            clock=self.clock,
            patience=self.patience,
            max_message_bytes=self.max_message_bytes,
        )
        return made, (str(self.path),)


class FileBrokerStore:
    """A `semel.memory.broker_store.BrokerStore` in a SQLite file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        self._inherited: list[sqlite3.Connection] = []

    def topics(self) -> Mapping[str, int]:
        return dict(self._ask("SELECT name, partitions FROM topic ORDER BY name"))

    def create(self, topic: str, partitions: int) -> None:
        with self._transaction() as connection:
            check_growth(topic, self.topics().get(topic, 0), partitions)
            connection.execute("INSERT OR REPLACE INTO topic VALUES (?, ?)", (topic, partitions))
            connection.executemany(
                "INSERT OR IGNORE INTO bounds VALUES (?, ?, 0, 0)",
                [(topic, number) for number in range(partitions)],
            )

    def append(self, entries: Sequence[Entry]) -> Sequence[Coordinates]:
        with self._transaction():
            return [at for entry in entries if (at := self._append(entry)) is not None]

    def _append(self, entry: Entry) -> Coordinates | None:
        place = (entry.partition.topic, entry.partition.number)
        is_new = self._ask(
            "INSERT INTO producer VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET sequence = excluded.sequence WHERE sequence < excluded.sequence RETURNING 1",
            (entry.producer, *place, entry.sequence),
        )
        if not is_new:
            return None
        _, offset = self.bounds(entry.partition)
        record = record_of(entry, offset)
        headers = headers_to_text(record.headers)
        self._ask(
            "INSERT INTO record VALUES (?, ?, ?, ?, ?, ?, ?)",
            (*place, offset, record.value, record.key, headers, record.timestamp),
        )
        self.skip(entry.partition, 1)
        return record.at

    def read(self, partition: Partition, first: int, last: int, limit: int) -> Sequence[Record]:
        rows = self._ask(
            "SELECT offset, value, key, headers, timestamp FROM record WHERE topic = ? "
            "AND partition = ? AND offset BETWEEN ? AND ? ORDER BY offset LIMIT ?",
            (partition.topic, partition.number, first, last, limit),
        )
        return [
            Record(
                Coordinates(partition.topic, partition.number, offset),
                value,
                key,
                headers_from_text(headers),
                timestamp,
            )
            for offset, value, key, headers, timestamp in rows
        ]

    def bounds(self, partition: Partition) -> tuple[int, int]:
        rows = self._ask(
            "SELECT first, next FROM bounds WHERE topic = ? AND partition = ?",
            (partition.topic, partition.number),
        )
        if not rows:
            raise no_such(partition)
        ((first, next_offset),) = rows
        return first, next_offset

    def skip(self, partition: Partition, offsets: int) -> None:
        self._ask(
            "UPDATE bounds SET next = next + ? WHERE topic = ? AND partition = ?",
            (offsets, partition.topic, partition.number),
        )

    def drop(self, partition: Partition, offsets: Sequence[int]) -> None:
        with self._transaction() as connection:
            connection.executemany(
                "DELETE FROM record WHERE topic = ? AND partition = ? AND offset = ?",
                [(partition.topic, partition.number, offset) for offset in offsets],
            )

    def trim(self, partition: Partition, up_to: int) -> None:
        place = (partition.topic, partition.number)
        with self._transaction() as connection:
            check_trim(partition, *self.bounds(partition), up_to)
            connection.execute(
                "DELETE FROM record WHERE topic = ? AND partition = ? AND offset < ?",
                (*place, up_to),
            )
            connection.execute(
                "UPDATE bounds SET first = ? WHERE topic = ? AND partition = ?", (up_to, *place)
            )

    @contextmanager
    def group(self, name: str) -> Iterator[Group]:
        with self._transaction() as connection:
            group = self.peek(name)
            before = group_to_json(group)
            yield group
            after = group_to_json(group)
            if after != before:
                connection.execute(
                    "INSERT OR REPLACE INTO consumer_group VALUES (?, ?)", (name, after)
                )

    def peek(self, name: str) -> Group:
        rows = self._ask("SELECT body FROM consumer_group WHERE name = ?", (name,))
        return group_of_json(name, rows[0][0]) if rows else Group(name)

    def groups(self) -> Sequence[str]:
        return [name for (name,) in self._ask("SELECT name FROM consumer_group ORDER BY name")]

    def close(self) -> None:
        """Give back the connection; the store can be used again."""
        with self._lock:
            if self._connection is not None:
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
            self._connection = connect(self._path)
            self._pid = os.getpid()
        return self._connection


def connect(path: Path) -> sqlite3.Connection:
    """Open the file, making the tables where they are missing."""
    connection = sqlite3.connect(
        path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    # The pages of a process that is killed are in the kernel's hands already.
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
    return connection


def group_to_json(group: Group) -> str:
    """Write a group down."""
    return json.dumps(
        {
            "generation": group.generation,
            "is_rebalancing": group.is_rebalancing,
            "rebalance_until": group.rebalance_until,
            "members": {
                name: {
                    "topics": member.topics,
                    "heard_at": member.heard_at,
                    "owned": [[p.topic, p.number] for p in sorted(member.owned)],
                    "is_ready": member.is_ready,
                }
                for name, member in group.members.items()
            },
            "committed": _offsets_to_json(group.committed),
            "rewinds": _offsets_to_json(group.rewinds),
        }
    )


def group_of_json(name: str, text: str) -> Group:
    """Read what `group_to_json` wrote."""
    body = json.loads(text)
    return Group(
        name,
        body["generation"],
        body["is_rebalancing"],
        body["rebalance_until"],
        {
            member: GroupMember(
                tuple(said["topics"]),
                said["heard_at"],
                frozenset(Partition(topic, number) for topic, number in said["owned"]),
                said["is_ready"],
            )
            for member, said in body["members"].items()
        },
        _offsets_of_json(body["committed"]),
        _offsets_of_json(body["rewinds"]),
    )


def _offsets_to_json(offsets: Mapping[Partition, int]) -> list[list[object]]:
    return [[p.topic, p.number, offset] for p, offset in offsets.items()]


def _offsets_of_json(said: Sequence[tuple[str, int, int]]) -> dict[Partition, int]:
    return {Partition(topic, number): offset for topic, number, offset in said}
