"""What people do with dead letters, and erasing."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from semel.errors import Misuse
from semel.message import digest_of
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import InboxMessage, Member, Waits
from semel.messaging.redact import ERASED_REASON
from semel.messaging.send.outbox import OutboxEntry
from semel.messaging.settings import ReplayRule, ReplayRules
from semel.operate.audit import NoSuchMessage, NotPossible
from semel.operate.deadletters import (
    MOST_RETRIES,
    inspect_dead_letter,
    park_dead_letter,
    retry_dead_letter,
    skip_dead_letter,
)
from semel.operate.deletion import SamePerson, approve_delete, ask_to_delete_dead_letter
from semel.operate.parking import KeepId, NewId, fix, release, release_key, skip
from semel.operate.retention import Erased, erase
from semel.operate.selection import Letters
from tests.messaging.act_world import (
    ANN,
    BILLING,
    acts,
    bury,
    claim_of,
    details,
    due,
    letter_of,
    letters,
    park,
    queue,
    waiting_of,
)
from tests.messaging.places import InSqlite
from tests.messaging.replay_world import dead
from tests.stores.world import DatabaseContract, in_world

BOB = {"actor": "bob", "reason": "agreed"}


class DeadLetterActs(DatabaseContract):
    @in_world
    async def test_a_letter_that_is_sent_back_waits_under_its_own_id(self, world):
        await bury(world)
        before = await letter_of(world, "m1")

        assert await retry_dead_letter(world.database, BILLING, "m1", **ANN) == 1

        assert await letters(world) == 0
        assert await due(world) == ["m1"]
        sent = await waiting_of(world, "m1")
        assert (sent.payload, sent.headers, sent.key) == (
            before.payload,
            before.headers,
            before.key,
        )
        assert (sent.source, sent.first_failed_at) == (before.source, before.first_failed_at)
        assert not sent.held
        assert (await claim_of(world, "m1")).state is ClaimState.FAILED_RETRYABLE
        assert await acts(world) == [("ann", "dlq.retry", "m1")]

    @in_world
    async def test_what_a_policy_forbids_to_replay_is_not_sent_back(self, world):
        forbids = ReplayRules(own=ReplayRule("the policy forbids replays"))
        await bury(world)

        with pytest.raises(NotPossible, match="the policy forbids replays"):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN, rules=forbids)
        await park_dead_letter(world.database, BILLING, "m1", **ANN)
        for act, name in ((release, "m1"), (release_key, (await waiting_of(world, "m1")).key)):
            with pytest.raises(NotPossible, match="the policy forbids replays"):
                await act(world.database, BILLING, name, **ANN, rules=forbids)

        assert await due(world) == []
        running = Member(BILLING, "process-1", "{}", frozenset(), 20, refusals=forbids.refusals)
        async with world.database.begin() as unit:
            await unit.members.enter(running, 60.0)
        with pytest.raises(NotPossible, match="the policy forbids replays"):
            await release(world.database, BILLING, "m1", **ANN, rules=ReplayRules())
        async with world.database.begin() as unit:
            await unit.members.leave(BILLING, "process-1")
        await release(world.database, BILLING, "m1", **ANN, rules=ReplayRules())
        assert await due(world) == ["m1"]

    @in_world
    async def test_the_loop_guard_counts_over_all_returns(self, world):
        for number in range(MOST_RETRIES):
            await bury(world)
            assert await retry_dead_letter(world.database, BILLING, "m1", **ANN) == number + 1
            async with world.database.begin() as unit:
                await unit.waiting.remove_many(BILLING, ["m1"])
        await bury(world)

        with pytest.raises(NotPossible, match="sent back 5 times"):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN)
        assert await letters(world) == 1
        assert await retry_dead_letter(world.database, BILLING, "m1", **ANN, at_most=6) == 6

    @in_world
    async def test_letters_under_an_id_that_no_message_has_are_not_sent_back(self, world):
        await bury(world, "conflict:0123:m1", outcome="conflict")
        await bury(world, "unreadable:payments/0/7")

        with pytest.raises(NotPossible, match="another payload"):
            await retry_dead_letter(world.database, BILLING, "conflict:0123:m1", **ANN)
        with pytest.raises(NotPossible, match="could not be read"):
            await retry_dead_letter(world.database, BILLING, "unreadable:payments/0/7", **ANN)

        assert await letters(world) == 2
        assert await due(world) == []

    @in_world
    async def test_replays_count_for_the_loop_guard_too(self, world):
        service = await dead(world, 1)
        service.refuse("m0")
        for number in range(5):
            await service.run(Letters(), name=f"replay {number}")

        found = await inspect_dead_letter(world.database, BILLING, "m0", actor="ann")
        assert found.sent_back == 5
        with pytest.raises(NotPossible, match="sent back 5 times"):
            await retry_dead_letter(world.database, BILLING, "m0", **ANN)

    @in_world
    async def test_a_letter_whose_id_was_handled_is_not_sent_back_under_it(self, world):
        await bury(world, "done")
        async with world.database.begin() as unit:
            await unit.claims.mark_completed(BILLING, "done")

        with pytest.raises(NotPossible, match="handled already"):
            await retry_dead_letter(world.database, BILLING, "done", **ANN)
        await park_dead_letter(world.database, BILLING, "done", **ANN)
        with pytest.raises(NotPossible, match="handled already"):
            await fix(world.database, BILLING, "done", b"{}", ids=NewId("done-2"), **ANN)
        again = NewId("done-2", second_effect=True)
        await fix(world.database, BILLING, "done", b"{}", ids=again, **ANN)
        await release(world.database, BILLING, "done-2", **ANN)

        assert await due(world) == ["done-2"]

    @in_world
    async def test_a_parked_letter_can_be_fixed_and_released(self, world):
        await bury(world)

        await park_dead_letter(world.database, BILLING, "m1", **ANN)

        assert await letters(world) == 0
        assert await queue(world) == [("m1", "parked")]
        row = await claim_of(world, "m1")
        assert (row.state, row.error_code, row.attempts) == (ClaimState.PARKED, "REJECTED", 5)
        await fix(world.database, BILLING, "m1", b"{}", ids=KeepId(), **ANN)
        await release(world.database, BILLING, "m1", **ANN)
        assert await due(world) == ["m1"]
        assert (await claim_of(world, "m1")).payload_hash == digest_of(b"{}")

    @in_world
    async def test_a_letter_without_a_claim_can_be_parked_and_sent_back(self, world):
        await bury(world)
        async with world.database.begin() as unit:
            await unit.claims.delete_expired(BILLING, -60.0, 10)

        await park_dead_letter(world.database, BILLING, "m1", **ANN)
        await release(world.database, BILLING, "m1", **ANN)

        assert await due(world) == ["m1"]

    @in_world
    async def test_a_letter_does_not_replace_a_waiting_message_of_its_id(self, world):
        await bury(world)
        await park(world, "m1", payload=b"another")

        for act in (retry_dead_letter, park_dead_letter):
            with pytest.raises(NotPossible, match="waits already"):
                await act(world.database, BILLING, "m1", **ANN)

        assert (await waiting_of(world, "m1")).payload == b"another"
        assert await letters(world) == 1

    @in_world
    async def test_a_skipped_letter_is_a_duplicate_from_then_on(self, world):
        await bury(world)

        await skip_dead_letter(world.database, BILLING, "m1", **ANN)

        assert await letters(world) == 0
        row = await claim_of(world, "m1")
        assert (row.state, row.marker) == (ClaimState.COMPLETED, "SKIPPED")
        assert await acts(world) == [("ann", "dlq.skip", "m1")]
        with pytest.raises(Misuse, match="reason"):
            await skip_dead_letter(world.database, BILLING, "m1", actor="ann", reason="")
        with pytest.raises(NoSuchMessage):
            await skip_dead_letter(world.database, BILLING, "m1", **ANN)

    @in_world
    async def test_a_letter_is_deleted_by_two_people(self, world):
        await bury(world)
        asked = await ask_to_delete_dead_letter(world.database, BILLING, "m1", **ANN)

        with pytest.raises(SamePerson):
            await approve_delete(world.database, asked.number, **ANN)
        assert await letters(world) == 1
        await approve_delete(world.database, asked.number, **BOB)

        assert await letters(world) == 0
        assert (await claim_of(world, "m1")).state is ClaimState.FAILED_TERMINAL
        with pytest.raises(NoSuchMessage):
            await ask_to_delete_dead_letter(world.database, BILLING, "m1", **ANN)


class Erasing(DatabaseContract):
    @in_world
    async def test_a_keys_payloads_are_removed_everywhere(self, world):
        await fill(world, key="customer-7")
        await fill(world, key="customer-8")

        erased = await erase(world.database, key="customer-7", **ANN)

        assert erased == Erased(dead_letters=1, waiting=1, revisions=2, inbox=1, outbox=1)
        assert await texts(world) == {"customer-8"}
        again = await erase(world.database, key="customer-7", **ANN)
        assert again.total == 0

    @in_world
    async def test_hashes_codes_and_the_audit_trail_stay(self, world):
        await fill(world, key="customer-7")
        before = await letter_of(world, "dead-customer-7")

        await erase(world.database, key="customer-7", **ANN)

        after = await letter_of(world, "dead-customer-7")
        gone = replace(before, payload=None, headers={}, reason=ERASED_REASON)
        assert after == replace(gone, erased_at=after.erased_at)
        found = await details(world)
        assert found["dead_letters"] == 1
        assert found["key_hash"] == digest_of(b"customer-7")
        async with world.database.begin() as unit:
            entry = (await unit.audit.read(0, 100))[-1]
        assert "customer-7" not in json.dumps([entry.act.message_id, found])
        assert (entry.act.actor, entry.act.act) == ("ann", "erase")

    @in_world
    async def test_one_message_is_erased_under_every_id_it_was_given(self, world):
        await park(world, "m1")
        await fix(world.database, BILLING, "m1", b"second", ids=NewId("m1-b"), **ANN)
        await fix(world.database, BILLING, "m1-b", b"third", ids=NewId("m1-c"), **ANN)

        erased = await erase(world.database, message_id="m1-b", **ANN)

        assert (erased.waiting, erased.revisions) == (1, 5)
        assert (await waiting_of(world, "m1-c")).payload is None

    @in_world
    async def test_an_erased_message_can_only_be_skipped_or_deleted(self, world):
        await park(world, "m1", "m2", key="k")
        await release(world.database, BILLING, "m1", **ANN)

        await erase(world.database, message_id="m1", **ANN)

        assert await due(world) == []
        assert (await waiting_of(world, "m1")).waits is Waits.PARKED
        row = await claim_of(world, "m1")
        assert (row.state, row.marker) == (ClaimState.PARKED, "ERASED")
        for refused in (
            release(world.database, BILLING, "m1", **ANN),
            fix(world.database, BILLING, "m1", b"back", ids=KeepId(), **ANN),
        ):
            with pytest.raises(NotPossible, match="erased"):
                await refused
        await skip(world.database, BILLING, "m1", **ANN)
        assert await due(world) == ["m2"]

    @in_world
    async def test_an_erased_letter_can_only_be_skipped_or_deleted(self, world):
        await bury(world)
        await erase(world.database, message_id="m1", **ANN)

        for act in (retry_dead_letter, park_dead_letter):
            with pytest.raises(NotPossible, match="erased"):
                await act(world.database, BILLING, "m1", **ANN)
        await skip_dead_letter(world.database, BILLING, "m1", **ANN)

    @in_world
    async def test_erasing_says_what_by_whom_and_why(self, world):
        for wrong in (
            {"key": "k", "message_id": "m"},
            {},
        ):
            with pytest.raises(Misuse, match="a key, or a message id"):
                await erase(world.database, **wrong, **ANN)
        with pytest.raises(Misuse, match="reason"):
            await erase(world.database, key="k", actor="ann", reason="")

        assert await acts(world) == []


async def fill(world, key):
    """Put something of *key* everywhere; every payload and header contains the key."""
    payload = key.encode()
    headers = {"who": payload}
    await bury(world, f"dead-{key}", key=key, payload=payload, headers=headers)
    await park(world, f"parked-{key}", key=key, payload=payload)
    await fix(world.database, BILLING, f"parked-{key}", payload + b"!", ids=KeepId(), **ANN)
    async with world.database.begin() as unit:
        await unit.inbox.store(
            InboxMessage(
                BILLING,
                f"in-{key}",
                payload=payload,
                key=key,
                headers=headers,
                payload_hash="h",
            )
        )
        await unit.outbox.add([OutboxEntry(f"out-{key}", "paid", payload, key, headers)])


async def texts(world):
    """Return the customers whose payloads or headers are found anywhere."""
    found = []
    async with world.database.begin() as unit:
        for key in ("customer-7", "customer-8"):
            letter = await unit.dead_letters.get(BILLING, f"dead-{key}")
            parked = await unit.waiting.get(BILLING, f"parked-{key}")
            stored = await unit.inbox.get(BILLING, f"in-{key}")
            revisions = await unit.revisions.of(BILLING, f"parked-{key}")
            found += [letter.payload, parked.payload, stored.payload]
            found += [*letter.headers.values(), *stored.headers.values()]
            found += [revision.payload for revision in revisions]
        for entry in [
            *await unit.outbox.read("outbox", 0, 10),
            *await unit.outbox.parked("outbox", 10),
        ]:
            found += [entry.value, *entry.headers.values()]
    return {payload.decode().strip("!") for payload in found if payload is not None}


class TestDeadLettersInSqlite(InSqlite, DeadLetterActs):
    pass


class TestErasingInSqlite(InSqlite, Erasing):
    pass
