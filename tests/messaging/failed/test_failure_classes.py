"""What a failure is: by type and by code, never by the words of a message."""

from __future__ import annotations

import pickle
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from semel.codec import FromHeader, Undecodable
from semel.errors import Fenced, InDoubt, Misuse, NeedsOperator, Permanent, Retryable
from semel.message import Message
from semel.messaging.failure import (
    CLASSIFICATION,
    CODES,
    FailureClass,
    NonRetryableMessageError,
    RetryableMessageError,
    SequenceGap,
)
from semel.messaging.handle.attempt import classify
from semel.messaging.handle.claims import Locked
from semel.messaging.handler import Consumer, consumer
from semel.sql.faults import (
    SQL_CLASSIFICATION,
    CommitInDoubt,
    DatabaseConflict,
    DatabaseUnavailable,
    code_of,
)
from tests.messaging.worlds import memory_database


def test_the_codes_reach_all_seven_classes():
    assert set(CODES.values()) == set(FailureClass)


@pytest.mark.parametrize(
    ("error", "code", "kind"),
    [
        (RetryableMessageError("x"), "DEPENDENCY_UNAVAILABLE", FailureClass.DEPENDENCY_OUTAGE),
        (RetryableMessageError("x", "RATE_LIMITED"), "RATE_LIMITED", FailureClass.RATE_LIMIT),
        (
            RetryableMessageError("x", "PRECONDITION_FAILED"),
            "PRECONDITION_FAILED",
            FailureClass.BUSINESS_PRECONDITION,
        ),
        (SequenceGap("k", 2, 4), "SEQUENCE_GAP", FailureClass.BUSINESS_PRECONDITION),
        (NonRetryableMessageError("x"), "REJECTED", FailureClass.POISON),
        (
            NonRetryableMessageError("x", "SCHEMA_INVALID"),
            "SCHEMA_INVALID",
            FailureClass.SCHEMA,
        ),
        (
            NonRetryableMessageError("x", "AUTHORIZATION_FAILED"),
            "AUTHORIZATION_FAILED",
            FailureClass.AUTHORIZATION,
        ),
        (TimeoutError(), "TIMEOUT", FailureClass.DEPENDENCY_OUTAGE),
        (ConnectionResetError(), "CONNECTION_LOST", FailureClass.DEPENDENCY_OUTAGE),
        (socket.gaierror(-2, "no such name"), "CONNECTION_LOST", FailureClass.DEPENDENCY_OUTAGE),
        (PermissionError(), "AUTHORIZATION_FAILED", FailureClass.AUTHORIZATION),
        (Misuse("x"), "HANDLER_MISUSE", FailureClass.POISON),
        (Permanent("x"), "REJECTED", FailureClass.POISON),
        (Undecodable("x"), "REJECTED", FailureClass.POISON),
        (Retryable("x"), "DEPENDENCY_UNAVAILABLE", FailureClass.DEPENDENCY_OUTAGE),
        (Fenced("x"), "DATABASE_CONFLICT", FailureClass.TRANSIENT),
        (InDoubt("x"), "HANDLER_FAILED", FailureClass.POISON),
        (NeedsOperator("x"), "HANDLER_FAILED", FailureClass.POISON),
        (KeyError("x"), "HANDLER_FAILED", FailureClass.POISON),
        (OSError("x"), "HANDLER_FAILED", FailureClass.POISON),
    ],
)
def test_an_exception_has_a_code_and_a_class_by_its_type(error, code, kind):
    found = CLASSIFICATION.classify(error)

    assert (found.code, found.failure_class) == (code, kind)
    assert found.exception == f"{type(error).__module__}.{type(error).__qualname__}"


def client_error(module, *names):
    """Return an exception of a client that is not installed, by the names of its classes."""
    kind: type[Exception] = Exception
    for name in names:
        kind = type(name, (kind,), {"__module__": module})
    return kind("down")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            client_error("httpx", "TransportError", "NetworkError", "ConnectError"),
            "CONNECTION_LOST",
        ),
        (client_error("httpx", "TransportError", "TimeoutException", "ReadTimeout"), "TIMEOUT"),
        (client_error("httpx", "TransportError", "UnsupportedProtocol"), "HANDLER_FAILED"),
        (client_error("requests.exceptions", "RequestException", "Timeout"), "TIMEOUT"),
        (client_error("requests.exceptions", "ConnectionError", "SSLError"), "CONNECTION_LOST"),
        (client_error("aiohttp.client_exceptions", "ClientConnectionError"), "CONNECTION_LOST"),
        (client_error("mine", "ConnectError"), "HANDLER_FAILED"),
    ],
)
def test_an_http_client_that_gets_no_answer_meets_an_outage(error, code):
    assert CLASSIFICATION.classify(error).code == code


