"""All consumers of a database on one page, what waits in their inboxes, and who runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from semel.errors import Misuse, NeedsOperator
from semel.messaging.records import (
    ConsumerEngine,
    DeadLetterFilter,
    InboxMessage,
    WaitingFilter,
    Waits,
)
from semel.operate.audit import acting, need_reason, write_down
from semel.operate.outbox import OutboxStatus
from semel.operate.status import owner_of
from semel.operate.stores import OperatorDatabase, OperatorUnit
from semel.pipeline.ledger import Ledger
from semel.pipeline.txn import Scope

HAND_OVER: Final = "consumer.hand-over"
"""The act in the audit trail."""

MOST_COUNTED: Final = 1000
"""Keys, gaps and stale claims are counted up to this number."""


@dataclass(frozen=True, slots=True)
class ConsumerOverview:
    """What a consumer has, and what needs a person."""

    consumer: str
    pipeline: str | None
    """The pipeline on Spark that runs it; null where services do."""

    processes: int
    """Of services, running now."""

    lag: int | None
    """Records behind, as its processes last wrote it; null where none of them did."""

    standing_since: float | None
    """Since when it stands still in an outage; null where it works."""

    inbox: int
    """Messages in its inbox that are due."""

    retries: int
    """Messages that wait for their next attempt."""

    dead_letters: int
    parked: int
    parked_keys: int
    gaps: int
    stale_claims: int

    @property
    def needs_attention(self) -> bool:
        """Something waits for a person, or records wait and no process runs."""
        waits = self.dead_letters or self.parked or self.gaps or self.stale_claims
        is_left = not (self.processes or self.pipeline) and bool(
            self.lag or self.inbox or self.retries
        )
        return bool(waits) or is_left or self.standing_since is not None


@dataclass(frozen=True, slots=True)
class Overview:
    """The answer of `overview`."""

    consumers: Sequence[ConsumerOverview]
    outboxes: Sequence[OutboxStatus]

    @property
    def needs_attention(self) -> bool:
        """A consumer or an outbox needs a person."""
        return any(one.needs_attention for one in self.consumers) or any(
            one.needs_attention for one in self.outboxes
        )


async def overview(database: OperatorDatabase) -> Overview:
    """Count what each consumer and each outbox of a database has; a transaction for each."""
    async with database.begin() as unit:
        names = await unit.members.consumers()
        outboxes = [
            OutboxStatus(name, await unit.outbox.numbers(name), await unit.outbox.leader(name))
            for name in await unit.members.outboxes()
        ]
    found: list[ConsumerOverview] = []
    for name in names:
        async with database.begin() as unit:
            found.append(await _of_one(unit, name))
    return Overview(found, outboxes)


async def _of_one(unit: OperatorUnit, name: str) -> ConsumerOverview:
    members = await unit.members.running(name)
    lags = [member.lag for member in members if member.lag is not None]
    standing = [member.standing_since for member in members if member.standing_since is not None]
    parked = await unit.waiting.count(WaitingFilter(name, waits=Waits.PARKED))
    engine = await unit.members.engine(name)
    return ConsumerOverview(
        name,
        None if engine is None else engine.pipeline,
        len(members),
        sum(lags) if lags else None,
        min(standing, default=None),
        await unit.inbox.pending(name),
        await unit.waiting.count(WaitingFilter(name, waits=Waits.RETRY)),
        await unit.dead_letters.count(DeadLetterFilter(consumer=name)),
        parked,
        len(await unit.waiting.held_keys(name, MOST_COUNTED)) if parked else 0,
        len(await unit.versions.gaps(name, MOST_COUNTED)),
        len(await unit.claims.in_progress(name, MOST_COUNTED, expired=True)),
    )


async def need_consumer(database: OperatorDatabase, name: str) -> None:
    """Check that a consumer has a row in any table; a database without any row knows all.

    Raises:
        Misuse: there are other consumers, and not this one.
    """
    async with database.begin() as unit:
        known = await unit.members.consumers()
    if known and name not in known:
        more = f" and {len(known) - 10} more" if len(known) > 10 else ""
        raise Misuse(
            f"there is no consumer {name!r} in this database; it has {', '.join(known[:10])}{more}"
        )


@dataclass(frozen=True, slots=True)
class InboxList:
    """The answer of `inbox_messages`."""

    consumer: str
    due: int
    """How many a worker will try; the list also holds those that failed."""

    messages: Sequence[InboxMessage]
    has_more: bool
    """There are more than were asked for."""

    @property
    def needs_attention(self) -> bool:
        """A message failed, and its worker has given it up or put it aside."""
        return any(message.due_at is None for message in self.messages)


async def inbox_messages(database: OperatorDatabase, consumer: str, limit: int) -> InboxList:
    """List the messages of an inbox that are not handled, the oldest first."""
    async with database.begin() as unit:
        found = await unit.inbox.outlines(consumer, limit + 1)
        due = await unit.inbox.pending(consumer)
        return InboxList(consumer, due, found[:limit], len(found) > limit)


class NotHandedOver(NeedsOperator):
    """The pipeline that runs a consumer may still change its messages: it keeps the consumer."""

    def __init__(self, consumer: str, pipeline: str, why: str) -> None:
        super().__init__(consumer, pipeline, why)
        self.consumer = consumer
        self.pipeline = pipeline
        self.why = why

    def __str__(self) -> str:
        return f"consumer {self.consumer} stays with {self.pipeline}: {self.why}"


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A consumer that services may run again."""

    consumer: str
    pipeline: str
    """The pipeline that ran it."""

    epoch: int
    """Of the pipeline's last start."""

    since: float
    """When the pipeline took the consumer over."""


