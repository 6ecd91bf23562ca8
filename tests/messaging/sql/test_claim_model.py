"""The life of a claim against a model that knows no SQL.

Leases and delays end between the steps of time that the model takes, so that the
milliseconds of a real clock never decide.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from semel.messaging.handle.claims import (
    Claimed,
    ClaimRequest,
    ClaimState,
    Conflict,
    Duplicate,
    Failure,
    HeldElsewhere,
    NotDue,
    Parked,
    Stale,
    Terminal,
)
from semel.policy.vocabulary import StalePolicy
from tests.messaging.worlds import memory_world, postgres_world

HASHES = st.sampled_from(["", "a" * 64, "b" * 64])
STEPS_SECONDS = st.sampled_from([100, 200, 300])
LENGTHS_SECONDS = st.sampled_from([50, 150, 250])
OWNERS = st.sampled_from(["anna", "bert"])
FAILED = [ClaimState.FAILED_RETRYABLE, ClaimState.FAILED_TERMINAL, ClaimState.PARKED]
FAILURES = st.builds(
    Failure,
    st.sampled_from(FAILED),
    st.integers(0, 5),
    st.sampled_from(["TIMEOUT", "REJECTED"]),
    LENGTHS_SECONDS | st.just(0),
    HASHES,
)

numbers = count(1)


@dataclass
class Model:
    """What a claim is, told without a database."""

    state: str = "nothing"
    attempts: int = 0
    owner: str = ""
    ends: float = 0
    """Of the lease, or of the delay."""

    hash: str = ""
    code: str = ""
    result: str | None = None
    changed: float = 0
    leased: bool = False
    now: float = 0
    fences: list[int] = field(default_factory=list)

    def conflicts(self, hash):
        return "" not in (self.hash, hash) and self.hash != hash

    def is_free(self, hash):
        if self.state == "nothing":
            return True
        waits = self.state in ("FAILED_RETRYABLE", "IN_PROGRESS")
        return waits and self.ends <= self.now and not self.conflicts(hash)

    def refuses(self, hash, answer):
        """Tell whether *answer* is the right one to a claim that is not granted."""
        if self.conflicts(hash):
            return answer == Conflict(self.hash, hash)
        match answer:
            case NotDue(attempts=attempts):
                return (self.state, self.attempts) == ("FAILED_RETRYABLE", attempts)
            case HeldElsewhere(owner=owner):
                return (self.state, self.owner) == ("IN_PROGRESS", owner)
            case _:
                return answer == {
                    "COMPLETED": Duplicate(self.result),
                    "FAILED_TERMINAL": Terminal(self.code),
                    "PARKED": Parked(),
                }.get(self.state)

    def becomes(self, state, ends=0.0, owner=""):
        self.state, self.ends, self.owner, self.changed = state, ends, owner, self.now
        self.code = "" if state == "COMPLETED" else self.code

    def take(self, state, hash, ends=0.0, owner=""):
        self.becomes(state, ends, owner)
        self.attempts += 1
        self.hash = self.hash or hash

    def fail(self, failure):
        self.becomes(failure.state, self.now + failure.delay_seconds)
        self.attempts, self.code = failure.attempts, failure.error_code
        self.hash = self.hash or failure.payload_hash

    def is_current(self, fence):
        return self.state == "IN_PROGRESS" and self.fences[-1:] == [fence]

    def vanish(self):
        self.__init__(now=self.now, fences=self.fences)


class ClaimsLife(RuleBasedStateMachine):
    """One message after the other, and everything that can be done to its claim."""

    def __init__(self, runner, world):
        super().__init__()
        self.runner = runner
        self.world = world
        self.consumer = f"consumer {next(numbers)}"
        self.model = Model()

    @precondition(lambda self: self.model.state == "COMPLETED")
    @rule()
    def turn_to_another_message(self):
        self.consumer = f"consumer {next(numbers)}"
        self.model = Model()

    def run(self, act):
        """Do something with the store, in a transaction that commits."""

        async def whole():
            async with self.world.database.begin() as unit:
                return await act(unit.claims)

        return self.runner.run(whole())

    def request(self, hash):
        return ClaimRequest("m", hash)

    @rule(hash=HASHES, at_once=st.booleans())
    def claim(self, hash, at_once):
        async def act(store):
            if at_once:
                (answer,) = await store.try_claim_many(self.consumer, [self.request(hash)])
                return answer
            return await store.try_claim(self.consumer, self.request(hash))

        answer = self.run(act)

        if self.model.is_free(hash):
            assert answer == Claimed(self.model.attempts + 1, from_owner=self.model.owner)
            self.model.take("COMPLETED", hash)
        else:
            assert self.model.refuses(hash, answer)

    @rule(hash=HASHES, result=st.sampled_from(["1", "2"]))
    def claim_and_keep_the_result(self, hash, result):
        async def act(store):
            answer = await store.try_claim(self.consumer, self.request(hash))
            if isinstance(answer, Claimed):
                await store.keep_result(self.consumer, "m", result)
            return answer

        answer = self.run(act)

        if self.model.is_free(hash):
            self.model.take("COMPLETED", hash)
            self.model.result = result
        else:
            assert self.model.refuses(hash, answer)

    @rule(hash=HASHES)
    def claim_and_roll_back(self, hash):
        async def act(store):
            answer = await store.try_claim(self.consumer, self.request(hash))
            assert isinstance(answer, Claimed) is self.model.is_free(hash)
            raise ZeroDivisionError

        with suppress(ZeroDivisionError):
            self.run(act)

    @rule(hash=HASHES)
    def claim_and_give_back(self, hash):
        async def act(store):
            answer = await store.try_claim(self.consumer, self.request(hash))
            if isinstance(answer, Claimed):
                await store.give_back(self.consumer, "m", answer)

        self.run(act)

        if not self.model.is_free(hash):
            return
        if self.model.code or self.model.leased:
            # An hour that has struck has struck, whenever that was.
            self.model.ends = 0
            self.model.changed = self.model.now
            self.model.hash = self.model.hash or hash
        else:
            self.model.vanish()

    @rule(hash=HASHES, failure=FAILURES)
    def claim_and_undo(self, hash, failure):
        async def act(store):
            answer = await store.try_claim(self.consumer, self.request(hash))
            if isinstance(answer, Claimed):
                await store.undo(self.consumer, "m", failure)

        self.run(act)

        if self.model.is_free(hash):
            self.model.take("COMPLETED", hash)
            self.model.fail(failure)

    @rule(hash=HASHES, owner=OWNERS, seconds=LENGTHS_SECONDS, stale=st.sampled_from(StalePolicy))
    def lease(self, hash, owner, seconds, stale):
        answer = self.run(
            lambda store: store.lease(
                self.consumer, self.request(hash), owner=owner, seconds=seconds, stale=stale
            )
        )

        model = self.model
        if not model.is_free(hash):
            assert model.refuses(hash, answer)
        elif model.state == "IN_PROGRESS" and stale is not StalePolicy.RECLAIM:
            assert isinstance(answer, Stale)
            assert (answer.owner, answer.attempts) == (model.owner, model.attempts)
        else:
            assert isinstance(answer, Claimed)
            assert (answer.attempt, answer.from_owner) == (model.attempts + 1, model.owner)
            assert all(answer.fence > fence for fence in model.fences)
            model.take("IN_PROGRESS", hash, model.now + seconds, owner)
            model.leased = True
            model.fences.append(answer.fence)

    def some_fence(self, data):
        return data.draw(st.sampled_from([*self.model.fences, 0]))

    @rule(data=st.data(), seconds=LENGTHS_SECONDS)
    def renew(self, data, seconds):
        fence = self.some_fence(data)

        renewed = self.run(lambda store: store.renew(self.consumer, "m", fence, seconds))

        assert renewed is self.model.is_current(fence)
        if renewed:
            self.model.ends = self.model.now + seconds

    @rule(data=st.data(), result=st.sampled_from([None, "1", "2"]))
    def complete_leased(self, data, result):
        fence = self.some_fence(data)

        done = self.run(lambda store: store.mark_completed(self.consumer, "m", fence, result))

        assert done is self.model.is_current(fence)
        if done:
            self.model.becomes("COMPLETED")
            self.model.result = result or self.model.result

    @rule()
    def skip(self):
        done = self.run(lambda store: store.mark_completed(self.consumer, "m"))

        assert done is (self.model.state != "COMPLETED")
        if done:
            self.model.attempts = self.model.attempts if self.model.state != "nothing" else 1
            self.model.becomes("COMPLETED")

    @rule(failure=FAILURES)
    def fail(self, failure):
        written = self.run(lambda store: store.mark_failed(self.consumer, "m", failure))

        # Only an operator's act, `reopen`, leads out of how a message ended.
        ended = ("COMPLETED", "FAILED_TERMINAL", "PARKED")
        assert written is (self.model.state not in ended)
        if written:
            self.model.fail(failure)

    @rule(data=st.data(), failure=FAILURES)
    def fail_leased(self, data, failure):
        fence = self.some_fence(data)

        written = self.run(lambda store: store.mark_failed(self.consumer, "m", failure, fence))

        assert written is self.model.is_current(fence)
        if written:
            self.model.fail(failure)

    @rule()
    def reopen(self):
        opened = self.run(lambda store: store.reopen(self.consumer, "m"))

        assert opened is (self.model.state in ("FAILED_TERMINAL", "PARKED"))
        if opened:
            self.model.becomes("FAILED_RETRYABLE")
            self.model.attempts = 0

    @rule(hash=HASHES)
    def expect_payload(self, hash):
        self.run(lambda store: store.expect_payload(self.consumer, "m", hash))

        if self.model.state != "nothing":
            self.model.hash = hash

    @rule(seconds=LENGTHS_SECONDS)
    def forget(self, seconds):
        deleted = self.run(lambda store: store.delete_expired(self.consumer, seconds, 10))

        terminal = self.model.state in ("COMPLETED", "FAILED_TERMINAL")
        assert deleted == int(terminal and self.model.changed <= self.model.now - seconds)
        if deleted:
            self.model.vanish()

    @rule(seconds=STEPS_SECONDS)
    def let_time_pass(self, seconds):
        self.runner.run(self.world.age(seconds))
        self.model.now += seconds

    @invariant()
    def the_row_is_what_the_model_says(self):
        row = self.run(lambda store: store.look_up(self.consumer, "m"))

        model = self.model
        if row is None:
            assert model.state == "nothing"
            return
        assert (row.state, row.attempts, row.owner) == (model.state, model.attempts, model.owner)
        assert (row.payload_hash, row.result) == (model.hash, model.result)
        assert row.error_code == model.code


def live(open_world, examples, steps):
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        world = runner.run(stack.enter_async_context(open_world()))
        try:
            run_state_machine_as_test(
                lambda: ClaimsLife(runner, world),
                settings=settings(
                    max_examples=examples,
                    stateful_step_count=steps,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(stack.aclose())


def test_a_claim_in_sqlite_lives_as_its_model_does():
    live(memory_world, examples=25, steps=40)


@pytest.mark.postgres
def test_a_claim_in_postgres_lives_as_its_model_does(quick_postgres_server):
    live(lambda: postgres_world(quick_postgres_server), examples=8, steps=30)
