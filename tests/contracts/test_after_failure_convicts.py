"""The contracts convict stores that are broken on purpose, each by the rule it breaks."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from sqlalchemy.exc import IntegrityError

from semel.memory.approvals import MemoryApprovals
from semel.memory.attempts import MemoryFailedAttempts
from semel.memory.audit import MemoryAuditTrail
from semel.memory.database import MemoryDatabase
from semel.memory.deadletters import MemoryDeadLetters
from semel.memory.revisions import MemoryRevisions
from semel.memory.waiting import MemoryWaitingRoom
from semel.messaging.approvals import Decision
from semel.messaging.attempts import LATEST_KEPT, AttemptFilter
from semel.messaging.audit import FIRST_HASH, AuditEntry, hash_of, recorded
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.waiting import WaitingFilter, Waits
from semel.sqlalchemy import audit as audit_sql
from semel.sqlalchemy import waiting_statements as waiting_sql
from semel.sqlalchemy.audit import SqlAuditTrail
from semel.sqlalchemy.database import SqlDatabase
from semel.sqlalchemy.waiting import SqlWaitingRoom
from semel.testing.contracts import (
    ApprovalsContract,
    AttemptsContract,
    AuditContract,
    DeadLettersContract,
    RevisionsContract,
    WaitingContract,
)
from tests.messaging.worlds import memory_world, postgres_world


class ForgetsTheBeginning(MemoryDeadLetters):
    """Lets the last failure replace the first."""

    async def put(self, letter):
        await self.remove(letter.consumer, letter.message_id)
        await super().put(letter)


class MixesConsumers(MemoryDeadLetters):
    """Keeps one letter per message id."""

    async def put(self, letter):
        for other in await self.find(DeadLetterFilter(message_id=letter.message_id), 10):
            await self.remove(other.consumer, other.message_id)
        await super().put(letter)


class BringsBackTheErased(MemoryDeadLetters):
    """Writes the payload again with the next failure."""

    async def put(self, letter):
        await super().put(letter)
        found = await self.get(letter.consumer, letter.message_id)
        self._put(replace(found, payload=letter.payload, headers=letter.headers))


class PagesByTimeAlone(MemoryDeadLetters):
    """Leaves out letters that failed at the same time as the last one of a page."""

    async def find(self, which, limit):
        found = await super().find(replace(which, after=None), 1000)
        after = which.after
        return [x for x in found if after is None or x.first_failed_at > after[0]][:limit]


class ErasesByDeleting(MemoryDeadLetters):
    """Takes hash and reason away with the payload."""

    async def erase(self, which):
        found = await self.find(which, 1000)
        for letter in found:
            await self.remove(letter.consumer, letter.message_id)
        return len(found)


class KeepsWhatALateFailureSays(MemoryDeadLetters):
    """Writes the reason of a failure that comes after the erasing."""

    async def put(self, letter):
        await super().put(letter)
        found = await self.get(letter.consumer, letter.message_id)
        self._put(replace(found, reason=letter.reason))


class KeepsTheReason(MemoryDeadLetters):
    """Erases the payload, and leaves what an exception quoted of it."""

    async def erase(self, which):
        before = await self.find(which, 1000)
        count = await super().erase(which)
        for letter in before:
            now = await self.get(letter.consumer, letter.message_id)
            self._put(replace(now, reason=letter.reason))
        return count


class LetsTheQueuePass(MemoryWaitingRoom):
    """Does not look who stands before."""

    def _whose_turn(self, consumer):
        return (w for w in self._in_order() if w.waits is not Waits.PARKED)


class HandsOutTheParked(MemoryWaitingRoom):
    """Takes a parked message for one that is due."""

    async def take_due(self, consumer, limit):
        parked = await self.find(WaitingFilter(consumer, waits=Waits.PARKED), limit)
        return [*parked, *await super().take_due(consumer, limit)][:limit]


class SendsFailuresToTheEnd(MemoryWaitingRoom):
    """Gives a message that failed again a new place."""

    async def put(self, waiting, delay_seconds=0.0):
        await self.remove(waiting.consumer, waiting.message_id)
        await super().put(waiting, delay_seconds)


class TakesTheDeliveredPayload(MemoryWaitingRoom):
    """Lets a repeated delivery replace what a person has revised."""

    async def put(self, waiting, delay_seconds=0.0):
        await super().put(waiting, delay_seconds)
        found = await self.get(waiting.consumer, waiting.message_id)
        self._put(replace(found, payload=waiting.payload))


class HoldsWhileParkedOnly(MemoryWaitingRoom):
    """Lets later messages pass one that waits for its time."""

    async def hold(self, consumer, keys):
        parked = await self.find(WaitingFilter(consumer, waits=Waits.PARKED), 1000)
        return frozenset(keys) & {waiting.key for waiting in parked}


class TakesTheWholeKey(MemoryWaitingRoom):
    """Hands out a key's queue at once."""

    async def take_due(self, consumer, limit):
        first = await super().take_due(consumer, limit)
        keys = {waiting.key for waiting in first}
        return [waiting for waiting in self._held(consumer) if waiting.key in keys][:limit]


