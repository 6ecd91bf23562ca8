"""One transaction per message, in order: what every batch is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from semel.message import Message
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database
from semel.messaging.failing import holds_key
from semel.messaging.handling import handle_message
from semel.messaging.lanes import Order
from semel.messaging.outcome import (
    Nack,
    Outcome,
    ParkedAway,
    RetryLater,
    RetryStored,
    settlement,
)
from semel.messaging.settings import BatchPolicy

NOT_ATTEMPTED = RetryLater(0.0)
"""The outcome of a message that stands behind one that comes back."""


async def consume_each(
    consumer: Consumer, database: Database, messages: Sequence[Message]
) -> list[Outcome]:
    """Handle deliveries one transaction each, in order: what `consume_many` is measured by."""
    blocked = Blocked(consumer)
    outcomes: list[Outcome] = []
    for message in messages:
        if blocked.stands_before(message):
            outcomes.append(NOT_ATTEMPTED)
            continue
        outcome = await handle_message(consumer, database, message)
        blocked.note(message, outcome)
        outcomes.append(outcome)
    return outcomes


def blocks_key(consumer: Consumer, message: Message, outcome: Outcome) -> bool:
    """Tell whether the message went into the waiting room and holds its key there."""
    return isinstance(outcome, RetryStored | ParkedAway) and holds_key(consumer, message)


@dataclass(slots=True)
class Blocked:
    """What may not be handled, because something before it comes back or waits."""

    consumer: Consumer
    _all: bool = False
    _where: set[tuple[object, object]] = field(default_factory=set)
    _held: set[str | None] = field(default_factory=set)

    @property
    def anything(self) -> bool:
        """Whether there is something to wait for at all."""
        return self._all or bool(self._where or self._held)

    def note(self, message: Message, outcome: Outcome) -> None:
        """Look at what became of a message."""
        if blocks_key(self.consumer, message, outcome):
            self._held.add(message.key)
        if not isinstance(settlement(outcome), Nack):
            return
        if self.consumer.settings.batch in (BatchPolicy.STOP, BatchPolicy.FAIL_BATCH):
            self._all = True
        self._where.add(self._lane(message))

    def stands_before(self, message: Message) -> bool:
        """Tell whether *message* must wait for one that comes back."""
        return self._all or self._lane(message) in self._where

    def holds(self, message: Message) -> bool:
        """Tell whether a message of its key went into the waiting room."""
        return message.key in self._held and holds_key(self.consumer, message)

    def _lane(self, message: Message) -> tuple[object, object]:
        place = message.source.place if message.source else None
        match self.consumer.settings.order:
            case Order.PARTITION:
                return place, None
            case Order.KEY if message.key is not None:
                return place, message.key
            case _:
                return place, message.id
