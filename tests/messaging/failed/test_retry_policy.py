"""The verdict after a failure: a total table, and waits within their bounds."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semel.errors import Misuse
from semel.messaging.failure import (
    CODES,
    RETRYABLE_CLASSES,
    UNKNOWN_CODE,
    Classified,
    Exhausted,
    FailureClass,
    Hopeless,
    RetryIn,
    attempts_for,
    is_retryable,
    verdict,
)
from semel.messaging.settings import RetryPolicy, backoff


def failure(kind: FailureClass, code: str = "SOME_CODE") -> Classified:
    return Classified(kind, code, "", "")


CASES = list(product(FailureClass, ["nothing", "retryable", "non_retryable"], [1, 4, 5, 6]))


@pytest.mark.parametrize(("kind", "listed", "attempts"), CASES)
def test_there_is_a_verdict_for_every_class_list_and_attempt(kind, listed, attempts):
    lists = {} if listed == "nothing" else {listed: frozenset({"SOME_CODE"})}
    policy = RetryPolicy(max_attempts=5, **lists)

    found = verdict(policy, failure(kind), attempts)

    worth_it = listed == "retryable" or (listed == "nothing" and kind in RETRYABLE_CLASSES)
    if not worth_it:
        assert found == Hopeless()
    elif attempts >= 5:
        assert found == Exhausted()
    else:
        assert isinstance(found, RetryIn)


@pytest.mark.parametrize("code", CODES)
def test_every_code_that_semel_gives_has_a_class_and_a_verdict(code):
    known = failure(CODES[code], code)

    assert is_retryable(RetryPolicy(), known) == (
        CODES[code] in RETRYABLE_CLASSES or code == UNKNOWN_CODE
    )


def test_an_exception_that_nobody_knows_is_poison_and_still_tried_again():
    unknown = failure(FailureClass.POISON, UNKNOWN_CODE)

    assert isinstance(verdict(RetryPolicy(), unknown, 1), RetryIn)
    assert verdict(RetryPolicy(), unknown, 5) == Exhausted()
    assert verdict(RetryPolicy(non_retryable=frozenset({UNKNOWN_CODE})), unknown, 1) == Hopeless()


def test_poison_may_be_given_up_earlier_than_other_failures():
    policy = RetryPolicy(max_attempts=5, max_poison_attempts=2)
    poison = failure(FailureClass.POISON, UNKNOWN_CODE)
    transient = failure(FailureClass.TRANSIENT)

    assert isinstance(verdict(policy, poison, 1), RetryIn)
    assert verdict(policy, poison, 2) == Exhausted()
    assert isinstance(verdict(policy, transient, 4), RetryIn)


@given(st.integers(1, 50), st.none() | st.integers(1, 50), st.sampled_from(FailureClass))
def test_attempts_are_always_bounded(most, of_poison, kind):
    policy = RetryPolicy(max_attempts=most, max_poison_attempts=of_poison)

    assert 1 <= attempts_for(policy, failure(kind)) <= most
    assert not isinstance(verdict(policy, failure(kind), most), RetryIn)


DELAYS = st.tuples(st.floats(0, 1e6, allow_nan=False), st.floats(0, 1e6, allow_nan=False)).map(
    sorted
)


@given(DELAYS, st.integers(1, 10_000), st.booleans())
def test_waits_stay_within_their_bounds(delays, attempts, jitter):
    initial, longest = delays
    policy = RetryPolicy(initial_delay_seconds=initial, max_delay_seconds=longest, jitter=jitter)

    seconds = backoff(policy, attempts)

    assert min(initial, longest) / 2 <= seconds <= longest


@given(DELAYS, st.integers(1, 200))
def test_without_jitter_waits_double_until_the_longest(delays, attempts):
    initial, longest = delays
    policy = RetryPolicy(initial_delay_seconds=initial, max_delay_seconds=longest, jitter=False)

    one, following = backoff(policy, attempts), backoff(policy, attempts + 1)

    assert backoff(policy, 1) == initial
    assert following == min(2 * one, longest) or attempts > 60


@given(st.integers(1, 20))
def test_jitter_lies_between_half_of_the_wait_and_all_of_it(attempts):
    plain = RetryPolicy(jitter=False)
    policy = RetryPolicy(jitter=True)
    whole = backoff(plain, attempts)

    assert backoff(policy, attempts, lambda low, high: low) == whole / 2
    assert backoff(policy, attempts, lambda low, high: high) == whole


def test_consumers_that_fail_together_do_not_come_back_together():
    waits = {backoff(RetryPolicy(), 3) for _ in range(50)}

    assert len(waits) > 25


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"initial_delay_seconds": -1.0},
        {"initial_delay_seconds": 2.0, "max_delay_seconds": 1.0},
        {"retryable": frozenset({"A"}), "non_retryable": frozenset({"A"})},
        {"max_poison_attempts": 0},
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(Misuse):
        RetryPolicy(**wrong)
