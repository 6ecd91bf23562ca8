"""One database, one transaction: the protocols of the nine stores and of the unit that has them.

    async with database.begin() as unit:
        answer = await unit.claims.try_claim("billing", request)
        …
                                            committed here, all of it, or none

`semel.sql` implements them; the engine knows no other way in.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from semel.errors import Misuse
from semel.message import Coordinates, Partition
from semel.messaging.failure import Classification
from semel.messaging.handle.claims import ClaimAnswer, Claimed, ClaimRequest, ClaimRow, Failure
from semel.messaging.outcome import OutcomeRange
from semel.messaging.records import (
    DeadLetter,
    DeadLetterFilter,
    FailedAttempt,
    Gap,
    HeldKey,
    InboxMessage,
    Member,
    MessageFilter,
    Note,
    WaitingFilter,
    WaitingMessage,
    Waits,
)
from semel.messaging.redact import reason_of
from semel.messaging.send.outbox import Leader, Leadership, OutboxEntry, OutboxNumbers
from semel.policy.vocabulary import StalePolicy

log = logging.getLogger("semel.messaging")


@dataclass(slots=True)
class Sweep:
    """How far one run of retention has come through a table.

    The next batch begins behind what was looked at: otherwise every batch would read again all
    the rows that stay.
    """

    reached: dict[str, float] = field(default_factory=dict)
    """By part of the table: the place of the row that was deleted last."""

    def since(self, part: str = "") -> float:
        """Return where the next batch begins, the place itself included."""
        return self.reached.get(part, 0)

    def note(self, places: list[int] | list[float], part: str = "") -> int:
        """Note the places of rows that were deleted; return how many they are."""
        if places:
            self.reached[part] = max(places)
        return len(places)


class ProcessedMessageStore(Protocol):
    """The claims of one open transaction; nothing here ends it.

    The contract is executable: `semel.testing.contracts.ClaimsContract`.
    """

    async def claim(self, *, consumer_name: str, event_id: str) -> bool:
        """Claim a message; False where it was handled before.

        Raises:
            NotClaimable: it is neither: held elsewhere, not due, parked, dead, or a conflict.
            Retryable: the database could not be asked.
        """
        ...

    async def try_claim(self, consumer: str, request: ClaimRequest) -> ClaimAnswer:
        """Claim in its final state: COMPLETED, if and when the caller's transaction commits.

        Raises:
            Locked: another transaction holds it, and did not end within the lock timeout.
            Retryable: the database could not be asked.
        """
        ...

    async def try_claim_many(
        self, consumer: str, requests: Sequence[ClaimRequest]
    ) -> list[ClaimAnswer]:
        """Claim a batch in one statement, sorted; answers in the given order.

        They are those that claims one by one would give: an id that comes a second time in
        the batch is a duplicate of itself, or a conflict.

        Raises:
            Locked: one of them is held by another transaction; claim them one by one.
        """
        ...

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
        ...

    async def renew(self, consumer: str, message_id: str, fence: int, seconds: float) -> bool:
        """Make the lease last *seconds* from now; False if the lease was lost.

        A lease that ran out and was not taken is still its owner's.
        """
        ...

    async def lock_expired(self, consumer: str, message_id: str, fence: int) -> bool:
        """Keep a lease that ran out from being renewed or taken until this transaction ends.

        False, and nothing locked, where *fence* is not its fence any more, or it lasts again.
        """
        ...

    async def mark_completed(
        self, consumer: str, message_id: str, fence: int | None = None, result: str | None = None
    ) -> bool:
        """Complete a leased claim; False, and nothing changed, where *fence* is not its fence.

        No result is kept of a message that was erased.  Without a fence: complete whatever is
        not completed (an operator's skip).
        """
        ...

    async def mark_failed(
        self, consumer: str, message_id: str, failure: Failure, fence: int | None = None
    ) -> bool:
        """Write a failed attempt; False, and nothing changed, where its state is `CLOSED`.

        An attempt that fails late finds what others, or a person, made of the message
        meanwhile; only `reopen` leads out of it.  With a fence: only if the claim is still
        leased under it.
        """
        ...

    async def erase(self, consumer: str, message_id: str) -> bool:
        """Remove the kept result of a message, and note that its payload was erased.

        Waits for a transaction that holds the claim; its state stays.  Tells whether there
        was a result.
        """
        ...

    async def erase_key(self, key: str) -> int:
        """Remove the results that were kept with this key, and note that; say how many."""
        ...

    async def undo(self, consumer: str, message_id: str, failure: Failure) -> ClaimRow:
        """Turn a claim that *this* transaction took into a failed attempt, and return it.

        For batches, where the claims of failed messages and the effects of the others
        share a transaction.

        Raises:
            Misuse: there is no such claim.
        """
        ...

    async def give_back(self, consumer: str, message_id: str, claimed: Claimed) -> None:
        """Give up a claim that *this* transaction took, as if it had never been asked for."""
        ...

    async def keep_result(
        self, consumer: str, message_id: str, result: str, key: str | None = None
    ) -> None:
        """Write what the handler returned beside a claim that this transaction took.

        With the message's *key*, by which it can be erased.  Nothing is kept of a message
        that was erased.
        """
        ...

    async def pass_over(self, consumer: str, message_id: str, code: str) -> None:
        """Write beside a claim that this transaction took why its message has no effect.

        One of the codes of `WITHOUT_EFFECT`: nothing is sent again for its duplicates.
        """
        ...

    async def expect_payload(self, consumer: str, message_id: str, payload_hash: str) -> None:
        """Replace the hash that repetitions are compared with, after an audited revision."""
        ...

    async def reopen(self, consumer: str, message_id: str) -> bool:
        """Make a dead or parked message claimable again, its attempts counted from the start.

        False, and nothing changed, in every other state.
        """
        ...

    async def look_up(self, consumer: str, message_id: str) -> ClaimRow | None:
        """Read a claim without locking it."""
        ...

    async def in_progress(
        self, consumer: str, limit: int, *, expired: bool = False
    ) -> Sequence[ClaimRow]:
        """List the claims under a lease, the one that ends first before the others.

        With *expired*: only those whose lease has run out.
        """
        ...

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Name the consumers that have a claim on a message, in order."""
        ...

    async def handled_from(
        self, consumer: str, places: Sequence[Coordinates]
    ) -> Sequence[Coordinates]:
        """Return those places whose messages have a claim that is COMPLETED, with its effect.

        A claim knows the delivery that was claimed first.  Slow: every claim is looked at.
        """
        ...

    async def delete_expired(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* terminal claims that were last changed so long ago.

        The claim of a message that waits or is a dead letter stays: sending it back must find
        whether it was handled.  So does that of one whose outgoing messages are still here:
        `semel.operate.retention` finds them by it.  With a *sweep*: only behind what it reached.
        """
        ...


class WaitingRoom(Protocol):
    """The waiting table, in one open transaction: messages that are stored and not handled yet.

        RETRY    waits for its time
        PARKED   waits for a person
        BEHIND   waits for an earlier message of its key that is one of the other two

    With order per key a waiting message holds its key: later messages of the key wait BEHIND
    it, in order of arrival, and leave in that order.  A key is held exactly as long as the
    table has a message of it; the transaction that removes the last one frees the key.  Only
    the version that others of its key wait for overtakes them
    (`semel.messaging.failed.waiting`).
    """

    async def hold(self, consumer: str, keys: Sequence[str]) -> frozenset[str]:
        """Lock the keys, in sorted order, until the transaction ends; say which are held.

        Called with the claim by consumers that keep order per key: between this answer and
        the commit no other transaction can begin to hold one of the keys.  Holding may end
        meanwhile: a message with nothing of its key before it has its turn at once.

        Raises:
            Locked: another transaction has one of the keys for longer than the lock timeout.
        """
        ...

    async def put(self, waiting: WaitingMessage, delay_seconds: float = 0.0) -> None:
        """Add a message at the end of the queue; one that is there already is updated.

        *delay_seconds* until it is due, on the database's clock.  An update changes for what it
        waits, and after which failure; place, payload, label and the first failure's time stay.
        An erased message stays parked.
        """
        ...

    async def take_due(
        self, consumer: str, limit: int, after_place: int = 0
    ) -> Sequence[WaitingMessage]:
        """Lock and return messages whose turn it is, in order of place, behind *after_place*.

        These are RETRY messages that are due, and BEHIND messages before which nothing of
        their key is left.  Only the first of each held key.  Messages that another
        transaction has locked are left out.
        """
        ...

    async def take(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Lock and return one message, if it is its turn; as `take_due` does with many.

        For a worker that took several and begins a transaction for each: another worker may
        have handled it, and a person may have changed it, meanwhile.
        """
        ...

    async def take_many(
        self, consumer: str, message_ids: Collection[str]
    ) -> Sequence[WaitingMessage]:
        """Lock and return those of several messages whose turn it is, in order of place."""
        ...

    async def seconds_to_next(self, consumer: str) -> float | None:
        """Return the seconds until `take_due` has something; None where nothing waits for time."""
        ...

    async def get(self, consumer: str, message_id: str) -> WaitingMessage | None:
        """Return one waiting message."""
        ...

    async def find(self, which: WaitingFilter, limit: int) -> Sequence[WaitingMessage]:
        """Return matching messages in order of place."""
        ...

    async def count(self, which: WaitingFilter) -> int:
        """Count matching messages."""
        ...

    async def held_keys(self, consumer: str, limit: int) -> Sequence[HeldKey]:
        """Return the keys that are held, the longest first."""
        ...

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Remove a message; removing the last one of its key frees the key."""
        ...

    async def remove_many(self, consumer: str, message_ids: Sequence[str]) -> None:
        """Remove messages, as `remove` does with one."""
        ...

    async def label(self, consumer: str, message_id: str, label: str) -> bool:
        """Write what a person classified it as."""
        ...

    async def release(self, consumer: str, message_id: str) -> bool:
        """Make a parked message a retry that is due, in its place; an operator's act.

        False, and nothing changed, where it is not parked, or was erased.
        """
        ...

    async def let_go(self, consumer: str, message_id: str) -> bool:
        """Give a message its turn whatever of its key is before it; it holds its key no more.

        What it waits for besides that, its time or a person, it goes on waiting for.
        """
        ...

    async def revise(
        self, consumer: str, message_id: str, payload: bytes, payload_hash: str, new_id: str
    ) -> bool:
        """Replace what will be handled, and under which id; the place in the queue stays.

        False, and nothing changed, where there is no such message or it was erased.
        """
        ...

    async def erase(self, which: WaitingFilter) -> int:
        """Remove payload, headers and reason of matching messages; hashes and error codes stay.

        What was erased cannot be handled: it is parked from now on.
        """
        ...

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[tuple[int, Waits]]:
        """Return the first offsets between two, both included, whose messages wait, in order.

        With what each waits for: for the audit of completeness.
        """
        ...

    async def forget_keys(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* old locks of keys that no transaction holds."""
        ...


class DeadLetters(Protocol):
    """The dead letters, in one open transaction: messages that could not be handled."""

    async def put(self, letter: DeadLetter) -> bool:
        """Write a dead letter; False where a later failure of the same message updates it.

        The first failure's time and the original payload stay.
        """
        ...

    async def get(self, consumer: str, message_id: str) -> DeadLetter | None:
        """Return one dead letter."""
        ...

    async def find(self, which: DeadLetterFilter, limit: int) -> Sequence[DeadLetter]:
        """Return matching dead letters, the oldest first."""
        ...

    async def count(self, which: DeadLetterFilter) -> int:
        """Count matching dead letters."""
        ...

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Take a dead letter away: it was replayed, skipped, parked or deleted."""
        ...

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[int]:
        """Return the first offsets between two, both included, that have letters, in order.

        For the audit of completeness.
        """
        ...

    async def erase(self, which: MessageFilter) -> int:
        """Remove payload, headers and reason of matching letters; hashes and error codes stay."""
        ...


class FailedAttempts(Protocol):
    """The failed attempts, in one open transaction: when and why each try of a message failed.

    A message that succeeds at once has none.  The first and the latest ones are kept, so a
    message that is tried for ever does not fill the disk.
    """

    async def add(self, attempt: FailedAttempt) -> None:
        """Write a message's next failed attempt, in the transaction that holds its claim.

        Of more than `MOST_KEPT`, those between the first and the latest go.
        """
        ...

    async def of(self, consumer: str, message_id: str) -> Sequence[FailedAttempt]:
        """Return the attempts of one message that are kept, in the order of their writing."""
        ...

    async def erase(self, which: MessageFilter) -> int:
        """Remove the reasons of matching attempts; times, numbers and codes stay."""
        ...

    async def delete_gone(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete attempts so old whose message is gone from everywhere; return how many.

        With a *sweep*: only behind what it reached.
        """
        ...


class InboxStore(Protocol):
    """The inbox, in one open transaction: messages stored first and handled later (S4-8, S4-9)."""

    async def store(self, message: InboxMessage) -> bool:
        """Write a message that is due at once; False where its id is there already.

        Waits for another transaction that is writing the same id.

        Raises:
            Locked: that transaction did not end in time.
        """
        ...

    async def withdraw(self, consumer: str, message_id: str) -> None:
        """Remove a message that *this* transaction stored, as if it had never come.

        Whoever waits to store the same id stores it when the transaction has ended.
        """
        ...

    async def take_due(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        """Lock and return unprocessed messages that are due, in order of arrival.

        Of each key only the first, and none whose key another transaction has locked.  One
        that waits for its next attempt holds back its key; one that is not tried any more
        does not.
        """
        ...

    async def done(self, consumer: str, message_id: str, result: str | None = None) -> None:
        """Mark a message as processed in this transaction, and count the attempt."""
        ...

    async def failed(
        self, consumer: str, message_id: str, error: str, delay_seconds: float | None
    ) -> int:
        """Write a failed attempt and when it is due again (None: never); return the attempts.

        A processed message stays as it is.  An erased one is never due again, and of the
        error nothing is written.
        """
        ...

    async def try_again(self, consumer: str, message_id: str) -> bool:
        """Make a message that is not tried any more due now, its attempts forgotten.

        False, and nothing changed, in every other state; an erased one is never tried again.
        """
        ...

    async def close(self, consumer: str, message_id: str, word: str) -> bool:
        """Mark a message as processed without an effect, by a person's *word*; an operator's act.

        The word is its error from then on.  False, and nothing changed, where it is processed.
        """
        ...

    async def get(self, consumer: str, message_id: str) -> InboxMessage | None:
        """Return one message."""
        ...

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Name the consumers for which a message is stored, in order."""
        ...

    async def pending(self, consumer: str) -> int:
        """Count what is not processed yet and will be tried."""
        ...

    async def delete_processed(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* messages that were processed so long ago.

        Those stay whose outgoing messages are still here: `semel.operate.retention` finds them so.
        With a *sweep*: only behind what it reached.
        """
        ...

    async def erase(self, which: MessageFilter) -> int:
        """Remove payload, headers and result of matching messages; what waited is not tried.

        What was not processed has the error ``ERASED`` instead of an exception's words.  Where
        it has no dead letter it is closed: nothing is left of it that a person could act on.

        Waits for transactions that hold one of them.

        Raises:
            Misuse: neither an id nor a key is given.
        """
        ...


class Members(Protocol):
    """The running processes, in one open transaction, and the notes of what they try.

    A process writes its row when it starts, names the partitions it works on, and removes the
    row at a clean stop.  A row without its process means that a message in flight may have
    killed it: the next process with the partition handles what was in flight one at a time.
    """

    async def enter(self, member: Member, seconds: float) -> None:
        """Write or renew a member's row, with its partitions, for *seconds* from now."""
        ...

    async def leave(self, consumer: str, name: str) -> None:
        """Remove a row: its process ended cleanly, or what it left was worked off."""
        ...

    async def others(
        self, consumer: str, name: str, partitions: Collection[Partition]
    ) -> Sequence[Member]:
        """Return other members' rows that name one of *partitions*."""
        ...

    async def running(self, consumer: str) -> Sequence[Member]:
        """Return the rows that have not expired."""
        ...

    async def suspect(self, consumer: str, message_id: str, writer: str) -> int:
        """Note one more try of a message, by *writer* from now on; return how many there are.

        Counts on until `acquit`: the note of a message that killed its process stays.
        """
        ...

    async def note(
        self, consumer: str, message_ids: Collection[str], writer: str
    ) -> Mapping[str, Note]:
        """Note one try of each of several messages, together; return what was noted before.

        What was noted before, here or by `suspect`, stays as it is, and no other transaction
        changes it before this one ends.
        """
        ...

    async def notes(self, consumer: str, message_ids: Collection[str]) -> Mapping[str, Note]:
        """Return what is noted of messages."""
        ...

    async def acquit(self, consumer: str, message_id: str) -> None:
        """Delete the note of a message, whichever process wrote it."""
        ...

    async def acquit_many(self, consumer: str, message_ids: Collection[str], writer: str) -> None:
        """Delete the notes that *writer* wrote of several messages; those of others stay."""
        ...

    async def forget_notes(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* notes that are that old; return how many."""
        ...

    async def release(self, consumer: str, name: str, partition: Partition) -> None:
        """Take a partition off a row; the last one removes the row if it has expired."""
        ...

    async def forget_expired(self, consumer: str) -> int:
        """Remove the rows that name no partition and have expired; return how many.

        What such a process left was worked off before anybody could know that it had ended.
        """
        ...


class OutcomeStore(Protocol):
    """What became of every offset, as ranges, in one open transaction (B-7).

        handled + duplicate + skipped + parked + dead-lettered + holes = all offsets

    A hole is an offset that the broker never delivers: a transaction marker, or a record that
    compaction removed.  An offset in no range is a loss, or was not reached yet.

    A delivery writes its outcome after its transaction, many at once.  A message that waits or
    is a dead letter has not ended with its delivery: the transaction that stores it or removes
    it marks the offset.  Marks replace nothing, and count more than what the delivery said.
    """

    async def record(self, consumer: str, ranges: Sequence[OutcomeRange]) -> None:
        """Write ranges; one that continues a kept range of the same outcome extends it.

        An offset may be in several ranges: it was delivered several times.
        """
        ...

    async def ranges(self, consumer: str, partition: Partition) -> Sequence[OutcomeRange]:
        """Return the ranges of a partition in order."""
        ...

    async def covering(self, consumer: str, at: Coordinates) -> Sequence[OutcomeRange]:
        """Return the ranges that an offset is in, in the order in which they began."""
        ...

    async def partitions(self, consumer: str) -> Sequence[Partition]:
        """Return the partitions that have ranges."""
        ...

    async def prune(self, consumer: str, partition: Partition, below: int, limit: int) -> int:
        """Forget ranges that lie wholly below an offset, the lowest first; return how many.

        How a message ended is not forgotten before what says that it was kept.
        """
        ...


class OutboxStore(Protocol):
    """The outbox, in one open transaction."""

    async def add(self, entries: Sequence[OutboxEntry]) -> None:
        """Write entries; one that is there already is left as it is.

        Raises:
            OutboxConflict: an id is there with another topic, key or payload.
        """
        ...

    async def lead(
        self, outbox: str, owner: str, seconds: float, *, instead_of: str = ""
    ) -> Leadership | None:
        """Take or keep the leadership; None while another owner's lease lives.

        The epoch stays the same while the owner does, and rises with every other one.  The
        lease of *instead_of*, an owner that is known to be gone, is not waited for.
        """
        ...

    async def leader(self, outbox: str) -> Leader | None:
        """Return who relays; None if the outbox never had a leader."""
        ...

    async def resign(self, leadership: Leadership) -> None:
        """Give the leadership up; nothing happens where it was lost."""
        ...

    async def read(self, outbox: str, after_place: int, limit: int) -> Sequence[OutboxEntry]:
        """Return entries behind *after_place* that are not parked, in order."""
        ...

    async def delete(self, leadership: Leadership, places: Sequence[int]) -> int:
        """Delete exactly these entries, if the leadership still stands.

        Raises:
            LeadershipLost: another leader took over; nothing was deleted.
        """
        ...

    async def failed(self, leadership: Leadership, places: Sequence[int]) -> None:
        """Count a failed publication of each of these entries.

        Raises:
            LeadershipLost: another leader took over; nothing was counted.
        """
        ...

    async def park(self, leadership: Leadership, place: int, reason: str) -> None:
        """Park an entry that the broker will never take, and count the failure.

        Raises:
            LeadershipLost: another leader took over; nothing was parked.
        """
        ...

    async def unpark(self, outbox: str, message_id: str) -> bool:
        """Send a parked entry again, as if for the first time; an operator's act.

        False where there is no such parked entry, or its payload was erased.
        """
        ...

    async def drop(self, outbox: str, message_id: str) -> bool:
        """Take a parked entry out for good; an operator's act."""
        ...

    async def parked(self, outbox: str, limit: int) -> Sequence[OutboxEntry]:
        """Return the parked entries, in order."""
        ...

    async def parked_keys(self, outbox: str) -> frozenset[tuple[str, str]]:
        """Return (topic, key) of parked entries that later ones wait for; of erased ones, none.

        What was erased is never sent, so nothing can overtake it.
        """
        ...

    async def children(self, parent: str) -> Sequence[OutboxEntry]:
        """Return entries that handling one message wrote and that are still here."""
        ...

    async def numbers(self, outbox: str) -> OutboxNumbers:
        """Count what is pending and say how old the oldest is."""
        ...

    async def erase(
        self, *, message_id: str | None = None, key: str | None = None, parent: str | None = None
    ) -> int:
        """Remove value, headers and the broker's words of matching entries, and park them all.

        *key*: of an entry, or of the message that caused it.

        Raises:
            Misuse: no id, no key and no parent is given.
        """
        ...


class Versions(Protocol):
    """The applied versions, in one open transaction."""

    async def current(self, consumer: str, key: str) -> int | None:
        """Lock a key and return the version that was applied last; None where none was."""
        ...

    async def advance(self, consumer: str, key: str, version: int) -> None:
        """Write the version that is applied with this transaction."""
        ...

    async def open_gap(self, gap: Gap) -> None:
        """List a gap; one that is listed already keeps its time."""
        ...

    async def close_gaps(
        self, consumer: str, key: str, up_to: int, how: str, after: int | None = None
    ) -> int:
        """Close the key's gaps whose missing versions are all at or below *up_to*.

        Of those, with *after*, only the ones of which the last is behind it: a gap that ends at
        or before the version that was applied last was crossed, and nothing has filled it.
        """
        ...

    async def gaps(self, consumer: str | None, limit: int) -> Sequence[Gap]:
        """Return the open gaps, the oldest first."""
        ...

    async def delete_closed(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete gaps that are closed since so long; return how many."""
        ...


class TransactionEnded(Misuse):
    """A handler ended the transaction of its unit, past every guard.

    Whatever had been done in it may be durable, including claims of messages that were
    not handled.  Nothing more is done in it, and no message of a batch is acknowledged.
    """

    def __init__(self, message_id: str = "") -> None:
        super().__init__(message_id)
        self.message_id = message_id
        """Of the message whose handler used the connection last; empty where none did."""

    def __str__(self) -> str:
        handler = f"the handler of message {self.message_id!r}" if self.message_id else "a handler"
        return (
            f"{handler} has ended the transaction of its messages, past every guard: claims of "
            f"messages that were not handled may be durable. Compare the claims with their "
            f"effects before these messages are acknowledged"
        )


class Unit(Protocol):
    """One open transaction; what is done through it becomes durable together or not at all."""

    @property
    def session(self) -> Any:
        """What handlers get: it can write, but not end the transaction."""
        ...

    @property
    def claims(self) -> ProcessedMessageStore:
        """The claims."""
        ...

    @property
    def attempts(self) -> FailedAttempts:
        """Each try that failed."""
        ...

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters."""
        ...

    @property
    def waiting(self) -> WaitingRoom:
        """The waiting table: retries and parked messages."""
        ...

    @property
    def outbox(self) -> OutboxStore:
        """The outgoing messages."""
        ...

    @property
    def inbox(self) -> InboxStore:
        """The stored incoming messages."""
        ...

    @property
    def members(self) -> Members:
        """The running processes."""
        ...

    @property
    def outcomes(self) -> OutcomeStore:
        """What became of every offset."""
        ...

    @property
    def versions(self) -> Versions:
        """The applied versions of aggregates."""
        ...

    def savepoint(self) -> AbstractAsyncContextManager[None]:
        """Undo what the block did if it raises, and only that.

        Leaving the block sends the session's pending writes, so that their errors are the
        block's.
        """
        ...

    async def begin_message(self) -> None:
        """Let the next handler find the session as if no other had used it.

        It reads what the database has, what the messages before it wrote included.
        """
        ...

    async def now(self) -> float:
        """Return the database's time, in seconds since 1970."""
        ...


class Database(Protocol):
    """Where messages, claims and effects live."""

    @property
    def classification(self) -> Classification:
        """What this database's own exceptions mean."""
        ...

    def begin(self) -> AbstractAsyncContextManager[Unit]:
        """Open a transaction: committed when the block ends, rolled back when it raises.

        Isolation is READ COMMITTED, whatever the engine's default.

        Raises:
            Retryable: there is no connection, or the commit was refused for now (a
                serialization failure, a deadlock): the whole block may be run again.
            InDoubt: the commit was sent and no answer came back.
        """
        ...

    async def close(self) -> None:
        """Give the connections back."""
        ...


def is_refusal(database: Database, consumer: str, error: Exception) -> bool:
    """Tell whether *error* is the database's own, and log it; False where it is something else.

    A failover, a migration or a missing right passes, and a service that had ended would not
    come back by itself.  It may be a bug as well, so that it is told as one, every time.
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
