"""Erasing, while somebody is handling the message, and of everything that came of it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from semel.codec import RawCodec
from semel.errors import Retryable
from semel.message import Coordinates, Message
from semel.messaging.claims import ClaimState
from semel.messaging.consumer import consumer
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.erase import Erased, erase
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handling import handle_message
from semel.messaging.inbox_worker import InboxWorker
from semel.messaging.inboxes import Inbox
from semel.messaging.leased import handle_leased
from semel.messaging.outbox import parent_of
from semel.messaging.outcome import DeadLettered, Handled, Refused
from semel.messaging.parking import KeepId, NewId, fix
from semel.messaging.retention import DAY_SECONDS, Retention, prune
from semel.messaging.retry import GiveUp, RetryMode, RetryPolicy
from semel.messaging.retrying import retry_due
from semel.messaging.revival import park_dead_letter
from semel.messaging.settings import ConsumerSettings
from semel.outboxes import Outbox
from semel.testing.contracts.messaging_world import in_world
from tests.messaging.act_world import ANN, BILLING, claim_of, letter_of, park, waiting_of
from tests.messaging.places import InMemory, InPostgres, InSqlite

SECRET = b'{"name": "Alice"}'
TWICE = RetryPolicy(
    max_attempts=2,
    initial_delay_seconds=0.0,
    max_delay_seconds=0.0,
    jitter=False,
    mode=RetryMode.RETRY_TABLE,
)
ONCE = ConsumerSettings(retry=RetryPolicy(max_attempts=1))


def message(message_id="m1", key="alice", raw=SECRET):
    at = Coordinates("payments", 0, 7)
    return Message(message_id, None, raw, key, headers={"message-id": b"m1"}, source=at)


class Late:
    """A database in which a message is erased between a failure and what is written of it."""

    def __init__(self, world, message_id):
        self._world = world
        self._message_id = message_id
        self.has_failed = False
        self.classification = world.database.classification

    def fail(self):
        self.has_failed = True

    @asynccontextmanager
    async def begin(self):
        if self.has_failed:
            self.has_failed = False
            await erased(self._world, message_id=self._message_id)
        async with self._world.database.begin() as unit:
            yield unit


def failing(policy, error=TimeoutError, fail=lambda: None):
    @consumer(BILLING, policy=policy)
    async def handle(message, session):
        fail()
        raise error("no")

    return handle


async def payloads(world):
    """Return everything that is left of a payload, wherever it may be."""
    async with world.database.begin() as unit:
        letters = await unit.dead_letters.find(DeadLetterFilter(), 100)
        kept = [(letter.payload, dict(letter.headers)) for letter in letters]
        for letter in letters:
            kept += [(r.payload, {}) for r in await unit.revisions.of(BILLING, letter.message_id)]
    return [one for one in kept if one != (None, {})]


class Erasing:
    @in_world
    async def test_an_attempt_that_fails_after_the_erasing_keeps_nothing(self, world):
        for mode in (GiveUp.DEAD_LETTER, GiveUp.PARK):
            name = f"m-{mode}"
            late = Late(world, name)
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
            late = Late(world, name)
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
    async def test_children_conflicts_and_results_go_with_their_message(self, world):
        for by in ({"message_id": "m1"}, {"key": "alice"}):
            handle = invoicing()
            await handle_message(handle, world.database, message())
            await handle_message(handle, world.database, message(raw=b'{"name": "Alice II"}'))

            done = await erase(world.database, **by, **ANN)

            claim = await claim_of(world, "m1")
            async with world.database.begin() as unit:
                children = await unit.outbox.children(parent_of(BILLING, "m1"))
                [letter] = await unit.dead_letters.find(DeadLetterFilter(conflicts_with="m1"), 9)
                assert await unit.outbox.read("outbox", 0, 10) == []
            assert done == Erased(dead_letters=1, outbox=1, results=1)
            assert [child.value for child in children] == [None]
            assert (letter.payload, letter.payload_hash[:4]) == (None, letter.message_id[9:13])
            assert (claim.state, claim.result) == (ClaimState.COMPLETED, None)
            assert (await erase(world.database, **by, **ANN)).total == 0
            await forget(world, claim, letter, children)

    @in_world
    async def test_a_conflict_of_any_id_is_found(self, world):
        names = ("m1", "M1", "x:m1", "100%", "n" * 490, "n" * 5000, "nul\0", "sha256:" + "0" * 64)
        handle = invoicing()
        for name in names:
            await handle_message(handle, world.database, message(name))
            await handle_message(handle, world.database, message(name, raw=b"other"))

        done = [await erase(world.database, message_id=name, **ANN) for name in names]

        assert [one.dead_letters for one in done] == [1] * len(names)
        assert await payloads(world) == []

    @in_world
    async def test_a_conflict_that_was_given_an_id_is_erased_with_the_one_it_came_with(self, world):
        handle = invoicing()
        await handle_message(handle, world.database, message())
        await handle_message(handle, world.database, message(raw=b"other"))
        async with world.database.begin() as unit:
            [letter] = await unit.dead_letters.find(DeadLetterFilter(conflicts_with="m1"), 9)
        await park_dead_letter(world.database, BILLING, letter.message_id, **ANN)
        await fix(world.database, BILLING, letter.message_id, b"fixed", ids=NewId("m1-b"), **ANN)

        done = await erase(world.database, message_id="m1", **ANN)

        assert (done.waiting, done.revisions) == (1, 3)
        assert (await waiting_of(world, "m1-b")).payload is None
        assert await claim_of(world, "m1-b") is not None

    @in_world
    async def test_a_conflict_that_comes_after_the_erasure_is_kept(self, world):
        handle = invoicing()
        await handle_message(handle, world.database, message())
        await erase(world.database, message_id="m1", **ANN)

        await handle_message(handle, world.database, message(raw=b"other"))

        async with world.database.begin() as unit:
            [letter] = await unit.dead_letters.find(DeadLetterFilter(conflicts_with="m1"), 9)
        assert (letter.payload, letter.erased_at) == (b"other", None)

    @in_world
    async def test_what_a_topic_of_dead_letters_is_to_get_goes_too(self, world):
        settings = replace(ONCE, dead_letter_topic="payments.dlq")
        buried = failing(settings, NonRetryableMessageError)
        for by in ({"message_id": "m1"}, {"key": "al\0ice"}):
            await handle_message(buried, world.database, message(key="al\0ice"))
            conflict = message(key="al\0ice", raw=b"other")
            await handle_message(buried, world.database, conflict)

            done = await erase(world.database, **by, **ANN)

            async with world.database.begin() as unit:
                assert await unit.outbox.read("outbox", 0, 10) == []
                for entry in await unit.outbox.parked("outbox", 10):
                    assert (entry.value, entry.headers) == (None, {})
                    await unit.outbox.drop("outbox", entry.message_id)
                for letter in await unit.dead_letters.find(DeadLetterFilter(), 10):
                    await unit.dead_letters.remove(BILLING, letter.message_id)
            assert (done.dead_letters, done.outbox) == (2, 2)
            await world.age(1_000)
            async with world.database.begin() as unit:
                await unit.claims.delete_expired(BILLING, 1, 10)

    @in_world
    async def test_the_result_of_an_inbox_goes_too(self, world):
        handle = invoicing()
        await Inbox(handle, world.database).store_and_handle(message())

        done = await erase(world.database, key="alice", **ANN)

        async with world.database.begin() as unit:
            row = await unit.inbox.get(BILLING, "m1")
        assert (done.inbox, done.outbox) == (1, 1)
        assert (row.payload, row.result) == (None, None)

    @in_world
    async def test_many_messages_are_erased_with_word_of_how_far_it_is(self, world):
        await park(world, *[f"m{number}" for number in range(5)], key="alice")
        await fix(world.database, BILLING, "m0", b"fixed", ids=KeepId(), **ANN)
        heard = []

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("semel.messaging.erase.PAGE", 2)
            done = await erase(world.database, key="alice", **ANN, progress=heard.append)

        assert (done.waiting, done.revisions) == (5, 2)
        assert heard == [2, 4, 5]
        for number in range(5):
            claim = await claim_of(world, f"m{number}")
            assert (claim.state, claim.error_code) == (ClaimState.PARKED, "ERASED")

    @in_world
    async def test_what_was_handled_before_the_retry_worker_came_is_not_left_for_a_person(
        self, world
    ):
        await park(world, "m1", key="alice", payload=SECRET)
        async with world.database.begin() as unit:
            await unit.claims.mark_completed(BILLING, "m1")

        erased = await erase(world.database, key="alice", **ANN)

        assert erased.waiting == 1
        assert await waiting_of(world, "m1") is None
        assert (await claim_of(world, "m1")).state is ClaimState.COMPLETED

    @in_world
    async def test_what_a_message_sent_is_found_however_long_it_could_not_leave(self, world):
        handle = invoicing()
        await handle_message(handle, world.database, message())
        await Inbox(handle, world.database).store_and_handle(message("m2"))
        await world.age(90 * DAY_SECONDS)
        await prune(world.database, BILLING, Retention())

        erased = [await erase(world.database, message_id=name, **ANN) for name in ("m1", "m2")]

        assert [done.outbox for done in erased] == [1, 1]

    @in_world
    async def test_what_cannot_be_locked_is_tried_again_and_then_said(self, world):
        tries = []

        class Away:
            @asynccontextmanager
            async def begin(self):
                tries.append(1)
                raise Retryable("the database is away")
                yield

        with pytest.raises(Retryable, match="away"):
            await erase(Away(), key="alice", **ANN)

        assert len(tries) == 3


async def erased(world, **by):
    await erase(world.database, **by, **ANN)


def invoicing():
    outbox = Outbox()

    @consumer(BILLING, policy=ConsumerSettings(keeps_results=True))
    async def handle(message, session):
        await outbox.add(session, "invoices", {"name": "Alice"}, key="invoice-1")
        return {"name": "Alice"}

    return handle


async def forget(world, claim, letter, children):
    """Take the rows away, so that the same can be tried once more."""
    async with world.database.begin() as unit:
        await unit.dead_letters.remove(BILLING, letter.message_id)
        for child in children:
            await unit.outbox.drop(child.outbox, child.message_id)
    await world.age(1_000)
    async with world.database.begin() as unit:
        assert await unit.claims.delete_expired(claim.consumer, 1, 10) == 1


class TestErasingInMemory(InMemory, Erasing):
    pass


class TestErasingInSqlite(InSqlite, Erasing):
    pass


class TestErasingInPostgres(InPostgres, Erasing):
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
