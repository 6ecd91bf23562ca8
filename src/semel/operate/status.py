"""A pipeline as operators see it: who owns its scope, where it stands, and what happened in it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import Misuse, reason_of
from semel.pipeline.driver import Driver, Settings
from semel.pipeline.ledger import (
    AttemptRecord,
    CycleState,
    Generation,
    Ledger,
    LedgerAct,
    ScopeRecord,
    mark_of,
)
from semel.pipeline.recovery import REMEMBERED
from semel.pipeline.sink import REJECTED, Grows, TwoPhaseSink
from semel.pipeline.source import BatchRange, SourceKind
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

RESOLVE: Final = "cycle-resolve"
RESOLVED: Final = "cycle-resolve-done"
"""The recorded acts of `semel cycle resolve`: what it will do, and what it did."""

UNDO: Final = "cycle-undo"
UNDONE: Final = "cycle-undo-done"
"""The recorded acts of `semel cycle undo`."""

GIVES_UP: Final = frozenset({"without", "abandon"})
"""What such an act does with the rows of a sink that are given up."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A scope of a ledger that exists, with its sinks, as the user's program configures them."""

    ledger: Ledger
    scope: Scope
    sinks: tuple[TwoPhaseSink, ...]
    settings: Settings

    @classmethod
    def of(cls, driver: Driver) -> Pipeline:
        """Take what a driver was made with; the driver itself is not used."""
        return cls(driver.ledger, driver.scope, driver.sinks, driver.settings)


def cycle_of(scope: Scope, label: str) -> CycleId:
    """Read ``g1.b42``.

    Raises:
        Misuse: it is not a cycle's label.
    """
    try:
        return CycleId.parse(scope, label)
    except ValueError as error:
        raise Misuse(f"--cycle {label}: write it as g1.b42, as `semel history` does") from error


class Ownership(StrEnum):
    """Whether a process works on a scope now."""

    LIVE = "live"
    """The lease is live, and the owner is not known to be gone."""

    GONE = "gone"
    """The owner ran on this host, and its process no longer exists."""

    EXPIRED = "expired"
    """The owner stopped renewing its lease: dead, stopped, or cut off."""

    RELEASED = "released"
    """The owner ended cleanly."""

    NEVER = "never"
    """The scope never had an owner."""


@dataclass(frozen=True, slots=True)
class ScopeOwner:
    """The process that owns a scope, or did so last."""

    ownership: Ownership
    host: str | None
    pid: int | None
    epoch: int
    lease_left_seconds: float

    @property
    def is_live(self) -> bool:
        """Return whether the scope's open cycles may be work in progress."""
        return self.ownership is Ownership.LIVE

    def __str__(self) -> str:
        if self.host is None:
            return str(self.ownership)
        return f"process {self.pid} on {self.host} ({self.ownership})"


@dataclass(frozen=True, slots=True)
class SourceEnd:
    """Where one source stands."""

    source: str
    ends: dict[str, int] = field(default_factory=dict)
    """By partition: the next record to read."""

    files: int | None = None
    """How many files are committed, where that was asked for."""


@dataclass(frozen=True, slots=True)
class ScopeStatus:
    """Where one scope stands."""

    scope: Scope
    owner: ScopeOwner
    generation: Generation | None
    """The checkpoint in use."""

    mark: str | None
    """The highest finished cycle."""

    open: dict[str, int]
    """Open attempts by state: planned, prepared, committed."""

    oldest_open_seconds: float | None
    positions: list[SourceEnd]
    last: AttemptRecord | None
    """The newest attempt."""

    rejected: dict[str, int] = field(default_factory=dict)
    """By sink: the rows of remembered cycles that are in its reject table."""

    given_up: dict[str, int] = field(default_factory=dict)
    """By sink: the rows of remembered cycles that an operator gave up, and that are not there."""

    outgrown: list[str] = field(default_factory=list)
    """What is too large for how it is kept, as the sinks say; only with the pipeline."""

    @property
    def needs_attention(self) -> bool:
        """Return whether there are open cycles and no live owner works on them."""
        return any(self.open.values()) and not self.owner.is_live

    @property
    def advice(self) -> str:
        """What to do next, where something is to be done."""
        if not self.needs_attention:
            return ""
        return "no process works on its open cycles: start the job again, or see `semel doctor`"


