"""Who says whether a failure is tried again: the policy, the consumer, the exception, its code."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import pytest

from semel.codec import FromHeader
from semel.message import Coordinates, Message
from semel.messaging.database import Database
from semel.messaging.failure import (
    CODES,
    RETRYABLE_CLASSES,
    FailureClass,
    NonRetryableMessageError,
    RetryableMessageError,
)
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import DeadLettered, Outcome, RetryLater
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from tests.messaging.handled import Place, message, retrying
from tests.messaging.places import DatabaseScenarios, InSqlite

Raised: TypeAlias = type[RetryableMessageError] | type[NonRetryableMessageError]

RAISED: tuple[Raised, ...] = (RetryableMessageError, NonRetryableMessageError)
RETRIED, DEAD = RetryLater, DeadLettered
TRANSIENT, POISON = FailureClass.TRANSIENT, FailureClass.POISON


def _fails(error: BaseException) -> str:
    raise ValueError(error)


def rules(rule: Any) -> dict[str, Any]:
    return {"rules": dict.fromkeys(RAISED, rule)}


@dataclass(frozen=True)
class Said:
    """What is said of a code, and what becomes of the message with each of the two classes."""

    code: str | None
    retryable: tuple[type, FailureClass]
    non_retryable: tuple[type, FailureClass]
    lists: dict[str, Any] = field(default_factory=dict)
    consumer: dict[str, Any] = field(default_factory=dict)

    def of(self, raised: Raised) -> tuple[type, FailureClass]:
        return self.retryable if raised is RetryableMessageError else self.non_retryable

    def error(self, raised: Raised) -> Exception:
        return raised("no") if self.code is None else raised("no", self.code)


BUSY = "PROVIDER_BUSY"
"""A code that semel does not know."""

TABLE = {
    "no code": Said(None, (RETRIED, FailureClass.DEPENDENCY_OUTAGE), (DEAD, POISON)),
    "an empty code": Said("", (RETRIED, TRANSIENT), (DEAD, POISON)),
    "a known code that is retried": Said(
        "RATE_LIMITED", (RETRIED, FailureClass.RATE_LIMIT), (DEAD, POISON)
    ),
    "a known code that is not": Said(
        "SCHEMA_INVALID", (RETRIED, TRANSIENT), (DEAD, FailureClass.SCHEMA)
    ),
    "the code of what nobody knows": Said("HANDLER_FAILED", (RETRIED, TRANSIENT), (DEAD, POISON)),
    "an unknown code": Said(BUSY, (RETRIED, TRANSIENT), (DEAD, POISON)),
    "an unknown code in retryable": Said(
        BUSY, (RETRIED, TRANSIENT), (RETRIED, TRANSIENT), lists={"retryable": {BUSY}}
    ),
    "a known code in retryable": Said(
        "SCHEMA_INVALID",
        (RETRIED, FailureClass.SCHEMA),
        (RETRIED, FailureClass.SCHEMA),
        lists={"retryable": {"SCHEMA_INVALID"}},
    ),
    "an unknown code in nonRetryable": Said(
        BUSY, (DEAD, POISON), (DEAD, POISON), lists={"non_retryable": {BUSY}}
    ),
    "a known code in nonRetryable": Said(
        "RATE_LIMITED",
        (DEAD, FailureClass.RATE_LIMIT),
        (DEAD, FailureClass.RATE_LIMIT),
        lists={"non_retryable": {"RATE_LIMITED"}},
    ),
    "another code in the lists": Said(
        BUSY,
        (RETRIED, TRANSIENT),
        (DEAD, POISON),
        lists={"retryable": {"REJECTED"}, "non_retryable": {"TIMEOUT"}},
    ),
    "a code that the consumer calls an outage": Said(
        BUSY,
        (RETRIED, FailureClass.DEPENDENCY_OUTAGE),
        (RETRIED, FailureClass.DEPENDENCY_OUTAGE),
        consumer={"codes": {BUSY: FailureClass.DEPENDENCY_OUTAGE}},
    ),
    "a code that the consumer calls hopeless": Said(
        BUSY,
        (DEAD, FailureClass.AUTHORIZATION),
        (DEAD, FailureClass.AUTHORIZATION),
        consumer={"codes": {BUSY: FailureClass.AUTHORIZATION}},
    ),
    "a known code that the consumer names again": Said(
        "RATE_LIMITED",
        (RETRIED, FailureClass.RATE_LIMIT),
        (RETRIED, FailureClass.RATE_LIMIT),
        consumer={"codes": {"RATE_LIMITED": FailureClass.RATE_LIMIT}},
    ),
    "the code of what nobody knows, named by the consumer": Said(
        "HANDLER_FAILED",
        (DEAD, POISON),
        (DEAD, POISON),
        consumer={"codes": {"HANDLER_FAILED": POISON}},
    ),
    "a list against the consumer": Said(
        BUSY,
        (DEAD, FailureClass.DEPENDENCY_OUTAGE),
        (DEAD, FailureClass.DEPENDENCY_OUTAGE),
        lists={"non_retryable": {BUSY}},
        consumer={"codes": {BUSY: FailureClass.DEPENDENCY_OUTAGE}},
    ),
    "a rule of the consumer that gives a known code": Said(
        None,
        (DEAD, FailureClass.SCHEMA),
        (DEAD, FailureClass.SCHEMA),
        consumer=rules("SCHEMA_INVALID"),
    ),
    "a rule of the consumer that gives an unknown code": Said(
        None, (RETRIED, TRANSIENT), (DEAD, POISON), consumer=rules(BUSY)
    ),
    "a rule of the consumer that fails": Said(
        None, (RETRIED, TRANSIENT), (DEAD, POISON), consumer=rules(_fails)
    ),
}


def raising(error: Exception, lists: dict[str, Any], options: dict[str, Any]) -> Consumer:
    settings = ConsumerSettings(retry=RetryPolicy(jitter=False, max_attempts=3, **lists))

    @consumer("c", policy=settings, id_from=FromHeader("message-id"), **options)
    async def handle(message: Message) -> None:
        raise error

    return handle


def fate(outcome: Outcome) -> tuple[type, FailureClass]:
    assert isinstance(outcome, RetryLater | DeadLettered)
    assert outcome.failure is not None
    return type(outcome), outcome.failure.failure_class


class _Verdicts(DatabaseScenarios):
    @pytest.mark.parametrize("raised", RAISED)
    @pytest.mark.parametrize("case", TABLE)
    def test_the_class_decides_unless_policy_or_consumer_name_the_code(self, case, raised):
        said = TABLE[case]
        failing = raising(said.error(raised), said.lists, said.consumer)
        one = Message("m1", {}, b"{}", source=Coordinates("t", 0, 1))

        async def scenario(database: Database) -> None:
            outcome = await handle_message(failing, database, one)

            assert fate(outcome) == said.of(raised)

        self.run(scenario)

    @pytest.mark.parametrize("raised", RAISED)
    def test_it_is_no_different_in_a_batch(self, raised):
        said = TABLE["an unknown code"]
        failing = raising(said.error(raised), {}, {})
        batch = [Message(f"m{n}", {}, b"{}", f"k{n}") for n in range(3)]

        async def scenario(database: Database) -> None:
            outcomes = await consume_many(failing, database, batch)

            assert {fate(outcome) for outcome in outcomes} == {said.of(raised)}

        self.run(scenario)


class TestInSqlite(InSqlite, _Verdicts):
    pass


@pytest.mark.parametrize("code", CODES)
def test_no_code_of_semels_own_turns_a_class_round(code):
    def outcome(raised: Raised) -> Outcome:
        place = Place(retrying())
        place.failures = [raised("no", code)] * 9
        found: Outcome = place.deliver(message())
        return found

    retried, dead = (fate(outcome(raised)) for raised in RAISED)

    assert (retried[0], dead[0]) == (RETRIED, DEAD)
    assert retried[1] in RETRYABLE_CLASSES
    assert dead[1] not in RETRYABLE_CLASSES


def test_a_retryable_failure_is_dead_when_its_attempts_are_used_up():
    place = Place(retrying(attempts=3))
    place.failures = [RetryableMessageError("busy", BUSY)] * 3
    outcomes = []

    for _ in range(3):
        outcomes.append(type(place.deliver(message())))
        place.clock.advance(60)

    assert outcomes == [RETRIED, RETRIED, DEAD]


def test_what_is_called_retryable_has_the_attempts_of_a_retryable_failure():
    place = Place(retrying(attempts=3, max_poison_attempts=1, retryable={BUSY}))
    place.failures = [NonRetryableMessageError("busy", BUSY)]

    assert fate(place.deliver(message())) == (RETRIED, TRANSIENT)


def test_what_no_attempt_can_help_is_not_run_again_after_a_conflict_either():
    place = Place(retrying())
    place.failures = [NonRetryableMessageError("no", "DATABASE_CONFLICT")] * 9

    place.deliver(message())

    assert len(place.calls) == 1


class Refused(NonRetryableMessageError):
    """A service's own."""


def test_a_subclass_means_what_its_parent_means():
    place = Place(retrying())
    place.failures = [Refused("no", "TIMEOUT")]

    assert isinstance(place.deliver(message()), DeadLettered)
