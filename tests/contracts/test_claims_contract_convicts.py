"""The contract of the claims convicts stores that are broken on purpose, one per rule."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from sqlalchemy.exc import SQLAlchemyError

from semel.errors import SemelError
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from tests.contracts import broken_claims as broken
from tests.messaging.worlds import memory_world, postgres_world
from tests.stores.claims import ClaimStoreContract

IN_MEMORY = {
    broken.NeverTriesAgain: "test_every_cell_of_the_claim_table_has_its_answer",
    broken.TriesAgainAtOnce: "test_a_message_that_failed_is_claimed_again_when_it_is_due",
    broken.AcksWhatIsHeld: "test_every_cell_of_the_claim_table_has_its_answer",
    broken.HandlesTheDead: "test_the_dead_and_the_parked_are_never_handled_silently",
    broken.ClaimSaysFalseForEverything: (
        "test_claim_raises_for_whatever_is_neither_new_nor_handled"
    ),
    broken.CompletesWithoutFence: "test_a_stale_owner_changes_nothing",
    broken.RenewsForAnybody: "test_a_stale_owner_changes_nothing",
    broken.CountsFencesPerClaim: "test_fences_rise_and_are_never_given_again",
    broken.LocksWhateverLasts: ("test_only_a_lease_that_ran_out_under_its_fence_can_be_locked"),
    broken.AlwaysReclaims: "test_every_stale_policy_but_reclaim_leaves_an_expired_lease_alone",
    broken.OverwritesTheEnd: (
        "test_a_failure_that_comes_late_never_overwrites_how_a_message_ended"
    ),
    broken.OverwritesTheDead: (
        "test_a_failure_that_comes_late_never_overwrites_how_a_message_ended"
    ),
    broken.KeepsResultsForEver: "test_erasing_removes_a_result_and_leaves_the_rest",
    broken.ForgetsTheFailure: ("test_a_failure_is_written_though_the_rollback_took_the_claim_away"),
    broken.CountsNoAttempts: "test_attempts_count_on_from_failure_to_failure",
    broken.IgnoresThePayload: (
        "test_another_payload_is_a_conflict_with_both_hashes_in_every_state"
    ),
    broken.ExpectsTheLastPayload: "test_a_failure_leaves_the_hash_that_is_expected",
    broken.ConflictsWithTheUnknown: "test_a_hash_that_is_not_known_conflicts_with_nothing",
    broken.CutsIds: "test_ids_are_any_text_and_never_meet",
    broken.ClaimsTwiceInABatch: "test_a_message_that_comes_twice_in_a_batch_is_claimed_once",
    broken.AnswersInSortedOrder: "test_a_batch_answers_as_claims_one_by_one_would",
    broken.UndoesByDeleting: (
        "test_a_claim_is_undone_inside_its_transaction_and_its_neighbours_stay"
    ),
    broken.ForgetsWhyItPassedOver: (
        "test_what_was_passed_over_has_no_effect_and_its_neighbours_have"
    ),
    broken.GivesBackByDeleting: "test_a_claim_that_is_given_back_was_never_asked_for",
    broken.LosesResults: "test_what_the_handler_returned_comes_back_with_its_duplicates",
    broken.ReopensTheCompleted: "test_only_the_dead_and_the_parked_are_reopened",
    broken.DeletesTheParked: "test_retention_deletes_old_claims_of_terminal_states_alone",
    broken.DeletesByTheFirstSight: "test_retention_counts_from_the_last_change",
    broken.DeletesWithoutLimit: (
        "test_retention_deletes_at_most_what_it_is_told_and_the_oldest_first"
    ),
}

ON_POSTGRES = {
    broken.ChecksThenActs: "test_the_second_waits_and_finds_what_the_first_has_committed",
    broken.TakesAnOutageForADuplicate: ("test_whoever_waits_too_long_is_refused_and_harms_nothing"),
    broken.TriesAgainTwice: "test_a_failed_message_is_tried_again_by_one",
    broken.GoesByItsOwnClock: "test_the_clock_of_a_worker_changes_nothing",
    broken.LocksTheHandled: "test_a_handled_message_makes_nobody_wait",
    broken.LooksAndLocksNothing: ("test_an_owner_cannot_renew_what_another_is_deciding_about"),
    broken.ClaimsInTheGivenOrder: "test_a_batch_takes_its_locks_in_order",
}

CONVICTIONS = (AssertionError, pytest.fail.Exception, SemelError, SQLAlchemyError, TimeoutError)


def conviction(open_world, make_store, rule):
    """Run one rule of the contract on a broken store; return what it says, None if nothing."""

    class Bound(ClaimStoreContract):
        @asynccontextmanager
        async def world(self):
            async with open_world() as world:
                begin = world.database.begin

                @asynccontextmanager
                async def broken_begin():
                    async with begin() as unit:
                        unit.claims = make_store(unit)
                        yield unit

                world.database.begin = broken_begin
                yield world

    try:
        getattr(Bound(), rule)()
    except CONVICTIONS as error:
        return error
    return None


def in_memory(store, rule):
    return conviction(memory_world, lambda unit: store(unit.session), rule)


@pytest.mark.parametrize("rule", sorted(set(IN_MEMORY.values())))
def test_a_right_store_is_not_convicted(rule):
    assert in_memory(SqlAlchemyProcessedMessageStore, rule) is None


@pytest.mark.parametrize("store", IN_MEMORY, ids=lambda store: store.__name__)
def test_a_broken_store_is_convicted_by_the_rule_it_breaks(store):
    assert in_memory(store, IN_MEMORY[store]) is not None


@pytest.mark.postgres
@pytest.mark.parametrize("store", ON_POSTGRES, ids=lambda store: store.__name__)
def test_a_broken_store_in_sql_is_convicted_by_the_rule_it_breaks(store, quick_postgres_server):
    def convicted():
        return conviction(
            lambda: postgres_world(quick_postgres_server),
            lambda unit: store(unit.session),
            ON_POSTGRES[store],
        )

    # On a busy machine the second may come when the first is done.
    assert any(convicted() is not None for _ in range(5))
