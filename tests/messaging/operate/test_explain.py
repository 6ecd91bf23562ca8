"""`explain`: one message's story, for every consumer that knows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.message import Message, Partition
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState, Failure
from semel.messaging.handler import consumer
from semel.messaging.outcome import OutcomeRange
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.records import Gap
from semel.messaging.send.outbox import outgoing_id
from semel.messaging.send.relay import Relay
from semel.messaging.settings import RetryPolicy
from semel.operate import explain
from semel.operate.deadletters import skip_dead_letter
from semel.operate.deletion import approve_delete, ask_to_delete, ask_to_delete_dead_letter
from semel.operate.explain import close_gaps, explain_message, open_gaps, pass_over_gaps
from semel.operate.parking import KeepId, NewId, fix, release
from semel.operate.retention import erase
from semel.outboxes import Outbox
from semel.policy.vocabulary import GapPolicy
from tests.messaging.act_world import ANN, acts, claim_of, queue
from tests.messaging.incoming import work_once
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.replay_world import DEAD, PARKS, Service, gapped, message
from tests.stores.world import in_world


def story(explanation) -> list[str]:
    (found,) = explanation.stories
    return [moment.what for moment in found.moments]


class Explanations:
    """What holds on every database."""

    @in_world
    async def test_a_message_that_nobody_knows_has_no_story(self, world):
        found = await explain_message(world.database, "m1")

        assert (found.stories, found.stored_as) == ((), "m1")

    @in_world
    async def test_a_handled_message_says_so_for_every_consumer(self, world):
        service = await Service(world).open()
        await service.deliver("m1")
        await handle_message(
            replace(service.consumer, name="shipping"), world.database, message("m1")
        )

        found = await explain_message(world.database, "m1")
        one = await explain_message(world.database, "m1", "shipping")

        assert [(s.consumer, s.standing, s.state) for s in found.stories] == [
            ("billing", "it was handled", "COMPLETED"),
            ("shipping", "it was handled", "COMPLETED"),
        ]
        assert [s.consumer for s in one.stories] == ["shipping"]

    @in_world
    async def test_a_handled_message_still_has_its_coordinates(self, world):
        service = await Service(world).open()
        await service.deliver("m1")

        (only,) = (await explain_message(world.database, "m1")).stories

        assert only.source == "payments/0/1"

    @in_world
    async def test_a_message_that_failed_before_it_was_handled_tells_when_and_why(self, world):
        patient = replace(DEAD, retry=RetryPolicy(max_attempts=5, initial_delay_seconds=0.0))
        service = await Service(world, patient).open()

        def broken(message):
            raise RetryableMessageError("the bank is closed")

        service.broken = broken
        await service.deliver("m1")
        await world.age(60.0)
        await service.deliver("m1")
        await world.age(60.0)
        service.heal()
        await service.deliver("m1")

        (only,) = (await explain_message(world.database, "m1")).stories

        assert (only.state, only.attempts, only.source) == ("COMPLETED", 3, "payments/0/1")
        failed = [moment for moment in only.moments if moment.what == "failed"]
        assert [moment.words for moment in failed] == [
            "attempt 1 failed with DEPENDENCY_UNAVAILABLE: the bank is closed",
            "attempt 2 failed with DEPENDENCY_UNAVAILABLE: the bank is closed",
        ]
        times = [moment.at for moment in only.moments]
        assert times[0] <= failed[0].at < failed[1].at < times[-1]

    @in_world
    async def test_a_claim_that_others_marked_still_tells_its_last_failure(self, world):
        service = await Service(world, replace(DEAD, retry=RetryPolicy(max_attempts=5))).open()
        failure = Failure(ClaimState.FAILED_RETRYABLE, 2, "RATE_LIMITED")

        def broken(message):
            raise RetryableMessageError("the bank is closed")

        service.broken = broken
        await service.deliver("m1")
        await world.age(60.0)
        async with world.database.begin() as unit:
            for name in ("m1", "m2"):
                await unit.claims.mark_failed("billing", name, failure)

        first, second = [
            [moment.words for moment in found.stories[0].moments if moment.what == "failed"]
            for found in [await explain_message(world.database, name) for name in ("m1", "m2")]
        ]

        assert first == [
            "attempt 1 failed with DEPENDENCY_UNAVAILABLE: the bank is closed",
            "attempt 2 failed with RATE_LIMITED",
        ]
        assert second == ["attempt 2 failed with RATE_LIMITED"]

    @in_world
    async def test_messages_that_were_sent_are_not_kept_and_the_story_says_so(self, world):
        outbox = Outbox()

        @consumer("billing", policy=DEAD, id_from=FromHeader("message-id"))
        async def handle(message, session):
            await outbox.add(session, "invoices", {"id": 7})

        await handle_message(handle, world.database, message("m1"))
        (before,) = (await explain_message(world.database, "m1")).stories
        await Relay(world.database, MemoryBroker({"invoices": 1}).publisher()).run_until_empty()
        (after,) = (await explain_message(world.database, "m1")).stories

        assert before.children.startswith("1 of its outgoing messages in the outbox")
        assert after.children == "none in the outbox; those that were delivered are not kept"

    @in_world
    async def test_delivered_messages_are_found_at_their_consumers_by_their_ids(self, world):
        outbox = Outbox()

        @consumer("billing", policy=DEAD, id_from=FromHeader("message-id"))
        async def handle(message, session):
            for number in range(2):
                await outbox.add(session, "invoices", {"id": number})

        await handle_message(handle, world.database, message("m1"))
        children = [outgoing_id("billing", "m1", "invoices", number) for number in range(3)]
        for child in children[:2]:
            shipping = replace((await Service(world).open()).consumer, name="shipping")
            await handle_message(shipping, world.database, message(child))
        await Relay(world.database, MemoryBroker({"invoices": 1}).publisher()).run_until_empty()

        (only,) = (
            await explain_message(world.database, "m1", sent_to=["invoices", "mails"])
        ).stories

        assert [moment.words for moment in only.moments if moment.what == "child"] == [
            f"{child} to invoices, for shipping: it was handled" for child in children[:2]
        ]
        assert only.children == (
            "none in the outbox; those that were delivered are not kept; "
            f"number 3 to invoices, if it was sent, is {children[2]}; "
            f"number 1 to mails, if it was sent, is {outgoing_id('billing', 'm1', 'mails', 0)}"
        )

    @in_world
    async def test_deliveries_are_told_as_far_as_ranges_of_offsets_know_them(self, world):
        service = await Service(world).open()
        await service.deliver("m1")
        (before,) = (await explain_message(world.database, "m1")).stories
        place = Partition("payments", 0)
        again = OutcomeRange(place, 1, 1, "duplicate_skipped")
        elsewhere = OutcomeRange(place, 7, 9, "duplicate_skipped")
        async with world.database.begin() as unit:
            handled = OutcomeRange(place, 0, 5, "success")
            await unit.outcomes.record("billing", [handled, elsewhere, again])
            await unit.outcomes.record("billing", [again])

        (after,) = (await explain_message(world.database, "m1")).stories

        elsewhere_words = "from another offset it is noted without its id"
        assert before.deliveries == f"none noted at its offset; {elsewhere_words}"
        assert after.deliveries == (
            f"3 noted at its offset: success, duplicate_skipped 2 times; {elsewhere_words}"
        )

    @in_world
    async def test_a_dead_letter_has_its_coordinates_its_failure_and_its_owner(self, world):
        service = await Service(world, replace(DEAD, dead_letter_owner="team-pay")).open()
        service.refuse("m1")
        await service.deliver("m1", key="customer-7")

        found = await explain_message(world.database, "m1")

        (only,) = found.stories
        assert (only.standing, only.source, only.key) == (
            "it is a dead letter",
            "payments/0/1",
            "customer-7",
        )
        words = only.moments[-1].words
        assert "REJECTED: no such account, after 1 attempt, owned by team-pay" in [
            moment.words for moment in only.moments
        ], words

    @in_world
    async def test_a_parked_message_tells_what_people_did(self, world):
        service = await Service(world, PARKS).open()
        service.refuse("m1")
        await service.deliver("m1", "m2", key="customer-7")
        await fix(world.database, "billing", "m1", b'{"id": "m1", "n": 2}', ids=KeepId(), **ANN)
        await ask_to_delete(world.database, "billing", "m2", **ANN)

        first = await explain_message(world.database, "m1")
        second = await explain_message(world.database, "m2")

        assert first.stories[0].standing == "it is parked, and waits for a person"
        assert {"seen", "claim", "waits", "revision", "act"} <= set(story(first))
        assert second.stories[0].standing == "it waits behind an earlier message of its key"
        assert "asked" in story(second)
        times = [moment.at for moment in first.stories[0].moments]
        assert times == sorted(times)

    @in_world
    async def test_a_message_with_a_new_id_is_found_under_both(self, world):
        service = await Service(world, PARKS).open()
        service.refuse("m1")
        await service.deliver("m1", key="k")
        await fix(world.database, "billing", "m1", b'{"id": "m1b"}', ids=NewId("m1b"), **ANN)

        old = await explain_message(world.database, "m1")
        new = await explain_message(world.database, "m1b")

        assert old.other_names == ("m1b",)
        assert new.other_names == ("m1",)
        assert old.stories[0].standing == "it counts as handled, without an effect (REPLACED)"

    @in_world
    async def test_a_deleted_message_and_an_erased_one_say_so(self, world):
        service = await Service(world, PARKS).open()
        service.refuse("m1", "m2")
        await service.deliver("m1", key="k1")
        await service.deliver("m2", key="k2")
        request = await ask_to_delete(world.database, "billing", "m1", **ANN)
        await approve_delete(world.database, request.number, actor="bob")
        await erase(world.database, message_id="m2", **ANN)

        deleted = await explain_message(world.database, "m1")
        erased = await explain_message(world.database, "m2")

        assert deleted.stories[0].standing.endswith("its dead letter is gone (DELETED)")
        assert "decided" in story(deleted)
        assert [moment.words for moment in erased.acts] == ["ann: erase (the address was wrong)"]

    @in_world
    async def test_children_in_the_outbox_belong_to_the_story(self, world):
        outbox = Outbox()

        @consumer("billing", id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            await outbox.add(session, "invoices", {})

        await handle_message(handle, world.database, message("m1"))

        found = await explain_message(world.database, "m1")

        (child,) = [m for m in found.stories[0].moments if m.what == "child"]
        assert child.words.endswith("to invoices, not sent yet")

    @in_world
    async def test_a_message_of_the_inbox_is_known_before_it_has_a_claim(self, world):
        service = await Service(world).open()
        await Inbox(service.consumer, world.database).store(message("m1"))
        before = await explain_message(world.database, "m1")
        await work_once(service.consumer, world.database)
        after = await explain_message(world.database, "m1")

        assert before.stories[0].standing == "it is in the inbox, and not handled yet"
        assert after.stories[0].standing == "it was handled"
        assert {"stored", "handled"} <= set(story(after))

    @in_world
    async def test_what_a_person_ended_in_the_inbox_was_not_handled(self, world):
        service = await Service(world).open()
        service.refuse("m1", "m2")
        for name in ("m1", "m2", "m3"):
            await Inbox(service.consumer, world.database).store(message(name))
        await erase(world.database, message_id="m3", **ANN)
        await InboxWorker(service.consumer, world.database).run_until_empty()
        await skip_dead_letter(world.database, "billing", "m1", **ANN)
        asked = await ask_to_delete_dead_letter(world.database, "billing", "m2", **ANN)
        await approve_delete(world.database, asked.number, actor="bob")

        found = {name: await explain_message(world.database, name) for name in ("m1", "m2", "m3")}

        assert {name: one.stories[0].standing for name, one in found.items()} == {
            "m1": "it counts as handled, without an effect (SKIPPED)",
            "m2": "it was given up, and its dead letter is gone (DELETED)",
            "m3": "it counts as handled, without an effect (ERASED)",
        }
        for one in found.values():
            assert "handled" not in story(one)
            assert "ended" in story(one)

    @in_world
    async def test_long_ids_are_found_by_their_text(self, world):
        service = await Service(world).open()
        await service.deliver("x" * 900)

        found = await explain_message(world.database, "x" * 900)

        assert found.stored_as.startswith("sha256:")
        assert found.stories[0].standing == "it was handled"


class Gaps:
    """Gaps are listed, closed and passed over, and the trail says by whom."""

    @in_world
    async def test_a_key_has_its_gaps_however_many_others_are_older(self, world):
        async with world.database.begin() as unit:
            await unit.versions.open_gap(Gap("billing", "older", 1, 3))
        await world.age(10)
        await gapped(world, GapPolicy.ALERT)

        with pytest.MonkeyPatch.context() as few:
            few.setattr(explain, "MOST_GAPS", 1)
            (gap,) = await close_gaps(world.database, "billing", "k", **ANN)

        assert (gap.key, gap.expected, gap.found) == ("k", 2, 4)

    @in_world
    async def test_a_gap_is_closed_with_a_reason(self, world):
        await gapped(world, GapPolicy.ALERT)

        with pytest.raises(Misuse, match="reason"):
            await close_gaps(world.database, "billing", "k", actor="ann", reason=" ")
        (gap,) = await close_gaps(world.database, "billing", "k", **ANN)

        assert (gap.expected, gap.found) == (2, 4)
        assert await open_gaps(world.database, "billing", 10) == []
        assert ("ann", "gap.close", "") in await acts(world)
        with pytest.raises(Misuse, match="no open gap"):
            await close_gaps(world.database, "billing", "k", **ANN)

    @in_world
    async def test_what_was_parked_behind_a_gap_is_applied_once_it_is_passed_over(self, world):
        service = await gapped(world, GapPolicy.PARK_KEY)
        assert await queue(world) == [("m4", "parked")]

        await pass_over_gaps(world.database, service.consumer, "k", **ANN)
        await release(world.database, "billing", "m4", actor="ann")
        await retry_due(service.consumer, world.database)

        claim = await claim_of(world, "m4")
        assert claim is not None
        assert claim.state == "COMPLETED"
        assert await service.paid() == ["m1", "m4"]
        assert ("ann", "gap.pass", "") in await acts(world)

    @in_world
    async def test_a_gap_is_part_of_the_story_of_the_message_that_found_it(self, world):
        await gapped(world, GapPolicy.PARK_KEY)

        found = await explain_message(world.database, "m4")

        assert "version 4 came, 2 was next" in [m.words for m in found.stories[0].moments]


class TestExplanationsInSqlite(InSqlite, Explanations, Gaps):
    pass


class TestExplanationsInPostgres(InPostgres, Explanations, Gaps):
    pass
