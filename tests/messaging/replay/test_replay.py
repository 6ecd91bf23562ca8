"""Replays: what was handled is not handled again, what was not is, and nothing gets lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.crashpoints import CrashPoint
from semel.message import Message
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.lease import Lease, handle_leased
from semel.messaging.handler import consumer
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.settings import ConsumerSettings
from semel.operate.replay import ReplaySettings
from semel.operate.selection import Ids, Letters, Offsets, parked_key
from semel.operate.stores import ReplayState
from semel.policy.vocabulary import Mode
from semel.testing.crash import Crash, crash_at
from tests.messaging.act_world import acts, details, letter_of, letters, queue
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.replay_world import (
    DEAD,
    P0,
    PARKS,
    POLICY,
    Service,
    counts,
    message,
    pay,
)
from tests.stores.world import in_world


def be_down(message):
    raise ConnectionError("down")


class Replays:
    """What holds on every database."""

    @in_world
    async def test_a_replay_of_handled_messages_has_no_second_effect(self, world):
        service = await Service(world).open()
        service.put("m1", "m2", "m3")
        await service.deliver("m1", "m2")

        report = await service.run(Offsets(P0, 0, 2))

        assert sorted(await service.paid()) == ["m1", "m2", "m3"]
        assert report.state is ReplayState.FINISHED
        assert counts(report) == {"handled": 1, "duplicate": 2}

    @in_world
    async def test_dead_letters_are_sent_back_and_handled_now(self, world):
        service = await Service(world).open()
        service.refuse("m1", "m2")
        await service.deliver("m1", "m2", "m3")
        service.heal()

        report = await service.run(Letters())

        assert sorted(await service.paid()) == ["m1", "m2", "m3"]
        assert counts(report) == {"handled": 2}
        assert await letters(world) == 0
        assert await queue(world) == []
        assert await acts(world) == [
            ("ann", "replay.begin", ""),
            ("ann", "dlq.retry", "m1"),
            ("ann", "dlq.retry", "m2"),
            ("ann", "replay.end", ""),
        ]

    @in_world
    async def test_a_dead_letter_that_fails_again_is_a_dead_letter_again_and_stops_it(self, world):
        service = await Service(world).open()
        service.refuse("m1", "m2")
        await service.deliver("m1", "m2")

        report = await service.run(Letters())

        assert report.state is ReplayState.FAILED
        assert "no such account" in report.why
        assert counts(report) == {"failed": 1}
        assert await letters(world) == 2
        assert await service.paid() == []
        # The trail is never erased: of a failure it has the code, not an exception's words.
        assert (await details(world))["why"] == "message 'm1' failed: REJECTED"

    @in_world
    async def test_a_parked_key_is_released_and_handled_in_its_order(self, world):
        service = await Service(world, PARKS).open()
        service.refuse("m1")
        await service.deliver("m1", "m2", "m3", key="customer-7")
        service.heal()

        report = await service.run(parked_key("customer-7"))

        assert await service.paid() == ["m1", "m2", "m3"]
        assert counts(report) == {"handled": 3}
        assert await queue(world) == []
        assert ("ann", "park.release", "m1") in await acts(world)

    @in_world
    async def test_what_stands_behind_a_message_that_fails_again_is_left(self, world):
        service = await Service(world, PARKS).open()
        service.refuse("m1")
        await service.deliver("m1", "m2", key="customer-7")

        report = await service.run(
            parked_key("customer-7"), ReplaySettings(canary=(), stop_after_failures=9)
        )

        assert counts(report) == {"failed": 1, "left": 1}
        assert await queue(world) == [("m1", "parked"), ("m2", "behind")]
        assert await service.paid() == []

    @in_world
    async def test_messages_are_found_by_id_wherever_they_are(self, world):
        service = await Service(world).open()
        long_id = "x" * 900
        service.refuse("m1", long_id)
        await service.deliver("m1", "done", long_id)
        service.heal()

        report = await service.run(Ids(("done", "m1", long_id, "unheard of")))

        assert counts(report) == {"duplicate": 1, "handled": 2, "missing": 1}
        assert sorted(await service.paid()) == sorted(["done", "m1", long_id])

    @pytest.mark.parametrize("point", [CrashPoint.REPLAY_BEFORE, CrashPoint.REPLAY_AFTER])
    @pytest.mark.parametrize("kind", ["letters", "ids", "offsets"])
    def test_a_replay_that_is_killed_goes_on_where_it_was(self, point, kind):
        ids = ("m1", "m2", "m3")

        async def scenario() -> None:
            async with self.world() as world:
                service = await Service(world).open()
                service.put(*ids)
                service.refuse(*ids)
                if kind != "offsets":
                    await service.deliver(*ids)
                service.heal()
                selection = {"letters": Letters(), "ids": Ids(ids), "offsets": Offsets(P0, 0, 2)}

                with crash_at(point, occurrence=2), pytest.raises(Crash):
                    await service.run(selection[kind])
                report = await service.run(None)

                assert sorted(await service.paid()) == list(ids)
                assert counts(report) == {"handled": 3}
                assert report.state is ReplayState.FINISHED
                assert await letters(world) == 0
                assert await queue(world) == []
                assert [act for _, act, _ in await acts(world) if act.startswith("replay")] == [
                    "replay.begin",
                    "replay.resume",
                    "replay.end",
                ]

        asyncio.run(scenario())

    @in_world
    async def test_a_given_up_message_of_the_inbox_is_handled_with_its_mark(self, world):
        service = await Service(world).open()
        inbox = Inbox(service.consumer, service.database)
        service.refuse("m1", "m2")
        await inbox.store(message("m1"))
        await inbox.store(message("m2"))
        await InboxWorker(service.consumer, service.database).run_until_empty()
        service.refuse("m2")

        report = await service.run(Letters(), ReplaySettings(canary=(), stop_after_failures=9))

        assert counts(report) == {"handled": 1, "failed": 1}
        assert await service.paid() == ["m1"]
        assert await letter_of(world, "m1") is None
        assert await letter_of(world, "m2") is not None
        again = await service.run(Ids(("m1",)), name="twice")
        assert counts(again) == {"duplicate": 1}

    @in_world
    async def test_a_message_of_the_inbox_whose_claim_is_used_up_is_refused(self, world):
        service = await Service(world).open()
        service.refuse("m1")
        await Inbox(service.consumer, service.database).store(message("m1"))
        await InboxWorker(service.consumer, service.database).run_until_empty()
        service.heal()
        async with world.database.begin() as unit:
            await unit.claims.reopen("billing", "m1")
            await unit.claims.mark_completed("billing", "m1")

        report = await service.run(Letters())

        assert "handled" not in counts(report)
        assert await service.paid() == []

    @in_world
    async def test_what_a_delivery_buries_no_longer_waits_for_another_attempt(self, world):
        twice = replace(POLICY, max_attempts=2, initial_delay_seconds=0.0, max_delay_seconds=0.0)
        service = await Service(world, ConsumerSettings(retry=twice)).open()
        service.put("m1")
        service.broken = be_down
        await service.run(Offsets(P0, 0, 0))
        waited = await queue(world)

        service.refuse("m1")
        await service.deliver("m1")

        assert waited == [("m1", "retry")]
        assert await queue(world) == []
        assert await letters(world) == 1

    @in_world
    async def test_a_leased_consumer_is_replayed_under_leases(self, world):
        service = await Service(world).open()
        broken = [True]

        @consumer("billing", policy=DEAD, reading=service.consumer.reading, mode=Mode.LEASED)
        async def export(message: Message, lease: Lease) -> None:
            if broken[0]:
                raise NonRetryableMessageError("no such account")
            async with lease.completing() as session:
                await pay(session, message.id)

        service.consumer = export
        for message_id in ("m1", "m2"):
            await handle_leased(export, world.database, message(message_id), "one")
        broken[0] = False
        service.put("m3")

        letters_report = await service.run(Letters())
        topic_report = await service.run(Offsets(P0, 0, 0), name="topic")

        assert counts(letters_report) == {"handled": 2}
        assert counts(topic_report) == {"handled": 1}
        assert sorted(await service.paid()) == ["m1", "m2", "m3"]
        assert await letters(world) == 0
        assert await queue(world) == []


class TestReplaysInSqlite(InSqlite, Replays):
    pass


class TestReplaysInPostgres(InPostgres, Replays):
    pass
