"""Whether a ledger hangs together; its copies."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from semel.cli.reports.weakness import Weakness, of_ledger
from semel.errors import Misuse
from semel.pipeline.ledger import AttemptRecord, Ledger
from semel.pipeline.states import CycleState
from semel.pipeline.txn import CycleId, Scope
from semel.sql.backup import Overwrite

EVERY = sys.maxsize // 8


@dataclass(frozen=True, slots=True)
class ScopeCheck:
    """One scope's records, counted and compared."""

    scope: str
    epoch: int
    generations: int
    attempts: dict[str, int]
    """By state."""

    mark: str | None
    acts: int
    problems: list[str]


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """The answer to `semel ledger check`."""

    ledger: str
    ledger_id: str
    scopes: list[ScopeCheck]
    weakened_by: list[Weakness]

    @property
    def needs_attention(self) -> bool:
        """Tell whether records contradict each other, or the place is odd."""
        return bool(self.weakened_by) or any(scope.problems for scope in self.scopes)


def ledger_check(ledger: Ledger) -> LedgerCheck:
    """Read every scope's records and compare them with each other."""
    scopes = [_of_scope(ledger, scope) for scope in ledger.scopes()]
    return LedgerCheck(ledger.url, ledger.ledger_id, scopes, list(of_ledger(ledger)))


def _of_scope(ledger: Ledger, scope: Scope) -> ScopeCheck:
    record = ledger.scope_record(scope)
    attempts = ledger.history(scope, EVERY)
    generations = ledger.generations(scope)
    mark = record.mark if record else None
    states = Counter(attempt.state.value for attempt in attempts)
    newest = record.generation if record else 0
    return ScopeCheck(
        scope=str(scope),
        epoch=record.epoch if record else 0,
        generations=len(generations),
        attempts=dict(states),
        mark=mark.cycle.label if mark else None,
        acts=len(ledger.acts(scope)),
        problems=list(_problems(attempts, mark.cycle if mark else None, newest)),
    )


def _problems(
    attempts: list[AttemptRecord], mark: CycleId | None, generation: int
) -> Iterable[str]:
    commits = Counter(a.txn.cycle for a in attempts if a.state.is_committed)
    for cycle, times in commits.items():
        if times > 1:
            yield f"{cycle.label} has {times} COMMITs; a cycle has at most one"
    stuck = min((a.txn.cycle for a in attempts if a.state is CycleState.COMMITTED), default=None)
    for attempt in attempts:
        cycle = attempt.txn.cycle
        name = f"{cycle.label} (attempt {attempt.txn.attempt[:8]})"
        if attempt.state.is_committed and attempt.range is None:
            yield f"{name} is {attempt.state} and nobody knows what it read"
        if attempt.state is CycleState.COMMITTED and mark and cycle <= mark:
            yield f"{name} is unfinished, and the mark {mark.label} has passed it"
        above = mark is None or cycle > mark
        if attempt.state is CycleState.FINISHED and above and (stuck is None or cycle < stuck):
            yield f"{name} is finished, and the mark has not reached it"
        if generation and cycle.generation > generation:
            yield f"{name} is of a generation that was never opened; the newest is {generation}"


@dataclass(frozen=True, slots=True)
class BackupReport:
    """The answer to `semel ledger backup`."""

    ledger: str
    ledger_id: str
    file: str
    bytes: int
    scopes: list[str]

    @property
    def needs_attention(self) -> bool:
        """A backup that was made needs none."""
        return False


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The answer to `semel ledger restore`."""

    ledger: str
    ledger_id: str
    file: str
    forced: bool
    who: str
    why: str
    marks: dict[str, str | None]
    """By scope: the highest finished cycle of the restored ledger."""

    @property
    def needs_attention(self) -> bool:
        """A restore that was asked for and done needs none."""
        return False


@runtime_checkable
class CanBeBackedUp(Protocol):
    """A ledger that can be copied to a file and made from one."""

    def backup(self, destination: str | Path) -> None:
        """Copy the ledger to a new file."""
        ...

    def restore(self, source: str | Path, overwrite: Overwrite = Overwrite.REFUSE) -> None:
        """Become the ledger in the backup."""
        ...


def back_up(ledger: Ledger, file: Path) -> BackupReport:
    """Copy the ledger to a new file.

    Raises:
        Misuse: the file exists already.
    """
    _copyable(ledger).backup(file)
    scopes = [str(scope) for scope in ledger.scopes()]
    return BackupReport(ledger.url, ledger.ledger_id, str(file), file.stat().st_size, scopes)


def restore(ledger: Ledger, file: Path, overwrite: Overwrite, who: str, why: str) -> RestoreReport:
    """Replace the ledger by the backup in *file*; records who and why in every scope of it.

    Raises:
        LeaseHeld: an owner is live.
        NeedsOperator: decisions that the backup lacks would be lost.
    """
    _copyable(ledger).restore(file, overwrite)
    marks: dict[str, str | None] = {}
    for scope in ledger.scopes():
        record = ledger.scope_record(scope)
        marks[str(scope)] = record.mark.cycle.label if record and record.mark else None
        detail = {"file": str(file), "overwrite": overwrite.value}
        ledger.record_act(scope, who, "ledger-restore", why, detail)
    forced = overwrite is Overwrite.FORCE
    return RestoreReport(ledger.url, ledger.ledger_id, str(file), forced, who, why, marks)


def _copyable(ledger: Ledger) -> CanBeBackedUp:
    if not isinstance(ledger, CanBeBackedUp):
        raise Misuse(f"ledger {ledger.url} cannot be backed up")
    return ledger
