"""A database in memory, a clock, and one consumer whose handler fails as a test tells it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import FromHeader
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import Consumer, consumer
from semel.messaging.settings import ConsumerSettings, Order, RetryPolicy
from semel.policy.vocabulary import GiveUp, RetryMode
from semel.testing.clock import SimulatedClock
from tests.messaging.worlds import Effect, effects, memory_database


class Place:
    """A database, a clock, and a handler that can be told to fail."""

    def __init__(self, settings: ConsumerSettings | None = None, **options: Any) -> None:
        self.clock = SimulatedClock()
        self.database = memory_database(self.clock)
        self.failures: list[Exception] = []
        self.calls: list[Message] = []

        @consumer("billing", policy=settings, id_from=FromHeader("message-id"), **options)
        async def handle(message: Message, session: AsyncSession) -> str:
            self.calls.append(message)
            if not message.is_duplicate:
                session.add(Effect("payments", message.id))
            if self.failures:
                raise self.failures.pop(0)
            return f"paid {message.id}"

        self.consumer: Consumer = handle

    def deliver(self, message: Message) -> Any:
        return asyncio.run(handle_message(self.consumer, self.database, message))

    def retry(self) -> list[tuple[str, Any]]:
        return asyncio.run(retry_due(self.consumer, self.database))

    def state(self, message_id: str) -> ClaimState | None:
        row = self.ask(lambda unit: unit.claims.look_up("billing", message_id))
        return None if row is None else row.state

    def ask(self, question: Callable[[Any], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            async with self.database.begin() as unit:
                return await question(unit)

        return asyncio.run(whole())

    @property
    def payments(self) -> list[str]:
        return effects(self.database, "payments")


def message(number: int = 1, key: str | None = None, **options: Any) -> Message:
    raw = options.pop("raw", f'{{"n": {number}}}'.encode())
    return Message(
        f"m{number}",
        {"n": number},
        raw,
        key,
        headers={"message-id": f"m{number}".encode()},
        source=Coordinates("payments", 0, number),
        **options,
    )


def retrying(**options: Any) -> ConsumerSettings:
    policy = RetryPolicy(jitter=False, max_attempts=options.pop("attempts", 3), **options)
    return ConsumerSettings(retry=policy)


def held() -> ConsumerSettings:
    return ConsumerSettings(
        retry=RetryPolicy(jitter=False, mode=RetryMode.RETRY_TABLE, max_attempts=2),
        order=Order.KEY,
        holds_keys=True,
        on_exhausted=GiveUp.PARK,
        on_hopeless=GiveUp.PARK,
    )
