"""One message of a replay: where it is now, whether it may be handled, and what became of it.

    COMPLETED            a duplicate: nothing is done
    a dead letter        sent back to its consumer, with an entry in the audit trail
    parked               released, with an entry in the audit trail
    waiting              tried, if nothing is before it
    in the inbox         tried in one transaction with its mark
    only in the broker   handled like any delivery

The engine handles it, under its own id: its claim decides, as with every delivery.

A message that is only in the broker may arrive in the consumer's inbox meanwhile.  The one
that writes the inbox row first wins: the inbox finds the replay's claim, or the replay finds
the inbox's row.

    the replay   begin ─▶ write the row ─▶ claim, handle ─▶ delete the row ─▶ commit
    the inbox    begin ─▶ write the row: waits ……………………………………………………………▶ look at the claim

A message that the workers of an inbox gave up is sent back and handled in one transaction.
The audit trail says that it was sent back in both cases, because the loop guard counts it.

    begin ─▶ send back ─▶ handle ─▶ mark processed ─▶ commit
                             │
                             └─ fails ─▶ begin ─▶ send back ─▶ failed attempt ─▶ commit
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias, assert_never

from semel.clock import SYSTEM_CLOCK
from semel.codec import Undecodable, Unreadable, unreadable_id
from semel.errors import Retryable
from semel.lease import Owner
from semel.message import Message, Partition, Record
from semel.messaging.consumer import Consumer, message_of
from semel.messaging.failed.attempt_failed import keep_attempt_of_inbox
from semel.messaging.failed.deadletters import keep_letter
from semel.messaging.failure import Classification, Classified, RetryIn, verdict
from semel.messaging.handle.attempt import Attempt, handle_message, handle_unreadable
from semel.messaging.handle.claims import REPLACED, ClaimFound, ClaimRow, ClaimState, found_of
from semel.messaging.handle.lease import handle_leased
from semel.messaging.outcome import (
    MEANING,
    Conflicted,
    DeadLettered,
    Handled,
    Outcome,
    ParkedAway,
    Refused,
    RetryLater,
    RetryStored,
    Skipped,
    Told,
    tell,
)
from semel.messaging.receive.broker import Reader
from semel.messaging.receive.inbox import handle, message_of_inbox
from semel.messaging.receive.offsets import Ended, mark_ends
from semel.messaging.records import DeadLetter, InboxMessage, StoredMessage, WaitingMessage, Waits
from semel.messaging.redact import ERASED_REASON, reason_of
from semel.messaging.settings import DAY_SECONDS, Order, ReplayRules
from semel.operate.acts import (
    NoSuchMessage,
    NotPossible,
    acting,
    complete_without_effect,
    need_not_too_often,
    need_review,
)
from semel.operate.deadletters import retry_dead_letter, send_back
from semel.operate.parking import release
from semel.operate.selection import Ids, Letters, Offsets, Selection, Times, Waiting, need_reader
from semel.operate.stores import Act, OperatorDatabase, OperatorUnit
from semel.policy.vocabulary import Duplicates, Mode, RetryMode


class ReplayInterrupted(Retryable):
    """A message could not be tried: the database does not answer, or a lock is held."""

    def __init__(self, consumer: str, message_id: str, why: str) -> None:
        super().__init__(consumer, message_id, why)
        self.consumer = consumer
        self.message_id = message_id
        self.why = why

    def __str__(self) -> str:
        return (
            f"consumer {self.consumer}: message {self.message_id!r} could not be tried "
            f"({self.why}); run the replay again, and it goes on with it"
        )


class ReplayResult(StrEnum):
    """What became of one message of a replay."""

    HANDLED = "handled"
    DUPLICATE = "duplicate"
    """It was handled before, or has an old version: nothing was done."""

    FAILED = "failed"
    """Its handler failed; it waits, or is parked or dead, as after any delivery."""

    REFUSED = "refused"
    """It must not be replayed: a person has to look at it."""

    LEFT = "left"
    """It waits behind another message or for its time, or another worker has it."""

    MISSING = "missing"
    """Its payload is in no table any more."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """A message of a replay, and what became of it."""

    message_id: str
    result: ReplayResult
    why: str = ""
    code: str = ""
    """Of a failure; the audit trail keeps it instead of *why*, which may quote the message."""


def replayed(message_id: str, outcome: Outcome) -> Replayed:
    """Say what an outcome of the engine is in a replay."""
    result = ReplayResult(MEANING[type(outcome)].replay)
    match outcome:
        case Handled():
            return Replayed(message_id, result)
        case Skipped(why):
            return Replayed(message_id, result, "" if why == "duplicate" else why)
        case Refused(why):
            return Replayed(message_id, result, why)
        case Conflicted():
            return Replayed(message_id, result, "its id is known with another payload")
        case RetryLater() | RetryStored() | ParkedAway() | DeadLettered():
            if outcome.failure is None:
                why = "it waits for its turn, or another worker has it"
                return Replayed(message_id, ReplayResult.LEFT, why)
            code = outcome.failure.code
            return Replayed(message_id, result, f"{code}: {outcome.failure.reason}", code)
        case _ as never:
            assert_never(never)


PAGE: Final = 200


@dataclass(frozen=True, slots=True)
class SelectedMessage:
    """One message that was selected."""

    message_id: str
    place: Any
    """Where the replay resumes after it; JSON."""

    arrival: Message | Unreadable | None = None
    """What the broker has; None where only our own tables are looked at."""


@dataclass(frozen=True, slots=True)
class NoPayload:
    """A message that cannot be handled: it is in no table, or it cannot be read."""

    message_id: str
    why: str


@dataclass(frozen=True, slots=True)
class MessageSource:
    """A selection, and where its messages are."""

    selection: Selection
    consumer: Consumer
    database: OperatorDatabase
    reader: Reader | None = None

    async def items(self, after: Any = None) -> AsyncGenerator[SelectedMessage, None]:
        """Find the messages after a place; None: from the beginning."""
        match self.selection:
            case Ids(ids):
                for number, message_id in enumerate(ids):
                    if after is None or number > after:
                        yield SelectedMessage(message_id, number)
            case Letters():
                async for item in self._letters(self.selection, after):
                    yield item
            case Waiting():
                async for item in self._waiting(self.selection, after):
                    yield item
            case Offsets(partition, first, last) | Times(partition, first=first, last=last):
                start = first if after is None else after + 1
                async for item in self._records(partition, start, last):
                    yield item
            case _ as never:
                assert_never(never)

    async def again(self, message_id: str, place: Any) -> SelectedMessage:
        """Find the message that a replay was trying."""
        if not isinstance(self.selection, Offsets | Times):
            return SelectedMessage(message_id, place)
        records = await need_reader(self.reader).read(self.selection.partition, place, place)
        return self._item(records[0]) if records else SelectedMessage(message_id, place)

    async def message(self, item: SelectedMessage) -> Message | NoPayload:
        """Read the message that would be handled from the table that has it."""
        name, message_id = self.consumer.name, item.message_id
        async with self.database.begin() as unit:
            waiting = await unit.waiting.get(name, message_id)
            stored = await unit.inbox.get(name, message_id)
            letter = await unit.dead_letters.get(name, message_id)
        kept = waiting or stored or letter
        if kept is not None and kept.erased_at is not None:
            return NoPayload(message_id, ERASED_REASON)
        found = item.arrival
        if waiting is not None:
            found = message_of(self.consumer, waiting)
        elif stored is not None:
            try:
                found = message_of_inbox(self.consumer, stored)
            except Undecodable as error:
                return NoPayload(message_id, f"it cannot be read: {reason_of(error)}")
        elif letter is not None:
            found = message_of(self.consumer, letter)
        if isinstance(found, Unreadable):
            return NoPayload(message_id, f"it cannot be read: {found.reason}")
        return found or NoPayload(message_id, "its payload is in no table any more")

    async def _letters(
        self, selection: Letters, after: Any
    ) -> AsyncGenerator[SelectedMessage, None]:
        while True:
            which = replace(selection.filter, after=None if after is None else tuple(after))
            async with self.database.begin() as unit:
                page = await unit.dead_letters.find(which, PAGE)
            for letter in page:
                after = [letter.first_failed_at, letter.message_id]
                yield SelectedMessage(letter.message_id, after)
            if len(page) < PAGE:
                return

    async def _waiting(
        self, selection: Waiting, after: Any
    ) -> AsyncGenerator[SelectedMessage, None]:
        while True:
            which = (
                selection.which if after is None else replace(selection.which, after_place=after)
            )
            async with self.database.begin() as unit:
                page = await unit.waiting.find(which, PAGE)
            for waiting in page:
                after = waiting.place
                yield SelectedMessage(waiting.message_id, after)
            if len(page) < PAGE:
                return

    async def _records(
        self, partition: Partition, first: int, last: int
    ) -> AsyncGenerator[SelectedMessage, None]:
        reader = need_reader(self.reader)
        for start in range(first, last + 1, PAGE):
            records: Sequence[Record] = await reader.read(
                partition, start, min(start + PAGE - 1, last)
            )
            for record in filter(self._is_meant, records):
                yield self._item(record)

    def _is_meant(self, record: Record) -> bool:
        if isinstance(self.selection, Times):
            return self.selection.since <= record.timestamp < self.selection.until
        return True

    def _item(self, record: Record) -> SelectedMessage:
        arrival = self.consumer.reading.read(record)
        return SelectedMessage(arrival.id, record.at.offset, arrival)


@dataclass(slots=True)
class OutsideInbox:
    """A database in whose transactions no inbox can store one message of one consumer."""

    database: OperatorDatabase
    consumer: str
    message_id: str
    stored_instead: Skipped | RetryLater | None = None
    """What became of the message where the inbox had it first."""

    @property
    def classification(self) -> Classification:
        """What the database's own exceptions mean."""
        return self.database.classification

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[OperatorUnit]:
        """Open a transaction that holds the message's inbox row until it ends.

        Raises:
            Retryable: the inbox has the message; nothing was done.
        """
        async with self.database.begin() as unit:
            place = InboxMessage(self.consumer, self.message_id, payload=None)
            if not await unit.inbox.store(place):
                known = await unit.inbox.get(self.consumer, self.message_id)
                is_over = known is not None and known.processed_at is not None
                self.stored_instead = Skipped("duplicate") if is_over else RetryLater(0.0)
                raise Retryable(f"consumer {self.consumer}: its inbox has {self.message_id!r}")
            yield unit
            await unit.inbox.withdraw(self.consumer, self.message_id)

    async def close(self) -> None:
        """Nothing to give back."""


