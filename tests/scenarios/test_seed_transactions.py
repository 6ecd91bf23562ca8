"""Sessions of the caller: the usage patterns that people know, their guarantees and pitfalls."""

from __future__ import annotations

import asyncio
import logging
from datetime import date
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session

from semel.errors import Misuse
from semel.message import Message
from semel.messaging.classic import IdempotentConsumerBase
from semel.messaging.handle.claims import ClaimRequest, ClaimState, HeldElsewhere, NotClaimable
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.sql.engine import open_engine
from tests.scenarios.orders import Order, Shop, paid

logger = logging.getLogger("shop")
EVENT = {"event_id": "evt-1"}


class Orders(IdempotentConsumerBase[dict[str, Any]]):
    """Writes one row per event, with the session that the claim is in."""

    consumer_name = "orders"

    async def handle_event(self, message: dict[str, Any]) -> None:
        self.session.add(Order(event_id=message["event_id"]))


class FailingOrders(Orders):
    async def handle_event(self, message: dict[str, Any]) -> None:
        await super().handle_event(message)
        await self.session.flush()
        raise RuntimeError("the shop is closed")


async def subscriber(shop: Shop, message: dict[str, Any]) -> None:
    """Handle one delivery; whoever calls this acknowledges after it returned."""
    async with shop.session_factory() as session:
        consumer = Orders(SqlAlchemyProcessedMessageStore(session))
        if await consumer.consume(message):
            await session.commit()
            logger.info("message %s committed", message["event_id"])
        else:
            await session.rollback()
            logger.debug("message %s skipped", message["event_id"])


async def process_one_event(shop: Shop, event: dict[str, Any], kind: type[Orders] = Orders) -> bool:
    """Handle one event, every end of its transaction written out."""
    async with shop.session_factory() as session:
        try:
            was_processed = await kind(SqlAlchemyProcessedMessageStore(session)).consume(event)
            if was_processed:
                await session.commit()
            else:
                await session.rollback()
        except Exception:
            await session.rollback()
            raise
        return was_processed


def test_a_subscriber_with_one_session_per_message_handles_it_once(run, caplog):
    async def scenario(shop: Shop) -> None:
        caplog.set_level(logging.DEBUG, "shop")

        await subscriber(shop, EVENT)
        await subscriber(shop, EVENT)

        assert await shop.orders() == ["evt-1"]
        assert [(r.levelname, r.message) for r in caplog.records if r.name == "shop"] == [
            ("INFO", "message evt-1 committed"),
            ("DEBUG", "message evt-1 skipped"),
        ]

    run(scenario)


def test_explicit_control_commits_rolls_back_and_passes_the_error_on(run):
    async def scenario(shop: Shop) -> None:
        with pytest.raises(RuntimeError, match="closed"):
            await process_one_event(shop, EVENT, FailingOrders)
        assert await shop.orders() == []

        assert await process_one_event(shop, EVENT) is True
        assert await process_one_event(shop, EVENT) is False
        assert await shop.orders() == ["evt-1"]

    run(scenario)


def test_claim_and_effect_are_kept_together_or_not_at_all(run):
    async def scenario(shop: Shop) -> None:
        async with shop.session_factory() as session:
            failing = FailingOrders(SqlAlchemyProcessedMessageStore(session))
            with pytest.raises(RuntimeError):
                await failing.consume(EVENT)
            await session.rollback()

        assert await shop.orders() == []
        async with shop.session_factory() as session:
            store = SqlAlchemyProcessedMessageStore(session)
            assert await store.claim(consumer_name="orders", event_id="evt-1") is True
            await session.rollback()

    run(scenario)


def test_a_duplicate_is_skipped(run):
    async def scenario(shop: Shop) -> None:
        async with shop.session_factory() as session:
            first = Orders(SqlAlchemyProcessedMessageStore(session))
            assert await first.consume(EVENT) is True
            await session.commit()

        async with shop.session_factory() as session:
            second = Orders(SqlAlchemyProcessedMessageStore(session))
            assert await second.consume(EVENT) is False
            await session.rollback()

        assert await shop.orders() == ["evt-1"]

    run(scenario)


def test_the_claim_starts_a_transaction_and_never_ends_it(run):
    async def scenario(shop: Shop) -> None:
        async with shop.session_factory() as session:
            store = SqlAlchemyProcessedMessageStore(session)
            assert not session.in_transaction()

            await store.claim(consumer_name="orders", event_id="evt-1")

            assert session.in_transaction()
            await session.rollback()
        async with shop.session_factory() as session, session.begin():
            await session.execute(insert(Order).values(event_id="before"))
            store = SqlAlchemyProcessedMessageStore(session)
            assert await store.claim(consumer_name="orders", event_id="evt-1") is True
        assert await shop.orders() == ["before"]

    run(scenario)


