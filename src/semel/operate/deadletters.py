"""What a person can do with a dead letter: list, look, send back, park, skip.

Deleting one needs a second person: `semel.operate.deletion`.  Each act is one transaction
with its entry in the audit trail; no message is handled here.

Of a message that an inbox stores, the inbox's row decides: its workers read nothing else, so
such a message never goes to the waiting table.
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
    DeadLetterFilter,
    InboxMessage,
    WaitingMessage,
    Waits,
    fields_of_stored,
    is_made_up,
)
from semel.operate.acts import (
    LOOKED_AT,
    NotPossible,
    acting,
    complete_without_effect,
    keep_payload,
    need_actor,
    need_letter,
    need_not_handled,
    need_not_too_often,
    need_payload,
    need_reason,
    need_review,
    overrule,
    remove_letter,
    times_sent_back,
    write_down,
)
from semel.operate.stores import Approval, AuditEntry, OperatorDatabase, OperatorUnit

# A letter that failed more often needs a fix, not one more attempt.
MOST_RETRIES: Final = 5


@dataclass(frozen=True, slots=True)
class DeadLetterList:
    """The answer of `dead_letters`."""

    total: int
    """How many match; the list may hold fewer."""

    letters: Sequence[DeadLetter]


@dataclass(frozen=True, slots=True)
class LetterInspection:
    """All that is known of a dead letter."""

    message: DeadLetter
    claim: ClaimRow | None
    approvals: Sequence[Approval]
    acts: Sequence[AuditEntry]
    sent_back: int
    """How often it was sent back to its consumer."""


async def dead_letters(
    database: OperatorDatabase, which: DeadLetterFilter, limit: int
) -> DeadLetterList:
    """List dead letters, the oldest first."""
    async with database.begin() as unit:
        found = await unit.dead_letters.find(which, limit)
        return DeadLetterList(await unit.dead_letters.count(which), found)


async def inspect_dead_letter(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str
) -> LetterInspection:
    """Return a dead letter with its payload; the audit trail says who looked.

    Raises:
        NoSuchMessage: there is no such letter.
    """
    async with acting(database) as unit:
        letter = await need_letter(unit, consumer, message_id)
        await write_down(unit, actor, LOOKED_AT, consumer, message_id)
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

    It waits for the retry worker, due at once; where an inbox stores the message, the inbox's
    workers try it again.  The loop guard counts the acts in the audit trail, so it also knows
    a letter that failed again and came back.

    Raises:
        NoSuchMessage: there is no such letter.
        NotPossible: it was erased, waits already, was handled, came back *at_most* times, or
            a person must look at it first.
    """
    async with acting(database) as unit:
        letter = await need_letter(unit, consumer, message_id)
        need_own_id(letter)
        retries = await need_not_too_often(unit, consumer, message_id, at_most)
        stored = await unit.inbox.get(consumer, message_id)
        if stored is not None:
            await send_back(unit, stored)
        else:
            await need_not_handled(unit, consumer, message_id)
            await move_to_waiting(unit, letter, Waits.RETRY)
            await unit.claims.reopen(consumer, message_id)
        details = {"retry": retries + 1, "error_code": letter.error_code}
        await write_down(unit, actor, "dlq.retry", consumer, message_id, reason, **details)
    return retries + 1


def need_own_id(letter: DeadLetter) -> None:
    """Raise NotPossible if the letter's id was generated: a conflict, or an unreadable record."""
    if letter.outcome == Told.CONFLICT:
        why = (
            "its id belongs to another payload; decide which of the two is right, then skip it, "
            "or park it and give it its own id"
        )
        raise NotPossible(letter.consumer, letter.message_id, why)
    if is_made_up(letter.message_id):
        why = (
            "its record could not be read, so its id was generated; replay it when its consumer "
            "can read it, or park it to fix it and give it an id"
        )
        raise NotPossible(letter.consumer, letter.message_id, why)


