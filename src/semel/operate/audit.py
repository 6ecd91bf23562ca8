"""The audit trail: what people do, each act in one transaction with its entry, and its check.

An act needs an actor and a reason; what refuses one, and the guard against loops, is here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeVar

from semel.clock import SYSTEM_CLOCK
from semel.crashpoints import CrashPoint, reach
from semel.errors import Misuse, NeedsOperator, Permanent, SemelError, reason_of
from semel.messaging.failed.waiting import leave_waiting
from semel.messaging.handle.claims import ClaimState, Failure, is_leased
from semel.messaging.outcome import Mark
from semel.messaging.receive.offsets import Ended
from semel.messaging.records import DeadLetter, StoredMessage, WaitingMessage
from semel.messaging.settings import ReplayRules
from semel.operate.stores import (
    FIRST_HASH,
    Act,
    AuditEntry,
    OperatorDatabase,
    OperatorUnit,
    Revision,
    hash_of,
)

Result = TypeVar("Result")


class NoSuchMessage(Misuse):
    """The message is not where an act looks for it: it was never there, or it has left."""

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
    """The message is there, but the act is not allowed in its present state."""

    def __init__(self, consumer: str, message_id: str, why: str) -> None:
        super().__init__(consumer, message_id, why)
        self.consumer = consumer
        self.message_id = message_id
        self.why = why

    def __str__(self) -> str:
        return f"consumer {self.consumer}, message {self.message_id!r}: {self.why}"


def need_reason(reason: str, act: str) -> str:
    """Return the reason without surrounding spaces, or raise Misuse if it is empty."""
    if not reason.strip():
        raise Misuse(f"{act} needs a reason, which the audit trail keeps")
    return reason.strip()


def need_actor(actor: str) -> str:
    """Return the actor's name without surrounding spaces, or raise Misuse if it is empty."""
    if not actor.strip():
        raise Misuse("an act needs an actor, whose name the audit trail keeps")
    return actor.strip()


class CycleUnsettled(NeedsOperator):
    """A pipeline has promised to change a consumer's messages, and has not done so yet."""

    def __init__(self, consumer: str, pipeline: str, cycle: str) -> None:
        super().__init__(consumer, pipeline, cycle)
        self.consumer = consumer
        self.pipeline = pipeline
        self.cycle = cycle

    def __str__(self) -> str:
        return (
            f"cycle {self.cycle} of {self.pipeline} is not settled, and may change messages of "
            f"consumer {self.consumer}: nothing was changed here; start the pipeline, or "
            f"`semel recover`"
        )


SETTLE_SECONDS: Final = 5.0
"""How long an act waits for a cycle that is prepared; while the pipeline runs, milliseconds."""

_LOOK_AGAIN_SECONDS: Final = 0.02

LOOKED_AT: Final = "dlq.inspect"
"""The act in the audit trail when a person looks at a dead letter."""

HARMLESS: Final = frozenset(
    {LOOKED_AT, "park.inspect", "park.classify", "delete.ask", "delete.refuse", "retention"}
)
"""Acts that change nothing that a cycle has read."""

EVERYWHERE: Final = "erase"
"""The act that is about no consumer, because it is about all of them."""


@asynccontextmanager
async def acting(database: OperatorDatabase) -> AsyncIterator[OperatorUnit]:
    """Open the one transaction of an act: what it changes, and its entry in the audit trail.

    Raises:
        CycleUnsettled: a pipeline runs the consumer, and has not settled a cycle; the act is
            rolled back.
    """
    async with database.begin() as unit:
        yield unit
        await _need_settled(unit)
        reach(CrashPoint.ACT_BEFORE)
    reach(CrashPoint.ACT_AFTER)


