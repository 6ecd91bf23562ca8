"""What the ledger contract's tests are written with: owners, cycles in every state, races."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest

from semel.lease import Owner, Takeover
from semel.pipeline.ledger import AttemptRecord, CycleState, Ledger, ScopeLease
from semel.pipeline.source import BatchRange, SourceKind, SourceRange, Span
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.testing.contracts.contract import Contract

LEASE_SECONDS: Final = 30.0

TOKENS: Final[Mapping[str, Mapping[str, Any]]] = {
    "left": {"path": "/a b", "n": [1, 2.5, None]},
    "right": {"gid": "ü\u2028", "deep": {}},
}
ROWS: Final = {"left": 3, "right": 0}


class LedgerWorld(Contract):
    """The hooks to override.  A test gets a new instance, and so a store of its own."""

    def make_ledger(self) -> Any:
        """Make a ledger that is empty."""
        raise NotImplementedError

    def another(self, ledger: Any) -> Ledger:
        """Open a second ledger object on the same store.

        Only a ledger of one process may return the same one.
        """
        raise NotImplementedError

    def expire(self, ledger: Any, scope: Scope) -> None:
        """Let the time of the scope's lease run out."""
        raise NotImplementedError

    def follow(self, rule: str, **arguments: Any) -> None:
        """Run one test with a ledger of its own."""
        made = self.make_ledger()
        try:
            super().follow(rule, ledger=made, **arguments)
        finally:
            made.close()

    @pytest.fixture
    def ledger(self) -> Iterator[Any]:
        """The ledger under test."""
        made = self.make_ledger()
        yield made
        made.close()


def owner_elsewhere(host: str = "elsewhere.example") -> Owner:
    """Describe a process on another host, whose state is unknown here."""
    return Owner(host, "boot", 7, "1", uuid.uuid4().hex)


def owner_gone() -> Owner:
    """Describe a process of this host that ended."""
    return replace(Owner.here(), started="made up")


def scope_of(ledger: Ledger, app: str = "payments", query: str = "main") -> Scope:
    """Name a scope of *ledger*."""
    return Scope(ledger.ledger_id, app, query)


def offsets(start: int, end: int, partition: str = "t/0", topic_id: str = "") -> BatchRange:
    """Make the range of one Kafka partition."""
    ids = {partition.rpartition("/")[0]: topic_id} if topic_id else {}
    spans = {partition: Span(start, end)}
    return BatchRange((SourceRange("0", SourceKind.OFFSETS, spans, topic_ids=ids),))


def files(*paths: str, source: str = "0") -> BatchRange:
    """Make the range of a file source, with the log position that Spark gives it."""
    return BatchRange((SourceRange(source, SourceKind.FILES, paths=paths),))


def ephemeral(start: int, end: int) -> BatchRange:
    """Make the range of a source that forgets with its checkpoint."""
    return BatchRange((SourceRange("0", SourceKind.EPHEMERAL, {"": Span(start, end)}),))


@dataclass(frozen=True)
class LedgerOwner:
    """One owner of one scope at work."""

    ledger: Ledger
    lease: ScopeLease

    @classmethod
    def of(
        cls,
        ledger: Ledger,
        app: str = "payments",
        query: str = "main",
        takeover: Takeover = Takeover.FORCE,
    ) -> LedgerOwner:
        """Start an owner; it fences the one before."""
        scope = scope_of(ledger, app, query)
        return cls(ledger, ledger.acquire(scope, owner_elsewhere(), LEASE_SECONDS, takeover))

    @property
    def scope(self) -> Scope:
        """The scope that is owned."""
        return self.lease.scope

    def cycle(self, batch: int = 0, generation: int = 1) -> CycleId:
        """Name a cycle of this scope."""
        return CycleId(self.scope, generation, batch)

    def reach(
        self,
        state: CycleState,
        batch: int = 0,
        read: BatchRange | None = None,
        generation: int = 1,
    ) -> SinkTxnId:
        """Bring a new attempt to *state*; unless given, batch N reads offsets 10 N to 10 N + 10."""
        txn = self.cycle(batch, generation).attempt()
        self.ledger.plan(self.lease, txn)
        if state is CycleState.ABORTED:
            self.ledger.decide_abort(txn, "given up")
        if state in (CycleState.PLANNED, CycleState.ABORTED):
            return txn
        self.ledger.set_range(self.lease, txn, read or offsets(10 * batch, 10 * batch + 10))
        self.ledger.set_prepared(self.lease, txn, TOKENS, ROWS)
        if state.is_committed:
            self.ledger.decide_commit(self.lease, txn)
        if state is CycleState.FINISHED:
            self.ledger.finish(self.lease, txn)
        return txn

    def commit(self, read: BatchRange, batch: int = 0, generation: int = 1) -> SinkTxnId:
        """Commit and finish a cycle that read *read*."""
        return self.reach(CycleState.FINISHED, batch, read, generation)

    def record(self, txn: SinkTxnId) -> AttemptRecord:
        """Return an attempt that must be there."""
        record = self.ledger.attempt(txn)
        assert record is not None
        return record

    def state(self, txn: SinkTxnId) -> CycleState:
        """Return where an attempt that must be there stands."""
        return self.record(txn).state

    def mark(self) -> SinkTxnId | None:
        """Return the scope's mark."""
        record = self.ledger.scope_record(self.scope)
        return record.mark if record else None

    def end(self, partition: str = "t/0", source: str = "0") -> int | None:
        """Return where a partition stands."""
        position = self.ledger.positions(self.scope).ends.get((source, partition))
        return position.end if position else None


def together(*calls: Callable[[], object]) -> list[object]:
    """Run all *calls* at once, each in its thread; return what each returned or raised.

    Threads start in another order each time: the last one tends to get ahead.
    """
    barrier = threading.Barrier(len(calls))
    outcomes: list[object] = [None] * len(calls)

    def run(number: int, call: Callable[[], object]) -> None:
        barrier.wait(timeout=30)
        try:
            outcomes[number] = call()
        except Exception as error:  # noqa: BLE001 - the caller looks at every outcome
            outcomes[number] = error

    threads = [
        threading.Thread(target=run, args=numbered, daemon=True) for numbered in enumerate(calls)
    ]
    for thread in random.sample(threads, len(threads)):
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a call did not return"
    return outcomes
