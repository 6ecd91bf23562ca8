"""One small service, the histories that it lives through, and what must be true of each.

    records ─▶ runner ─▶ handler ─▶ effects, outbox ─▶ relay ─▶ receipts
                 └─▶ waiting room ─▶ retry worker

A history is a way to consume and something that happens meanwhile: nothing, a
death at a window, an owner that lives elsewhere.  What is
true in the end is `tests.messaging.jury`'s to say.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import count, cycle, product
from typing import Any, Final

from semel.codec import FromHeader, FromKey, Reading, unreadable_id
from semel.crashpoints import CrashPoint
from semel.errors import Retryable
from semel.lease import Owner
from semel.memory.broker import BrokerFailure, Call, MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Message, Partition, digest_of
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.claims import ClaimRequest, ClaimState
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.send.relay import LEASE_SECONDS, Relay
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.operate.parking import skip
from semel.operate.replay import Replay, ReplayNotAllowed, ReplaySettings
from semel.operate.selection import Letters, Offsets, Selection
from semel.outboxes import Outbox
from semel.policy.vocabulary import GiveUp, Mode, RetryMode
from semel.testing.clock import SimulatedClock
from semel.testing.crash import Crash, crash_at
from tests.messaging.jury import (
    EXHAUSTED,
    FAILS_ONCE,
    HOPELESS,
    LAST,
    NAME,
    P0,
    PLAN,
    RECEIPTS,
    TOPIC,
    Invariant,
    Violation,
    judge,
)
from tests.messaging.processes import next_process
from tests.messaging.worlds import Effect, close_all, memory_database

ATTEMPTS: Final = 3
MOST_CALLS: Final = 15
MOST_PASSES: Final = 60
FOREVER: Final = 1e12
MOST_DEATHS: Final = 12
LEASED_SECONDS: Final = 5.0
AT_ONCE: Final = RetryPolicy(
    max_attempts=ATTEMPTS, initial_delay_seconds=0.0, max_delay_seconds=0.0, jitter=False
)


UNFINISHED: Final = (ClaimState.IN_PROGRESS, ClaimState.FAILED_RETRYABLE)


@dataclass(frozen=True)
class Way:
    """A way to consume."""

    mode: Mode = Mode.TRANSACTIONAL
    retries: RetryMode = RetryMode.BLOCKING
    gives_up: GiveUp = GiveUp.DEAD_LETTER

    @property
    def settings(self) -> ConsumerSettings:
        retry = replace(
            AT_ONCE, initial_delay_seconds=0.5, max_delay_seconds=0.5, mode=self.retries
        )
        return ConsumerSettings(
            # Attempts are counted here, one outage after the other.
            circuit_failures=0,
            retry=retry,
            on_exhausted=self.gives_up,
            lease_seconds=LEASED_SECONDS,
            held_retry_seconds=0.0,
            poison_attempts=1,
        )


WAYS: Final = {
    "one by one": Way(),
    "with a retry table": Way(retries=RetryMode.RETRY_TABLE, gives_up=GiveUp.PARK),
    "in batches": Way(Mode.BATCHED),
    "in batches with a retry table": Way(Mode.BATCHED, RetryMode.RETRY_TABLE),
    "leased": Way(Mode.LEASED, RetryMode.RETRY_TABLE),
}

_owners = count(1)


@dataclass
class World:
    """A service in memory; time passes only between its passes."""

    way: Way
    history: str
    kills: str = ""
    """The message whose handler takes the process with it."""

    sleeps: str = ""
    """The message whose first owner sleeps longer than its lease."""

    is_mended: bool = False
    """Every message would be handled now."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)
    calls: Counter[str] = field(default_factory=Counter)
    deaths: int = 0

    def __post_init__(self) -> None:
        self.broker = MemoryBroker({TOPIC: 1, RECEIPTS: 1}, clock=self.clock, patience=Patience(1))
        self.database = memory_database(self.clock, lock_seconds=0.1)
        self.outbox = Outbox()
        reading = Reading(FromHeader("message-id"), key_from=FromKey())
        handler = self._leased if self.way.mode is Mode.LEASED else self._handle
        self.consumer = consumer(NAME, policy=self.way.settings, reading=reading)(handler)
        for record in PLAN:
            headers = {"message-id": record.id.encode()} if record.id else {}
            self.broker.put(TOPIC, record.value, record.key.encode(), headers)

    def convict(self, invariant: Invariant, what: object) -> None:
        raise Violation(invariant, self.history, str(what))

    async def _leased(self, message: Message, lease: Any) -> None:
        if message.id == self.sleeps and not self.calls[message.id]:
            self.calls[message.id] += 1
            self.clock.advance(LEASED_SECONDS + 1)
            await handle_leased(self.consumer, self.database, message, "awake", self.clock)
        async with lease.completing() as session:
            await self._handle(message, session)

    async def _handle(self, message: Message, session: Any) -> None:
        self.calls[message.id] += 1
        if self.calls[message.id] > MOST_CALLS:
            self.convict(Invariant.BOUNDED, f"{message.id} was tried {MOST_CALLS} times")
        session.add(Effect("paid", (message.key, message.id)))
        await self.outbox.add(session, RECEIPTS, {"of": message.id}, key=message.key)
        if message.id == self.kills:
            raise Crash(f"killed by {message.id}")
        if message.id == FAILS_ONCE and message.attempt == 1:
            raise RetryableMessageError("down")
        if self.is_mended:
            return
        if message.id == EXHAUSTED:
            raise RetryableMessageError("down for ever")
        if message.id == HOPELESS:
            raise NonRetryableMessageError("no such account")

    async def consume(self) -> None:
        """Work as one process, until nothing is left to do or it dies."""
        subscription = await self.broker.subscribe(NAME, [TOPIC])
        await self.broker.settled(NAME)
        commit = subscription.commit

        async def checked(offsets: Mapping[Partition, int]) -> None:
            await self._check_durable(offsets[P0])
            await commit(offsets)

        subscription.commit = checked  # type: ignore[method-assign]
        settings = RunnerSettings(
            self.way.mode, wait_seconds=0.0, settle_seconds=60.0, stop_seconds=0.1
        )
        owner = replace(Owner.here(), started=f"made up {next(_owners)}")
        runner = Runner(
            self.consumer, subscription, self.database, settings, clock=self.clock, owner=owner
        )
        handle = runner._leased if self.way.mode is Mode.LEASED else None
        try:
            for _ in range(MOST_PASSES):
                runner._settling.resume_due()
                worked = await runner._pass()
                await runner._finish(FOREVER)
                await retry_due(self.consumer, self.database, handle=handle)
                if not worked and await self._is_over():
                    await runner._membership.leave()
                    break
                self.clock.advance(1.0)
        finally:
            self.broker.kill(subscription)
            self.clock.advance(LEASED_SECONDS)

    async def _is_over(self) -> bool:
        async with self.database.begin() as unit:
            due = await unit.waiting.seconds_to_next(NAME)
        return due is None and self.broker.lag(NAME, TOPIC) == 0

    async def relay(self) -> None:
        """Publish what the effects send; the broker fails at the first message of a key."""
        try:
            relay = Relay(self.database, self.broker.publisher(), batch=3, retry=AT_ONCE)
            async with asyncio.timeout(5.0):
                await relay.run_until_empty()
        except TimeoutError:
            self.convict(Invariant.PUBLISHED, "the relay comes to no end")
        finally:
            self.clock.advance(LEASE_SECONDS + 1)

    async def live(self, death: AbstractContextManager[None]) -> None:
        """Go through the history: consume, release what is parked, publish; again after a death."""
        self.broker.fail(
            BrokerFailure(Call.MESSAGE, topic=RECEIPTS, key=b"b", error=Retryable("no"))
        )
        with death:
            for step in (
                self.consume,
                self._skip_parked,
                self.consume,
                self.relay,
                self._replay_what_is_refused,
                self._replay_what_was_handled,
            ):
                await self._insist(step)

    async def _replay_what_is_refused(self) -> None:
        """Send the dead letters back, which would work now, and is not allowed."""
        self.is_mended = True
        with suppress(ReplayNotAllowed):
            await self._replay("refused", Letters(), ReplaySettings(refusal="not these"))

    async def _replay_what_was_handled(self) -> None:
        await self._replay("handled", Offsets(P0, 0, 2), ReplaySettings(canary=()))

    async def _replay(self, name: str, which: Selection, settings: ReplaySettings) -> None:
        reader = self.broker.reader()
        what = (self.consumer, self.database, which, settings)
        handle = self._under_lease if self.way.mode is Mode.LEASED else None
        await Replay(
            *what, name=name, actor="ann", reader=reader, clock=self.clock, handle=handle
        ).run()

    async def _under_lease(self, message: Message, waiting: Any) -> Any:
        return await handle_leased(
            self.consumer, self.database, message, "ann", self.clock, waiting
        )

    async def _insist(self, step: Any) -> None:
        while True:
            try:
                await step()
            except Crash:
                self.deaths += 1
                next_process()
                if self.deaths > MOST_DEATHS:
                    self.convict(Invariant.BOUNDED, f"it died {self.deaths} times")
            else:
                return

    async def _skip_parked(self) -> None:
        async with self.database.begin() as unit:
            row = await unit.claims.look_up(NAME, EXHAUSTED)
        if row is not None and row.state is ClaimState.PARKED:
            await skip(self.database, NAME, EXHAUSTED, actor="ann", reason="it never works")

    async def _check_durable(self, offset: int) -> None:
        try:
            async with self.database.begin() as unit:
                for record in self.broker.records(TOPIC)[:offset]:
                    name = record.headers.get("message-id", b"").decode()
                    name = name or unreadable_id(record.at)
                    row = await unit.claims.look_up(NAME, name)
                    if row is None:
                        self.convict(Invariant.DURABLE, f"{name} is passed without a trace")
                    elif row.state in UNFINISHED and not await unit.waiting.get(NAME, name):
                        self.convict(Invariant.DURABLE, f"{name} is passed as {row.state}")
        except Retryable as error:
            self.convict(Invariant.DURABLE, f"committed inside a transaction ({error})")


