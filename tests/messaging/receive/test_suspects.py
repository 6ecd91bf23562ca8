"""Messages that kill their process: found out wherever they do it, and nobody else is blamed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from semel.errors import Misuse, Retryable
from semel.message import Coordinates, Message, Record, digest_of
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimRequest, ClaimState
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled, ParkedAway, RetryLater, Skipped
from semel.messaging.receive import crash as notes
from semel.messaging.receive.crash import TURNS, handle_record
from semel.messaging.records import Member, Waits
from semel.policy.vocabulary import Duplicates, Mode
from tests.messaging.deaths import (
    ID,
    IN_TABLE,
    LIMIT,
    POLICY,
    Deadly,
    Killed,
    Refusing,
    Starts,
    wait,
)
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.processes import elsewhere, gone, next_process, running
from tests.stores.world import in_world


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
                next_process()
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
        next_process()
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

    @in_world
    async def test_what_another_process_is_at_is_no_suspect(self, world):
        """It runs, here or elsewhere, or was seen lately: nobody died."""
        service, alone = Starts(world), []

        @consumer("billing", policy=IN_TABLE)
        async def handle(message: Message, session: Any) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")
            alone.extend([message.id] * (TURNS._tried is not None))

        for writer in (running(), elsewhere(), "?"):
            await wait(handle, service.database, "m1", "m2")
            async with service.database.begin() as unit:
                for _ in range(LIMIT + 1):
                    await unit.members.suspect("billing", "m1", writer)
                await unit.members.note("billing", ["m2"], writer)
            done = dict(await retry_due(handle, service.database))
            noted = [await service.tries(id) for id in ("m1", "m2")]
            async with service.database.begin() as unit:
                await unit.claims.delete_expired("billing", -60, 10)

            assert [type(outcome) for outcome in done.values()] == [Handled, Handled]
            assert noted == [0, 0], "they are over, and nobody comes back to them"
        assert alone == []

    @in_world
    async def test_the_note_of_a_process_that_is_gone_makes_a_suspect(self, world):
        service, alone = Starts(world), []

        @consumer("billing", policy=IN_TABLE)
        async def handle(message: Message, session: Any) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")
            alone.extend([message.id] * (TURNS._tried is not None))

        ids = ["here", "elsewhere", "a member", "unknown"]
        await wait(handle, service.database, *ids)
        for id, writer in zip(ids, (gone(), elsewhere(), elsewhere(), "?"), strict=True):
            async with service.database.begin() as unit:
                await unit.members.note("billing", [id], writer.replace("example", id[:1]))
        await world.age(61)
        member = elsewhere().replace("example", "a")
        async with service.database.begin() as unit:
            await unit.members.enter(Member("billing", "x", member, frozenset(), 1), 60)
        await retry_due(handle, service.database)

        assert alone == ["here", "elsewhere", "unknown"]
        assert [await service.tries(id) for id in ids] == [0, 0, 0, 0]

    @in_world
    async def test_a_note_that_a_living_process_left_behind_hides_no_death(self, world):
        service = Starts(world)

        @consumer("billing", policy=IN_TABLE)
        async def handle(message: Message, session: Any) -> None:
            raise Killed if message.attempt > 1 else RetryableMessageError("down")

        for ids in (["m1"], ["m1", "m2"]):
            await wait(handle, service.database, *ids)
            async with service.database.begin() as unit:
                await unit.members.note("billing", ["m1"], running())
            await world.age(61)
            with pytest.raises(Killed):
                await retry_due(handle, service.database)
            async with service.database.begin() as unit:
                found = await unit.members.notes("billing", ["m1"])
                await unit.members.clear_notes("billing", ["m1"])

            assert (found["m1"].tries, found["m1"].writer) == (1, notes.this_process())

    @in_world
    async def test_a_message_under_a_living_lease_is_neither_tried_nor_parked(self, world):
        """However often it was tried: whoever holds it may be about to complete it."""
        service = Starts(world)

        @consumer("billing", policy=IN_TABLE, mode=Mode.LEASED)
        async def handle(message: Message, lease: Any) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")

        async def leased(message: Message, waiting: Any) -> Any:
            return await handle_leased(handle, service.database, message, "b", waiting=waiting)

        await handle_leased(handle, service.database, Message("m1", {}, b"{}", headers=ID), "a")
        async with service.database.begin() as unit:
            request = ClaimRequest("m1", digest_of(b"{}"))
            held = await unit.claims.lease("billing", request, owner="a", seconds=60)
            for _ in range(LIMIT + 2):
                await unit.members.suspect("billing", "m1", gone())
        ((_, outcome),) = await retry_due(handle, service.database, handle=leased)
        async with service.database.begin() as unit:
            completed = await unit.claims.mark_completed("billing", "m1", held.fence)

        assert isinstance(outcome, RetryLater)
        assert completed

    @in_world
    async def test_a_parked_killer_was_held_by_nobody_who_goes_on(self, world):
        """Its lease had ended: it is parked under that lease's fence, and no other."""
        service = Starts(world)

        @consumer("billing", policy=IN_TABLE, mode=Mode.LEASED)
        async def handle(message: Message, lease: Any) -> None:
            raise RetryableMessageError("down")

        await handle_leased(handle, service.database, Message("m1", {}, b"{}", headers=ID), "a")
        async with service.database.begin() as unit:
            request = ClaimRequest("m1", digest_of(b"{}"))
            held = await unit.claims.lease("billing", request, owner="a", seconds=60)
            for _ in range(LIMIT + 1):
                await unit.members.suspect("billing", "m1", gone())
        await world.age(61)
        ((_, outcome),) = await retry_due(handle, service.database)
        async with service.database.begin() as unit:
            completed = await unit.claims.mark_completed("billing", "m1", held.fence)

        assert isinstance(outcome, ParkedAway)
        assert not completed
        assert await service.tries("m1") == 0

    @in_world
    async def test_a_database_that_refuses_blames_no_record(self, world):
        """Neither that it kills while it is read, nor while it is handled."""
        service, seen = Starts(world), []
        database = Refusing(service.database)

        @consumer("billing", policy=POLICY)
        async def handle(message: Message, session: Any) -> None:
            seen.append(message.id)

        async def handled(arrival: Any) -> Any:
            return await handle_message(handle, service.database, arrival)

        record = Record(Coordinates("payments", 0, 0), b"{}", None, ID, 0.0)
        for refused in ([2], [2], [2], [2, 3], [2, 3], [2, 3], [2, 3], [4], [3, 4]):
            database.refuse(*refused)
            with suppress(Retryable):
                await handle_record(handle, database, record, handled)
        database.refuse()
        outcome = await handle_record(handle, database, record, handled)

        assert isinstance(outcome, Handled | Skipped)
        assert set(seen) == {"m1"}
        assert await service.letters() == []
        assert await service.tries("m1") == 0
        assert await service.tries("unreadable:payments/0/0") == 0

    @in_world
    async def test_a_cancelled_drain_blames_nobody(self, world):
        service, began = Starts(world), asyncio.Event()

        @consumer("billing", policy=IN_TABLE)
        async def handle(message: Message, session: Any) -> None:
            if message.attempt == 1:
                raise RetryableMessageError("down")
            began.set()
            await asyncio.sleep(60)

        await wait(handle, service.database, "m1", "m2", "m3")
        drain = asyncio.create_task(retry_due(handle, service.database))
        await asyncio.wait_for(began.wait(), 5)
        drain.cancel()
        await asyncio.wait({drain})

        assert drain.cancelled()
        assert [await service.tries(id) for id in ("m1", "m2", "m3")] == [0, 0, 0]


class TestDeathsInSqlite(InSqlite, Deaths):
    pass


class TestDeathsInPostgres(InPostgres, Deaths):
    pass