def test_two_consumers_claim_the_same_message_independently(run):
    class Mails(Orders):
        consumer_name = "mails"

    async def scenario(shop: Shop) -> None:
        assert await process_one_event(shop, EVENT, Orders) is True
        assert await process_one_event(shop, EVENT, Mails) is True
        assert await process_one_event(shop, EVENT, Mails) is False

    run(scenario)


def test_without_a_commit_the_message_is_handled_again_and_again(run):
    async def forgets_to_commit(shop: Shop) -> bool:
        async with shop.session_factory() as session:
            return await Orders(SqlAlchemyProcessedMessageStore(session)).consume(EVENT)

    async def scenario(shop: Shop) -> None:
        answers = [await forgets_to_commit(shop) for _ in range(3)]

        assert answers == [True, True, True]
        assert await shop.orders() == []
        assert await shop.claim("orders", "evt-1") is None

    run(scenario)


def test_a_claim_that_is_committed_before_the_work_loses_the_message(run):
    async def commits_too_early(shop: Shop) -> None:
        async with shop.session_factory() as session:
            store = SqlAlchemyProcessedMessageStore(session)
            claimed = await store.claim(consumer_name="orders", event_id="evt-1")
            await session.commit()
            if claimed:
                raise RuntimeError("died between the commit and the work")

    async def scenario(shop: Shop) -> None:
        with pytest.raises(RuntimeError):
            await commits_too_early(shop)

        await process_one_event(shop, EVENT)

        assert await shop.orders() == []
        claim = await shop.claim("orders", "evt-1")
        assert claim is not None
        assert claim.state is ClaimState.COMPLETED

    run(scenario)


EVENTS = [{"event_id": f"evt-{number}"} for number in range(4)]


class OrdersButOne(Orders):
    async def handle_event(self, message: dict[str, Any]) -> None:
        if message["event_id"] == "evt-3":
            raise RuntimeError("this one fails")
        await super().handle_event(message)


def test_one_session_for_many_messages_loses_the_work_of_all_to_the_failure_of_one(run):
    async def shares_a_session(shop: Shop) -> None:
        async with shop.session_factory() as session:
            consumer = OrdersButOne(SqlAlchemyProcessedMessageStore(session))
            for event in EVENTS:
                await consumer.consume(event)
            await session.commit()

    async def scenario(shop: Shop) -> None:
        with pytest.raises(RuntimeError):
            await shares_a_session(shop)

        assert await shop.orders() == []

    run(scenario)


def test_a_session_for_each_message_keeps_what_succeeded(run):
    async def scenario(shop: Shop) -> None:
        for event in EVENTS:
            try:
                await process_one_event(shop, event, OrdersButOne)
            except RuntimeError:
                continue

        assert await shop.orders() == ["evt-0", "evt-1", "evt-2"]
        assert await process_one_event(shop, EVENTS[3]) is True

    run(scenario)


def test_a_commit_that_fails_leaves_the_message_for_its_redelivery(run):
    async def scenario(shop: Shop) -> None:
        acknowledged: list[str] = []

        async def deliver(fails: bool) -> None:
            async with shop.session_factory() as session:
                consumer = Orders(SqlAlchemyProcessedMessageStore(session))
                await consumer.consume(EVENT)
                if fails:
                    session.add(Order(event_id=None))
                await session.commit()
            acknowledged.append("evt-1")

        with pytest.raises(IntegrityError):
            await deliver(fails=True)
        assert acknowledged == []
        assert await shop.orders() == []

        await deliver(fails=False)
        assert acknowledged == ["evt-1"]
        assert await shop.orders() == ["evt-1"]

    run(scenario)


def test_a_message_that_another_owner_has_is_neither_handled_nor_a_duplicate(run):
    async def scenario(shop: Shop) -> None:
        async with shop.database.begin() as unit:
            await unit.claims.lease("orders", ClaimRequest("evt-1"), owner="elsewhere", seconds=60)

        with pytest.raises(NotClaimable, match="must not be acknowledged") as held:
            await process_one_event(shop, EVENT)

        assert isinstance(held.value.answer, HeldElsewhere)
        assert await shop.orders() == []

    run(scenario)


def test_a_message_without_an_id_is_refused_with_the_way_out(run):
    async def scenario(shop: Shop) -> None:
        with pytest.raises(Misuse, match=r"override event_id\(\)"):
            await process_one_event(shop, {"id": "evt-1"})

    run(scenario)


