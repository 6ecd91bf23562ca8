"""Consumer engines with one rule broken, or with every defence of one rule taken away."""

from __future__ import annotations

from dataclasses import replace

from semel.messaging.failed import attempt_failed as failing
from semel.messaging.failed import retries as retrying
from semel.messaging.failure import RetryIn
from semel.messaging.handle import attempt as handling
from semel.messaging.handle import batch as draining
from semel.messaging.handle import batch as one_by_one
from semel.messaging.handle import lease as leased
from semel.messaging.handle.attempt import Attempt
from semel.messaging.handle.claims import Claimed, ClaimRequest, HeldElsewhere
from semel.messaging.handle.lease import Lease
from semel.messaging.outcome import Conflicted, Handled, RetryStored, Skipped
from semel.messaging.receive import crash as notes
from semel.messaging.receive import crash as suspects
from semel.messaging.receive import inbox as inboxes
from semel.messaging.receive import runner
from semel.messaging.receive.lanes import Lanes, Watermark
from semel.messaging.receive.offsets import Settling
from semel.messaging.receive.runner import Runner
from semel.messaging.send.publish import Sending, SettledBatch
from semel.messaging.send.relay import Relay
from semel.messaging.settings import ConsumerSettings, ReplayRule, ReplayRules
from semel.operate.replay_message import Replayer, find_message
from semel.policy.vocabulary import Duplicates
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.sql.inbox import SqlInboxStore
from tests.messaging.jury import Invariant
from tests.mutants import mutants

I = Invariant  # noqa: E741  the table below is read across


async def _nothing(*_, **__):
    """Forget to do it."""


def offsets_are_committed_before_the_effect(patch):
    feed = Runner._feed

    async def settle_first(self, records):
        for record in records:
            await self._settling.deliver(record.at)
        await self._settling.settle({record.at: Handled() for record in records})
        patch.setattr(Settling, "deliver", _nothing)
        return await feed(self, records)

    patch.setattr(Runner, "_feed", settle_first)


def a_failed_message_is_acknowledged(patch):
    async def forget(*_, **__):
        return Skipped()

    patch.setattr(Attempt, "fail", forget)
    patch.setattr(Attempt, "write_failure", forget)


def the_claim_is_committed_before_the_effect(patch):
    async def in_two(database, attempt):
        async with database.begin() as unit:
            request = ClaimRequest.of(attempt.message)
            answer = await unit.claims.try_claim(attempt.consumer.name, request)
        async with database.begin() as unit:
            if isinstance(answer, Claimed):
                return await attempt.apply(unit)
            return await attempt.refuse(unit, answer)

    patch.setattr(handling, "_in_one_transaction", in_two)


def the_dead_letter_is_forgotten(patch):
    patch.setattr(failing, "keep_letter", _nothing)


def the_watermark_passes_what_is_not_settled(patch):
    def settle(self, offset):
        self._unsettled.discard(offset)
        self._next = max(self._next, offset + 1)

    patch.setattr(Watermark, "settle", settle)


def the_offset_itself_is_committed_and_not_the_next(patch):
    patch.setattr(Watermark, "next_offset", property(lambda self: max(self._next - 1, 0)))


def a_waiting_message_does_not_hold_its_key(patch):
    patch.setattr(ConsumerSettings, "holds_waiting_keys", property(lambda self: False))


def a_lane_goes_on_behind_a_message_that_comes_back(patch):
    done = Lanes.done
    patch.setattr(Lanes, "done", lambda self, taken, coming_back=(): done(self, taken))


def a_batch_goes_on_behind_a_message_that_comes_back(patch):
    patch.setattr(one_by_one.Blocked, "note", lambda self, message, outcome: None)


def a_batch_keeps_the_claims_of_what_it_did_not_try(patch):
    patch.setattr(SqlAlchemyProcessedMessageStore, "give_back", _nothing)


def attempts_are_without_end(patch):
    patch.setattr(failing, "verdict", lambda policy, failure, attempts: RetryIn(0.5))


def whoever_is_held_elsewhere_is_taken_for_a_duplicate(patch):
    refuse = Attempt.refuse

    async def guess(self, unit, answer):
        if isinstance(answer, HeldElsewhere):
            return Skipped("duplicate")
        return await refuse(self, unit, answer)

    patch.setattr(Attempt, "refuse", guess)


def a_conflict_is_swallowed(patch):
    async def swallow(unit, consumer, message, expected):
        return Conflicted(expected, message.digest)

    for module in (handling, failing, inboxes):
        patch.setattr(module, "write_conflict", swallow)


def a_stored_retry_has_no_payload(patch):
    async def only_say_so(self, seconds):
        await self.fail(failing.ClaimState.FAILED_RETRYABLE, seconds)
        return RetryStored(self.failure, self.message.attempt)

    patch.setattr(failing.FailedMessage, "_retry", only_say_so)


def what_was_handled_stays_in_the_room(patch):
    for module in (handling, failing, leased, retrying, suspects, draining):
        patch.setattr(module, "leave_waiting", _nothing)


def what_comes_back_is_not_brought_back(patch):
    def forget(self, partition):
        self._back.pop(partition)
        self._subscription.resume(partition)

    patch.setattr(Settling, "bring_back", forget)


