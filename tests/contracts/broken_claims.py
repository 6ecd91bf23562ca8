"""Stores of claims that are broken on purpose, each in one way that looks reasonable."""

from __future__ import annotations

import time
from dataclasses import replace

from sqlalchemy import insert, select, update

from semel.errors import Retryable
from semel.messaging.handle.claims import (
    Claimed,
    ClaimRequest,
    ClaimState,
    Duplicate,
    HeldElsewhere,
)
from semel.policy.vocabulary import StalePolicy
from semel.sql import claims as sql
from semel.sql.claims import SqlAlchemyProcessedMessageStore
from semel.sql.tables import processed_message
from semel.sql.types import to_us
from tests.contracts.sabotage import say, say_of


async def forget(store, message_id):
    await say(store, "DELETE FROM processed_message WHERE message_id = :id", id=message_id)


class NeverTriesAgain(SqlAlchemyProcessedMessageStore):
    """Keeps the claim of a failed attempt: its redelivery is then a duplicate, and lost."""

    async def try_claim(self, consumer, request):
        row = await self.look_up(consumer, request.message_id)
        if row is not None and row.state is ClaimState.FAILED_RETRYABLE:
            return Duplicate()
        return await super().try_claim(consumer, request)


class TriesAgainAtOnce(SqlAlchemyProcessedMessageStore):
    """Does not wait until a failed message is due."""

    async def try_claim(self, consumer, request):
        await say_of(self, "processed_message", "due_at = 0", consumer, request.message_id)
        return await super().try_claim(consumer, request)


class AcksWhatIsHeld(SqlAlchemyProcessedMessageStore):
    """Takes a message for handled that another owner may still fail."""

    async def try_claim(self, consumer, request):
        answer = await super().try_claim(consumer, request)
        return Duplicate() if isinstance(answer, HeldElsewhere) else answer


class HandlesTheDead(SqlAlchemyProcessedMessageStore):
    """Takes dead letters and parked messages up again when they are delivered again."""

    async def try_claim(self, consumer, request):
        await self.reopen(consumer, request.message_id)
        return await super().try_claim(consumer, request)


class ClaimSaysFalseForEverything(SqlAlchemyProcessedMessageStore):
    """Answers "not claimed", which callers acknowledge."""

    async def claim(self, *, consumer_name, event_id):
        answer = await self.try_claim(consumer_name, ClaimRequest(event_id))
        return isinstance(answer, Claimed)


class CompletesWithoutFence(SqlAlchemyProcessedMessageStore):
    """Believes whoever says that the message is done."""

    async def mark_completed(self, consumer, message_id, fence=None, result=None):
        return await super().mark_completed(consumer, message_id, None, result)


class RenewsForAnybody(SqlAlchemyProcessedMessageStore):
    """Renews the lease of the current owner for a stale one."""

    async def renew(self, consumer, message_id, fence, seconds):
        row = await self.look_up(consumer, message_id)
        return await super().renew(consumer, message_id, row.fence if row else 0, seconds)


class CountsFencesPerClaim(SqlAlchemyProcessedMessageStore):
    """Begins with 1 again after retention has removed the claim."""

    async def lease(self, consumer, request, *, owner, seconds, stale=StalePolicy.RECLAIM):
        before = await self.look_up(consumer, request.message_id)
        answer = await super().lease(consumer, request, owner=owner, seconds=seconds, stale=stale)
        if not isinstance(answer, Claimed):
            return answer
        fence = before.fence + 1 if before else 1
        await say_of(self, "processed_message", f"fence = {fence}", consumer, request.message_id)
        return replace(answer, fence=fence)


class LocksWhateverLasts(SqlAlchemyProcessedMessageStore):
    """Lets others decide about a lease that its owner has renewed."""

    async def lock_expired(self, consumer, message_id, fence):
        row = await self.look_up(consumer, message_id)
        return row is not None and row.fence == fence and row.state is ClaimState.IN_PROGRESS


class AlwaysReclaims(SqlAlchemyProcessedMessageStore):
    """Takes every expired lease over, whatever the policy."""

    async def lease(self, consumer, request, *, owner, seconds, stale=StalePolicy.RECLAIM):
        return await super().lease(consumer, request, owner=owner, seconds=seconds)


class OverwritesTheEnd(SqlAlchemyProcessedMessageStore):
    """Writes a late failure over a success."""

    async def mark_failed(self, consumer, message_id, failure, fence=None):
        row = await self.look_up(consumer, message_id)
        if row is None or row.state is not ClaimState.COMPLETED:
            return await super().mark_failed(consumer, message_id, failure, fence)
        failed = f"state = '{failure.state.value}'"
        await say_of(self, "processed_message", failed, consumer, message_id)
        return True