async def try_given_up(
    consumer: Consumer, database: OperatorDatabase, stored: InboxMessage, act: Act, at_most: int
) -> Outcome:
    """Handle a message that the inbox's workers gave up, in one transaction with its mark.

    The audit entry is part of it.  Where the handler fails, the workers try it later, or it is
    a dead letter again, as after their own attempts.  Where the transaction could not begin,
    nothing is written, and it comes back.

    Raises:
        NotPossible: it cannot be sent back, or was sent back *at_most* times.
        Undecodable: its payload cannot be read.
        InDoubt: it is unknown whether the commit happened; the row shows it later.
    """
    # Its attempts are forgotten when it is sent back.
    message = message_of_inbox(consumer, replace(stored, attempts=0))
    attempt = Attempt(consumer, message)
    try:
        async with acting(database) as unit:
            await need_not_too_often(unit, stored.consumer, stored.message_id, at_most)
            await send_back(unit, stored)
            await unit.audit.append(act)
            result = await handle(unit, attempt)
            attempt.ended = True
    except Exception as error:
        if isinstance(error, NotPossible) and not attempt.began:
            raise
        failure = attempt.failure(database, error)
        if attempt.says_nothing(error) or failure.is_conflict:
            if attempt.ended:
                raise
            return attempt.comes_back(failure)
    else:
        return Handled(result)
    return await _failed(consumer, database, stored, act, failure)


