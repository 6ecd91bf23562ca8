"""The durable record of cycles, decisions, source positions and the lease.

The life of one attempt at a cycle, as the ledger stores it:

    PLANNED ──▶ PREPARED ──▶ COMMITTED ──▶ FINISHED
       │            │
       └────────────┴──────▶ ABORTED

COMMITTED is the commit point, and the only one.  Left of it an attempt can
always be given up; right of it it can only be carried through.

The contract is executable: `semel.testing.LedgerContract`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from semel.lease import Owner, Takeover
from semel.pipeline.sink import Token
from semel.pipeline.source import BatchRange, Position, Positions
from semel.pipeline.txn import CycleId, Scope, SinkTxnId


class CycleState(StrEnum):
    """The state of an attempt, as the ledger stores it."""

    PLANNED = "planned"
    """The attempt is in the ledger.  Tasks may be staging for it."""

    PREPARED = "prepared"
    """Every sink holds the batch, invisible, and has promised that it can commit."""

    COMMITTED = "committed"
    """The decision is COMMIT, together with the new source positions."""

    FINISHED = "finished"
    """Every sink has made the batch visible."""

    ABORTED = "aborted"
    """The decision is ABORT; the attempt's staged data may be removed."""

    @property
    def is_decided(self) -> bool:
        """Whether the write-once decision has been taken."""
        return self in (CycleState.COMMITTED, CycleState.FINISHED, CycleState.ABORTED)

    @property
    def is_committed(self) -> bool:
        """Whether the decision is COMMIT."""
        return self in (CycleState.COMMITTED, CycleState.FINISHED)


class Decision(StrEnum):
    """The write-once answer for one attempt; a cycle has at most one COMMIT, ever."""

    COMMIT = "commit"
    ABORT = "abort"