@pytest.mark.parametrize("give", ["response.status_code", "status", "status_code"])
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (429, "RATE_LIMITED"),
        (502, "DEPENDENCY_UNAVAILABLE"),
        (503, "DEPENDENCY_UNAVAILABLE"),
        (504, "DEPENDENCY_UNAVAILABLE"),
        (500, "HANDLER_FAILED"),
        (404, "HANDLER_FAILED"),
        ([503], "HANDLER_FAILED"),
    ],
)
def test_an_answer_of_another_service_says_by_its_status_that_it_is_down(give, status, code):
    error = RuntimeError("answered")
    *through, name = give.split(".")
    holder = error
    for step in through:
        setattr(holder, step, SimpleNamespace())
        holder = getattr(holder, step)
    setattr(holder, name, status)

    assert CLASSIFICATION.classify(error).code == code


def test_a_rule_of_the_consumer_comes_before_the_status():
    error = client_error("httpx", "NetworkError")
    ours = CLASSIFICATION.extended({type(error): "REJECTED"})

    assert ours.classify(error).code == "REJECTED"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DatabaseConflict("x"), "DATABASE_CONFLICT"),
        (DatabaseUnavailable("x"), "CONNECTION_LOST"),
        (CommitInDoubt("x"), "HANDLER_FAILED"),
        (Locked("x"), "DATABASE_TIMEOUT"),
    ],
)
def test_what_the_database_binding_raises_has_a_code(error, code):
    assert SQL_CLASSIFICATION.classify(error).code == code


@pytest.mark.parametrize(
    "words",
    ["duplicate key value violates unique constraint", "timeout", "deadlock", "connection reset"],
)
def test_the_words_of_an_exception_mean_nothing(words):
    found = SQL_CLASSIFICATION.classify(RuntimeError(words))

    assert found.code == "HANDLER_FAILED"
    assert words in found.reason


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RetryableMessageError("x", "SOMETHING_NEW"), FailureClass.TRANSIENT),
        (NonRetryableMessageError("x", "SOMETHING_NEW"), FailureClass.POISON),
        (KeyError("x"), FailureClass.POISON),
    ],
)
def test_a_code_that_nobody_knows_is_poison_unless_its_exception_says_otherwise(error, kind):
    found = CLASSIFICATION.extended({KeyError: "SOMETHING_NEW"}).classify(error)

    assert (found.code, found.failure_class) == ("SOMETHING_NEW", kind)


class PaymentError(Exception):
    """A service's own."""


class CardDeclined(PaymentError):
    """A kind of it."""


def ours(**options: Any) -> Consumer:
    async def handle(message: Message) -> None:
        """Do nothing."""

    return consumer("c", id_from=FromHeader("message-id"), **options)(handle)


def test_a_consumers_own_rules_come_first_and_the_nearest_type_wins():
    mine = ours(
        rules={
            PaymentError: "PAYMENT_DOWN",
            CardDeclined: "CARD_DECLINED",
            TimeoutError: "RATE_LIMITED",
        },
        codes={
            "PAYMENT_DOWN": FailureClass.DEPENDENCY_OUTAGE,
            "CARD_DECLINED": FailureClass.BUSINESS_PRECONDITION,
        },
    )
    database = memory_database()

    found = {
        type(error): classify(mine, database, error)
        for error in (PaymentError(), CardDeclined(), TimeoutError(), KeyError())
    }

    assert found[PaymentError].failure_class is FailureClass.DEPENDENCY_OUTAGE
    assert found[CardDeclined].code == "CARD_DECLINED"
    assert found[TimeoutError].failure_class is FailureClass.RATE_LIMIT
    assert found[KeyError].code == "HANDLER_FAILED"
    assert classify(ours(), database, TimeoutError()).code == "TIMEOUT"


def test_a_rule_may_look_at_the_exception_and_have_no_opinion():
    class HttpError(Exception):
        def __init__(self, status: int) -> None:
            super().__init__(status)
            self.status = status

    def by_status(error: BaseException) -> str | None:
        status = getattr(error, "status", None)
        return {429: "RATE_LIMITED", 403: "AUTHORIZATION_FAILED"}.get(status or 0)

    mine = ours(rules={HttpError: by_status, Exception: "REJECTED"})
    database = memory_database()

    codes = [classify(mine, database, HttpError(status)).code for status in (429, 403, 418)]

    assert codes == ["RATE_LIMITED", "AUTHORIZATION_FAILED", "REJECTED"]


@pytest.mark.parametrize(
    "error",
    [
        RetryableMessageError("down", "RATE_LIMITED"),
        NonRetryableMessageError("no", "REJECTED"),
        SequenceGap("k", 2, 4),
    ],
)
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))

    assert str(again) == str(error)
    assert again.code == error.code


def test_a_code_is_none_where_an_error_says_nothing_special():
    assert code_of(ValueError("x")) is None