def test_a_message_object_brings_its_own_id_and_its_conflicts_are_noticed(run):
    class Messages(IdempotentConsumerBase[Any]):
        async def handle_event(self, message: Any) -> None:
            self.session.add(Order(event_id=message.id))

    async def deliver(shop: Shop, message: Any) -> bool:
        async with shop.session_factory() as session:
            found = await Messages(SqlAlchemyProcessedMessageStore(session)).consume(message)
            await session.commit()
            return found

    async def scenario(shop: Shop) -> None:
        assert await deliver(shop, paid(1)) is True
        assert await deliver(shop, paid(1)) is False
        with pytest.raises(NotClaimable, match="Conflict"):
            await deliver(shop, type(paid(1))("evt-1", {}, b"another payload"))
        assert await shop.claim("Messages", "evt-1") is not None

    run(scenario)


def test_the_session_of_the_consumer_is_the_callers_own(run):
    async def scenario(shop: Shop) -> None:
        async with shop.session_factory() as session:
            consumer = Orders(SqlAlchemyProcessedMessageStore(session))

            assert isinstance(consumer.session, AsyncSession)
            assert consumer.session is session

    run(scenario)


def test_a_consumer_with_its_own_init_runs_as_the_pattern_is_written(run):
    class MyConsumer(IdempotentConsumerBase):  # type: ignore[type-arg]
        def __init__(self, session_factory):
            self._session_factory = session_factory

        async def handle_event(self, message: dict) -> None:  # type: ignore[type-arg]
            self.session.add(Order(event_id=str(message["event_id"])))

    async def consume_message(shop: Shop, message: dict[str, Any]) -> bool:
        async with shop.session_factory() as session:
            store = SqlAlchemyProcessedMessageStore(session)
            consumer = MyConsumer(store)
            was_processed = await consumer.consume(message)
            await (session.commit() if was_processed else session.rollback())
            return was_processed

    async def scenario(shop: Shop) -> None:
        ids = [7, UUID(int=7), "evt-1"]
        assert [await consume_message(shop, {"event_id": id}) for id in ids] == [True] * 3
        assert [await consume_message(shop, {"event_id": id}) for id in ids] == [False] * 3
        assert await shop.claim("MyConsumer", "7") is not None
        assert sorted(await shop.orders()) == sorted(map(str, ids))
        with pytest.raises(NotClaimable, match="Conflict"):
            await consume_message(shop, {"event_id": 7, "amount": 3})
        with pytest.raises(Misuse, match="no 'event_id'"):
            await consume_message(shop, {"event_id": ""})
        with pytest.raises(Misuse, match="has no store to claim with"):
            await MyConsumer(shop.session_factory).consume(EVENT)

    run(scenario)


def test_the_same_id_with_another_payload_is_a_conflict_without_bytes_too(run):
    async def scenario(shop: Shop) -> None:
        assert await process_one_event(shop, {**EVENT, "lines": [1, 2], "at": date(2026, 1, 1)})
        again = {"at": date(2026, 1, 1), "lines": [1, 2], **EVENT}
        assert await process_one_event(shop, again) is False, "the order of fields is no matter"
        with pytest.raises(NotClaimable, match="Conflict"):
            await process_one_event(shop, {**again, "lines": [2, 1]})

    run(scenario)
    assert Message("m", {"a": 1, "b": 2}).digest == Message("m", {"b": 2, "a": 1}).digest
    assert Message("m", {"a": 1}).digest != Message("m", {"a": 2}).digest
    assert (
        Message("m", object()).digest == Message("m", object()).digest == Message("m", None).digest
    )


def test_a_session_that_does_not_begin_by_itself_is_begun(run):
    async def scenario(shop: Shop) -> None:
        async with AsyncSession(shop.database.engine, autobegin=False) as session:
            assert await Orders(SqlAlchemyProcessedMessageStore(session)).consume(EVENT)
            await session.commit()

        assert await shop.orders() == ["evt-1"]

    run(scenario)


def test_a_scoped_session_claims_as_the_session_that_it_stands_for(run):
    async def scenario(shop: Shop) -> None:
        session = async_scoped_session(shop.session_factory, asyncio.current_task)
        assert await Orders(SqlAlchemyProcessedMessageStore(session)).consume(EVENT)
        await session.commit()
        await session.remove()

        assert await shop.orders() == ["evt-1"]

    run(scenario)


@pytest.mark.parametrize("given", [Session(), async_sessionmaker()])
def test_what_is_no_async_session_is_refused_with_the_way_out(given):
    with pytest.raises(Misuse, match="claim_sync"):
        SqlAlchemyProcessedMessageStore(given)


def test_missing_tables_are_refused_with_the_way_out(tmp_path):
    async def scenario() -> None:
        engine = open_engine(f"sqlite:///{tmp_path}/empty.db")
        async with AsyncSession(engine) as session:
            store = SqlAlchemyProcessedMessageStore(session)
            with pytest.raises(Misuse, match="semel db create"):
                await Orders(store).consume(EVENT)
        await engine.dispose()

    asyncio.run(scenario())