class RevisesAtTheEnd(MemoryWaitingRoom):
    """Puts what was revised behind the messages that came later."""

    async def revise(self, consumer, message_id, payload, payload_hash, new_id):
        before = await self.get(consumer, message_id)
        if not await super().revise(consumer, message_id, payload, payload_hash, new_id):
            return False
        await self.remove(consumer, new_id)
        await self.put(
            replace(before, message_id=new_id, payload=payload, payload_hash=payload_hash)
        )
        return True


class RetriesTheErased(MemoryWaitingRoom):
    """Removes the payload and goes on as if it were there."""

    async def erase(self, which):
        before = await self.find(which, 1000)
        count = await super().erase(which)
        for waiting in before:
            now = await self.get(waiting.consumer, waiting.message_id)
            self._put(replace(now, waits=waiting.waits))
        return count


class SaysWhyTheErasedWaited(MemoryWaitingRoom):
    """Erases the payload, and leaves what an exception quoted of it."""

    async def erase(self, which):
        before = await self.find(which, 1000)
        count = await super().erase(which)
        for waiting in before:
            now = await self.get(waiting.consumer, waiting.message_id)
            self._put(replace(now, reason=waiting.reason))
        return count


class DoesNotChain(MemoryAuditTrail):
    """Hashes every entry by itself."""

    async def append(self, act):
        act, at = recorded(act), self._tables.clock.now()
        number = len(self._entries) + 1
        entry = AuditEntry(number, at, act, FIRST_HASH, hash_of(number, at, act, FIRST_HASH))
        self._entries.put(number, entry)
        self._head.put(1, (number, entry.hash))
        return entry


class NumbersBySequence(MemoryAuditTrail):
    """Leaves a hole where a transaction was rolled back."""

    async def append(self, act):
        entry = await super().append(act)
        self._entries.remove(entry.number)
        moved = replace(entry, number=self._tables.next_number("audit_entry"))
        self._entries.put(moved.number, moved)
        return moved


class LeavesTheHead(MemoryAuditTrail):
    """Finds the end of the chain by looking at the entries."""

    async def head(self):
        return (0, FIRST_HASH)

    async def append(self, act):
        last = self._in_order()[-1:]
        number, previous = (last[0].number, last[0].hash) if last else (0, FIRST_HASH)
        act, at = recorded(act), self._tables.clock.now()
        made = hash_of(number + 1, at, act, previous)
        self._entries.put(number + 1, AuditEntry(number + 1, at, act, previous, made))
        return self._entries.get(number + 1)


class FindsEveryConsumersEntries(MemoryAuditTrail):
    """Takes the message id for enough."""

    async def about(self, consumer, message_id):
        return [e for e in self._in_order() if e.act.message_id == message_id]


class NumbersFromOne(MemoryRevisions):
    """Takes the original for nothing special."""

    async def add(self, revision):
        written = await super().add(revision)
        self._revisions.remove((written.consumer, written.message_id, written.number))
        moved = replace(written, number=written.number + 1)
        self._put(moved)
        return moved


class ForgetsWhereItComesFrom(MemoryRevisions):
    """Finds the new name of a message, and not the old one."""

    async def other_names(self, message_id):
        found = [r for r in self._revisions.rows() if r.message_id == message_id]
        return frozenset(r.new_id for r in found if r.new_id)


class ChangesItsMind(MemoryApprovals):
    """Lets the last decision count."""

    async def decide(self, number, decided_by, decision):
        request = self._requests.get(number)
        if request is not None:
            self._requests.put(number, replace(request, decision=Decision.OPEN))
        return await super().decide(number, decided_by, decision)


