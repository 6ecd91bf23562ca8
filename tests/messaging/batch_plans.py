"""Random batches, and everything that their messages, handlers and policies can be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from sqlalchemy import Column, ForeignKey, MetaData, Table, Text, insert, select

from semel.codec import FromHeader
from semel.errors import Fenced
from semel.memory.database import MemoryDatabase, MemoryUnit
from semel.message import Coordinates, Message
from semel.messaging.claims import ClaimState
from semel.messaging.consumer import Consumer, consumer
from semel.messaging.database import Database
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.lanes import Order
from semel.messaging.outcome import Nack, Outcome, settlement
from semel.messaging.retry import GiveUp, RetryMode, RetryPolicy
from semel.messaging.sequence import GapPolicy
from semel.messaging.settings import BatchPolicy, ConsumerSettings, Duplicates
from semel.messaging.waiting import WaitingFilter
from semel.sqlalchemy.database import SqlDatabase
from semel.testing.clock import SimulatedClock
from semel.testing.contracts.messaging_world import DatabaseWorld
from tests.messaging.worlds import check_foreign_keys

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
DELIVERIES = st.builds(
    Planned,
    id=st.integers(0, 9),
    fails=st.sampled_from(["no"] * 8 + list(FAILURES)),
    payload=st.sampled_from([0, 0, 0, 0, 1]),
    version=st.sampled_from([1, 1, 2, 3]),
)
PLANS = st.lists(st.lists(DELIVERIES, min_size=1, max_size=12), min_size=1, max_size=3)


@st.composite
def behaviours(draw: st.DrawFn) -> tuple[ConsumerSettings, bool]:
    """Draw settings, and whether the handler takes batches."""
    takes_batches = draw(st.sampled_from([False, False, True]))
    batch = draw(st.sampled_from(BatchPolicy))
    mode = draw(st.sampled_from(RetryMode))
    stores = mode is RetryMode.RETRY_TABLE or batch is BatchPolicy.DEAD_LETTER
    order = draw(st.sampled_from([Order.KEY, Order.NONE] if stores else Order))
    # What comes back is delivered again until it does no more, which must not take time.
    delays = [0.0] if batch is BatchPolicy.FAIL_BATCH else [0.0, 100.0]
    settings = ConsumerSettings(
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
        chunk=draw(st.sampled_from([1, 3, 20])),
        batch=batch,
        conflict_tries=2,
        held_retry_seconds=0.0,
    )
    return settings, takes_batches


def commits(plan: list[Planned]) -> list[Planned]:
    """Return the plan without failures at the commit."""
    return [replace(one, fails="no") if one.fails == "commit" else one for one in plan]


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


async def _handled(message: Message, session: Any, never_sent: frozenset[str]) -> None:
    fails = message.payload["fails"]
    if message.is_duplicate:
        if message.id in never_sent:
            raise RetryableMessageError("not sent again")
        return
    of = NOBODY if fails == "commit" else None
    if hasattr(session, "execute"):
        await session.execute(insert(paid).values(id=message.id, how="handled", of=of))
        if fails == "sql":
            await session.execute(insert(paid).values(id=message.id, how="again"))
    else:
        session.add("paid", (message.id, "handled", of))
        if fails == "sql":
            raise ValueError("as a broken statement would")
    if fails in ERRORS:
        raise ERRORS[fails]()


def billing(chosen: ConsumerSettings, takes_batches: bool = False) -> Consumer:
    made = consumer(
        "billing", policy=chosen, id_from=FromHeader("message-id"), batches=takes_batches
    )

    # Of a batch that is kept whole, what comes back with a failure is no duplicate yet.
    is_whole = chosen.batch is BatchPolicy.FAIL_BATCH
    never_sent: frozenset[str] = frozenset() if is_whole else NEVER_SENT_AGAIN

    async def handle(message: Message, session: Any) -> None:
        await _handled(message, session, never_sent)

    async def handle_all(batch: list[Message], session: Any) -> None:
        for message in batch:
            await _handled(message, session, never_sent)

    return made(handle_all if takes_batches else handle)


async def state_of(database: Any) -> dict[str, Any]:
    """Everything that is durable, without times."""
    found: dict[str, Any] = {}
    async with database.begin() as unit:
        for number in range(10):
            row = await unit.claims.look_up("billing", f"m{number}")
            if row is not None:
                code = row.error_code
                found[f"m{number}"] = (row.state, row.attempts, code, row.payload_hash)
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
        gaps = await unit.versions.gaps("billing", 100)
        found["gaps"] = sorted((gap.key, gap.expected, gap.found) for gap in gaps)
        keys = [f"k{number}" for number in range(KEYS)]
        found["versions"] = [await unit.versions.current("billing", key) for key in keys]
        if isinstance(database, SqlDatabase):
            rows = (await unit.session.execute(select(paid))).all()
            found["paid"] = sorted((row.id, row.how) for row in rows)
    if not isinstance(database, SqlDatabase):
        found["paid"] = sorted((id, how) for id, how, _ in database.rows("paid"))
    return found


class StrictMemoryDatabase(MemoryDatabase):
    """A database in memory whose commit refuses rows that refer to nobody."""

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[MemoryUnit]:
        async with super().begin() as unit:
            yield unit
            if any(of == NOBODY for _, _, of in unit.session.rows("paid")):
                raise ValueError("refused by the commit")


@asynccontextmanager
async def strict_memory_world() -> AsyncIterator[DatabaseWorld]:
    clock = SimulatedClock()

    async def age(seconds: float) -> None:
        clock.advance(seconds)

    yield DatabaseWorld(StrictMemoryDatabase(clock, lock_seconds=0.3), age, waits_for_locks=False)


async def _prepared(world: DatabaseWorld) -> Database:
    if isinstance(world.database, SqlDatabase):
        await check_foreign_keys(world.database)
        async with world.database.engine.begin() as connection:
            await connection.run_sync(effects.create_all)
    return world.database


async def _run(
    world: DatabaseWorld, consume: Any, handler: Consumer, batches: list[list[Planned]]
) -> tuple[dict[str, Any], list[Outcome]]:
    database = await _prepared(world)
    outcomes: list[Outcome] = []
    comes_back = handler.settings.batch is BatchPolicy.FAIL_BATCH
    for batch in batches:
        if comes_back and handler.settings.versioned:
            # Nobody can tell a gap behind a message whose commit has yet to fail.
            batch = commits(batch)
        for _ in range(MOST_PASSES):
            found = await consume(handler, database, messages(batch))
            if not comes_back:
                outcomes += found
                break
            if not any(isinstance(settlement(outcome), Nack) for outcome in found):
                break
        else:
            raise AssertionError(f"it came back {MOST_PASSES} times: {found}")
    return await state_of(database), outcomes


def run_with(
    make: Callable[[], AbstractAsyncContextManager[DatabaseWorld]],
    consume: Any,
    behaviour: tuple[ConsumerSettings, bool],
    batches: list[list[Planned]],
) -> tuple[dict[str, Any], list[str]]:
    """Consume the batches in a new world; what is durable then, and the outcomes' names.

    A batch that may not be split is delivered until nothing of it comes back.  How that went
    is its own affair, so that it has no outcomes here.
    """
    settings, takes_batches = behaviour

    async def opened() -> tuple[dict[str, Any], list[Outcome]]:
        async with make() as world:
            return await _run(world, consume, billing(settings, takes_batches), batches)

    state, outcomes = asyncio.run(opened())
    return state, kinds(outcomes)


def kinds(outcomes: list[Outcome]) -> list[str]:
    return [type(outcome).__name__ for outcome in outcomes]
