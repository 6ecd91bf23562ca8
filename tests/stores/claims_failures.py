"""The rules after an attempt: failures, results, an operator's acts, and retention."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.errors import Misuse
from semel.messaging.handle.claims import (
    OLD_VERSION,
    Claimed,
    ClaimFound,
    ClaimState,
    Conflict,
    Duplicate,
    Failure,
    NotDue,
    Parked,
    Terminal,
    found_of,
)
from semel.messaging.records import DeadLetter, WaitingMessage, Waits
from tests.stores.claims_table import TAKEN, WITH_A_ROW
from tests.stores.claims_world import (
    CONSUMER,
    DELAY_SECONDS,
    HASH,
    OTHER_HASH,
    arranged,
    asking,
    claim,
    claim_and_roll_back,
    fail,
    failing,
    known,
    look_up,
    rolled_back,
)
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world


class FailureRules(DatabaseContract):
    """What is written when a handler did not succeed, or an operator steps in."""

    @in_world
    async def test_a_failure_is_written_though_the_rollback_took_the_claim_away(
        self, world: DatabaseWorld
    ) -> None:
        await claim_and_roll_back(world, "m")

        written = await fail(world, "m", failing(delay=DELAY_SECONDS))

        row = await known(world, "m")
        assert written
        assert (row.state, row.attempts) == (ClaimState.FAILED_RETRYABLE, 1)
        assert (row.error_code, row.payload_hash) == ("TIMEOUT", HASH)
        assert isinstance(await claim(world, "m"), NotDue)

    @in_world
    async def test_a_failure_that_comes_late_never_overwrites_how_a_message_ended(
        self, world: DatabaseWorld
    ) -> None:
        for found in _ENDED:
            message_id = f"ended: {found}"
            async with arranged(world, found, message_id):
                before = await known(world, message_id)
                written = [await fail(world, message_id, failing(state)) for state in _FAILED]

            assert written == [False] * len(_FAILED), found
            assert await known(world, message_id) == before, found

    @in_world
    async def test_a_failure_is_written_over_everything_that_is_still_open(
        self, world: DatabaseWorld
    ) -> None:
        for found in [found for found in WITH_A_ROW if found not in _ENDED]:
            message_id = f"fails: {found}"
            async with arranged(world, found, message_id):
                written = await fail(world, message_id, failing(ClaimState.PARKED, attempts=4))

            row = await known(world, message_id)
            assert written, found
            assert (row.state, row.attempts, row.owner) == (ClaimState.PARKED, 4, "")

    @in_world
    async def test_a_message_that_failed_is_claimed_again_when_it_is_due(
        self, world: DatabaseWorld
    ) -> None:
        await fail(world, "m", failing(delay=DELAY_SECONDS))
        early = await claim(world, "m")
        await world.age(DELAY_SECONDS + 1)

        assert isinstance(early, NotDue)
        assert await claim(world, "m") == Claimed(attempt=2)

    @in_world
    async def test_attempts_count_on_from_failure_to_failure(self, world: DatabaseWorld) -> None:
        attempts = []
        for _ in range(4):
            answer = await claim_and_roll_back(world, "m")
            assert isinstance(answer, Claimed)
            attempts.append(answer.attempt)
            await fail(world, "m", failing(attempts=answer.attempt))

        assert attempts == [1, 2, 3, 4]

    @in_world
    async def test_a_failure_leaves_the_hash_that_is_expected(self, world: DatabaseWorld) -> None:
        await fail(world, "m")
        other = Failure(ClaimState.FAILED_RETRYABLE, 2, "TIMEOUT", payload_hash=OTHER_HASH)
        await fail(world, "m", other)

        assert await claim(world, "m", OTHER_HASH) == Conflict(HASH, OTHER_HASH)

    @in_world
    async def test_the_dead_and_the_parked_are_never_handled_silently(
        self, world: DatabaseWorld
    ) -> None:
        await fail(world, "dead", failing(ClaimState.FAILED_TERMINAL))
        await fail(world, "parked", failing(ClaimState.PARKED))
        await world.age(1_000_000)

        assert await claim(world, "dead") == Terminal("TIMEOUT")
        assert await claim(world, "parked") == Parked()

    @in_world
    async def test_a_claim_is_undone_inside_its_transaction_and_its_neighbours_stay(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            await unit.claims.try_claim_many(CONSUMER, [asking("good"), asking("bad")])
            undone = await unit.claims.undo(CONSUMER, "bad", failing())
            assert undone == await unit.claims.look_up(CONSUMER, "bad")

        assert undone.state is ClaimState.FAILED_RETRYABLE
        assert undone.failed_at is not None
        assert isinstance(await claim(world, "good"), Duplicate)
        assert await claim(world, "bad") == Claimed(attempt=2)

    @in_world
    async def test_there_is_nothing_to_undo_where_nothing_was_claimed(
        self, world: DatabaseWorld
    ) -> None:
        with pytest.raises(Misuse, match="no claim to undo"):
            async with world.database.begin() as unit:
                await unit.claims.undo(CONSUMER, "m", failing())

    @in_world
    async def test_a_claim_that_is_given_back_was_never_asked_for(
        self, world: DatabaseWorld
    ) -> None:
        for found in TAKEN:
            message_id = f"given back: {found}"
            async with arranged(world, found, message_id):
                async with world.database.begin() as unit:
                    first = await unit.claims.try_claim(CONSUMER, asking(message_id))
                    assert isinstance(first, Claimed)
                    await unit.claims.give_back(CONSUMER, message_id, first)
                async with world.database.begin() as unit:
                    left = await unit.claims.look_up(CONSUMER, message_id)
                    now = await unit.now()

                assert found_of(left, HASH, now) is found
                assert left is None or left.payload_hash == HASH, "what is expected stays"
                assert await claim(world, message_id) == first

    @in_world
    async def test_a_reopened_claim_that_is_given_back_still_expects_its_payload(
        self, world: DatabaseWorld
    ) -> None:
        await fail(world, "m", failing(ClaimState.PARKED))
        async with world.database.begin() as unit:
            await unit.claims.reopen(CONSUMER, "m")
            claimed = await unit.claims.try_claim(CONSUMER, asking("m"))
            assert isinstance(claimed, Claimed)
            await unit.claims.give_back(CONSUMER, "m", claimed)

        assert await claim(world, "m", OTHER_HASH) == Conflict(HASH, OTHER_HASH)
        assert await claim(world, "m") == Claimed(attempt=1)

    @in_world
    async def test_what_the_handler_returned_comes_back_with_its_duplicates(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            await unit.claims.try_claim(CONSUMER, asking("kept"))
            await unit.claims.keep_result(CONSUMER, "kept", '{"invoice": 7}')
            answer = await unit.claims.lease(
                CONSUMER, asking("leased"), owner="worker-1", seconds=60
            )
            assert isinstance(answer, Claimed)
            await unit.claims.mark_completed(CONSUMER, "leased", answer.fence, "[1, 2]")

        assert await claim(world, "kept") == Duplicate('{"invoice": 7}')
        assert await claim(world, "leased") == Duplicate("[1, 2]")

    @in_world
    async def test_what_was_passed_over_has_no_effect_and_its_neighbours_have(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            await unit.claims.try_claim_many(CONSUMER, [asking("old"), asking("new")])
            await unit.claims.pass_over(CONSUMER, "old", OLD_VERSION)

        assert await claim(world, "old") == Duplicate(had_effect=False)
        assert await claim(world, "new") == Duplicate()
        assert (await known(world, "old")).state is ClaimState.COMPLETED

    @in_world
    async def test_erasing_removes_a_result_and_leaves_the_rest(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            await unit.claims.try_claim(CONSUMER, asking("m"))
            await unit.claims.keep_result(CONSUMER, "m", '{"name": "Ann"}')
        await fail(world, "open")
        before = [await known(world, name) for name in ("m", "open")]

        async with world.database.begin() as unit:
            had = [await unit.claims.erase(CONSUMER, name) for name in ("m", "open", "unknown")]
        after = [await known(world, name) for name in ("m", "open")]
        async with world.database.begin() as unit:
            again = await unit.claims.erase(CONSUMER, "m")

        assert had == [True, False, False]
        assert all(row.erased_at is not None for row in after)
        assert after == [
            replace(b, result=None, erased_at=a.erased_at)
            for a, b in zip(after, before, strict=True)
        ]
        assert not again
        assert await known(world, "m") == after[0], "the first time stays"
        assert await claim(world, "m") == Duplicate(None)
        assert await look_up(world, "unknown") is None

    @in_world
    async def test_results_are_erased_by_the_key_of_their_message(
        self, world: DatabaseWorld
    ) -> None:
        keys = {"a1": "ada", "a2": "ada", "b": "bob", "long": "k" * 600, "none": None}
        async with world.database.begin() as unit:
            for name, key in keys.items():
                await unit.claims.try_claim(CONSUMER, asking(name))
                await unit.claims.keep_result(CONSUMER, name, '"x"', key)

        async with world.database.begin() as unit:
            counts = [await unit.claims.erase_key(key) for key in ("ada", "ada", "k" * 600)]

        assert counts == [2, 0, 1]
        left = [name for name in keys if (await known(world, name)).result is not None]
        assert left == ["b", "none"]
        assert (await known(world, "a1")).erased_at is not None

    @in_world
    async def test_nothing_is_kept_of_what_was_erased(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            leased = await unit.claims.lease(CONSUMER, asking("m"), owner="w", seconds=60)
            assert isinstance(leased, Claimed)
            await unit.claims.erase(CONSUMER, "m")
            await unit.claims.keep_result(CONSUMER, "m", '"x"', "ada")
            assert await unit.claims.mark_completed(CONSUMER, "m", leased.fence, '"x"')

        row = await known(world, "m")
        assert (row.state, row.result, row.result_key) == (ClaimState.COMPLETED, None, None)

    @in_world
    async def test_an_operator_completes_whatever_is_not_completed(
        self, world: DatabaseWorld
    ) -> None:
        for found in (ClaimFound.NOTHING, *WITH_A_ROW):
            message_id = f"skipped: {found}"
            async with arranged(world, found, message_id), world.database.begin() as unit:
                changed = await unit.claims.mark_completed(CONSUMER, message_id)

            assert changed is (found is not ClaimFound.COMPLETED), found
            assert (await known(world, message_id)).state is ClaimState.COMPLETED, found

    @in_world
    async def test_only_the_dead_and_the_parked_are_reopened(self, world: DatabaseWorld) -> None:
        for found in (ClaimFound.NOTHING, *WITH_A_ROW):
            message_id = f"reopened: {found}"
            async with arranged(world, found, message_id):
                before = await look_up(world, message_id)
                async with world.database.begin() as unit:
                    changed = await unit.claims.reopen(CONSUMER, message_id)
                after = await look_up(world, message_id)

            assert changed is (found in (ClaimFound.TERMINAL, ClaimFound.PARKED)), found
            assert changed or after == before, found

    @in_world
    async def test_a_message_that_was_reopened_counts_its_attempts_from_the_start(
        self, world: DatabaseWorld
    ) -> None:
        for state in (ClaimState.FAILED_TERMINAL, ClaimState.PARKED):
            await fail(world, state, failing(state, attempts=5))
            async with world.database.begin() as unit:
                await unit.claims.reopen(CONSUMER, state)

            assert await claim(world, state) == Claimed(attempt=1)


_FAILED = (ClaimState.FAILED_RETRYABLE, ClaimState.FAILED_TERMINAL, ClaimState.PARKED)
_ENDED = (ClaimFound.COMPLETED, ClaimFound.TERMINAL, ClaimFound.PARKED)

WEEK_SECONDS = 7 * 86_400.0


class RetentionRules(DatabaseContract):
    """What may be forgotten: terminal states, by the age of the last change, a few at a time."""

    @in_world
    async def test_retention_deletes_old_claims_of_terminal_states_alone(
        self, world: DatabaseWorld
    ) -> None:
        deleted = []
        for found in WITH_A_ROW:
            async with arranged(world, found, f"old: {found}"):
                await world.age(WEEK_SECONDS + 1)
                async with world.database.begin() as unit:
                    count = await unit.claims.delete_expired(CONSUMER, WEEK_SECONDS, 100)
            gone = await look_up(world, f"old: {found}") is None
            assert count == int(gone), found
            deleted += [found] * count

        assert deleted == [ClaimFound.COMPLETED, ClaimFound.TERMINAL]

    @in_world
    async def test_retention_counts_from_the_last_change(self, world: DatabaseWorld) -> None:
        await fail(world, "m")
        await world.age(WEEK_SECONDS + 1)
        await claim(world, "m")
        await world.age(WEEK_SECONDS / 2)

        async with world.database.begin() as unit:
            assert await unit.claims.delete_expired(CONSUMER, WEEK_SECONDS, 100) == 0
        assert isinstance(await claim(world, "m"), Duplicate)

    @in_world
    async def test_retention_deletes_at_most_what_it_is_told_and_the_oldest_first(
        self, world: DatabaseWorld
    ) -> None:
        for number in range(6):
            await claim(world, f"m{number}")
            await world.age(10)

        async with world.database.begin() as unit:
            first = await unit.claims.delete_expired(CONSUMER, 5, 4)
        left = [n for n in range(6) if await look_up(world, f"m{n}") is not None]
        async with world.database.begin() as unit:
            second = await unit.claims.delete_expired(CONSUMER, 5, 4)

        assert (first, second) == (4, 2)
        assert left == [4, 5]

    @in_world
    async def test_retention_keeps_the_claims_of_messages_that_can_be_sent_back(
        self, world: DatabaseWorld
    ) -> None:
        async with world.database.begin() as unit:
            for name in ("dead-lettered", "waiting", "over"):
                await unit.claims.mark_completed(CONSUMER, name)
            letter = DeadLetter(
                CONSUMER,
                "dead-lettered",
                payload=b"{}",
                reason="refused",
                exception="",
                error_code="INVALID",
                first_failed_at=1.0,
                last_failed_at=1.0,
            )
            await unit.dead_letters.put(letter)
            await unit.dead_letters.put(replace(letter, consumer="shipping", message_id="over"))
            await unit.waiting.put(
                WaitingMessage(CONSUMER, "waiting", Waits.RETRY, key=None, payload=b"")
            )
        await world.age(WEEK_SECONDS)

        async with world.database.begin() as unit:
            assert await unit.claims.delete_expired(CONSUMER, 1, 100) == 1
        assert await look_up(world, "over") is None

    @in_world
    async def test_retention_leaves_other_consumers_alone(self, world: DatabaseWorld) -> None:
        await claim(world, "m")
        await world.age(WEEK_SECONDS)

        async with world.database.begin() as unit:
            assert await unit.claims.delete_expired("shipping", 0, 100) == 0
        assert isinstance(await claim(world, "m"), Duplicate)

    @in_world
    async def test_retention_that_is_rolled_back_has_deleted_nothing(
        self, world: DatabaseWorld
    ) -> None:
        await claim(world, "m")
        await world.age(WEEK_SECONDS)

        async with rolled_back(world) as unit:
            assert await unit.claims.delete_expired(CONSUMER, 1, 100) == 1

        assert isinstance(await claim(world, "m"), Duplicate)
