"""The stores that only operators use, and a transaction with them and the engine's stores.

An audit entry names the actor, a name that the caller gives, and the account of the operating
system: two people who decide one act must have two accounts.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from semel.message import Coordinates, Partition
from semel.messaging.database import (
    Database,
    DeadLetters,
    FailedAttempts,
    InboxStore,
    Members,
    OutboxStore,
    OutcomeStore,
    ProcessedMessageStore,
    Sweep,
    Unit,
    Versions,
    WaitingStore,
)
from semel.messaging.handle.claims import ClaimRow, Failure
from semel.messaging.outcome import CycleOutcomes, OutcomeRange
from semel.messaging.records import (
    ConsumerEngine,
    DeadLetter,
    DeadLetterFilter,
    FailedAttempt,
    Gap,
    HeldKey,
    InboxMessage,
    MessageFilter,
    StoredMessage,
    WaitingFilter,
    WaitingMessage,
    Waits,
    stored_id,
)
from semel.messaging.send.outbox import OutboxEntry
from semel.secrets import HIDDEN


@dataclass(frozen=True, slots=True)
class Account:
    """Where an act is done."""

    name: str
    """``user@host``."""

    shared: bool = False
    """Several people use it, so it does not prove who acted."""

    @property
    def user(self) -> str:
        """The name without the host: a person has one account, on several hosts."""
        user, at, _ = self.name.rpartition("@")
        return user if at else self.name

    def details(self) -> Mapping[str, Any]:
        """Return what the audit trail keeps of it."""
        said = {"account": self.name}
        return {**said, "shared_account": True} if self.shared else said


_ACCOUNT: ContextVar[Account | None] = ContextVar("semel_account", default=None)


def account_now() -> Account | None:
    """Return the account of the current acts; None if it is not known."""
    return _ACCOUNT.get()


@contextmanager
def acting_from(account: Account) -> Iterator[None]:
    """Name the account of all acts of the block in their audit entries."""
    token = _ACCOUNT.set(account)
    try:
        yield
    finally:
        _ACCOUNT.reset(token)


# They are invisible, but not format characters; a name does not need them.
_INVISIBLE: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0")


def same_name(one: str, other: str) -> bool:
    """Return whether two names are equal, ignoring case, spaces and hidden characters.

    Letters of different alphabets that look alike are different: a name is not a proof.
    """
    return _plain(one) == _plain(other)


def _plain(name: str) -> str:
    seen = [sign for sign in unicodedata.normalize("NFKC", name) if not _is_hidden(sign)]
    folded = unicodedata.normalize("NFKC", "".join(seen).casefold())
    return " ".join(folded.split())


def _is_hidden(sign: str) -> bool:
    is_variation = "\ufe00" <= sign <= "\ufe0f" or "\U000e0100" <= sign <= "\U000e01ef"
    is_format = unicodedata.category(sign) == "Cf"
    is_control = unicodedata.category(sign) == "Cc" and not sign.isspace()
    return is_variation or is_format or is_control or sign in _INVISIBLE


FIRST_HASH: Final = "0" * 64
"""What the first entry has for the hash of the one before it."""


@dataclass(frozen=True, slots=True)
class Act:
    """Something that a person or a command did."""

    actor: str
    act: str
    """A verb with its noun: ``park.release``, ``dlq.replay``, ``delete.approve``."""

    consumer: str = ""
    message_id: str = ""
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One act, in its place in the chain."""

    number: int
    at: float
    act: Act
    previous_hash: str
    hash: str


def hash_of(number: int, at: float, act: Act, previous_hash: str) -> str:
    """Return an entry's hash over all that it says and the hash before it."""
    said = [
        number,
        # Microseconds, as the databases keep it: a float's digits are not the same everywhere.
        round(at * 1_000_000),
        act.actor,
        act.act,
        act.consumer,
        act.message_id,
        act.reason,
        act.details,
        previous_hash,
    ]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def recorded(act: Act) -> Act:
    """Return an act as every database keeps it, so that its hash is the same everywhere.

    Text may hold anything that came with a message, and details are JSON from here on; they
    name the account that the act is done from, where that is known.
    """
    account = account_now()
    details = {**act.details, **account.details()} if account else act.details
    return Act(
        plain(act.actor),
        plain(act.act),
        plain(act.consumer),
        stored_id(act.message_id),
        plain(act.reason),
        json.loads(json.dumps(details)),
    )