async def _need_settled(unit: OperatorUnit) -> None:
    """Wait until no cycle of the consumers' pipelines is prepared, or raise.

    The act has written, so it holds the locks of its rows, and only now looks at the books.  A
    cycle whose transaction is alive has its own rows locked.  One whose process died has no
    locks, and its rows look unchanged, but the books still name it.
    """
    acts = [act for act in unit.audit.written if act.act not in HARMLESS]
    if not acts:
        return
    names = {act.consumer for act in acts}
    is_everywhere = any(act.act == EVERYWHERE for act in acts)
    engines = [
        one for one in await unit.members.engines() if is_everywhere or one.consumer in names
    ]
    give_up_at = SYSTEM_CLOCK.monotonic() + SETTLE_SECONDS
    for engine in engines:
        while cycles := await unit.members.unsettled(engine):
            if SYSTEM_CLOCK.monotonic() > give_up_at:
                raise CycleUnsettled(engine.consumer, engine.pipeline, cycles[0])
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)


async def write_down(
    unit: OperatorUnit,
    actor: str,
    act: str,
    consumer: str = "",
    message_id: str = "",
    reason: str = "",
    **details: Any,
) -> None:
    """Write an act into the audit trail, in the transaction of what it changes."""
    await unit.audit.append(Act(need_actor(actor), act, consumer, message_id, reason, details))


AMONG_LETTERS: Final = "among its dead letters"
WAITING: Final = "in the waiting table"


def need_there(found: Result | None, consumer: str, message_id: str, where: str) -> Result:
    """Return what a store found or did; raise NoSuchMessage if it has no such message."""
    if not found:
        raise NoSuchMessage(consumer, message_id, where)
    return found


async def need_letter(unit: OperatorUnit, consumer: str, message_id: str) -> DeadLetter:
    """Return a dead letter, or raise NoSuchMessage."""
    found = await unit.dead_letters.get(consumer, message_id)
    return need_there(found, consumer, message_id, AMONG_LETTERS)


async def need_waiting(unit: OperatorUnit, consumer: str, message_id: str) -> WaitingMessage:
    """Return a waiting message, or raise NoSuchMessage."""
    found = await unit.waiting.get(consumer, message_id)
    return need_there(found, consumer, message_id, WAITING)


async def need_some(
    database: OperatorDatabase,
    need: Callable[[OperatorUnit, str, str], Awaitable[object]],
    consumer: str,
    message_ids: Iterable[str],
) -> None:
    """Check that at least one of the messages exists, before a person is asked about them.

    Raises:
        NoSuchMessage: none of them does; it names the first.
    """
    missing: NoSuchMessage | None = None
    async with database.begin() as unit:
        for message_id in message_ids:
            try:
                await need(unit, consumer, message_id)
            except NoSuchMessage as error:
                missing = missing or error
            else:
                return
    if missing is not None:
        raise missing


async def remove_letter(unit: OperatorUnit, consumer: str, message_id: str) -> None:
    """Remove a dead letter, or raise NoSuchMessage."""
    gone = await unit.dead_letters.remove(consumer, message_id)
    need_there(gone, consumer, message_id, AMONG_LETTERS)


async def remove_waiting(unit: OperatorUnit, message: WaitingMessage, end: Mark) -> None:
    """Remove a waiting message that a person ends, or raise NoSuchMessage or NotPossible.

    A message that a worker handles now stays.
    """
    consumer, message_id = message.consumer, message.message_id
    gone = await leave_waiting(unit, consumer, Ended(message_id, message.source, end))
    need_there(gone > 0, consumer, message_id, WAITING)
    await need_no_live_lease(unit, consumer, message_id)


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
        """Return whether one of them could not be done."""
        return not all(one.done for one in self.messages)


async def on_each(
    ids: Iterable[str],
    act: Callable[[str], Awaitable[Result]],
    note: Callable[[Result], str],
) -> Acts:
    """Act on each message in its own transaction; a failure does not stop the others.

    *note* says what was done, such as ``released``, from what *act* returned.
    """
    results = []
    for message_id in ids:
        try:
            results.append(Done(message_id, True, note=note(await act(message_id))))
        except SemelError as error:
            results.append(Done(message_id, False, reason_of(error)))
    return Acts(results)