async def pipeline_of(database: OperatorDatabase, consumer: str) -> str:
    """Return the pipeline that runs a consumer.

    Raises:
        Misuse: services run it.
    """
    async with database.begin() as unit:
        return _need_pipeline(await unit.members.engine(consumer), consumer).pipeline


def _need_pipeline(engine: ConsumerEngine | None, consumer: str) -> ConsumerEngine:
    if engine is None:
        raise Misuse(f"consumer {consumer} is run by services: there is nothing to hand over")
    return engine


async def hand_over(
    database: OperatorDatabase, consumer: str, ledger: Ledger, *, actor: str, reason: str
) -> HandedOver:
    """Take a consumer from the pipeline that runs it, so that services may claim for it again.

    *ledger* is the pipeline's.  The pipeline must have ended, and every cycle must be settled,
    also one that is only planned.  A pipeline that runs on in spite of it commits no cycle with
    messages of this consumer: its sink finds the consumer gone.

    Raises:
        NotHandedOver: the pipeline runs, or a cycle is not settled.
        Misuse: services run the consumer already, it is another ledger, or no reason is given.
        Locked: the pipeline is committing a cycle now.
    """
    reason = need_reason(reason, "handing a consumer over")
    async with acting(database) as unit:
        # From here on, until the commit, no cycle of the pipeline can commit.
        engine = await unit.members.lock_engine(consumer)
        engine = _need_pipeline(engine, consumer)
        if ledger.ledger_id != engine.ledger:
            raise Misuse(
                f"{ledger.url} is not the ledger of {engine.pipeline}, whose id is "
                f"{engine.ledger}: name it with --ledger"
            )
        scope = Scope(engine.ledger, engine.app, engine.query)
        why_not = _why_not(ledger, scope, await unit.members.unsettled(engine))
        if why_not:
            raise NotHandedOver(consumer, engine.pipeline, why_not)
        await unit.members.remove_engine(consumer)
        details: dict[str, Any] = {"pipeline": engine.pipeline, "epoch": engine.epoch}
        await write_down(unit, actor, HAND_OVER, consumer, reason=reason, **details)
    return HandedOver(consumer, engine.pipeline, engine.epoch, engine.since)


def _why_not(ledger: Ledger, scope: Scope, prepared: Sequence[str]) -> str:
    """Return what stands in the way of a hand-over; empty if nothing does."""
    owner = owner_of(ledger.scope_record(scope))
    if owner.is_live:
        return f"it runs, {owner}: stop it first"
    settle = "start the pipeline once more, or `semel recover`"
    for attempt in ledger.open_attempts(scope):
        return f"cycle {attempt.txn.cycle.label} is {attempt.state} in its ledger: {settle}"
    for cycle in prepared:
        return f"cycle {cycle} is prepared in the books of its sinks: {settle}"
    return ""
