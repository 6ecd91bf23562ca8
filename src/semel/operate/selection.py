"""Which messages a replay is about, as data that a table can keep, and how they are found.

    Ids           messages by their ids
    Letters       dead letters
    Waiting       parked messages, or the whole queue of a key
    Offsets       a stretch of a topic's partition, read from the broker again
    Times         the same, by the broker's time

A replay keeps the selection that it was begun with: messages that come later are not part of
it, except those that are parked later and match its filter.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, TypeAlias, assert_never

from semel.codec import Unreadable
from semel.errors import Misuse
from semel.message import Message, Partition, Record
from semel.messaging.handler import Consumer
from semel.messaging.receive.broker import Reader
from semel.messaging.records import DeadLetterFilter as DeadLetterFilter
from semel.messaging.records import WaitingFilter as WaitingFilter
from semel.messaging.records import Waits, hash_of_key
from semel.operate.stores import OperatorDatabase, OperatorUnit

# The shortest time that a database stores: a letter of this moment is part of the replay.
MOMENT_SECONDS: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Ids:
    """Messages by their ids, wherever their payload is: waiting, dead, or in the inbox."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Letters:
    """Dead letters, the oldest first."""

    which: DeadLetterFilter = field(default_factory=DeadLetterFilter)
    before: float | None = None
    """Those that came before then; found when the replay begins."""

    @property
    def filter(self) -> DeadLetterFilter:
        """Which letters are meant, those that came later left out."""
        ends = [end for end in (self.which.until, self.before) if end is not None]
        return replace(self.which, until=min(ends, default=None))


@dataclass(frozen=True, slots=True)
class Waiting:
    """Messages in the waiting table, in the order in which they came."""

    which: WaitingFilter = field(default_factory=WaitingFilter)


@dataclass(frozen=True, slots=True)
class Offsets:
    """The records of a partition from *first* to *last*, both included."""

    partition: Partition
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Times:
    """The records of a partition that the broker got from *since* on and before *until*."""

    partition: Partition
    since: float
    until: float
    first: int = 0
    last: int = -1
    """The offsets that are looked through; found when the replay begins."""


Selection: TypeAlias = Ids | Letters | Waiting | Offsets | Times

KINDS: Final[Mapping[str, type[Selection]]] = {
    "ids": Ids,
    "letters": Letters,
    "waiting": Waiting,
    "offsets": Offsets,
    "times": Times,
}


def parked_key(key: str) -> Waiting:
    """Select everything that waits for a key, the parked message first."""
    return Waiting(WaitingFilter(key=key))


async def settled(
    selection: Selection, consumer: str, unit: OperatorUnit, reader: Reader | None
) -> Selection:
    """Return the selection with its times and offsets fixed, so a later run finds the same.

    Raises:
        Misuse: it needs a reader, or is about another consumer, or about nothing.
    """
    match selection:
        case Ids(()):
            raise Misuse("a replay by ids needs at least one id")
        case Letters(which):
            mine = replace(which, consumer=_mine(which.consumer, consumer))
            return Letters(mine, before=await unit.now() + MOMENT_SECONDS)
        case Waiting(which):
            return Waiting(replace(which, consumer=_mine(which.consumer, consumer)))
        case Offsets(first=first, last=last) if first > last or first < 0:
            raise Misuse(f"there are no offsets from {first} to {last}")
        case Times(partition, since, until):
            if since >= until:
                raise Misuse("a stretch of time begins before it ends")
            start, end = await need_reader(reader).bounds(partition)
            return replace(selection, first=start, last=end - 1)
        case Offsets():
            need_reader(reader)
            return selection
        case _:
            return selection


def asked(selection: Selection) -> Selection:
    """Return a selection as it was requested, without what `settled` found."""
    match selection:
        case Letters(which):
            return Letters(replace(which, consumer=None))
        case Waiting(which):
            return Waiting(replace(which, consumer=None))
        case Times(partition, since, until):
            return Times(partition, since, until)
        case _:
            return selection


def topic_of(selection: Selection) -> str | None:
    """Return the topic that all of its messages are of; None where it does not say."""
    match selection:
        case Offsets(partition) | Times(partition):
            return partition.topic
        case Letters(which):
            return which.topic
        case _:
            return None


def for_the_trail(selection: Selection) -> dict[str, Any]:
    """Return a selection as the audit trail keeps it, which is never erased: keys as hashes."""
    said: dict[str, Any] = json.loads(to_json(selection))
    which = said.get("which", {})
    if "key" in which:
        which["key_hash"] = hash_of_key(which.pop("key"))
    return said


def need_reader(reader: Reader | None) -> Reader:
    """Return the reader that a replay of a topic cannot do without.

    Raises:
        Misuse: there is none.
    """
    if reader is None:
        raise Misuse("a replay of a topic's records needs a reader of the broker")
    return reader


