"""Where every scope of a ledger stands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from semel.cli.reports.attempts import (
    AttemptReport,
    SourceReport,
    attempt_report,
    by_state,
)
from semel.cli.reports.ownership import OwnerReport, owner_report
from semel.clock import SYSTEM_CLOCK, Clock
from semel.pipeline.ledger import Ledger
from semel.pipeline.source import BatchRange, SourceKind
from semel.pipeline.txn import Scope


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """The checkpoint in use."""

    number: int
    checkpoint: str
    first_batch: int
    opened_at: float


@dataclass(frozen=True, slots=True)
class ScopeStatus:
    """Where one scope stands."""

    scope: str
    app: str
    query: str
    owner: OwnerReport
    generation: GenerationReport | None
    mark: str | None
    """The highest finished cycle."""

    open: dict[str, int]
    """Open attempts by state: planned, prepared, committed."""

    oldest_open_seconds: float | None
    positions: list[SourceReport]
    last: AttemptReport | None
    """The newest attempt."""

    needs_attention: bool
    advice: str
    """What to do next, where something is to be done."""


@dataclass(frozen=True, slots=True)
class StatusReport:
    """The answer to `semel status`."""

    ledger: str
    ledger_id: str
    scopes: list[ScopeStatus]

    @property
    def needs_attention(self) -> bool:
        """Tell whether a scope has open cycles and nobody at work on them."""
        return any(scope.needs_attention for scope in self.scopes)


class Files(StrEnum):
    """Whether committed files are counted: there may be millions."""

    COUNTED = "counted"
    LEFT_OUT = "left out"


def status_report(
    ledger: Ledger,
    scopes: Iterable[Scope],
    files: Files = Files.LEFT_OUT,
    clock: Clock = SYSTEM_CLOCK,
) -> StatusReport:
    """Ask the ledger where *scopes* stand."""
    found = [_of_scope(ledger, scope, files, clock.now()) for scope in scopes]
    return StatusReport(ledger.url, ledger.ledger_id, found)


def _of_scope(ledger: Ledger, scope: Scope, files: Files, now: float) -> ScopeStatus:
    record = ledger.scope_record(scope)
    owner = owner_report(record)
    still_open = ledger.open_attempts(scope)
    newest = ledger.history(scope, 1)
    generations = [
        GenerationReport(g.number, g.checkpoint, g.first_batch, g.opened_at)
        for g in ledger.generations(scope)
        if record is not None and g.number == record.generation
    ]
    stranded = bool(still_open) and not owner.is_live
    return ScopeStatus(
        scope=str(scope),
        app=scope.app,
        query=scope.query,
        owner=owner,
        generation=generations[0] if generations else None,
        mark=record.mark.cycle.label if record and record.mark else None,
        open=by_state(still_open),
        oldest_open_seconds=max((now - r.planned_at for r in still_open), default=None),
        positions=position_reports(ledger, scope, files),
        last=attempt_report(newest[0], now) if newest else None,
        needs_attention=stranded,
        advice=(
            "nobody works on its open cycles: start the job again, or see `semel doctor`"
            if stranded
            else ""
        ),
    )


def position_reports(ledger: Ledger, scope: Scope, files: Files) -> list[SourceReport]:
    """Say where every source of *scope* stands."""
    counting = files is Files.COUNTED
    positions = ledger.positions(scope, None if counting else BatchRange())
    ends: dict[str, dict[str, int]] = {}
    for (source, partition), position in positions.ends.items():
        ends.setdefault(source, {})[partition] = position.end
    paths = {source: len(found) for source, found in positions.paths.items()}
    for source in _file_sources(ledger, scope):
        paths.setdefault(source, 0)
    return [
        SourceReport(
            source,
            dict(sorted(ends.get(source, {}).items())),
            paths.get(source) if counting else None,
        )
        for source in sorted({*ends, *paths})
    ]


def _file_sources(ledger: Ledger, scope: Scope) -> list[str]:
    """Which sources read files, as far as the newest attempt tells."""
    for record in ledger.history(scope, 1):
        if record.range is not None:
            sources = record.range.sources
            return [s.source for s in sources if s.kind is SourceKind.FILES]
    return []
