"""Handlers that do several things at once fail with a group, and one of its exceptions counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.failure import CLASSIFICATION, NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, RetryLater
from semel.sql.faults import SQL_CLASSIFICATION, DatabaseConflict
from tests.messaging.worlds import memory_database

UNKNOWN = KeyError("x")
PASSES = RetryableMessageError("slow down", "RATE_LIMITED")
HOPELESS = NonRetryableMessageError("no such account")
FORBIDDEN = PermissionError("not yours")
CONFLICT = DatabaseConflict("the database", "40P01")


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (group(UNKNOWN), "HANDLER_FAILED"),
        (group(PASSES), "RATE_LIMITED"),
        (group(UNKNOWN, PASSES), "RATE_LIMITED"),
        (group(PASSES, UNKNOWN, HOPELESS), "REJECTED"),
        (group(PASSES, FORBIDDEN), "AUTHORIZATION_FAILED"),
        (group(UNKNOWN, group(group(PASSES))), "RATE_LIMITED"),
        (group(HOPELESS, CONFLICT), "DATABASE_CONFLICT"),
    ],
)
def test_what_decides_in_a_group_is_what_would_decide_alone(error, code):
    assert SQL_CLASSIFICATION.classify(error).code == code


def test_the_failure_is_told_by_the_exception_and_not_by_the_group():
    found = CLASSIFICATION.classify(group(HOPELESS))

    assert found == CLASSIFICATION.classify(HOPELESS)
    assert found.reason == "no such account"


def test_a_rule_about_groups_comes_first():
    ours = CLASSIFICATION.extended({ExceptionGroup: "TIMEOUT"})

    assert ours.classify(group(HOPELESS)).code == "TIMEOUT"


@pytest.mark.parametrize(("error", "outcome"), [(PASSES, RetryLater), (HOPELESS, DeadLettered)])
def test_a_handler_with_a_task_group_fails_as_its_task_does(error, outcome):
    @consumer("c", id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        async def fail() -> None:
            raise error

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            tasks.create_task(fail())

    found = asyncio.run(handle_message(handle, memory_database(), Message("m", {})))

    assert isinstance(found, outcome)
    assert found.failure == CLASSIFICATION.classify(error)
