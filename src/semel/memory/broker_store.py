"""The storage of a broker: logs with offsets, and consumer groups."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from semel.errors import Misuse, NeedsOperator
from semel.memory.broker_groups import Group
from semel.message import Coordinates, Partition, Record, headers_from, pairs_of
from semel.messaging.receive.broker import Outgoing


@dataclass(frozen=True, slots=True)
class Entry:
    """One message on its way into the log of one partition."""

    partition: Partition
    message: Outgoing
    timestamp: float
    producer: str
    sequence: int
    """The producer's own count; an entry that the log has already is not appended again."""


class BrokerStore(Protocol):
    """The logs and groups of a broker; every call is one transaction.

    A partition that does not exist is `Misuse`.
    """

    def topics(self) -> Mapping[str, int]:
        """Return the number of partitions of each topic."""
        ...

    def create(self, topic: str, partitions: int) -> None:
        """Create a topic, or add partitions to it."""
        ...

    def append(self, entries: Sequence[Entry]) -> Sequence[Coordinates]:
        """Append all entries or none; return the coordinates of the new ones."""
        ...

    def read(self, partition: Partition, first: int, last: int, limit: int) -> Sequence[Record]:
        """Return at most *limit* records from *first* to *last*, both included."""
        ...

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset that exists and the one that the next record gets."""
        ...

    def skip(self, partition: Partition, offsets: int) -> None:
        """Use up offsets without records."""
        ...

    def drop(self, partition: Partition, offsets: Sequence[int]) -> None:
        """Remove single records; their offsets stay used."""
        ...

    def trim(self, partition: Partition, up_to: int) -> None:
        """Remove every record before *up_to*; the log starts there."""
        ...

    def group(self, name: str) -> AbstractContextManager[Group]:
        """Change a group: the changes of the block are stored, unless it raises."""
        ...

    def peek(self, name: str) -> Group:
        """Return a group, without changing it."""
        ...

    def groups(self) -> Sequence[str]:
        """Return the names of all groups."""
        ...

    def close(self) -> None:
        """Close connections; the store can be used again."""
        ...


@dataclass(slots=True)
class _Log:
    """One partition."""

    start: int = 0
    end: int = 0
    offsets: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)


class MemoryBrokerStore:
    """A `BrokerStore` in memory; may be shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._topics: dict[str, int] = {}
        self._logs: dict[Partition, _Log] = {}
        self._groups: dict[str, Group] = {}
        self._sequences: dict[tuple[str, Partition], int] = {}

    def topics(self) -> Mapping[str, int]:
        with self._lock:
            return dict(self._topics)

    def create(self, topic: str, partitions: int) -> None:
        with self._lock:
            check_growth(topic, self._topics.get(topic, 0), partitions)
            self._topics[topic] = partitions
            for number in range(partitions):
                self._logs.setdefault(Partition(topic, number), _Log())

    def append(self, entries: Sequence[Entry]) -> Sequence[Coordinates]:
        appended = []
        with self._lock:
            logs = [self._log(entry.partition) for entry in entries]
            for entry, log in zip(entries, logs, strict=True):
                producer = (entry.producer, entry.partition)
                if self._sequences.get(producer, -1) >= entry.sequence:
                    continue
                self._sequences[producer] = entry.sequence
                record = record_of(entry, log.end)
                log.offsets.append(log.end)
                log.records.append(record)
                log.end += 1
                appended.append(record.at)
        return appended

    def read(self, partition: Partition, first: int, last: int, limit: int) -> Sequence[Record]:
        with self._lock:
            log = self._log(partition)
            begin = bisect_left(log.offsets, first)
            end = bisect_left(log.offsets, last + 1, lo=begin)
            return log.records[begin : min(end, begin + limit)]

    def bounds(self, partition: Partition) -> tuple[int, int]:
        with self._lock:
            log = self._log(partition)
            return log.start, log.end

    def skip(self, partition: Partition, offsets: int) -> None:
        with self._lock:
            self._log(partition).end += offsets

    def drop(self, partition: Partition, offsets: Sequence[int]) -> None:
        gone = set(offsets)
        with self._lock:
            log = self._log(partition)
            log.records = [record for record in log.records if record.at.offset not in gone]
            log.offsets = [record.at.offset for record in log.records]

    def trim(self, partition: Partition, up_to: int) -> None:
        with self._lock:
            log = self._log(partition)
            check_trim(partition, log.start, log.end, up_to)
            gone = bisect_left(log.offsets, up_to)
            del log.offsets[:gone], log.records[:gone]
            log.start = up_to

    @contextmanager
    def group(self, name: str) -> Iterator[Group]:
        """Change a group; the rules of a `Group` check before they change anything."""
        with self._lock:
            yield self._groups.setdefault(name, Group(name))

    def peek(self, name: str) -> Group:
        with self._lock:
            return self._groups.get(name) or Group(name)

    def groups(self) -> Sequence[str]:
        with self._lock:
            return list(self._groups)

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _log(self, partition: Partition) -> _Log:
        try:
            return self._logs[partition]
        except KeyError:
            raise no_such(partition) from None


def record_of(entry: Entry, offset: int) -> Record:
    """Return *entry* as the record at *offset*."""
    message = entry.message
    at = Coordinates(entry.partition.topic, entry.partition.number, offset)
    return Record(
        at, message.value, message.key, headers_from(pairs_of(message.headers)), entry.timestamp
    )


def no_such(partition: Partition) -> Misuse:
    """Return the error for a partition that does not exist."""
    return Misuse(f"there is no partition {partition}; create its topic first")


def check_growth(topic: str, before: int, after: int) -> None:
    """Refuse a topic without partitions, and one that would lose some.

    Raises:
        Misuse: it is one of them.
    """
    if after < max(before, 1):
        raise Misuse(f"topic {topic} has {before} partitions and cannot have {after}")


def check_trim(partition: Partition, start: int, end: int, up_to: int) -> None:
    """Refuse to trim outside the log.

    Raises:
        Misuse: *up_to* is not in the log.
    """
    if not start <= up_to <= end:
        raise Misuse(f"{partition} has the offsets {start} to {end}; it cannot start at {up_to}")


def check_readable(partition: Partition, start: int, end: int, offset: int) -> None:
    """Refuse to read before the start of the log or beyond its end.

    Raises:
        NeedsOperator: continuing would skip records silently.
    """
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
