"""Retention and erasure: delete what is old enough, and erase payloads.

Retention.  A claim that was deleted cannot recognise a duplicate any more.  So its time to
live must be longer than every window in which a duplicate can come, and only claims whose
message is over are deleted, in small transactions.

Erasure removes payloads wherever they are stored; hashes and the audit trail stay.

    first     the waiting messages, their claims, the inbox      a transaction that has locked
                                                                 one of them is waited for
    then      dead letters, revisions, the outbox, results,      what it wrote is found
              the reasons of failed attempts

An erased row stays visible and is never handled: a waiting message is parked, an outgoing
one is not sent.  Its claim says that it was erased, so an attempt that fails later stores no
payload.  Only what is stored is erased: the first attempt of a message that runs now has no
row yet.  The answer says so, and that the command should be run again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from semel.errors import Misuse, Retryable
from semel.message import Partition
from semel.messaging.database import Sweep
from semel.messaging.failed.waiting import leave_waiting
from semel.messaging.handle.claims import (
    DELETED,
    ERASED,
    Claimed,
    ClaimRequest,
    ClaimState,
    Failure,
    Locked,
    is_leased,
)
from semel.messaging.outcome import Mark
from semel.messaging.receive.broker import Reader
from semel.messaging.receive.offsets import Ended, mark
from semel.messaging.records import (
    DeadLetterFilter,
    MessageFilter,
    WaitingFilter,
    WaitingMessage,
    hash_of_key,
)
from semel.messaging.send.outbox import parent_of
from semel.messaging.settings import (
    DAY_SECONDS,
    WEEK_SECONDS,
    _seconds,
)
from semel.operate.audit import acting, close_claim, need_actor, need_reason, write_down
from semel.operate.stores import Act, OperatorDatabase, OperatorUnit
from semel.policy import vocabulary as words

if TYPE_CHECKING:
    from semel.policy.model import Policy


Delete: TypeAlias = Callable[[OperatorUnit], Awaitable[int]]


DEFAULT_SAFETY: Final = 2.0


MOST_DAYS: Final = 36_525
"""A century: longer than any system runs, and every database can compute with it."""


class ReplayRuns(Retryable):
    """A replay that is not over needs the claims: nothing is deleted until it is."""

    def __init__(self, consumer: str, replay: str) -> None:
        super().__init__(consumer, replay)
        self.consumer = consumer
        self.replay = replay

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer}: replay {self.replay!r} is not over and needs the claims; "
            f"nothing more is deleted until it has finished, or was ended with `semel replay "
            f"abandon`"
        )


def shortest_ttl(
    retention: float,
    replay_window: float,
    dlq_age: float,
    parking_age: float,
    safety: float = DEFAULT_SAFETY,
) -> float:
    """Return the shortest time to live, in the unit of the windows, that forgets no duplicate.

    *retention* is the topic's own: how long the broker may deliver a message again.

    Raises:
        Misuse: a window is negative or not a number, or the safety factor below 1.
    """
    windows = (retention, replay_window, dlq_age, parking_age)
    if not all(map(math.isfinite, (*windows, safety))) or min(windows) < 0 or safety < 1:
        raise Misuse("windows must be finite and at least 0, the safety factor at least 1")
    return max(windows) * safety


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a consumer's claims and processed inbox messages are kept."""

    ttl_seconds: float = 2 * WEEK_SECONDS
    """From the last change of their state on."""

    topic_retention_seconds: float = WEEK_SECONDS
    """How long the broker may deliver a message again."""

    replay_window_seconds: float = WEEK_SECONDS
    """How far back a replay may reach."""

    dead_letter_age_seconds: float = WEEK_SECONDS
    """How old a dead letter may become before it is sent back, parked or skipped."""

    parking_age_seconds: float = WEEK_SECONDS
    """How long a message may be parked."""

    expire_dead_letters: bool = False
    """Delete dead letters that are older than `dead_letter_age_seconds`."""

    safety: float = DEFAULT_SAFETY
    batch: int = 1000
    """How many rows one transaction deletes."""

    def __post_init__(self) -> None:
        if self.expire_dead_letters and not self.dead_letter_age_seconds > 0:
            raise Misuse("dead letters expire after an age, which is not given (`dlq.keep`)")
        if self.batch < 1:
            raise Misuse(f"batch must be at least 1, got {self.batch}")
        if not 0 < self.ttl_seconds <= MOST_DAYS * DAY_SECONDS:
            raise Misuse(
                f"the time to live must be more than 0 days and at most {MOST_DAYS:,}, got "
                f"{self.ttl_seconds / DAY_SECONDS:g}"
            )
        if self.ttl_seconds < self.shortest_seconds:
            raise Misuse(
                f"a time to live of {self.ttl_seconds / DAY_SECONDS:g} days forgets duplicates "
                f"that can still come: the longest window times {self.safety:g} is "
                f"{self.shortest_seconds / DAY_SECONDS:g} days"
            )

    @property
    def shortest_seconds(self) -> float:
        """The shortest time to live that these windows allow."""
        return shortest_ttl(
            self.topic_retention_seconds,
            self.replay_window_seconds,
            self.dead_letter_age_seconds,
            self.parking_age_seconds,
            self.safety,
        )


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted."""

    claims: int = 0
    """Deleted; likewise the following."""

    days: int = 0
    """Of lean claims: each has a table of its own."""

    dead_letters: int = 0
    """Dead letters that expired; the audit trail names each."""

    inbox: int = 0
    attempts: int = 0
    """Failed attempts of messages that are gone."""

    keys: int = 0
    """Locks of keys that had not been used for as long."""

    replays: int = 0
    """Replays that were over."""

    gaps: int = 0
    """Gaps that were closed."""

    notes: int = 0
    """Old crash notes."""

    approvals: int = 0
    """Decided requests about messages that are gone."""

    cycles: int = 0
    """Outcomes of cycles on Spark."""

    outcomes: int = 0
    """Ranges of offsets that the broker has deleted; only with a reader."""

    @property
    def total(self) -> int:
        """All rows together."""
        return sum(asdict(self).values())


async def prune(
    database: OperatorDatabase,
    consumer: str,
    settings: Retention,
    progress: Callable[[Pruned], None] = lambda pruned: None,
    reader: Reader | None = None,
    *,
    actor: str = "",
    reason: str = "",
) -> Pruned:
    """Delete what is over and older than its time to live, a batch per transaction.

    May be stopped and run again at any time.  IN_PROGRESS, FAILED_RETRYABLE and PARKED are
    never deleted, however old they are.  With a *reader*, the outcomes of offsets that the
    broker has deleted are deleted too.  Where an *actor* is named, the audit trail gets one
    entry with the first batch, and one with the counts at the end, unless nothing was deleted.

    Raises:
        ReplayRuns: a replay of the consumer has not finished, or began meanwhile.
        Misuse: dead letters expire, and no actor is named.
    """
    pruned = Pruned()
    if settings.expire_dead_letters:
        need_actor(actor)

    def act(name: str) -> Act | None:
        details = {"ttl_seconds": settings.ttl_seconds, **(asdict(pruned) if pruned.total else {})}
        return Act(need_actor(actor), name, consumer, "", reason, details) if actor else None

    for what, delete in (
        *_expiring(consumer, settings, actor, reason),
        *_deletes(consumer, settings),
        *await _outcome_deletes(database, consumer, settings, reader),
    ):
        while deleted := await _one_batch(
            database, consumer, delete, act("retention.begin") if not pruned.total else None
        ):
            pruned = replace(pruned, **{what: getattr(pruned, what) + deleted})
            progress(pruned)
    ended = act("retention")
    if pruned.total and ended is not None:
        async with acting(database) as unit:
            await unit.audit.append(ended)
    return pruned


def _expiring(
    consumer: str, settings: Retention, actor: str, reason: str
) -> list[tuple[str, Delete]]:
    if not settings.expire_dead_letters:
        return []

    async def expire(unit: OperatorUnit) -> int:
        until = await unit.now() - settings.dead_letter_age_seconds
        which = DeadLetterFilter(consumer=consumer, until=until)
        letters = await unit.dead_letters.outlines(which, settings.batch)
        for letter in letters:
            # As after a deletion by two people: the policy is the second one.
            one = (consumer, letter.message_id)
            await unit.dead_letters.remove(*one)
            await mark(unit, consumer, Mark.DELETED, letter.source)
            await unit.inbox.close(*one, DELETED)
            await close_claim(unit, *one, ClaimState.FAILED_TERMINAL, DELETED)
            await unit.attempts.erase(MessageFilter(*one))
            await unit.revisions.erase(MessageFilter(*one))
            said: dict[str, Any] = {
                "hash": letter.payload_hash,
                "first_failed_at": letter.first_failed_at,
            }
            await write_down(unit, actor, "dlq.expire", *one, reason, **said)
        return len(letters)

    return [("dead_letters", expire)]


def _deletes(consumer: str, settings: Retention) -> list[tuple[str, Delete]]:
    ttl, batch = settings.ttl_seconds, settings.batch
    claims, inbox, attempts, approvals = (Sweep() for _ in range(4))
    # Records about deleted messages are deleted after the messages.
    return [
        ("claims", lambda unit: unit.claims.delete_expired(consumer, ttl, batch, claims)),
        ("days", lambda unit: unit.claims.drop_days(consumer, ttl)),
        ("inbox", lambda unit: unit.inbox.delete_processed(consumer, ttl, batch, inbox)),
        ("attempts", lambda unit: unit.attempts.delete_gone(consumer, ttl, batch, attempts)),
        ("keys", lambda unit: unit.waiting.forget_keys(consumer, ttl, batch)),
        ("replays", lambda unit: unit.replays.delete_over(consumer, ttl, batch)),
        ("gaps", lambda unit: unit.versions.delete_closed(consumer, ttl, batch)),
        ("notes", lambda unit: unit.members.forget_notes(consumer, ttl, batch)),
        ("approvals", lambda unit: unit.approvals.delete_decided(consumer, ttl, batch, approvals)),
        ("cycles", lambda unit: unit.outcomes.delete_cycles(consumer, ttl, batch)),
    ]


async def _outcome_deletes(
    database: OperatorDatabase, consumer: str, settings: Retention, reader: Reader | None
) -> list[tuple[str, Delete]]:
    if reader is None:
        return []
    async with database.begin() as unit:
        partitions = await unit.outcomes.partitions(consumer)
    return [
        ("outcomes", partial(_forget_outcomes, consumer, place, start, settings.batch))
        for place in partitions
        for start, _ in [await reader.bounds(place)]
    ]


async def _forget_outcomes(
    consumer: str, place: Partition, below: int, batch: int, unit: OperatorUnit
) -> int:
    return await unit.outcomes.prune(consumer, place, below, batch)


async def _one_batch(
    database: OperatorDatabase, consumer: str, delete: Delete, begin: Act | None
) -> int:
    async with database.begin() as unit:
        for replay in await unit.replays.unfinished(consumer):
            raise ReplayRuns(consumer, replay)
        deleted = await delete(unit)
        if deleted and begin is not None:
            await unit.audit.append(begin)
        return deleted


def retention_of(policy: Policy, consumer: str) -> Retention:
    """Return how long a consumer's claims are kept: the longest that one of its topics needs.

    What the policy does not say of a topic's retention is taken for the broker's usual week.

    Raises:
        Misuse: one of the windows is longer than ``claims.ttl``.
        PolicyNameUnknown: there is no such consumer.
    """
    from semel.policy.model import SAFETY, USUAL_RETENTION

    holding = [policy.effective(consumer, topic) for topic in policy.topics_of(consumer) or (None,)]
    own = policy.consumer(consumer)
    usual = USUAL_RETENTION.total_seconds()
    windows = {
        "topic_retention_seconds": [_seconds(e.topic.retention, usual) for e in holding],
        "replay_window_seconds": [
            0.0 if e.replay is words.ReplayAllowed.NO else _seconds(e.replay_window)
            for e in holding
        ],
        "dead_letter_age_seconds": [_seconds(own.dlq.keep)],
        "parking_age_seconds": [_seconds(own.parking.keep)],
    }
    longest: dict[str, Any] = {name: max(lengths) for name, lengths in windows.items()}
    needed = SAFETY * max(longest.values())
    return Retention(
        ttl_seconds=_seconds(own.claims.ttl, needed),
        expire_dead_letters=own.dlq.expire,
        safety=SAFETY,
        **longest,
    )


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
    database: OperatorDatabase,
    *,
    key: str | None = None,
    message_id: str | None = None,
    actor: str,
    reason: str,
    progress: Callable[[int], None] = lambda messages: None,
) -> Erased:
    """Remove payloads and headers of a key's messages, or of one message, for all consumers.

    Also removed: what handling them put into the outbox, the results that were kept, and why
    attempts failed, because an exception may quote its input.  Ids that a person gave the
    message, and conflicts that came with its id, are included.  All of it is one transaction;
    *progress* is called with the number of waiting messages that were closed so far.  The audit
    entry says how much was erased, why and by whom, and holds no payload; it has the hash of
    the key, because the key itself may name a person.

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
                details = asdict(erased)
                if key is not None:
                    details["key_hash"] = hash_of_key(key)
                about = {"message_id": message_id or "", "reason": reason}
                await write_down(unit, actor, "erase", **about, **details)
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