def plain(text: str) -> str:
    """Return words as every database takes them; what came with a message may be anything."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


class AuditTrail(Protocol):
    """The trail, in one open transaction: an act and its entry are durable together."""

    @property
    def written(self) -> Sequence[Act]:
        """The acts that this transaction has written so far."""

    async def append(self, act: Act) -> AuditEntry:
        """Write an act at the end of the chain; writers wait for one another."""

    async def read(self, after: int, limit: int) -> Sequence[AuditEntry]:
        """Return the entries behind number *after*, in order."""

    async def about(self, consumer: str, message_id: str) -> Sequence[AuditEntry]:
        """Return the entries about one message, in order."""

    async def head(self) -> tuple[int, str]:
        """Return number and hash of the last entry, as the head's own record has them."""


class ApprovalDecision(StrEnum):
    """What the second person said."""

    OPEN = ""
    APPROVED = "approved"
    REFUSED = "refused"


class ApprovalAsked(StrEnum):
    """What can be asked for."""

    DELETE_WAITING = "park.delete"
    """Remove a waiting message permanently."""

    DELETE_LETTER = "dlq.delete"
    """Remove a dead letter permanently."""


@dataclass(frozen=True, slots=True)
class Approval:
    """One request, and what became of it."""

    number: int
    act: ApprovalAsked
    consumer: str
    message_id: str
    asked_by: str
    reason: str
    asked_at: float
    decided_by: str | None = None
    decided_at: float | None = None
    decision: ApprovalDecision = ApprovalDecision.OPEN
    payload_hash: str = ""
    """Of what the first person saw: another payload needs another request."""


class Approvals(Protocol):
    """The acts that one person asks for and another decides, in one open transaction (B-17)."""

    async def ask(
        self,
        act: ApprovalAsked,
        consumer: str,
        message_id: str,
        asked_by: str,
        reason: str,
        payload_hash: str = "",
    ) -> Approval:
        """Write a request, with a number and the database's time."""

    async def get(self, number: int) -> Approval | None:
        """Return one request."""

    async def open_ones(self, consumer: str | None, limit: int) -> Sequence[Approval]:
        """Return the undecided requests, the oldest first."""

    async def about(self, consumer: str, message_id: str) -> Sequence[Approval]:
        """Return the requests about one message, in order."""

    async def decide(
        self, number: int, decided_by: str, decision: ApprovalDecision
    ) -> Approval | None:
        """Write the decision; None, and nothing changed, where there is one already."""

    async def delete_decided(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete old decided requests whose message is gone; return how many.

        With a *sweep*: only behind what it reached.
        """


KEEP_ID: Final = "keep-id"
NEW_ID: Final = "new-id"
HEX_BYTES_PER_LINE: Final = 16


@dataclass(frozen=True, slots=True)
class Revision:
    """One state of a message's payload."""

    consumer: str
    message_id: str
    payload: bytes | None
    """None once it was erased."""

    payload_hash: str
    number: int = 0
    """0 is the original; given by the store."""

    key: str | None = None
    actor: str = ""
    """Who wrote it; empty for the original."""

    reason: str = ""
    id_policy: str = ""
    """``keep-id`` or ``new-id``; empty for the original."""

    new_id: str | None = None
    """The id under which it is handled, for ``new-id``."""

    at: float = 0.0
    erased_at: float | None = None

    @classmethod
    def of(cls, message: StoredMessage) -> Revision:
        """Return the payload of a message as it is now, as the original."""
        one = (message.consumer, message.message_id)
        return cls(*one, message.payload, message.payload_hash, key=message.key)


class Revisions(Protocol):
    """What people changed in messages, with what it was before, in one open transaction (B-16).

    Number 0 is the original and never changes; each fix adds the next number.  With *keep-id*
    the revision is handled under the message's own id; with *new-id* under another one, and
    the revisions of both ids say so.
    """

    async def add(self, revision: Revision) -> Revision:
        """Write a message's next revision; return it with its number and time."""

    async def of(self, consumer: str, message_id: str) -> Sequence[Revision]:
        """Return the revisions of one message, the original first."""

    async def other_names(self, message_id: str) -> frozenset[str]:
        """Return the ids that people gave to a message of this id, or took from it.

        Those of conflicts that came with this id are among them.
        """

    async def erase(self, which: MessageFilter) -> int:
        """Remove the payloads of matching revisions; hashes, names and reasons stay."""


def readable_diff(before: bytes | None, after: bytes | None) -> str:
    """Compare two payloads line by line: as indented JSON, as text, or as bytes in hex."""
    if before is None or after is None:
        return "(erased)\n"
    for lines_of in (_json_lines, _text_lines, _hex_lines):
        old, new = lines_of(before), lines_of(after)
        if old is not None and new is not None and (old != new or before == after):
            lines = difflib.unified_diff(old, new, "before", "after", lineterm="")
            return "".join(f"{line}\n" for line in lines)
    raise AssertionError("different bytes have different lines in hex")


def _json_lines(payload: bytes) -> list[str] | None:
    try:
        found = json.loads(payload)
    except ValueError:
        return None
    return json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False).splitlines()


