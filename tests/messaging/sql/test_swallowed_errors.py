"""A handler that catches a database error and goes on must not have its message acknowledged."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Integer, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.codec import FromHeader
from semel.message import Coordinates, Message
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handle.lease import Lease, handle_leased
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Ack, DeadLettered, Handled, Outcome, settlement
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from tests.messaging.worlds import postgres_world, sqlite_world


class Base(DeclarativeBase):
    """The service's own tables."""


class Account(Base):
    """A row per account; the first one is there already."""

    __tablename__ = "swallowed_account"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)


M1, M2, M3 = (
    Message(f"m{number}", {}, b"{}", source=Coordinates("t", 0, number)) for number in (1, 2, 3)
)


async def by_statement(session: Any) -> None:
    """Fail in a statement."""
    await session.execute(insert(Account).values(id=1))


async def by_flush(session: Any) -> None:
    """Fail in a flush."""
    session.add(Account(id=1))
    await session.flush()


def swallowing(fails: Any, *, goes_on: bool = False) -> Consumer:
    chosen = ConsumerSettings(retry=RetryPolicy(max_attempts=1))

    @consumer("c", policy=chosen, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        await session.execute(insert(Account).values(id=int(message.id[1:]) + 100))
        if message.id != "m2":
            return
        with suppress(SQLAlchemyError):
            await fails(session)
        if goes_on:
            with suppress(SQLAlchemyError):
                await session.execute(insert(Account).values(id=50))

    return handle


@asynccontextmanager
async def opened(world: Any) -> Any:
    async with world() as found:
        database = found.database
        async with database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.drop_all)
            await connection.run_sync(Base.metadata.create_all)
            await connection.execute(insert(Account).values(id=1))
        yield database


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def accounts(request, tmp_path) -> Any:
    if request.param == "sqlite":
        return partial(opened, partial(sqlite_world, tmp_path))
    return partial(
        opened, partial(postgres_world, request.getfixturevalue("quick_postgres_server"))
    )


async def single(handler: Consumer, database: Any) -> list[Outcome]:
    return [await handle_message(handler, database, message) for message in (M1, M2, M3)]


async def batched(handler: Consumer, database: Any) -> list[Outcome]:
    return await consume_many(handler, database, [M1, M2, M3])


@pytest.mark.parametrize("deliver", [single, batched])
@pytest.mark.parametrize("fails", [by_statement, by_flush])
@pytest.mark.parametrize("goes_on", [False, True], ids=["returns", "goes on"])
def test_whatever_is_acknowledged_is_durable(accounts, deliver, fails, goes_on):
    async def scenario() -> None:
        async with accounts() as database:
            outcomes = await deliver(swallowing(fails, goes_on=goes_on), database)

            assert all(isinstance(settlement(outcome), Ack) for outcome in outcomes)
            async with database.begin() as unit:
                rows = set((await unit.session.execute(select(Account.id))).scalars())
                claims = [await unit.claims.look_up("c", f"m{n}") for n in (1, 2, 3)]
                letter = await unit.dead_letters.get("c", "m2")
            assert {101, 103} <= rows
            assert [claim.state for claim in (claims[0], claims[2])] == [ClaimState.COMPLETED] * 2
            if isinstance(outcomes[1], Handled):
                assert claims[1].state is ClaimState.COMPLETED
                assert 102 in rows
            else:
                assert isinstance(outcomes[1], DeadLettered)
                assert letter is not None
                assert claims[1].state is ClaimState.FAILED_TERMINAL
                assert not rows & {102, 50}

    asyncio.run(scenario())


@pytest.mark.postgres
@pytest.mark.parametrize("deliver", [single, batched])
def test_the_dead_letter_says_what_the_handler_did(quick_postgres_server, deliver):
    async def scenario() -> None:
        async with opened(partial(postgres_world, quick_postgres_server)) as database:
            outcomes = await deliver(swallowing(by_statement), database)

            assert isinstance(outcomes[1], DeadLettered)
            assert outcomes[1].failure.code == "HANDLER_MISUSE"
            assert "begin_nested" in outcomes[1].failure.reason

    asyncio.run(scenario())


@pytest.mark.parametrize("deliver", [single, batched])
def test_an_error_that_is_caught_around_a_savepoint_does_no_harm(accounts, deliver):
    async def scenario() -> None:
        async with accounts() as database:

            @consumer("c", id_from=FromHeader("message-id"))
            async def handle(message: Message, session: Any) -> None:
                with suppress(IntegrityError):
                    async with session.begin_nested():
                        await by_statement(session)
                await session.execute(insert(Account).values(id=int(message.id[1:]) + 100))

            outcomes = await deliver(handle, database)

            assert [type(outcome) for outcome in outcomes] == [Handled] * 3
            async with database.begin() as unit:
                rows = set((await unit.session.execute(select(Account.id))).scalars())
            assert rows == {1, 101, 102, 103}

    asyncio.run(scenario())


def test_a_connection_that_failed_once_is_well_in_its_next_transaction(accounts):
    async def scenario() -> None:
        async with accounts() as database:
            swallow = swallowing(by_statement)
            await handle_message(swallow, database, M2)

            outcomes = [await handle_message(swallow, database, message) for message in (M1, M3)]

            assert [type(outcome) for outcome in outcomes] == [Handled, Handled]

    asyncio.run(scenario())


def test_an_error_that_is_swallowed_while_completing_keeps_nothing(accounts):
    async def scenario() -> None:
        async with accounts() as database:
            chosen = ConsumerSettings(retry=RetryPolicy(max_attempts=1))

            @consumer("c", policy=chosen, id_from=FromHeader("message-id"))
            async def handle(message: Message, lease: Lease) -> None:
                async with lease.completing() as session:
                    await session.execute(insert(Account).values(id=102))
                    with suppress(SQLAlchemyError):
                        await by_statement(session)

            outcome = await handle_leased(handle, database, M2, "a")

            async with database.begin() as unit:
                rows = set((await unit.session.execute(select(Account.id))).scalars())
                claim = await unit.claims.look_up("c", "m2")
            assert isinstance(outcome, Handled) == (102 in rows)
            assert (claim.state is ClaimState.COMPLETED) == (102 in rows)

    asyncio.run(scenario())


@pytest.mark.parametrize("deliver", [single, batched])
def test_a_pending_row_that_is_refused_is_the_failure_of_its_own_message(accounts, deliver):
    async def scenario() -> None:
        async with accounts() as database:

            @consumer("c", id_from=FromHeader("message-id"))
            async def handle(message: Message, session: Any) -> None:
                number = int(message.id[1:])
                session.add(Account(id=1 if number == 2 else number + 100))

            outcomes = await deliver(handle, database)

            assert [type(outcome) for outcome in outcomes] == [Handled, DeadLettered, Handled]
            assert isinstance(outcomes[1], DeadLettered)
            assert outcomes[1].failure.code == "CONSTRAINT_VIOLATED"
            async with database.begin() as unit:
                rows = set((await unit.session.execute(select(Account.id))).scalars())
            assert rows == {1, 101, 103}

    asyncio.run(scenario())
