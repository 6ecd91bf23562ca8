"""The situations that a claim can find, each made on a database of any kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar, assert_never

from semel.message import digest_of
from semel.messaging.database import Unit
from semel.messaging.handle.claims import (
    ClaimAnswer,
    ClaimFound,
    ClaimRequest,
    ClaimRow,
    ClaimState,
    Failure,
    HeldElsewhere,
    Locked,
)
from semel.policy.vocabulary import StalePolicy
from tests.stores.world import DatabaseWorld

CONSUMER: Final = "billing"
OWNER: Final = "worker-1"
LEASE_SECONDS: Final = 60.0
DELAY_SECONDS: Final = 90.0

HASH: Final = digest_of(b"the payload")
OTHER_HASH: Final = digest_of(b"another payload")

# Long enough for a statement to reach the row it waits for, and less than any lock timeout.
MOMENT_SECONDS: Final = 0.1

MOST_TRIES: Final = 50

Result = TypeVar("Result")


class Rollback(Exception):
    """Raised in a transaction that is to be rolled back."""


@asynccontextmanager
async def rolled_back(world: DatabaseWorld) -> AsyncIterator[Unit]:
    """Open a transaction that does not commit."""
    with suppress(Rollback):
        async with world.database.begin() as unit:
            yield unit
            raise Rollback


def asking(message_id: str, payload_hash: str = HASH) -> ClaimRequest:
    """Return what asks for a message."""
    return ClaimRequest(message_id, payload_hash)


def failing(
    state: ClaimState = ClaimState.FAILED_RETRYABLE, attempts: int = 1, delay: float = 0.0
) -> Failure:
    """Return a failed attempt."""
    return Failure(state, attempts, "TIMEOUT", delay, HASH)


async def claim(world: DatabaseWorld, message_id: str, payload_hash: str = HASH) -> ClaimAnswer:
    """Claim in a transaction that commits; one that cannot be asked holds it elsewhere."""
    try:
        async with world.database.begin() as unit:
            return await unit.claims.try_claim(CONSUMER, asking(message_id, payload_hash))
    except Locked:
        return HeldElsewhere()


async def claim_and_roll_back(world: DatabaseWorld, message_id: str) -> ClaimAnswer:
    """Claim in a transaction that does not commit."""
    async with rolled_back(world) as unit:
        return await unit.claims.try_claim(CONSUMER, asking(message_id))


async def lease(
    world: DatabaseWorld,
    message_id: str,
    payload_hash: str = HASH,
    *,
    owner: str = OWNER,
    seconds: float = LEASE_SECONDS,
    stale: StalePolicy = StalePolicy.RECLAIM,
) -> ClaimAnswer:
    """Lease in a transaction that commits; one that cannot be asked holds it elsewhere."""
    request = asking(message_id, payload_hash)
    try:
        async with world.database.begin() as unit:
            return await unit.claims.lease(
                CONSUMER, request, owner=owner, seconds=seconds, stale=stale
            )
    except Locked:
        return HeldElsewhere()


async def fail(world: DatabaseWorld, message_id: str, failure: Failure | None = None) -> bool:
    """Write a failed attempt in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.claims.mark_failed(CONSUMER, message_id, failure or failing())


async def look_up(world: DatabaseWorld, message_id: str) -> ClaimRow | None:
    """Read a claim in a transaction of its own."""
    async with world.database.begin() as unit:
        return await unit.claims.look_up(CONSUMER, message_id)


async def known(world: DatabaseWorld, message_id: str) -> ClaimRow:
    """Read a claim that must be there."""
    row = await look_up(world, message_id)
    assert row is not None, f"{message_id!r} has no claim"
    return row


@asynccontextmanager
async def arranged(world: DatabaseWorld, found: ClaimFound, message_id: str) -> AsyncIterator[None]:
    """Make *found* what a claim of *message_id* finds while the block runs."""
    match found:
        case ClaimFound.NOTHING:
            pass
        case ClaimFound.COMPLETED | ClaimFound.OTHER_PAYLOAD:
            await claim(world, message_id)
        case ClaimFound.RETRYABLE_DUE:
            await fail(world, message_id)
        case ClaimFound.RETRYABLE_LATER:
            await fail(world, message_id, failing(delay=DELAY_SECONDS))
        case ClaimFound.TERMINAL:
            await fail(world, message_id, failing(ClaimState.FAILED_TERMINAL))
        case ClaimFound.PARKED:
            await fail(world, message_id, failing(ClaimState.PARKED))
        case ClaimFound.LEASE_LIVE:
            await lease(world, message_id)
        case ClaimFound.LEASE_EXPIRED:
            await lease(world, message_id)
            await world.age(LEASE_SECONDS + 1)
        case ClaimFound.LOCKED:
            async with world.database.begin() as unit:
                await unit.claims.try_claim(CONSUMER, asking(message_id))
                yield
            return
        case _ as never:
            assert_never(never)
    yield


def hash_for(found: ClaimFound) -> str:
    """Return the payload's hash with which a claim must come to find it."""
    return OTHER_HASH if found is ClaimFound.OTHER_PAYLOAD else HASH


async def beside(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Start *work* and give it time to come to where it waits; it must not be done by then."""
    task = asyncio.create_task(work)
    await asyncio.wait({task}, timeout=MOMENT_SECONDS)
    if task.done():
        raise AssertionError(f"it should wait for the other transaction, and did: {task}")
    return task


async def patiently(act: Callable[[], Awaitable[Result]]) -> Result:
    """Do it again where the whole database was locked for too long: the machine is busy."""
    for _ in range(MOST_TRIES):
        with suppress(Locked):
            return await act()
    raise AssertionError(f"the database was locked {MOST_TRIES} times")
