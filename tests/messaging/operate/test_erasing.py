"""Erasing a message, with everything that came of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from semel.errors import Retryable
from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message, handling
from semel.messaging.handle.claims import ClaimRequest, ClaimState
from semel.messaging.receive.inbox import Inbox
from semel.messaging.records import DeadLetterFilter
from semel.messaging.send.outbox import parent_of
from semel.messaging.settings import DAY_SECONDS
from semel.operate.deadletters import park_dead_letter
from semel.operate.parking import KeepId, NewId, fix
from semel.operate.retention import Erased, Retention, erase, prune
from semel.outboxes import Outbox
from tests.messaging.act_world import ANN, BILLING, claim_of, park, waiting_of
from tests.messaging.erasures import (
    ONCE,
    SECRET,
    failing,
    invoicing,
    message,
    payloads,
)
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world


class Erasing:
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
    async def test_a_slash_in_a_name_or_an_id_is_no_border_between_them(self, world):
        outbox = Outbox()
        for name, message_id in (("a/b", "c"), ("a", "b/c")):
            async with world.database.begin() as unit:
                await unit.claims.try_claim(name, ClaimRequest(message_id))
                with handling(name, Message(message_id, {})):
                    await outbox.add(unit.session, "out", {"of": name})

        async with world.database.begin() as unit:
            children = await unit.outbox.children(parent_of("a", "b/c"))
            erased = await unit.outbox.erase(parent=parent_of("a/b", "c"))
            kept = [await unit.claims.delete_expired(name, -1.0, 9) for name in ("a/b", "a")]
            mine = await unit.outbox.lead("outbox", "me", 60.0)
            await unit.outbox.delete(mine, [child.place for child in children])
            deleted = [await unit.claims.delete_expired(name, -1.0, 9) for name in ("a/b", "a")]
        assert [child.value for child in children] == [b'{"of":"a"}']
        assert erased == 1
        assert kept == [0, 0], "what they sent was not published yet"
        assert deleted == [0, 1]

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
        await world.age(60)

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
            patch.setattr("semel.operate.retention.PAGE", 2)
            done = await erase(world.database, key="alice", **ANN, progress=heard.append)

        assert (done.waiting, done.revisions) == (5, 2)
        assert heard == [2, 4, 5]
        for number in range(5):
            claim = await claim_of(world, f"m{number}")
            assert (claim.state, claim.marker) == (ClaimState.PARKED, "ERASED")

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


async def forget(world, claim, letter, children):
    """Take the rows away, so that the same can be tried once more."""
    async with world.database.begin() as unit:
        await unit.dead_letters.remove(BILLING, letter.message_id)
        for child in children:
            await unit.outbox.drop(child.outbox, child.message_id)
    await world.age(1_000)
    async with world.database.begin() as unit:
        assert await unit.claims.delete_expired(claim.consumer, 1, 10) == 1


class TestErasingInSqlite(InSqlite, Erasing):
    pass


class TestErasingInPostgres(InPostgres, Erasing):
    pass
