"""Trails and records that are broken on purpose, and the rule that each breaks."""

from __future__ import annotations

from dataclasses import replace

from semel.memory.approvals import MemoryApprovals
from semel.memory.attempts import MemoryFailedAttempts
from semel.memory.audit import MemoryAuditTrail
from semel.memory.revisions import MemoryRevisions
from semel.messaging.records import LATEST_KEPT, AttemptFilter
from semel.operate.stores import FIRST_HASH, AuditEntry, Decision, hash_of, recorded


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
