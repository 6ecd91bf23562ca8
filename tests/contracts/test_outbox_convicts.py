"""The contracts of outbox and inbox convict stores that are broken on purpose, one per rule."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from typing import ClassVar

import pytest
from sqlalchemy import select

from semel.message import headers_to_text
from semel.messaging.send.outbox import Leadership, LeadershipLost
from semel.sql.inbox import SqlInboxStore, _message
from semel.sql.outbox import SqlOutboxStore
from semel.sql.tables import inbox_message
from semel.sql.types import now_us, to_seconds
from tests.contracts.sabotage import say
from tests.messaging.worlds import memory_world
from tests.stores.inbox import InboxContract
from tests.stores.outbox import OutboxContract
from tests.stores.world import DatabaseWorld


class DeletesRanges(SqlOutboxStore):
    """Deletes everything between the first and the last place: unsent entries, too."""

    async def delete(self, leadership, places):
        if not places:
            return await super().delete(leadership, places)
        return await super().delete(leadership, range(min(places), max(places) + 1))


class ForgetsTheEpoch(SqlOutboxStore):
    """Deletes for whoever asks."""

    async def _fenced(self, statement, leadership, places, **more):
        now = await self.leader(leadership.outbox)
        stands = replace(leadership, owner=now.owner, epoch=now.epoch)
        return await super()._fenced(statement, stands, places, **more)


class ChecksTheLeaseInstead(SqlOutboxStore):
    """Refuses a leader whose lease ran out, though nobody replaced it."""

    async def _fenced(self, statement, leadership, places, **more):
        if (await self.leader(leadership.outbox)).seconds_left <= 0:
            raise LeadershipLost(leadership.outbox, leadership.epoch)
        return await super()._fenced(statement, leadership, places, **more)


class TakesLiveLeases(SqlOutboxStore):
    """Never waits for another leader."""

    async def lead(self, outbox, owner, seconds, *, instead_of=""):
        held = await self.leader(outbox)
        return await super().lead(outbox, owner, seconds, instead_of=held.owner if held else "")


class KeepsTheEpoch(SqlOutboxStore):
    """Gives every leader the same number."""

    async def lead(self, outbox, owner, seconds, *, instead_of=""):
        if await super().lead(outbox, owner, seconds, instead_of=instead_of) is None:
            return None
        await say(self, "UPDATE outbox_leader SET epoch = 1")
        return Leadership(outbox, owner, 1)


class DoesNotRenew(SqlOutboxStore):
    """Answers a leader that it still leads, and lets its lease run out."""

    async def lead(self, outbox, owner, seconds, *, instead_of=""):
        held = await self.leader(outbox)
        if held is not None and held.owner == owner:
            return Leadership(outbox, owner, held.epoch)
        return await super().lead(outbox, owner, seconds, instead_of=instead_of)


class TakesAnEmptyDeleteForALoss(SqlOutboxStore):
    """Concludes from nothing deleted that somebody else leads."""

    async def delete(self, leadership, places):
        deleted = await super().delete(leadership, places)
        if deleted == 0:
            raise LeadershipLost(leadership.outbox, leadership.epoch)
        return deleted


class ReadsWhatIsParked(SqlOutboxStore):
    """Sends parked entries again and again."""

    async def read(self, outbox, after_place, limit):
        found = [*await super().read(outbox, after_place, limit), *await self.parked(outbox, limit)]
        return sorted((e for e in found if e.place > after_place), key=lambda e: e.place)[:limit]


class ReplacesKnownIds(SqlOutboxStore):
    """Lets a second handling overwrite what the first one wrote."""

    async def add(self, entries):
        await super().add(entries)
        for entry in entries:
            await say(
                self,
                "UPDATE outbox_message SET headers = :headers WHERE message_id = :id",
                headers=headers_to_text(entry.headers),
                id=entry.message_id,
            )


class LosesAnotherMessage(SqlOutboxStore):
    """Takes every entry with a known id for a repetition."""

    async def add(self, entries):
        known = await self._known([(entry.outbox, entry.message_id) for entry in entries])
        there = {entry.message_id for entry in known}
        await super().add([entry for entry in entries if entry.message_id not in there])


class MixesOutboxes(SqlOutboxStore):
    """Keeps all outboxes together."""

    async def read(self, outbox, after_place, limit):
        names = (await say(self, "SELECT DISTINCT outbox FROM outbox_message")).scalars().all()
        return [e for name in names for e in await super(MixesOutboxes, self).read(name, 0, limit)]


class SendsWhatIsErased(SqlOutboxStore):
    """Leaves an erased entry to be sent without its value."""

    async def erase(self, **meant):
        erased = await super().erase(**meant)
        await say(
            self, "UPDATE outbox_message SET parked_reason = NULL WHERE erased_at IS NOT NULL"
        )
        return erased


class KeepsTheBrokersWords(SqlOutboxStore):
    """Lets what the broker said stand, whoever was erased meanwhile."""

    async def park(self, leadership, place, reason):
        await super().park(leadership, place, reason)
        change = "UPDATE outbox_message SET parked_reason = :reason WHERE place = :place"
        await say(self, change, reason=reason, place=place)


class WaitsForWhatIsErased(SqlOutboxStore):
    """Holds a key behind a message that nobody will ever send."""

    async def parked_keys(self, outbox):
        aside = await self.parked(outbox, 1000)
        return frozenset((e.topic, e.key) for e in aside if e.key is not None)


class GivesPlacesAgain(SqlOutboxStore):
    """Counts places from the entries that are left."""

    async def add(self, entries):
        last = "SELECT coalesce(max(place), 0) FROM outbox_message"
        await say(self, f"UPDATE sqlite_sequence SET seq = ({last}) WHERE name = 'outbox_message'")
        await super().add(entries)


class DropsWhatWaits(SqlOutboxStore):
    """Takes entries out that nobody has set aside."""

    async def drop(self, outbox, message_id):
        gone = "DELETE FROM outbox_message WHERE outbox = :outbox AND message_id = :id"
        return (await say(self, gone, outbox=outbox, id=message_id)).rowcount == 1


class WritesPastTheTransaction(SqlOutboxStore):
    """Keeps entries of transactions that are taken back."""

    written: ClassVar[list] = []

    async def add(self, entries):
        self.written.extend(entries)
        await super().add(entries)

    async def read(self, outbox, after_place, limit):
        await super().add([entry for entry in self.written if entry.outbox == outbox])
        return await super().read(outbox, after_place, limit)


class StoresTwice(SqlInboxStore):
    """Overwrites a message that is there."""

    async def store(self, message):
        if not await super().store(message):
            await say(
                self,
                "UPDATE inbox_message SET payload = :payload, processed_at = NULL"
                " WHERE consumer = :consumer AND message_id = :id",
                payload=message.payload,
                consumer=message.consumer,
                id=message.message_id,
            )
        return True


async def waiting_in(store, consumer):
    """Return what a consumer has not processed, in order, and what time it is."""
    here = inbox_message.c
    of_consumer = select(inbox_message, now_us().label("now")).where(here.consumer == consumer)
    rows = (await store._run(of_consumer.order_by(here.place))).all()
    now = to_seconds(rows[0].now) if rows else 0.0
    return [m for m in map(_message, rows) if m.processed_at is None], now


class SettlesWithoutAClaim(SqlInboxStore):
    """Takes every row for done that it is asked to settle."""

    async def settle(self, consumer, message_ids):
        await super().settle(consumer, message_ids)
        for message_id in message_ids:
            change = "UPDATE inbox_message SET due_at = NULL WHERE message_id = :id"
            await say(self, change, id=message_id)


class ProcessesWhatFailed(SqlInboxStore):
    """Calls a message processed that is a dead letter."""

    async def settle(self, consumer, message_ids):
        await super().settle(consumer, message_ids)
        for message_id in message_ids:
            change = "UPDATE inbox_message SET processed_at = 1 WHERE message_id = :id"
            await say(self, change, id=message_id)


class ForgetsWhatWaited(SqlInboxStore):
    """Never learns what became of a message that waited."""

    async def settle_again(self, consumer):
        return None


class FailsWhatIsDone(SqlInboxStore):
    """Lets a late failure bring a processed message back."""

    async def settle(self, consumer, message_ids):
        for message_id in message_ids:
            again = "UPDATE inbox_message SET processed_at = NULL WHERE message_id = :id"
            await say(self, again, id=message_id)
        await super().settle(consumer, message_ids)


class DeletesWhatIsNotDone(SqlInboxStore):
    """Counts the age of a message from its arrival."""

    async def delete_processed(self, consumer, older_than_seconds, limit, sweep=None):
        waiting, now = await waiting_in(self, consumer)
        old = [m for m in waiting if m.received_at <= now - older_than_seconds]
        for message in old:
            await say(self, "DELETE FROM inbox_message WHERE place = :place", place=message.place)
        right = await super().delete_processed(consumer, older_than_seconds, limit, sweep)
        return len(old) + right


class TriesWhatIsErased(SqlInboxStore):
    """Hands a message without its payload to the handler."""

    async def erase(self, **meant):
        erased = await super().erase(**meant)
        await say(self, "UPDATE inbox_message SET due_at = received_at, processed_at = NULL")
        return erased


class KeepsTheError(SqlInboxStore):
    """Leaves what an exception quoted of the payload."""

    async def erase(self, *, message_id=None, key=None, consumer=None):
        asked = "SELECT error, message_id FROM inbox_message"
        before = (await say(self, asked)).all()
        erased = await super().erase(message_id=message_id, key=key, consumer=consumer)
        for error, id in before:
            change = "UPDATE inbox_message SET error = :error WHERE message_id = :id"
            await say(self, change, error=error, id=id)
        return erased


class KeepsALateError(SqlInboxStore):
    """Writes the words of an attempt that fails after the erasing."""

    async def settle(self, consumer, message_ids):
        await super().settle(consumer, message_ids)
        for message_id in message_ids:
            change = "UPDATE inbox_message SET error = 'NO_STOCK' WHERE message_id = :id"
            await say(self, change, id=message_id)


CONVICTED_BY = {
    DeletesRanges: "test_exactly_the_named_entries_are_deleted",
    ForgetsTheEpoch: "test_a_leader_that_was_replaced_deletes_parks_and_counts_nothing",
    ChecksTheLeaseInstead: "test_whoever_was_not_replaced_leads_on_after_the_lease",
    TakesLiveLeases: "test_nobody_else_leads_while_the_lease_lives",
    KeepsTheEpoch: "test_an_expired_lease_is_taken_with_the_next_epoch",
    DoesNotRenew: "test_leading_again_prolongs_the_lease",
    TakesAnEmptyDeleteForALoss: "test_deleting_what_is_gone_already_is_no_lost_leadership",
    ReadsWhatIsParked: "test_a_parked_entry_is_listed_with_its_reason_and_no_longer_read",
    ReplacesKnownIds: "test_an_entry_that_is_there_already_is_left_as_it_is",
    LosesAnotherMessage: "test_another_message_under_an_id_that_is_there_is_refused",
    MixesOutboxes: "test_outboxes_never_see_one_another",
    SendsWhatIsErased: "test_an_erased_entry_is_parked_and_never_sent",
    KeepsTheBrokersWords: "test_what_the_broker_says_of_an_erased_entry_is_not_kept",
    WaitsForWhatIsErased: "test_nothing_waits_behind_an_erased_entry",
    GivesPlacesAgain: "test_what_was_deleted_may_be_written_again_at_a_place_of_its_own",
    DropsWhatWaits: "test_operators_touch_only_what_is_parked_in_the_outbox_they_name",
    WritesPastTheTransaction: "test_what_a_transaction_takes_back_was_never_there",
    StoresTwice: "test_a_message_is_stored_once_for_each_consumer",
    SettlesWithoutAClaim: "test_a_message_without_a_claim_is_never_settled",
    ProcessesWhatFailed: "test_a_settled_message_has_what_its_claim_shows",
    ForgetsWhatWaited: "test_what_becomes_later_of_a_settled_message_is_written_too",
    FailsWhatIsDone: "test_a_failure_never_overwrites_what_is_processed",
    DeletesWhatIsNotDone: "test_only_messages_that_were_processed_long_ago_are_deleted",
    TriesWhatIsErased: "test_an_erased_message_has_no_payload_and_is_not_tried",
    KeepsTheError: "test_an_erased_message_without_a_dead_letter_is_closed",
    KeepsALateError: "test_an_erased_message_without_a_dead_letter_is_closed",
}


class Replacing:
    """A database whose outbox or inbox is another one."""

    def __init__(self, database, store):
        self._database = database
        self._store = store
        self.classification = database.classification

    @asynccontextmanager
    async def begin(self):
        async with self._database.begin() as unit:
            name = "outbox" if issubclass(self._store, SqlOutboxStore) else "inbox"
            setattr(unit, name, self._store(unit.session))
            yield unit


def violations(store, rules=None):
    """Run these rules of the store's contract, or all; return those that fail."""
    contract = OutboxContract if issubclass(store, SqlOutboxStore) else InboxContract

    class Bound(contract):
        @asynccontextmanager
        async def world(self):
            async with memory_world() as world:
                database = Replacing(world.database, store)
                yield DatabaseWorld(database, world.age, world.waits_for_locks)

    broken = set()
    for name in rules or dir(Bound):
        if name.startswith("test_"):
            try:
                getattr(Bound(), name)()
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - all are convictions
                broken.add(name)
    return broken


@pytest.mark.parametrize("store", [SqlOutboxStore, SqlInboxStore])
def test_a_right_store_is_not_convicted(store):
    assert violations(store) == set()


@pytest.mark.parametrize("broken", CONVICTED_BY, ids=lambda broken: broken.__name__)
def test_a_broken_store_is_convicted_by_the_rule_it_breaks(broken):
    assert violations(broken, [CONVICTED_BY[broken]])