async def park_dead_letter(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str = ""
) -> None:
    """Move a dead letter to the parking lot, where it can be fixed.

    It does not hold its key, because later messages of the key were handled already.
    Conflicts and unreadable records have a generated id, and are released only after
    `semel.operate.parking.fix` gave them another.

    Raises:
        NoSuchMessage: there is no such letter.
        NotPossible: it was erased, waits already, is stored in an inbox, or a person must look
            at it first.
    """
    async with acting(database) as unit:
        letter = await need_letter(unit, consumer, message_id)
        await _need_no_inbox(unit, consumer, message_id)
        await move_to_waiting(unit, letter, Waits.PARKED)
        parked = Failure(
            ClaimState.PARKED, letter.attempts, letter.error_code, 0.0, letter.payload_hash
        )
        await overrule(unit, consumer, message_id, parked)
        await write_down(unit, actor, "dlq.park", consumer, message_id, reason)


async def skip_dead_letter(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str
) -> None:
    """Decide that a dead letter has no effect.

    Its claim, and its row in an inbox, are completed with the code SKIPPED, so a repetition is
    a duplicate.  The payload is kept as a revision.

    Raises:
        NoSuchMessage: there is no such letter.
        Misuse: no reason is given.
    """
    reason = need_reason(reason, "skipping a dead letter")
    async with acting(database) as unit:
        letter = await need_letter(unit, consumer, message_id)
        await remove_letter(unit, consumer, message_id)
        await keep_payload(unit, letter)
        await unit.inbox.close(consumer, message_id, SKIPPED)
        await complete_without_effect(unit, consumer, message_id, SKIPPED)
        await mark(unit, consumer, Mark.SKIPPED, letter.source)
        details = {"hash": letter.payload_hash, "error_code": letter.error_code}
        await write_down(unit, actor, "dlq.skip", consumer, message_id, reason, **details)


async def retry_inbox_message(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str = ""
) -> bool:
    """Let an inbox's workers try a message again that they gave up; its dead letter is removed.

    False, and nothing changed, where the inbox has no such message or has not given it up.

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
        await write_down(unit, actor, "inbox.retry", consumer, message_id, reason)
        return True


async def send_back(unit: OperatorUnit, stored: InboxMessage) -> None:
    """Let an inbox's workers try a message again, and remove its dead letter.

    Raises:
        NotPossible: they try it already, it was handled, skipped, deleted or erased, or a
            person must look at it first.
    """
    consumer, message_id = stored.consumer, stored.message_id
    if stored.processed_at is not None:
        why = f"a person ended it ({stored.error})" if stored.error else "it was handled"
        raise NotPossible(consumer, message_id, f"{why}; it is never tried again")
    need_payload(stored)
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
        # The inbox answers for the message from now on; the mark of its delivery must say so.
        await mark(unit, consumer, Mark.REFUSED, letter.source)


async def _need_no_inbox(unit: OperatorUnit, consumer: str, message_id: str) -> None:
    """Raise NotPossible if an inbox stores the message: its workers never read other tables."""
    if await unit.inbox.get(consumer, message_id) is not None:
        why = (
            "it is stored in an inbox, and the inbox's workers do not read the parking lot; "
            "send it back with `dlq retry`, or skip it"
        )
        raise NotPossible(consumer, message_id, why)


async def move_to_waiting(unit: OperatorUnit, letter: DeadLetter, waits: Waits) -> None:
    """Move a letter to the waiting table."""
    consumer, message_id = letter.consumer, letter.message_id
    need_payload(letter)
    if await unit.waiting.get(consumer, message_id) is not None:
        raise NotPossible(consumer, message_id, "a message with this id waits already")
    await need_review(unit, letter)
    await remove_letter(unit, consumer, message_id)
    await unit.waiting.put(
        WaitingMessage(
            **fields_of_stored(letter),
            waits=waits,
            reason=letter.reason,
            error_code=letter.error_code,
            exception=letter.exception,
            first_failed_at=letter.first_failed_at,
        )
    )
