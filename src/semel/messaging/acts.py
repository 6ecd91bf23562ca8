"""What every operator's act has in common: it names its message, its reason, and its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from semel.crashpoints import CrashPoint, reach
from semel.errors import Misuse, Permanent
from semel.messaging.claims import ClaimState, Failure, is_leased
from semel.messaging.database import Database, Unit
from semel.messaging.deadletters import DeadLetter
from semel.messaging.revisions import Revision
from semel.messaging.waiting import WaitingMessage


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
async def acting(database: Database) -> AsyncIterator[Unit]:
    """Open the one transaction of an act: what it changes, and its entry in the audit trail."""
    async with database.begin() as unit:
        yield unit
        reach(CrashPoint.ACT_BEFORE)
    reach(CrashPoint.ACT_AFTER)


async def complete_without_effect(unit: Unit, consumer: str, message_id: str, code: str) -> None:
    """Complete a claim by a person's word; one that is completed already stays as it is."""
    row = await unit.claims.look_up(consumer, message_id)
    attempts = row.attempts if row else 0
    # A completed claim has no code of its own: it keeps that of its last failure.
    await overrule(unit, consumer, message_id, Failure(ClaimState.PARKED, attempts, code))
    await unit.claims.mark_completed(consumer, message_id)


async def overrule(unit: Unit, consumer: str, message_id: str, failure: Failure) -> bool:
    """Write a person's word over whatever a claim says; False where it is completed."""
    await unit.claims.reopen(consumer, message_id)
    return await unit.claims.mark_failed(consumer, message_id, failure)


async def keep_payload(unit: Unit, message: WaitingMessage | DeadLetter) -> None:
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


async def need_not_handled(unit: Unit, consumer: str, message_id: str) -> None:
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


async def need_nobody_at_it(unit: Unit, consumer: str, message_id: str) -> None:
    """See that no owner handles a message now, whose place in the waiting room is locked.

    Its effect may have happened already, whatever a person decides about it.

    Raises:
        NotPossible: an owner holds it under a lease that lasts.
    """
    row = await unit.claims.look_up(consumer, message_id)
    if row is not None and is_leased(row, await unit.now()):
        why = f"{row.owner} handles it now; look again when its lease has ended"
        raise NotPossible(consumer, message_id, why)