async def _erase_key(unit: OperatorUnit, key: str, progress: Callable[[int], None]) -> Erased:
    which = MessageFilter(key=key)
    waiting, in_progress = await _erase_waiting(unit, WaitingFilter(key=key), progress)
    inbox = await _erase_inbox(unit, which)
    await unit.attempts.erase(which)
    return Erased(
        dead_letters=await unit.dead_letters.erase(which),
        waiting=waiting,
        revisions=await unit.revisions.erase(which),
        inbox=inbox,
        outbox=await unit.outbox.erase(key=key),
        results=await unit.claims.erase_key(key),
        in_progress=in_progress,
    )


async def _erase_message(
    unit: OperatorUnit, message_id: str, progress: Callable[[int], None]
) -> Erased:
    erased = Erased()
    for name in sorted(await _names(unit, message_id)):
        which = MessageFilter(message_id=name)
        waiting, _ = await _erase_waiting(unit, WaitingFilter(message_id=name), progress)
        consumers = await unit.claims.consumers_of(name)
        rows = [await unit.claims.look_up(consumer, name) for consumer in consumers]
        now = await unit.now()
        in_progress = sum(row is not None and is_leased(row, now) for row in rows)
        results = sum([await unit.claims.erase(consumer, name) for consumer in consumers])
        inbox = await _erase_inbox(unit, which)
        outbox = await unit.outbox.erase(message_id=name)
        await unit.attempts.erase(which)
        letters = await unit.dead_letters.outlines(DeadLetterFilter(message_id=name), MOST_NAMES)
        dead_lettered_by = {letter.consumer for letter in letters}
        for consumer in {*consumers, *await unit.inbox.consumers_of(name), *dead_lettered_by}:
            outbox += await unit.outbox.erase(parent=parent_of(consumer, name))
        erased += Erased(
            dead_letters=await unit.dead_letters.erase(which),
            waiting=waiting,
            revisions=await unit.revisions.erase(which),
            inbox=inbox,
            outbox=outbox,
            results=results,
            in_progress=in_progress,
        )
    return erased


