"""What a person can do with a dead letter, or with a message that an inbox gave up.

What a person can do with a message that the workers of an inbox gave up.

Its row in the inbox is what workers look at: nothing is handled from the waiting
room whose message an inbox has.

What a person can do with a dead letter: look at it, send it back, park it, or skip it.

Deleting one needs a second person: `semel.operate.deletion`.  Each act is one
transaction with its entry in the audit trail; nothing is handled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from semel.messaging.handle.claims import SKIPPED, ClaimRow, ClaimState, Failure
from semel.messaging.outcome import Mark, Told
from semel.messaging.receive.offsets import mark
from semel.messaging.records import (
    DeadLetter,
    InboxMessage,
    WaitingMessage,
    Waits,
    fields_of_stored,
    is_made_up,
)
from semel.operate.acts import (
    LOOKED_AT,
    NoSuchMessage,
    NotPossible,
    acting,
    complete_without_effect,
    keep_payload,
    need_actor,
    need_not_handled,
    need_not_too_often,
    need_reason,
    need_review,
    overrule,
    times_sent_back,
)
from semel.operate.stores import Act, Approval, AuditEntry, OperatorDatabase, OperatorUnit


async def send_back(unit: OperatorUnit, stored: InboxMessage) -> None:
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


async def need_no_inbox(unit: OperatorUnit, consumer: str, message_id: str) -> None:
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
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str = ""
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


AMONG_LETTERS: Final = "among its dead letters"


# Whoever sends the same letter back more often hopes instead of looking.
MOST_RETRIES: Final = 5


@dataclass(frozen=True, slots=True)
class LetterInspection:
    """All that is known of a dead letter."""

    letter: DeadLetter
    claim: ClaimRow | None
    approvals: Sequence[Approval]
    acts: Sequence[AuditEntry]
    sent_back: int
    """How often it was sent back to its consumer."""


async def inspect_dead_letter(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str
) -> LetterInspection:
    """Show a dead letter with its payload; who looked is written down.

    Raises:
        NoSuchMessage: there is no such letter.
    """
    async with acting(database) as unit:
        letter = await _need_letter(unit, consumer, message_id)
        await unit.audit.append(Act(need_actor(actor), LOOKED_AT, consumer, message_id))
        return LetterInspection(
            letter,
            await unit.claims.look_up(consumer, message_id),
            await unit.approvals.about(consumer, message_id),
            await unit.audit.about(consumer, message_id),
            await times_sent_back(unit, consumer, message_id),
        )


async def retry_dead_letter(
    database: OperatorDatabase,
    consumer: str,
    message_id: str,
    *,
    actor: str,
    reason: str = "",
    at_most: int = MOST_RETRIES,
) -> int:
    """Send a dead letter back to its consumer, under its own id; return how often that was done.

    It leaves the dead letters and waits for the retry worker, due at once; where an inbox has
    the message, its workers try it again.  The loop guard counts the acts in the audit trail,
    so a letter that comes back is not new to it.

    Raises:
        NoSuchMessage: there is no such letter.
        NotPossible: it was erased, waits already, was handled, came back *at_most* times, or
            a person must look at it first.
    """
    async with acting(database) as unit:
        letter = await _need_letter(unit, consumer, message_id)
        _need_own_id(letter)
        retries = await need_not_too_often(unit, consumer, message_id, at_most)
        stored = await unit.inbox.get(consumer, message_id)
        if stored is not None:
            await send_back(unit, stored)
        else:
            await need_not_handled(unit, consumer, message_id)
            await _let_in(unit, letter, Waits.RETRY)
            await unit.claims.reopen(consumer, message_id)
        details = {"retry": retries + 1, "error_code": letter.error_code}
        await unit.audit.append(
            Act(need_actor(actor), "dlq.retry", consumer, message_id, reason, details)
        )
    return retries + 1


def _need_own_id(letter: DeadLetter) -> None:
    """Refuse letters that are filed under an id of ours, which no message has.

    Raises:
        NotPossible: it is a conflict, or a record that was no message.
    """
    if letter.outcome == Told.CONFLICT:
        why = (
            "its id belongs to another payload; decide which of the two is right, and skip it, "
            "or park it and give it an id of its own"
        )
        raise NotPossible(letter.consumer, letter.message_id, why)
    if is_made_up(letter.message_id):
        why = (
            "it was no message when it came; replay it once its consumer can read it, or park it "
            "to mend it and give it an id"
        )
        raise NotPossible(letter.consumer, letter.message_id, why)


async def park_dead_letter(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str = ""
) -> None:
    """Move a dead letter to the parking lot, where it can be fixed.

    It holds its key from nothing: later messages of the key were handled long ago.  What has
    a made-up id, as conflicts and unreadable records have, is released once it was given one.

    Raises:
        NoSuchMessage: there is no such letter.
        NotPossible: it was erased, waits already, is stored in an inbox, or a person must look
            at it first.
    """
    async with acting(database) as unit:
        letter = await _need_letter(unit, consumer, message_id)
        await need_no_inbox(unit, consumer, message_id)
        await _let_in(unit, letter, Waits.PARKED)
        parked = Failure(
            ClaimState.PARKED, letter.attempts, letter.error_code, 0.0, letter.payload_hash
        )
        await overrule(unit, consumer, message_id, parked)
        await unit.audit.append(Act(need_actor(actor), "dlq.park", consumer, message_id, reason))


async def skip_dead_letter(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str
) -> None:
    """Decide that a dead letter has no effect.

    Its claim is completed, with the code SKIPPED: a repetition is a duplicate; so is its row
    where an inbox has it.  The payload is kept.

    Raises:
        NoSuchMessage: there is no such letter.
        Misuse: no reason is given.
    """
    reason = need_reason(reason, "skipping a dead letter")
    async with acting(database) as unit:
        letter = await _need_letter(unit, consumer, message_id)
        if not await unit.dead_letters.remove(consumer, message_id):
            raise NoSuchMessage(consumer, message_id, AMONG_LETTERS)
        await keep_payload(unit, letter)
        await unit.inbox.close(consumer, message_id, SKIPPED)
        await complete_without_effect(unit, consumer, message_id, SKIPPED)
        await mark(unit, consumer, Mark.SKIPPED, letter.source)
        details = {"hash": letter.payload_hash, "error_code": letter.error_code}
        await unit.audit.append(
            Act(need_actor(actor), "dlq.skip", consumer, message_id, reason, details)
        )


async def _need_letter(unit: OperatorUnit, consumer: str, message_id: str) -> DeadLetter:
    letter = await unit.dead_letters.get(consumer, message_id)
    if letter is None:
        raise NoSuchMessage(consumer, message_id, AMONG_LETTERS)
    return letter


async def _let_in(unit: OperatorUnit, letter: DeadLetter, waits: Waits) -> None:
    """Move a letter to the waiting room."""
    consumer, message_id = letter.consumer, letter.message_id
    if letter.erased_at is not None:
        why = "its payload was erased, so it can only be skipped or deleted"
        raise NotPossible(consumer, message_id, why)
    if await unit.waiting.get(consumer, message_id) is not None:
        raise NotPossible(consumer, message_id, "a message with this id waits already")
    await need_review(unit, letter)
    if not await unit.dead_letters.remove(consumer, message_id):
        raise NoSuchMessage(consumer, message_id, AMONG_LETTERS)
    await unit.waiting.put(_waiting(letter, waits))


def _waiting(letter: DeadLetter, waits: Waits) -> WaitingMessage:
    return WaitingMessage(
        **fields_of_stored(letter),
        waits=waits,
        reason=letter.reason,
        error_code=letter.error_code,
        exception=letter.exception,
        first_failed_at=letter.first_failed_at,
    )