def _text_lines(payload: bytes) -> list[str] | None:
    try:
        return payload.decode().splitlines()
    except UnicodeDecodeError:
        return None


def _hex_lines(payload: bytes) -> list[str]:
    step = HEX_BYTES_PER_LINE
    return [payload[at : at + step].hex(" ") for at in range(0, len(payload), step)]


class ReplayState(StrEnum):
    """How a replay stands."""

    RUNNING = "running"
    """A process runs it, or died while it ran."""

    STOPPED = "stopped"
    """It waits until a person runs it again."""

    FAILED = "failed"
    """It stopped by itself, because too much failed; it can be run again."""

    FINISHED = "finished"
    """Everything that was selected had its turn."""

    ABANDONED = "abandoned"
    """A person ended it: it cannot go on, and the claims are no longer kept for it."""


OVER: Final = frozenset({ReplayState.FINISHED, ReplayState.ABANDONED})
"""The final states: these replays need no claims."""


@dataclass(frozen=True, slots=True)
class ReplayRun:
    """One replay, as it is kept."""

    name: str
    consumer: str
    selection: str
    """Which messages, as JSON."""

    actor: str
    """Who began it."""

    state: ReplayState = ReplayState.RUNNING
    cursor: str = ""
    """How far it is, as JSON; changes with everything that it does."""

    done: int = 0
    """Messages that had their turn."""

    failed: int = 0
    began_at: float = 0.0
    updated_at: float = 0.0


class Replays(Protocol):
    """The replays that were begun, and how far each is, in one open transaction.

        RUNNING ──▶ FINISHED            everything that was selected was replayed
           │ ▲
           ▼ │ run again
        STOPPED, FAILED                 a canary is over, or a person stopped it; too much failed
           │
           ▼
        ABANDONED                       from any state but FINISHED: it will not go on

    A replay whose process died stays RUNNING: running it again goes on behind its cursor.  A
    replay that can go on needs the claims, so none of its consumer's claims are pruned before
    it is FINISHED or ABANDONED.
    """

    async def begin(self, run: ReplayRun) -> bool:
        """Write a new replay, at the database's time; False where the name is taken."""

    async def get(self, name: str) -> ReplayRun | None:
        """Return one replay."""

    async def advance(self, run: ReplayRun, cursor_before: str) -> bool:
        """Write state, cursor and counts of a running replay, if no other process went on with it.

        False, and nothing changed, where its cursor is not *cursor_before* or it does not run.
        """

    async def set_state(self, name: str, before: ReplayState, after: ReplayState) -> bool:
        """Change the state, and nothing else; False where it is not *before*."""

    async def find(self, consumer: str | None, limit: int) -> Sequence[ReplayRun]:
        """Return replays, the newest first."""

    async def unfinished(self, consumer: str) -> Sequence[str]:
        """Return the names of a consumer's replays that can go on, whether they run or not.

        Until the transaction ends, no replay begins, and one that is being begun is waited
        for, so the answer stays true while the caller deletes.
        """

    async def delete_over(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete replays that ended at least that long ago; return how many."""


LONGEST_SHOWN: Final = 200

SECRET: Final = re.compile(
    r"passw|secret|token|api_?key|credential|private_?key|cvv|cvc|card_?number|iban|ssn",
    re.IGNORECASE,
)
"""Columns and parameters whose values are not shown."""


class Change(StrEnum):
    """What was done with a row."""

    INSERT = "insert"
    UPDATE = "update"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class RowChange:
    """One row that was changed, or the rows that one statement changed."""

    change: Change
    table: str
    key: str = ""
    """The row's key, where it is known."""

    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    """New values; of a statement, its parameters."""

    rows: int | None = 1
    """How many rows; None where the database does not say."""

    statement: str = ""
    """The SQL, where it was not an object's change."""


def shown(name: str, value: Any) -> Any:
    """Return a value as JSON can say it, without secrets and not too long."""
    if SECRET.search(name) and value is not None:
        return HIDDEN
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(bytes(value))} bytes>"
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): shown(str(key), one) for key, one in value.items()}
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}… ({len(text)} long)"