async def _names(unit: OperatorUnit, message_id: str) -> set[str]:
    """Collect all ids under which a message is or was known, and those of its conflicts."""
    known: set[str] = set()
    todo = {message_id}
    while todo:
        name = todo.pop()
        known.add(name)
        letters = await unit.dead_letters.outlines(
            DeadLetterFilter(conflicts_with=name), MOST_NAMES
        )
        waiting = await unit.waiting.outlines(WaitingFilter(conflicts_with=name), MOST_NAMES)
        found = {letter.message_id for letter in letters} | {one.message_id for one in waiting}
        todo |= (found | await unit.revisions.other_names(name)) - known
    return known


async def _erase_waiting(
    unit: OperatorUnit, which: WaitingFilter, progress: Callable[[int], None]
) -> tuple[int, int]:
    """Erase waiting messages, and close their claims, so that deliveries find them parked.

    Return how many were erased, and how many are held under a lease.
    """
    erased = await unit.waiting.erase(which)
    closed = held = 0
    while page := await unit.waiting.outlines(which, PAGE):
        for message in page:
            held += await _close(unit, message)
        closed += len(page)
        progress(closed)
        which = replace(which, after_place=page[-1].place)
    return erased, held


async def _erase_inbox(unit: OperatorUnit, which: MessageFilter) -> int:
    """Erase messages of inboxes; those that were not handled yet never will be.

    Their claims say so to a worker that has fetched them; one that handles them is waited for.
    """
    for consumer, message_id in await unit.inbox.unhandled(which):
        answer = await unit.claims.try_claim(consumer, ClaimRequest(message_id))
        if isinstance(answer, Claimed):
            await unit.claims.pass_over(consumer, message_id, ERASED)
        # The owner of a lease ends it itself, with its effect or without its payload.
        await unit.claims.erase(consumer, message_id)
    return await unit.inbox.erase(which)


async def _close(unit: OperatorUnit, message: WaitingMessage) -> bool:
    """Close the claim of an erased message; True where a lease holds it, which stays."""
    consumer, message_id, attempts = message.consumer, message.message_id, message.attempts
    row = await unit.claims.look_up(consumer, message_id)
    # The owner of the lease ends the message itself, with its effect or without its payload.
    is_held = row is not None and is_leased(row, await unit.now())
    if row is not None and row.state is ClaimState.COMPLETED:
        # A delivery was quicker than the retry worker: there is nothing left to decide.
        await leave_waiting(unit, consumer, Ended(message_id, message.source, Mark.DUPLICATE))
    elif not is_held and (row is None or row.marker != ERASED):
        code = row.error_code if row is not None else ""
        parked = Failure(ClaimState.PARKED, attempts, code, marker=ERASED)
        await unit.claims.decide(consumer, message_id, parked)
    if row is None or row.erased_at is None:
        await unit.claims.erase(consumer, message_id)
    return is_held