class OverwritesTheDead(SqlAlchemyProcessedMessageStore):
    """Writes a late failure over what a person, or another worker, decided."""

    async def mark_failed(self, consumer, message_id, failure, fence=None):
        await self.reopen(consumer, message_id)
        return await super().mark_failed(consumer, message_id, failure, fence)


class KeepsResultsForEver(SqlAlchemyProcessedMessageStore):
    """Erases nothing."""

    async def erase(self, consumer, message_id):
        row = await self.look_up(consumer, message_id)
        return row is not None and row.result is not None


class ForgetsTheFailure(SqlAlchemyProcessedMessageStore):
    """Updates the claim, which the rollback has taken away."""

    async def mark_failed(self, consumer, message_id, failure, fence=None):
        if await self.look_up(consumer, message_id) is None:
            return False
        return await super().mark_failed(consumer, message_id, failure, fence)


class CountsNoAttempts(SqlAlchemyProcessedMessageStore):
    """Begins every attempt at 1: retries never end."""

    async def try_claim(self, consumer, request):
        answer = await super().try_claim(consumer, request)
        return replace(answer, attempt=1) if isinstance(answer, Claimed) else answer


class IgnoresThePayload(SqlAlchemyProcessedMessageStore):
    """Compares ids alone."""

    async def try_claim(self, consumer, request):
        return await super().try_claim(consumer, ClaimRequest(request.message_id))


class ExpectsTheLastPayload(SqlAlchemyProcessedMessageStore):
    """Lets a failed conflict become what is expected."""

    async def mark_failed(self, consumer, message_id, failure, fence=None):
        marked = await super().mark_failed(consumer, message_id, failure, fence)
        last = f"payload_hash = '{failure.payload_hash}'"
        await say_of(self, "processed_message", last, consumer, message_id)
        return marked

    async def undo(self, consumer, message_id, failure):
        await super().undo(consumer, message_id, failure)
        last = f"payload_hash = '{failure.payload_hash}'"
        await say_of(self, "processed_message", last, consumer, message_id)
        return await self.look_up(consumer, message_id)


class ConflictsWithTheUnknown(SqlAlchemyProcessedMessageStore):
    """Takes a hash that nobody gave for another payload."""

    async def try_claim(self, consumer, request):
        unknown = request.payload_hash or "unknown"
        return await super().try_claim(consumer, ClaimRequest(request.message_id, unknown))


class CutsIds(SqlAlchemyProcessedMessageStore):
    """Keeps as much of an id as fits into the column."""

    async def try_claim(self, consumer, request):
        short = replace(request, message_id=request.message_id[:512])
        return await super().try_claim(consumer, short)


class ClaimsTwiceInABatch(SqlAlchemyProcessedMessageStore):
    """Looks up what was inserted by id, and finds it for both."""

    async def try_claim_many(self, consumer, requests):
        answers = {}
        for request in requests:
            if request.message_id not in answers:
                answers[request.message_id] = await self.try_claim(consumer, request)
        return [answers[request.message_id] for request in requests]


class AnswersInSortedOrder(SqlAlchemyProcessedMessageStore):
    """Sorts the batch and forgets to sort back."""

    async def try_claim_many(self, consumer, requests):
        ordered = sorted(requests, key=lambda request: request.message_id)
        return await super().try_claim_many(consumer, ordered)


class UndoesByDeleting(SqlAlchemyProcessedMessageStore):
    """Forgets the attempt with the claim."""

    async def undo(self, consumer, message_id, failure):
        undone = await super().undo(consumer, message_id, failure)
        await forget(self, message_id)
        return undone


class ForgetsWhyItPassedOver(SqlAlchemyProcessedMessageStore):
    """Takes what came too late for what was handled."""

    async def pass_over(self, consumer, message_id, marker):
        pass


class GivesBackByDeleting(SqlAlchemyProcessedMessageStore):
    """Forgets what was known before the claim."""

    async def give_back(self, consumer, message_id, claimed):
        await forget(self, message_id)


class LosesResults(SqlAlchemyProcessedMessageStore):
    """Keeps what the handler returned until somebody asks."""

    async def try_claim(self, consumer, request):
        answer = await super().try_claim(consumer, request)
        return Duplicate() if isinstance(answer, Duplicate) else answer