def all_shown(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, as JSON can say them."""
    return {name: shown(name, value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """What making or upgrading the tables did."""

    before: int | None
    """The version that was there; null: no tables, 0: tables without a version."""

    after: int

    schema: str | None = field(default=None, compare=False)
    """The schema of the tables; null on SQLite."""

    @property
    def changed(self) -> bool:
        """Whether anything was done."""
        return self.before != self.after


@dataclass(frozen=True, slots=True)
class SchemaProblem:
    """One thing that is wrong with the tables, and what to do about it."""

    what: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.what}; {self.way_out}"


@dataclass(frozen=True, slots=True)
class SchemaCheck:
    """What is wrong with the tables of a database."""

    version: int
    """The version that this semel needs."""

    problems: Sequence[SchemaProblem]

    @property
    def needs_attention(self) -> bool:
        """Something is missing or different."""
        return bool(self.problems)


class OperatorClaims(ProcessedMessageStore, Protocol):
    """The claims, with what operators ask and change."""

    async def erase(self, consumer: str, message_id: str) -> bool:
        """Remove the kept result of a message, and note that its payload was erased.

        Waits for a transaction that holds the claim; the state stays.  Returns whether there
        was a result.
        """

    async def erase_key(self, key: str) -> int:
        """Remove the results that were kept with this key, and note that; return how many."""

    async def decide(self, consumer: str, message_id: str, failure: Failure) -> bool:
        """Write a person's decision into a claim; False, and nothing changed, if it is COMPLETED.

        Unlike `mark_failed` it changes every other state, and claims of consumers that a pipeline
        runs, too.
        """

    async def expect_payload(self, consumer: str, message_id: str, payload_hash: str) -> None:
        """Replace the hash that repetitions are compared with, after an audited revision."""

    async def in_progress(
        self, consumer: str, limit: int, *, expired: bool = False
    ) -> Sequence[ClaimRow]:
        """List the claims under a lease, in the order in which the leases end.

        With *expired*: only those whose lease has run out.
        """

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Return the consumers that have a claim on a message, sorted."""

    async def without_message(self, consumer: str, limit: int) -> Sequence[str]:
        """Return where messages came from whose claims are open or dead, and no table has them.

        For consumers whose retries always wait in a table.
        """

    async def handled_from(
        self, consumer: str, places: Sequence[Coordinates]
    ) -> Sequence[Coordinates]:
        """Return those places whose messages have a COMPLETED claim with an effect.

        A claim has the coordinates of the delivery that was claimed first.  Slow: it reads every
        claim.
        """

    async def delete_expired(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* terminal claims that did not change within the TTL.

        The claim of a message that waits or is a dead letter stays: sending the message back
        reads from it whether it was handled.  The claim of a message whose outgoing messages are
        still in the outbox stays, too: `semel.operate.retention` finds them by it.  With a
        *sweep*: only claims after the place that it reached.
        """

    async def drop_days(self, consumer: str, older_than_seconds: float) -> int:
        """Drop the lean claims of the days that ended before that; return how many days."""


class OperatorAttempts(FailedAttempts, Protocol):
    """The failed attempts, with what operators ask and change."""

    async def of(self, consumer: str, message_id: str) -> Sequence[FailedAttempt]:
        """Return the kept attempts of one message, in the order in which they were written."""

    async def erase(self, which: MessageFilter) -> int:
        """Remove the reasons of matching attempts; times, numbers and codes stay."""

    async def delete_gone(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete old attempts whose message is in no table any more; return how many.

        With a *sweep*: only attempts after the place that it reached.
        """


class OperatorDeadLetters(DeadLetters, Protocol):
    """The dead letters, with what operators ask and change."""

    async def find(self, which: DeadLetterFilter, limit: int) -> Sequence[DeadLetter]:
        """Return matching dead letters, the oldest first."""

    async def outlines(self, which: DeadLetterFilter, limit: int) -> Sequence[DeadLetter]:
        """Return them as `find` does, without their payloads: for lists."""

    async def count(self, which: DeadLetterFilter) -> int:
        """Count matching dead letters."""

    async def remove(self, consumer: str, message_id: str) -> bool:
        """Remove a dead letter: it was replayed, skipped, parked or deleted."""

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[int]:
        """Return the first offsets from *first* to *last* that have dead letters, in order.

        For the audit of completeness.
        """

    async def erase(self, which: MessageFilter) -> int:
        """Remove payload, headers and reason of matching letters; hashes and error codes stay."""


class OperatorWaiting(WaitingStore, Protocol):
    """The waiting table, with what operators ask and change."""

    async def outlines(self, which: WaitingFilter, limit: int) -> Sequence[WaitingMessage]:
        """Return messages as `find` does, without their payloads: for lists."""

    async def count(self, which: WaitingFilter) -> int:
        """Count matching messages."""

    async def held_keys(self, consumer: str, limit: int) -> Sequence[HeldKey]:
        """Return the held keys, those that are held longest first."""

    async def label(self, consumer: str, message_id: str, label: str) -> bool:
        """Write the label that a person gave the message."""

    async def release(self, consumer: str, message_id: str) -> bool:
        """Make a parked message a retry that is due now, in its place; an operator's act.

        False, and nothing changed, if it is not parked, or was erased.
        """

    async def revise(
        self, consumer: str, message_id: str, payload: bytes, payload_hash: str, new_id: str
    ) -> bool:
        """Replace the payload and the id of a message; its place in the queue stays.

        False, and nothing changed, if there is no such message or it was erased.
        """

    async def erase(self, which: WaitingFilter) -> int:
        """Remove payload, headers and reason of matching messages; hashes and error codes stay.

        An erased message cannot be handled, so it is parked.
        """

    async def places(
        self, consumer: str, partition: Partition, first: int, last: int, limit: int
    ) -> Sequence[tuple[int, Waits]]:
        """Return the first offsets from *first* to *last* whose messages wait, in order.

        Each with what it waits for.  For the audit of completeness.
        """

    async def forget_keys(self, consumer: str, older_than_seconds: float, limit: int) -> int:
        """Delete at most *limit* old rows of key locks that no transaction has locked."""


class OperatorOutbox(OutboxStore, Protocol):
    """The outbox, with what operators ask and change."""

    async def unpark(self, outbox: str, message_id: str) -> bool:
        """Send a parked entry again, as if for the first time; an operator's act.

        False where there is no such parked entry, or its payload was erased.
        """

    async def drop(self, outbox: str, message_id: str) -> bool:
        """Delete a parked entry permanently; an operator's act."""

    async def parked(self, outbox: str, limit: int) -> Sequence[OutboxEntry]:
        """Return the parked entries, in order, without their payloads."""


class OperatorOutcomes(OutcomeStore, Protocol):
    """The outcomes of offsets, with what an audit reads."""

    async def ranges(self, consumer: str, partition: Partition) -> Sequence[OutcomeRange]:
        """Return the ranges of a partition in order."""

    async def covering(self, consumer: str, at: Coordinates) -> Sequence[OutcomeRange]:
        """Return the ranges that contain an offset, in the order in which they began."""

    async def partitions(self, consumer: str) -> Sequence[Partition]:
        """Return the partitions that have ranges."""

    async def prune(self, consumer: str, partition: Partition, below: int, limit: int) -> int:
        """Delete ranges that end below an offset, the lowest first; return how many.

        The mark that a message was kept is deleted before the mark of how it ended: the other
        order would let the message look lost.
        """

    async def cycle_partitions(self, consumer: str) -> Sequence[Partition]:
        """Return the partitions of which a cycle on Spark has read."""

    async def cycle_ranges(self, consumer: str, partition: Partition) -> Sequence[OutcomeRange]:
        """Return what the cycles of a partition cover, neighbours together, as `CYCLE`."""

    async def cycle_totals(self, consumer: str, partition: Partition) -> Mapping[str, int]:
        """Add up the outcomes of all cycles of a partition."""

    async def short_cycles(
        self, consumer: str, partition: Partition, limit: int
    ) -> Sequence[CycleOutcomes]:
        """Return the first cycles that have fewer outcomes than offsets; without their totals.

        An offset without a record has no outcome, and neither has one that was lost.
        """

    async def cycles_covering(self, consumer: str, at: Coordinates) -> Sequence[CycleOutcomes]:
        """Return the cycles that have read an offset, in the order in which they committed."""

    async def delete_cycles(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete outcomes of cycles that are that old; return how many."""


class OperatorVersions(Versions, Protocol):
    """The applied versions, with what operators ask."""

    async def gaps(
        self, consumer: str | None, limit: int, *, key: str | None = None
    ) -> Sequence[Gap]:
        """Return the open gaps, of one key or of all, the oldest first."""

    async def delete_closed(self, consumer: str, ttl_seconds: float, limit: int) -> int:
        """Delete gaps that were closed longer ago than that; return how many."""


class OperatorMembers(Members, Protocol):
    """The running processes, and whose rows there are."""

    async def consumers(self) -> Sequence[str]:
        """Return the names of all consumers that have a row in any table, in order."""

    async def engines(self) -> Sequence[ConsumerEngine]:
        """Return every consumer that a pipeline runs."""

    async def lock_engine(self, consumer: str) -> ConsumerEngine | None:
        """Return the pipeline that runs a consumer, and let it commit no cycle until this ends.

        Raises:
            Locked: it is committing one, and did not end in time.
        """

    async def remove_engine(self, consumer: str) -> bool:
        """Give a consumer to services; call with its row locked.  False if services run it."""

    async def unsettled(self, engine: ConsumerEngine) -> Sequence[str]:
        """Return the cycles that a pipeline's sinks in this database promise and have not kept.

        They are prepared, without the proof of a commit: what they change may still become
        visible, also after the death of the pipeline, which releases its locks.
        """

    async def outboxes(self) -> Sequence[str]:
        """Return the names of all outboxes that hold a message or have had a relay, in order."""


class OperatorInbox(InboxStore, Protocol):
    """The inbox, with what operators ask."""

    async def outlines(self, consumer: str, limit: int) -> Sequence[InboxMessage]:
        """Return the messages that are not handled, in order, without their payloads."""


class OperatorUnit(Unit, Protocol):
    """One open transaction with the stores that operators need beside the engine's."""

    @property
    def claims(self) -> OperatorClaims:
        """The claims."""

    @property
    def attempts(self) -> OperatorAttempts:
        """The failed attempts."""

    @property
    def dead_letters(self) -> OperatorDeadLetters:
        """The dead letters."""

    @property
    def waiting(self) -> OperatorWaiting:
        """The waiting table: retries and parked messages."""

    @property
    def outbox(self) -> OperatorOutbox:
        """The outgoing messages."""

    @property
    def members(self) -> OperatorMembers:
        """The running processes."""

    @property
    def inbox(self) -> OperatorInbox:
        """The messages that are stored first and handled later."""

    @property
    def outcomes(self) -> OperatorOutcomes:
        """The outcome of every offset."""

    @property
    def versions(self) -> OperatorVersions:
        """The applied versions of aggregates."""

    @property
    def audit(self) -> AuditTrail:
        """What operators did."""

    @property
    def revisions(self) -> Revisions:
        """What people changed in messages."""

    @property
    def approvals(self) -> Approvals:
        """What waits for a second person."""

    @property
    def replays(self) -> Replays:
        """The replays that were begun."""

    def watching(self) -> AbstractAsyncContextManager[list[RowChange]]:
        """Collect what the block changes outside of semel's own tables: for dry runs.

        The list is complete when the block has ended, which sends the session's pending
        writes and fails where a commit would: for constraints that are checked at its end.
        """


class OperatorDatabase(Database, Protocol):
    """A database whose transactions have the operators' stores, too."""

    def begin(self) -> AbstractAsyncContextManager[OperatorUnit]:
        """Open a transaction, as `Database.begin` does."""
