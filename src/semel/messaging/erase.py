"""Erasing a person's payloads wherever they are stored; hashes and the audit trail stay.

    first     the waiting messages, their claims, the inbox      a transaction that has locked
                                                                 one of them is waited for
    then      dead letters, revisions, the outbox, results,      what it wrote is found
              the reasons of failed attempts

An erased row stays visible and is never handled: a waiting message is parked, an outgoing
one is not sent.  Its claim says that it was erased, so an attempt that fails later stores no
payload.  What is not stored is not covered: the first attempt of a message that runs now has
no row yet.  The answer says so, and to run the command again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Final

from semel.errors import Misuse, Retryable
from semel.messaging.acts import acting, need_actor, need_reason, overrule
from semel.messaging.attempts import AttemptFilter
from semel.messaging.audit import Act
from semel.messaging.claims import ERASED, ClaimState, Failure, Locked, is_leased
from semel.messaging.completeness import Mark
from semel.messaging.database import Database, Unit
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.ids import hash_of_key
from semel.messaging.marks import mark
from semel.messaging.outbox import parent_of
from semel.messaging.revisions import RevisionFilter
from semel.messaging.waiting import WaitingFilter, WaitingMessage

LEFT: Final = (
    "keys, ids, hashes and the audit trail stay; only what is stored was erased, and an attempt "
    "that runs now may still store something: run it again when such attempts are over"
)
"""What erasing does not do."""

PAGE: Final = 500
MOST_NAMES: Final = 100_000

# A worker that handles one of the messages may hold it for longer than the lock timeout, and
# the database ends one of two transactions that lock the same rows in another order.
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

    in_progress: int = 0
    """Messages that a worker is handling under a lease: it may still store something of them."""

    @property
    def total(self) -> int:
        """All payloads together."""
        counts: dict[str, int] = asdict(self)
        return sum(counts.values()) - self.in_progress

    @property
    def left(self) -> str:
        """What erasing did not do, in a sentence."""
        if not self.in_progress:
            return LEFT
        are = "message is" if self.in_progress == 1 else "messages are"
        return f"{self.in_progress} {are} being handled right now; {LEFT}"

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

    Only what is stored is erased: what an attempt that runs now stores later, and what the
    broker delivers later, is new.

    Raises:
        Misuse: both or neither of *key* and *message_id* is given, or no reason.
        Retryable: a worker is handling one of the stored messages; nothing was erased.
    """
    actor, reason = need_actor(actor), need_reason(reason, "erasing")
    if (key is None) == (message_id is None):
        raise Misuse("say what to erase: a key, or a message id")
    for left in reversed(range(MOST_TRIES)):
        try:
            async with acting(database) as unit:
                if key is not None:
                    erased = await _erase_key(unit, key, progress)
                else:
                    erased = await _erase_message(unit, message_id or "", progress)
                details: dict[str, object] = asdict(erased)
                if key is not None:
                    details["key_hash"] = hash_of_key(key)
                await unit.audit.append(
                    Act(actor, "erase", message_id=message_id or "", reason=reason, details=details)
                )
        except Locked as error:
            if not left:
                raise Retryable(
                    "another transaction holds one of these messages, as a worker does that is "
                    "handling it: nothing was erased. Run it again when that is over"
                ) from error
        except Retryable:
            if not left:
                raise
        else:
            return erased
    raise AssertionError("the last try returns, or raises")


async def _erase_key(unit: Unit, key: str, progress: Callable[[int], None]) -> Erased:
    waiting, in_progress = await _erase_waiting(unit, WaitingFilter(key=key), progress)
    inbox = await unit.inbox.erase(key=key)
    await unit.attempts.erase(AttemptFilter(key=key))
    return Erased(
        dead_letters=await unit.dead_letters.erase(DeadLetterFilter(key=key)),
        waiting=waiting,
        revisions=await unit.revisions.erase(RevisionFilter(key=key)),
        inbox=inbox,
        outbox=await unit.outbox.erase(key=key),
        results=await unit.claims.erase_key(key),
        in_progress=in_progress,
    )


async def _erase_message(unit: Unit, message_id: str, progress: Callable[[int], None]) -> Erased:
    erased = Erased()
    for name in sorted(await _names(unit, message_id)):
        waiting, _ = await _erase_waiting(unit, WaitingFilter(message_id=name), progress)
        consumers = await unit.claims.consumers_of(name)
        rows = [await unit.claims.look_up(consumer, name) for consumer in consumers]
        now = await unit.now()
        in_progress = sum(row is not None and is_leased(row, now) for row in rows)
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
            in_progress=in_progress,
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


async def _erase_waiting(
    unit: Unit, which: WaitingFilter, progress: Callable[[int], None]
) -> tuple[int, int]:
    """Erase waiting messages, and close their claims, so that deliveries find them parked.

    Return how many were erased, and how many are held under a lease.
    """
    erased = await unit.waiting.erase(which)
    closed = held = 0
    while page := await unit.waiting.find(which, PAGE):
        for message in page:
            held += await _close(unit, message)
        closed += len(page)
        progress(closed)
        which = replace(which, after_place=page[-1].place)
    return erased, held


async def _close(unit: Unit, message: WaitingMessage) -> bool:
    """Close the claim of an erased message; True where a lease holds it, which stays."""
    consumer, message_id, attempts = message.consumer, message.message_id, message.attempts
    row = await unit.claims.look_up(consumer, message_id)
    # The owner of the lease ends the message itself, with its effect or without its payload.
    is_held = row is not None and is_leased(row, await unit.now())
    if row is not None and row.state is ClaimState.COMPLETED:
        # A delivery was quicker than the retry worker: there is nothing left to decide.
        await unit.waiting.remove(consumer, message_id)
        await mark(unit, consumer, Mark.DUPLICATE, message.source)
    elif not is_held and (row is None or row.error_code != ERASED):
        await overrule(unit, consumer, message_id, Failure(ClaimState.PARKED, attempts, ERASED))
    if row is None or row.erased_at is None:
        await unit.claims.erase(consumer, message_id)
    return is_held
