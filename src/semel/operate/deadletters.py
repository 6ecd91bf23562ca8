"""What a person can do with a dead letter: list, look, send back, park, skip.

Deleting one needs a second person: `semel.operate.deletion`.  Each act is one transaction
with its entry in the audit trail; no message is handled here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from semel.messaging.handle.claims import SKIPPED, ClaimRow, ClaimState, Failure
from semel.messaging.outcome import Mark, Told
from semel.messaging.receive.offsets import mark
from semel.messaging.records import (
    DeadLetter,
    DeadLetterFilter,
    WaitingMessage,
    Waits,
    fields_of_stored,
    is_made_up,
)
from semel.messaging.settings import ReplayRules
from semel.operate.audit import (
    LOOKED_AT,
    NotPossible,
    acting,
    complete_without_effect,
    keep_payload,
    need_allowed,
    need_letter,
    need_not_handled,
    need_not_too_often,
    need_payload,
    need_reason,
    need_review,
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
        found = await unit.dead_letters.outlines(which, limit)
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
    rules: ReplayRules | None = None,
) -> int:
    """Send a dead letter back to its consumer, under its own id; return how often that was done.

    It waits for the retry worker, due at once.  The loop guard counts the acts in the audit
    trail, so it also knows a letter that failed again and came back.  *rules* is what the
    policy says about replays, as `ReplayRules.of_policy` reads it.

    Raises:
        NoSuchMessage: there is no such letter.
        NotPossible: the policy forbids it; or it was erased, waits already, was handled, came
            back *at_most* times, or a person must look at it first.
    """
    async with acting(database) as unit:
        letter = await need_letter(unit, consumer, message_id)
        need_own_id(letter)
        await need_allowed(unit, letter, rules)
        retries = await need_not_too_often(unit, consumer, message_id, at_most)
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
        NotPossible: it was erased, waits already, or a person must look at it first.
    """
    async with acting(database) as unit:
        letter = await need_letter(unit, consumer, message_id)
        await move_to_waiting(unit, letter, Waits.PARKED)
        parked = Failure(
            ClaimState.PARKED, letter.attempts, letter.error_code, 0.0, letter.payload_hash
        )
        await unit.claims.decide(consumer, message_id, parked)
        await write_down(unit, actor, "dlq.park", consumer, message_id, reason)


async def skip_dead_letter(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str
) -> None:
    """Decide that a dead letter has no effect.

    Its claim, and its row in an inbox, are completed with the marker SKIPPED, so a repetition is
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


async def move_to_waiting(unit: OperatorUnit, letter: DeadLetter, waits: Waits) -> None:
    """Move a letter to the waiting table; as a retry it is due at once, and begins anew."""
    consumer, message_id = letter.consumer, letter.message_id
    need_payload(letter)
    if await unit.waiting.get(consumer, message_id) is not None:
        raise NotPossible(consumer, message_id, "a message with this id waits already")
    await need_review(unit, letter)
    await remove_letter(unit, consumer, message_id)
    waiting = WaitingMessage(
        **fields_of_stored(letter),
        waits=waits,
        reason=letter.reason,
        error_code=letter.error_code,
        exception=letter.exception,
        first_failed_at=letter.first_failed_at,
    )
    # A pipeline counts from here, a service from the claim.
    await unit.waiting.put(replace(waiting, attempts=0) if waits is Waits.RETRY else waiting)