ARROWS: Final[Mapping[CycleState, frozenset[CycleState]]] = {
    CycleState.PLANNED: frozenset({CycleState.PREPARED, CycleState.ABORTED}),
    CycleState.PREPARED: frozenset({CycleState.COMMITTED, CycleState.ABORTED}),
    CycleState.COMMITTED: frozenset({CycleState.FINISHED}),
    CycleState.FINISHED: frozenset(),
    CycleState.ABORTED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class ScopeLease:
    """This process's ownership of a scope; its epoch fences older owners."""

    scope: Scope
    owner: Owner
    epoch: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ScopeRecord:
    """The ledger's record of a scope."""

    scope: Scope
    epoch: int
    owner: Owner | None
    """None when the scope was released."""

    lease_left_seconds: float
    mark: SinkTxnId | None
    """The highest finished cycle; never pruned."""

    generation: int
    """The checkpoint generation in use; 0 before the first."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One checkpoint of a scope.  A new checkpoint starts at batch 0 again."""

    number: int
    checkpoint: str
    """Spark's own id of the checkpoint."""

    first_batch: int
    """Batches below it did not run under semel."""

    opened_at: float


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """The ledger's record of one attempt at a cycle."""

    txn: SinkTxnId
    epoch: int
    state: CycleState
    range: BatchRange | None
    tokens: Mapping[str, Token]
    rows: Mapping[str, int]
    reason: str
    """Why it was aborted."""

    planned_at: float
    decided_at: float | None
    finished_at: float | None


@dataclass(frozen=True, slots=True)
class LedgerAct:
    """An operator's action, with who did it and why."""

    scope: Scope
    at: float
    who: str
    act: str
    why: str
    detail: Mapping[str, Any] = field(default_factory=dict)


class Ledger(Protocol):
    """The protocol of a ledger: every method is one transaction, or raises.

    Raises, everywhere:
        LedgerUnavailable: nothing was written; try again later.
        LedgerUnusable: nothing was written, and waiting will not help.
        InDoubt: only from `decide_commit` and `decide_abort`: the answer was lost.
    """

    @property
    def ledger_id(self) -> str:
        """A random id from the ledger's creation; part of every scope."""

    @property
    def url(self) -> str:
        """The ledger's URL without passwords, for messages to operators."""

    def acquire(
        self, scope: Scope, owner: Owner, seconds: float, takeover: Takeover = Takeover.WAIT
    ) -> ScopeLease:
        """Become the owner of *scope* and raise its epoch.

        Repeating it with the same owner raises the epoch again.

        Raises:
            LeaseHeld: another owner's lease is live and the owner is not known to be gone.
        """

    def renew(self, lease: ScopeLease) -> None:
        """Extend the lease by its length from now, on the ledger's clock.

        Raises:
            LeaseLost: a newer epoch exists, or it was released.
        """

    def release(self, lease: ScopeLease) -> None:
        """Give up the lease, so that the next owner starts at once; ignored if it is lost."""

    def scope_record(self, scope: Scope) -> ScopeRecord | None:
        """Return the record of *scope*; None if it never had an owner."""

    def scopes(self) -> list[Scope]:
        """List every scope that ever had an owner."""

    def generations(self, scope: Scope) -> list[Generation]:
        """List the checkpoints of *scope*, oldest first."""

    def open_generation(
        self, lease: ScopeLease, checkpoint: str, first_batch: int = 0
    ) -> Generation:
        """Return the newest generation of *checkpoint*; a new checkpoint becomes the next one.

        Raises:
            LeaseLost: a newer epoch exists.
        """

    def adopt_generation(
        self,
        lease: ScopeLease,
        checkpoint: str,
        first_batch: int,
        positions: Mapping[tuple[str, str], Position],
        paths: Mapping[str, Collection[str]] | None = None,
    ) -> Generation:
        """Make *checkpoint* the next generation without checks, for an operator.

        In the same transaction *positions* replace all of the scope's and, unless None,
        *paths*, by source, replace its committed paths.

        Raises:
            LeaseLost: a newer epoch exists.
        """

    def plan(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        """Record a new attempt as PLANNED; repeating it changes nothing.

        Raises:
            LeaseLost: a newer epoch exists.
            NeedsOperator: the cycle has a COMMIT, lies at or below the mark or outside the
                generation in use; or the attempt is aborted.
        """

    def set_range(self, lease: ScopeLease, txn: SinkTxnId, batch: BatchRange) -> None:
        """Store the source range of an undecided attempt; repeatable with the same range.

        Raises:
            LeaseLost: a newer epoch exists.
            NeedsOperator: the attempt is unknown, decided, or has another range.
        """

    def set_prepared(
        self,
        lease: ScopeLease,
        txn: SinkTxnId,
        tokens: Mapping[str, Token],
        rows: Mapping[str, int],
    ) -> None:
        """Store every sink's token and move PLANNED to PREPARED; repeatable with the same tokens.

        Raises:
            LeaseLost: a newer epoch exists.
            NeedsOperator: the attempt is already decided.
        """

    def decide_commit(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        """Decide COMMIT and advance the positions to the range's end, by compare-and-set.

        Checks in the same transaction: the epoch is ours, the attempt is PREPARED and
        undecided, the cycle has no COMMIT and lies above the mark, and the range starts where
        the positions end.
        Returns only when the decision is durable; repeatable for the same attempt.

        Raises:
            LeaseLost: a newer epoch exists; certainly not committed.
            NeedsOperator: another check failed; certainly not committed.
            LedgerUnavailable: certainly not committed.
            InDoubt: it may be committed, now or later.
        """

    def decide_abort(self, txn: SinkTxnId, reason: str = "") -> Decision:
        """Decide ABORT unless the attempt is decided; return the decision in force.

        Uses a new connection: on the one that sent a COMMIT without an answer, the COMMIT may
        still arrive.  Needs no lease: it can only settle this attempt.  An unknown attempt is
        recorded as ABORTED, so that a late `plan` cannot revive it.

        Raises:
            NeedsOperator: the cycle's attempts are pruned, so the decision is unknown.
        """

    def abort_undecided(self, lease: ScopeLease, reason: str = "") -> list[SinkTxnId]:
        """Decide ABORT for every undecided attempt of an older epoch, all at once; return them.

        Raises:
            LeaseLost: a newer epoch exists; nothing was decided.
        """

    def finish(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        """Move COMMITTED to FINISHED and raise the mark; repeatable.

        The mark never passes a cycle that is committed and unfinished.

        Raises:
            LeaseLost: a newer epoch exists.
            NeedsOperator: the attempt is not committed.
        """

    def attempt(self, txn: SinkTxnId) -> AttemptRecord | None:
        """Return one attempt; None if unknown or pruned."""

    def attempts(self, cycle: CycleId) -> list[AttemptRecord]:
        """List a cycle's attempts, oldest first."""

    def committed(self, cycle: CycleId) -> AttemptRecord | None:
        """Return the cycle's committed attempt, if it has one that is not pruned."""

    def open_attempts(self, scope: Scope) -> list[AttemptRecord]:
        """List what is PLANNED, PREPARED or COMMITTED, in the order of cycles."""

    def positions(self, scope: Scope, batch: BatchRange | None = None) -> Positions:
        """Return the positions; of file sources, which paths of *batch* are committed.

        With None: every end, and every committed path.
        """

    def history(self, scope: Scope, limit: int = 50) -> list[AttemptRecord]:
        """List the newest attempts, newest first."""

    def prune(self, scope: Scope, keep: int) -> int:
        """Delete finished and aborted attempts below the mark, except of the newest *keep* cycles.

        Positions, committed paths, generations, acts and the mark stay.  Returns the number
        of deleted attempts.
        """

    def rename_app(self, lease: ScopeLease, app: str) -> Scope:
        """Give everything of the lease's scope to *app*, and end the lease; return the new scope.

        Raises:
            LeaseLost: a newer epoch exists.
            NeedsOperator: attempts are open, or *app* has cycles of its own for this query.
        """

    def record_act(self, scope: Scope, who: str, act: str, why: str, detail: Any = None) -> None:
        """Record an operator's action."""

    def acts(self, scope: Scope) -> list[LedgerAct]:
        """List the operators' actions, newest first."""

    def close(self) -> None:
        """Close connections; the ledger can be used again afterwards."""


def mark_of(ledger: Ledger, scope: Scope) -> SinkTxnId | None:
    """Return the highest finished cycle of *scope*, if one has finished."""
    record = ledger.scope_record(scope)
    return record.mark if record else None


def is_loser(ledger: Ledger, scope: Scope) -> Callable[[SinkTxnId], bool]:
    """Return a test for losing attempts: aborted, or beaten by another attempt of a cycle.

    The cycle of a beaten attempt is at or below the mark.  An unknown attempt above the mark
    is not a loser: the ledger cannot prove that it lost.
    """
    mark = mark_of(ledger, scope)

    def verdict(txn: SinkTxnId) -> bool:
        if txn.scope != scope:
            return False
        known = ledger.attempt(txn)
        if known is not None:
            return known.state is CycleState.ABORTED
        return mark is not None and txn.cycle <= mark.cycle and txn != mark

    return verdict
