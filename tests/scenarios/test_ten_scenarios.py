"""The ten scenarios that every consumer must pass, in memory and on PostgreSQL."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from semel.crashpoints import CrashPoint
from semel.message import Message, Partition
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import Waits
from semel.messaging.settings import Order
from semel.policy.vocabulary import BatchPolicy, GapPolicy, GiveUp, RetryMode
from semel.testing.crash import Crash, crash_at
from tests.scenarios.services import BATCHED, GROUP, POLICY, SINGLE, TOPIC, Service

MODES = pytest.mark.parametrize("mode", [SINGLE, BATCHED], ids=["single", "batched"])


@MODES
def test_a_message_that_is_processed_is_acknowledged_after_its_effect(serve, mode):
    async def scenario(service: Service) -> None:
        service.send(1, 2, 3)

        await service.work(mode)

        assert await service.effects() == ["m1", "m2", "m3"]
        assert service.committed == {0: 3}
        assert await service.outcomes() == {0: {"success"}, 1: {"success"}, 2: {"success"}}

    serve(scenario)


@MODES
def test_after_a_crash_before_the_ack_the_redelivery_changes_nothing(serve, mode):
    async def scenario(service: Service) -> None:
        service.send(1, 2, 3)
        dying = await service.runner(mode)
        with crash_at(CrashPoint.SETTLE_BEFORE), pytest.raises(Crash):
            await dying.run_until_idle()
        assert service.committed == {}
        await service.die(dying)

        await service.work(mode)

        assert await service.effects() == ["m1", "m2", "m3"]
        assert service.calls == ["m1", "m2", "m3"]
        assert service.committed == {0: 3}

    serve(scenario)


@MODES
def test_a_duplicate_is_skipped_and_acknowledged(serve, mode):
    async def scenario(service: Service) -> None:
        service.send(1, 1, 2)
        await service.work(mode)
        service.send(1)

        await service.work(mode)

        assert await service.effects() == ["m1", "m2"]
        assert service.committed == {0: 4}
        assert (await service.outcomes())[3] == {"duplicate_skipped"}

    serve(scenario)


@MODES
def test_a_dependency_that_fails_is_tried_again_with_backoff(serve, mode):
    async def scenario(service: Service) -> None:
        tries: dict[int, list[float]] = {}

        def fail(message: Message) -> None:
            if message.id == "m1":
                tries.setdefault(message.attempt, []).append(time.monotonic())
                if message.attempt < 3:
                    raise RetryableMessageError("down", "DEPENDENCY_UNAVAILABLE")

        service.fail = fail
        service.send(1, 2)

        await service.work(mode)

        assert sorted(await service.effects()) == ["m1", "m2"]
        assert list(tries) == [1, 2, 3]
        assert min(tries[2]) - max(tries[1]) >= policy.initial_delay_seconds
        assert min(tries[3]) - max(tries[2]) >= 2 * policy.initial_delay_seconds
        assert await service.letters() == []
        assert service.committed == {0: 2}

    policy = replace(POLICY, initial_delay_seconds=0.15, max_delay_seconds=1.0)
    serve(scenario, retry=policy)


@MODES
@pytest.mark.parametrize("give_up", GiveUp)
def test_a_message_that_is_refused_goes_to_the_dead_letters_or_is_parked(serve, mode, give_up):
    async def scenario(service: Service) -> None:
        def fail(message: Message) -> None:
            if message.id == "m2":
                raise NonRetryableMessageError("no such case", "REJECTED")

        service.fail = fail
        service.send(1, 2, 3)

        await service.work(mode)

        assert sorted(await service.effects()) == ["m1", "m3"]
        assert service.committed == {0: 3}
        claim = await service.claim(2)
        assert claim is not None
        if give_up is GiveUp.DEAD_LETTER:
            [letter] = await service.letters()
            assert (letter.message_id, letter.reason, letter.attempts) == ("m2", "no such case", 1)
            assert claim.state is ClaimState.FAILED_TERMINAL
        else:
            [parked] = await service.waiting()
            assert (parked.message_id, parked.waits) == ("m2", Waits.PARKED)
            assert claim.state is ClaimState.PARKED

    serve(scenario, on_hopeless=give_up)


@MODES
def test_a_record_that_cannot_be_read_is_kept_with_its_bytes(serve, mode):
    async def scenario(service: Service) -> None:
        service.send(1)
        service.broker.put(TOPIC, b"\xff\x00 not JSON", headers={"message-id": b"m2"})
        service.send(3)

        await service.work(mode)

        assert await service.effects() == ["m1", "m3"]
        [letter] = await service.letters()
        assert (letter.payload, letter.offset) == (b"\xff\x00 not JSON", 1)
        assert letter.outcome == "deserialization_failure"
        assert service.committed == {0: 3}

    serve(scenario)


@MODES
def test_poison_is_tried_a_few_times_and_then_a_dead_letter(serve, mode):
    async def scenario(service: Service) -> None:
        tries: set[int] = set()

        def fail(message: Message) -> None:
            if message.id == "m1":
                tries.add(message.attempt)
                raise ZeroDivisionError("an invariant is broken")

        service.fail = fail
        service.send(1, 2)

        await service.work(mode)

        assert tries == {1, 2, 3}
        [letter] = await service.letters()
        assert (letter.message_id, letter.attempts) == ("m1", POLICY.max_attempts)
        assert letter.exception == "builtins.ZeroDivisionError"
        assert await service.effects() == ["m2"]
        assert service.committed == {0: 2}

    serve(scenario)


@MODES
def test_old_versions_are_skipped_and_a_gap_waits_for_what_is_missing(serve, mode):
    async def scenario(service: Service) -> None:
        service.send(1, key="case")
        await service.work(mode)
        service.send(3, key="case")
        service.send(2, key="case", partition=0)
        service.send(9, key="case", version=1)

        await service.work(mode)

        assert await service.effects() == ["m1", "m2", "m3"]
        async with service.database.begin() as unit:
            assert await unit.versions.current(GROUP, "case") == 3
            assert await unit.versions.gaps(GROUP, 10) == []
        assert service.committed == {0: 4}

    serve(
        scenario,
        retry=replace(POLICY, mode=RetryMode.RETRY_TABLE),
        versioned=True,
        order=Order.KEY,
        holds_keys=True,
    )


@MODES
def test_a_gap_may_park_its_key_and_what_is_missing_is_still_applied(serve, mode):
    async def scenario(service: Service) -> None:
        service.send(1, 3, 4, 2, key="case")

        await service.work(mode)

        assert await service.effects() == ["m1", "m2"]
        waiting = await service.waiting()
        assert [(w.message_id, w.waits) for w in waiting] == [
            ("m3", Waits.PARKED),
            ("m4", Waits.BEHIND),
        ]
        assert service.committed == {0: 4}

    serve(scenario, versioned=True, gaps=GapPolicy.PARK_KEY, order=Order.KEY, holds_keys=True)


def test_a_gap_that_does_not_close_is_listed_and_its_message_set_aside(serve):
    async def scenario(service: Service) -> None:
        service.send(1, 3, key="case")

        await service.work()

        assert await service.effects() == ["m1"]
        async with service.database.begin() as unit:
            [gap] = await unit.versions.gaps(GROUP, 10)
        assert (gap.expected, gap.found) == (2, 3)
        [letter] = await service.letters()
        assert letter.error_code == "SEQUENCE_GAP"

    serve(scenario, versioned=True, gaps=GapPolicy.RETRY)


@pytest.mark.parametrize("policy", BatchPolicy)
def test_a_batch_with_a_failure_commits_as_its_policy_says(serve, policy):
    async def scenario(service: Service) -> None:
        seen: list[list[str]] = []

        def fail(message: Message) -> None:
            if message.id == "m3" and message.attempt < 3:
                raise RetryableMessageError("down")

        service.fail = fail
        service.send(1, 2, 3, 4, 5)
        runner = await service.runner(BATCHED)
        await runner._pass()
        await runner._finish(1e12)
        seen.append(await service.effects())
        first = service.committed
        await runner.subscription.close()

        await service.work(BATCHED)

        expected: dict[BatchPolicy, tuple[list[str], dict[int, int]]] = {
            BatchPolicy.INDEPENDENT: (["m1", "m2", "m4", "m5"], {0: 2}),
            BatchPolicy.STOP: (["m1", "m2"], {0: 2}),
            BatchPolicy.DEAD_LETTER: (["m1", "m2", "m4", "m5"], {0: 5}),
            BatchPolicy.FAIL_BATCH: ([], {}),
        }
        assert (seen[0], first) == expected[policy]
        assert sorted(await service.effects()) == ["m1", "m2", "m3", "m4", "m5"]
        assert service.committed == {0: 5}

    serve(scenario, batch=policy)


@MODES
def test_a_replay_from_the_beginning_has_no_second_effect(serve, mode):
    async def scenario(service: Service) -> None:
        service.send(1, 2, 3)
        await service.work(mode)
        service.broker.redeliver(GROUP, Partition(TOPIC, 0), 0)
        service.send(4)

        await service.work(mode)

        assert await service.effects() == ["m1", "m2", "m3", "m4"]
        assert service.calls == ["m1", "m2", "m3", "m4"]
        assert service.committed == {0: 4}

    serve(scenario)