async def complete_without_effect(
    unit: OperatorUnit, consumer: str, message_id: str, marker: str
) -> None:
    """Complete a claim because a person decided so; a completed one does not change."""
    await close_claim(unit, consumer, message_id, ClaimState.COMPLETED, marker)


async def close_claim(
    unit: OperatorUnit, consumer: str, message_id: str, state: ClaimState, marker: str
) -> None:
    """Close a claim because a person decided so; its attempts stay counted."""
    row = await unit.claims.look_up(consumer, message_id)
    attempts, code = (row.attempts, row.error_code) if row else (0, "")
    failure = Failure(state, attempts, code, marker=marker)
    await unit.claims.decide(consumer, message_id, failure)


async def keep_payload(unit: OperatorUnit, message: StoredMessage) -> None:
    """Keep the payload of a message that one person removes, as a revision.

    Only deleting, which needs two people, and erasing remove a payload.
    """
    known = await unit.revisions.of(message.consumer, message.message_id)
    hashes = {revision.payload_hash for revision in known}
    if message.payload is None or message.payload_hash in hashes:
        return
    await unit.revisions.add(Revision.of(message))


def need_payload(message: StoredMessage) -> None:
    """Raise NotPossible if the message's payload was erased."""
    if message.erased_at is not None:
        why = "its payload was erased, so it can only be skipped or deleted"
        raise NotPossible(message.consumer, message.message_id, why)


async def need_allowed(
    unit: OperatorUnit, message: StoredMessage, rules: ReplayRules | None
) -> None:
    """Raise NotPossible if a policy forbids to handle the message again.

    That is *rules*, and what the running processes of its consumer follow.
    """
    members = await unit.members.running(message.consumer)
    followed = {member.refusals for member in members if member.refusals}
    for one in (rules or ReplayRules(), *map(ReplayRules.of_refusals, followed)):
        refusal = one.of(message.topic or None).refusal
        if refusal is not None:
            raise NotPossible(message.consumer, message.message_id, refusal)


async def need_not_handled(unit: OperatorUnit, consumer: str, message_id: str) -> None:
    """Raise NotPossible if the message's claim is completed: it never opens again."""
    row = await unit.claims.look_up(consumer, message_id)
    if row is not None and row.state is ClaimState.COMPLETED:
        raise NotPossible(
            consumer,
            message_id,
            "a message with this id was handled already, and its claim never opens again; skip "
            "it, or give it a new id if it should have its effect a second time",
        )


async def need_no_live_lease(unit: OperatorUnit, consumer: str, message_id: str) -> None:
    """Raise NotPossible if a worker holds a live lease on the message.

    Call with its waiting row locked.  A worker that handles the message may have had its effect
    already, so no decision is allowed before the lease ends.
    """
    row = await unit.claims.look_up(consumer, message_id)
    if row is not None and is_leased(row, await unit.now()):
        why = f"{row.owner} handles it now; try again when its lease has ended"
        raise NotPossible(consumer, message_id, why)


SENT_BACK: Final = frozenset({"dlq.retry", "park.release"})
"""The acts by which a message is handled again; the loop guard counts them."""


LEFT_LETTERS: Final = SENT_BACK | {"dlq.park"}
"""The acts after which a dead letter is a new failure, and a person must look at it again."""


async def times_sent_back(unit: OperatorUnit, consumer: str, message_id: str) -> int:
    """Count how often a message was sent back, by replays and by hand together."""
    entries = await unit.audit.about(consumer, message_id)
    return sum(entry.act.act in SENT_BACK for entry in entries)