def outcomes_are_forgotten(patch):
    patch.setattr(Settling, "_keep_outcomes", _nothing)
    patch.setattr(Settling, "marks", lambda self, *_: None)


def outcomes_are_kept_after_the_commit(patch):
    keep, commit = Settling._keep_outcomes, Settling._commit

    async def both(self):
        await commit(self)
        await keep(self)

    patch.setattr(Settling, "_commit", both)
    patch.setattr(Settling, "_keep_outcomes", _nothing)
    patch.setattr(Settling, "marks", lambda self, *_: None)


def a_death_is_not_counted(patch):
    async def first(unit, consumer, message_id):
        return 1

    patch.setattr(suspects, "note_try", first)


def the_note_of_a_try_is_not_taken_back(patch):
    for module in (suspects, draining, notes):
        patch.setattr(module, "clear_own_notes", _nothing)


def nobody_is_careful_after_a_death(patch):
    async def never(self, at):
        return False

    patch.setattr(runner.Membership, "is_careful", never)


def an_owner_that_lost_its_lease_completes(patch):
    async def complete(self, unit, result):
        await unit.claims.mark_completed(self.consumer, self.message_id)

    patch.setattr(Lease, "_complete", complete)


def a_replay_ignores_the_policy(patch):
    patch.setattr(ReplayRules, "refusal", property(lambda self: None))
    patch.setattr(ReplayRules, "of", lambda self, *topics: ReplayRule())


def a_replay_handles_what_was_handled(patch):
    """The claim is asked neither before nor by the engine, which invokes a duplicate."""

    def invoking(consumer):
        return consumer.with_settings(replace(consumer.settings, duplicates=Duplicates.INVOKE))

    async def look(self, unit, item):
        return await find_message(unit, self.consumer.name, item)

    patch.setattr(Replayer, "look", look)
    patch.setattr("semel.operate.replay_message.replaying", invoking)


def the_relay_deletes_before_it_publishes(patch):
    publish = Relay._publish

    async def delete_first(self, leadership, entries):
        await self._write_down(leadership, SettledBatch(list(entries)))
        return await publish(self, leadership, entries)

    patch.setattr(Relay, "_publish", delete_first)


def the_relay_deletes_what_was_not_delivered(patch):
    settle = Sending.settle

    def all_delivered(self, entries, answers, now):
        settle(self, entries, answers, now)
        return SettledBatch(list(entries))

    patch.setattr(Sending, "settle", all_delivered)


def the_relay_lets_a_key_overtake(patch):
    patch.setattr(Sending, "_waits", lambda self, lane: False)


def the_inbox_does_not_mark_what_it_handled(patch):
    patch.setattr(SqlInboxStore, "settle", _nothing)


def the_inbox_settles_what_it_has_only_fetched(patch):
    honest = SqlInboxStore.due

    async def take(self, consumer, limit):
        rows = await honest(self, consumer, limit)
        for row in rows:
            await self.close(consumer, row.message_id, "")
        return rows

    patch.setattr(SqlInboxStore, "due", take)


MUTANTS = mutants(
    [
        (offsets_are_committed_before_the_effect, I.DURABLE),
        (a_failed_message_is_acknowledged, I.DURABLE),
        (the_claim_is_committed_before_the_effect, I.EFFECT_ONCE),
        (the_dead_letter_is_forgotten, I.FINAL),
        (the_watermark_passes_what_is_not_settled, I.DURABLE),
        (the_offset_itself_is_committed_and_not_the_next, I.COMPLETE),
        (a_waiting_message_does_not_hold_its_key, I.ORDER),
        (a_lane_goes_on_behind_a_message_that_comes_back, I.ORDER),
        (a_batch_goes_on_behind_a_message_that_comes_back, I.ORDER),
        (a_batch_keeps_the_claims_of_what_it_did_not_try, I.EFFECT_ONCE),
        (attempts_are_without_end, I.BOUNDED),
        (whoever_is_held_elsewhere_is_taken_for_a_duplicate, I.DURABLE),
        (a_conflict_is_swallowed, I.FINAL),
        (a_stored_retry_has_no_payload, I.DURABLE),
        (what_was_handled_stays_in_the_room, I.EFFECT_ONCE),
        (what_comes_back_is_not_brought_back, I.EFFECT_ONCE),
        (outcomes_are_forgotten, I.COMPLETE),
        (outcomes_are_kept_after_the_commit, I.COMPLETE),
        (a_death_is_not_counted, I.BOUNDED),
        (the_note_of_a_try_is_not_taken_back, I.NOTHING_LEFT, I.FINAL),
        (nobody_is_careful_after_a_death, I.BOUNDED),
        (an_owner_that_lost_its_lease_completes, I.EFFECT_ONCE),
        (a_replay_ignores_the_policy, I.EFFECT_ONCE),
        (a_replay_handles_what_was_handled, I.EFFECT_ONCE),
        (the_relay_deletes_before_it_publishes, I.PUBLISHED),
        (the_relay_deletes_what_was_not_delivered, I.PUBLISHED),
        (the_relay_lets_a_key_overtake, I.PUBLISHED),
        (the_inbox_does_not_mark_what_it_handled, I.BOUNDED),
        (the_inbox_settles_what_it_has_only_fetched, I.FINAL),
    ]
)
