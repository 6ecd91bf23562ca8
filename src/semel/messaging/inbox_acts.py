"""What a person can do with a message that the workers of an inbox gave up.

Its row in the inbox is what workers look at: nothing is handled from the waiting
room whose message an inbox has.
"""

from __future__ import annotations

from semel.messaging.acts import NotPossible, acting, need_actor, need_not_handled
from semel.messaging.audit import Act
from semel.messaging.completeness import Mark
from semel.messaging.database import Database, Unit
from semel.messaging.inbox import InboxMessage
from semel.messaging.marks import mark
from semel.messaging.review import need_review


async def send_back(unit: Unit, stored: InboxMessage) -> None:
    """Let the workers try a message again; its dead letter goes.

    Raises:
        NotPossible: they do so already, it was handled, skipped, deleted or erased, or a
            person must look at it first.
    """
    consumer, message_id = stored.consumer, stored.message_id
    if stored.processed_at is not None:
        why = f"a person ended it ({stored.error})" if stored.error else "it was handled"
        raise NotPossible(consumer, message_id, f"{why}, and is never tried again")
    if stored.erased_at is not None:
        why = "its payload was erased, so it can only be skipped or deleted"
        raise NotPossible(consumer, message_id, why)
    await need_not_handled(unit, consumer, message_id)
    if await unit.waiting.get(consumer, message_id) is not None:
        why = "a message with this id waits for the retry worker; skip that one first"
        raise NotPossible(consumer, message_id, why)
    letter = await unit.dead_letters.get(consumer, message_id)
    if letter is not None:
        await need_review(unit, letter)
    if not await unit.inbox.try_again(consumer, message_id):
        raise NotPossible(consumer, message_id, "the inbox's workers try it already")
    await unit.dead_letters.remove(consumer, message_id)
    if letter is not None:
        # It is the inbox's from now on, whatever its delivery left here.
        await mark(unit, consumer, Mark.REFUSED, letter.source)


async def need_no_inbox(unit: Unit, consumer: str, message_id: str) -> None:
    """See that a message may go to the waiting room.

    Raises:
        NotPossible: an inbox has it, whose workers never look there.
    """
    if await unit.inbox.get(consumer, message_id) is not None:
        why = (
            "it is stored in an inbox, whose workers never look at the parking lot; send it "
            "back with `dlq retry`, or skip it"
        )
        raise NotPossible(consumer, message_id, why)


async def retry_inbox_message(
    database: Database, consumer: str, message_id: str, *, actor: str, reason: str = ""
) -> bool:
    """Let an inbox's workers try a message again that they had given up; its dead letter goes.

    False, and nothing changed, where there is none, or they have not given it up.  Who did it,
    and why, is in the audit trail.

    Raises:
        NotPossible: it was handled, skipped, deleted or erased, or a person must look at it
            first.
    """
    actor = need_actor(actor)
    async with acting(database) as unit:
        stored = await unit.inbox.get(consumer, message_id)
        if stored is None or (stored.processed_at is None and stored.due_at is not None):
            return False
        await send_back(unit, stored)
        await unit.audit.append(Act(actor, "inbox.retry", consumer, message_id, reason))
        return True
