"""Erasing, while somebody is handling the message."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.codec import RawCodec
from semel.errors import Retryable
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Handled, Refused
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.operate.retention import Erased, erase
from semel.policy.vocabulary import GiveUp
from tests.messaging.act_world import ANN, BILLING, claim_of, letter_of, waiting_of
from tests.messaging.erasures import ONCE, SECRET, TWICE, Late, erased, failing, message, payloads
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world


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
            assert (claim.state, claim.marker) == (ClaimState.PARKED, "ERASED")

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
            runner = InboxWorker(handle, world.database)._new_runner()
            records = await runner.subscription.fetch(1, 0.0)
            await erased(world, message_id=name)
            runner._keep_workers()
            await runner._feed(records)
            await runner._drain(1e12)

            async with world.database.begin() as unit:
                row = await unit.inbox.get(BILLING, name)
                assert await unit.inbox.pending(BILLING) == 0
            # It is over by the erasing: a dead letter beside it would be a second end.
            assert (row.payload, row.due_at, row.error) == (None, None, "ERASED")
            assert await letter_of(world, name) is None
        assert await payloads(world) == []

    @in_world
    async def test_a_first_attempt_is_stored_nowhere_and_is_erased_by_the_next_run(self, world):
        late = Late(world, key="alice")
        handle = failing(ONCE, NonRetryableMessageError, late.fail)

        await handle_message(handle, late, message())
        stored = await payloads(world)
        again = await erase(world.database, key="alice", **ANN)

        assert stored == [(SECRET, {"message-id": b"m1"})]
        assert "run it again when such attempts are over" in again.left
        assert again.dead_letters == 1
        assert await payloads(world) == []

    @in_world
    async def test_the_answer_counts_what_is_handled_under_a_lease(self, world):
        answers = []

        @consumer(BILLING, policy=ConsumerSettings(retry=TWICE), codec=RawCodec())
        async def handle(message, lease):
            for by in ({"message_id": message.id}, {"key": "alice"}):
                answers.append(await erase(world.database, **by, **ANN))
            if message.attempt == 1:
                raise RetryableMessageError("down")

        async def leased(message, waiting):
            return await handle_leased(handle, world.database, message, "w1", waiting=waiting)

        await handle_leased(handle, world.database, message(), "w1")
        over = await erase(world.database, message_id="m1", **ANN)

        # Its claim has no key: by the key, a first attempt is not found before it waits.
        assert [done.in_progress for done in answers] == [1, 0]
        assert [done.total for done in answers] == [0, 0]
        assert answers[0].left.startswith("1 message is being handled right now; ")
        assert "run it again" in answers[0].left
        assert (over.in_progress, "right now" in over.left) == (0, False)

    @in_world
    async def test_the_answer_counts_retries_that_are_handled_under_a_lease(self, world):
        answers = []

        @consumer(BILLING, policy=ConsumerSettings(retry=TWICE), codec=RawCodec())
        async def handle(message, lease):
            if message.attempt == 1:
                raise RetryableMessageError("down")
            answers.append(await erase(world.database, key="alice", **ANN))

        async def leased(message, waiting):
            return await handle_leased(handle, world.database, message, "w1", waiting=waiting)

        await handle_leased(handle, world.database, message(), "w1")
        await retry_due(handle, world.database, handle=leased)

        assert [(done.waiting, done.in_progress) for done in answers] == [(1, 1)]

    @in_world
    async def test_what_is_read_after_the_erasing_is_new(self, world):
        await erased(world, key="alice")
        await erased(world, message_id="m1")

        await handle_message(failing(ONCE, NonRetryableMessageError), world.database, message())

        assert (await letter_of(world, "m1")).payload == SECRET


class TestErasingAttemptsInSqlite(InSqlite, ErasingAttempts):
    pass


class TestErasingAttemptsInPostgres(InPostgres, ErasingAttempts):
    @in_world
    async def test_whoever_handles_a_message_is_waited_for(self, world):
        began, go_on = asyncio.Event(), asyncio.Event()

        @consumer(BILLING, policy=ConsumerSettings(retry=RetryPolicy(max_attempts=1)))
        async def handle(message, session):
            began.set()
            await go_on.wait()
            raise NonRetryableMessageError("no")

        await Inbox(handle, world.database).store(message())
        worker = asyncio.create_task(InboxWorker(handle, world.database).run_until_empty())
        await began.wait()
        erasing = asyncio.create_task(erase(world.database, key="alice", **ANN))
        await asyncio.wait([erasing], timeout=0.2)
        assert not erasing.done()
        go_on.set()
        await worker

        # The attempt finds its message closed, unless it was quicker.
        assert await erasing in (Erased(inbox=1), Erased(dead_letters=1, inbox=1))
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

    @in_world
    async def test_a_worker_that_holds_a_message_too_long_is_named_and_nothing_is_erased(
        self, world
    ):
        await handle_message(failing(ConsumerSettings(retry=TWICE)), world.database, message())
        async with world.database.begin() as worker:
            assert await worker.waiting.take(BILLING, "m1") is not None
            with pytest.raises(Retryable, match=r"nothing was erased\. Run it again"):
                await erase(world.database, key="alice", **ANN)

        assert (await waiting_of(world, "m1")).payload == SECRET
        assert (await erase(world.database, key="alice", **ANN)).waiting == 1
