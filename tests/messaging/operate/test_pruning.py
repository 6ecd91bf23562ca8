"""Retention: what is over and old is deleted, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.message import Partition
from semel.messaging.database import Sweep
from semel.messaging.failed.retries import retry_due
from semel.messaging.handle.claims import ClaimState, Failure
from semel.messaging.outcome import OutcomeRange
from semel.messaging.records import DeadLetterFilter, Gap, InboxMessage
from semel.messaging.settings import DAY_SECONDS, ConsumerSettings
from semel.operate.audit import NotPossible
from semel.operate.completeness import audit_completeness
from semel.operate.deadletters import retry_dead_letter, skip_dead_letter
from semel.operate.replay import abandon_replay
from semel.operate.retention import Pruned, ReplayRuns, Retention, prune, shortest_ttl
from semel.operate.stores import (
    ApprovalAsked,
    ApprovalDecision,
    ReplayRun,
    ReplayState,
    Revision,
)
from semel.policy.vocabulary import Duplicates
from tests.messaging.act_world import BILLING, acts, bury, claim_of, park, queue
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.replay_world import POLICY, Service
from tests.stores.attempts import ATTEMPT
from tests.stores.deadletters import LETTER
from tests.stores.world import DatabaseContract, in_world

WEEK = 7 * DAY_SECONDS
SETTINGS = Retention(batch=2)


class Pruning(DatabaseContract):
    @in_world
    async def test_only_what_is_over_and_old_is_deleted(self, world):
        await claims(world, "old")
        await world.age(2 * WEEK + 60)
        await claims(world, "new")

        pruned = await prune(world.database, BILLING, SETTINGS)

        assert pruned == Pruned(claims=2)
        left = {"old FAILED_RETRYABLE", "old PARKED", "old IN_PROGRESS"}
        assert await known(world) == left | {f"new {state}" for state in ClaimState}

    @in_world
    async def test_dead_letters_expire_by_policy_and_the_trail_names_each(self, world):
        for name in ("d1", "d2", "d3"):
            await bury(world, name)
        async with world.database.begin() as unit:
            letter = await unit.dead_letters.get(BILLING, "d1")
            await unit.revisions.add(Revision.of(letter))
        await world.age(2 * WEEK)
        await bury(world, "new")
        expiring = replace(SETTINGS, expire_dead_letters=True)

        with pytest.raises(Misuse, match="after an age"):
            replace(expiring, dead_letter_age_seconds=0.0)
        with pytest.raises(Misuse, match="needs an actor"):
            await prune(world.database, BILLING, expiring)
        kept = await prune(world.database, BILLING, SETTINGS)
        pruned = await prune(world.database, BILLING, expiring, actor="cron")

        assert (kept.dead_letters, pruned.dead_letters) == (0, 3)
        done = [(name, what) for _, what, name in await acts(world) if what == "dlq.expire"]
        assert done == [(name, "dlq.expire") for name in ("d1", "d2", "d3")]
        assert (await claim_of(world, "d1")).state is ClaimState.FAILED_TERMINAL
        async with world.database.begin() as unit:
            assert await unit.dead_letters.count(DeadLetterFilter()) == 1
            assert [one.payload for one in await unit.revisions.of(BILLING, "d1")] == [None]

    @in_world
    async def test_rows_are_deleted_in_small_transactions_with_progress(self, world):
        async with world.database.begin() as unit:
            for number in range(5):
                await unit.claims.mark_completed(BILLING, f"m{number}")
                await unit.inbox.store(InboxMessage(BILLING, f"m{number}", payload=b""))
            for number in range(3):
                await unit.inbox.settle(BILLING, [f"m{number}"])
        await world.age(2 * WEEK + 60)
        told = []

        pruned = await prune(world.database, BILLING, SETTINGS, told.append)

        assert pruned == Pruned(claims=5, inbox=3)
        assert [done.total for done in told] == [2, 4, 5, 7, 8]
        async with world.database.begin() as unit:
            assert await unit.inbox.pending(BILLING) == 2

    @in_world
    async def test_other_consumers_and_waiting_messages_stay(self, world):
        await park(world, "m1", "m2", key="k")
        async with world.database.begin() as unit:
            await unit.claims.mark_completed("shipping", "m1")
        await world.age(9 * WEEK)

        assert (await prune(world.database, BILLING, SETTINGS)).claims == 0

        assert await queue(world) == [("m1", "parked"), ("m2", "behind")]
        async with world.database.begin() as unit:
            assert await unit.claims.look_up("shipping", "m1") is not None

    @in_world
    async def test_a_claim_stays_for_as_long_as_anybody_can_send_its_message_back(self, world):
        settings = ConsumerSettings(retry=POLICY, duplicates=Duplicates.INVOKE)
        service = await Service(world, settings).open()
        await service.deliver("m1")
        service.refuse("m1")
        await service.deliver("m1")
        service.heal()
        await world.age(9 * WEEK)

        pruned = await prune(world.database, BILLING, SETTINGS)

        with pytest.raises(NotPossible, match="was handled already"):
            await retry_dead_letter(world.database, BILLING, "m1", actor="ann")
        await retry_due(service.consumer, world.database)
        assert pruned.claims == 0
        assert await service.paid() == ["m1"]
        await skip_dead_letter(world.database, BILLING, "m1", actor="ann", reason="sent by hand")
        await world.age(9 * WEEK)
        assert (await prune(world.database, BILLING, SETTINGS)).claims == 1

    @in_world
    async def test_nothing_is_deleted_while_somebody_can_go_on_with_a_replay(self, world):
        await claims(world, "old")
        await world.age(9 * WEEK)
        await begin_replay(world, "nightly", "shipping", "running")
        await begin_replay(world, "before", BILLING, "finished")
        for state in ("running", "stopped", "failed"):
            await begin_replay(world, "again", BILLING, state)

            with pytest.raises(ReplayRuns, match="'again' is not over"):
                await prune(world.database, BILLING, SETTINGS)

            assert len(await known(world)) == len(ClaimState)
            await end_replay(world, "again")

        await begin_replay(world, "gone", BILLING, "abandoned")
        assert (await prune(world.database, BILLING, SETTINGS)).claims == 2

    @in_world
    async def test_what_is_kept_about_things_that_are_over_goes_with_them(self, world):
        await begin_replay(world, "before", BILLING, "finished")
        async with world.database.begin() as unit:
            await unit.versions.open_gap(Gap(BILLING, "k", 2, 4))
            await unit.versions.close_gaps(BILLING, "k", 3, "fetched")
            request = await unit.approvals.ask(
                ApprovalAsked.DELETE_LETTER, BILLING, "m1", "ann", "why"
            )
            await unit.approvals.decide(request.number, "bob", ApprovalDecision.REFUSED)
            await unit.claims.mark_completed(BILLING, "m1")
            await unit.members.note(BILLING, ["m1"], "a process that was cut off")

        assert (await prune(world.database, BILLING, SETTINGS)).total == 0
        await world.age(2 * WEEK + 60)
        pruned = await prune(world.database, BILLING, SETTINGS)

        assert pruned == Pruned(claims=1, replays=1, gaps=1, notes=1, approvals=1)

    @in_world
    async def test_one_run_looks_once_at_what_it_keeps(self, world):
        for name in ("kept", "a", "b"):
            async with world.database.begin() as unit:
                await unit.claims.mark_completed(BILLING, name)
                await unit.inbox.store(InboxMessage(BILLING, name, payload=b""))
                await unit.inbox.settle(BILLING, [name])
                await unit.attempts.add(replace(ATTEMPT, message_id=name))
                asked = await unit.approvals.ask(
                    ApprovalAsked.DELETE_LETTER, BILLING, name, "ann", "why"
                )
                await unit.approvals.decide(asked.number, "bob", ApprovalDecision.REFUSED)
            await world.age(60)
        async with world.database.begin() as unit:
            await unit.dead_letters.put(replace(LETTER, consumer=BILLING, message_id="kept"))
        sweeps = [Sweep() for _ in range(4)]

        async def delete(place, sweep):
            async with world.database.begin() as unit:
                deletes = (
                    unit.claims.delete_expired,
                    unit.inbox.delete_processed,
                    unit.attempts.delete_gone,
                    unit.approvals.delete_decided,
                )
                return await deletes[place](BILLING, 30, 1, sweep)

        first = [[await delete(n, sweeps[n]), await delete(n, sweeps[n])] for n in range(4)]
        async with world.database.begin() as unit:
            await unit.dead_letters.remove(BILLING, "kept")
        behind = [[await delete(n, sweeps[n]), await delete(n, Sweep())] for n in range(4)]

        assert first == [[1, 1]] * 4
        assert behind == [[0, 1]] * 4

    @in_world
    async def test_outcomes_of_offsets_that_the_broker_has_deleted_are_forgotten(self, world):
        broker, place = MemoryBroker({"payments": 1}), Partition("payments", 0)
        for _ in range(10):
            broker.put("payments", b"{}")
        outcomes = ["success", "duplicate_skipped"] * 5
        known = [OutcomeRange(place, n, n, told) for n, told in enumerate(outcomes)]
        async with world.database.begin() as unit:
            await unit.outcomes.record(BILLING, known)
        broker.trim(place, 5)

        assert (await prune(world.database, BILLING, SETTINGS)).outcomes == 0
        pruned = await prune(world.database, BILLING, SETTINGS, reader=broker.reader())

        assert pruned == Pruned(outcomes=5)
        async with world.database.begin() as unit:
            assert await unit.outcomes.ranges(BILLING, place) == known[5:]
        (audit,) = await audit_completeness(world.database, BILLING, None, broker.reader())
        assert (audit.first, audit.is_complete) == (5, True)


async def claims(world, prefix):
    """Write one claim in each state."""
    async with world.database.begin() as unit:
        for state in ClaimState:
            name = f"{prefix} {state}"
            if state is ClaimState.COMPLETED:
                await unit.claims.mark_completed(BILLING, name)
            else:
                await unit.claims.mark_failed(BILLING, name, Failure(state, 1, "X"))


async def known(world):
    names = [f"{prefix} {state}" for prefix in ("old", "new") for state in ClaimState]
    async with world.database.begin() as unit:
        return {name for name in names if await unit.claims.look_up(BILLING, name)}


async def begin_replay(world, name, consumer, state):
    run = ReplayRun(name, consumer, "{}", "ann", ReplayState(state))
    async with world.database.begin() as unit:
        assert await unit.replays.begin(run)


async def end_replay(world, name):
    await abandon_replay(world.database, name, actor="ann", reason="for the next one")
    async with world.database.begin() as unit:
        assert await unit.replays.delete_over(BILLING, 0, 9)


class TestPruningInSqlite(InSqlite, Pruning):
    pass


class TestPruningInPostgres(InPostgres, Pruning):
    pass


@pytest.mark.parametrize("longest", range(4))
def test_the_time_to_live_outlasts_every_window(longest):
    windows = [float(longest == number) * 10 + 1 for number in range(4)]

    assert shortest_ttl(*windows, safety=2.0) == 22.0


@pytest.mark.parametrize(
    "window",
    [
        "topic_retention_seconds",
        "replay_window_seconds",
        "dead_letter_age_seconds",
        "parking_age_seconds",
    ],
)
def test_a_time_to_live_that_a_window_outlasts_is_refused(window):
    with pytest.raises(Misuse, match=r"14 days forgets duplicates .* is 16 days"):
        Retention(**{window: 8 * DAY_SECONDS})


def test_windows_and_safety_are_checked():
    for wrong in ((-1, 0, 0, 0, 2), (0, 0, 0, 0, 0.5)):
        with pytest.raises(Misuse):
            shortest_ttl(*wrong)
    with pytest.raises(Misuse):
        Retention(batch=0)
