"""What people do with messages that an inbox's workers gave up, and with made-up ids."""

from __future__ import annotations

import pytest

from semel.codec import FromHeader
from semel.crashpoints import CrashPoint
from semel.errors import Misuse
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.claims import ClaimState
from semel.messaging.handler import consumer
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.records import DeadLetterFilter
from semel.messaging.settings import DAY_SECONDS
from semel.operate.audit import NotPossible
from semel.operate.deadletters import (
    park_dead_letter,
    retry_dead_letter,
    skip_dead_letter,
)
from semel.operate.deletion import approve_delete, ask_to_delete_dead_letter
from semel.operate.parking import KeepId, NewId, fix, release, skip
from semel.operate.retention import Retention, erase, prune
from semel.testing.crash import Crash, crash_at
from tests.messaging.act_world import (
    ANN,
    BILLING,
    acts,
    bury,
    claim_of,
    due,
    letter_of,
    park,
    queue,
)
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world


class Paying:
    """A consumer that pays what its inbox has, once somebody has repaired it."""

    def __init__(self, world):
        self.world = world
        self.paid = []
        self.is_broken = True
        self.consumer = consumer(BILLING, id_from=FromHeader("message-id"))(self._pay)
        self.inbox = Inbox(self.consumer, world.database)

    async def _pay(self, message, session):
        if self.is_broken:
            raise NonRetryableMessageError("no such account")
        self.paid.append(message.id)

    async def work(self):
        await InboxWorker(self.consumer, self.world.database).run_until_empty()
        await retry_due(self.consumer, self.world.database)

    async def row(self, message_id="m1"):
        async with self.world.database.begin() as unit:
            return await unit.inbox.get(BILLING, message_id)


async def given_up(world, *ids):
    paying = Paying(world)
    for message_id in ids:
        await paying.inbox.store(message(message_id))
    await paying.work()
    paying.is_broken = False
    return paying


def message(message_id="m1", raw=b'{"v": 1}'):
    headers = {"message-id": message_id.encode()}
    return Message(message_id, {}, raw, "k", headers=headers, source=Coordinates("payments", 0, 1))


class InboxActs:
    @in_world
    async def test_a_letter_that_is_sent_back_is_tried_by_its_inbox_and_paid_once(self, world):
        paying = await given_up(world, "m1")

        assert await retry_dead_letter(world.database, BILLING, "m1", **ANN) == 1
        await paying.work()
        await paying.work()

        assert paying.paid == ["m1"]
        assert await letter_of(world, "m1") is None
        assert (await paying.row()).processed_at is not None
        assert await acts(world) == [("ann", "dlq.retry", "m1")]

    @in_world
    async def test_a_crash_while_a_message_is_sent_back_leaves_the_whole_act_or_nothing(
        self, world
    ):
        paying = await given_up(world, "m1")

        with crash_at(CrashPoint.ACT_BEFORE), pytest.raises(Crash):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN)
        assert await queue(world) == []
        assert await letter_of(world, "m1") is not None
        assert await acts(world) == []
        with crash_at(CrashPoint.ACT_AFTER), pytest.raises(Crash):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN)

        assert await acts(world) == [("ann", "dlq.retry", "m1")]
        assert await letter_of(world, "m1") is None
        await paying.work()
        assert paying.paid == ["m1"]

    @in_world
    async def test_the_loop_guard_holds_for_an_inbox_too(self, world):
        paying = await given_up(world, "m1")
        paying.is_broken = True
        for _ in range(2):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN, at_most=2)
            await paying.work()

        with pytest.raises(NotPossible, match="2 times"):
            await retry_dead_letter(world.database, BILLING, "m1", **ANN, at_most=2)

    @in_world
    async def test_a_skipped_letter_of_an_inbox_is_never_handled(self, world):
        paying = await given_up(world, "m1")

        await skip_dead_letter(world.database, BILLING, "m1", **ANN)
        await paying.work()

        row, claim = await paying.row(), await claim_of(world, "m1")
        assert paying.paid == []
        assert (row.error, row.payload) == ("SKIPPED", b'{"v": 1}')
        assert row.processed_at is not None
        assert (claim.state, claim.marker) == (ClaimState.COMPLETED, "SKIPPED")

    @in_world
    async def test_a_letter_of_an_inbox_is_parked_mended_and_handled(self, world):
        paying = await given_up(world, "m1")

        await park_dead_letter(world.database, BILLING, "m1", **ANN)
        await fix(world.database, BILLING, "m1", b'{"v": 2}', ids=KeepId(), **ANN)
        await release(world.database, BILLING, "m1", **ANN)
        await paying.work()

        assert paying.paid == ["m1"]
        assert (await paying.row()).processed_at is not None

    @in_world
    async def test_a_deleted_letter_of_an_inbox_leaves_no_payload_there(self, world):
        paying = await given_up(world, "m1")
        asked = await ask_to_delete_dead_letter(world.database, BILLING, "m1", **ANN)

        await approve_delete(world.database, asked.number, actor="bob")

        row = await paying.row()
        assert (row.payload, row.error) == (None, "DELETED")
        assert row.processed_at is not None

    @in_world
    async def test_what_was_erased_before_it_was_tried_is_over_and_can_be_pruned(self, world):
        paying = Paying(world)
        await paying.inbox.store(message())

        done = await erase(world.database, key="k", **ANN)
        await paying.work()
        row = await paying.row()
        await world.age(400 * DAY_SECONDS)
        pruned = await prune(world.database, BILLING, Retention())

        assert (done.inbox, row.error, row.payload) == (1, "ERASED", None)
        assert row.processed_at is not None
        assert (pruned.inbox, await paying.row(), paying.paid) == (1, None, [])


