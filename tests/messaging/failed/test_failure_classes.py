"""What a failure is: by type and by code, never by the words of a message."""

from __future__ import annotations

import asyncio
import errno
import pickle
import socket
from http.client import HTTPMessage
from smtplib import SMTPServerDisconnected
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from semel.codec import FromHeader, Undecodable
from semel.errors import Fenced, InDoubt, Misuse, NeedsOperator, Permanent, Retryable
from semel.message import Message
from semel.messaging.failure import (
    CLASSIFICATION,
    CODES,
    UNKNOWN_CODE,
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


def given(error, **attributes):
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


SLOW_DOWN = {"Error": {"Code": "SlowDown"}, "ResponseMetadata": {"HTTPStatusCode": 503}}


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
        (URLError(ConnectionRefusedError(111, "refused")), "CONNECTION_LOST"),
        (HTTPError("http://x", 503, "down", HTTPMessage(), None), "DEPENDENCY_UNAVAILABLE"),
        (HTTPError("http://x", 404, "no such page", HTTPMessage(), None), "HANDLER_FAILED"),
        (SMTPServerDisconnected("closed"), "CONNECTION_LOST"),
        (OSError(errno.EHOSTUNREACH, "no route to host"), "CONNECTION_LOST"),
        (OSError(errno.ENOSPC, "no space left"), "HANDLER_FAILED"),
        (OSError("the image is truncated"), "HANDLER_FAILED"),
        (client_error("redis.exceptions", "ConnectionError"), "CONNECTION_LOST"),
        (client_error("botocore.exceptions", "HTTPClientError"), "CONNECTION_LOST"),
        (
            given(client_error("botocore.exceptions", "ClientError"), response=SLOW_DOWN),
            "DEPENDENCY_UNAVAILABLE",
        ),
        (given(client_error("psycopg", "OperationalError"), sqlstate=None), "CONNECTION_LOST"),
        (given(client_error("psycopg", "OperationalError"), sqlstate="55000"), "HANDLER_FAILED"),
        (given(client_error("asyncpg", "AdminShutdownError"), sqlstate="57P01"), "CONNECTION_LOST"),
        (given(client_error("asyncpg", "UniqueViolationError"), sqlstate="23505"), UNKNOWN_CODE),
    ],
)
def test_a_client_that_gets_no_answer_meets_an_outage(error, code):
    assert CLASSIFICATION.classify(error).code == code


def test_a_host_whose_addresses_all_refuse_is_an_outage():
    async def refused(*hosts):
        loop = asyncio.get_running_loop()

        async def addresses(*_, **__):
            flags = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
            return [(*flags, (host, 1)) for host in hosts]

        loop.getaddrinfo = addresses
        with pytest.raises(OSError, match="Multiple exceptions") as raised:
            await asyncio.open_connection("service", 1)
        return raised.value

    error = asyncio.run(refused("127.0.0.1", "127.0.0.2"))

    assert type(error) is OSError
    assert CLASSIFICATION.classify(error).code == "CONNECTION_LOST"


def raised_from(cause, error=None):
    error = error or KeyError("payments are not possible")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "after"),
    [
        (raised_from(ConnectionRefusedError(111, "refused")), "CONNECTION_LOST", None),
        (raised_from(raised_from(TimeoutError())), "TIMEOUT", None),
        (raised_from(ExceptionGroup("both", [ConnectionResetError()])), "CONNECTION_LOST", None),
        (raised_from(RetryableMessageError("x", "RATE_LIMITED", 7)), "RATE_LIMITED", 7),
        (raised_from(ValueError("bad")), "HANDLER_FAILED", None),
        (raised_from(TimeoutError(), PermissionError()), "AUTHORIZATION_FAILED", None),
        (raised_from(TimeoutError(), NonRetryableMessageError("no")), "REJECTED", None),
    ],
)
def test_an_error_of_ones_own_that_is_raised_from_an_outage_is_one(error, code, after):
    found = CLASSIFICATION.classify(error)

    assert (found.code, found.retry_after) == (code, after)


def test_causes_that_go_round_are_no_outage():
    one, other = KeyError(1), KeyError(2)
    one.__cause__, other.__cause__ = other, one

    assert CLASSIFICATION.classify(one).code == "HANDLER_FAILED"


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
