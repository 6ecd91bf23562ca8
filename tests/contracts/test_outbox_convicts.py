"""The contracts of outbox and inbox convict stores that are broken on purpose, one per rule."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from semel.memory.inbox import MemoryInboxStore
from semel.memory.outbox import MemoryOutboxStore, _Lease
from semel.messaging.send.outbox import Leadership, LeadershipLost
from semel.testing.contracts.messaging_world import DatabaseWorld
from tests.messaging.worlds import memory_world
from tests.stores.inbox import InboxContract
from tests.stores.outbox import OutboxContract


class DeletesRanges(MemoryOutboxStore):
    """Deletes everything between the first and the last place: unsent entries, too."""

    async def delete(self, leadership, places):
        if not places:
            return await super().delete(leadership, places)
        return await super().delete(leadership, range(min(places), max(places) + 1))


class ForgetsTheEpoch(MemoryOutboxStore):
    """Deletes for whoever asks."""

    def _check(self, leadership):
        pass


class ChecksTheLeaseInstead(MemoryOutboxStore):
    """Refuses a leader whose lease ran out, though nobody replaced it."""

    def _check(self, leadership):
        super()._check(leadership)
        if self._leases.get(leadership.outbox).until <= self._tables.clock.now():
            raise LeadershipLost(leadership.outbox, leadership.epoch)


class TakesLiveLeases(MemoryOutboxStore):
    """Never waits for another leader."""

    async def lead(self, outbox, owner, seconds, *, instead_of=""):
        held = self._leases.get(outbox) or _Lease()
        return await super().lead(outbox, owner, seconds, instead_of=held.owner)


class KeepsTheEpoch(MemoryOutboxStore):
    """Gives every leader the same number."""

    async def lead(self, outbox, owner, seconds, *, instead_of=""):
        if await super().lead(outbox, owner, seconds, instead_of=instead_of) is None:
            return None
        self._leases.put(outbox, replace(self._leases.get(outbox), epoch=1))
        return Leadership(outbox, owner, 1)


class DoesNotRenew(MemoryOutboxStore):
    """Answers a leader that it still leads, and lets its lease run out."""

    async def lead(self, outbox, owner, seconds, *, instead_of=""):
        held = self._leases.get(outbox)
        if held is not None and held.owner == owner:
            return Leadership(outbox, owner, held.epoch)
        return await super().lead(outbox, owner, seconds, instead_of=instead_of)


class TakesAnEmptyDeleteForALoss(MemoryOutboxStore):
    """Concludes from nothing deleted that somebody else leads."""

    async def delete(self, leadership, places):
        deleted = await super().delete(leadership, places)
        if deleted == 0:
            raise LeadershipLost(leadership.outbox, leadership.epoch)
        return deleted


class ReadsWhatIsParked(MemoryOutboxStore):
    """Sends parked entries again and again."""

    async def read(self, outbox, after_place, limit):
        return [e for e in self._of(outbox) if e.place > after_place][:limit]


class ReplacesKnownIds(MemoryOutboxStore):
    """Lets a second handling overwrite what the first one wrote."""

    async def add(self, entries):
        await super().add(entries)
        for entry in entries:
            place = self._places.get((entry.outbox, entry.message_id))
            self._entries.put(place, self._entries.get(place)._replace(headers=entry.headers))


class LosesAnotherMessage(MemoryOutboxStore):
    """Takes every entry with a known id for a repetition."""

    def _meet(self, there, new):
        pass


class MixesOutboxes(MemoryOutboxStore):
    """Keeps all outboxes together."""

    def _of(self, outbox):
        return self._all()


class SendsWhatIsErased(MemoryOutboxStore):
    """Leaves an erased entry to be sent without its value."""

    async def erase(self, *, message_id=None, key=None):
        erased = await super().erase(message_id=message_id, key=key)
        for entry in self._all():
            if entry.erased_at is not None:
                self._entries.put(entry.place, entry._replace(parked_reason=""))
        return erased


class KeepsTheBrokersWords(MemoryOutboxStore):
    """Lets what the broker said stand, whoever was erased meanwhile."""

    async def park(self, leadership, place, reason):
        self._change(leadership.outbox, place, parked_reason=reason)


class WaitsForWhatIsErased(MemoryOutboxStore):
    """Holds a key behind a message that nobody will ever send."""

    async def parked_keys(self, outbox):
        aside = await self.parked(outbox, 1000)
        return frozenset((e.topic, e.key) for e in aside if e.key is not None)


class GivesPlacesAgain(MemoryOutboxStore):
    """Counts places from the entries that are left."""

    async def add(self, entries):
        self._tables._numbers["outbox_message"] = max((e.place for e in self._all()), default=0)
        await super().add(entries)


class DropsWhatWaits(MemoryOutboxStore):
    """Takes entries out that nobody has set aside."""

    def _parked(self, outbox, message_id):
        place = self._places.get((outbox, message_id))
        return None if place is None else self._entries.get(place)


class WritesPastTheTransaction(MemoryOutboxStore):
    """Keeps entries of transactions that are taken back."""

    async def add(self, entries):
        await super().add(entries)
        self._tables.journal.forget()


class StoresTwice(MemoryInboxStore):
    """Overwrites a message that is there."""

    async def store(self, message):
        stored = await super().store(message)
        if not stored:
            known = self._messages.get((message.consumer, message.message_id))
            self._put(replace(known, payload=message.payload, processed_at=None))
        return True


class TakesWholeKeys(MemoryInboxStore):
    """Takes the second message of a key together with the first."""

    async def take_due(self, consumer, limit):
        now = self._tables.clock.now()
        waiting = [m for m in self._of(consumer) if m.processed_at is None]
        return [m for m in waiting if m.due_at is not None and m.due_at <= now][:limit]


class OvertakesWhoeverWaits(MemoryInboxStore):
    """Goes on with a key whose first message waits for its next attempt."""

    async def take_due(self, consumer, limit):
        now = self._tables.clock.now()
        keys, due = set(), []
        for message in self._of(consumer):
            is_due = message.due_at is not None and message.due_at <= now
            if message.processed_at is None and is_due and message.key not in keys:
                due.append(message)
                keys |= {message.key} - {None}
        return due[:limit]


class WaitsForTheDead(MemoryInboxStore):
    """Holds a key for ever behind a message that is not tried any more."""

    async def take_due(self, consumer, limit):
        dead = {m.key for m in self._of(consumer) if m.due_at is None}
        return [m for m in await super().take_due(consumer, limit) if m.key not in dead]


class FailsWhatIsDone(MemoryInboxStore):
    """Lets a late failure bring a processed message back."""

    async def failed(self, consumer, message_id, error, delay_seconds):
        known = self._messages.get((consumer, message_id))
        self._put(replace(known, processed_at=None))
        return await super().failed(consumer, message_id, error, delay_seconds)


class DeletesWhatIsNotDone(MemoryInboxStore):
    """Counts the age of a message from its arrival."""

    async def delete_processed(self, consumer, older_than_seconds, limit, sweep=None):
        before = self._tables.clock.now() - older_than_seconds
        old = [m for m in self._of(consumer) if m.received_at <= before][:limit]
        for message in old:
            self._messages.remove((consumer, message.message_id))
        return len(old)


class TriesWhatIsErased(MemoryInboxStore):
    """Hands a message without its payload to the handler."""

    async def erase(self, *, message_id=None, key=None):
        erased = await super().erase(message_id=message_id, key=key)
        for message in self._messages.rows():
            self._put(replace(message, due_at=message.due_at or message.received_at))
        return erased


class KeepsTheError(MemoryInboxStore):
    """Leaves what an exception quoted of the payload."""

    async def erase(self, *, message_id=None, key=None):
        before = self._messages.rows()
        erased = await super().erase(message_id=message_id, key=key)
        for message in before:
            now = await self.get(message.consumer, message.message_id)
            self._put(replace(now, error=message.error))
        return erased


class KeepsALateError(MemoryInboxStore):
    """Writes the words of an attempt that fails after the erasing."""

    async def failed(self, consumer, message_id, error, delay_seconds):
        attempts = await super().failed(consumer, message_id, error, delay_seconds)
        found = await self.get(consumer, message_id)
        self._put(replace(found, error=error))
        return attempts


class KeepsWhatIsWithdrawn(MemoryInboxStore):
    """Lets workers handle what somebody else has handled."""

    async def withdraw(self, consumer, message_id):
        await self.failed(consumer, message_id, "withdrawn", None)


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
    TakesWholeKeys: "test_of_each_key_only_the_first_is_taken",
    OvertakesWhoeverWaits: "test_a_message_that_waits_for_its_next_attempt_holds_back_its_key",
    WaitsForTheDead: "test_a_message_that_is_not_tried_any_more_stays_and_lets_its_key_go",
    FailsWhatIsDone: "test_a_failure_never_overwrites_what_is_processed",
    DeletesWhatIsNotDone: "test_only_messages_that_were_processed_long_ago_are_deleted",
    TriesWhatIsErased: "test_an_erased_message_has_no_payload_and_is_not_tried",
    KeepsTheError: "test_an_erased_message_without_a_dead_letter_is_closed",
    KeepsALateError: "test_an_erased_message_without_a_dead_letter_is_closed",
    KeepsWhatIsWithdrawn: "test_what_is_withdrawn_was_never_there",
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
            name = "outbox" if issubclass(self._store, MemoryOutboxStore) else "inbox"
            setattr(unit, name, self._store(unit.tables))
            yield unit


def violations(store):
    """Run the store's contract; return the tests that fail."""
    contract = OutboxContract if issubclass(store, MemoryOutboxStore) else InboxContract

    class Bound(contract):
        @asynccontextmanager
        async def world(self):
            async with memory_world() as world:
                database = Replacing(world.database, store)
                yield DatabaseWorld(database, world.age, world.waits_for_locks)

    broken = set()
    for name in dir(Bound):
        if name.startswith("test_"):
            try:
                getattr(Bound(), name)()
            except pytest.skip.Exception:
                continue
            except (Exception, pytest.fail.Exception):  # noqa: BLE001 - all are convictions
                broken.add(name)
    return broken


@pytest.mark.parametrize("store", [MemoryOutboxStore, MemoryInboxStore])
def test_a_right_store_is_not_convicted(store):
    assert violations(store) == set()


@pytest.mark.parametrize("broken", CONVICTED_BY, ids=lambda broken: broken.__name__)
def test_a_broken_store_is_convicted_by_the_rule_it_breaks(broken):
    assert CONVICTED_BY[broken] in violations(broken)
