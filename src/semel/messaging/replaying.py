"""One message of a replay: where it is now, whether it may have a turn, and what became of it.

    COMPLETED            a duplicate: nothing is done
    a dead letter        sent back to its consumer, with an entry in the audit trail
    parked               released, with an entry in the audit trail
    waiting              tried, if it is its turn
    in the inbox         tried in one transaction with its mark
    only in the broker   handled like any delivery

The engine handles it, under its own id: its claim decides, as with every delivery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from semel.clock import SYSTEM_CLOCK
from semel.codec import Undecodable, Unreadable, unreadable_id
from semel.lease import Owner
from semel.message import Message
from semel.messaging.acts import NoSuchMessage, NotPossible, acting, complete_without_effect
from semel.messaging.audit import Act
from semel.messaging.claims import REPLACED, ClaimRow, ClaimState, Found, found_of
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database
from semel.messaging.deadletters import DeadLetter
from semel.messaging.handling import attempt, handle_unreadable
from semel.messaging.inbox import InboxMessage
from semel.messaging.inbox_turns import try_given_up
from semel.messaging.kept import message_of
from semel.messaging.lanes import Order
from semel.messaging.leased import handle_leased
from semel.messaging.marks import Ended, mark_ends
from semel.messaging.outcome import (
    Handled,
    Outcome,
    RetryLater,
    Skipped,
    Told,
)
from semel.messaging.outside_inbox import OutsideInbox
from semel.messaging.parking import release
from semel.messaging.reasons import ERASED_REASON
from semel.messaging.replay_rules import ReplayRules
from semel.messaging.replay_sources import Item, letter_message
from semel.messaging.replay_turns import Replayed, ReplayInterrupted, Turn, replayed
from semel.messaging.retention import DAY_SECONDS
from semel.messaging.retry import RetryMode
from semel.messaging.review import need_not_too_often, need_review
from semel.messaging.revival import retry_dead_letter
from semel.messaging.settings import Duplicates, Mode
from semel.messaging.telling import tell
from semel.messaging.waiting import WaitingMessage, Waits

Handle: TypeAlias = Callable[[Message, WaitingMessage | None], Awaitable[Outcome]]
"""How a consumer's messages are handled, where that is not in one transaction."""

Kept: TypeAlias = WaitingMessage | InboxMessage | DeadLetter
"""A message that is in our own tables."""

# A lock that is not given within these is held by something that does not end by itself.
TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Terms:
    """On which terms one message is replayed."""

    actor: str
    reason: str
    most_replays: int
    """The loop guard: how often a message may be sent back, by replays and by hand together."""

    rules: ReplayRules = field(default_factory=ReplayRules)
    """Which topics' messages may be replayed, and how old those without a claim may be."""


def replaying(consumer: Consumer) -> Consumer:
    """Return the consumer as a replay runs it.

    Duplicates are skipped even where deliveries invoke the handler, and what fails waits in
    the retry table: no broker will deliver it again.  Nothing holds a partition back, then; a
    key is held, whatever the consumer does with deliveries.
    """
    settings = consumer.settings
    by_partition = settings.order is Order.PARTITION
    replayed = replace(
        settings,
        duplicates=Duplicates.SKIP,
        retry=replace(settings.retry, mode=RetryMode.RETRY_TABLE),
        order=Order.NONE if by_partition else settings.order,
        holds_keys=None if by_partition or not settings.holds_keys else True,
    )
    return consumer.with_settings(replayed)


