"""The ledger itself: whether its records agree with each other, and its copies."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

from semel.errors import Misuse
from semel.lease import Takeover
from semel.operate.guarantee import Weakness, of_ledger
from semel.pipeline.ledger import AttemptRecord, CycleState, Ledger
from semel.pipeline.txn import CycleId, Scope

# More attempts than a ledger holds, and small enough for every database's LIMIT.
EVERY: Final = sys.maxsize // 8


@dataclass(frozen=True, slots=True)
class ScopeCheck:
    """One scope's records, counted and compared."""

    scope: Scope
    epoch: int
    generations: int
    attempts: dict[str, int]
    """By state."""

    mark: str | None
    acts: int
    problems: list[str]


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """The answer of `check_ledger`."""

    ledger: str
    ledger_id: str
    scopes: list[ScopeCheck]
    weakened_by: list[Weakness]

    @property
    def needs_attention(self) -> bool:
        """Records contradict each other, or the ledger is in an unsafe place."""
        return bool(self.weakened_by) or any(scope.problems for scope in self.scopes)


def check_ledger(ledger: Ledger) -> LedgerCheck:
    """Read every scope's records and compare them with each other."""
    scopes = [_check(ledger, scope) for scope in ledger.scopes()]
    return LedgerCheck(ledger.url, ledger.ledger_id, scopes, list(of_ledger(ledger)))


def _check(ledger: Ledger, scope: Scope) -> ScopeCheck:
    record = ledger.scope_record(scope)
    attempts = ledger.history(scope, EVERY)
    mark = record.mark.cycle if record and record.mark else None
    newest = record.generation if record else 0
    return ScopeCheck(
        scope=scope,
        epoch=record.epoch if record else 0,
        generations=len(ledger.generations(scope)),
        attempts=dict(Counter(attempt.state.value for attempt in attempts)),
        mark=mark.label if mark else None,
        acts=len(ledger.acts(scope)),
        problems=list(_problems(attempts, mark, newest)),
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
            yield f"{name} is {attempt.state}, and the ledger has no record of what it read"
        if attempt.state is CycleState.COMMITTED and mark and cycle <= mark:
            yield f"{name} is unfinished, and the mark {mark.label} has passed it"
        above = mark is None or cycle > mark
        if attempt.state is CycleState.FINISHED and above and (stuck is None or cycle < stuck):
            yield f"{name} is finished, and the mark has not reached it"
        if generation and cycle.generation > generation:
            yield f"{name} is of a generation that was never opened; the newest is {generation}"


@dataclass(frozen=True, slots=True)
class Backup:
    """The answer of `back_up_ledger`."""

    ledger: str
    ledger_id: str
    file: str
    bytes: int
    scopes: list[Scope]


@dataclass(frozen=True, slots=True)
class Restoration:
    """The answer of `restore_ledger`."""

    ledger: str
    ledger_id: str
    who: str
    why: str
    epochs: dict[str, int]
    """By scope: the epoch after the leap."""

    marks: dict[str, str | None]
    """By scope: the highest finished cycle of the restored ledger."""


@runtime_checkable
class CanBeBackedUp(Protocol):
    """A ledger that is stored on disk."""

    def backup(self, destination: str | Path) -> None:
        """Copy the ledger to a new file."""
        ...

    def restore(self, who: str, why: str, takeover: Takeover = Takeover.WAIT) -> None:
        """Fence the owners of the lost ledger, after a copy was put in its place."""
        ...


def back_up_ledger(ledger: Ledger, file: Path) -> Backup:
    """Copy the ledger to a new file.

    Raises:
        Misuse: the file exists already, or the ledger's database has its own command for that.
    """
    _copyable(ledger).backup(file)
    return Backup(
        ledger.url, ledger.ledger_id, str(file), file.stat().st_size, list(ledger.scopes())
    )


def restore_ledger(ledger: Ledger, who: str, why: str, takeover: Takeover) -> Restoration:
    """Fence the owners of the lost ledger; record who and why in every scope.

    Raises:
        LeaseHeld: an owner may still run.
    """
    _copyable(ledger).restore(who, why, takeover)
    records = [ledger.scope_record(scope) for scope in ledger.scopes()]
    found = {str(record.scope): record for record in records if record is not None}
    return Restoration(
        ledger.url,
        ledger.ledger_id,
        who,
        why,
        epochs={scope: record.epoch for scope, record in found.items()},
        marks={scope: r.mark.cycle.label if r.mark else None for scope, r in found.items()},
    )


def _copyable(ledger: Ledger) -> CanBeBackedUp:
    if not isinstance(ledger, CanBeBackedUp):
        raise Misuse(f"ledger {ledger.url} cannot be backed up")
    return ledger
