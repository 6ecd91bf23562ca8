"""Where a replay finds its messages, one after the other, from any place on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, assert_never

from semel.codec import Undecodable, Unreadable
from semel.message import Coordinates, Message, Partition, Record, raw_of, value_of
from semel.messaging.broker import Reader
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database
from semel.messaging.deadletters import DeadLetter
from semel.messaging.inboxes import message_of as stored_message
from semel.messaging.kept import message_of
from semel.messaging.reasons import ERASED_REASON, reason_of
from semel.messaging.selection import Ids, Letters, Offsets, Selection, Times, Waiting, need_reader

PAGE: Final = 200


@dataclass(frozen=True, slots=True)
class Item:
    """One message that was selected."""

    message_id: str
    place: Any
    """Where a replay goes on behind it; JSON."""

    arrival: Message | Unreadable | None = None
    """What the broker has; None where the message is in our own tables, if anywhere."""


@dataclass(frozen=True, slots=True)
class NoPayload:
    """A message that cannot be handled: nobody has it, or it cannot be read."""

    message_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Source:
    """A selection, and where its messages are."""

    selection: Selection
    consumer: Consumer
    database: Database
    reader: Reader | None = None

    async def items(self, after: Any = None) -> AsyncGenerator[Item, None]:
        """Find the messages behind a place, from the beginning where that is None."""
        match self.selection:
            case Ids(ids):
                for number, message_id in enumerate(ids):
                    if after is None or number > after:
                        yield Item(message_id, number)
            case Letters():
                async for item in self._letters(self.selection, after):
                    yield item
            case Waiting():
                async for item in self._waiting(self.selection, after):
                    yield item
            case Offsets(partition, first, last) | Times(partition, first=first, last=last):
                start = first if after is None else after + 1
                async for item in self._records(partition, start, last):
                    yield item
            case _ as never:
                assert_never(never)

    async def again(self, message_id: str, place: Any) -> Item:
        """Find one message again that a replay had in its hand."""
        if not isinstance(self.selection, Offsets | Times):
            return Item(message_id, place)
        records = await need_reader(self.reader).read(self.selection.partition, place, place)
        return self._item(records[0]) if records else Item(message_id, place)

    async def message(self, item: Item) -> Message | NoPayload:
        """Find what would be handled, wherever it is."""
        name, message_id = self.consumer.name, item.message_id
        async with self.database.begin() as unit:
            waiting = await unit.waiting.get(name, message_id)
            stored = await unit.inbox.get(name, message_id)
            letter = await unit.dead_letters.get(name, message_id)
        kept = waiting or stored or letter
        if kept is not None and kept.erased_at is not None:
            return NoPayload(message_id, ERASED_REASON)
        found = item.arrival
        if waiting is not None:
            found = message_of(self.consumer, waiting)
        elif stored is not None:
            try:
                found = stored_message(self.consumer, stored)
            except Undecodable as error:
                return NoPayload(message_id, f"it cannot be read: {reason_of(error)}")
        elif letter is not None:
            found = letter_message(self.consumer, letter)
        if isinstance(found, Unreadable):
            return NoPayload(message_id, f"it cannot be read: {found.reason}")
        return found or NoPayload(message_id, "nobody has its payload any more")

    async def _letters(self, selection: Letters, after: Any) -> AsyncGenerator[Item, None]:
        while True:
            which = replace(selection.filter, after=None if after is None else tuple(after))
            async with self.database.begin() as unit:
                page = await unit.dead_letters.find(which, PAGE)
            for letter in page:
                after = [letter.first_failed_at, letter.message_id]
                yield Item(letter.message_id, after)
            if len(page) < PAGE:
                return

    async def _waiting(self, selection: Waiting, after: Any) -> AsyncGenerator[Item, None]:
        while True:
            which = (
                selection.which if after is None else replace(selection.which, after_place=after)
            )
            async with self.database.begin() as unit:
                page = await unit.waiting.find(which, PAGE)
            for waiting in page:
                after = waiting.place
                yield Item(waiting.message_id, after)
            if len(page) < PAGE:
                return

    async def _records(
        self, partition: Partition, first: int, last: int
    ) -> AsyncGenerator[Item, None]:
        reader = need_reader(self.reader)
        for start in range(first, last + 1, PAGE):
            records: Sequence[Record] = await reader.read(
                partition, start, min(start + PAGE - 1, last)
            )
            for record in filter(self._is_meant, records):
                yield self._item(record)

    def _is_meant(self, record: Record) -> bool:
        if isinstance(self.selection, Times):
            return self.selection.since <= record.timestamp < self.selection.until
        return True

    def _item(self, record: Record) -> Item:
        arrival = self.consumer.reading.read(record)
        return Item(arrival.id, record.at.offset, arrival)


def letter_message(consumer: Consumer, letter: DeadLetter) -> Message | Unreadable:
    """Read a dead letter again, as the broker's record was read.

    Its id stays, but for a record that could not be read before: that one had none.
    """
    record = Record(
        letter.source or Coordinates(letter.topic or "?", 0, 0),
        value_of(letter.payload, letter.payload_hash),
        None if letter.key is None else raw_of(letter.key),
        letter.headers,
        letter.timestamp,
    )
    found = consumer.reading.read(record)
    if isinstance(found, Unreadable) or letter.was_no_message:
        return found
    return replace(found, id=letter.message_id, key=letter.key, source=letter.source)
