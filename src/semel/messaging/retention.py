"""Retention: how long claims must be kept, and deleting those that are old enough.

A claim that is gone cannot recognise a duplicate any more.  So its time to live
must be longer than every window in which a duplicate can come, and only claims
whose message is over are deleted, in small transactions.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from semel.errors import Misuse, Retryable
from semel.message import Partition
from semel.messaging.broker import Reader
from semel.messaging.database import Database, Unit
from semel.messaging.sweep import Sweep

Delete: TypeAlias = Callable[[Unit], Awaitable[int]]
Begin: TypeAlias = Callable[[Unit], Awaitable[None]]

DAY_SECONDS: Final = 86_400.0
WEEK_SECONDS: Final = 7 * DAY_SECONDS
DEFAULT_SAFETY: Final = 2.0

MOST_DAYS: Final = 36_525
"""A century: whoever keeps claims for longer keeps them all, and needs no retention."""


class ReplayRuns(Retryable):
    """A replay needs the claims: nothing is deleted while somebody can go on with it."""

    def __init__(self, consumer: str, replay: str) -> None:
        super().__init__(consumer, replay)
        self.consumer = consumer
        self.replay = replay

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer}: replay {self.replay!r} is not over, and it needs the "
            f"claims; nothing more is deleted before it has finished or `semel replay abandon` "
            f"let it go"
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
        Misuse: a window is negative or no number, or the safety factor below 1.
    """
    windows = (retention, replay_window, dlq_age, parking_age)
    if not all(map(math.isfinite, (*windows, safety))) or min(windows) < 0 or safety < 1:
        raise Misuse("windows are numbers and not negative, and the safety factor is not below 1")
    return max(windows) * safety


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a consumer's claims and processed inbox messages are kept."""

    ttl_seconds: float = 2 * WEEK_SECONDS
    """From the last change of their state on."""

    topic_retention_seconds: float = WEEK_SECONDS
    """How long the broker may deliver a message again."""

    replay_window_seconds: float = WEEK_SECONDS
    """How far back somebody may replay."""

    dead_letter_age_seconds: float = WEEK_SECONDS
    """How old a dead letter may become before somebody has dealt with it."""

    parking_age_seconds: float = WEEK_SECONDS
    """How long a message may be parked."""

    safety: float = DEFAULT_SAFETY
    batch: int = 1000
    """How many rows one transaction deletes."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise Misuse("a batch deletes at least one row")
        if not 0 < self.ttl_seconds <= MOST_DAYS * DAY_SECONDS:
            raise Misuse(
                f"a time to live of {self.ttl_seconds / DAY_SECONDS:g} days is none: it is more "
                f"than 0 days, or claims were forgotten at once, and at most {MOST_DAYS:,}"
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
    """Notes of tries that nobody outlived, or took back."""

    approvals: int = 0
    """Decided requests about messages that are gone."""

    outcomes: int = 0
    """Ranges of offsets that the broker does not have any more."""

    @property
    def total(self) -> int:
        """All rows together."""
        return sum(asdict(self).values())


async def prune(
    database: Database,
    consumer: str,
    settings: Retention,
    progress: Callable[[Pruned], None] = lambda pruned: None,
    reader: Reader | None = None,
    begin: Begin | None = None,
) -> Pruned:
    """Delete what is over and older than its time to live, a batch per transaction.

    May be stopped and begun again at any time.  IN_PROGRESS, FAILED_RETRYABLE and PARKED are
    never deleted, whatever their age.  With a *reader*, the outcomes of offsets go that the
    broker has deleted: nobody can compare them with anything.  What *begin* writes, a word of
    who does it, becomes durable with the first batch.

    Raises:
        ReplayRuns: a replay of the consumer has not finished, or began meanwhile.
    """
    pruned = Pruned()
    for what, delete in (
        *_deletes(consumer, settings),
        *await _outcome_deletes(database, consumer, settings, reader),
    ):
        while deleted := await _one_batch(
            database, consumer, delete, begin if not pruned.total else None
        ):
            pruned = replace(pruned, **{what: getattr(pruned, what) + deleted})
            progress(pruned)
    return pruned


def _deletes(consumer: str, settings: Retention) -> list[tuple[str, Delete]]:
    ttl, batch = settings.ttl_seconds, settings.batch
    claims, inbox, attempts, approvals = (Sweep() for _ in range(4))
    # What is kept about messages that are gone goes behind the messages.
    return [
        ("claims", lambda unit: unit.claims.delete_expired(consumer, ttl, batch, claims)),
        ("inbox", lambda unit: unit.inbox.delete_processed(consumer, ttl, batch, inbox)),
        ("attempts", lambda unit: unit.attempts.delete_gone(consumer, ttl, batch, attempts)),
        ("keys", lambda unit: unit.waiting.forget_keys(consumer, ttl, batch)),
        ("replays", lambda unit: unit.replays.delete_over(consumer, ttl, batch)),
        ("gaps", lambda unit: unit.versions.delete_closed(consumer, ttl, batch)),
        ("notes", lambda unit: unit.members.forget_notes(consumer, ttl, batch)),
        ("approvals", lambda unit: unit.approvals.delete_decided(consumer, ttl, batch, approvals)),
    ]


async def _outcome_deletes(
    database: Database, consumer: str, settings: Retention, reader: Reader | None
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
    consumer: str, place: Partition, below: int, batch: int, unit: Unit
) -> int:
    return await unit.outcomes.prune(consumer, place, below, batch)


async def _one_batch(database: Database, consumer: str, delete: Delete, begin: Begin | None) -> int:
    async with database.begin() as unit:
        for replay in await unit.replays.unfinished(consumer):
            raise ReplayRuns(consumer, replay)
        deleted = await delete(unit)
        if deleted and begin is not None:
            await begin(unit)
        return deleted
