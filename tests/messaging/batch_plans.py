"""Random batches, and everything that their messages, handlers and policies can be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from sqlalchemy import Column, ForeignKey, MetaData, Table, Text, insert, select, text

from semel.codec import FromHeader
from semel.errors import Fenced
from semel.message import Coordinates, Message
from semel.messaging.database import Database
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.claims import Claimed, ClaimRequest, ClaimState, Failure
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Handled, Nack, Outcome, Skipped, settlement
from semel.messaging.records import DeadLetterFilter, WaitingFilter
from semel.messaging.send.outbox import OutboxEntry
from semel.messaging.settings import ConsumerSettings, Order, RetryPolicy
from semel.outboxes import Outbox
from semel.policy.vocabulary import BatchPolicy, Duplicates, GapPolicy, GiveUp, RetryMode
from semel.sql.database import SqlDatabase
from tests.messaging.worlds import check_foreign_keys
from tests.stores.world import DatabaseWorld

effects = MetaData()
known = Table("known", effects, Column("id", Text, primary_key=True))
paid = Table(
    "paid",
    effects,
    Column("id", Text, primary_key=True),
    Column("how", Text),
    Column("of", Text, ForeignKey(known.c.id, deferrable=True, initially="DEFERRED")),
)

KEYS = 4
NOBODY = "nobody"
"""A row that refers to it is refused, but only by the commit."""

NEVER_SENT_AGAIN = frozenset({"m4", "m7"})
"""Whose handler fails when it is invoked for a duplicate, every time."""

MOST_PASSES = 60


@dataclass(frozen=True, slots=True)
class Planned:
    """One delivery of a random batch."""

    id: int
    fails: str
    payload: int = 0
    version: int = 1

    @property
    def key(self) -> str | None:
        """A message has the same key in every delivery."""
        return None if self.id % KEYS == 3 else f"k{self.id % KEYS}"


FAILURES = ("retry", "never", "sql", "lost", "late", "fenced", "commit")
HELD = ("held", "let go")
"""Others have it under a lease while it is delivered: they complete it then, or let it go."""


def _deliveries(ids: int, good: int) -> st.SearchStrategy[Planned]:
    """Draw deliveries, so many of which succeed for every kind that does not."""
    kinds = (*FAILURES, *HELD)
    return st.builds(
        Planned,
        id=st.integers(0, ids - 1),
        fails=st.sampled_from(["no"] * (good * len(kinds)) + list(kinds)),
        payload=st.sampled_from([0, 0, 0, 0, 1]),
        version=st.sampled_from([1, 1, 2, 3]),
    )


SMALL = st.lists(st.lists(_deliveries(10, 1), min_size=1, max_size=12), min_size=1, max_size=3)
LARGE = st.lists(st.lists(_deliveries(40, 25), min_size=25, max_size=35), min_size=1, max_size=1)
"""So much fits behind one savepoint only where nothing has failed for long."""

PLANS = st.one_of(SMALL, SMALL, LARGE)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a consumer meets its batches."""

    settings: ConsumerSettings
    takes_batches: bool = False
    went_well: int = 0
    """So many messages before the first of the plan: the more, the larger its savepoints."""

    def made(self) -> Consumer:
        """Return a consumer that behaves so."""
        found = billing(self.settings, self.takes_batches)
        found.pace.went_well(self.went_well)
        return found


@st.composite
def behaviours(draw: st.DrawFn) -> Behaviour:
    """Draw settings, whether the handler takes batches, and what it has seen before."""
    takes_batches = draw(st.sampled_from([False, False, True]))
    batch = draw(st.sampled_from(BatchPolicy))
    mode = draw(st.sampled_from([RetryMode.BLOCKING, RetryMode.RETRY_TABLE]))
    stores = mode is RetryMode.RETRY_TABLE or batch is BatchPolicy.DEAD_LETTER
    order = draw(st.sampled_from([Order.KEY, Order.NONE] if stores else Order))
    # What comes back is delivered again until it does no more, which must not take time.
    delays = [0.0] if batch is BatchPolicy.FAIL_BATCH else [0.0, 100.0]
    settings = ConsumerSettings(
        circuit_failures=0,
        retry=RetryPolicy(
            max_attempts=draw(st.integers(1, 3)),
            initial_delay_seconds=draw(st.sampled_from(delays)),
            max_delay_seconds=100.0,
            jitter=False,
            mode=mode,
        ),
        on_exhausted=draw(st.sampled_from(GiveUp)),
        on_hopeless=draw(st.sampled_from(GiveUp)),
        order=order,
        holds_keys=draw(st.sampled_from([None, True])) if order is Order.KEY else None,
        duplicates=draw(st.sampled_from(Duplicates)),
        versioned=not takes_batches and draw(st.booleans()),
        gaps=draw(st.sampled_from([GapPolicy.RETRY, GapPolicy.PARK_KEY, GapPolicy.ALERT])),
        keeps_results=not takes_batches and draw(st.booleans()),
        chunk=draw(st.sampled_from([1, 3, 20])),
        batch=batch,
        conflict_tries=2,
        held_retry_seconds=0.0,
    )
    return Behaviour(settings, takes_batches, draw(st.sampled_from([0, 5_000])))


