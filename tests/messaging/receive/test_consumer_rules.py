"""Whatever a consumer's own rules do, a failure is classified, written, and counted."""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.failure import CLASSIFICATION, LONGEST_CODE, FailureClass, Rule
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import DeadLettered, RetryLater
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from tests.messaging.places import InPostgres, InSqlite


class HttpError(Exception):
    status = 503


class Kind(str, Enum):  # noqa: UP042  many libraries still have such ones
    BUSY = "RATE_LIMITED"


def raises(error: BaseException) -> str:
    raise LookupError("the rule itself is wrong")


def status(error: Any) -> Any:
    return error.status


ODD_RULES = pytest.mark.parametrize(
    ("rule", "code"),
    [
        (raises, "HANDLER_FAILED"),
        (status, "503"),
        ("A\0B", "AB"),
        ("\ud800", "HANDLER_FAILED"),
        ("", "HANDLER_FAILED"),
        ("X" * 1000, "X" * LONGEST_CODE),
        (Kind.BUSY, "RATE_LIMITED"),
    ],
)


@ODD_RULES
def test_a_rule_gives_a_code_that_every_table_can_keep(rule, code):
    rules: dict[type[BaseException], Rule] = {HttpError: rule}

    assert CLASSIFICATION.extended(rules).classify(HttpError()).code == code


def test_a_code_that_was_made_text_has_the_class_that_the_consumer_gave_it():
    codes = {"503": FailureClass.DEPENDENCY_OUTAGE}

    found = CLASSIFICATION.extended({HttpError: status}, codes).classify(HttpError())

    assert found.failure_class is FailureClass.DEPENDENCY_OUTAGE


def test_a_rule_that_fails_is_told_in_the_log(caplog):
    CLASSIFICATION.extended({HttpError: raises}).classify(HttpError())

    (record,) = caplog.records
    assert "the rule itself is wrong" in record.reason
    assert "test_consumer_rules.py" in record.at


def test_an_exception_that_cannot_be_told_has_its_name_for_a_reason():
    class Untellable(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert CLASSIFICATION.classify(Untellable()).reason == "Untellable"


class _Counting:
    def calling(self, rule: Rule, calls: list[int]) -> Consumer:
        policy = RetryPolicy(
            max_attempts=2,
            initial_delay_seconds=0,
            jitter=False,
            retryable=frozenset({"503", "AB", "X" * LONGEST_CODE}),
        )

        @consumer(
            "c",
            policy=ConsumerSettings(retry=policy),
            rules={HttpError: rule},
            id_from=FromHeader("message-id"),
        )
        async def handle(message: Message) -> None:
            calls.append(message.attempt)
            raise HttpError("no \0 answer")

        return handle

    @ODD_RULES
    def test_no_rule_makes_a_message_come_back_for_ever(self, rule, code):
        async def scenario(world: Any) -> None:
            calls: list[int] = []
            handle = self.calling(rule, calls)
            async with world as opened:
                database = opened.database
                message = Message("m1", {}, b"{}")
                outcomes = [await handle_message(handle, database, message) for _ in range(2)]
                async with database.begin() as unit:
                    row = await unit.claims.look_up("c", "m1")

            assert [type(outcome) for outcome in outcomes] == [RetryLater, DeadLettered]
            assert calls == [1, 2]
            assert row is not None
            assert (row.state, row.error_code) == (ClaimState.FAILED_TERMINAL, code)

        asyncio.run(scenario(self.world()))


class TestInSqlite(InSqlite, _Counting):
    pass


class TestInPostgres(InPostgres, _Counting):
    pass
