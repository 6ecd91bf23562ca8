"""What a failure is: by type and by code, never by the words of a message."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError

from semel.codec import FromHeader, Undecodable
from semel.errors import Fenced, InDoubt, Misuse, NeedsOperator, Permanent, Retryable
from semel.memory.database import MemoryDatabase
from semel.message import Coordinates, Message
from semel.messaging.claims import Locked
from semel.messaging.consumer import Consumer, consumer
from semel.messaging.failure import (
    CLASSIFICATION,
    CODES,
    FailureClass,
    NonRetryableMessageError,
    RetryableMessageError,
    SequenceGap,
)
from semel.messaging.handling import classify, handle_message
from semel.messaging.outcome import DeadLettered, Handled, RetryLater
from semel.messaging.settings import ConsumerSettings
from semel.sqlalchemy.database import SqlDatabase
from semel.sqlalchemy.faults import (
    SQL_CLASSIFICATION,
    CommitInDoubt,
    DatabaseConflict,
    DatabaseUnavailable,
    code_of,
)
from tests.messaging.worlds import postgres_world, sqlite_world


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
        (TimeoutError(), "TIMEOUT", FailureClass.TRANSIENT),
        (ConnectionResetError(), "CONNECTION_LOST", FailureClass.TRANSIENT),
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


def test_a_code_that_nobody_knows_is_poison():
    found = CLASSIFICATION.classify(RetryableMessageError("x", "SOMETHING_NEW"))

    assert (found.code, found.failure_class) == ("SOMETHING_NEW", FailureClass.POISON)


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
    database = MemoryDatabase()

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
    database = MemoryDatabase()

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


own = MetaData()
account = Table("account", own, Column("id", Integer, primary_key=True), Column("balance", Integer))


@asynccontextmanager
async def with_accounts(world: Any) -> Any:
    async with world() as opened:
        database = opened.database
        async with database.engine.begin() as connection:
            await connection.run_sync(own.drop_all)
            await connection.run_sync(own.create_all)
            await connection.execute(
                insert(account), [{"id": 1, "balance": 0}, {"id": 2, "balance": 0}]
            )
        yield database


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def accounts(request, tmp_path) -> Iterator[Any]:
    if request.param == "sqlite":
        return partial(with_accounts, partial(sqlite_world, tmp_path))
    return request.getfixturevalue("postgres_accounts")


@pytest.fixture
def postgres_accounts(quick_postgres_server) -> Any:
    return partial(with_accounts, partial(postgres_world, quick_postgres_server))


def paid(number: int = 1) -> Message:
    return Message(f"m{number}", {}, b"{}", source=Coordinates("t", 0, number))


def paying(work: Any, **settings: Any) -> Consumer:
    chosen = ConsumerSettings(**{"held_retry_seconds": 0.01, **settings})
    return consumer("pay", policy=chosen, id_from=FromHeader("message-id"))(work)


def test_a_unique_violation_is_poison_by_its_code_and_the_transaction_is_gone(accounts):
    async def scenario() -> None:
        async with accounts() as database:

            async def work(message: Message, session: Any) -> None:
                await session.execute(update(account).values(balance=99))
                await session.execute(insert(account).values(id=1, balance=0))

            outcome = await handle_message(paying(work), database, paid())

            assert isinstance(outcome, DeadLettered)
            assert outcome.failure.code == "CONSTRAINT_VIOLATED"
            async with database.begin() as unit:
                balances = await unit.session.execute(select(account.c.balance))
            assert set(balances.scalars()) == {0}

    asyncio.run(scenario())


def test_a_violation_that_a_handler_catches_in_a_savepoint_is_its_own_affair(accounts):
    async def scenario() -> None:
        async with accounts() as database:

            async def work(message: Message, session: Any) -> None:
                try:
                    async with session.begin_nested():
                        await session.execute(insert(account).values(id=1, balance=0))
                except IntegrityError:
                    await session.execute(update(account).values(balance=7))

            assert isinstance(await handle_message(paying(work), database, paid()), Handled)

    asyncio.run(scenario())


@pytest.mark.postgres
def test_a_lock_timeout_is_transient_and_tried_again(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as database:

            async def work(message: Message, session: Any) -> None:
                await session.execute(update(account).where(account.c.id == 1).values(balance=1))

            async with database.engine.begin() as blocker:
                await blocker.execute(update(account).where(account.c.id == 1).values(balance=2))
                outcome = await handle_message(paying(work), database, paid())

            assert isinstance(outcome, RetryLater)
            assert outcome.failure is not None
            assert outcome.failure.code == "DATABASE_TIMEOUT"
            assert outcome.attempts == 1

    asyncio.run(scenario())


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("state", "code", "kind"),
    [
        ("40001", "DATABASE_CONFLICT", FailureClass.TRANSIENT),
        ("40P01", "DATABASE_CONFLICT", FailureClass.TRANSIENT),
        ("55P03", "DATABASE_TIMEOUT", FailureClass.TRANSIENT),
        ("57014", "DATABASE_TIMEOUT", FailureClass.TRANSIENT),
        ("23505", "CONSTRAINT_VIOLATED", FailureClass.POISON),
        ("23514", "CONSTRAINT_VIOLATED", FailureClass.POISON),
        ("42501", "AUTHORIZATION_FAILED", FailureClass.AUTHORIZATION),
        *(
            (state, "CONNECTION_LOST", FailureClass.TRANSIENT)
            for state in ("25006", "53100", "53300", "57P04", "58030")
        ),
        ("57P01", "CONNECTION_LOST", FailureClass.TRANSIENT),
        ("08006", "CONNECTION_LOST", FailureClass.TRANSIENT),
        ("22012", "HANDLER_FAILED", FailureClass.POISON),
    ],
)
def test_a_postgres_error_is_classified_by_its_state(postgres_accounts, state, code, kind):
    async def scenario() -> None:
        async with postgres_accounts() as database:
            raising = f"DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '{state}'; END $$"
            with pytest.raises(DBAPIError) as raised:
                async with database.engine.begin() as connection:
                    await connection.execute(text(raising))

            found = SQL_CLASSIFICATION.classify(raised.value)

            assert (found.code, found.failure_class) == (code, kind)

    asyncio.run(scenario())


@pytest.mark.postgres
def test_a_serialization_failure_runs_the_whole_transaction_again(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as database:
            runs: list[int] = []

            async def work(message: Message, session: Any) -> None:
                runs.append(message.attempt)
                await session.execute(update(account).values(balance=account.c.balance + 1))
                if len(runs) < 3:
                    raising = "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END $$"
                    await session.execute(text(raising))

            outcome = await handle_message(paying(work), database, paid())

            assert isinstance(outcome, Handled)
            assert runs == [1, 1, 1]
            async with database.begin() as unit:
                balances = await unit.session.execute(select(account.c.balance))
            assert set(balances.scalars()) == {1}

    asyncio.run(scenario())


@pytest.mark.postgres
def test_a_conflict_that_does_not_end_counts_as_an_attempt(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as database:
            runs: list[int] = []

            async def work(message: Message, session: Any) -> None:
                runs.append(message.attempt)
                raising = "DO $$ BEGIN RAISE EXCEPTION 'x' USING ERRCODE = '40P01'; END $$"
                await session.execute(text(raising))

            outcome = await handle_message(paying(work, conflict_tries=3), database, paid())

            assert isinstance(outcome, RetryLater)
            assert outcome.attempts == 1
            assert len(runs) == 3

    asyncio.run(scenario())


@pytest.mark.postgres
def test_two_handlers_that_deadlock_are_both_handled(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as opened:
            # Without a lock timeout, so that it is the deadlock that PostgreSQL finds.
            url = opened.engine.url.render_as_string(hide_password=False)
            database = SqlDatabase(url, lock_seconds=30)
            both = asyncio.Barrier(2)
            runs: list[str] = []

            async def work(message: Message, session: Any) -> None:
                runs.append(message.id)
                rows = (1, 2) if message.id == "m1" else (2, 1)
                for number, row in enumerate(rows):
                    more = {"balance": account.c.balance + 1}
                    await session.execute(update(account).where(account.c.id == row).values(more))
                    if number == 0 and len(runs) <= 2:
                        await both.wait()

            paying_both = paying(work)
            async with asyncio.timeout(30):
                outcomes = await asyncio.gather(
                    handle_message(paying_both, database, paid(1)),
                    handle_message(paying_both, database, paid(2)),
                )

            assert [type(outcome) for outcome in outcomes] == [Handled, Handled]
            assert len(runs) == 3
            async with database.begin() as unit:
                balances = await unit.session.execute(select(account.c.balance))
            assert set(balances.scalars()) == {2}
            await database.close()

    asyncio.run(scenario())


@pytest.mark.postgres
def test_a_connection_that_is_killed_under_a_handler_is_transient(postgres_accounts):
    async def scenario() -> None:
        async with postgres_accounts() as database:

            async def work(message: Message, session: Any) -> None:
                pid = (await session.execute(text("SELECT pg_backend_pid()"))).scalar_one()
                if message.attempt == 1:
                    async with database.engine.begin() as other:
                        await other.execute(text(f"SELECT pg_terminate_backend({pid})"))
                await session.execute(update(account).values(balance=5))

            outcome = await handle_message(paying(work), database, paid())

            assert isinstance(outcome, RetryLater)
            assert outcome.failure is not None
            assert outcome.failure.code == "CONNECTION_LOST"
            async with database.begin() as unit:
                balances = await unit.session.execute(select(account.c.balance))
                assert set(balances.scalars()) == {0}

    asyncio.run(scenario())


def test_a_code_is_none_where_an_error_says_nothing_special():
    assert code_of(ValueError("x")) is None
