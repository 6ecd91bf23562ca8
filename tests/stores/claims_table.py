"""The rules of the claim table: what a claim finds, what it answers, what it leaves alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import pytest

from semel.message import Coordinates
from semel.messaging.handle.claims import (
    SKIPPED,
    ClaimAnswer,
    Claimed,
    ClaimFound,
    ClaimRequest,
    ClaimState,
    Conflict,
    Duplicate,
    Failure,
    HeldElsewhere,
    NotClaimable,
    NotDue,
    Parked,
    Terminal,
    found_of,
)
from semel.messaging.records import stored_id
from semel.testing.contracts.claims import STRANGE_IDS
from tests.stores.claims_world import (
    CONSUMER,
    DELAY_SECONDS,
    HASH,
    LEASE_SECONDS,
    OTHER_HASH,
    OWNER,
    arranged,
    claim,
    claim_and_roll_back,
    fail,
    failing,
    hash_for,
    known,
    lease,
    look_up,
)
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

CLAIM_TABLE: Final[Mapping[ClaimFound, tuple[type[ClaimAnswer], str]]] = {
    ClaimFound.NOTHING: (Claimed, "handle it"),
    ClaimFound.RETRYABLE_DUE: (Claimed, "handle it again"),
    ClaimFound.LEASE_EXPIRED: (Claimed, "take it over, or Stale where the stale policy says so"),
    ClaimFound.RETRYABLE_LATER: (
        NotDue,
        "ack if the waiting table holds the payload, else seek back and pause until it is due",
    ),
    ClaimFound.COMPLETED: (Duplicate, "ack"),
    ClaimFound.TERMINAL: (Terminal, "by policy; never handled silently"),
    ClaimFound.PARKED: (Parked, "by policy; never handled silently"),
    ClaimFound.LEASE_LIVE: (HeldElsewhere, "no ack; it comes back later"),
    ClaimFound.LOCKED: (HeldElsewhere, "no ack; it comes back later"),
    ClaimFound.OTHER_PAYLOAD: (Conflict, "its own outcome, with both hashes"),
}
"""By what the claim finds: its answer, and what the consumer then does."""


TAKEN: Final = (ClaimFound.NOTHING, ClaimFound.RETRYABLE_DUE, ClaimFound.LEASE_EXPIRED)
WITH_A_ROW: Final = (
    ClaimFound.COMPLETED,
    ClaimFound.RETRYABLE_DUE,
    ClaimFound.RETRYABLE_LATER,
    ClaimFound.LEASE_LIVE,
    ClaimFound.LEASE_EXPIRED,
    ClaimFound.TERMINAL,
    ClaimFound.PARKED,
)
REFUSED: Final = tuple(found for found in WITH_A_ROW if found not in TAKEN)


class TableRules(DatabaseContract):
    """What a claim answers to everything it can find."""

    @in_world
    async def test_every_cell_of_the_claim_table_has_its_answer(self, world: DatabaseWorld) -> None:
        for found in ClaimFound:
            message_id = f"claimed: {found}"
            async with arranged(world, found, message_id):
                answer = await claim(world, message_id, hash_for(found))

            assert type(answer) is CLAIM_TABLE[found][0], found

    @in_world
    async def test_places_are_told_whose_messages_were_handled_with_an_effect(
        self, world: DatabaseWorld
    ) -> None:
        places = [Coordinates(topic, 0, n) for n in range(3) for topic in ("pay/ments", "nul\0")]
        skipped, open_place, elsewhere = (Coordinates("pay/ments", 1, n) for n in range(3))
        async with world.database.begin() as unit:
            for at in (*places, skipped, open_place):
                await unit.claims.try_claim(CONSUMER, ClaimRequest(f"at {at}", HASH, str(at)))
            undone = failing(ClaimState.FAILED_RETRYABLE)
            await unit.claims.undo(CONSUMER, f"at {open_place}", undone)
            done = replace(failing(ClaimState.PARKED), marker=SKIPPED)
            await unit.claims.undo(CONSUMER, f"at {skipped}", done)
            await unit.claims.mark_completed(CONSUMER, f"at {skipped}")
            await unit.claims.try_claim("shipping", ClaimRequest("m", HASH, str(elsewhere)))
            asked = [*places[1:], skipped, open_place, elsewhere, Coordinates("x", 0, 0)]
            found = await unit.claims.handled_from(CONSUMER, asked)

        assert sorted(found) == sorted(places[1:])

    @in_world
    async def test_every_cell_of_the_claim_table_has_its_answer_for_a_lease(
        self, world: DatabaseWorld
    ) -> None:
        for found in ClaimFound:
            message_id = f"leased: {found}"
            async with arranged(world, found, message_id):
                answer = await lease(world, message_id, hash_for(found), owner="worker-2")

            assert type(answer) is CLAIM_TABLE[found][0], found

    @in_world
    async def test_rows_are_what_the_pure_model_of_the_table_takes_them_for(
        self, world: DatabaseWorld
    ) -> None:
        for found in WITH_A_ROW:
            message_id = f"read: {found}"
            async with arranged(world, found, message_id), world.database.begin() as unit:
                row = await unit.claims.look_up(CONSUMER, message_id)
                now = await unit.now()

            assert found_of(row, HASH, now) is found

    @in_world
    async def test_a_claim_that_is_refused_changes_nothing(self, world: DatabaseWorld) -> None:
        for found in REFUSED:
            message_id = f"left alone: {found}"
            async with arranged(world, found, message_id):
                before = await known(world, message_id)
                await claim(world, message_id)
                await lease(world, message_id, owner="worker-2")

                assert await known(world, message_id) == before, found

    @in_world
    async def test_a_claim_that_is_granted_is_completed_with_its_transaction(
        self, world: DatabaseWorld
    ) -> None:
        for found in TAKEN:
            message_id = f"granted: {found}"
            async with arranged(world, found, message_id):
                await claim(world, message_id)

                row = await known(world, message_id)
                assert row.state is ClaimState.COMPLETED, found
                assert row.payload_hash == HASH
                assert row.owner == ""
                assert isinstance(await claim(world, message_id), Duplicate)

    @in_world
    async def test_a_claim_that_is_rolled_back_never_was(self, world: DatabaseWorld) -> None:
        for found in TAKEN:
            message_id = f"rolled back: {found}"
            async with arranged(world, found, message_id):
                before = await look_up(world, message_id)
                first = await claim_and_roll_back(world, message_id)
                left = await look_up(world, message_id)
                second = await claim(world, message_id)

            assert isinstance(first, Claimed), found
            assert left == before
            assert second == first, "an attempt that was rolled back is not counted"

    @in_world
    async def test_answers_say_how_long_and_why(self, world: DatabaseWorld) -> None:
        await fail(world, "later", failing(attempts=3, delay=DELAY_SECONDS))
        await fail(world, "dead", failing(ClaimState.FAILED_TERMINAL))
        await lease(world, "leased")

        later, dead, leased = [await claim(world, id) for id in ("later", "dead", "leased")]

        assert isinstance(later, NotDue)
        assert later.attempts == 3
        assert DELAY_SECONDS - 30 < later.seconds_left <= DELAY_SECONDS
        assert dead == Terminal("TIMEOUT")
        assert isinstance(leased, HeldElsewhere)
        assert leased.owner == OWNER
        assert LEASE_SECONDS - 30 < leased.seconds_left <= LEASE_SECONDS

    @in_world
    async def test_claim_raises_for_whatever_is_neither_new_nor_handled(
        self, world: DatabaseWorld
    ) -> None:
        for found in [found for found in REFUSED if found is not ClaimFound.COMPLETED]:
            message_id = f"neither: {found}"
            async with arranged(world, found, message_id):
                with pytest.raises(NotClaimable) as raised:
                    async with world.database.begin() as unit:
                        await unit.claims.claim(consumer_name=CONSUMER, event_id=message_id)

            assert type(raised.value.answer) is CLAIM_TABLE[found][0], found

    @in_world
    async def test_another_payload_is_a_conflict_with_both_hashes_in_every_state(
        self, world: DatabaseWorld
    ) -> None:
        for found in WITH_A_ROW:
            message_id = f"conflict: {found}"
            async with arranged(world, found, message_id):
                before = await known(world, message_id)
                answers = [
                    await claim(world, message_id, OTHER_HASH),
                    await lease(world, message_id, OTHER_HASH),
                ]

                assert answers == [Conflict(expected=HASH, found=OTHER_HASH)] * 2, found
                assert await known(world, message_id) == before, found

    @in_world
    async def test_a_hash_that_is_not_known_conflicts_with_nothing(
        self, world: DatabaseWorld
    ) -> None:
        for found in WITH_A_ROW:
            message_id = f"asked without a hash: {found}"
            async with arranged(world, found, message_id):
                answer = await claim(world, message_id, "")

            assert type(answer) is CLAIM_TABLE[found][0], found
            assert (await known(world, message_id)).payload_hash == HASH, "what is known stays"

    @in_world
    async def test_the_first_hash_that_comes_is_the_one_that_is_expected(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            unknown = Failure(ClaimState.FAILED_RETRYABLE, 1, "TIMEOUT")
            await unit.claims.mark_failed(CONSUMER, "hash comes later", unknown)
        before = await known(world, "hash comes later")
        await lease(world, "hash comes later", HASH)

        assert before.payload_hash == ""
        assert await claim(world, "hash comes later", OTHER_HASH) == Conflict(HASH, OTHER_HASH)

    @in_world
    async def test_a_revision_replaces_the_hash_that_is_expected(
        self, world: DatabaseWorld
    ) -> None:
        await fail(world, "revised")
        async with world.database.begin() as unit:
            await unit.claims.expect_payload(CONSUMER, "revised", OTHER_HASH)

        assert await claim(world, "revised", HASH) == Conflict(OTHER_HASH, HASH)
        assert isinstance(await claim(world, "revised", OTHER_HASH), Claimed)

    @in_world
    async def test_an_id_is_read_as_it_was_given(self, world: DatabaseWorld) -> None:
        for message_id in STRANGE_IDS:
            await claim(world, message_id)
        rows = [await known(world, message_id) for message_id in STRANGE_IDS]

        assert [row.message_id for row in rows] == list(STRANGE_IDS)

    @in_world
    async def test_an_id_that_looks_like_the_hash_of_another_one_is_itself(
        self, world: DatabaseWorld
    ) -> None:
        long = "y" * 1000
        await claim(world, long)

        assert isinstance(await claim(world, stored_id(long)), Claimed)
