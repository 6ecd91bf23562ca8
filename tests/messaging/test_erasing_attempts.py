"""Erasing, while somebody is handling the message."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from semel.codec import RawCodec
from semel.messaging.audit import Act
from semel.messaging.claims import ClaimState
from semel.messaging.consumer import consumer
from semel.messaging.erase import Erased, erase
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handling import handle_message
from semel.messaging.ids import hash_of_key
from semel.messaging.inbox_worker import InboxWorker
from semel.messaging.inboxes import Inbox
from semel.messaging.leased import handle_leased
from semel.messaging.outcome import DeadLettered, Handled, Refused
from semel.messaging.retry import GiveUp, RetryPolicy
from semel.messaging.retrying import retry_due
from semel.messaging.settings import ConsumerSettings
from semel.testing.contracts.messaging_world import in_world
from tests.messaging.act_world import ANN, BILLING, claim_of, letter_of, waiting_of
from tests.messaging.erasures import (
    ONCE,
    SECRET,
    TWICE,
    Late,
    erased,
    failing,
    invoicing,
    message,
    payloads,
)
from tests.messaging.places import InMemory, InPostgres, InSqlite


class ErasingAttempts:
    @in_world
    async def test_an_attempt_that_fails_after_the_erasing_keeps_nothing(self, world):
        for mode in (GiveUp.DEAD_LETTER, GiveUp.PARK):
            name = f"m-{mode}"
            late = Late(world, message_id=name)
            settings = ConsumerSettings(retry=TWICE, on_exhausted=mode)
            await handle_message(failing(settings), world.database, message(name, name))
            [(_, outcome)] = await retry_due(failing(settings, fail=late.fail), late)

            waiting, claim = await waiting_of(world, name), await claim_of(world, name)
            assert outcome == Refused("parked")
            assert await letter_of(world, name) is None
            assert (waiting.payload, waiting.headers) == (None, {})
            assert (claim.state, claim.error_code) == (ClaimState.PARKED, "ERASED")

    @in_world
    async def test_a_delivery_that_fails_after_the_erasing_is_kept_without_its_payload(self, world):
        tries = {
            "buried": (ConsumerSettings(retry=TWICE), NonRetryableMessageError),
            "stored": (ConsumerSettings(retry=replace(TWICE, max_attempts=5)), TimeoutError),
            "parked": (ConsumerSettings(on_hopeless=GiveUp.PARK), NonRetryableMessageError),
        }
        for name, (settings, error) in tries.items():
            await handle_message(failing(ConsumerSettings()), world.database, message(name, name))
            await world.age(1_000)
            late = Late(world, message_id=name)
            await handle_message(failing(settings, error, late.fail), late, message(name, name))

        letter = await letter_of(world, "buried")
        assert (letter.payload, letter.headers) == (None, {})
        assert letter.erased_at is not None
        assert letter.payload_hash == message().digest
        for name in ("stored", "parked"):
            waiting = await waiting_of(world, name)
            assert (waiting.payload, waiting.headers) == (None, {})
            assert waiting.erased_at is not None
            assert waiting.waits == "parked"
            assert (await claim_of(world, name)).state is ClaimState.PARKED
        assert await payloads(world) == []

    @in_world
    async def test_a_lease_that_ends_after_the_erasing_leaves_nothing(self, world):
        begun = []

        @consumer(BILLING, policy=ConsumerSettings(keeps_results=True))
        async def returns(message, lease):
            await erased(world, message_id=message.id)
            return {"name": "Alice"}

        @consumer(BILLING, policy=ONCE)
        async def fails(message, lease):
            begun.append(message.id)
            await erased(world, message_id=message.id)
            raise NonRetryableMessageError("no")

        await handle_leased(returns, world.database, message("returns"), "w1")
        outcome = await handle_leased(fails, world.database, message("fails"), "w1")

        claim = await claim_of(world, "returns")
        assert (claim.state, claim.result) == (ClaimState.COMPLETED, None)
        assert begun == ["fails"]
        assert isinstance(outcome, DeadLettered)
        assert await payloads(world) == []

    @in_world
    async def test_a_retry_under_a_lease_is_completed_after_the_erasing(self, world):
        @consumer(BILLING, policy=ConsumerSettings(retry=TWICE), codec=RawCodec())
        async def handle(message, lease):
            if message.attempt == 1:
                raise RetryableMessageError("down")
            await erased(world, message_id=message.id)

        async def leased(message, waiting):
            return await handle_leased(handle, world.database, message, "w1", waiting=waiting)

        await handle_leased(handle, world.database, message(), "w1")
        ((_, outcome),) = await retry_due(handle, world.database, handle=leased)

        assert isinstance(outcome, Handled)
        assert (await claim_of(world, "m1")).state is ClaimState.COMPLETED
        assert await waiting_of(world, "m1") is None
        assert await payloads(world) == []

    @in_world
    async def test_an_inbox_message_that_fails_after_the_erasing_keeps_nothing(self, world):
        for error in (NonRetryableMessageError, TimeoutError):
            handle = failing(ConsumerSettings(), error)
            name = error.__name__
            await Inbox(handle, world.database).store(message(name))
            worker = InboxWorker(handle, world.database)
            async with world.database.begin() as unit:
                [stored] = await unit.inbox.take_due(BILLING, 1)
            await erased(world, message_id=name)
            async with world.database.begin() as unit:
                await worker._fail(unit, stored, error("no"))

            async with world.database.begin() as unit:
                row = await unit.inbox.get(BILLING, name)
                assert await unit.inbox.pending(BILLING) == 0
            # It is over by the erasing: a dead letter beside it would be a second end.
            assert (row.payload, row.due_at, row.error) == (None, None, "ERASED")
            assert await letter_of(world, name) is None
        assert await payloads(world) == []

    @in_world
    async def test_a_first_attempt_is_stored_nowhere_and_still_leaves_nothing(self, world):
        ends = {
            "buried": ConsumerSettings(),
            "stored": ConsumerSettings(retry=replace(TWICE, max_attempts=5)),
            "parked": ConsumerSettings(on_hopeless=GiveUp.PARK),
        }
        for name, settings in ends.items():
            error = TimeoutError if name == "stored" else NonRetryableMessageError
            for how in ("key", "message_id"):
                its_name = f"{name}-{how}"
                late = Late(world, **{how: its_name})
                handle = failing(settings, error, late.fail)
                await handle_message(handle, late, message(its_name, its_name))

        for how in ("key", "message_id"):
            letter = await letter_of(world, f"buried-{how}")
            assert (letter.payload, letter.headers) == (None, {})
            for name in ("stored", "parked"):
                waiting = await waiting_of(world, f"{name}-{how}")
                assert (waiting.payload, waiting.headers) == (None, {})
                assert (waiting.waits, waiting.erased_at is None) == ("parked", False)
        async with world.database.begin() as unit:
            tries = [await unit.attempts.of(BILLING, f"{name}-key") for name in ends]
        assert [one.reason for (one,) in tries] == ["", "", ""]
        assert await payloads(world) == []

    @in_world
    async def test_a_first_attempt_under_a_lease_leaves_nothing_of_its_key(self, world):
        @consumer(BILLING, policy=ONCE)
        async def fails(message, lease):
            await erased(world, key="alice")
            raise NonRetryableMessageError("no")

        outcome = await handle_leased(fails, world.database, message(), "w1")

        assert isinstance(outcome, DeadLettered)
        assert (await letter_of(world, "m1")).erased_at is not None
        assert await payloads(world) == []

    @in_world
    async def test_a_conflict_that_was_under_way_keeps_nothing(self, world):
        handle = invoicing()
        await handle_message(handle, world.database, message())
        other = message(raw=b'{"name": "Alicia"}')
        await erased(world, key="alice")

        await handle_message(handle, world.database, other)

        assert await payloads(world) == []

    @in_world
    async def test_what_is_read_after_the_erasing_is_new(self, world):
        await erased(world, key="alice")
        await erased(world, message_id="m1")
        await world.age(60)

        await handle_message(failing(ONCE, NonRetryableMessageError), world.database, message())

        assert (await letter_of(world, "m1")).payload == SECRET

    @in_world
    async def test_erasing_others_touches_no_attempt(self, world):
        for by in ({"key": "bob"}, {"message_id": "m2"}):
            late = Late(world, **by)
            handle = failing(ONCE, NonRetryableMessageError, late.fail)
            await handle_message(handle, late, message())

        assert (await letter_of(world, "m1")).payload == SECRET


class TestErasingAttemptsInMemory(InMemory, ErasingAttempts):
    pass


class TestErasingAttemptsInSqlite(InSqlite, ErasingAttempts):
    pass


class TestErasingAttemptsInPostgres(InPostgres, ErasingAttempts):
    @in_world
    async def test_whatever_fails_around_an_erasure_and_was_read_before_leaves_nothing(self, world):
        chance = random.Random(7)

        @consumer(BILLING, policy=ONCE)
        async def handle(message, session):
            await asyncio.sleep(chance.random() / 20)
            raise NonRetryableMessageError("no")

        read = [message(f"m{number}") for number in range(40)]
        attempts = [handle_message(handle, world.database, one) for one in read]
        erasing = erase(world.database, key="alice", **ANN)

        *outcomes, _ = await asyncio.gather(*attempts, erasing)

        assert len([one for one in outcomes if isinstance(one, DeadLettered)]) > 20
        assert await payloads(world) == []

    @in_world
    async def test_erasing_waits_for_a_failure_that_is_being_written(self, world):
        other = failing(ONCE, NonRetryableMessageError)
        await handle_message(other, world.database, message("m0", "bob"))
        letter = replace(await letter_of(world, "m0"), message_id="m1", key="alice")
        async with world.database.begin() as unit:
            await unit.dead_letters.remove(BILLING, "m0")
            assert not await unit.audit.was_erased("m1", "alice", 60.0)
            erasing = asyncio.create_task(erase(world.database, key="alice", **ANN))
            await asyncio.wait([erasing], timeout=0.2)
            assert not erasing.done()
            await unit.dead_letters.put(letter)

        assert (await erasing).dead_letters == 1
        assert await payloads(world) == []

    @in_world
    async def test_a_failure_waits_for_the_erasing_that_is_under_way(self, world):
        async with world.database.begin() as erasing:
            await erasing.audit.begin_erasing()
            attempt = asyncio.create_task(
                handle_message(failing(ONCE, NonRetryableMessageError), world.database, message())
            )
            await asyncio.wait([attempt], timeout=0.1)
            assert not attempt.done()
            details = {"key_hash": hash_of_key("alice")}
            await erasing.audit.append(Act("ann", "erase", details=details))
            await asyncio.sleep(0.15)  # longer than from reading the message to asking

        assert isinstance(await attempt, DeadLettered)
        assert await payloads(world) == []

    @in_world
    async def test_whoever_handles_a_message_is_waited_for(self, world):
        began, go_on = asyncio.Event(), asyncio.Event()

        @consumer(BILLING, policy=ConsumerSettings(retry=RetryPolicy(max_attempts=1)))
        async def handle(message, session):
            began.set()
            await go_on.wait()
            raise NonRetryableMessageError("no")

        await Inbox(handle, world.database).store(message())
        worker = asyncio.create_task(InboxWorker(handle, world.database).work_once())
        await began.wait()
        erasing = asyncio.create_task(erase(world.database, key="alice", **ANN))
        await asyncio.wait([erasing], timeout=0.2)
        assert not erasing.done()
        go_on.set()
        await worker

        assert await erasing == Erased(dead_letters=1, inbox=1)
        assert await payloads(world) == []

    @in_world
    async def test_whoever_retries_a_message_is_waited_for_and_keeps_nothing(self, world):
        began, go_on = asyncio.Event(), asyncio.Event()
        tries = []

        @consumer(BILLING, policy=ConsumerSettings(retry=TWICE))
        async def handle(message, session):
            tries.append(message.attempt)
            if len(tries) > 1:
                began.set()
                await go_on.wait()
            raise TimeoutError("no")

        await handle_message(handle, world.database, message())
        worker = asyncio.create_task(retry_due(handle, world.database))
        await began.wait()
        erasing = asyncio.create_task(erase(world.database, key="alice", **ANN))
        await asyncio.wait([erasing], timeout=0.2)
        assert not erasing.done()
        go_on.set()
        await asyncio.gather(worker, erasing)

        assert tries == [1, 2]
        assert await payloads(world) == []
        assert (await claim_of(world, "m1")).state in (
            ClaimState.PARKED,
            ClaimState.FAILED_TERMINAL,
        )
