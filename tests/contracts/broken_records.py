"""Trails and records that are broken on purpose, and the rule that each breaks."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

from sqlalchemy import insert, select

from semel.messaging.records import LATEST_KEPT
from semel.operate.stores import FIRST_HASH, ApprovalDecision, AuditEntry, hash_of, recorded
from semel.sql import operators as audit_sql
from semel.sql.deadletters import THIN_OUT, SqlFailedAttempts
from semel.sql.operators import SqlApprovals, SqlAuditTrail, SqlRevisions
from semel.sql.tables import approval, audit_entry
from semel.sql.types import to_seconds
from tests.contracts.sabotage import say

NUMBERS = count(1)


async def _written(trail, number, act, previous):
    """Write an entry as the right trail does, and leave the head alone."""
    if (await trail._run(audit_sql.HEAD)).first() is None:
        await trail._run(audit_sql.MAKE_HEAD)
    now = (await trail._run(audit_sql.LOCK_HEAD)).one().now
    act, at = recorded(act), to_seconds(now)
    entry = AuditEntry(number, at, act, previous, hash_of(number, at, act, previous))
    await trail._run(insert(audit_entry).values(audit_sql._values(entry)))
    return entry


class DoesNotChain(SqlAuditTrail):
    """Hashes every entry by itself."""

    async def append(self, act):
        number = (await say(self, "SELECT count(*) FROM audit_entry")).scalar_one() + 1
        entry = await _written(self, number, act, FIRST_HASH)
        await say(self, "UPDATE audit_head SET number = :n, hash = :h", n=number, h=entry.hash)
        return entry


class NumbersBySequence(SqlAuditTrail):
    """Leaves a hole where a transaction was rolled back."""

    async def append(self, act):
        entry = await super().append(act)
        moved = replace(entry, number=1_000 + next(NUMBERS))
        change = "UPDATE audit_entry SET number = :new WHERE number = :old"
        await say(self, change, new=moved.number, old=entry.number)
        return moved


class LeavesTheHead(SqlAuditTrail):
    """Finds the end of the chain by looking at the entries."""

    async def head(self):
        return (0, FIRST_HASH)

    async def append(self, act):
        last = (await self.read(0, 1_000))[-1:]
        number, previous = (last[0].number, last[0].hash) if last else (0, FIRST_HASH)
        return await _written(self, number + 1, act, previous)


class FindsEveryConsumersEntries(SqlAuditTrail):
    """Takes the message id for enough."""

    async def about(self, consumer, message_id):
        return [e for e in await self.read(0, 1_000) if e.act.message_id == message_id]


class NumbersFromOne(SqlRevisions):
    """Takes the original for nothing special."""

    async def add(self, revision):
        written = await super().add(revision)
        await say(
            self,
            "UPDATE message_revision SET number = number + 1"
            " WHERE number = :n AND message_id = :id",
            n=written.number,
            id=written.message_id,
        )
        return replace(written, number=written.number + 1)


class ForgetsWhereItComesFrom(SqlRevisions):
    """Finds the new name of a message, and not the old one."""

    async def other_names(self, message_id):
        asked = "SELECT new_id FROM message_revision WHERE message_id = :id AND new_id IS NOT NULL"
        return frozenset((await say(self, asked, id=message_id)).scalars())


class ChangesItsMind(SqlApprovals):
    """Lets the last decision count."""

    async def decide(self, number, decided_by, decision):
        again = "UPDATE approval SET decision = :open WHERE number = :n"
        await say(self, again, open=ApprovalDecision.OPEN.value, n=number)
        return await super().decide(number, decided_by, decision)


class ListsTheDecided(SqlApprovals):
    """Shows requests that are over."""

    async def open_ones(self, consumer, limit):
        everything = await self._read(select(approval))
        return [one for one in everything if consumer in (None, one.consumer)][:limit]


class KeepsEveryAttempt(SqlFailedAttempts):
    """Fills the disk with a message that is tried for ever."""

    async def _run(self, statement, values=None):
        if statement is not THIN_OUT:
            return await super()._run(statement, values)
        return None


class KeepsTheLatestAlone(SqlFailedAttempts):
    """Forgets how a long trouble began."""

    async def add(self, attempt):
        await super().add(attempt)
        latest = f"SELECT place FROM failed_attempt ORDER BY place DESC LIMIT {LATEST_KEPT}"
        await say(self, f"DELETE FROM failed_attempt WHERE place NOT IN ({latest})")


class KeepsOneOfEachNumber(SqlFailedAttempts):
    """Lets the attempts of a message that was sent back replace the earlier ones."""

    async def add(self, attempt):
        await say(self, "DELETE FROM failed_attempt WHERE number = :n", n=attempt.number)
        await super().add(attempt)


class DeletesByAgeAlone(SqlFailedAttempts):
    """Takes the attempts from messages that are still there."""

    async def delete_gone(self, consumer, ttl_seconds, limit, sweep=None):
        return (await say(self, "DELETE FROM failed_attempt")).rowcount


class ErasesAttemptsByDeleting(SqlFailedAttempts):
    """Takes time and code away with the reason."""

    async def erase(self, which):
        return (await say(self, "DELETE FROM failed_attempt")).rowcount


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
