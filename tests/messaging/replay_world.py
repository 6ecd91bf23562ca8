"""A service whose handler can be told to fail, on any database, for the tests of replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import text

from semel.codec import FromHeader, FromPayload, Reading
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Message, Partition
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Outcome
from semel.messaging.settings import ConsumerSettings, Order, RetryPolicy
from semel.operate.replay import Replay, ReplayReport, ReplaySettings
from semel.operate.selection import Selection
from semel.policy.vocabulary import GapPolicy, GiveUp
from semel.testing.clock import SimulatedClock
from tests.stores.world import DatabaseWorld

TOPIC = "payments"
P0 = Partition(TOPIC, 0)
ALL_AT_ONCE = ReplaySettings(canary=())
POLICY = RetryPolicy(max_attempts=1, jitter=False)
DEAD = ConsumerSettings(retry=POLICY)
PARKS = ConsumerSettings(
    retry=POLICY,
    on_exhausted=GiveUp.PARK,
    on_hopeless=GiveUp.PARK,
    order=Order.KEY,
    holds_keys=True,
)


def never(message: Message) -> None:
    """Fail at nothing."""


class Lenient:
    """Reads everything."""

    name = "lenient"

    def decode(self, raw: bytes | None, headers: Mapping[str, bytes]) -> dict[str, Any]:
        return {}


@dataclass
class Service:
    """One consumer, and the table that it pays into."""

    world: DatabaseWorld
    settings: ConsumerSettings = DEAD
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    broken: Callable[[Message], None] = never

    def __post_init__(self) -> None:
        self.broker = MemoryBroker({TOPIC: 1}, clock=self.clock)
        reading = Reading(
            FromHeader("message-id"), key_from=FromPayload("key"), version_from=self.version_from
        )

        @consumer("billing", policy=self.settings, reading=reading)
        async def handle(message: Message, session: Any) -> None:
            await pay(session, message.id)
            self.broken(message)

        self.consumer: Consumer = handle

    @property
    def version_from(self) -> FromPayload | None:
        return FromPayload("version") if self.settings.versioned else None

    @property
    def database(self) -> Any:
        return self.world.database

    async def open(self) -> Service:
        """Make the handler's table, and let the broker's clock say what the database's says."""
        async with self.database.begin() as unit:
            self.clock.advance(await unit.now() - self.clock.now())
            await unit.session.execute(text("CREATE TABLE IF NOT EXISTS paid (id text)"))
        return self

    def refuse(self, *ids: str) -> None:
        """Let the handler fail at these messages, for ever."""

        def broken(message: Message) -> None:
            if message.id in ids:
                raise NonRetryableMessageError("no such account")

        self.broken = broken

    def heal(self) -> None:
        self.broken = never

    def read_everything(self) -> None:
        """Let the consumer read what it could not read before."""
        reading = replace(self.consumer.reading, codec=Lenient())
        self.consumer = replace(self.consumer, reading=reading)

    def put(self, *ids: str, key: str | None = None, value: bytes | None = None) -> None:
        """Put messages into the broker's log."""
        for message_id in ids:
            self.broker.put(
                TOPIC,
                value or payload(message_id, key),
                headers={"message-id": message_id.encode()},
            )

    async def deliver(self, *ids: str, key: str | None = None) -> list[Outcome]:
        return [
            await handle_message(self.consumer, self.database, message(message_id, key))
            for message_id in ids
        ]

    async def paid(self) -> list[str]:
        async with self.database.begin() as unit:
            return list((await unit.session.execute(text("SELECT id FROM paid"))).scalars())

    def replay(
        self,
        selection: Selection | None,
        settings: ReplaySettings = ALL_AT_ONCE,
        name: str = "again",
        **options: Any,
    ) -> Replay:
        return Replay(
            self.consumer,
            self.database,
            selection,
            settings,
            name=name,
            actor="ann",
            reader=self.broker.reader(),
            clock=self.clock,
            **options,
        )

    async def run(
        self, selection: Selection | None, *settings: Any, **options: Any
    ) -> ReplayReport:
        return await self.replay(selection, *settings, **options).run()


async def pay(session: Any, message_id: str) -> None:
    await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message_id})


def payload(message_id: str, key: str | None = None) -> bytes:
    of_key = f', "key": "{key}"' if key else ""
    return f'{{"id": "{message_id}"{of_key}}}'.encode()


def message(message_id: str, key: str | None = None) -> Message:
    return Message(
        message_id,
        {"id": message_id},
        payload(message_id, key),
        key,
        headers={"message-id": message_id.encode()},
        source=Coordinates(TOPIC, 0, 1),
    )


def counts(report: ReplayReport) -> dict[str, int]:
    """Return what is not nothing."""
    return {turn.value: number for turn, number in report.counts.items() if number}


async def dead(world: DatabaseWorld, number: int) -> Service:
    """Return a service with dead letters whose cause is gone."""
    service = await Service(world).open()
    ids = [f"m{n}" for n in range(number)]
    service.refuse(*ids)
    await service.deliver(*ids)
    service.heal()
    return service


async def gapped(world: DatabaseWorld, policy: GapPolicy) -> Service:
    """Apply version 1 of a key, and let version 4 come."""
    settings = ConsumerSettings(
        retry=DEAD.retry, versioned=True, gaps=policy, holds_keys=policy is GapPolicy.PARK_KEY
    )
    service = await Service(world, settings).open()
    for version in (1, 4):
        raw = f'{{"id": "m{version}", "key": "k", "version": {version}}}'.encode()
        one = replace(message(f"m{version}", "k"), raw=raw, version=version, digest="")
        await handle_message(service.consumer, world.database, one)
    return service
