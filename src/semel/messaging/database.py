"""The database as the engine uses it: protocols of the nine stores and of one transaction.

    async with database.begin() as unit:
        answer = await unit.claims.try_claim("billing", request)
        …
                                            committed here: everything, or nothing

`semel.sql` implements them.  The engine reaches the database only through these protocols.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from semel.errors import Misuse
from semel.message import Message, Partition
from semel.messaging.failure import Classification
from semel.messaging.handle.claims import ClaimAnswer, Claimed, ClaimRequest, ClaimRow, Failure
from semel.messaging.outcome import OutcomeRange
from semel.messaging.records import (
    ConsumerEngine,
    DeadLetter,
    FailedAttempt,
    Gap,
    InboxMessage,
    Member,
    MessageFilter,
    Note,
    WaitingFilter,
    WaitingMessage,
)
from semel.messaging.redact import reason_of
from semel.messaging.send.outbox import Leader, Leadership, OutboxEntry, OutboxNumbers
from semel.policy.vocabulary import StalePolicy

log = logging.getLogger("semel.messaging")


@dataclass(slots=True)
class Sweep:
    """How far one run of retention has come in a table.

    Each batch begins where the last one ended: otherwise every batch would read all the rows
    again that stay.
    """

    reached: dict[str, float] = field(default_factory=dict)
    """The place of the row that was deleted last, by part of the table."""

    def since(self, part: str = "") -> float:
        """Return the first place of the next batch."""
        return self.reached.get(part, 0)

    def note(self, places: list[int] | list[float], part: str = "") -> int:
        """Record the places of deleted rows; return how many there are."""
        if places:
            self.reached[part] = max(places)
        return len(places)


class ProcessedMessageStore(Protocol):
    """The claims of one open transaction; nothing here ends it.

    The contract is executable: `semel.testing.ClaimsContract`.
    """

    async def claim(self, *, consumer_name: str, event_id: str) -> bool:
        """Claim a message; False if it was handled before.

        Raises:
            NotClaimable: neither is true: the message is held by another owner, not due, parked,
                a dead letter, or a conflict.
            Retryable: the database could not be asked.
        """

    async def try_claim(self, consumer: str, request: ClaimRequest) -> ClaimAnswer:
        """Claim as COMPLETED: the final state, durable when the caller's transaction commits.

        Raises:
            Locked: another transaction holds it, and did not end within the lock timeout.
            Retryable: the database could not be asked.
        """

    async def try_claim_many(
        self, consumer: str, requests: Sequence[ClaimRequest]
    ) -> list[ClaimAnswer]:
        """Claim a batch in one statement, sorted; answers in the given order.

        The answers are the same as for claims one by one: an id that occurs a second time in
        the batch is a duplicate of the first, or a conflict.

        Raises:
            Locked: one of them is held by another transaction; claim them one by one.
        """

    async def lease(
        self,
        consumer: str,
        request: ClaimRequest,
        *,
        owner: str,
        seconds: float,
        stale: StalePolicy = StalePolicy.RECLAIM,
    ) -> ClaimAnswer:
        """Claim as IN_PROGRESS with a lease; the caller commits before it handles.

        Raises:
            Locked: another transaction holds it, and did not end within the lock timeout.
            Retryable: the database could not be asked.
        """

    async def renew(self, consumer: str, message_id: str, fence: int, seconds: float) -> bool:
        """Make the lease last *seconds* from now; False if the lease was lost.

        An owner may renew a lease that has run out, if no other owner has taken it.
        """

    async def lock_expired(self, consumer: str, message_id: str, fence: int) -> bool:
        """Lock an expired lease: until this transaction ends, it cannot be renewed or taken.

        False, and nothing locked, if *fence* is no longer its fence, or it was renewed.
        """

    async def mark_completed(
        self, consumer: str, message_id: str, fence: int | None = None, result: str | None = None
    ) -> bool:
        """Complete a leased claim; False, and nothing changed, if *fence* is not its fence.

        No result is kept of a message that was erased.  Without a fence: complete a claim in any
        other state (an operator's skip).
        """

    async def mark_failed(
        self, consumer: str, message_id: str, failure: Failure, fence: int | None = None
    ) -> bool:
        """Write a failed attempt; False, and nothing changed, if its state is `CLOSED`.

        Another worker or a person may have closed the message while it was tried; only `reopen`
        opens it again.  With a fence: only if the claim is still leased under it.
        """

    async def undo(self, consumer: str, message_id: str, failure: Failure) -> ClaimRow:
        """Turn a claim that *this* transaction took into a failed attempt, and return it.

        For batches: the claims of failed messages and the effects of the others are in one
        transaction.

        Raises:
            Misuse: there is no such claim.
        """

    async def give_back(self, consumer: str, message_id: str, claimed: Claimed) -> None:
        """Undo a claim that *this* transaction took, as if it had not been taken."""

    async def keep_result(
        self, consumer: str, message_id: str, result: str, key: str | None = None
    ) -> None:
        """Write what the handler returned to a claim that this transaction took.

        With the message's *key*, by which it can be erased.  Nothing is kept of a message
        that was erased.
        """

    async def pass_over(self, consumer: str, message_id: str, marker: str) -> None:
        """Write to a claim that this transaction took why its message has no effect.

        One of `WITHOUT_EFFECT`: nothing is sent again for its duplicates.
        """

    async def reopen(self, consumer: str, message_id: str) -> bool:
        """Make a dead-lettered or parked message claimable again, with its attempts back at 0.

        False, and nothing changed, in every other state.
        """

    async def look_up(self, consumer: str, message_id: str) -> ClaimRow | None:
        """Read a claim without locking it."""


class WaitingStore(Protocol):
    """The waiting table, in one open transaction: messages that are stored and not handled yet.

        RETRY    waits for its time
        PARKED   waits for a person
        BEHIND   waits for an earlier message of its key, which is RETRY or PARKED

    With order per key a waiting message holds its key: later messages of the key wait BEHIND
    it, in order of arrival, and leave in that order.  A key is held exactly as long as the
    table has a message of it; the transaction that removes the last one frees the key.  Only
    one message may overtake the others of its key: the version that they all wait for
    (`semel.messaging.failed.waiting`).
    """

    async def hold(self, consumer: str, keys: Sequence[str]) -> frozenset[str]:
        """Lock the keys, in sorted order, until the transaction ends; return which are held.

        Consumers that keep order per key call it together with the claim: between this answer
        and the commit no other transaction can begin to hold one of the keys.  Holding may end
        meanwhile: then a message that waits BEHIND has its turn at once.

        Raises:
            Locked: another transaction has one of the keys for longer than the lock timeout.
        """

    async def put(self, waiting: WaitingMessage, delay_seconds: float = 0.0) -> WaitingMessage:
        """Add a message at the end of the queue, or update it if it is there; return its row.

        It is due after *delay_seconds*, on the database's clock.  An update changes what it waits
        for, and the failure; place, payload, label and the time of the first failure stay.  An
        erased message stays parked.
        """

    async def take_due(
        self, consumer: str, limit: int, after_place: int = 0
    ) -> Sequence[WaitingMessage]:
        """Lock and return messages whose turn it is, in order of place, after *after_place*.

        These are RETRY messages that are due, and BEHIND messages that are the first of their
        key.  Only the first of each held key.  Messages that another transaction has locked are
        left out.
        """

    async def take(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Lock and return one message, if it is its turn; as `take_due` does with many.

        For a worker that read several messages and begins a transaction for each: meanwhile
        another worker may have handled it, or a person may have changed it.
        """

    async def take_retry(
        self, consumer: str, message_id: str, attempts: int
    ) -> WaitingMessage | None:
        """Lock and return a RETRY message that came back by its topic, due here or not.

        None if it has had another number of *attempts*, or another transaction has locked it.
        """

    async def take_many(
        self, consumer: str, message_ids: Collection[str]
    ) -> Sequence[WaitingMessage]:
        """Lock and return those of several messages whose turn it is, in order of place."""

    async def seconds_to_next(self, consumer: str) -> float | None:
        """Return the seconds until `take_due` finds a message; None if no message will be due."""

    async def get(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Return one waiting message."""

    async def find(self, which: WaitingFilter, limit: int) -> Sequence[WaitingMessage]:
        """Return matching messages in order of place."""

    async def remove_many(self, consumer: str, message_ids: Sequence[str]) -> int:
        """Remove messages, and return how many; removing the last one of a key frees the key."""

    async def let_overtake(self, consumer: str, message_id: str) -> bool:
        """Let a message overtake the earlier ones of its key; it no longer holds its key.

        It still waits until it is due, or for a person.
        """


class DeadLetters(Protocol):
    """The dead letters, in one open transaction: messages that could not be handled."""

    async def put(self, letter: DeadLetter) -> bool:
        """Write a dead letter; False if the message had one, which is updated.

        The first failure's time and the original payload stay.
        """

    async def get(self, consumer: str, message_id: str) -> DeadLetter | None:
        """Return one dead letter."""


class FailedAttempts(Protocol):
    """The failed attempts, in one open transaction: when and why each attempt failed.

    A message that succeeds at once has none.  Only the first and the latest ones are kept, so a
    message that is tried again and again does not fill the disk.
    """

    async def add(self, attempt: FailedAttempt) -> None:
        """Write a message's next failed attempt, in the transaction that holds its claim.

        If there are more than `MOST_KEPT`, delete those between the first and the latest.
        """


class InboxStore(Protocol):
    """The inbox, in one open transaction: messages stored first and handled later (S4-8, S4-9)."""

    async def store(self, message: InboxMessage) -> bool:
        """Write a message that is due at once; False if its id is stored already.

        Waits for another transaction that is writing the same id.

        Raises:
            Locked: that transaction did not end in time.
        """

    async def due(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        """Return messages that no worker has passed on yet, in order of arrival."""

    async def bounds(self, consumer: str) -> tuple[int, int]:
        """Return the places of the first message that is `due`, and after the last; 0 for none."""

    async def settle(self, consumer: str, message_ids: Collection[str]) -> None:
        """Write what the claims of messages show into their rows; they are due no more.

        A message whose claim is completed is processed.  One that waits, is parked or is a dead
        letter has its error.  Without a claim it stays due: nothing has become of it.
        """

    async def settle_again(self, consumer: str) -> None:
        """Write what became meanwhile of messages that waited when they were settled."""

    async def close(self, consumer: str, message_id: str, word: str) -> bool:
        """Mark a message as processed without an effect; an operator's act.

        *word* becomes its error.  False, and nothing changed, if it is processed already.
        """

    async def get(self, consumer: str, message_id: str) -> InboxMessage | None:
        """Return one message."""

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Return the consumers for which a message is stored, sorted."""

    async def pending(self, consumer: str) -> int:
        """Count the messages that are due."""

    async def delete_processed(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* messages that were processed before the given age.

        A message whose outgoing messages are still in the outbox stays: `semel.operate.retention`
        finds them by it.  With a *sweep*: only messages after the place that it reached.
        """

    async def unhandled(self, which: MessageFilter) -> Sequence[tuple[str, str]]:
        """Return consumer and id of matching messages that are due."""

    async def erase(self, which: MessageFilter) -> int:
        """Remove payload, headers and result of matching messages; they are not tried again.

        An unprocessed message gets the error ``ERASED`` instead of the text of an exception.  If
        it is in no other table it is closed, because a person could do nothing with it.

        Waits for transactions that hold one of them.

        Raises:
            Misuse: neither an id nor a key is given.
        """


class Members(Protocol):
    """The running processes and their crash notes, in one open transaction.

    A process writes its row when it starts, names the partitions it works on, and removes the
    row at a clean stop.  A row without its process means that a message in flight may have
    killed it: the next process with the partition handles what was in flight one at a time.
    """

    async def enter(self, member: Member, seconds: float) -> None:
        """Write or renew a member's row, with its partitions, for *seconds* from now."""

    async def leave(self, consumer: str, name: str) -> None:
        """Remove a row: its process ended cleanly, or all that it left was handled."""

    async def others(
        self, consumer: str, name: str, partitions: Collection[Partition]
    ) -> Sequence[Member]:
        """Return other members' rows that name one of *partitions*."""

    async def running(self, consumer: str) -> Sequence[Member]:
        """Return the rows that have not expired."""

    async def engine(self, consumer: str) -> ConsumerEngine | None:
        """Return the pipeline that runs the consumer; None if services do."""

    async def suspect(self, consumer: str, message_id: str, writer: str) -> int:
        """Note one more try of a message, by *writer* from now on; return how many there are.

        The number grows until the note is cleared: the note of a message that killed its process
        stays.
        """

    async def note(
        self, consumer: str, message_ids: Collection[str], writer: str
    ) -> Mapping[str, Note]:
        """Note one try of each of several messages, together; return the earlier notes.

        Earlier notes, written here or by `suspect`, stay unchanged, and no other transaction can
        change them before this one ends.
        """

    async def notes(self, consumer: str, message_ids: Collection[str]) -> Mapping[str, Note]:
        """Return the notes of messages, by id."""

    async def clear_notes(
        self, consumer: str, message_ids: Collection[str], writer: str | None = None
    ) -> None:
        """Clear the notes of messages that are over; with a *writer*, only those that it wrote."""

    async def forget_notes(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* notes older than that; return how many."""

    async def release(self, consumer: str, name: str, partition: Partition) -> None:
        """Remove a partition from a row; after the last one, remove the row if it has expired."""

    async def forget_expired(self, consumer: str) -> int:
        """Remove the rows that name no partition and have expired; return how many.

        Another process has handled all that such a process left, before its row expired.
        """


class OutcomeStore(Protocol):
    """The outcome of every offset, as ranges, in one open transaction (B-7).

        handled + duplicate + skipped + parked + dead-lettered + holes = all offsets

    A hole is an offset that the broker never delivers: a transaction marker, or a record that
    compaction removed.  An offset in no range is a loss, or was not reached yet.

    The outcomes of deliveries are written after their transactions, many at once.  A message that
    waits or is a dead letter is not finished with its delivery: the transaction that stores it
    or removes it writes a mark for the offset.  Marks replace nothing, and have precedence over
    the outcome of the delivery.
    """

    async def record(self, consumer: str, ranges: Sequence[OutcomeRange]) -> None:
        """Write ranges; a range that continues a stored one of the same outcome extends it.

        An offset may be in several ranges: it was delivered several times.
        """


class OutboxStore(Protocol):
    """The outbox, in one open transaction."""

    async def add(self, entries: Sequence[OutboxEntry]) -> None:
        """Write entries; one whose id is there already stays unchanged.

        Raises:
            OutboxConflict: an id is there with another topic, key or payload.
        """

    async def cancel(self, outbox: str, message_id: str) -> bool:
        """Delete an entry that was not sent; False if there is none."""

    async def lead(
        self, outbox: str, owner: str, seconds: float, *, instead_of: str = ""
    ) -> Leadership | None:
        """Take or keep the leadership; None while the lease of another owner lasts.

        The epoch rises with every new owner.  *instead_of* is an owner that is known to be gone:
        its lease is not waited for.
        """

    async def leader(self, outbox: str) -> Leader | None:
        """Return the leader; None if the outbox never had one."""

    async def resign(self, leadership: Leadership) -> None:
        """Give the leadership up; does nothing if it was lost."""

    async def read(self, outbox: str, after_place: int, limit: int) -> Sequence[OutboxEntry]:
        """Return entries after *after_place* that are not parked, in order."""

    async def delete(self, leadership: Leadership, places: Sequence[int]) -> int:
        """Delete exactly these entries, if the leadership still holds.

        Raises:
            LeadershipLost: another leader took over; nothing was deleted.
        """

    async def failed(self, leadership: Leadership, places: Sequence[int]) -> None:
        """Count a failed publication of each of these entries.

        Raises:
            LeadershipLost: another leader took over; nothing was counted.
        """

    async def park(self, leadership: Leadership, place: int, reason: str) -> None:
        """Park an entry that the broker will never accept, and count the failure.

        Raises:
            LeadershipLost: another leader took over; nothing was parked.
        """

    async def parked_keys(self, outbox: str) -> frozenset[tuple[str, str]]:
        """Return (topic, key) of the parked entries that block later ones.

        Erased entries block none: they are never sent.
        """

    async def children(self, parent: str) -> Sequence[OutboxEntry]:
        """Return the entries in the outbox that the handling of one message wrote."""

    async def numbers(self, outbox: str) -> OutboxNumbers:
        """Return how many entries are pending, and the age of the oldest."""

    async def erase(
        self, *, message_id: str | None = None, key: str | None = None, parent: str | None = None
    ) -> int:
        """Remove value, headers and the broker's reason of matching entries, and park them.

        *key* is that of an entry, or of the message that caused it.

        Raises:
            Misuse: no id, no key and no parent is given.
        """


class Versions(Protocol):
    """The applied versions, in one open transaction."""

    async def current(self, consumer: str, key: str) -> int | None:
        """Lock a key and return the version that was applied last; None if there is none."""

    async def advance(self, consumer: str, key: str, version: int) -> None:
        """Write the version that is applied with this transaction."""

    async def open_gap(self, gap: Gap) -> None:
        """Write a gap; one that is open already keeps its time."""

    async def close_gaps(
        self, consumer: str, key: str, up_to: int, how: str, after: int | None = None
    ) -> int:
        """Close the key's gaps whose missing versions are all at or below *up_to*.

        With *after*, only gaps whose last missing version is greater than it.  A gap that ends at
        or before the version that was applied last was crossed, and nothing has filled it.
        """


class TransactionEnded(Misuse):
    """A handler ended the transaction of its unit, past every guard.

    Everything done in it may be durable, including the claim of that message.  So nothing more is
    done in it, and no message of the batch is acknowledged.  The claims of messages of the batch
    that were not handled yet are given back, so that their next delivery handles them.
    """

    def __init__(self, message_id: str = "") -> None:
        super().__init__(message_id)
        self.message_id = message_id
        """The message whose handler used the connection last; empty if no handler did."""

        self.behind: Sequence[tuple[Message, Claimed]] = ()
        """The messages of the batch that were claimed and not handled."""

    def __str__(self) -> str:
        handler = f"the handler of message {self.message_id!r}" if self.message_id else "a handler"
        return (
            f"{handler} has ended the transaction of its messages, past every guard: its claim may "
            f"be durable without its effect. Compare the two before the message is acknowledged"
        )


class Unit(Protocol):
    """One open transaction; what is done through it becomes durable together or not at all."""

    @property
    def session(self) -> Any:
        """What handlers get: it can write, but cannot end the transaction."""

    @property
    def claims(self) -> ProcessedMessageStore:
        """The claims."""

    @property
    def attempts(self) -> FailedAttempts:
        """The failed attempts."""

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters."""

    @property
    def waiting(self) -> WaitingStore:
        """The waiting table: retries and parked messages."""

    @property
    def outbox(self) -> OutboxStore:
        """The outgoing messages."""

    @property
    def inbox(self) -> InboxStore:
        """The stored incoming messages."""

    @property
    def members(self) -> Members:
        """The running processes."""

    @property
    def outcomes(self) -> OutcomeStore:
        """The outcome of every offset."""

    @property
    def versions(self) -> Versions:
        """The applied versions of aggregates."""

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Undo what the block did if it raises, and only that.

        The end of the block flushes the session, so that errors of pending writes belong to the
        block.
        """

    async def begin_message(self) -> None:
        """Prepare the session for the next handler, as if no other had used it.

        The handler reads the database, including what earlier messages of the batch wrote.
        """

    async def now(self) -> float:
        """Return the database's time, in seconds since 1970."""


class Database(Protocol):
    """The database of messages, claims and effects."""

    @property
    def classification(self) -> Classification:
        """What this database's own exceptions mean."""

    def begin(self) -> AbstractAsyncContextManager[Unit]:
        """Open a transaction: committed when the block ends, rolled back when it raises.

        Isolation is READ COMMITTED, regardless of the engine's default.

        Raises:
            Retryable: there is no connection, or the commit was refused for now (a
                serialization failure, a deadlock): the whole block may be run again.
            InDoubt: the commit was sent and no answer came back.
        """

    async def close(self) -> None:
        """Close the connections."""


def is_refusal(database: Database, consumer: str, error: Exception) -> bool:
    """Return whether *error* comes from the database, and log it; False for any other error.

    The caller then tries again: a failover or a migration ends, a missing right is granted, and a
    service that had stopped would not start again by itself.  But the cause may also be a bug,
    so it is logged as an error every time.
    """
    if not database.classification.is_of_database(error):
        return False
    why = reason_of(error)
    statement = getattr(error, "statement", None)
    log.error(
        "the database refuses, and is asked again: %s",
        why,
        extra={"consumer": consumer, "why": why, "statement": statement},
    )
    return True
