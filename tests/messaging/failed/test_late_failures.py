"""An attempt that fails late: what others made of the message meanwhile stays, and is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState, Failure
from semel.messaging.handler import consumer
from semel.messaging.outcome import Ack, Refused, Skipped, settlement
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import GiveUp
from tests.messaging.places import InPostgres, InSqlite

RETRY = RetryPolicy(max_attempts=3, initial_delay_seconds=0.0, max_delay_seconds=0.0)


class Between:
    """A database in which somebody acts between the rollback and the failure's transaction."""

    def __init__(self, inside: Any, act: Callable[[Any], Awaitable[Any]]) -> None:
        self.inside = inside
        self.classification = inside.classification
        self._act: Callable[[Any], Awaitable[Any]] | None = act
        self._begun = 0

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[Any]:
        self._begun += 1
        if self._begun == 2 and self._act is not None:
            async with self.inside.begin() as unit:
                await self._act(unit)
        async with self.inside.begin() as unit:
            yield unit


def ends(state: ClaimState) -> Callable[[Any], Awaitable[Any]]:
    async def act(unit: Any) -> None:
        if state is ClaimState.COMPLETED:
            assert await unit.claims.mark_completed("billing", "m")
        else:
            assert await unit.claims.mark_failed("billing", "m", Failure(state, 2, "OTHER"))

    return act


class LateFailures:
    world: Callable[[], Any]

    @pytest.mark.parametrize("error", [RetryableMessageError, NonRetryableMessageError])
    @pytest.mark.parametrize("given_up", GiveUp)
    @pytest.mark.parametrize(
        ("state", "expected"),
        [
            (ClaimState.COMPLETED, Skipped()),
            (ClaimState.PARKED, Refused("parked")),
            (ClaimState.FAILED_TERMINAL, Refused("dead letter (OTHER)")),
        ],
    )
    def test_what_ended_a_message_stays_and_is_what_the_late_failure_is_told(
        self, state, expected, given_up, error
    ):
        policy = ConsumerSettings(retry=RETRY, on_hopeless=given_up, on_exhausted=given_up)

        @consumer("billing", policy=policy)
        async def handle(message: Message, session: Any) -> None:
            raise error("late")

        async def scenario() -> None:
            async with self.world() as world:
                database = Between(world.database, ends(state))

                outcome = await handle_message(handle, database, Message("m", {}))

                assert outcome == expected
                assert isinstance(settlement(outcome), Ack)
                async with world.database.begin() as unit:
                    row = await unit.claims.look_up("billing", "m")
                    letter = await unit.dead_letters.get("billing", "m")
                    waiting = await unit.waiting.get("billing", "m")
                assert row is not None
                assert row.state is state
                assert row.error_code in ("", "OTHER")
                assert (letter, waiting) == (None, None), "both are the other's to write"

        asyncio.run(scenario())


class TestLateFailuresInSqlite(InSqlite, LateFailures):
    pass


class TestLateFailuresInPostgres(InPostgres, LateFailures):
    pass
