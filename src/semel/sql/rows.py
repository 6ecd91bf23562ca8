"""Between rows and records."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from semel.lease import Owner
from semel.pipeline.ledger import Act, AttemptRecord, Generation, ScopeRecord
from semel.pipeline.positions import Position
from semel.pipeline.source import BatchRange
from semel.pipeline.states import CycleState
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.sql.database import Row

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True)
class ScopeRow:
    """What a transaction knows of its scope, and the time."""

    scope: Scope
    epoch: int
    owner: Owner | None
    lease_until: int
    generation: int
    mark: SinkTxnId | None
    pruned: CycleId | None
    now: int

    @classmethod
    def of(cls, scope: Scope, row: Row) -> ScopeRow:
        """Read a row of `LOCK_SCOPE`."""
        mark = pruned = None
        if row["mark_attempt"] is not None:
            cycle = CycleId(scope, row["mark_generation"], row["mark_batch"])
            mark = cycle.attempt(row["mark_attempt"])
        if row["pruned_generation"] is not None:
            pruned = CycleId(scope, row["pruned_generation"], row["pruned_batch"])
        owner = None if row["owner"] is None else Owner.from_json(json.loads(row["owner"]))
        return cls(
            scope=scope,
            epoch=row["epoch"],
            owner=owner,
            lease_until=row["lease_until"],
            generation=row["generation"],
            mark=mark,
            pruned=pruned,
            now=row["now"],
        )

    @property
    def left_seconds(self) -> float:
        """How long the lease still lasts."""
        if self.owner is None:
            return 0.0
        return max(0, self.lease_until - self.now) / MICROSECONDS

    def to_record(self) -> ScopeRecord:
        """Return what a caller may know."""
        return ScopeRecord(
            self.scope, self.epoch, self.owner, self.left_seconds, self.mark, self.generation
        )


def keys(scope: Scope) -> dict[str, Any]:
    """Name the scope in a statement."""
    return {"app": scope.app, "query": scope.query}


def cycle_keys(cycle: CycleId) -> dict[str, Any]:
    """Name the cycle in a statement."""
    return {**keys(cycle.scope), "generation": cycle.generation, "batch": cycle.batch}


def txn_keys(txn: SinkTxnId) -> dict[str, Any]:
    """Name the attempt in a statement."""
    return {**cycle_keys(txn.cycle), "attempt": txn.attempt}


def txn_of(scope: Scope, row: Row) -> SinkTxnId:
    """Read which attempt a row is about."""
    return CycleId(scope, row["generation"], row["batch"]).attempt(row["attempt"])


def attempt_of(scope: Scope, row: Row) -> AttemptRecord:
    """Read a row of an attempt."""
    read = row["range_read"]
    return AttemptRecord(
        txn=txn_of(scope, row),
        epoch=row["epoch"],
        state=CycleState(row["state"]),
        range=None if read is None else BatchRange.from_json(read),
        tokens=json.loads(row["tokens"]),
        rows=json.loads(row["row_counts"]),
        reason=row["reason"],
        planned_at=row["planned_at"] / MICROSECONDS,
        decided_at=_seconds(row["decided_at"]),
        finished_at=_seconds(row["finished_at"]),
    )


def generation_of(row: Row) -> Generation:
    """Read a row of a checkpoint generation."""
    return Generation(
        number=row["number"],
        checkpoint=row["checkpoint"],
        first_batch=row["first_batch"],
        opened_at=row["opened_at"] / MICROSECONDS,
    )


def end_of(row: Row) -> tuple[tuple[str, str], tuple[Position, int]]:
    """Read a row of a position, with the generation that wrote it."""
    where = (row["source"], row["source_partition"])
    return where, (Position(row["ends_at"], row["topic_id"]), row["generation"])


def act_of(scope: Scope, row: Row) -> Act:
    """Read a row of an act."""
    at = row["acted_at"] / MICROSECONDS
    return Act(scope, at, row["who"], row["act"], row["why"], json.loads(row["detail"]))


def text(words: str) -> str:
    """Return *words* without the one character that PostgreSQL keeps in no text."""
    return words.replace("\x00", "")


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / MICROSECONDS
