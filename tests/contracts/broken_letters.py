"""Dead letters and waiting rooms that are broken on purpose, and the rule that each breaks."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import update

from semel.messaging.records import DeadLetterFilter, WaitingFilter, Waits
from semel.sql.deadletters import SqlDeadLetters
from semel.sql.store import values_of
from semel.sql.tables import dead_letter
from semel.sql.waiting import SqlWaitingStore
from tests.contracts.sabotage import say, say_of


async def overwrite(store, letter, *columns):
    """Write these columns of a letter, whatever is there."""
    here = (
        dead_letter.c.consumer == letter.consumer,
        dead_letter.c.message_id == letter.message_id,
    )
    values = {name: values_of(dead_letter, letter)[name] for name in columns}
    await store._session.execute(update(dead_letter).where(*here).values(values))


class ForgetsTheBeginning(SqlDeadLetters):
    """Lets the last failure replace the first."""

    async def put(self, letter):
        await self.remove(letter.consumer, letter.message_id)
        await super().put(letter)


class MixesConsumers(SqlDeadLetters):
    """Keeps one letter per message id."""

    async def put(self, letter):
        for other in await self.find(DeadLetterFilter(message_id=letter.message_id), 10):
            await self.remove(other.consumer, other.message_id)
        await super().put(letter)


class BringsBackTheErased(SqlDeadLetters):
    """Writes the payload again with the next failure."""

    async def put(self, letter):
        await super().put(letter)
        await overwrite(self, letter, "payload", "headers")


class SaysThatAllAreNew(SqlDeadLetters):
    """Does not tell a first failure from a later one."""

    async def put(self, letter):
        await super().put(letter)
        return True


class PagesByTimeAlone(SqlDeadLetters):
    """Leaves out letters that failed at the same time as the last one of a page."""

    async def find(self, which, limit):
        found = await super().find(replace(which, after=None), 1000)
        after = which.after
        return [x for x in found if after is None or x.first_failed_at > after[0]][:limit]


class ErasesByDeleting(SqlDeadLetters):
    """Takes hash and reason away with the payload."""

    async def erase(self, which):
        found = await self.find(which, 1000)
        for letter in found:
            await self.remove(letter.consumer, letter.message_id)
        return len(found)


class KeepsWhatALateFailureSays(SqlDeadLetters):
    """Writes the reason of a failure that comes after the erasing."""

    async def put(self, letter):
        await super().put(letter)
        await overwrite(self, letter, "reason")


class KeepsTheReason(SqlDeadLetters):
    """Erases the payload, and leaves what an exception quoted of it."""

    async def erase(self, which):
        before = await self.find(which, 1000)
        count = await super().erase(which)
        for letter in before:
            await overwrite(self, letter, "reason")
        return count


class LetsTheQueuePass(SqlWaitingStore):
    """Does not look who stands before."""

    async def take_due(self, consumer, limit, after_place=0):
        waiting = await self.find(WaitingFilter(consumer), limit)
        return [one for one in waiting if one.waits is not Waits.PARKED]


class HandsOutTheParked(SqlWaitingStore):
    """Takes a parked message for one that is due."""

    async def take_due(self, consumer, limit):
        parked = await self.find(WaitingFilter(consumer, waits=Waits.PARKED), limit)
        return [*parked, *await super().take_due(consumer, limit)][:limit]


class SendsFailuresToTheEnd(SqlWaitingStore):
    """Gives a message that failed again a new place."""

    async def put(self, waiting, delay_seconds=0.0):
        await self.remove(waiting.consumer, waiting.message_id)
        await super().put(waiting, delay_seconds)


class TakesTheDeliveredPayload(SqlWaitingStore):
    """Lets a repeated delivery replace what a person has revised."""

    async def put(self, waiting, delay_seconds=0.0):
        await super().put(waiting, delay_seconds)
        await say(
            self,
            "UPDATE waiting_message SET payload = :payload WHERE message_id = :id",
            payload=waiting.payload,
            id=waiting.message_id,
        )


class HoldsWhileParkedOnly(SqlWaitingStore):
    """Lets later messages pass one that waits for its time."""

    async def hold(self, consumer, keys):
        parked = await self.find(WaitingFilter(consumer, waits=Waits.PARKED), 1000)
        return frozenset(keys) & {waiting.key for waiting in parked}


class TakesTheWholeKey(SqlWaitingStore):
    """Hands out a key's queue at once."""

    async def take_due(self, consumer, limit):
        first = await super().take_due(consumer, limit)
        keys = {waiting.key for waiting in first}
        waiting = await self.find(WaitingFilter(consumer), limit)
        return [one for one in waiting if one.key in keys]


class BeginsAtTheBeginning(SqlWaitingStore):
    """Hands out once more what a worker wanted to look behind."""

    async def take_due(self, consumer, limit, after_place=0):
        return await super().take_due(consumer, limit)


class ReleasesWhatItLetsGo(SqlWaitingStore):
    """Does not wait for the person any more."""

    async def let_overtake(self, consumer, message_id):
        await self.release(consumer, message_id)
        return await super().let_overtake(consumer, message_id)


class RevisesAtTheEnd(SqlWaitingStore):
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


class RetriesTheErased(SqlWaitingStore):
    """Removes the payload and goes on as if it were there."""

    async def erase(self, which):
        before = await self.find(which, 1000)
        count = await super().erase(which)
        for waiting in before:
            waits = f"waits = '{waiting.waits.value}'"
            await say_of(self, "waiting_message", waits, waiting.consumer, waiting.message_id)
        return count


class SaysWhyTheErasedWaited(SqlWaitingStore):
    """Erases the payload, and leaves what an exception quoted of it."""

    async def erase(self, which):
        before = await self.find(which, 1000)
        count = await super().erase(which)
        for waiting in before:
            reason = f"reason = '{waiting.reason}'"
            await say_of(self, "waiting_message", reason, waiting.consumer, waiting.message_id)
        return count


LETTERS_CONVICTED_BY = {
    ForgetsTheBeginning: "test_a_later_failure_says_anew_why_and_keeps_the_beginning",
    MixesConsumers: "test_each_consumer_has_letters_of_its_own",
    BringsBackTheErased: "test_a_new_failure_does_not_bring_back_what_was_erased",
    SaysThatAllAreNew: "test_a_letter_is_new_once_for_each_consumer",
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
    BeginsAtTheBeginning: "test_more_is_taken_behind_what_was_taken",
    ReleasesWhatItLetsGo: "test_a_message_released_on_its_own_waits_for_no_other_of_its_key",
    RevisesAtTheEnd: "test_a_revision_keeps_the_place_in_the_queue",
    RetriesTheErased: "test_what_was_erased_is_never_due_again",
    SaysWhyTheErasedWaited: "test_erasing_takes_the_reason_and_leaves_hashes_and_codes",
}
