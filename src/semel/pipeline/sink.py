"""The contract of a sink that takes part in one decision with others.

    stage (tasks) ──▶ prepare ──▶ commit
                         └──────▶ abort

Everything staged and prepared is keyed by cycle *and* attempt; the proof of
a commit is keyed by the cycle and names the attempt, so that two attempts of
one cycle can never both become visible.  A prepared sink has promised to
commit: it finds every reason to refuse in `prepare`, before the decision.

The contract is executable: `semel.testing.SinkContract`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from semel.errors import Retryable
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

REJECTED: Final = "rejected"
"""The key of a token under which a sink counts the rows of the cycle in its reject table."""

Token: TypeAlias = Mapping[str, Any]
"""Everything another process needs to commit or abort, as JSON; never a secret."""

Batch: TypeAlias = Any
"""A `pyarrow.RecordBatch`; in-memory sinks also take plain sequences of rows."""

Schema: TypeAlias = Any
"""A `pyarrow.Schema`."""


@dataclass(frozen=True, slots=True)
class SinkOK:
    """Done, or done before; after `prepare` with the token to store."""

    token: Token | None = None


@dataclass(frozen=True, slots=True)
class SinkRetryable:
    """Not done now; the same call may succeed later."""

    reason: str


@dataclass(frozen=True, slots=True)
class SinkFatal:
    """An invariant is broken, or it can never be done; an operator must decide."""

    reason: str


SinkOutcome: TypeAlias = SinkOK | SinkRetryable | SinkFatal


class Found(StrEnum):
    """What a sink holds of one attempt."""

    HELD = "held"
    """Prepared and invisible; it can still be committed or aborted."""

    VISIBLE = "visible"
    """Committed, and proved to be this attempt's."""

    GONE = "gone"
    """Neither prepared nor committed by this attempt."""

    UNREACHABLE = "unreachable"
    """The sink did not answer, which proves nothing."""


@dataclass(frozen=True, slots=True)
class SinkFinding:
    """A sink's answer to `look_up`, with its evidence."""

    found: Found
    evidence: str = ""
    since: float | None = None
    """When it was written, in seconds since 1970, if the sink can say."""


@dataclass(frozen=True, slots=True)
class Tally:
    """A row count and an order-independent hash: equal for equal multisets of rows."""

    rows: int = 0
    hash: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, (self.hash + other.hash) % 2**64)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one staging task wrote; only those of winning task attempts reach `prepare`."""

    task: str
    """Unique for every attempt of every task; a retried task has a new one."""

    tally: Tally = Tally()
    detail: Mapping[str, Any] = field(default_factory=dict)
    """The data by which the sink finds the staged rows again, as JSON."""

    def to_json(self) -> str:
        """Write the receipt as one line."""
        return json.dumps([self.task, self.tally.rows, self.tally.hash, self.detail])

    @classmethod
    def from_json(cls, text: str) -> Receipt:
        """Read what `to_json` wrote."""
        task, rows, row_hash, detail = json.loads(text)
        return cls(task, Tally(rows, row_hash), detail)


def tally_of(receipts: Sequence[Receipt]) -> Tally:
    """Add up what all tasks wrote."""
    return sum((receipt.tally for receipt in receipts), Tally())


def digest_of(receipts: Sequence[Receipt]) -> str:
    """Return a hash of a set of receipts, independent of their order."""
    lines = sorted(receipt.to_json() for receipt in receipts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class StageAnew(Retryable):
    """A task's rows were refused in a way that does not name them.

    The next attempt of the cycle stages them in another way; a retry of the task would not.
    """


class StagingWriter(Protocol):
    """Where one task attempt writes its rows for one sink; used by one thread."""

    def write(self, batch: Batch) -> None:
        """Store the rows, invisible to readers."""

    def finish(self) -> Receipt:
        """Make the written rows durable, and return their receipt.

        A task without rows gets a receipt, too.
        """

    def discard(self) -> None:
        """Drop the written rows, as far as possible; called after a failure, never raises."""


class Stager(Protocol):
    """The executor's side of a sink for one transaction; pickled into every task."""

    def open(self, task: str) -> StagingWriter:
        """Start to stage for one task attempt; *task* is unique for it.

        Tasks may run longer than their driver: this may be called after an abort.
        """


class TwoPhaseSink(Protocol):
    """The protocol of a sink; every method may be repeated after a crash, by another process.

    A method reports what the other system did as a `SinkOutcome`; an exception means
    that the answer is unknown, which is never OK.
    """

    @property
    def name(self) -> str:
        """The sink's name in tokens, reasons and crash points; unique in a pipeline."""

    @property
    def rows(self) -> Any:
        """Which rows of a batch go here: a Spark column, its SQL text, or None for all."""

    def check(self, schema: Schema | None) -> None:
        """Check before the first batch that rows of *schema* can be written.

        With None, check only what does not depend on the rows (reachable, permitted).

        Raises:
            Permanent: they cannot; the message names the solution.
            Retryable: the sink does not answer.
        """

    def fence(self, scope: Scope, epoch: int) -> None:
        """Refuse owners of *scope* older than *epoch* from now on, and work for *epoch*.

        Called before recovery reads anything.

        Raises:
            Fenced: the sink has seen a newer epoch.
            Retryable: the sink does not answer.
        """

    def stager(self, txn: SinkTxnId) -> Stager:
        """Return the executor's side for *txn*."""

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Keep exactly the rows of *receipts*, invisible, and promise that `commit` can succeed.

        The same receipts again change nothing; others are fatal.
        """

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Make the prepared rows visible; OK only with evidence, never by absence.

        Lost, aborted, never prepared, or another attempt committed: fatal.
        """

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        """Drop this attempt's data and no other's.  If committed: fatal, and nothing is deleted."""

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        """Return what the sink holds of this attempt; changes nothing and never raises."""

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        """List exactly this scope's prepared, unfinished transactions.

        Raises:
            Retryable: the sink does not answer.
        """

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        """Remove all data of the attempts for which *is_loser* is true; return them.

        Includes what their late tasks staged after the abort.  Never changes other attempts.
        """

    def mark(self, scope: Scope) -> SinkTxnId | None:
        """Return the highest committed cycle of *scope* with its attempt; never pruned."""

    def close(self) -> None:
        """Close connections; the sink can be used again afterwards."""


