"""A sink that keeps nothing, so that only the cycle around it takes time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from semel.pipeline.sink import (
    Batch,
    Found,
    Receipt,
    Schema,
    SinkFinding,
    SinkOK,
    SinkOutcome,
    Tally,
    Token,
)
from semel.pipeline.txn import Scope, SinkTxnId


class NoopSink:
    """Takes rows and forgets them."""

    def __init__(self, name: str = "noop", rows: Any = None) -> None:
        self.name = name
        self.rows = rows

    def check(self, schema: Schema | None) -> None:
        """Take rows of every schema."""

    def fence(self, scope: Scope, epoch: int) -> None:
        """Accept every owner."""

    def stager(self, txn: SinkTxnId) -> NoopStager:
        """Return the executor's side."""
        return NoopStager()

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        """Promise nothing."""
        return SinkOK({"attempt": txn.attempt})

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Show nothing."""
        return SinkOK()

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        """Drop nothing."""
        return SinkOK()

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        """Know nothing."""
        return SinkFinding(Found.GONE)

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        """Hold nothing."""
        return []

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        """Leave nothing behind."""
        return []

    def mark(self, scope: Scope) -> SinkTxnId | None:
        """Remember nothing."""
        return None

    def close(self) -> None:
        """Give nothing back."""


@dataclass(frozen=True, slots=True)
class NoopStager:
    """The executor's side."""

    def open(self, task: str) -> NoopWriter:
        """Start to forget."""
        return NoopWriter(task)


class NoopWriter:
    """Counts rows."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._rows = 0

    def write(self, batch: Batch) -> None:
        """Count the rows."""
        self._rows += batch.num_rows

    def finish(self) -> Receipt:
        """Say how many there were."""
        return Receipt(self._task, Tally(self._rows))

    def discard(self) -> None:
        """Nothing was kept."""