POINTS: Final = [
    CrashPoint.CLAIM_AFTER,
    CrashPoint.HANDLE_AFTER,
    CrashPoint.MESSAGE_COMMIT_BEFORE,
    CrashPoint.MESSAGE_COMMIT_AFTER,
    CrashPoint.LEASED_CLAIM_AFTER,
    CrashPoint.LEASED_COMPLETE_BEFORE,
    CrashPoint.LEASED_COMPLETE_AFTER,
    CrashPoint.FAILURE_AFTER,
    CrashPoint.RETRY_TAKE_AFTER,
    CrashPoint.OUTCOMES_AFTER,
    CrashPoint.SETTLE_BEFORE,
    CrashPoint.SETTLE_AFTER,
]
RELAYED: Final = [point for point in CrashPoint if point.step.startswith("relay")]


def histories(whole: bool = False) -> Iterator[tuple[World, AbstractContextManager[None]]]:
    """Make the histories: those without a death first; of the deaths a sample, or the *whole*."""
    for name, way in WAYS.items():
        yield World(way, f"{name}, undisturbed"), nullcontext()
    for name, way in WAYS.items():
        yield World(way, f"{name}, beside another owner"), nullcontext()
        if way.mode is not Mode.LEASED:
            yield World(way, f"{name}, a message that kills", kills=LAST), nullcontext()
    yield World(WAYS["leased"], "leased, an owner that sleeps", sleeps="o1"), nullcontext()
    for name, point, time in deaths() if whole else some_deaths():
        yield World(WAYS[name], f"{name}, a death at {point}#{time}"), crash_at(point, None, time)


