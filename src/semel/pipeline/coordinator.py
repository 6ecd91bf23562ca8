"""The coordinator over a ledger, for Spark pipelines and for drivers without Spark."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from semel.pipeline.cycle import AbortAnswer, CommitAnswer, SinkAnswer
from semel.pipeline.ledger import Ledger, ScopeLease
from semel.pipeline.sink import Receipt, Token, tally_of
from semel.pipeline.source import BatchRange
from semel.pipeline.states import Decision
from semel.pipeline.txn import SinkTxnId

Stage: TypeAlias = Callable[[SinkTxnId], Mapping[str, Sequence[Receipt]]]
"""Runs the processing for one attempt; returns the winning receipts by sink name."""


class LedgerCoordinator:
    """One attempt at one cycle, recorded and decided in a ledger."""

    def __init__(
        self,
        ledger: Ledger,
        lease: ScopeLease,
        txn: SinkTxnId,
        stage: Stage,
        read_range: Callable[[], BatchRange],
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._stage = stage
        self._read_range = read_range
        self.txn = txn
        self.receipts: Mapping[str, Sequence[Receipt]] = {}

    @property
    def label(self) -> str:
        return str(self.txn.cycle)

    @property
    def scope_label(self) -> str:
        return str(self.txn.scope)

    def receipts_for(self, txn: SinkTxnId, sink: str) -> Sequence[Receipt]:
        """Return the receipts of the winning tasks for *sink*."""
        return self.receipts.get(sink, ()) if txn == self.txn else ()

    @property
    def row_counts(self) -> Mapping[str, int]:
        """How many rows were staged, by sink."""
        return {name: tally_of(receipts).rows for name, receipts in self.receipts.items()}

    def begin_txn(self) -> None:
        """Verify the epoch and record the attempt."""
        self._ledger.plan(self._lease, self.txn)

    def flush(self) -> None:
        """Run the staging job."""
        self.receipts = self._stage(self.txn)

    def commit_offsets(self) -> None:
        """Copy the source range into the attempt's record."""
        self._ledger.set_range(self._lease, self.txn, self._read_range())

    def pre_commit_2pc(self) -> Sequence[SinkAnswer]:
        """Return no answers: `with_two_phase_sinks` adds the sinks."""
        return ()

    def keep_tokens(self, txn: SinkTxnId, tokens: Mapping[str, Token]) -> None:
        """Make every sink's token durable before the decision."""
        self._ledger.set_prepared(self._lease, txn, tokens, self.row_counts)

    def commit_txn(self) -> CommitAnswer:
        """Decide COMMIT, with the new positions, in one ledger transaction."""
        self._ledger.decide_commit(self._lease, self.txn)
        return CommitAnswer.COMMITTED

    def commit_2pc(self) -> Sequence[SinkAnswer]:
        """Return no answers: `with_two_phase_sinks` adds the sinks."""
        return ()

    def store_commit(self) -> None:
        """Close the cycle and raise the mark."""
        self._ledger.finish(self._lease, self.txn)

    def abort_txn(self) -> AbortAnswer:
        """Win ABORT, or find that COMMIT was decided."""
        decision = self._ledger.decide_abort(self.txn, "the cycle failed before its decision")
        return AbortAnswer.WON if decision is Decision.ABORT else AbortAnswer.LOST

    def store_abort(self) -> None:
        """Drop the receipts: nothing staged under them will be committed."""
        self.receipts = {}

    def abort_2pc(self) -> Sequence[SinkAnswer]:
        """Return no answers: `with_two_phase_sinks` adds the sinks."""
        return ()
