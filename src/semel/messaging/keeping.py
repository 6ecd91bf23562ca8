"""Keeping a failed message: in the waiting room, or among the dead letters.

Its offset is marked in the same transaction, so that an audit can tell what is kept from
what is lost.
"""

from __future__ import annotations

from dataclasses import replace

from semel.message import Message
from semel.messaging.claims import ClaimRow
from semel.messaging.consumer import Consumer
from semel.messaging.database import Unit
from semel.messaging.deadletters import DeadLetter
from semel.messaging.failure import Classified
from semel.messaging.letter_topic import keep_letter
from semel.messaging.letters import Failed, letter_of
from semel.messaging.marks import Ended, mark_ends, mark_kept
from semel.messaging.outcome import Refused, Told
from semel.messaging.reasons import ERASED_REASON
from semel.messaging.waiting import WaitingMessage, Waits


async def let_in(
    unit: Unit, message: Message, waiting: WaitingMessage, seconds: float = 0.0, *, is_new: bool
) -> None:
    """Let a message wait; where it *is_new* in the room, note that of its offset."""
    await unit.waiting.put(waiting, seconds)
    if is_new:
        await mark_waiting(unit, waiting.consumer, message)


async def mark_waiting(unit: Unit, consumer: str, message: Message) -> None:
    """Note of a delivery that its message waits."""
    if message.source is not None:
        now = await unit.waiting.get(consumer, message.id)
        await mark_kept(unit, consumer, message.source, now)


async def file(unit: Unit, consumer: Consumer, message: Message, letter: DeadLetter) -> bool:
    """Keep a dead letter, and note of the message's offset that it is; False: there was one."""
    is_new = await keep_letter(unit, consumer.settings, letter)
    if message.source is not None:
        first = letter
        if not is_new:
            first = await unit.dead_letters.get(consumer.name, letter.message_id) or letter
        await mark_kept(unit, consumer.name, message.source, first)
    return is_new


async def take_out(unit: Unit, consumer: str, message_id: str) -> None:
    """Take a dead letter out of the waiting room, where another delivery or a replay put it."""
    waiting = await unit.waiting.get(consumer, message_id)
    if waiting is not None:
        await unit.waiting.remove(consumer, message_id)
        # Nobody will take it out of there any more, and with it the note of a worker that died.
        await unit.members.acquit(consumer, message_id)
        ended = Ended(message_id, waiting.source, Refused("dead letter"))
        await mark_ends(unit, consumer, [ended])


async def make_letter(
    unit: Unit,
    consumer: Consumer,
    message: Message,
    failure: Classified,
    told: Told,
    claim: ClaimRow | None,
) -> DeadLetter:
    """Make the dead letter of a failed message; without payload where its claim says erased."""
    now = max(claim.updated_at, claim.failed_at or 0.0) if claim else await unit.now()
    first = claim.first_seen_at if claim else now
    letter = letter_of(consumer, message, Failed(failure, told, first, now))
    # What comes as a conflict is another payload than the one that the claim is about.
    if claim is None or claim.erased_at is None or told is Told.CONFLICT:
        return letter
    gone = replace(letter, payload=None, headers={}, reason=ERASED_REASON)
    return replace(gone, erased_at=claim.erased_at)


def parked_without_payload(waiting: WaitingMessage, erased_at: float) -> WaitingMessage:
    """Return a waiting message as erasing leaves it: nothing can be handled that is gone."""
    gone = replace(waiting, waits=Waits.PARKED, payload=None, headers={}, reason=ERASED_REASON)
    return replace(gone, erased_at=erased_at)