class ListsTheDecided(MemoryApprovals):
    """Shows requests that are over."""

    async def open_ones(self, consumer, limit):
        return [r for r in self._in_order() if consumer in (None, r.consumer)][:limit]


class KeepsEveryAttempt(MemoryFailedAttempts):
    """Fills the disk with a message that is tried for ever."""

    async def add(self, attempt):
        at = attempt.at or self._tables.clock.now()
        self._attempts.put(self._tables.next_number("failed_attempt"), replace(attempt, at=at))


class KeepsTheLatestAlone(MemoryFailedAttempts):
    """Forgets how a long trouble began."""

    async def add(self, attempt):
        await super().add(attempt)
        mine = self._matching(AttemptFilter(attempt.consumer, attempt.message_id))
        for place, _ in mine[:-LATEST_KEPT]:
            self._attempts.remove(place)


class KeepsOneOfEachNumber(MemoryFailedAttempts):
    """Lets the attempts of a message that was sent back replace the earlier ones."""

    async def add(self, attempt):
        mine = self._matching(AttemptFilter(attempt.consumer, attempt.message_id))
        for place, known in mine:
            if known.number == attempt.number:
                self._attempts.remove(place)
        await super().add(attempt)


class DeletesByAgeAlone(MemoryFailedAttempts):
    """Takes the attempts from messages that are still there."""

    async def delete_gone(self, consumer, ttl_seconds, limit, sweep=None):
        until = self._tables.clock.now() - ttl_seconds
        mine = self._matching(AttemptFilter(consumer))
        old = [place for place, attempt in mine if attempt.at <= until][:limit]
        return sum(self._attempts.remove(place) for place in old)


class ErasesAttemptsByDeleting(MemoryFailedAttempts):
    """Takes time and code away with the reason."""

    async def erase(self, which):
        return sum(self._attempts.remove(place) for place, _ in self._matching(which))


LETTERS_CONVICTED_BY = {
    ForgetsTheBeginning: "test_a_later_failure_says_anew_why_and_keeps_the_beginning",
    MixesConsumers: "test_each_consumer_has_letters_of_its_own",
    BringsBackTheErased: "test_a_new_failure_does_not_bring_back_what_was_erased",
    PagesByTimeAlone: "test_pages_go_on_where_the_last_one_ended",
    ErasesByDeleting: "test_erasing_takes_the_reason_and_leaves_hashes_and_codes",
    KeepsTheReason: "test_erasing_takes_the_reason_and_leaves_hashes_and_codes",
    KeepsWhatALateFailureSays: "test_a_new_failure_does_not_bring_back_what_was_erased",
}
ROOMS_CONVICTED_BY = {
    LetsTheQueuePass: "test_nothing_passes_a_parked_message_of_its_key",
    HandsOutTheParked: "test_what_is_parked_is_never_due",
    SendsFailuresToTheEnd: "test_a_message_that_fails_on_its_turn_keeps_its_place",
    TakesTheDeliveredPayload: "test_an_update_says_anew_why_it_waits_and_keeps_the_rest",
    HoldsWhileParkedOnly: "test_a_key_is_held_as_long_as_a_message_of_it_waits",
    TakesTheWholeKey: "test_messages_of_a_key_leave_in_the_order_they_came",
    RevisesAtTheEnd: "test_a_revision_keeps_the_place_in_the_queue",
    RetriesTheErased: "test_what_was_erased_is_never_due_again",
    SaysWhyTheErasedWaited: "test_erasing_takes_the_reason_and_leaves_hashes_and_codes",
}
TRAILS_CONVICTED_BY = {
    DoesNotChain: "test_each_entry_carries_the_hash_of_the_one_before",
    NumbersBySequence: "test_an_act_and_its_entry_are_durable_together",
    LeavesTheHead: "test_the_head_is_the_last_entry",
    FindsEveryConsumersEntries: "test_the_entries_about_a_message_are_found",
}
REVISIONS_CONVICTED_BY = {
    NumbersFromOne: "test_revisions_are_numbered_from_the_original_on",
    ForgetsWhereItComesFrom: "test_the_names_of_a_message_are_found_in_both_directions",
}
APPROVALS_CONVICTED_BY = {
    ChangesItsMind: "test_a_decision_is_never_changed",
    ListsTheDecided: "test_open_requests_are_listed_oldest_first",
}
ATTEMPTS_CONVICTED_BY = {
    KeepsEveryAttempt: "test_of_very_many_the_first_and_the_latest_stay",
    KeepsTheLatestAlone: "test_of_very_many_the_first_and_the_latest_stay",
    KeepsOneOfEachNumber: "test_a_number_that_comes_again_is_another_attempt",
    DeletesByAgeAlone: "test_attempts_stay_while_anything_else_of_their_message_does",
    ErasesAttemptsByDeleting: "test_erasing_takes_the_reason_and_leaves_the_code",
}
IN_MEMORY = [
    *((DeadLettersContract, "dead_letters", *one) for one in LETTERS_CONVICTED_BY.items()),
    *((WaitingContract, "waiting", *one) for one in ROOMS_CONVICTED_BY.items()),
    *((AuditContract, "audit", *one) for one in TRAILS_CONVICTED_BY.items()),
    *((RevisionsContract, "revisions", *one) for one in REVISIONS_CONVICTED_BY.items()),
    *((AttemptsContract, "attempts", *one) for one in ATTEMPTS_CONVICTED_BY.items()),
    *((ApprovalsContract, "approvals", *one) for one in APPROVALS_CONVICTED_BY.items()),
]