async def _failed(
    consumer: Consumer,
    database: OperatorDatabase,
    stored: InboxMessage,
    act: Act,
    failure: Classified,
) -> Outcome:
    """Write that a message was sent back and failed: its transaction was rolled back."""
    name, message_id, settings = stored.consumer, stored.message_id, consumer.settings
    fate = verdict(settings.retry, failure, 1)
    delay_seconds = fate.seconds if isinstance(fate, RetryIn) else None
    async with acting(database) as unit:
        letter = await unit.dead_letters.get(name, message_id)
        await send_back(unit, stored)
        await unit.audit.append(act)
        why = f"{failure.code}: {failure.reason}"
        attempts = await unit.inbox.failed(name, message_id, why, delay_seconds)
        await keep_attempt_of_inbox(unit, name, message_id, failure)
        if delay_seconds is not None:
            return RetryStored(failure, attempts)
        if letter is not None:
            again = replace(
                letter,
                reason=failure.reason,
                exception=failure.exception,
                error_code=failure.code,
                attempts=attempts,
                last_failed_at=await unit.now(),
                owner=settings.dead_letter_owner,
                outcome=Told.DLQ.value,
                needs_review=settings.review_dead_letters,
            )
            await keep_letter(unit, settings, again)
    return DeadLettered(failure)