class MadeUpIds:
    @in_world
    async def test_a_conflict_is_released_only_under_an_id_of_its_own(self, world):
        paying = Paying(world)
        paying.is_broken = False
        await handle_message(paying.consumer, world.database, message(raw=b'{"v": "A"}'))
        await handle_message(paying.consumer, world.database, message(raw=b'{"v": "B"}'))
        async with world.database.begin() as unit:
            [letter] = await unit.dead_letters.find(DeadLetterFilter(), 9)
        made_up = letter.message_id

        await park_dead_letter(world.database, BILLING, made_up, **ANN)
        with pytest.raises(NotPossible, match="--new-id"):
            await release(world.database, BILLING, made_up, **ANN)
        still = await due(world)
        fixed = {"ids": NewId("m1-b"), **ANN}
        await fix(world.database, BILLING, made_up, b'{"v": "B"}', **fixed)
        await release(world.database, BILLING, "m1-b", **ANN)
        await paying.work()

        assert still == []
        assert paying.paid == ["m1", "m1-b"]

    @in_world
    async def test_an_unreadable_record_is_mended_and_given_an_id(self, world):
        made_up = "unreadable:payments/0/7"
        await bury(world, made_up, payload=b"{", headers={"message-id": b"x"})
        await park_dead_letter(world.database, BILLING, made_up, **ANN)

        await fix(world.database, BILLING, made_up, b"{}", ids=KeepId(), **ANN)
        with pytest.raises(NotPossible, match="generated id"):
            await release(world.database, BILLING, made_up, **ANN)
        for wrong in ("conflict:0123456789abcdef:m1", "unreadable:payments/0/8"):
            with pytest.raises(Misuse, match="choose another"):
                await fix(world.database, BILLING, made_up, b"1", ids=NewId(wrong), **ANN)
        await fix(world.database, BILLING, made_up, b"{}", ids=NewId("m7"), **ANN)
        await release(world.database, BILLING, "m7", **ANN)
        paying = Paying(world)
        paying.is_broken = False
        await paying.work()

        assert paying.paid == ["m7"]


class SkippedPayloads:
    @in_world
    async def test_what_one_person_skips_is_kept_until_it_is_erased(self, world):
        await bury(world, "dead")
        await park(world, "parked", "fixed")
        await fix(world.database, BILLING, "fixed", b"new", ids=KeepId(), **ANN)

        await skip_dead_letter(world.database, BILLING, "dead", **ANN)
        for name in ("parked", "fixed"):
            await skip(world.database, BILLING, name, **ANN)
        kept = {name: await revisions(world, name) for name in ("dead", "parked", "fixed")}
        done = await erase(world.database, message_id="dead", **ANN)

        assert kept == {
            "dead": [b'{"id": "dead"}'],
            "parked": [b'{"id": "parked"}'],
            "fixed": [b'{"id": "fixed"}', b"new"],
        }
        assert done.revisions == 1
        assert await revisions(world, "dead") == [None]


async def revisions(world, message_id):
    async with world.database.begin() as unit:
        return [one.payload for one in await unit.revisions.of(BILLING, message_id)]


class TestActsInSqlite(InSqlite, InboxActs, MadeUpIds, SkippedPayloads):
    pass


class TestActsInPostgres(InPostgres, InboxActs, MadeUpIds, SkippedPayloads):
    pass
