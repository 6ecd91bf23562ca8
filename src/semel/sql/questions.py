"""Single questions and single writes inside a transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from semel.pipeline.ledger import AttemptRecord, Generation
from semel.pipeline.positions import Position
from semel.pipeline.source import BatchRange, SourceKind
from semel.pipeline.states import CycleState
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.sql import rows, statements
from semel.sql.database import Mode, Row, Session
from semel.sql.rows import ScopeRow, cycle_keys, keys, txn_keys

# Well below the number of parameters that either database takes in one statement.
PATHS_AT_ONCE: Final = 500


def scope_row(session: Session, statement: str, scope: Scope) -> ScopeRow | None:
    """Read the scope, with or without its lock, as *statement* says."""
    found = session.run(statement, keys(scope))
    return ScopeRow.of(scope, found[0]) if found else None


def attempt(session: Session, txn: SinkTxnId) -> AttemptRecord | None:
    """Read one attempt."""
    found = session.run(statements.READ_ATTEMPT, txn_keys(txn))
    return rows.attempt_of(txn.scope, found[0]) if found else None


def winner(session: Session, cycle: CycleId) -> SinkTxnId | None:
    """Name the cycle's committed attempt."""
    found = session.run(statements.READ_COMMITTED, cycle_keys(cycle))
    return cycle.attempt(found[0]["attempt"]) if found else None


def generations(session: Session, scope: Scope) -> list[Generation]:
    """Read the checkpoints of the scope, oldest first."""
    found = session.run(statements.LIST_GENERATIONS, keys(scope))
    return [rows.generation_of(row) for row in found]


def next_generation(
    session: Session, known: ScopeRow, checkpoint: str, first_batch: int
) -> Generation:
    """Write the next generation, and use it from now on."""
    number = len(generations(session, known.scope)) + 1
    made = {"number": number, "checkpoint": checkpoint, "first_batch": first_batch}
    session.run(statements.ADD_GENERATION, {**keys(known.scope), **made, "now": known.now})
    use_generation(session, known.scope, number)
    return Generation(number, checkpoint, first_batch, known.now / rows.MICROSECONDS)


def use_generation(session: Session, scope: Scope, number: int) -> None:
    """Say which generation is in use."""
    session.run(statements.USE_GENERATION, {**keys(scope), "number": number})


def ends(session: Session, scope: Scope) -> dict[tuple[str, str], tuple[Position, int]]:
    """Read where every partition stands, and which generation wrote it."""
    return dict(rows.end_of(row) for row in session.run(statements.LIST_POSITIONS, keys(scope)))


def committed_paths(
    session: Session, scope: Scope, batch: BatchRange | None
) -> dict[str, set[str]]:
    """Read which of the batch's paths are committed; without a batch, every committed path."""
    found: dict[str, set[str]] = {}
    if batch is None:
        for row in session.run(statements.LIST_PATHS, keys(scope)):
            found.setdefault(row["source"], set()).add(row["path"])
        return found
    for source in batch.sources:
        if source.kind is not SourceKind.FILES:
            continue
        known = found.setdefault(source.source, set())
        for start in range(0, len(source.paths), PATHS_AT_ONCE):
            asked = source.paths[start : start + PATHS_AT_ONCE]
            values = {f"path{number}": path for number, path in enumerate(asked)}
            statement = statements.FIND_PATHS.format(paths=", ".join(f":{name}" for name in values))
            listed = session.run(statement, {**keys(scope), "source": source.source, **values})
            known.update(row["path"] for row in listed)
    return found


def add_paths(session: Session, scope: Scope, paths: Mapping[str, Iterable[str]]) -> None:
    """Keep files, by source, as committed."""
    for source, listed in paths.items():
        added = {**keys(scope), "source": source}
        session.run_many(statements.ADD_PATH, ({**added, "path": path} for path in listed))


def move(
    session: Session,
    scope: Scope,
    positions: Mapping[tuple[str, str], Position],
    generation: int,
) -> None:
    """Set where partitions stand."""
    session.run_many(
        statements.MOVE_POSITION,
        (
            {
                **keys(scope),
                "source": source,
                "partition": partition,
                "end": position.end,
                "topic_id": position.topic_id,
                "generation": generation,
            }
            for (source, partition), position in positions.items()
        ),
    )


def add(
    session: Session, txn: SinkTxnId, epoch: int, state: CycleState, now: int, reason: str = ""
) -> None:
    """Write a new attempt."""
    values = {
        "epoch": epoch,
        "state": state.value,
        "reason": rows.text(reason),
        "now": now,
        "decided_at": now if state.is_decided else None,
    }
    session.run(statements.ADD_ATTEMPT, {**txn_keys(txn), **values})


def raise_mark(session: Session, scope: Scope) -> None:
    """Move the mark to the highest finished cycle with no unfinished commit below it."""
    stuck = session.run(statements.FIRST_UNFINISHED, keys(scope))
    if stuck:
        below = {"generation": stuck[0]["generation"], "batch": stuck[0]["batch"]}
        found = session.run(statements.LAST_COMMITTED_BELOW, {**keys(scope), **below})
    else:
        found = session.run(statements.LAST_COMMITTED, keys(scope))
    for row in found:
        mark = rows.txn_of(scope, row)
        session.run(statements.RAISE_MARK, txn_keys(mark))


class _Nothing:
    """A session of a database without rows."""

    is_lost = False

    def begin(self, name: str, mode: Mode) -> None: ...
    def run(self, statement: str, values: Mapping[str, Any] | None = None) -> list[Row]:
        return []

    def run_many(self, statement: str, many: Iterable[Mapping[str, Any]]) -> None: ...
    def has_table(self, name: str) -> bool:
        return False

    def lock_schema(self) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...
    def close(self) -> None: ...


NOTHING: Final = _Nothing()