Handle: TypeAlias = Callable[[Message, WaitingMessage | None], Awaitable[Outcome]]
"""How a consumer's messages are handled, where that is not in one transaction."""


# After this many tries, the transaction that holds the lock will not end soon.
TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How one message is replayed: by whom, why, and what limits it."""

    actor: str
    reason: str
    most_replays: int
    """The loop guard: how often a message may be sent back, by replays and by hand together."""

    rules: ReplayRules = field(default_factory=ReplayRules)
    """Which topics' messages may be replayed, and how old those without a claim may be."""


def replaying(consumer: Consumer) -> Consumer:
    """Return the consumer as a replay runs it.

    Duplicates are skipped even where deliveries invoke the handler, and what fails waits in
    the retry table: no broker will deliver it again.  So no partition is held back; a
    key is held, even if deliveries of the consumer do not hold it.
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
    """Handles the messages of a replay, in one transaction or a few each."""

    def __init__(
        self,
        consumer: Consumer,
        database: OperatorDatabase,
        options: ReplayOptions,
        handle: Handle | None = None,
    ) -> None:
        self.consumer = replaying(consumer)
        self.database = database
        self.options = options
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
            return await handle_message(self.consumer, self.database, message, waiting)
        outside = OutsideInbox(self.database, self.consumer.name, message.id)
        outcome = await handle_message(self.consumer, outside, message)
        return outside.stored_instead or outcome

    async def _try(self, message: Message, waiting: WaitingMessage | None) -> Outcome:
        return await self._ask(message.id, message, lambda: self._handle(message, waiting))

    async def _ask(
        self,
        message_id: str,
        what: Message | InboxMessage,
        handle: Callable[[], Awaitable[Outcome]],
    ) -> Outcome:
        """Handle a message; where its transaction could not begin, try again.

        Raises:
            ReplayInterrupted: none of the tries could begin.
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

    async def look(self, item: SelectedMessage) -> Replayed | None:
        """Decide without trying; None where the message should be tried."""
        digest = item.arrival.digest if isinstance(item.arrival, Message) else ""
        name, message_id = self.consumer.name, item.message_id
        async with self.database.begin() as unit:
            row = await unit.claims.look_up(name, message_id)
            stored = await unit.inbox.get(name, message_id)
            now = await unit.now()
        if stored is not None and stored.processed_at is not None:
            return Replayed(message_id, ReplayResult.DUPLICATE)
        if row is not None and found_of(row, digest, now) is ClaimFound.OTHER_PAYLOAD:
            return Replayed(
                message_id, ReplayResult.REFUSED, "its id is known with another payload"
            )
        if row is not None and row.state is ClaimState.COMPLETED:
            return Replayed(message_id, ReplayResult.DUPLICATE)
        return self._too_old(item, row, now)

    def _too_old(self, item: SelectedMessage, row: ClaimRow | None, now: float) -> Replayed | None:
        arrival = item.arrival
        if row is not None or not isinstance(arrival, Message):
            return None
        window = self.options.rules.of(_topic(arrival)).reaches_seconds
        if now - arrival.timestamp <= window:
            return None
        why = (
            f"it is older than the replay window of {window / DAY_SECONDS:g} days and has no "
            f"claim, so it is unknown whether it was handled"
        )
        return Replayed(item.message_id, ReplayResult.REFUSED, why)

    async def take(self, item: SelectedMessage) -> Replayed:
        """Handle a message; send it back or release it first, where that is needed."""
        name, message_id = self.consumer.name, item.message_id
        async with self.database.begin() as unit:
            waiting = await unit.waiting.get(name, message_id)
            letter = await unit.dead_letters.get(name, message_id)
            stored = await unit.inbox.get(name, message_id)
        refusal = self._refusal(item, waiting, stored, letter)
        if refusal is not None:
            return Replayed(message_id, ReplayResult.REFUSED, refusal)
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
            return Replayed(message_id, ReplayResult.REFUSED, str(error))
        if isinstance(item.arrival, Unreadable):
            outcome = await handle_unreadable(self.consumer, self.database, item.arrival)
            tell(item.arrival, outcome, self.consumer.name)
            return replayed(message_id, outcome)
        return Replayed(message_id, ReplayResult.MISSING, "its payload is in no table any more")

    def _refusal(self, item: SelectedMessage, *kept: StoredMessage | None) -> str | None:
        """Say why the policy of its topic forbids it; where the topic is unknown, of any."""
        topics = {one.topic for one in kept if one is not None}
        if item.arrival is not None:
            topics.add(_topic(item.arrival))
        return self.options.rules.of(*topics).refusal

    async def _waiting(self, waiting: WaitingMessage) -> Replayed:
        name, message_id = self.consumer.name, waiting.message_id
        if waiting.erased_at is not None:
            return Replayed(message_id, ReplayResult.REFUSED, ERASED_REASON)
        message = message_of(self.consumer, waiting)
        if isinstance(message, Unreadable):
            return Replayed(
                message_id, ReplayResult.REFUSED, f"it cannot be read: {message.reason}"
            )
        if waiting.waits is Waits.PARKED:
            options = self.options
            async with self.database.begin() as unit:
                await need_not_too_often(unit, name, message_id, options.most_replays)
            await release(
                self.database, name, message_id, actor=options.actor, reason=options.reason
            )
        async with self.database.begin() as unit:
            turn = await unit.waiting.take(name, message_id)
        if turn is None:
            return Replayed(message_id, ReplayResult.LEFT, "it is not its turn, or not yet due")
        return replayed(message_id, await self._try(message, turn))

    async def _letter(self, letter: DeadLetter) -> Replayed:
        name, message_id = self.consumer.name, letter.message_id
        if letter.outcome == Told.CONFLICT:
            why = "its id is known with another payload: park it and give it a new id, or skip it"
            return Replayed(message_id, ReplayResult.REFUSED, why)
        if letter.erased_at is not None:
            return Replayed(message_id, ReplayResult.REFUSED, ERASED_REASON)
        found = message_of(self.consumer, letter)
        if isinstance(found, Unreadable):
            return Replayed(message_id, ReplayResult.REFUSED, f"it cannot be read: {found.reason}")
        if found.id != message_id:
            return replace(await self._read_at_last(letter, found), message_id=message_id)
        await retry_dead_letter(
            self.database,
            name,
            message_id,
            actor=self.options.actor,
            reason=self.options.reason,
            at_most=self.options.most_replays,
        )
        async with self.database.begin() as unit:
            waiting = await unit.waiting.get(name, message_id)
        if waiting is None:
            return Replayed(message_id, ReplayResult.LEFT, "another worker has it")
        return await self._waiting(waiting)

    async def _arrived(self, message: Message) -> Replayed:
        """Handle a record that is in none of our tables."""
        letter = None
        if message.source is not None:
            filed_as = unreadable_id(message.source)
            async with self.database.begin() as unit:
                letter = await unit.dead_letters.get(self.consumer.name, filed_as)
        if letter is not None:
            return await self._read_at_last(letter, message)
        outcome = await self._try(message, None)
        if isinstance(outcome, Handled | Skipped):
            # No delivery marks its offset.  One that was refused may be a loss, and stays one.
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
        if done.result is not ReplayResult.LEFT:
            await self._close(letter, Ended(message.id, letter.source, outcome))
        return done

    async def _close(self, letter: DeadLetter, ended: Ended) -> None:
        """Delete the dead letter of an unreadable record: its message has an id now."""
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
            return Replayed(message_id, ReplayResult.DUPLICATE)
        if stored.due_at is not None:
            return Replayed(message_id, ReplayResult.LEFT, "an inbox worker tries it")
        if stored.erased_at is not None:
            return Replayed(message_id, ReplayResult.REFUSED, ERASED_REASON)
        most = self.options.most_replays
        try:
            outcome = await self._ask(
                message_id,
                stored,
                lambda: try_given_up(self.consumer, self.database, stored, act, most),
            )
        except Undecodable:
            # Refusals are kept with the replay, so they must not quote the payload.
            return Replayed(message_id, ReplayResult.REFUSED, "it cannot be read")
        return replayed(message_id, outcome)

    def _act(self, act: str, message_id: str, **details: str) -> Act:
        options = self.options
        return Act(options.actor, act, self.consumer.name, message_id, options.reason, details)


def _topic(arrival: Message | Unreadable) -> str:
    at = arrival.record.at if isinstance(arrival, Unreadable) else arrival.source
    return "" if at is None else at.topic