def without(plan: list[Planned], *kinds: str) -> list[Planned]:
    """Return the plan without failures of these kinds."""
    return [replace(one, fails="no") if one.fails in kinds else one for one in plan]


def messages(plan: list[Planned]) -> list[Message]:
    return [
        Message(
            f"m{p.id}",
            {"fails": p.fails},
            f"{p.id}:{p.payload}".encode(),
            p.key,
            headers={"message-id": f"m{p.id}".encode()},
            source=Coordinates("t", 0, offset),
            version=p.version,
        )
        for offset, p in enumerate(plan)
    ]


ERRORS: dict[str, Callable[[], Exception]] = {
    "retry": lambda: RetryableMessageError("later"),
    "never": lambda: NonRetryableMessageError("never"),
    "lost": lambda: ConnectionError("somebody else's connection"),
    "late": TimeoutError,
    "fenced": lambda: Fenced("somebody else's"),
}


outbox = Outbox()


async def _send(message: Message, session: Any) -> None:
    """Send two messages: one of the key's own, and one that has no key."""
    said = {"of": message.id, "attempt": message.attempt}
    await outbox.add(session, "receipts", said, key=message.key, cause=message)
    await outbox.add(session, "mails", said, cause=message)


async def _handled(message: Message, session: Any, never_sent: frozenset[str]) -> Any:
    fails = message.payload["fails"]
    await _send(message, session)
    if message.is_duplicate:
        if message.id in never_sent:
            raise RetryableMessageError("not sent again")
        return "sent again"
    of = NOBODY if fails == "commit" else None
    await session.execute(insert(paid).values(id=message.id, how="handled", of=of))
    if fails == "sql":
        await session.execute(insert(paid).values(id=message.id, how="again"))
    if fails in ERRORS:
        raise ERRORS[fails]()
    return f"paid {message.id}, attempt {message.attempt}"


def billing(chosen: ConsumerSettings, takes_batches: bool = False) -> Consumer:
    made = consumer(
        "billing", policy=chosen, id_from=FromHeader("message-id"), batches=takes_batches
    )

    # Of a batch that is kept whole, what comes back with a failure is no duplicate yet.
    is_whole = chosen.batch is BatchPolicy.FAIL_BATCH
    never_sent: frozenset[str] = frozenset() if is_whole else NEVER_SENT_AGAIN

    async def handle(message: Message, session: Any) -> Any:
        return await _handled(message, session, never_sent)

    async def handle_all(batch: list[Message], session: Any) -> None:
        for message in batch:
            await _handled(message, session, never_sent)

    return made(handle_all if takes_batches else handle)


async def state_of(database: Any, ids: set[str]) -> dict[str, Any]:
    """Everything that is durable of these messages, without times."""
    found: dict[str, Any] = {}
    async with database.begin() as unit:
        for id in sorted(ids):
            row = await unit.claims.look_up("billing", id)
            if row is not None:
                ended = (row.state, row.attempts, row.error_code, row.payload_hash)
                found[id] = (*ended, row.owner, row.result, row.result_key)
        letters = await unit.dead_letters.find(DeadLetterFilter(), 100)
        # Neighbours that come back bring a duplicate back, too: how often is their affair.
        done = {id for id, row in found.items() if row[0] is ClaimState.COMPLETED}
        found["letters"] = sorted(
            (x.message_id, 0 if x.message_id in done else x.attempts, x.error_code) for x in letters
        )
        waiting = await unit.waiting.find(WaitingFilter(), 100)
        # The order counts per key that is held; all others may have come in any order.
        found["waiting"] = sorted(
            (w.key, number, w.message_id, w.waits, w.attempts)
            for key in {w.key for w in waiting}
            for number, w in enumerate(w for w in waiting if w.key == key and w.held)
        ) + sorted((w.message_id, w.waits, w.attempts) for w in waiting if not w.held)
        found["outbox"] = _by_key(await unit.outbox.read("outbox", 0, 1_000))
        gaps = await unit.versions.gaps("billing", 100)
        found["gaps"] = sorted((gap.key, gap.expected, gap.found) for gap in gaps)
        keys = [f"k{number}" for number in range(KEYS)]
        found["versions"] = [await unit.versions.current("billing", key) for key in keys]
        rows = (await unit.session.execute(select(paid))).all()
        found["paid"] = sorted((row.id, row.how) for row in rows)
    return found


