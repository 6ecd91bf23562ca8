"""Records for a topic of dead letters that still wait in the outbox."""

from __future__ import annotations

from semel.messaging.database import Unit
from semel.messaging.letter_topic import PREFIX
from semel.messaging.outbox import OutboxEntry, parent_of


def is_letter_record(entry: OutboxEntry) -> bool:
    """Tell whether an entry says that a message is dead; no handler sent it."""
    return any(name.startswith(PREFIX) for name in entry.headers)


async def erase_letter_records(unit: Unit, consumer: str, message_id: str) -> None:
    """Erase what the topic of dead letters has not got yet of a message.

    Whatever else handling the message sent belongs to an effect that is durable, and stays.
    """
    for entry in await unit.outbox.children(parent_of(consumer, message_id)):
        if is_letter_record(entry):
            await unit.outbox.erase(message_id=entry.message_id)
