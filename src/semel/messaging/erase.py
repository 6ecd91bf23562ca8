"""Erasing a person's payloads everywhere, with hashes and the audit trail kept.

    lock      whoever writes that an attempt failed              what they wrote is found, or
                                                                 they find the erasure
    then      the waiting messages, their claims, the inbox      whoever handles one of them
                                                                 is waited for
    then      dead letters, revisions, the outbox, results,      what they wrote is found
              the reasons of failed attempts

What is erased stays visible where it was, and can never be handled: a waiting
message is parked, an outgoing one is not sent.  An attempt that is under way and
fails afterwards finds the claim closed, or notes on it that nothing may be kept: also
a first attempt, which has no row that could be found while it runs, and a message that was
read and only queues up behind its key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

from semel.errors import Misuse, Retryable
from semel.messaging.acts import acting, need_actor, need_reason, overrule
from semel.messaging.attempts import AttemptFilter
from semel.messaging.audit import ERASE, Act
from semel.messaging.claims import ERASED, ClaimState, Failure, is_leased
from semel.messaging.completeness import Mark
from semel.messaging.database import Database, Unit
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.ids import hash_of_key
from semel.messaging.marks import mark
from semel.messaging.outbox import parent_of
from semel.messaging.revisions import RevisionFilter
from semel.messaging.waiting import WaitingFilter, WaitingMessage

LEFT: Final = (
    "keys, ids, hashes and the audit trail stay; what attempts that are under way complete "
    "becomes durable behind this: erase again when they are over"
)
"""What erasing does not do, for whoever has promised it to somebody."""

PAGE: Final = 500
MOST_NAMES: Final = 100_000

# Somebody who handles one of the messages may hold it for longer than the lock timeout, and
# two who lock the same rows in another order are told apart by the database.
MOST_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Erased:
    """How many payloads were removed, by where they were."""

    dead_letters: int = 0
    waiting: int = 0
    revisions: int = 0
    inbox: int = 0
    outbox: int = 0
    results: int = 0
    """What handlers returned, where their consumer keeps it."""

    @property
    def total(self) -> int:
        """All together."""
        return sum(asdict(self).values())

    def __add__(self, other: Erased) -> Erased:
        mine, more = asdict(self), asdict(other)
        return Erased(**{name: mine[name] + more[name] for name in mine})


async def erase(
    database: Database,
    *,
    key: str | None = None,
    message_id: str | None = None,
    actor: str,
    reason: str,
    progress: Callable[[int], None] = lambda messages: None,
) -> Erased:
    """Remove payloads and headers of a key's messages, or of one message, for all consumers.

    With what handling them put into the outbox, the results that were kept, and why attempts
    failed, for an exception may quote what it was given.  An id that a
    person gave the message counts as its own, and so does a conflict that came with it.  All
    of it is one transaction; *progress* hears how many waiting messages were closed so far.
    The audit entry says how much was erased and why, by whom, and holds no payload; of the
    key it has the hash, for the key itself may name a person.

    What the broker still has is not erased, and a message that it delivers afterwards is new.

    Raises:
        Misuse: both or neither of *key* and *message_id* is given, or no reason.
        Retryable: somebody is handling one of the messages; nothing was erased.
    """
    actor, reason = need_actor(actor), need_reason(reason, "erasing")
    if (key is None) == (message_id is None):
        raise Misuse("say what to erase: a key, or a message id")
    for left in reversed(range(MOST_TRIES)):
        try:
            async with acting(database) as unit:
                await unit.audit.begin_erasing()
                if key is not None:
                    erased = await _erase_key(unit, key, progress)
                else:
                    erased = await _erase_message(unit, message_id or "", progress)
                details: dict[str, object] = asdict(erased)
                if key is not None:
                    details["key_hash"] = hash_of_key(key)
                await unit.audit.append(
                    Act(actor, ERASE, message_id=message_id or "", reason=reason, details=details)
                )
        except Retryable:
            if not left:
                raise
        else:
            return erased
    raise AssertionError("the last try returns, or raises")


async def _erase_key(unit: Unit, key: str, progress: Callable[[int], None]) -> Erased:
    waiting = await _erase_waiting(unit, WaitingFilter(key=key), progress)
    inbox = await unit.inbox.erase(key=key)
    await unit.attempts.erase(AttemptFilter(key=key))
    return Erased(
        dead_letters=await unit.dead_letters.erase(DeadLetterFilter(key=key)),
        waiting=waiting,
        revisions=await unit.revisions.erase(RevisionFilter(key=key)),
        inbox=inbox,
        outbox=await unit.outbox.erase(key=key),
        results=await unit.claims.erase_key(key),
    )


async def _erase_message(unit: Unit, message_id: str, progress: Callable[[int], None]) -> Erased:
    erased = Erased()
    for name in sorted(await _names(unit, message_id)):
        waiting = await _erase_waiting(unit, WaitingFilter(message_id=name), progress)
        consumers = await unit.claims.consumers_of(name)
        results = sum([await unit.claims.erase(consumer, name) for consumer in consumers])
        inbox = await unit.inbox.erase(message_id=name)
        outbox = await unit.outbox.erase(message_id=name)
        await unit.attempts.erase(AttemptFilter(message_id=name))
        letters = await unit.dead_letters.find(DeadLetterFilter(message_id=name), MOST_NAMES)
        buried_by = {letter.consumer for letter in letters}
        for consumer in {*consumers, *await unit.inbox.consumers_of(name), *buried_by}:
            outbox += await unit.outbox.erase(parent=parent_of(consumer, name))
        erased += Erased(
            dead_letters=await unit.dead_letters.erase(DeadLetterFilter(message_id=name)),
            waiting=waiting,
            revisions=await unit.revisions.erase(RevisionFilter(message_id=name)),
            inbox=inbox,
            outbox=outbox,
            results=results,
        )
    return erased


async def _names(unit: Unit, message_id: str) -> set[str]:
    """Collect all ids under which a message is or was known, and those of its conflicts."""
    known: set[str] = set()
    todo = {message_id}
    while todo:
        name = todo.pop()
        known.add(name)
        letters = await unit.dead_letters.find(DeadLetterFilter(conflicts_with=name), MOST_NAMES)
        waiting = await unit.waiting.find(WaitingFilter(conflicts_with=name), MOST_NAMES)
        found = {letter.message_id for letter in letters} | {one.message_id for one in waiting}
        todo |= (found | await unit.revisions.other_names(name)) - known
    return known


async def _erase_waiting(unit: Unit, which: WaitingFilter, progress: Callable[[int], None]) -> int:
    """Erase waiting messages, and close their claims to deliveries that repeat them."""
    erased = await unit.waiting.erase(which)
    closed = 0
    while page := await unit.waiting.find(which, PAGE):
        for message in page:
            await _close(unit, message)
        closed += len(page)
        progress(closed)
        which = replace(which, after_place=page[-1].place)
    return erased


async def _close(unit: Unit, message: WaitingMessage) -> None:
    consumer, message_id, attempts = message.consumer, message.message_id, message.attempts
    row = await unit.claims.look_up(consumer, message_id)
    # Whoever handles it under a lease ends it, with its effect or without its payload.
    is_held = row is not None and is_leased(row, await unit.now())
    if row is not None and row.state is ClaimState.COMPLETED:
        # A delivery was quicker than the retry worker: nobody has to decide anything.
        await unit.waiting.remove(consumer, message_id)
        await mark(unit, consumer, Mark.DUPLICATE, message.source)
    elif not is_held and (row is None or row.error_code != ERASED):
        await overrule(unit, consumer, message_id, Failure(ClaimState.PARKED, attempts, ERASED))
    if row is None or row.erased_at is None:
        await unit.claims.erase(consumer, message_id)
