"""Messages that kill their process: found out wherever they do it, and nobody else is blamed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from semel.codec import JsonCodec
from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Coordinates, Message
from semel.messaging.claims import ClaimState
from semel.messaging.consumer import Consumer, consumer
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handling import handle_message
from semel.messaging.outcome import ParkedAway
from semel.messaging.retry import RetryMode, RetryPolicy
from semel.messaging.retrying import retry_due
from semel.messaging.runner import Runner, RunnerSettings
from semel.messaging.settings import ConsumerSettings, Duplicates
from semel.messaging.waiting import Waits
from semel.testing.contracts.messaging_world import DatabaseWorld, in_world
from tests.messaging.places import InMemory, InPostgres, InSqlite

QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=0.2)
LIMIT = 2
POLICY = ConsumerSettings(
    retry=RetryPolicy(max_attempts=9, initial_delay_seconds=0.0, max_delay_seconds=0.0),
    held_retry_seconds=0.01,
    poison_attempts=LIMIT,
)
IN_TABLE = replace(POLICY, retry=replace(POLICY.retry, mode=RetryMode.RETRY_TABLE))


class Killed(BaseException):
    """The process is gone: nothing that it would do afterwards happens."""


class Deadly(JsonCodec):
    """A codec that does not outlive some payloads."""

    def __init__(self) -> None:
        self.kills = True

    def decode(self, raw: bytes, headers: Mapping[str, bytes]) -> Any:
        if self.kills and b"deadly" in raw:
            raise Killed
        if b"misuse" in raw:
            raise Misuse("the codec was not set up")
        return super().decode(raw, headers)


class Starts:
    """A service that is started again after every death."""

    def __init__(self, world: DatabaseWorld) -> None:
        self.database = world.database
        self.broker = MemoryBroker({"payments": 1}, patience=Patience(session_seconds=0.05))

    def send(self, *messages: tuple[str, bytes]) -> None:
        for id, raw in messages:
            self.broker.put("payments", raw, headers={"message-id": id.encode()})

    async def deaths(self, chosen: Consumer, most: int = 10) -> int:
        """Start it until it has worked everything off; return how often it died."""
        for deaths in range(most):
            subscription = await self.broker.subscribe("billing", ["payments"])
            await self.broker.settled("billing")
            runner = Runner(chosen, subscription, self.database, QUICK)
            try:
                await asyncio.wait_for(runner.run_until_idle(), 10)
            except Killed:
                continue
            finally:
                self.broker.kill(subscription)
            return deaths
        raise AssertionError(f"it died {most} times")

    async def state(self, id: str) -> ClaimState | None:
        async with self.database.begin() as unit:
            row = await unit.claims.look_up("billing", id)
        return None if row is None else row.state

    async def letters(self) -> list[Any]:
        async with self.database.begin() as unit:
            return list(await unit.dead_letters.find(DeadLetterFilter(), 10))

    async def tries(self, id: str) -> int:
        """Count the deaths that are noted against an id, and one more."""
        async with self.database.begin() as unit:
            noted = await unit.members.suspect("billing", id)
            await unit.members.acquit("billing", id)
        return noted - 1


class Deaths:
    @in_world
    async def test_a_record_that_kills_while_it_is_read_is_found_and_kept(self, world):
        service, seen = Starts(world), []
        service.send(("m0", b"{}"), ("m1", b'"deadly"'), ("m2", b"{}"))

        @consumer("billing", codec=Deadly(), policy=POLICY)
        async def handle(message: Message, session: Any) -> None:
            seen.append(message.id)

        deaths = await service.deaths(handle)
        (letter,) = await service.letters()

        assert deaths == 1 + LIMIT
        assert seen == ["m0", "m2"]
        assert letter.message_id == "unreadable:payments/0/1"
        assert (letter.payload, letter.error_code) == (b'"deadly"', "DESERIALIZATION_FAILED")
        assert "died 2 times while it read" in letter.reason
        assert service.broker.lag("billing", "payments") == 0
        assert await service.tries(letter.message_id) == 0

    @in_world
    async def test_a_handler_that_kills_is_not_taken_for_a_codec_that_does(self, world):
        service = Starts(world)
        service.send(("m0", b"{}"), ("m1", b"{}"))

        @consumer("billing", policy=POLICY)
        async def handle(message: Message, session: Any) -> None:
            if message.id == "m0":
                raise Killed

        deaths = await service.deaths(handle)

        assert deaths == 1 + LIMIT
        assert await service.state("m0") is ClaimState.PARKED
        assert await service.state("m1") is ClaimState.COMPLETED
        assert await service.letters() == []
        assert await service.tries("unreadable:payments/0/0") == 0

    @in_world
    async def test_an_invoked_duplicate_that_kills_is_put_aside_for_good(self, world):
        service = Starts(world)
        service.send(("m1", b"{}"), ("m1", b"{}"), ("m2", b"{}"))

        @consumer("billing", policy=replace(POLICY, duplicates=Duplicates.INVOKE))
        async def handle(message: Message, session: Any) -> None:
            if message.is_duplicate and message.id == "m1":
                raise Killed

        deaths = await service.deaths(handle)
        (letter,) = await service.letters()

        assert deaths == 1 + LIMIT
        assert (letter.message_id, letter.error_code) == ("m1", "CRASHED")
        assert await service.state("m1") is ClaimState.COMPLETED
        assert await service.state("m2") is ClaimState.COMPLETED
        assert service.broker.lag("billing", "payments") == 0

    @in_world
    async def test_a_waiting_message_that_kills_while_it_is_read_is_parked(self, world):
        service, codec = Starts(world), Deadly()

        @consumer("billing", codec=codec, policy=IN_TABLE)
        async def handle(message: Message, session: Any) -> None:
            raise RetryableMessageError("down")

        headers = {"message-id": b"m1"}
        at = Coordinates("payments", 0, 0)
        message = Message("m1", "deadly", b'"deadly"', headers=headers, source=at)
        await handle_message(handle, service.database, message)
        deaths = 0
        while deaths < 10:
            try:
                ((_, outcome),) = await retry_due(handle, service.database)
                break
            except Killed:
                deaths += 1
        async with service.database.begin() as unit:
            parked = await unit.waiting.get("billing", "m1")

        assert deaths == 1 + LIMIT
        assert isinstance(outcome, ParkedAway)
        assert (parked.waits, parked.error_code) == (Waits.PARKED, "CRASHED")
        assert parked.payload == b'"deadly"'
        assert await service.state("m1") is ClaimState.PARKED
        assert await service.tries("m1") == 0

    @in_world
    async def test_a_waiting_message_that_died_with_others_is_not_blamed_for_it(self, world):
        service, together = Starts(world), True

        @consumer("billing", policy=replace(IN_TABLE, poison_attempts=1))
        async def handle(message: Message, session: Any) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")
            if together:
                raise Killed  # by somebody else who ran beside it

        await handle_message(handle, service.database, Message("m1", {}, b"{}", headers=ID))
        with pytest.raises(Killed):
            await retry_due(handle, service.database)
        noted = await service.tries("m1")
        async with service.database.begin() as unit:
            await unit.members.suspect("billing", "m1")
        together = False
        await retry_due(handle, service.database)

        assert noted == 1
        assert await service.state("m1") is ClaimState.COMPLETED
        assert await service.tries("m1") == 0

    @in_world
    async def test_an_exception_while_reading_is_outlived(self, world):
        service, codec = Starts(world), Deadly()
        service.send(("m0", b'"deadly"'), ("m1", b'"misuse"'))

        @consumer("billing", codec=codec, policy=POLICY)
        async def handle(message: Message, session: Any) -> None:
            pass

        with pytest.raises(AssertionError):
            await service.deaths(handle, most=1)
        codec.kills = False
        for _ in range(LIMIT + 2):
            with pytest.raises(Misuse):
                await service.deaths(handle)

        assert await service.letters() == []
        assert await service.tries("unreadable:payments/0/1") == 0


ID = {"message-id": b"m1"}


class TestDeathsInMemory(InMemory, Deaths):
    pass


class TestDeathsInSqlite(InSqlite, Deaths):
    pass


class TestDeathsInPostgres(InPostgres, Deaths):
    pass
