"""A broker, a database in memory, and a consumer between them that a runner serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import FromHeader
from semel.memory.broker import MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Message, Partition
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import is_delivery
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from tests.messaging.worlds import Effect, effects, memory_database

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=1.0)
POLICY = RetryPolicy(initial_delay_seconds=0.01, max_delay_seconds=0.05, jitter=False)


class Service:
    """A broker with one topic, a database, and a handler that can be told to fail."""

    def __init__(self, partitions: int = 1, **settings: Any) -> None:
        self.broker = MemoryBroker(
            {"payments": partitions}, patience=Patience(session_seconds=0.15)
        )
        self.database = memory_database()
        self.waits = True
        self.fail: Callable[[Message], None] = lambda message: None
        chosen = ConsumerSettings(**{"retry": POLICY, "held_retry_seconds": 0.01, **settings})

        @consumer("billing", policy=chosen, id_from=FromHeader("message-id"))
        async def handle(message: Message, session: AsyncSession) -> None:
            session.add(Effect("paid", message.id))
            self.fail(message)

        self.consumer: Consumer = handle

    def send(self, *numbers: int, key: str | None = None, partition: int | None = None) -> None:
        for number in numbers:
            self.broker.put(
                "payments",
                f'{{"n": {number}, "type": "paid"}}'.encode(),
                key=None if key is None else key.encode(),
                headers={"message-id": f"m{number}".encode()},
                partition=partition,
            )

    async def runner(self, settings: RunnerSettings = QUICK, only: Any = None) -> Runner:
        subscription = await self.broker.subscribe("billing", ["payments"])
        if self.waits:
            await self.broker.settled("billing")
        return Runner(only or self.consumer, subscription, self.database, settings)

    async def work(self, settings: RunnerSettings = QUICK) -> None:
        """Run until there is nothing to do, and leave cleanly."""
        runner = await self.runner(settings)
        await runner.run_until_idle()
        await runner._membership.leave()
        await runner.subscription.close()

    @property
    def committed(self) -> dict[str, int]:
        return {str(p): o for p, o in self.broker.committed("billing").items()}

    @property
    def paid(self) -> list[str]:
        return effects(self.database, "paid")

    async def ranges(self, partition: int = 0) -> list[tuple[int, int, str]]:
        """Return what deliveries left; marks of messages that were kept are beside them."""
        async with self.database.begin() as unit:
            found = await unit.outcomes.ranges("billing", Partition("payments", partition))
        return [(r.first, r.last, r.outcome) for r in found if is_delivery(r.outcome)]