class ReopensTheCompleted(SqlAlchemyProcessedMessageStore):
    """Lets an operator have a message handled a second time."""

    async def reopen(self, consumer, message_id):
        if await self.look_up(consumer, message_id) is None:
            return False
        again = "state = 'FAILED_RETRYABLE', attempts = 0, due_at = 0"
        await say_of(self, "processed_message", again, consumer, message_id)
        return True


class DeletesTheParked(SqlAlchemyProcessedMessageStore):
    """Deletes whatever is not being handled."""

    async def delete_expired(self, consumer, older_than_seconds, limit, sweep=None):
        parked = await say(self, "DELETE FROM processed_message WHERE state = 'PARKED'")
        right = await super().delete_expired(consumer, older_than_seconds, limit, sweep)
        return parked.rowcount + right


class DeletesByTheFirstSight(SqlAlchemyProcessedMessageStore):
    """Counts from the claim's birth, not from its last change."""

    async def delete_expired(self, consumer, older_than_seconds, limit, sweep=None):
        await say(self, "UPDATE processed_message SET updated_at = first_seen_at")
        return await super().delete_expired(consumer, older_than_seconds, limit, sweep)


class DeletesWithoutLimit(SqlAlchemyProcessedMessageStore):
    """Holds up everybody else for as long as it takes."""

    async def delete_expired(self, consumer, older_than_seconds, limit, sweep=None):
        return await super().delete_expired(consumer, older_than_seconds, 1_000_000, sweep)


class ChecksThenActs(SqlAlchemyProcessedMessageStore):
    """Looks whether the message is new, and writes it a moment later."""

    async def try_claim(self, consumer, request):
        if await self.look_up(consumer, request.message_id) is not None:
            return await super().try_claim(consumer, request)
        new = {"consumer_name": consumer, "message_id": request.message_id}
        await self._session.execute(insert(processed_message).values(**new, state="COMPLETED"))
        return Claimed()


class TakesAnOutageForADuplicate(SqlAlchemyProcessedMessageStore):
    """Goes on after any error, as if the insert had found the message."""

    async def try_claim(self, consumer, request):
        try:
            return await super().try_claim(consumer, request)
        except Retryable:
            return Duplicate()


class TriesAgainTwice(SqlAlchemyProcessedMessageStore):
    """Decides by what it read, not by what it changed."""

    async def try_claim(self, consumer, request):
        row = await self.look_up(consumer, request.message_id)
        if row is None or row.state is not ClaimState.FAILED_RETRYABLE:
            return await super().try_claim(consumer, request)
        here = processed_message.c
        mine = (here.consumer_name == consumer, here.message_id == request.message_id)
        await self._session.execute(
            update(processed_message).where(*mine).values(state="COMPLETED", attempts=2)
        )
        return Claimed(2)


class GoesByItsOwnClock(SqlAlchemyProcessedMessageStore):
    """Computes the end of the lease where it runs."""

    async def lease(self, consumer, request, *, owner, seconds, stale=StalePolicy.RECLAIM):
        answer = await super().lease(consumer, request, owner=owner, seconds=seconds, stale=stale)
        if isinstance(answer, Claimed):
            here = processed_message.c
            until = to_us(time.time() + seconds)
            await self._session.execute(
                update(processed_message)
                .where(here.message_id == request.message_id)
                .values(lease_until=until)
            )
        return answer


class LocksTheHandled(SqlAlchemyProcessedMessageStore):
    """Locks a row to read it in peace."""

    async def try_claim(self, consumer, request):
        await self._session.execute(
            select(processed_message.c.state)
            .where(processed_message.c.message_id == request.message_id)
            .with_for_update()
        )
        return await super().try_claim(consumer, request)


class LooksAndLocksNothing(SqlAlchemyProcessedMessageStore):
    """Takes what it read for what stays."""

    async def lock_expired(self, consumer, message_id, fence):
        row = await self.look_up(consumer, message_id)
        return row is not None and row.fence == fence and row.lease_until <= time.time()


class ClaimsInTheGivenOrder(SqlAlchemyProcessedMessageStore):
    """Takes the rows of a batch as they come: two workers wait for each other."""

    async def try_claim_many(self, consumer, requests):
        taken = []
        for request in requests:
            new = {"by": consumer, "id": request.message_id, "digest": request.payload_hash}
            row = await self._session.execute(sql.TAKE, {**new, "original": None})
            taken.append(row.one_or_none() is not None)
        return [Claimed() if each else Duplicate() for each in taken]
