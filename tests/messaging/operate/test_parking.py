"""The six operations of the parking lot: each one transaction, each in the audit trail."""

from __future__ import annotations

import json

import pytest

from semel.codec import FromPayload
from semel.errors import Misuse
from semel.message import digest_of
from semel.messaging.failed.retries import retry_due
from semel.messaging.handle.claims import ClaimRequest, ClaimState, Duplicate, Terminal
from semel.messaging.handler import consumer
from semel.messaging.records import WaitingFilter, Waits
from semel.messaging.settings import ConsumerSettings
from semel.operate.audit import NoSuchMessage, NotPossible
from semel.operate.deletion import SamePerson, approve_delete, ask_to_delete, refuse_delete
from semel.operate.parking import KeepId, NewId, classify, fix, inspect, release, release_key, skip
from tests.messaging.act_world import (
    ANN,
    BILLING,
    acts,
    claim_of,
    details,
    due,
    park,
    queue,
    waiting_of,
)
from tests.messaging.places import InSqlite
from tests.stores.world import DatabaseContract, in_world

BOB = {"actor": "bob", "reason": "agreed"}
NEW = b'{"id": "m1", "amount": 12}'


class ParkingActs(DatabaseContract):
    @in_world
    async def test_inspecting_shows_everything_and_says_who_looked(self, world):
        await park(world, "m1", "m2", "m3", key="k")
        await fix(world.database, BILLING, "m2", NEW, ids=KeepId(), **ANN)

        seen = await inspect(world.database, BILLING, "m2", actor="bob")

        assert seen.message.payload == NEW
        assert seen.claim.state is ClaimState.PARKED
        assert [revision.number for revision in seen.revisions] == [0, 1]
        assert (seen.ahead, seen.behind) == (1, 1)
        assert [entry.act.act for entry in seen.acts] == ["park.fix", "park.inspect"]
        assert await acts(world) == [("ann", "park.fix", "m2"), ("bob", "park.inspect", "m2")]

    @in_world
    async def test_a_label_is_kept_and_audited(self, world):
        await park(world, "m1")

        await classify(world.database, BILLING, "m1", "data", **ANN)

        assert (await waiting_of(world, "m1")).label == "data"
        assert await acts(world) == [("ann", "park.classify", "m1")]
        assert await details(world) == {"label": "data", "before": ""}

    @in_world
    async def test_a_fix_keeps_the_original_and_shows_what_changed(self, world):
        await park(world, "m1")
        original = (await waiting_of(world, "m1")).payload

        fixed = await fix(world.database, BILLING, "m1", NEW, ids=KeepId(), **ANN)
        again = await fix(world.database, BILLING, "m1", b"not json", ids=KeepId(), **ANN)

        assert '+  "amount": 12,\n' in fixed.diff
        assert (fixed.revision.number, again.revision.number) == (1, 2)
        async with world.database.begin() as unit:
            revisions = await unit.revisions.of(BILLING, "m1")
        assert [revision.payload for revision in revisions] == [original, NEW, b"not json"]
        assert [revision.actor for revision in revisions] == ["", "ann", "ann"]
        assert (await waiting_of(world, "m1")).waits is Waits.PARKED

    @in_world
    async def test_a_fix_that_keeps_the_id_is_what_the_claim_expects(self, world):
        await park(world, "m1")
        await fix(world.database, BILLING, "m1", NEW, ids=KeepId(), **ANN)
        await release(world.database, BILLING, "m1", **ANN)

        assert (await claim_of(world, "m1")).payload_hash == digest_of(NEW)
        assert (await waiting_of(world, "m1")).payload_hash == digest_of(NEW)

    @in_world
    async def test_a_fix_with_a_new_id_keeps_the_place_and_closes_the_old_id(self, world):
        await park(world, "m1", "m2", key="k")

        fixed = await fix(world.database, BILLING, "m1", NEW, ids=NewId("m1-b"), **ANN)

        assert fixed.message_id == "m1-b"
        assert await queue(world) == [("m1-b", "parked"), ("m2", "behind")]
        old, new = await claim_of(world, "m1"), await claim_of(world, "m1-b")
        assert (old.state, old.marker) == (ClaimState.COMPLETED, "REPLACED")
        assert (new.state, new.payload_hash) == (ClaimState.PARKED, digest_of(NEW))
        async with world.database.begin() as unit:
            assert (await unit.revisions.of(BILLING, "m1"))[1].new_id == "m1-b"
            (first,) = await unit.revisions.of(BILLING, "m1-b")
            again = await unit.claims.try_claim(BILLING, ClaimRequest("m1"))
        assert first.reason == "revision 1 of m1"
        assert isinstance(again, Duplicate)
        assert (await details(world))["new_id"] == "m1-b"

    @in_world
    async def test_a_message_that_waits_for_its_time_is_handled_then_under_its_new_id(self, world):
        await park(world, "m1", "m2", key="k")
        await release(world.database, BILLING, "m1", **ANN)
        handled = []

        @consumer(BILLING, policy=ConsumerSettings(holds_keys=True), id_from=FromPayload("id"))
        async def handle(message, session):
            handled.append((message.id, message.payload, message.attempt))

        await fix(world.database, BILLING, "m1", NEW, ids=NewId("m1-b"), **ANN)
        await retry_due(handle, world.database)

        assert handled == [("m1-b", json.loads(NEW), 1)]
        assert (await claim_of(world, "m1-b")).state is ClaimState.COMPLETED
        assert await queue(world) == [("m2", "behind")]

    @in_world
    async def test_neither_payload_gets_into_the_audit_trail(self, world):
        await park(world, "m1", payload=b'{"secret": "tarragon"}')

        await fix(world.database, BILLING, "m1", b'{"secret": "chervil"}', ids=KeepId(), **ANN)

        async with world.database.begin() as unit:
            (entry,) = await unit.audit.read(0, 10)
        said = json.dumps([entry.act.reason, dict(entry.act.details)])
        assert "tarragon" not in said
        assert "chervil" not in said

    @in_world
    async def test_a_fix_that_cannot_be_is_refused_and_changes_nothing(self, world):
        await park(world, "m1", "m2")
        same = (await waiting_of(world, "m1")).payload
        attempts = [
            (NoSuchMessage, "nobody", NEW, KeepId(), "why"),
            (Misuse, "m1", same, KeepId(), "why"),
            (Misuse, "m1", NEW, NewId("m2"), "why"),
            (Misuse, "m1", NEW, NewId(""), "why"),
            (Misuse, "m1", NEW, KeepId(), "  "),
        ]

        for error, message_id, payload, ids, reason in attempts:
            with pytest.raises(error):
                await fix(
                    world.database, BILLING, message_id, payload, ids=ids, actor="a", reason=reason
                )

        assert await acts(world) == []
        assert (await waiting_of(world, "m1")).payload == same

    @in_world
    async def test_a_released_message_is_due_and_its_claim_open(self, world):
        await park(world, "m1")

        await release(world.database, BILLING, "m1", **ANN)

        assert await due(world) == ["m1"]
        row = await claim_of(world, "m1")
        assert (row.state, row.attempts) == (ClaimState.FAILED_RETRYABLE, 0)
        with pytest.raises(NotPossible, match="not parked"):
            await release(world.database, BILLING, "m1", **ANN)
        assert await acts(world) == [("ann", "park.release", "m1")]

    @in_world
    async def test_the_rest_of_a_released_key_waits_for_its_turn(self, world):
        await park(world, "m1", "m2", "m3", key="k")

        assert await release_key(world.database, BILLING, "k", **ANN) == ["m1"]

        assert await queue(world) == [("m1", "retry"), ("m2", "behind"), ("m3", "behind")]
        assert await due(world) == ["m1"]

    @in_world
    async def test_all_parked_messages_of_a_key_are_released_in_order(self, world):
        await park(world, "m1", key="k")
        await park(world, "m2", key="k")
        await park(world, "other", key="j")

        assert await release_key(world.database, BILLING, "k", **ANN) == ["m1", "m2"]

        assert await due(world) == ["m1"]
        assert await acts(world) == [("ann", "park.release", "m1"), ("ann", "park.release", "m2")]
        with pytest.raises(Misuse, match="nothing parked"):
            await release_key(world.database, BILLING, "nobody", **ANN)

    @in_world
    async def test_a_message_whose_id_was_handled_cannot_be_released_under_it(self, world):
        await park(world, "m1")
        async with world.database.begin() as unit:
            await unit.claims.mark_completed(BILLING, "m1")

        with pytest.raises(NotPossible, match="new id"):
            await release(world.database, BILLING, "m1", **ANN)
        assert await queue(world) == [("m1", "parked")]

    @in_world
    async def test_a_message_that_was_handled_has_a_second_effect_only_where_one_asks_for_it(
        self, world
    ):
        await park(world, "m1")
        async with world.database.begin() as unit:
            await unit.claims.mark_completed(BILLING, "m1")

        with pytest.raises(NotPossible, match="a second time"):
            await fix(world.database, BILLING, "m1", NEW, ids=NewId("m1-b"), **ANN)
        assert await queue(world) == [("m1", "parked")]
        assert await acts(world) == []
        wanted = NewId("m1-b", second_effect=True)
        await fix(world.database, BILLING, "m1", NEW, ids=wanted, **ANN)
        await release(world.database, BILLING, "m1-b", **ANN)

        assert await due(world) == ["m1-b"]
        assert (await claim_of(world, "m1")).marker != "REPLACED"

    @in_world
    async def test_skipping_lets_the_next_one_have_its_turn(self, world):
        await park(world, "m1", "m2", key="k")

        await skip(world.database, BILLING, "m1", **ANN)

        assert await due(world) == ["m2"]
        row = await claim_of(world, "m1")
        assert (row.state, row.marker) == (ClaimState.COMPLETED, "SKIPPED")
        assert await acts(world) == [("ann", "park.skip", "m1")]

    @in_world
    async def test_nothing_is_decided_about_a_message_that_an_owner_is_handling(self, world):
        await park(world, "m1")
        asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)
        await release(world.database, BILLING, "m1", **ANN)
        async with world.database.begin() as unit:
            held = await unit.claims.lease(BILLING, ClaimRequest("m1"), owner="a", seconds=60)

        for decide in (
            lambda: skip(world.database, BILLING, "m1", **ANN),
            lambda: fix(world.database, BILLING, "m1", NEW, ids=KeepId(), **ANN),
            lambda: fix(world.database, BILLING, "m1", NEW, ids=NewId("m2"), **ANN),
            lambda: approve_delete(world.database, asked.number, **BOB),
        ):
            with pytest.raises(NotPossible, match="handles it now"):
                await decide()

        assert await queue(world) == [("m1", "retry")]
        async with world.database.begin() as unit:
            assert await unit.claims.mark_completed(BILLING, "m1", held.fence)

    @in_world
    async def test_skipping_needs_a_reason_and_a_name(self, world):
        await park(world, "m1")

        with pytest.raises(Misuse, match="reason"):
            await skip(world.database, BILLING, "m1", actor="ann", reason=" ")
        with pytest.raises(Misuse, match="actor"):
            await skip(world.database, BILLING, "m1", actor=" ", reason="why")
        with pytest.raises(NoSuchMessage):
            await skip(world.database, BILLING, "nobody", **ANN)

        assert await queue(world) == [("m1", "parked")]

    @in_world
    async def test_a_deletion_needs_two_people(self, world):
        await park(world, "m1", "m2", key="k")
        await fix(world.database, BILLING, "m1", NEW, ids=KeepId(), **ANN)

        asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)
        assert await queue(world) == [("m1", "parked"), ("m2", "behind")]
        for same in ("ann", " Ann "):
            with pytest.raises(SamePerson):
                await approve_delete(world.database, asked.number, actor=same)
        done = await approve_delete(world.database, asked.number, **BOB)

        assert (done.decided_by, done.decision) == ("bob", "approved")
        assert await due(world) == ["m2"]
        async with world.database.begin() as unit:
            answer = await unit.claims.try_claim(BILLING, ClaimRequest("m1"))
            revisions = await unit.revisions.of(BILLING, "m1")
        assert answer == Terminal("DELETED")
        assert [revision.payload for revision in revisions] == [None, None]
        assert (await acts(world))[1:] == [
            ("ann", "delete.ask", "m1"),
            ("bob", "delete.approve", "m1"),
        ]

    @in_world
    async def test_a_refused_deletion_changes_nothing(self, world):
        await park(world, "m1")
        asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)

        with pytest.raises(SamePerson):
            await refuse_delete(world.database, asked.number, **ANN)
        await refuse_delete(world.database, asked.number, **BOB)

        assert await queue(world) == [("m1", "parked")]
        with pytest.raises(Misuse, match="decided already"):
            await approve_delete(world.database, asked.number, **BOB)
        assert (await ask_to_delete(world.database, BILLING, "m1", **ANN)).number != asked.number

    @in_world
    async def test_what_was_asked_for_twice_or_left_meanwhile_is_not_deleted(self, world):
        await park(world, "m1")
        asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)
        with pytest.raises(Misuse, match="request"):
            await ask_to_delete(world.database, BILLING, "m1", **BOB)
        await skip(world.database, BILLING, "m1", **ANN)

        with pytest.raises(NoSuchMessage):
            await approve_delete(world.database, asked.number, **BOB)
        with pytest.raises(Misuse, match="no request"):
            await approve_delete(world.database, 999, **BOB)

        async with world.database.begin() as unit:
            assert await unit.approvals.open_ones(None, 10) == [asked]
            assert (await unit.claims.look_up(BILLING, "m1")).state is ClaimState.COMPLETED

    @in_world
    async def test_an_act_that_fails_leaves_no_entry(self, world):
        await park(world, "m1")
        async with world.database.begin() as unit:
            await unit.waiting.erase(WaitingFilter())

        for act in (release, skip):
            with pytest.raises((NotPossible, NoSuchMessage)):
                await act(world.database, BILLING, "m1" if act is release else "m0", **ANN)

        assert await acts(world) == []


class TestParkingInSqlite(InSqlite, ParkingActs):
    pass
