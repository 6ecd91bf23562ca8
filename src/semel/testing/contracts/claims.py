"""The contract of claims, executable: each message is handled once, in one transaction.

    class TestMyDatabase(ClaimsContract):
        @asynccontextmanager
        async def begin(self):
            async with sessions.begin() as session:
                yield SqlAlchemyProcessedMessageStore(session)

It shows whether a database keeps the promise as it is set up: with its driver, its pool, its
isolation level and any proxy between it and the program.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, ClassVar, Final, Protocol

import pytest

from semel.errors import Retryable
from semel.testing.contracts.contract import Contract

CONSUMER: Final = "billing"

STRANGE_IDS: Final = (
    " ",
    "ä/∀/🐟",
    "nul\0byte",
    "nul\\x00byte",
    "a lone surrogate \ud800",
    "a lone surrogate \\ud800",
    "x" * 512,
    "x" * 513,
    "x" * 100_000,
    "x" * 100_001,
    "ü" * 300,
    "sha256:3b1b1c5e",
    "'; DROP TABLE processed_message; --",
    "%s %(id)s :id $1 ?",
    "Case",
    "case",
    "trailing ",
    "trailing",
)

# Long enough for a statement to reach the row it waits for, and less than any lock timeout.
MOMENT_SECONDS: Final = 0.1


class ClaimingStore(Protocol):
    """What the contract asks of a store, in one open transaction."""

    async def claim(self, *, consumer_name: str, event_id: str) -> bool:
        """Claim a message; False if it was handled before."""
        ...


def in_database(test: Callable[[Any], Coroutine[Any, Any, None]]) -> Callable[[Any], None]:
    """Run an asynchronous test on a loop of its own, within `ClaimsContract.opened`."""

    @functools.wraps(test)
    def synchronous(contract: ClaimsContract) -> None:
        async def whole() -> None:
            async with contract.opened():
                await test(contract)

        asyncio.run(whole())

    return synchronous


class Rollback(Exception):
    """Raised in a transaction that is to be rolled back."""


class ClaimsContract(Contract):
    """What `claim` must do, in the transaction of its caller; derive a test class from it."""

    waits_for_locks: ClassVar[bool] = True
    """Two transactions can be open at once, and the second waits for the first's rows."""

    def begin(self) -> AbstractAsyncContextManager[ClaimingStore]:
        """Open a transaction: committed when the block ends, rolled back when it raises."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Have semel's tables ready, and empty, while a test runs; entered on the test's loop."""
        yield

    @in_database
    async def test_claim_is_true_for_a_new_message_and_false_for_a_handled_one(self) -> None:
        assert [await self._claim("m"), await self._claim("m")] == [True, False]

    @in_database
    async def test_a_claim_is_rolled_back_with_its_transaction(self) -> None:
        async with self._rolled_back() as claims:
            first = await claims.claim(consumer_name=CONSUMER, event_id="m")

        assert [first, await self._claim("m"), await self._claim("m")] == [True, True, False]

    @in_database
    async def test_each_consumer_claims_for_itself(self) -> None:
        await self._claim("shared")

        assert await self._claim("shared", consumer="shipping")

    @in_database
    async def test_ids_are_any_text_and_never_meet(self) -> None:
        first = [await self._claim(message_id) for message_id in STRANGE_IDS]
        second = [await self._claim(message_id) for message_id in STRANGE_IDS]

        assert first == [True] * len(STRANGE_IDS)
        assert second == [False] * len(STRANGE_IDS)

    @in_database
    async def test_the_second_waits_and_finds_what_the_first_has_committed(self) -> None:
        async with self.begin() as first:
            await first.claim(consumer_name=CONSUMER, event_id="m")
            second = await self._beside("m")

        assert await second is False

    @in_database
    async def test_the_second_takes_over_what_the_first_has_rolled_back(self) -> None:
        async with self._rolled_back() as first:
            await first.claim(consumer_name=CONSUMER, event_id="m")
            second = await self._beside("m")

        assert await second is True

    @in_database
    async def test_of_all_who_wait_in_line_one_is_granted_the_claim(self) -> None:
        async with self._rolled_back() as first:
            await first.claim(consumer_name=CONSUMER, event_id="m")
            second, third = await self._beside("m"), await self._beside("m")

        assert {await second, await third} == {True, False}

    @in_database
    async def test_a_claim_that_waits_too_long_is_an_error_and_never_a_duplicate(self) -> None:
        async with self._rolled_back() as first:
            await first.claim(consumer_name=CONSUMER, event_id="m")
            with pytest.raises(Retryable):
                await self._claim("m")

        assert await self._claim("m")

    @in_database
    async def test_different_messages_do_not_wait_for_each_other(self) -> None:
        if not self.waits_for_locks:
            return
        async with self.begin() as first, self.begin() as second:
            answers = [
                await first.claim(consumer_name=CONSUMER, event_id="m"),
                await second.claim(consumer_name=CONSUMER, event_id="n"),
                await second.claim(consumer_name="shipping", event_id="m"),
            ]

        assert answers == [True] * 3

    async def _claim(self, message_id: str, consumer: str = CONSUMER) -> bool:
        async with self.begin() as claims:
            return await claims.claim(consumer_name=consumer, event_id=message_id)

    @asynccontextmanager
    async def _rolled_back(self) -> AsyncIterator[ClaimingStore]:
        with suppress(Rollback):
            async with self.begin() as claims:
                yield claims
                raise Rollback

    async def _beside(self, message_id: str) -> asyncio.Task[bool]:
        """Start a claim and give it time to come to where it waits; it must not be done by then."""
        task = asyncio.create_task(self._claim(message_id))
        await asyncio.wait({task}, timeout=MOMENT_SECONDS)
        assert not task.done(), f"it should wait for the other transaction, and did: {task}"
        return task