def deaths() -> list[tuple[str, CrashPoint, int]]:
    """List every way to consume, with every window to die at, for the first or third time."""
    relayed = product(["one by one"], RELAYED, (1, 3))
    return [*relayed, *product(WAYS, POINTS, (1, 3))]


def some_deaths() -> list[tuple[str, CrashPoint, int]]:
    """List every window once, the ways to consume and the times in turns, the last ones first."""
    ways = cycle(["with a retry table", *(name for name in WAYS if name != "with a retry table")])
    windows = zip(ways, reversed(POINTS), cycle((1, 3)), strict=False)
    relayed = product(["one by one"], RELAYED, (1,))
    return [*windows, *relayed]


async def _held_elsewhere(world: World) -> None:
    """Let somebody else have a lease on the last message, and never be heard of again."""
    [of] = [record for record in PLAN if record.id == LAST]
    async with world.database.begin() as unit:
        request = ClaimRequest(LAST, digest_of(of.value))
        await unit.claims.lease(NAME, request, owner="elsewhere", seconds=LEASED_SECONDS)


def walk(whole: bool = False) -> int:
    """Live through the histories and judge each; return how many there are.

    Raises:
        Violation: the first one that breaks an invariant.
    """

    async def live(world: World, death: AbstractContextManager[None]) -> None:
        try:
            if world.history.endswith("another owner"):
                await _held_elsewhere(world)
            await world.live(death)
            await judge(world)
        finally:
            await close_all()

    return sum(asyncio.run(live(*history)) or 1 for history in histories(whole))
