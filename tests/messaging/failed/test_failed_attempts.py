"""Each failed attempt is kept, in whatever way a message is handled, and the story tells all."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.claims import ClaimRequest
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled
from semel.messaging.receive.inbox import Inbox
from semel.messaging.records import MOST_KEPT
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.operate.deletion import approve_delete, ask_to_delete
from semel.operate.explain import explain_message
from semel.operate.parking import release
from semel.operate.retention import Retention, erase, prune
from semel.policy.vocabulary import BatchPolicy, Duplicates, GiveUp, RetryMode, StalePolicy
from tests.messaging.act_world import ANN, BILLING
from tests.messaging.incoming import work_once
from tests.messaging.places import InPostgres, InSqlite, Scenarios
from tests.messaging.replay_world import message

CODES = ("TIMEOUT", "RATE_LIMITED", "DEPENDENCY_UNAVAILABLE", "PRECONDITION_FAILED")
WORDS = [
    f"attempt {number} failed with {code}: the words of {code}"
    for number, code in enumerate(CODES, 1)
]
POLICY = RetryPolicy(max_attempts=9, jitter=False)
SETTINGS = ConsumerSettings(retry=POLICY)
IN_TABLE = replace(SETTINGS, retry=replace(POLICY, mode=RetryMode.RETRY_TABLE))
AFTER = {GiveUp.DEAD_LETTER: "dead letter", GiveUp.PARK: "waits"}
LATER = 1_000.0
LONG = Retention(ttl_seconds=30 * 86_400.0)


class Failing:
    """A consumer that fails at one message: at each attempt with its code, and then no more."""

    def __init__(self, settings=SETTINGS, codes=CODES, error=RetryableMessageError, **options):
        self.codes = codes

        @consumer(BILLING, policy=settings, **options)
        async def handle(message, session):
            one = message[-1] if isinstance(message, list | tuple) else message
            # By number: what fails in a chunk is called again, by itself.
            if one.id == "m1" and one.attempt <= len(self.codes):
                code = self.codes[one.attempt - 1]
                raise error(f"the words of {code}", code)

        self.consumer = handle
        self.numbers = count()


async def singly(failing, world):
    return await handle_message(failing.consumer, world.database, message("m1", "k"))


async def in_a_batch(failing, world):
    batch = [message(f"new-{next(failing.numbers)}"), message("m1", "k")]
    return (await consume_many(failing.consumer, world.database, batch))[-1]


async def under_a_lease(failing, world):
    return await handle_leased(failing.consumer, world.database, message("m1", "k"), "worker-1")


async def through_the_retry_table(failing, world):
    due = await retry_due(failing.consumer, world.database)
    return due[0][1] if due else await singly(failing, world)


async def under_leases_of_the_retry_table(failing, world):
    async def again(message, waiting):
        return await handle_leased(
            failing.consumer, world.database, message, "worker-1", waiting=waiting
        )

    due = await retry_due(failing.consumer, world.database, handle=again)
    return due[0][1] if due else await under_a_lease(failing, world)


async def through_the_inbox(failing, world):
    await Inbox(failing.consumer, world.database).store(message("m1", "k"))
    await work_once(failing.consumer, world.database)
    async with world.database.begin() as unit:
        stored = await unit.inbox.get(BILLING, "m1")
    return Handled() if stored.processed_at is not None else None


WAYS = {
    "singly": (singly, SETTINGS, {}),
    "in a batch": (in_a_batch, SETTINGS, {}),
    "in a batch handler": (in_a_batch, SETTINGS, {"batches": True}),
    "under a lease": (under_a_lease, SETTINGS, {}),
    "in the retry table": (through_the_retry_table, IN_TABLE, {}),
    "under a lease, in the retry table": (under_leases_of_the_retry_table, IN_TABLE, {}),
    "in the inbox": (through_the_inbox, SETTINGS, {}),
}


async def attempts(world, message_id="m1"):
    async with world.database.begin() as unit:
        return list(await unit.attempts.of(BILLING, message_id))


async def story(world, message_id="m1"):
    (only,) = (await explain_message(world.database, message_id)).stories
    return only


def failures(told):
    return [moment.words for moment in told.moments if moment.what == "failed"]


class Attempts(Scenarios):
    @pytest.mark.parametrize("way", list(WAYS))
    def test_four_failures_with_four_codes_are_told_in_order_before_the_success(self, way):
        async def scenario(world):
            handle, settings, options = WAYS[way]
            failing = Failing(settings, **options)
            outcomes = []
            for _ in range(5):
                outcomes.append(await handle(failing, world))
                await world.age(LATER)

            told = await story(world)

            assert isinstance(outcomes[-1], Handled)
            assert failures(told) == WORDS
            assert [(one.number, one.error_code) for one in told.failures] == list(
                enumerate(CODES, 1)
            )
            first = told.failures[0]
            assert (first.failure_class, first.key) == ("dependency_outage", "k")
            assert first.exception.endswith("RetryableMessageError")
            assert first.worker.startswith("process ")
            times = [one.at for one in told.moments]
            assert times == sorted(times)
            whats = [one.what for one in told.moments]
            first = whats.index("failed")
            assert set(whats[:first]) <= {"seen", "stored"}
            assert whats[first : first + 4] == ["failed"] * 4
            gaps = [b.at - a.at for a, b in zip(told.failures, told.failures[1:], strict=False)]
            assert all(LATER <= gap < LATER + 60 for gap in gaps)

        self.run(scenario)

    @pytest.mark.parametrize("way", list(WAYS))
    def test_a_message_that_succeeds_writes_nothing(self, way):
        async def scenario(world):
            handle, settings, options = WAYS[way]
            assert isinstance(await handle(Failing(settings, (), **options), world), Handled)
            assert await attempts(world) == []

        self.run(scenario)

    @pytest.mark.parametrize("gives_up", list(GiveUp))
    def test_the_attempt_that_was_the_last_is_told_before_what_became_of_it(self, gives_up):
        async def scenario(world):
            settings = replace(
                SETTINGS, retry=replace(POLICY, max_attempts=4), on_exhausted=gives_up
            )
            failing = Failing(settings)
            for _ in range(4):
                await singly(failing, world)
                await world.age(LATER)

            told = await story(world)

            assert failures(told) == WORDS
            whats = [one.what for one in told.moments]
            assert whats[:5] == ["seen", "failed", "failed", "failed", "failed"]
            assert set(whats[5:]) == {"claim", AFTER[gives_up]}

        self.run(scenario)

    def test_a_batch_that_is_kept_whole_tells_why_it_was_given_up(self):
        async def scenario(world):
            settings = replace(
                SETTINGS, retry=replace(POLICY, max_attempts=1), batch=BatchPolicy.FAIL_BATCH
            )
            await in_a_batch(Failing(settings), world)

            assert failures(await story(world)) == WORDS[:1]

        self.run(scenario)

    def test_what_an_inbox_gives_up_tells_every_attempt(self):
        async def scenario(world):
            failing = Failing(replace(SETTINGS, retry=replace(POLICY, max_attempts=4)))
            for _ in range(4):
                await through_the_inbox(failing, world)
                await world.age(LATER)

            told = await story(world)

            assert failures(told) == WORDS
            assert [one.what for one in told.moments][-1] == "dead letter"

        self.run(scenario)

    def test_a_repetition_that_fails_is_told_beside_the_success(self):
        async def scenario(world):
            failing = Failing(replace(SETTINGS, duplicates=Duplicates.INVOKE), ())
            await singly(failing, world)
            await world.age(LATER)
            failing.codes = ["TIMEOUT"]
            await singly(failing, world)

            told = await story(world)

            assert told.state == "COMPLETED"
            assert failures(told) == WORDS[:1]
            assert told.moments[-1].what == "failed"

        self.run(scenario)

    def test_an_owner_that_did_not_finish_is_an_attempt(self):
        async def scenario(world):
            async def never(message):
                return False

            settings = replace(SETTINGS, stale=StalePolicy.INSPECT, lease_seconds=5.0)
            failing = Failing(settings, (), inspect=never)
            async with world.database.begin() as unit:
                request = ClaimRequest.of(message("m1", "k"))
                await unit.claims.lease(BILLING, request, owner="dead", seconds=5.0)
            await world.age(LATER)
            await under_a_lease(failing, world)

            (only,) = await attempts(world)
            assert (only.number, only.error_code) == (1, "ABANDONED")
            assert "dead did not finish" in only.reason

        self.run(scenario)

    def test_attempts_of_a_message_that_was_sent_back_follow_the_earlier_ones(self):
        async def scenario(world):
            settings = replace(SETTINGS, on_hopeless=GiveUp.PARK)
            failing = Failing(settings, ("REJECTED",), NonRetryableMessageError)
            await singly(failing, world)
            await world.age(LATER)
            await release(world.database, BILLING, "m1", actor="ann")
            await retry_due(failing.consumer, world.database)

            assert [one.number for one in await attempts(world)] == [1, 1]

        self.run(scenario)

    def test_a_message_that_is_tried_for_ever_does_not_fill_the_disk(self):
        async def scenario(world):
            often = MOST_KEPT + 5
            patient = replace(SETTINGS, retry=RetryPolicy(often * 2, 0.0, 0.0, jitter=False))
            failing = Failing(patient, ["TIMEOUT"] * often)
            for _ in range(often):
                await singly(failing, world)

            found = [one.number for one in await attempts(world)]
            assert len(found) == MOST_KEPT
            assert (found[0], found[-1]) == (1, often)

        self.run(scenario)

    def test_a_late_failure_writes_no_attempt_over_what_others_made_of_the_message(self):
        async def scenario(world):
            @consumer(BILLING, policy=SETTINGS)
            async def slow(message, lease):
                async with world.database.begin() as unit:
                    await unit.claims.mark_completed(BILLING, message.id)
                raise RetryableMessageError("too late", "TIMEOUT")

            await handle_leased(slow, world.database, message("m1", "k"), "worker-1")

            assert (await attempts(world), (await story(world)).state) == ([], "COMPLETED")

        self.run(scenario)


class Forgetting(Scenarios):
    @pytest.mark.parametrize("handle", [singly, through_the_inbox])
    @pytest.mark.parametrize("which", [{"message_id": "m1"}, {"key": "k"}])
    def test_erasing_takes_the_reasons_and_leaves_times_and_codes(self, handle, which):
        async def scenario(world):
            await handle(Failing(), world)
            (before,) = await attempts(world)
            await erase(world.database, **which, **ANN)

            assert await attempts(world) == [replace(before, reason="")]
            assert failures(await story(world)) == ["attempt 1 failed with TIMEOUT"]

        self.run(scenario)

    def test_an_attempt_that_fails_after_the_erasing_keeps_no_reason(self):
        async def scenario(world):
            failing = Failing()
            await singly(failing, world)
            await erase(world.database, message_id="m1", **ANN)
            await world.age(LATER)
            await singly(failing, world)

            found = [(one.number, one.error_code, one.reason) for one in await attempts(world)]
            assert found == [(1, "TIMEOUT", ""), (2, "RATE_LIMITED", "")]

        self.run(scenario)

    def test_deleting_a_parked_message_takes_the_reasons_of_its_attempts(self):
        async def scenario(world):
            failing = Failing(replace(SETTINGS, on_exhausted=GiveUp.PARK, retry=RetryPolicy(1)))
            await singly(failing, world)
            asked = await ask_to_delete(world.database, BILLING, "m1", **ANN)
            await approve_delete(world.database, asked.number, actor="bob")

            assert [one.reason for one in await attempts(world)] == [""]

        self.run(scenario)

    @pytest.mark.parametrize("handle", [singly, through_the_inbox])
    def test_attempts_go_with_their_message_and_never_before(self, handle):
        async def scenario(world):
            failing = Failing(codes=CODES[:2])
            await handle(failing, world)
            await world.age(LONG.ttl_seconds * 2)
            assert (await prune(world.database, BILLING, LONG)).total == 0
            for _ in range(2):
                await handle(failing, world)
                await world.age(LATER)
            assert (await prune(world.database, BILLING, LONG)).attempts == 0
            assert len(await attempts(world)) == 2

            await world.age(LONG.ttl_seconds)
            pruned = await prune(world.database, BILLING, replace(LONG, batch=1))

            assert (pruned.claims, pruned.attempts) == (1, 2)
            assert pruned.inbox == (handle is through_the_inbox)
            assert await attempts(world) == []

        self.run(scenario)


class TestAttemptsInSqlite(InSqlite, Attempts, Forgetting):
    pass


class TestAttemptsInPostgres(InPostgres, Attempts, Forgetting):
    pass