@dataclass(frozen=True, slots=True)
class Status:
    """The answer of `status_of`."""

    ledger: str
    ledger_id: str
    scopes: list[ScopeStatus]

    @property
    def needs_attention(self) -> bool:
        """Return whether one of the scopes needs attention."""
        return any(scope.needs_attention for scope in self.scopes)


@dataclass(frozen=True, slots=True)
class ScopeHistory:
    """One scope's attempts and acts, newest first."""

    scope: Scope
    attempts: list[AttemptRecord]
    acts: list[LedgerAct]
    """What operators did."""


@dataclass(frozen=True, slots=True)
class History:
    """The answer of `history_of`."""

    ledger: str
    scopes: list[ScopeHistory]


@dataclass(frozen=True, slots=True)
class SinkCut:
    """What one sink says about a cut."""

    sink: str
    mark: str | None
    """The highest cycle that the sink shows."""

    agrees: bool
    """Whether the sink shows everything up to the cut."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """Through which cycle, and which positions, every sink of a scope is visible."""

    scope: Scope
    cycle: str | None
    """Every sink shows this cycle and all before it; later ones may be visible in some sinks."""

    positions: list[SourceEnd]
    """The next record after the cut, by source and partition."""

    finished_at: float | None
    """When the last sink showed the cycle; None once the ledger has forgotten it."""

    sinks: list[SinkCut]
    """What the sinks themselves say, where they were asked."""

    @property
    def needs_attention(self) -> bool:
        """Return whether a sink does not answer, or shows less than the ledger has finished."""
        return not all(sink.agrees for sink in self.sinks)


@dataclass(frozen=True, slots=True)
class Cuts:
    """The answer of `cuts_of`."""

    ledger: str
    scopes: list[Cut]

    @property
    def needs_attention(self) -> bool:
        """Return whether one of the scopes needs attention."""
        return any(scope.needs_attention for scope in self.scopes)


class Files(StrEnum):
    """Whether committed files are counted: there may be millions."""

    COUNTED = "counted"
    LEFT_OUT = "left out"


def status_of(
    ledger: Ledger,
    scopes: Iterable[Scope] | None = None,
    files: Files = Files.LEFT_OUT,
    clock: Clock = SYSTEM_CLOCK,
    sinks: Iterable[TwoPhaseSink] = (),
) -> Status:
    """Ask the ledger where *scopes* stand, or every scope it has; changes nothing.

    *sinks* are those of all of them; they say what they have outgrown.
    """
    which = ledger.scopes() if scopes is None else scopes
    outgrown = [words for sink in sinks if isinstance(sink, Grows) and (words := _outgrown(sink))]
    found = [_of_scope(ledger, scope, files, clock.now(), outgrown) for scope in which]
    return Status(ledger.url, ledger.ledger_id, found)


def history_of(
    ledger: Ledger,
    scopes: Iterable[Scope] | None = None,
    limit: int = 20,
    cycle: str | None = None,
) -> History:
    """List the newest *limit* attempts and acts of each scope; or all attempts at one cycle.

    Raises:
        Misuse: *cycle* is not a cycle's label, such as ``g1.b42``.
    """
    found = []
    for scope in ledger.scopes() if scopes is None else scopes:
        attempts = (
            ledger.attempts(cycle_of(scope, cycle))[::-1] if cycle else ledger.history(scope, limit)
        )
        found.append(ScopeHistory(scope, attempts, ledger.acts(scope)[:limit]))
    return History(ledger.url, found)


def cut_of(ledger: Ledger, scope: Scope, sinks: Iterable[TwoPhaseSink] = ()) -> Cut:
    """Find through which cycle all sinks are visible, and ask *sinks* whether it is so.

    A cycle is finished when every sink shows it, so the ledger alone knows the cut.
    """
    mark, open_cycles = _progress(ledger, scope)
    while True:
        positions = ledger.positions(scope, BatchRange()).ends
        before, (mark, open_cycles) = (mark, open_cycles), _progress(ledger, scope)
        if before == (mark, open_cycles):
            break  # no cycle was decided or finished while the positions were read
    ends = {place: position.end for place, position in positions.items()}
    for attempt in open_cycles:
        # Its positions are in the ledger since the decision, and its rows not in every sink yet.
        for source in attempt.range.sources if attempt.range else ():
            ends |= {(source.source, name): span.start for name, span in source.spans.items()}
    by_source: dict[str, dict[str, int]] = {}
    for (source_place, partition), end in sorted(ends.items()):
        by_source.setdefault(source_place, {})[partition] = end
    known = ledger.attempt(mark) if mark else None
    return Cut(
        scope,
        mark.cycle.label if mark else None,
        [SourceEnd(source, found) for source, found in by_source.items()],
        known.finished_at if known else None,
        [_sink_cut(sink, scope, mark) for sink in sinks],
    )


def cuts_of(
    ledger: Ledger, scopes: Iterable[Scope] | None = None, sinks: Iterable[TwoPhaseSink] = ()
) -> Cuts:
    """Find the cut of each of *scopes*, or of every scope; *sinks* are those of all of them."""
    which = ledger.scopes() if scopes is None else scopes
    asked = list(sinks)
    return Cuts(ledger.url, [cut_of(ledger, scope, asked) for scope in which])


def _progress(ledger: Ledger, scope: Scope) -> tuple[SinkTxnId | None, list[AttemptRecord]]:
    """Return the mark, and the cycles that are committed and not finished."""
    record = ledger.scope_record(scope)
    found = [one for one in ledger.open_attempts(scope) if one.state.is_committed]
    return (record.mark if record else None), found


def _sink_cut(sink: TwoPhaseSink, scope: Scope, mark: SinkTxnId | None) -> SinkCut:
    try:
        own = sink.mark(scope)
    except Exception as error:  # noqa: BLE001  one sink's silence must not hide the others' answers
        return SinkCut(sink.name, None, False, reason_of(error))
    label = own.cycle.label if own else None
    if mark is None or (own is not None and own.cycle >= mark.cycle):
        return SinkCut(sink.name, label, True)
    return SinkCut(
        sink.name, label, False, "it took no part in the last cycles, or was put back; see doctor"
    )


def owner_of(record: ScopeRecord | None) -> ScopeOwner:
    """Judge whether the owner in the ledger still lives."""
    if record is None:
        return ScopeOwner(Ownership.NEVER, None, None, 0, 0.0)
    owner = record.owner
    if owner is None:
        return ScopeOwner(Ownership.RELEASED, None, None, record.epoch, 0.0)
    if owner.is_gone():
        ownership = Ownership.GONE
    elif record.lease_left_seconds > 0:
        ownership = Ownership.LIVE
    else:
        ownership = Ownership.EXPIRED
    return ScopeOwner(ownership, owner.host, owner.pid, record.epoch, record.lease_left_seconds)


def range_words(batch: BatchRange | None) -> list[str]:
    """Say what a batch read, one line per source."""
    lines = []
    for source in batch.sources if batch else ():
        if source.kind is SourceKind.FILES:
            what = f"{len(source.paths)} files"
        elif source.spans:
            records = sum(max(0, span.end - span.start) for span in source.spans.values())
            ends = [f"{name} {s.start}..{s.end}".strip() for name, s in source.spans.items()]
            more = f" and {len(ends) - 4} more" if len(ends) > 4 else ""
            what = f"{records} offsets ({', '.join(ends[:4])}{more})"
        else:
            what = source.raw or "nothing"
        lines.append(f"source {source.source}: {what}")
    return lines


def given_up(ledger: Ledger, scope: Scope) -> set[tuple[CycleId, str]]:
    """Return the cycles, and the sinks whose rows of them an operator gave up, or began to."""
    found: dict[tuple[CycleId, str], bool] = {}
    for act in ledger.acts(scope):
        for one in act.detail["sinks"] if act.act in (RESOLVE, RESOLVED) else ():
            does, is_done = one.get("did", one.get("will")), one.get("is_done")
            if does in GIVES_UP or (is_done and does != "nothing"):
                # The newest act comes first: a later one may have brought the rows after all.
                which = cycle_of(scope, act.detail["cycle"]), one["sink"]
                found.setdefault(which, does in GIVES_UP and is_done is not False)
    return {which for which, is_given_up in found.items() if is_given_up}


def undone(ledger: Ledger, scope: Scope) -> set[tuple[CycleId, str]]:
    """Return the cycles that were undone, by decision, each with the sinks that took rows away."""
    told: dict[str, set[str]] = {}
    for act in ledger.acts(scope):
        if act.act == UNDONE:
            taken = {one["sink"] for one in act.detail["sinks"] if one["did"] == "undo"}
            told[act.detail["cycle"]] = taken
    # Decided, and the act is not written yet.
    decided: dict[str, set[str]] = {}
    for record in ledger.history(undo_scope(scope), REMEMBERED):
        for name, own in record.tokens.items() if record.state.is_committed else ():
            if own and own["cycle"] not in told:
                decided.setdefault(own["cycle"], set()).add(name)
    return {(cycle_of(scope, at), sink) for at, of in {**told, **decided}.items() for sink in of}


def fill_scope(scope: Scope, sink: str) -> Scope:
    """Return the scope that decides about the past of a sink."""
    return _beside(scope, f"fill-{sink}")


def undo_scope(scope: Scope) -> Scope:
    """Return the scope that decides about cycles that are undone."""
    return _beside(scope, "undo")


def _beside(scope: Scope, what: str) -> Scope:
    query = f"{scope.query}-{what}"
    if len(query) > 40:
        query = f"{query[:29]}-{hashlib.sha256(query.encode()).hexdigest()[:10]}"
    return Scope(scope.ledger, scope.app, query)


def _outgrown(sink: Grows) -> str:
    try:
        return sink.outgrown()
    except Exception as error:  # noqa: BLE001  one sink's silence must not hide what the ledger knows
        return f"it is not known how much is kept: {reason_of(error)}"


def _of_scope(
    ledger: Ledger, scope: Scope, files: Files, now: float, outgrown: list[str]
) -> ScopeStatus:
    record = ledger.scope_record(scope)
    still_open = ledger.open_attempts(scope)
    newest = ledger.history(scope, 1)
    generations = [
        generation
        for generation in ledger.generations(scope)
        if record is not None and generation.number == record.generation
    ]
    return ScopeStatus(
        scope=scope,
        owner=owner_of(record),
        generation=generations[0] if generations else None,
        mark=record.mark.cycle.label if record and record.mark else None,
        open={"planned": 0, "prepared": 0, "committed": 0}
        | Counter(attempt.state.value for attempt in still_open),
        oldest_open_seconds=max((now - one.planned_at for one in still_open), default=None),
        positions=_positions(ledger, scope, files, newest),
        last=newest[0] if newest else None,
        rejected=_rejected(ledger, scope),
        given_up=_given_up(ledger, scope),
        outgrown=outgrown,
    )


def _rejected(ledger: Ledger, scope: Scope) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for attempt in ledger.history(scope, REMEMBERED):
        if attempt.state.is_committed:
            counted.update({name: token.get(REJECTED, 0) for name, token in attempt.tokens.items()})
    return {name: rows for name, rows in sorted(counted.items()) if rows}


def _given_up(ledger: Ledger, scope: Scope) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for cycle, sink in given_up(ledger, scope):
        record, filled = ledger.committed(cycle), mark_of(ledger, fill_scope(scope, sink))
        written_again = filled is not None and filled.cycle >= cycle
        if record is not None and record.state is CycleState.FINISHED and not written_again:
            counted[sink] += record.rows.get(sink, 0)
    return {name: rows for name, rows in sorted(counted.items()) if rows}


def _positions(
    ledger: Ledger, scope: Scope, files: Files, newest: list[AttemptRecord]
) -> list[SourceEnd]:
    counting = files is Files.COUNTED
    positions = ledger.positions(scope, None if counting else BatchRange())
    ends: dict[str, dict[str, int]] = {}
    for (source, partition), position in positions.ends.items():
        ends.setdefault(source, {})[partition] = position.end
    paths = {source: len(found) for source, found in positions.paths.items()}
    # A source of files has no ends; the newest attempt shows that it exists.
    for record in newest:
        for one in record.range.sources if record.range else ():
            if one.kind is SourceKind.FILES:
                paths.setdefault(one.source, 0)
    return [
        SourceEnd(
            source,
            dict(sorted(ends.get(source, {}).items())),
            paths.get(source) if counting else None,
        )
        for source in sorted({*ends, *paths})
    ]