class Replayer:
    """Gives messages their turn, one transaction or a few each."""

    def __init__(
        self, consumer: Consumer, database: Database, terms: Terms, handle: Handle | None = None
    ) -> None:
        self.consumer = replaying(consumer)
        self.database = database
        self.terms = terms
        is_leased = consumer.mode is Mode.LEASED
        self._handle = handle or (self._leased if is_leased else self._in_one_transaction)
        self._owner = Owner.here().instance

    async def _leased(self, message: Message, waiting: WaitingMessage | None) -> Outcome:
        return await handle_leased(
            self.consumer, self.database, message, self._owner, waiting=waiting
        )

    async def _in_one_transaction(
        self, message: Message, waiting: WaitingMessage | None
    ) -> Outcome:
        if waiting is not None:
            return await attempt(self.consumer, self.database, message, waiting)
        outside = OutsideInbox(self.database, self.consumer.name, message.id)
        outcome = await attempt(self.consumer, outside, message, None)
        return outside.stored_instead or outcome

    async def _try(self, message: Message, waiting: WaitingMessage | None) -> Outcome:
        return await self._ask(message.id, message, lambda: self._handle(message, waiting))

    async def _ask(
        self,
        message_id: str,
        what: Message | InboxMessage,
        handle: Callable[[], Awaitable[Outcome]],
    ) -> Outcome:
        """Handle a message; where it could not even be asked for, ask again.

        Raises:
            ReplayInterrupted: asking did not help.
        """
        why = ""
        for _ in range(TRIES):
            began = SYSTEM_CLOCK.monotonic()
            outcome = await handle()
            if not isinstance(outcome, RetryLater) or outcome.failure is None or outcome.attempts:
                tell(what, outcome, self.consumer.name, SYSTEM_CLOCK.monotonic() - began)
                return outcome
            why = outcome.failure.reason
            await asyncio.sleep(outcome.seconds)
        raise ReplayInterrupted(self.consumer.name, message_id, why)

    async def look(self, item: Item) -> Replayed | None:
        """Say what is to be said without trying; None where the message should be tried."""
        digest = item.arrival.digest if isinstance(item.arrival, Message) else ""
        name, message_id = self.consumer.name, item.message_id
        async with self.database.begin() as unit:
            row = await unit.claims.look_up(name, message_id)
            stored = await unit.inbox.get(name, message_id)
            now = await unit.now()
        if stored is not None and stored.processed_at is not None:
            return Replayed(message_id, Turn.DUPLICATE)
        if row is not None and found_of(row, digest, now) is Found.OTHER_PAYLOAD:
            return Replayed(message_id, Turn.REFUSED, "its id is known with another payload")
        if row is not None and row.state is ClaimState.COMPLETED:
            return Replayed(message_id, Turn.DUPLICATE)
        return self._too_old(item, row, now)

    def _too_old(self, item: Item, row: ClaimRow | None, now: float) -> Replayed | None:
        arrival = item.arrival
        if row is not None or not isinstance(arrival, Message):
            return None
        window = self.terms.rules.of(_topic(arrival)).reaches_seconds
        if now - arrival.timestamp <= window:
            return None
        why = (
            f"it is older than the replay window of {window / DAY_SECONDS:g} days and has no "
            f"claim, so nobody knows whether it was handled"
        )
        return Replayed(item.message_id, Turn.REFUSED, why)

    async def take(self, item: Item) -> Replayed:
        """Give a message its turn: open it again where that is needed, and handle it."""
        name, message_id = self.consumer.name, item.message_id
        async with self.database.begin() as unit:
            waiting = await unit.waiting.get(name, message_id)
            letter = await unit.dead_letters.get(name, message_id)
            stored = await unit.inbox.get(name, message_id)
        refusal = self._refusal(item, waiting, stored, letter)
        if refusal is not None:
            return Replayed(message_id, Turn.REFUSED, refusal)
        try:
            if waiting is not None:
                return await self._waiting(waiting)
            if stored is not None:
                return await self._stored(stored)
            if letter is not None:
                return await self._letter(letter)
            if isinstance(item.arrival, Message):
                return await self._arrived(item.arrival)
        except (NotPossible, NoSuchMessage) as error:
            return Replayed(message_id, Turn.REFUSED, str(error))
        if isinstance(item.arrival, Unreadable):
            outcome = await handle_unreadable(self.consumer, self.database, item.arrival)
            tell(item.arrival, outcome, self.consumer.name)
            return replayed(message_id, outcome)
        return Replayed(message_id, Turn.MISSING, "nobody has its payload any more")

    def _refusal(self, item: Item, *kept: Kept | None) -> str | None:
        """Say why the policy of its own topic, or of all where none is known, forbids it."""
        topics = {one.topic for one in kept if one is not None}
        if item.arrival is not None:
            topics.add(_topic(item.arrival))
        return self.terms.rules.of(*topics).refusal

    async def _waiting(self, waiting: WaitingMessage) -> Replayed:
        name, message_id = self.consumer.name, waiting.message_id
        if waiting.erased_at is not None:
            return Replayed(message_id, Turn.REFUSED, ERASED_REASON)
        message = message_of(self.consumer, waiting)
        if isinstance(message, Unreadable):
            return Replayed(message_id, Turn.REFUSED, f"it cannot be read: {message.reason}")
        if waiting.waits is Waits.PARKED:
            terms = self.terms
            async with self.database.begin() as unit:
                await need_not_too_often(unit, name, message_id, terms.most_replays)
            await release(self.database, name, message_id, actor=terms.actor, reason=terms.reason)
        async with self.database.begin() as unit:
            turn = await unit.waiting.take(name, message_id)
        if turn is None:
            return Replayed(message_id, Turn.LEFT, "it is not its turn, or not yet due")
        return replayed(message_id, await self._try(message, turn))

    async def _letter(self, letter: DeadLetter) -> Replayed:
        name, message_id = self.consumer.name, letter.message_id
        if letter.outcome == Told.CONFLICT:
            why = "its id is known with another payload: park it and give it a new id, or skip it"
            return Replayed(message_id, Turn.REFUSED, why)
        if letter.erased_at is not None:
            return Replayed(message_id, Turn.REFUSED, ERASED_REASON)
        found = letter_message(self.consumer, letter)
        if isinstance(found, Unreadable):
            return Replayed(message_id, Turn.REFUSED, f"it cannot be read: {found.reason}")
        if found.id != message_id:
            return replace(await self._read_at_last(letter, found), message_id=message_id)
        await retry_dead_letter(
            self.database,
            name,
            message_id,
            actor=self.terms.actor,
            reason=self.terms.reason,
            at_most=self.terms.most_replays,
        )
        async with self.database.begin() as unit:
            waiting = await unit.waiting.get(name, message_id)
        if waiting is None:
            return Replayed(message_id, Turn.LEFT, "another worker has it")
        return await self._waiting(waiting)

    async def _arrived(self, message: Message) -> Replayed:
        """Handle a record of the broker that our own tables have nothing of."""
        letter = None
        if message.source is not None:
            filed_as = unreadable_id(message.source)
            async with self.database.begin() as unit:
                letter = await unit.dead_letters.get(self.consumer.name, filed_as)
        if letter is not None:
            return await self._read_at_last(letter, message)
        outcome = await self._try(message, None)
        if isinstance(outcome, Handled | Skipped):
            # No delivery notes it; what is refused may be a loss, and stays one.
            async with self.database.begin() as unit:
                ended = Ended(message.id, message.source, outcome)
                await mark_ends(unit, self.consumer.name, [ended])
        return replayed(message.id, outcome)

    async def _read_at_last(self, letter: DeadLetter, message: Message) -> Replayed:
        """Handle a record that could not be read before, under the id that it really has."""
        async with self.database.begin() as unit:
            await need_review(unit, letter)
        outcome = await self._try(message, None)
        done = replayed(message.id, outcome)
        if done.turn is not Turn.LEFT:
            await self._close(letter, Ended(message.id, letter.source, outcome))
        return done

    async def _close(self, letter: DeadLetter, ended: Ended) -> None:
        """Take the letter of an unreadable record away: its message has an id now."""
        name, filed_as = self.consumer.name, letter.message_id
        async with acting(self.database) as unit:
            if await unit.dead_letters.remove(name, filed_as):
                await complete_without_effect(unit, name, filed_as, REPLACED)
                await mark_ends(unit, name, [ended])
                await unit.audit.append(self._act("dlq.read", filed_as, read_as=ended.message_id))

    async def _stored(self, stored: InboxMessage) -> Replayed:
        """Handle a message that the inbox's workers gave up."""
        message_id, act = stored.message_id, self._act("inbox.retry", stored.message_id)
        if stored.processed_at is not None:
            return Replayed(message_id, Turn.DUPLICATE)
        if stored.due_at is not None:
            return Replayed(message_id, Turn.LEFT, "an inbox worker tries it")
        if stored.erased_at is not None:
            return Replayed(message_id, Turn.REFUSED, ERASED_REASON)
        most = self.terms.most_replays
        try:
            outcome = await self._ask(
                message_id,
                stored,
                lambda: try_given_up(self.consumer, self.database, stored, act, most),
            )
        except Undecodable:
            # Refusals are kept with the replay, and why bytes are no message may quote them.
            return Replayed(message_id, Turn.REFUSED, "it cannot be read")
        return replayed(message_id, outcome)

    def _act(self, act: str, message_id: str, **details: str) -> Act:
        terms = self.terms
        return Act(terms.actor, act, self.consumer.name, message_id, terms.reason, details)


def _topic(arrival: Message | Unreadable) -> str:
    at = arrival.record.at if isinstance(arrival, Unreadable) else arrival.source
    return "" if at is None else at.topic