async def need_not_too_often(
    unit: OperatorUnit, consumer: str, message_id: str, at_most: int
) -> int:
    """Return how often a message was sent back; the loop guard raises NotPossible at *at_most*."""
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
    """Raise NotPossible if the policy requires a review, and there was none.

    Only a review after the last failure counts.
    """
    if not letter.needs_review:
        return
    acts = [e.act.act for e in await unit.audit.about(letter.consumer, letter.message_id)]
    # A review from before it was sent back was about another failure.
    for act in reversed(acts):
        if act == LOOKED_AT:
            return
        if act in LEFT_LETTERS:
            break
    raise NotPossible(
        letter.consumer,
        letter.message_id,
        "its policy wants a person to look at it first (dlq.manualReviewRequired), "
        "and there was no review since its last failure: semel dlq show",
    )


@dataclass(frozen=True, slots=True)
class AuditEntries:
    """The answer of `audit_entries`."""

    entries: Sequence[AuditEntry]


async def audit_entries(
    database: OperatorDatabase,
    *,
    about: tuple[str, str] | None = None,
    after: int | None = None,
    limit: int = 50,
) -> AuditEntries:
    """List entries: those about a consumer's message, those after a number, or the newest."""
    async with database.begin() as unit:
        if about is not None:
            found = await unit.audit.about(*about)
            return AuditEntries([entry for entry in found if entry.number > (after or 0)][-limit:])
        number, _ = await unit.audit.head()
        start = max(number - limit, 0) if after is None else after
        return AuditEntries(await unit.audit.read(start, limit))


def break_in(entries: Sequence[AuditEntry], before: AuditEntry | None = None) -> str | None:
    """Return where a stretch of the chain is broken; None if it is whole."""
    number = before.number if before else 0
    previous = before.hash if before else FIRST_HASH
    for entry in entries:
        if entry.number != number + 1:
            return f"entry {number + 1} is missing: {entry.number} follows {number}"
        if entry.previous_hash != previous:
            return f"entry {entry.number} does not follow the entry before it"
        if entry.hash != hash_of(entry.number, entry.at, entry.act, entry.previous_hash):
            return f"entry {entry.number} was changed"
        number, previous = entry.number, entry.hash
    return None


@dataclass(frozen=True, slots=True)
class Verified:
    """The chain is whole, and ends where its head says."""

    entries: int
    hash: str
    """Of the last entry.  Write it down outside of this database."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Somebody changed the trail."""

    where: str

    needs_attention: ClassVar = True


@dataclass(frozen=True, slots=True)
class NotedHead:
    """The end of the trail as a person noted it outside of this database."""

    number: int
    hash: str


PAGE: Final = 1000


async def verify_audit(
    database: OperatorDatabase,
    noted: NotedHead | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Verified | Broken:
    """Walk the whole chain, a page per transaction, and compare its end with the head.

    Entries may be appended meanwhile.  If somebody cut off the end together with the head,
    only a head that was *noted* before shows it.  *progress* is called after every page with
    the number of entries that were read, and of all entries.
    """
    last: AuditEntry | None = None
    while True:
        async with database.begin() as unit:
            # Read the head first, so the entries that are read next contain all that it counts.
            number, head_hash = await unit.audit.head()
            page = await unit.audit.read(last.number if last else 0, PAGE)
        where = break_in(page, last) or _against(noted, page)
        if where is not None:
            return Broken(where)
        if not page:
            return _end(last, number, head_hash, noted)
        last = page[-1]
        progress(last.number, number)


def _against(noted: NotedHead | None, page: Sequence[AuditEntry]) -> str | None:
    for entry in page:
        if noted is not None and entry.number == noted.number and entry.hash != noted.hash:
            return f"entry {entry.number} is not the one that was noted"
    return None


def _end(
    last: AuditEntry | None, number: int, head_hash: str, noted: NotedHead | None
) -> Verified | Broken:
    found = last.number if last else 0
    if noted is not None and noted.number > found:
        return Broken(f"the trail ends at {found}, and {noted.number} was noted")
    if number != found:
        return Broken(f"the trail ends at {found}, and its head says {number}")
    if head_hash != (last.hash if last else FIRST_HASH):
        return Broken(f"the head has another hash than entry {found}")
    return Verified(found, head_hash)