@pytest.mark.parametrize(
    ("contract", "store", "broken", "rule"), IN_MEMORY, ids=[one[2].__name__ for one in IN_MEMORY]
)
def test_a_broken_store_is_convicted_by_the_rule_it_breaks(
    contract, store, broken, rule, monkeypatch
):
    use(monkeypatch, MemoryDatabase, store, lambda unit: broken(unit.tables))

    class Bound(contract):
        def world(self):
            return memory_world()

    with pytest.raises(AssertionError):
        getattr(Bound(), rule)()


class AsksWithoutLocking(SqlWaitingRoom):
    """Says which keys are held, and lets others begin to hold them."""

    async def _lock(self, consumer, names):
        return


class TakesWithoutLocking(SqlWaitingRoom):
    """Leaves what it took to the next worker as well."""

    async def take_due(self, consumer, limit):
        unlocked = waiting_sql.WHOSE_TURN.order_by(waiting_sql.waiting_message.c.place)
        rows = (await self._run(unlocked.limit(limit), {"by": consumer})).all()
        return [await self.get(row.consumer, row.message_id) for row in rows]


class AppendsWithoutLocking(SqlAuditTrail):
    """Reads the head, and writes behind it whatever others have written meanwhile."""

    async def _run(self, statement):
        return await super()._run(audit_sql.HEAD if statement is audit_sql.LOCK_HEAD else statement)


IN_POSTGRES = [
    (
        WaitingContract,
        "waiting",
        AsksWithoutLocking,
        "test_whoever_asks_for_a_key_waits_for_a_parking_that_commits",
    ),
    (
        WaitingContract,
        "waiting",
        AsksWithoutLocking,
        "test_a_parking_waits_for_whoever_has_asked_for_its_key",
    ),
    (
        WaitingContract,
        "waiting",
        TakesWithoutLocking,
        "test_what_one_worker_has_taken_another_does_not_get",
    ),
    (AuditContract, "audit", AppendsWithoutLocking, "test_appends_at_once_form_one_chain"),
]


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("contract", "store", "broken", "rule"),
    IN_POSTGRES,
    ids=[f"{one[2].__name__}-{one[3]}" for one in IN_POSTGRES],
)
def test_a_store_that_does_not_lock_is_convicted(
    contract, store, broken, rule, monkeypatch, quick_postgres_server
):
    use(monkeypatch, SqlDatabase, store, lambda unit: broken(unit.session))

    class Bound(contract):
        def world(self):
            return postgres_world(quick_postgres_server)

    def try_often():
        for _ in range(5):
            getattr(Bound(), rule)()

    # The database may be the judge.  A race that is not lost at once is lost soon.
    with pytest.raises((AssertionError, IntegrityError)):
        try_often()


def use(monkeypatch, database, store, made):
    """Let every unit of *database* have another store."""
    right = database.begin

    @asynccontextmanager
    async def begin(self):
        async with right(self) as unit:
            setattr(unit, store, made(unit))
            yield unit

    monkeypatch.setattr(database, "begin", begin)