@runtime_checkable
class CountsVisibleRows(Protocol):
    """A sink whose visible rows can be attributed to cycles, so that they can be verified."""

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        """Count and hash the rows of *cycle* that readers see now; None if that is impossible."""


@runtime_checkable
class CannotCountRows(Protocol):
    """A sink whose visible rows cannot be attributed to cycles, and that says why."""

    @property
    def uncounted(self) -> str:
        """The reason, and what to compare instead."""


@runtime_checkable
class UndoesCycles(Protocol):
    """A sink that can take the rows of one committed cycle away, and no others."""

    def check_undo(self, txn: SinkTxnId, token: Token) -> str:
        """Return why that is impossible; empty if `undo` can succeed.  Changes nothing.

        Raises:
            Retryable: the sink does not answer.
        """

    def undo(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Take the rows away for ever; OK only with evidence, also when it is repeated.

        A late commit of *txn* must not bring them back.  The mark stays.
        """


@runtime_checkable
class ReplacesRows(Protocol):
    """A sink in which a later cycle's row may take the place of an earlier one's."""

    @property
    def replaces_rows(self) -> bool:
        """Whether it matters in which order cycles are written."""


@runtime_checkable
class Grows(Protocol):
    """A sink that keeps more and more beside its rows."""

    def outgrown(self) -> str:
        """Return what is too large for how it is kept, and what takes its place; or nothing."""


@runtime_checkable
class MindsSpeculation(Protocol):
    """A sink that must know whether a task may run twice at the same time."""

    def expect_speculation(self) -> None:
        """Prepare for speculative copies of tasks; called before `check`."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """What tasks stored for an attempt that is neither prepared nor visible."""

    txn: SinkTxnId
    what: str
    """``3 file(s), 1,200 bytes``."""

    since: float | None = None
    """When the oldest of it was written, in seconds since 1970, if the sink can say."""


@runtime_checkable
class ListsLeftovers(Protocol):
    """A sink that can list what `sweep` would remove."""

    def leftovers(self, scope: Scope) -> list[Leftover]:
        """List them, those of running attempts, too; changes nothing."""


@runtime_checkable
class DescribesGuarantee(Protocol):
    """A sink that describes its guarantee, for the lint."""

    def guarantee(self) -> Guarantee:
        """Return the guarantee of this sink with its settings."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A sink of a scope that has committed at a place."""

    scope: Scope
    sink: str
    mark: str = ""
    """The label of the highest committed transaction."""

    def __str__(self) -> str:
        return f"sink {self.sink!r} of {self.scope} (ledger {self.scope.ledger[:8]})"


@runtime_checkable
class KnowsItsPlace(Protocol):
    """A sink that can say where it writes, and who has committed there.

    Raises, everywhere:
        Retryable: the sink does not answer.
    """

    def find_place(self) -> str:
        """Return the identity of its table, folder or prefix; empty if it does not last."""

    def tenants(self) -> list[Tenant]:
        """List who has committed at this place: under any name, app, query and ledger."""

    def rename(self, old: Tenant, new: Tenant) -> None:
        """Give the records that *old* has here to *new*; repeatable.  Nothing is held."""


@runtime_checkable
class AbortsTogether(Protocol):
    """A sink that aborts a thousand attempts faster together than one by one."""

    def abort_together(self, txns: Sequence[SinkTxnId]) -> set[SinkTxnId]:
        """Abort those of *txns* that need no special treatment, and return them.

        The others, or all if this raises, are aborted one by one.
        """


@runtime_checkable
class OwnsItsPlace(Protocol):
    """A sink whose place no other sink of the same pipeline may use."""

    @property
    def place(self) -> str:
        """Where it writes; equal for two sinks that would overwrite each other."""


@runtime_checkable
class SharesTransaction(Protocol):
    """A sink that can be prepared and committed in one transaction with others of its database.

    The first sink of a group acts for all of them.  Every other method stays each sink's own.
    """

    @property
    def transaction_key(self) -> Hashable:
        """Equal for the sinks that can share a transaction."""

    def join(self, sinks: Sequence[Any]) -> None:
        """Form a group with *sinks*, of which this is one; called before the first batch."""

    def find_parents(self) -> Sequence[str]:
        """Return the places whose rows must be there before rows of this sink can refer to them."""

    def prepare_all(
        self, txn: SinkTxnId, receipts: Mapping[str, Sequence[Receipt]]
    ) -> Mapping[str, SinkOutcome]:
        """Prepare the sinks of *receipts* in their order, all or none; answer for each."""

    def commit_all(self, txn: SinkTxnId, tokens: Mapping[str, Token]) -> Mapping[str, SinkOutcome]:
        """Commit the sinks of *tokens* together, also after a crash; answer for each."""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """What is exactly once, where, and under which failures."""

    effect: str
    """What happens once: ``rows in table entries``."""

    readers_see: str
    """What a reader may see while a cycle commits."""

    not_covered: tuple[str, ...] = ()
    """Failures and uses outside the scope."""

    weakened_by: tuple[str, ...] = ()
    """Settings that weaken the guarantee, each with the solution."""
