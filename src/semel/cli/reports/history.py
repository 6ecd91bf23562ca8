"""The newest attempts of a scope, and what operators did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from semel.cli.reports.attempts import AttemptReport, attempt_report
from semel.cli.reports.labels import cycle_of
from semel.clock import SYSTEM_CLOCK, Clock
from semel.pipeline.ledger import Ledger
from semel.pipeline.txn import Scope


@dataclass(frozen=True, slots=True)
class ActReport:
    """Something that an operator did."""

    at: float
    who: str
    act: str
    why: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScopeHistory:
    """One scope's attempts and acts, newest first."""

    scope: str
    attempts: list[AttemptReport]
    acts: list[ActReport]


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """The answer to `semel history`."""

    ledger: str
    scopes: list[ScopeHistory]

    @property
    def needs_attention(self) -> bool:
        """The past needs none."""
        return False


def history_report(
    ledger: Ledger,
    scopes: Iterable[Scope],
    limit: int = 20,
    cycle: str | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> HistoryReport:
    """List the newest *limit* attempts of each scope, or all those of one cycle."""
    now = clock.now()
    found = []
    for scope in scopes:
        records = (
            ledger.attempts(cycle_of(scope, cycle))[::-1] if cycle else ledger.history(scope, limit)
        )
        acts = [ActReport(a.at, a.who, a.act, a.why, dict(a.detail)) for a in ledger.acts(scope)]
        found.append(
            ScopeHistory(str(scope), [attempt_report(r, now) for r in records], acts[:limit])
        )
    return HistoryReport(ledger.url, found)