def _mine(named: str | None, consumer: str) -> str:
    if named not in (None, consumer):
        raise Misuse(f"the selection is about consumer {named}, the replay about {consumer}")
    return consumer


def to_json(selection: Selection) -> str:
    """Write a selection for a table."""
    (kind,) = (name for name, known in KINDS.items() if isinstance(selection, known))
    said = {f.name: _plain(getattr(selection, f.name)) for f in fields(selection)}
    return json.dumps({"kind": kind, **said}, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, DeadLetterFilter | WaitingFilter):
        return {name: said for name, said in asdict(value).items() if said is not None}
    if isinstance(value, Partition):
        return [value.topic, value.number]
    return value


def from_json(text: str) -> Selection:
    """Read what `to_json` wrote.

    Raises:
        Misuse: it is something else.
    """
    try:
        said = json.loads(text)
        return _read(said.pop("kind"), said)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Misuse(f"{text!r} is not a selection of messages") from error


def _read(kind: str, said: dict[str, Any]) -> Selection:
    match kind:
        case "ids":
            return Ids(tuple(said["ids"]))
        case "letters":
            return Letters(DeadLetterFilter(**said.pop("which")), **said)
        case "waiting":
            which = dict(said["which"])
            if "waits" in which:
                which["waits"] = Waits(which["waits"])
            return Waiting(WaitingFilter(**which))
        case "offsets":
            return Offsets(Partition(*said.pop("partition")), **said)
        case "times":
            return Times(Partition(*said.pop("partition")), **said)
        case _:
            raise KeyError(kind)


PAGE: Final = 200


@dataclass(frozen=True, slots=True)
class SelectedMessage:
    """One message that was selected."""

    message_id: str
    place: Any
    """Where the replay resumes after it; JSON."""

    arrival: Message | Unreadable | None = None
    """What the broker has; None where only our own tables are looked at."""


@dataclass(frozen=True, slots=True)
class MessageSource:
    """A selection, and where its messages are."""

    selection: Selection
    consumer: Consumer
    database: OperatorDatabase
    reader: Reader | None = None

    async def items(self, after: Any = None) -> AsyncGenerator[SelectedMessage, None]:
        """Find the messages after a place; None: from the beginning."""
        match self.selection:
            case Ids(ids):
                for number, message_id in enumerate(ids):
                    if after is None or number > after:
                        yield SelectedMessage(message_id, number)
            case Letters() | Waiting():
                async for item in self._stored(after):
                    yield item
            case Offsets(partition, first, last) | Times(partition, first=first, last=last):
                start = first if after is None else after + 1
                async for item in self._records(partition, start, last):
                    yield item
            case _ as never:
                assert_never(never)

    async def again(self, message_id: str, place: Any) -> SelectedMessage:
        """Find the message that a replay was trying."""
        if not isinstance(self.selection, Offsets | Times):
            return SelectedMessage(message_id, place)
        records = await need_reader(self.reader).read(self.selection.partition, place, place)
        return self._item(records[0]) if records else SelectedMessage(message_id, place)

    async def _stored(self, after: Any) -> AsyncGenerator[SelectedMessage, None]:
        while True:
            async with self.database.begin() as unit:
                page = await self._page(unit, after)
            for item in page:
                yield item
            if len(page) < PAGE:
                return
            after = page[-1].place

    async def _page(self, unit: OperatorUnit, after: Any) -> list[SelectedMessage]:
        match self.selection:
            case Letters(filter=which):
                which = replace(which, after=None if after is None else tuple(after))
                letters = await unit.dead_letters.outlines(which, PAGE)
                return [
                    SelectedMessage(one.message_id, [one.first_failed_at, one.message_id])
                    for one in letters
                ]
            case Waiting(which):
                later = which if after is None else replace(which, after_place=after)
                messages = await unit.waiting.outlines(later, PAGE)
                return [SelectedMessage(one.message_id, one.place) for one in messages]
            case _:
                return []

    async def _records(
        self, partition: Partition, first: int, last: int
    ) -> AsyncGenerator[SelectedMessage, None]:
        reader = need_reader(self.reader)
        for start in range(first, last + 1, PAGE):
            records = await reader.read(partition, start, min(start + PAGE - 1, last))
            for record in filter(self._is_meant, records):
                yield self._item(record)

    def _is_meant(self, record: Record) -> bool:
        if isinstance(self.selection, Times):
            return self.selection.since <= record.timestamp < self.selection.until
        return True

    def _item(self, record: Record) -> SelectedMessage:
        arrival = self.consumer.reading.read(record)
        return SelectedMessage(arrival.id, record.at.offset, arrival)
