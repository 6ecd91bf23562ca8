"""What the acts of operators have in common: actor, reason, transaction, refusals, loop guard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from semel.crashpoints import CrashPoint, reach
from semel.errors import Misuse, Permanent, SemelError, reason_of
from semel.messaging.handle.claims import ClaimState, Failure, is_leased
from semel.messaging.records import DeadLetter, WaitingMessage
from semel.operate.stores import OperatorDatabase, OperatorUnit, Revision


class NoSuchMessage(Misuse):
    """The message is not where an act looks for it: it was never there, or left meanwhile."""

    def __init__(self, consumer: str, message_id: str, where: str) -> None:
        super().__init__(consumer, message_id, where)
        self.consumer = consumer
        self.message_id = message_id
        self.where = where

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer} has no message {self.message_id!r} {self.where}; "
            f"nothing was changed"
        )


class NotPossible(Permanent):
    """The message is there, and the act cannot be done with it as it stands."""

    def __init__(self, consumer: str, message_id: str, why: str) -> None:
        super().__init__(consumer, message_id, why)
        self.consumer = consumer
        self.message_id = message_id
        self.why = why

    def __str__(self) -> str:
        return f"consumer {self.consumer}, message {self.message_id!r}: {self.why}"


def need_reason(reason: str, act: str) -> str:
    """Return the reason, which the audit trail keeps.

    Raises:
        Misuse: there is none.
    """
    if not reason.strip():
        raise Misuse(f"{act} needs a reason, which the audit trail keeps")
    return reason.strip()


def need_actor(actor: str) -> str:
    """Return who does it.

    Raises:
        Misuse: nobody is named.
    """
    if not actor.strip():
        raise Misuse("every act has an actor, whom the audit trail names")
    return actor.strip()


@asynccontextmanager
async def acting(database: OperatorDatabase) -> AsyncIterator[OperatorUnit]:
    """Open the one transaction of an act: what it changes, and its entry in the audit trail."""
    async with database.begin() as unit:
        yield unit
        reach(CrashPoint.ACT_BEFORE)
    reach(CrashPoint.ACT_AFTER)


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an act on one message."""

    message_id: str
    done: bool
    why_not: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Acts:
    """What became of one act on several messages."""

    messages: list[Done]

    @property
    def needs_attention(self) -> bool:
        """Say whether one of them could not be done."""
        return not all(one.done for one in self.messages)


async def on_each(
    ids: Iterable[str], act: Callable[[str], Awaitable[str | None]], note: str = ""
) -> Acts:
    """Act on each message in its own transaction; a failure does not stop the others.

    The note for people, such as ``released``, is what *act* returns, or *note*.
    """
    results = []
    for message_id in ids:
        try:
            results.append(Done(message_id, True, note=await act(message_id) or note))
        except SemelError as error:
            results.append(Done(message_id, False, reason_of(error)))
    return Acts(results)


async def complete_without_effect(
    unit: OperatorUnit, consumer: str, message_id: str, code: str
) -> None:
    """Complete a claim by a person's word; one that is completed already stays as it is."""
    row = await unit.claims.look_up(consumer, message_id)
    attempts = row.attempts if row else 0
    # A completed claim has no code of its own: it keeps that of its last failure.
    await overrule(unit, consumer, message_id, Failure(ClaimState.PARKED, attempts, code))
    await unit.claims.mark_completed(consumer, message_id)


async def overrule(unit: OperatorUnit, consumer: str, message_id: str, failure: Failure) -> bool:
    """Write a person's word over whatever a claim says; False where it is completed."""
    await unit.claims.reopen(consumer, message_id)
    return await unit.claims.mark_failed(consumer, message_id, failure)


async def keep_payload(unit: OperatorUnit, message: WaitingMessage | DeadLetter) -> None:
    """Keep what is taken away on one person's word; only deleting and erasing remove it.

    It is a revision, as the payloads of a message that was fixed are.
    """
    known = await unit.revisions.of(message.consumer, message.message_id)
    hashes = {revision.payload_hash for revision in known}
    if message.payload is None or message.payload_hash in hashes:
        return
    await unit.revisions.add(
        Revision(
            message.consumer,
            message.message_id,
            message.payload,
            message.payload_hash,
            key=message.key,
        )
    )


async def need_not_handled(unit: OperatorUnit, consumer: str, message_id: str) -> None:
    """See that a message's id is not used up.

    Raises:
        NotPossible: its claim is completed, and a completed claim never opens again.
    """
    row = await unit.claims.look_up(consumer, message_id)
    if row is not None and row.state is ClaimState.COMPLETED:
        raise NotPossible(
            consumer,
            message_id,
            "a message with this id was handled already, and its claim never opens again; skip "
            "it, or give it a new id if it is to have its effect a second time",
        )


async def need_nobody_at_it(unit: OperatorUnit, consumer: str, message_id: str) -> None:
    """See that no owner handles a message now, whose place in the waiting room is locked.

    Its effect may have happened already, whatever a person decides about it.

    Raises:
        NotPossible: an owner holds it under a lease that lasts.
    """
    row = await unit.claims.look_up(consumer, message_id)
    if row is not None and is_leased(row, await unit.now()):
        why = f"{row.owner} handles it now; look again when its lease has ended"
        raise NotPossible(consumer, message_id, why)


LOOKED_AT: Final = "dlq.inspect"
"""The act by which the audit trail says that a person looked at a dead letter."""


SENT_BACK: Final = frozenset({"dlq.retry", "inbox.retry", "park.release"})
"""The acts by which a message is handled again; the loop guard counts them."""


LEFT_LETTERS: Final = SENT_BACK | {"dlq.park"}
"""The acts after which a dead letter is another failure than the one that somebody saw."""


async def times_sent_back(unit: OperatorUnit, consumer: str, message_id: str) -> int:
    """Count how often a message was sent back, by replays and by hand together."""
    entries = await unit.audit.about(consumer, message_id)
    return sum(entry.act.act in SENT_BACK for entry in entries)


async def need_not_too_often(
    unit: OperatorUnit, consumer: str, message_id: str, at_most: int
) -> int:
    """Return how often a message was sent back; the loop guard.

    Raises:
        NotPossible: that was *at_most* times, or more.
    """
    times = await times_sent_back(unit, consumer, message_id)
    if times < at_most:
        return times
    raise NotPossible(
        consumer,
        message_id,
        f"it was sent back {times} times and failed every time; find out why, then allow more, "
        f"or park it",
    )


async def need_review(unit: OperatorUnit, letter: DeadLetter) -> None:
    """See that a person looked at a dead letter since it failed last, if its policy wants that.

    Raises:
        NotPossible: it does, and nobody has.
    """
    if not letter.needs_review:
        return
    acts = [e.act.act for e in await unit.audit.about(letter.consumer, letter.message_id)]
    # Whoever looked before it was sent back saw another failure.
    for act in reversed(acts):
        if act == LOOKED_AT:
            return
        if act in LEFT_LETTERS:
            break
    raise NotPossible(
        letter.consumer,
        letter.message_id,
        "its policy wants a person to look at it first (dlq.manualReviewRequired), and nobody has "
        "since it failed last: semel dlq show",
    )
