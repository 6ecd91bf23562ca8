"""Dry runs: everything is shown, and nothing is kept."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import pytest
from sqlalchemy import Text, delete, insert, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from semel.codec import FromHeader
from semel.message import Message
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handle.lease import Lease
from semel.messaging.handler import consumer
from semel.messaging.outcome import DeadLettered, Handled, RetryLater
from semel.operate.dryrun import DryRun, dry_run, dry_runs
from semel.operate.selection import Ids, Letters, Offsets
from semel.operate.stores import SECRET, Change, RowChange, shown
from semel.outboxes import Outbox
from semel.policy.vocabulary import Mode
from tests.messaging.act_world import acts, claim_of, letters, queue
from tests.messaging.places import InMemory, InPostgres, InSqlite
from tests.messaging.replay_world import DEAD, P0, Service, dead, message, pay
from tests.stores.world import DatabaseContract, in_world


class Base(DeclarativeBase):
    """The handler's own tables."""


class Account(Base):
    __tablename__ = "account"
    name: Mapped[str] = mapped_column(Text, primary_key=True)
    balance: Mapped[int]
    password: Mapped[str] = mapped_column(Text, default="hunter2")


class DryRuns:
    """What holds on every database."""

    @in_world
    async def test_a_dry_run_shows_the_change_and_keeps_nothing(self, world):
        service = await Service(world).open()

        found = await dry_run(service.consumer, world.database, message("m1"))

        assert found.outcome == Handled()
        assert (found.claim, found.failure) == (None, None)
        assert [(c.change, c.table, c.rows) for c in found.changes] == [(Change.INSERT, "paid", 1)]
        assert "m1" in json.dumps([dict(c.after) for c in found.changes])
        assert await service.paid() == []
        assert await claim_of(world, "m1") is None

    @in_world
    async def test_a_message_that_was_handled_can_be_tried_and_has_no_second_effect(self, world):
        service = await Service(world).open()
        await service.deliver("m1")

        found = await dry_run(service.consumer, world.database, message("m1"))

        assert found.claim is ClaimState.COMPLETED
        assert found.outcome == Handled()
        assert len(found.changes) == 1
        assert await service.paid() == ["m1"]

    @in_world
    async def test_a_handler_that_fails_shows_what_it_did_before_and_what_would_follow(self, world):
        service = await Service(world).open()
        service.refuse("m1")

        found = await dry_run(service.consumer, world.database, message("m1"))

        assert isinstance(found.outcome, DeadLettered)
        assert found.failure is not None
        assert found.failure.reason == "no such account"
        assert [change.table for change in found.changes] == ["paid"]
        assert await letters(world) == 0
        assert await claim_of(world, "m1") is None

    @in_world
    async def test_a_failure_that_would_be_retried_is_told_from_one_that_would_not(self, world):
        policy = replace(Service(world).settings.retry, max_attempts=3)
        service = await Service(world, replace(Service(world).settings, retry=policy)).open()

        def down(message):
            raise ConnectionError("down")

        service.broken = down
        found = await dry_run(service.consumer, world.database, message("m1"))

        assert isinstance(found.outcome, RetryLater)
        assert found.outcome.attempts == 1

    @in_world
    async def test_outgoing_messages_are_shown_and_not_sent(self, world):
        outbox = Outbox()

        @consumer("billing", id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            await outbox.add(session, "invoices", {"for": message.id}, key="customer-7")

        first = await dry_run(handle, world.database, message("m1"))
        await handle_message(handle, world.database, message("m1"))
        second = await dry_run(handle, world.database, message("m1"))

        for found in (first, second):
            (entry,) = found.outgoing
            assert (entry.topic, entry.key, entry.value) == (
                "invoices",
                "customer-7",
                b'{"for":"m1"}',
            )
            assert found.changes == ()
        async with world.database.begin() as unit:
            assert (await unit.outbox.numbers("outbox")).pending == 1

    @in_world
    async def test_the_record_of_a_dead_letter_is_not_shown_as_sent(self, world):
        settings = replace(DEAD, dead_letter_topic="payments.dlq")
        service = await Service(world, settings).open()
        service.refuse("m1")
        await service.deliver("m1")
        service.heal()

        found = await dry_run(service.consumer, world.database, message("m1"))

        assert (found.outcome, found.outgoing) == (Handled(), ())
        async with world.database.begin() as unit:
            assert len(await unit.outbox.read("outbox", 0, 10)) == 1

    @in_world
    async def test_a_handler_of_batches_gets_a_batch_of_one(self, world):
        service = await Service(world).open()
        got = []

        @consumer("billing", batches=True)
        async def handle(messages: Any, session: Any) -> None:
            got.append([message.id for message in messages])
            await pay(session, messages[0].id)

        found = await dry_run(handle, world.database, message("m1"))

        assert (found.outcome, got) == (Handled(), [["m1"]])
        assert [change.table for change in found.changes] == ["paid"]
        assert await service.paid() == []

    @in_world
    async def test_a_leased_handler_gets_a_lease_whose_completion_is_taken_back(self, world):
        service = await Service(world).open()

        @consumer("billing", id_from=FromHeader("message-id"), mode=Mode.LEASED)
        async def handle(message: Message, lease: Lease) -> str:
            async with lease.database.begin() as unit:
                await pay(unit.session, "before")
            with suppress(ValueError):
                async with lease.completing() as session:
                    await pay(session, "undone")
                    raise ValueError
            async with lease.completing() as session:
                await pay(session, message.id)
            return "done"

        found = await dry_run(handle, world.database, message("m1"))

        assert found.outcome == Handled("done")
        assert len(found.changes) >= 2
        assert await service.paid() == []
        assert await claim_of(world, "m1") is None

    @in_world
    async def test_a_leased_handler_that_completes_twice_fails_in_a_dry_run_as_it_would(
        self, world
    ):
        @consumer("billing", id_from=FromHeader("message-id"), mode=Mode.LEASED)
        async def handle(message: Message, lease: Lease) -> None:
            await lease.complete(None)
            async with lease.completing():
                pass

        found = await dry_run(handle, world.database, message("m1"))

        assert found.failure is not None

    @in_world
    async def test_messages_of_a_selection_are_tried_without_a_replay(self, world):
        service = await dead(world, 3)
        service.refuse("m1")

        found = await dry_runs(service.consumer, world.database, Letters(), limit=2)

        assert [(one.message_id, type(one.outcome)) for one in found] == [
            ("m0", Handled),
            ("m1", DeadLettered),
        ]
        assert await letters(world) == 3
        assert await queue(world) == []
        assert await acts(world) == []
        assert await service.paid() == []


class TestSelectedDryRuns(InMemory, DatabaseContract):
    @in_world
    async def test_records_and_missing_messages_are_told_apart(self, world):
        service = await Service(world).open()
        service.put("m1")
        service.put("m2", value=b"not json")
        reader = service.broker.reader()

        found = await dry_runs(
            service.consumer, world.database, Offsets(P0, 0, 1), limit=9, reader=reader
        )
        nobody = await dry_runs(service.consumer, world.database, Ids(("m9",)), limit=9)

        read, unread = found
        assert read.outcome == Handled()
        assert unread.outcome is None
        assert "cannot be read" in unread.why
        assert nobody == [DryRun("m9", not_possible="its payload is in no table any more")]


class Sql(DryRuns):
    """What SQLAlchemy can say more."""

    @in_world
    async def test_objects_are_shown_with_old_and_new_values_and_without_secrets(self, world):
        await accounts(world)

        @consumer("billing", id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            ann, bob = (await session.execute(select(Account).order_by("name"))).scalars()
            ann.balance += 7
            session.add(Account(name="cid", balance=0))
            await session.delete(bob)

        found = await dry_run(handle, world.database, message("m1"))

        by_change = {change.change: change for change in found.changes}
        assert by_change[Change.UPDATE] == RowChange(
            Change.UPDATE, "account", "ann", {"balance": 1}, {"balance": 8}
        )
        assert by_change[Change.INSERT].after == {
            "name": "cid",
            "balance": 0,
            "password": "***",
        }
        assert by_change[Change.DELETE].key == "bob"
        assert await balances(world) == {"ann": 1, "bob": 2}

    @in_world
    async def test_statements_are_shown_with_parameters_and_row_counts(self, world):
        await accounts(world)

        @consumer("billing", id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            await session.execute(update(Account).values(balance=5))
            await session.execute(delete(Account).where(Account.name == "ann"))
            new = {"name": "cid", "balance": 3, "password": "hunter2"}
            await session.execute(insert(Account.__table__), [new, {**new, "name": "dan"}])
            await session.execute(text("UPDATE account SET password = 'hunter2' WHERE name='dan'"))
            await session.execute(select(Account))

        found = await dry_run(handle, world.database, message("m1"))

        kinds = [(change.change.value, change.rows) for change in found.changes]
        assert kinds[:2] == [("update", 2), ("delete", 1)]
        assert [kind for kind, _ in kinds] == ["update", "delete", "insert", "update"]
        assert {change.table for change in found.changes} == {"account"}
        assert found.changes[0].after == {"balance": 5}
        assert "ann" in found.changes[1].after.values()
        assert "hunter2" not in json.dumps([asdict(change) for change in found.changes])
        assert await balances(world) == {"ann": 1, "bob": 2}

    @in_world
    async def test_other_connections_are_not_watched(self, world):
        await accounts(world)

        @consumer("billing", id_from=FromHeader("message-id"))
        async def handle(message: Message, session: Any) -> None:
            async with world.database.engine.connect() as other:
                await other.exec_driver_sql("SELECT 1")

        found = await dry_run(handle, world.database, message("m1"))
        async with world.database.begin() as unit:
            await unit.session.execute(update(Account).values(balance=5))

        assert found.changes == ()
        assert await balances(world) == {"ann": 5, "bob": 5}


class TestDryRunsInSqlite(InSqlite, Sql):
    test_other_connections_are_not_watched = None


class TestDryRunsInPostgres(InPostgres, Sql):
    pass


@pytest.mark.parametrize("name", ["password", "user_passwd", "apiKey", "api_key", "access_token"])
def test_secrets_are_known_by_their_names(name):
    assert SECRET.search(name)
    assert shown(name, "hunter2") == "***"
    assert shown(name, None) is None


def test_values_are_shown_so_that_json_can_say_them():
    shown_now = [shown("x", value) for value in (1, None, True, b"abc", {"token": "t"}, "y" * 300)]

    assert shown_now[:5] == [1, None, True, "<3 bytes>", {"token": "***"}]
    assert shown_now[5].endswith("… (300 long)")


async def accounts(world: Any) -> None:
    async with world.database.engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    async with world.database.begin() as unit:
        unit.session.add_all([Account(name="ann", balance=1), Account(name="bob", balance=2)])


async def balances(world: Any) -> dict[str, int]:
    async with world.database.begin() as unit:
        found = (await unit.session.execute(select(Account))).scalars()
        return {account.name: account.balance for account in found}