def _by_key(entries: Sequence[OutboxEntry]) -> dict[str, list[Any]]:
    """What leaves with each key, in its order; without one, in any."""
    found: dict[str, list[Any]] = {}
    for entry in entries:
        sent = (entry.message_id, entry.topic, entry.value, entry.parent, dict(entry.headers))
        found.setdefault(entry.key or "", []).append(sent)
    found.get("", []).sort(key=repr)
    return found


async def prepared(world: DatabaseWorld) -> SqlDatabase:
    """Make the handler's tables, whose foreign keys are checked by the commit."""
    assert isinstance(world.database, SqlDatabase)
    await check_foreign_keys(world.database, to_disk=False)
    async with world.database.engine.begin() as connection:
        await connection.run_sync(effects.create_all)
    return world.database


async def paid_ids(database: SqlDatabase) -> list[str]:
    """Return whose effects are committed, in their order."""
    async with database.begin() as unit:
        found = await unit.session.execute(text("SELECT id FROM paid ORDER BY rowid"))
        return list(found.scalars())


async def _lease(database: Database, batch: list[Planned]) -> dict[str, tuple[Claimed, str]]:
    """Let others take what is held in this batch, if they may; by id, and what they do then."""
    taken: dict[str, tuple[Claimed, str]] = {}
    async with database.begin() as unit:
        for planned, message in zip(batch, messages(batch), strict=True):
            if planned.fails not in HELD:
                continue
            answer = await unit.claims.lease(
                "billing", ClaimRequest.of(message), owner="others", seconds=1_000
            )
            if isinstance(answer, Claimed):
                taken[message.id] = answer, planned.fails
    return taken


async def _end_leases(database: Database, taken: dict[str, tuple[Claimed, str]]) -> None:
    async with database.begin() as unit:
        for id, (claimed, kind) in taken.items():
            if kind == "held":
                kept = await unit.claims.mark_completed("billing", id, claimed.fence, '"theirs"')
            else:
                failure = Failure(ClaimState.FAILED_RETRYABLE, claimed.attempt, "LET_GO")
                kept = await unit.claims.mark_failed("billing", id, failure, claimed.fence)
            assert kept, f"somebody has written past the lease on {id}"
    taken.clear()


async def _run(
    world: DatabaseWorld, consume: Any, handler: Consumer, batches: list[list[Planned]]
) -> tuple[dict[str, Any], list[Outcome]]:
    database = await prepared(world)
    outcomes: list[Outcome] = []
    comes_back = handler.settings.batch is BatchPolicy.FAIL_BATCH
    for batch in batches:
        if comes_back:
            # It takes back what stands before it, whose deliveries then fail once more.
            batch = without(batch, *HELD)
        if comes_back and handler.settings.versioned:
            # Nobody can tell a gap behind a message whose commit has yet to fail.
            batch = without(batch, "commit")
        taken = await _lease(database, batch)
        for _ in range(MOST_PASSES):
            found = await consume(handler, database, messages(batch))
            await _end_leases(database, taken)
            if not comes_back:
                outcomes += found
                break
            if not any(isinstance(settlement(outcome), Nack) for outcome in found):
                break
        else:
            raise AssertionError(f"it came back {MOST_PASSES} times: {found}")
    return await state_of(database, {f"m{one.id}" for batch in batches for one in batch}), outcomes


def run_with(
    make: Callable[[], AbstractAsyncContextManager[DatabaseWorld]],
    consume: Any,
    behaviour: Behaviour,
    batches: list[list[Planned]],
) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Consume the batches in a new world; what is durable then, and the outcomes.

    A batch that may not be split is delivered until nothing of it comes back.  How that went
    is its own affair, so that it has no outcomes here.
    """

    async def opened() -> tuple[dict[str, Any], list[Outcome]]:
        async with make() as world:
            return await _run(world, consume, behaviour.made(), batches)

    state, outcomes = asyncio.run(opened())
    results = [one.result if isinstance(one, Handled | Skipped) else None for one in outcomes]
    return state, list(zip(kinds(outcomes), results, strict=True))


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [type(outcome).__name__ for outcome in outcomes]
