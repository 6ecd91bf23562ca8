"""Messages of an inbox, and what is done with them, for its contract.

The rules of an inbox's ends: what is deleted, erased, or closed by a person.

The executable contract of an inbox.

An implementation binds it in a few lines:

    class TestMyInbox(InboxContract):
        def world(self):
            return my_world()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from semel.errors import Misuse
from semel.messaging.database import Database
from semel.messaging.handle.claims import ClaimState, Failure, Locked
from semel.messaging.records import InboxMessage, MessageFilter
from tests.stores.deadletters import LETTER, STRANGE
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


def message(message_id: str, key: str | None = None, **more: Any) -> InboxMessage:
    """Make a message for the consumer ``stock``."""
    payload = message_id.encode("utf-8", "surrogatepass")
    fields: dict[str, Any] = {"consumer": "stock", "message_type": "reserve", **more}
    return InboxMessage(message_id=message_id, payload=payload, key=key, **fields)


async def store(database: Database, *messages: InboxMessage) -> list[bool]:
    """Store each message in a transaction of its own."""
    stored = []
    for one in messages:
        async with database.begin() as unit:
            stored.append(await unit.inbox.store(one))
    return stored


async def due(database: Database, limit: int = 100, consumer: str = "stock") -> list[str]:
    """Return the ids of what is due."""
    async with database.begin() as unit:
        found: Sequence[InboxMessage] = await unit.inbox.due(consumer, limit)
    return [one.message_id for one in found]


async def done(database: Database, message_id: str, result: str | None = None) -> None:
    """Complete the claim of a message, and settle it."""
    async with database.begin() as unit:
        await unit.claims.mark_completed("stock", message_id)
        if result is not None:
            await unit.claims.keep_result("stock", message_id, result, None)
        await unit.inbox.settle("stock", [message_id])


async def failed(
    database: Database, message_id: str, state: ClaimState = ClaimState.FAILED_TERMINAL
) -> None:
    """Write a failed attempt into the claim of a message, and settle it."""
    async with database.begin() as unit:
        known = await unit.claims.look_up("stock", message_id)
        attempts = 1 if known is None else known.attempts + 1
        await unit.claims.mark_failed("stock", message_id, Failure(state, attempts, "NO_STOCK"))
        await unit.inbox.settle("stock", [message_id])


async def get(database: Database, message_id: str) -> InboxMessage:
    """Return a message that is there."""
    async with database.begin() as unit:
        found = await unit.inbox.get("stock", message_id)
    assert found is not None, f"message {message_id} is not in the inbox"
    return found


class InboxEnds(DatabaseContract):
    """How messages leave an inbox without being handled, and what stays of them."""

    @in_world
    async def test_only_messages_that_were_processed_long_ago_are_deleted(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, *(message(str(n)) for n in range(6)))
        await store(world.database, message("1", consumer="audit"))
        for message_id in ("0", "1", "2"):
            await done(world.database, message_id)
        await failed(world.database, "4")
        await world.age(1000)
        await done(world.database, "3")

        async with world.database.begin() as unit:
            assert await unit.inbox.delete_processed("stock", 500, 2) == 2
            assert await unit.inbox.delete_processed("stock", 500, 10) == 1
            assert await unit.inbox.delete_processed("stock", 500, 10) == 0
            left = [await unit.inbox.get("stock", str(n)) for n in range(6)]

        assert [one is not None for one in left] == [False, False, False, True, True, True]
        assert await due(world.database, consumer="audit") == ["1"]

    @in_world
    async def test_an_erased_message_has_no_payload_and_is_not_tried(
        self, world: DatabaseWorld
    ) -> None:
        await store(
            world.database,
            message("1", "ada", headers={"name": b"Ada"}, payload_hash="aa"),
            message("2", "bob"),
            message("3", "ada"),
            message("4", "ada", consumer="audit"),
        )
        await done(world.database, "3", '{"name": "Ada"}')

        async with world.database.begin() as unit:
            assert await unit.inbox.erase(MessageFilter(key="ada", consumer="nobody")) == 0
            assert await unit.inbox.erase(MessageFilter(key="ada")) == 3
            assert await unit.inbox.erase(MessageFilter(key="ada")) == 0
            assert await unit.inbox.erase(MessageFilter(message_id="2", key="ada")) == 0
            assert await unit.inbox.erase(MessageFilter(message_id="2")) == 1

        found = await get(world.database, "1")
        assert (found.payload, found.headers, found.payload_hash) == (None, {}, "aa")
        assert found.erased_at is not None
        assert await due(world.database) == []
        processed = await get(world.database, "3")
        assert processed.processed_at is not None
        assert processed.result is None

    @in_world
    async def test_an_attempt_that_fails_late_does_not_bring_an_erased_message_back(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, message("1"))
        async with world.database.begin() as unit:
            await unit.inbox.erase(MessageFilter(message_id="1"))

        await failed(world.database, "1")

        assert await due(world.database) == []
        assert (await get(world.database, "1")).due_at is None

    @in_world
    async def test_an_erased_message_without_a_dead_letter_is_closed(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, *(message(name) for name in ("1", "2", "3", "4")))
        await failed(world.database, "2")
        await failed(world.database, "3")
        await done(world.database, "4")

        async with world.database.begin() as unit:
            await unit.dead_letters.put(replace(LETTER, consumer="stock", message_id="3"))
            for name in ("1", "2", "3", "4"):
                await unit.inbox.erase(MessageFilter(message_id=name))

        found = [await get(world.database, name) for name in ("1", "2", "3", "4")]
        assert [one.processed_at is not None for one in found] == [True, True, False, True]
        assert [one.error for one in found] == ["ERASED", "ERASED", "ERASED", ""]
        assert all(one.erased_at is not None for one in found)
        # An attempt that fails late writes none of its words either.
        await failed(world.database, "3")
        assert (await get(world.database, "3")).error == "ERASED"
        await world.age(1000)
        async with world.database.begin() as unit:
            assert await unit.inbox.delete_processed("stock", 500, 10) == 3

    @in_world
    async def test_a_message_that_a_person_closed_is_processed_without_a_result(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, message("1"), message("2"))
        await done(world.database, "2")

        async with world.database.begin() as unit:
            closed = [await unit.inbox.close("stock", n, "SKIPPED") for n in ("1", "1", "2", "3")]

        found = await get(world.database, "1")
        assert closed == [True, False, False, False]
        assert found.processed_at is not None
        assert (found.error, found.result, found.payload) == ("SKIPPED", None, b"1")
        assert (await get(world.database, "2")).error == ""
        assert await due(world.database) == []

    @in_world
    async def test_erasing_needs_somebody_to_be_named(self, world: DatabaseWorld) -> None:
        await store(world.database, message("1"))

        with pytest.raises(Misuse):
            async with world.database.begin() as unit:
                await unit.inbox.erase(MessageFilter())

        assert (await get(world.database, "1")).payload == b"1"


__all__ = ["InboxContract"]


LONG_ID = "order/" + "0123456789" * 500


class InboxContract(InboxEnds):
    """Everything a `semel.messaging.database.InboxStore` must do; derive a test class from it."""

    @in_world
    async def test_a_message_is_stored_once_for_each_consumer(self, world: DatabaseWorld) -> None:
        stored = await store(
            world.database,
            message("1"),
            replace(message("1"), payload=b"another"),
            message("1", consumer="audit"),
            message("2"),
        )

        assert stored == [True, False, True, True]
        assert (await get(world.database, "1")).payload == b"1"
        assert await due(world.database) == ["1", "2"]
        assert await due(world.database, consumer="audit") == ["1"]

    @in_world
    async def test_a_message_comes_back_as_it_was_stored(self, world: DatabaseWorld) -> None:
        written = replace(
            message("1", "shelf-7"),
            payload=bytes(range(256)),
            headers={"trace": b"\x00\xff", "empty": b""},
            topic="orders",
            partition=3,
            offset=2**40,
            timestamp=1_700_000_000.25,
            payload_hash="ab" * 32,
            correlation_id="c-1",
            schema_version="2",
        )
        async with world.database.begin() as unit:
            before = await unit.now()
            await unit.inbox.store(written)
            after = await unit.now()

        found = await get(world.database, "1")
        assert before <= found.received_at <= after
        assert found.due_at is not None
        assert before <= found.due_at <= after
        assert replace(found, place=0, received_at=0.0, due_at=0.0) == written

    @in_world
    async def test_what_a_transaction_takes_back_was_never_there(
        self, world: DatabaseWorld
    ) -> None:
        async def store_and_fail() -> None:
            async with world.database.begin() as unit:
                await unit.inbox.store(message("1"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await store_and_fail()

        async with world.database.begin() as unit:
            assert await unit.inbox.get("stock", "1") is None

    @in_world
    async def test_ids_and_keys_of_any_text_stay_apart_and_come_back(
        self, world: DatabaseWorld
    ) -> None:
        every = [LONG_ID, LONG_ID + "x", *filter(None, STRANGE)]
        await store(world.database, *(message(name, name) for name in every))
        await store(world.database, *(message(f"{name}, later", name) for name in every))

        later = [f"{name}, later" for name in every]
        assert await due(world.database) == [*every, *later]
        for name in every:
            found = await get(world.database, name)
            assert (found.message_id, found.key) == (name, name)
            await done(world.database, name)
        assert await due(world.database) == later
        async with world.database.begin() as unit:
            assert [await unit.inbox.erase(MessageFilter(key=name)) for name in every] == [2] * len(
                every
            )

    @in_world
    async def test_words_that_are_no_plain_text_do_not_keep_a_message_out(
        self, world: DatabaseWorld
    ) -> None:
        for number, word in enumerate(STRANGE):
            said = {"message_type": word, "correlation_id": word, "schema_version": word}
            assert await store(world.database, message(str(number), **said)) == [True]

        assert len(await due(world.database)) == len(STRANGE)

    @in_world
    async def test_messages_are_taken_in_the_order_of_arrival_up_to_the_limit(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, *(message(name) for name in "cab"))

        assert await due(world.database) == ["c", "a", "b"]
        assert await due(world.database, limit=2) == ["c", "a"]

    @in_world
    async def test_a_late_row_is_due_before_those_that_were_read_earlier(
        self, world: DatabaseWorld
    ) -> None:
        if not world.waits_for_locks:
            pytest.skip("one transaction at a time: none commits late")

        async with world.database.begin() as unit:
            await unit.inbox.store(message("late"))
            await store(world.database, message("early"))
            assert await due(world.database) == ["early"]

        assert await due(world.database) == ["late", "early"]
        late, early = [(await get(world.database, name)).place for name in ("late", "early")]
        assert late < early
        async with world.database.begin() as unit:
            assert await unit.inbox.bounds("stock") == (late, early + 1)

    @in_world
    async def test_a_settled_message_has_what_its_claim_shows(self, world: DatabaseWorld) -> None:
        await store(world.database, *(message(name) for name in "1234"))
        await failed(world.database, "1", ClaimState.FAILED_RETRYABLE)
        await failed(world.database, "2")
        await failed(world.database, "3", ClaimState.PARKED)

        await done(world.database, "1", '{"reserved":5}')

        found = await get(world.database, "1")
        assert found.processed_at is not None
        assert found.processed_at >= found.received_at
        assert (found.result, found.error) == ('{"reserved":5}', "")
        for name in ("2", "3"):
            given_up = await get(world.database, name)
            assert (given_up.due_at, given_up.processed_at) == (None, None)
            assert (given_up.error, given_up.attempts) == ("NO_STOCK", 1)
        assert await due(world.database) == ["4"]
        assert await store(world.database, message("1")) == [False]
        async with world.database.begin() as unit:
            first, end = await unit.inbox.bounds("stock")
            assert await unit.inbox.bounds("nobody") == (0, 0)
        assert first + 1 == end

    @in_world
    async def test_what_is_settled_is_taken_back_with_its_transaction(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, message("1"))

        async def settle_and_fail() -> None:
            async with world.database.begin() as unit:
                await unit.claims.mark_completed("stock", "1")
                await unit.inbox.settle("stock", ["1"])
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await settle_and_fail()

        assert await due(world.database) == ["1"]

    @in_world
    async def test_a_message_without_a_claim_is_never_settled(self, world: DatabaseWorld) -> None:
        await store(world.database, message("1"), message("2", consumer="audit"))

        async with world.database.begin() as unit:
            await unit.claims.mark_completed("audit", "1")
            await unit.inbox.settle("stock", ["1", "2", "3"])
            await unit.inbox.settle_again("stock")

        assert await due(world.database) == ["1"]
        assert await due(world.database, consumer="audit") == ["2"]

    @in_world
    async def test_the_error_of_a_dead_letter_has_its_reason(self, world: DatabaseWorld) -> None:
        await store(world.database, message("1"))
        async with world.database.begin() as unit:
            await unit.dead_letters.put(replace(LETTER, consumer="stock", message_id="1"))

        await failed(world.database, "1")

        found = await get(world.database, "1")
        assert found.error == f"{LETTER.error_code}: {LETTER.reason}"

    @in_world
    async def test_what_becomes_later_of_a_settled_message_is_written_too(
        self, world: DatabaseWorld
    ) -> None:
        await store(world.database, *(message(name) for name in "1234"))
        for name in "123":
            await failed(world.database, name, ClaimState.FAILED_RETRYABLE)
        async with world.database.begin() as unit:
            await unit.claims.mark_completed("stock", "1")
            again = Failure(ClaimState.FAILED_TERMINAL, 2, "GONE")
            await unit.claims.mark_failed("stock", "2", again)
        third = await get(world.database, "3")

        async with world.database.begin() as unit:
            await unit.inbox.settle_again("stock")

        handled, given_up = [await get(world.database, name) for name in "12"]
        assert (handled.processed_at is not None, handled.error) == (True, "")
        assert (given_up.processed_at, given_up.error, given_up.attempts) == (None, "GONE", 2)
        assert await get(world.database, "3") == third
        assert await due(world.database) == ["4"]

    @in_world
    async def test_a_failure_never_overwrites_what_is_processed(self, world: DatabaseWorld) -> None:
        await store(world.database, message("1"), message("2"))
        await done(world.database, "1", "5")
        async with world.database.begin() as unit:
            await unit.inbox.close("stock", "2", "SKIPPED")
        before = [await get(world.database, name) for name in "12"]

        await failed(world.database, "1")
        await failed(world.database, "2")

        assert [await get(world.database, name) for name in "12"] == before
        assert await due(world.database) == []

    @in_world
    async def test_pending_counts_what_is_due(self, world: DatabaseWorld) -> None:
        await store(world.database, *(message(str(n)) for n in range(5)))
        await store(world.database, message("1", consumer="audit"))
        await done(world.database, "0")
        await failed(world.database, "2")

        async with world.database.begin() as unit:
            assert await unit.inbox.pending("stock") == 3
            assert await unit.inbox.pending("audit") == 1
            assert await unit.inbox.pending("nobody") == 0
            unhandled = await unit.inbox.unhandled(MessageFilter(message_id="1"))
            assert sorted(unhandled) == [("audit", "1"), ("stock", "1")]
            assert await unit.inbox.unhandled(MessageFilter(message_id="0")) == []

    @in_world
    async def test_two_transactions_that_store_one_id_wait_for_each_other(
        self, world: DatabaseWorld
    ) -> None:
        if not world.waits_for_locks:
            pytest.skip("one transaction at a time: there is nothing to wait for")

        async with world.database.begin() as unit:
            assert await unit.inbox.store(message("1"))
            with pytest.raises(Locked):
                await store(world.database, message("1"))

        assert await store(world.database, message("1")) == [False]
