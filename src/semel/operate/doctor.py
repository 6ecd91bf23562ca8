"""What is wrong with a scope, with evidence, and what to read about it.

    open attempts of the ledger ──┐
                                  ├──▶ look_up in the sink ──▶ the recovery table's decision
    what each sink still holds ───┘

Read-only: no lease is taken and nothing is decided.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import NeedsOperator, reason_of
from semel.operate.guarantee import Weakness, of_ledger, weaknesses
from semel.operate.status import Ownership, ScopeOwner, owner_of
from semel.pipeline.cycle import SLOW_COMMIT_FRACTION
from semel.pipeline.driver import Settings
from semel.pipeline.ledger import AttemptRecord, CycleState, Ledger
from semel.pipeline.recovery import (
    DECIDE,
    LedgerSays,
    RecoveryDecision,
    check_ledger,
    check_marks,
    check_places,
    what_ledger_says,
)
from semel.pipeline.sink import Found, ListsLeftovers, SinkFinding, TwoPhaseSink
from semel.pipeline.txn import Scope, SinkTxnId

# A commit that takes longer than this is no longer "in flight" to an operator.
LONG_IN_FLIGHT_SECONDS: Final = 300.0
# A pipeline that runs sweeps what losers left long before.
LONG_LEFT_SECONDS: Final = 86_400.0
# With fewer finished cycles, the interval between them is unknown.
ENOUGH_CYCLES: Final = 5
# A shorter commit is never reported, even if it takes most of the interval.
UNNOTICED_COMMIT_SECONDS: Final = 0.5


class Kind(StrEnum):
    """What is wrong; the stable word for scripts."""

    STRANDED = "stranded"
    """Prepared and not finished, and no live owner is at work on it."""

    CONTRADICTION = "contradiction"
    """A sink cannot do what the decision demands."""

    NOT_OURS = "not_ours"
    """A sink holds something that the ledger does not know; it is left as it is."""

    SINK_SILENT = "sink_silent"
    """A sink does not answer, so nothing may be concluded."""

    SINK_MISSING = "sink_missing"
    """A sink has promised a committed cycle and is no longer configured."""

    WRONG_LEDGER = "wrong_ledger"
    """A sink has committed what this ledger does not know: it is older, or another one."""

    LEASE_LOST = "lease_lost"
    """The owner stopped renewing and left open cycles."""

    LEFT_BEHIND = "left_behind"
    """A losing attempt's data lies in a sink for long, and costs money."""

    SLOW = "slow"
    """Committing takes a meaningful part of the time between cycles."""


STOPS_RECOVERY: Final = frozenset(
    {Kind.CONTRADICTION, Kind.SINK_SILENT, Kind.SINK_MISSING, Kind.WRONG_LEDGER}
)

_PAGES: Final = {
    Kind.WRONG_LEDGER: "wrong-ledger",
    Kind.LEASE_LOST: "lost-lease",
    Kind.SLOW: "slow-commits",
}
RUNBOOKS: Final = {
    kind: f"docs/operate/runbooks/{_PAGES.get(kind, 'sink-not-finished')}.md" for kind in Kind
}
"""What to read about each kind."""


def short_name(txn: SinkTxnId) -> str:
    """Name an attempt as people read it."""
    return f"{txn.cycle.label} (attempt {txn.attempt[:8]})"


@dataclass(frozen=True, slots=True)
class Stranded:
    """One transaction of one sink that is prepared, or should be, and is not finished."""

    scope: Scope
    sink: str
    txn: SinkTxnId
    ledger_says: LedgerSays
    finding: SinkFinding
    rows: int | None
    age_seconds: float | None
    in_flight: bool
    """The scope's live owner is at work on it."""

    @property
    def decision(self) -> RecoveryDecision:
        """What recovery does with it."""
        return DECIDE[self.ledger_says]

    @property
    def is_contradiction(self) -> bool:
        """Return whether the sink cannot do what the decision demands.

        While an owner is at work, its ledger and its sinks are asked at different moments.
        """
        if self.in_flight:
            return False
        commits = self.decision is RecoveryDecision.COMMIT_FROM_TOKEN
        aborts = self.decision is RecoveryDecision.ABORT_FROM_TOKEN
        found = self.finding.found
        return (commits and found is Found.GONE) or (aborts and found is Found.VISIBLE)


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """One attempt that the ledger has open."""

    record: AttemptRecord
    decision: RecoveryDecision
    age_seconds: float
    in_flight: bool
    missing_sinks: list[str]
    """Sinks that have promised it and are not configured."""

    @property
    def lost_promises(self) -> list[str]:
        """The missing sinks, where the attempt is committed and needs them."""
        return self.missing_sinks if self.record.state is CycleState.COMMITTED else []


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What tasks stored for an attempt that its sink neither holds nor shows."""

    sink: str
    txn: SinkTxnId
    what: str
    age_seconds: float | None
    ledger_says: LedgerSays

    @property
    def is_swept(self) -> bool:
        """Return whether recovery, and the sweeps of a running pipeline, remove it."""
        return DECIDE[self.ledger_says] is RecoveryDecision.ABORT_FROM_TOKEN


@dataclass(frozen=True, slots=True)
class SinkSilence:
    """A sink that does not answer: nothing may be concluded."""

    sink: str
    reason: str


@dataclass(frozen=True, slots=True)
class Examination:
    """Everything unfinished in one scope."""

    attempts: list[OpenAttempt]
    stranded: list[Stranded]
    silent: list[SinkSilence]


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that needs a person."""

    scope: Scope
    kind: Kind
    what: str
    """A sentence: which thing, what is wrong, what to do."""

    @property
    def runbook(self) -> str:
        """What to read about it."""
        return RUNBOOKS[self.kind]


@dataclass(frozen=True, slots=True)
class ScopeDiagnosis:
    """One scope's health."""

    scope: Scope
    owner: ScopeOwner
    sinks_asked: list[str]
    """Empty where only the ledger was asked."""

    attempts: list[OpenAttempt]
    stranded: list[Stranded]
    left_behind: list[LeftBehind]
    silent: list[SinkSilence]
    problems: list[Problem]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer of `diagnose`."""

    ledger: str
    scopes: list[ScopeDiagnosis]
    weakened_by: list[Weakness]
    """Settings in force; they count only with --strict."""

    strict: bool

    @property
    def needs_attention(self) -> bool:
        """Return whether there is a problem or, if *strict*, a weakness."""
        found = any(scope.problems for scope in self.scopes)
        return found or (self.strict and bool(self.weakened_by))


@dataclass(frozen=True, slots=True)
class Patient:
    """What to examine: a scope, and its sinks and settings where they are known."""

    scope: Scope
    sinks: Sequence[TwoPhaseSink] = ()
    settings: Settings | None = None


def diagnose(
    ledger: Ledger,
    patients: Iterable[Patient],
    *,
    strict: bool = False,
    clock: Clock = SYSTEM_CLOCK,
) -> Diagnosis:
    """Find stranded transactions and all other things that need a person; changes nothing."""
    patients = list(patients)
    weak = list(of_ledger(ledger)) if not patients else []
    for patient in patients:
        found = weaknesses(ledger, patient.sinks, patient.settings)
        weak += [one for one in found if one not in weak]
    scopes = [_diagnose(ledger, patient, clock.now()) for patient in patients]
    return Diagnosis(ledger.url, scopes, weak, strict)


def examine(
    ledger: Ledger, scope: Scope, sinks: Sequence[TwoPhaseSink], owner: ScopeOwner, now: float
) -> Examination:
    """Ask the ledger and every sink what is unfinished; changes nothing."""
    records = {record.txn: record for record in ledger.open_attempts(scope)}
    held: dict[str, list[SinkTxnId]] = {}
    silent = []
    for sink in sinks:
        try:
            held[sink.name] = sink.recover(scope)
        except Exception as error:  # noqa: BLE001  a sink's silence is a finding, not a failure
            silent.append(SinkSilence(sink.name, reason_of(error)))
    txns = dict.fromkeys([*records, *(txn for some in held.values() for txn in some)])
    says = what_ledger_says(ledger, scope, txns)
    known = {txn: records.get(txn) or ledger.attempt(txn) for txn in txns}

    def in_flight(record: AttemptRecord | None) -> bool:
        return record is not None and owner.is_live and record.epoch == owner.epoch

    def stranded(sink: TwoPhaseSink, txn: SinkTxnId) -> Stranded:
        record = known[txn]
        finding = _look_up(sink, txn, record)
        since = finding.since or (record.planned_at if record else None)
        age = None if since is None else max(0.0, now - since)
        rows = record.rows.get(sink.name) if record else None
        return Stranded(scope, sink.name, txn, says[txn], finding, rows, age, in_flight(record))

    names = {sink.name for sink in sinks}
    attempts = [
        OpenAttempt(
            record,
            DECIDE[says[txn]],
            max(0.0, now - record.planned_at),
            in_flight(record),
            sorted(set(record.tokens) - names) if sinks else [],
        )
        for txn, record in records.items()
    ]
    asked = [
        stranded(sink, txn)
        for sink in sinks
        if sink.name in held
        # What the ledger says the sink has promised, and what the sink holds.
        for txn in dict.fromkeys(
            [*(txn for txn, one in records.items() if sink.name in one.tokens), *held[sink.name]]
        )
    ]
    amiss = (Found.HELD, Found.UNREACHABLE)
    kept = [one for one in asked if one.finding.found in amiss or one.is_contradiction]
    return Examination(attempts, kept, silent)


def _look_up(sink: TwoPhaseSink, txn: SinkTxnId, record: AttemptRecord | None) -> SinkFinding:
    try:
        return sink.look_up(txn, record.tokens.get(sink.name) if record else None)
    except Exception as error:  # noqa: BLE001  look_up never raises, but a broken sink may
        return SinkFinding(Found.UNREACHABLE, reason_of(error))


def _diagnose(ledger: Ledger, patient: Patient, now: float) -> ScopeDiagnosis:
    scope = patient.scope
    owner = owner_of(ledger.scope_record(scope))
    seen = examine(ledger, scope, patient.sinks, owner, now)
    left = _left_behind(ledger, scope, patient.sinks, seen, now)
    found = [
        *_of_stranded(seen),
        *_of_leftovers(left),
        *_of_attempts(seen),
        *_of_owner(owner, seen),
        *_of_sinks(ledger, patient, seen),
        *_of_speed(ledger, patient),
    ]
    return ScopeDiagnosis(
        scope,
        owner,
        [sink.name for sink in patient.sinks],
        seen.attempts,
        seen.stranded,
        left,
        seen.silent,
        [Problem(scope, kind, what) for kind, what in found],
    )


def _left_behind(
    ledger: Ledger, scope: Scope, sinks: Sequence[TwoPhaseSink], seen: Examination, now: float
) -> list[LeftBehind]:
    running = {one.record.txn for one in seen.attempts if one.in_flight}
    silent = {one.sink for one in seen.silent}
    found = []
    for sink in sinks:
        if sink.name in silent or not isinstance(sink, ListsLeftovers):
            continue
        try:
            left = [one for one in sink.leftovers(scope) if one.txn not in running]
        except Exception as error:  # noqa: BLE001  a sink's silence is a finding, not a failure
            seen.silent.append(SinkSilence(sink.name, reason_of(error)))
            continue
        says = what_ledger_says(ledger, scope, [one.txn for one in left])
        for one in left:
            age = None if one.since is None else max(0.0, now - one.since)
            found.append(LeftBehind(sink.name, one.txn, one.what, age, says[one.txn]))
    return found


def _of_leftovers(left: Iterable[LeftBehind]) -> Iterable[tuple[Kind, str]]:
    for one in left:
        if (one.age_seconds or 0) > LONG_LEFT_SECONDS:
            name = f"{one.what} of {short_name(one.txn)} in sink {one.sink!r}"
            ends = (
                "starting the job, or `semel recover`, removes them"
                if one.is_swept
                else "they stay as they are: look whether another ledger knows them"
            )
            yield (
                Kind.LEFT_BEHIND,
                f"{name} lie there, and the ledger says {one.ledger_says}: {ends}",
            )


def obstacles(ledger: Ledger, patient: Patient, seen: Examination) -> Iterable[str]:
    """Say why recovery would stop half-way, or could not begin."""
    found = (*_of_sinks(ledger, patient, seen), *_of_stranded(seen), *_of_attempts(seen))
    return [what for kind, what in found if kind in STOPS_RECOVERY]


def _of_stranded(seen: Examination) -> Iterable[tuple[Kind, str]]:
    for one in seen.stranded:
        name = f"{short_name(one.txn)} in sink {one.sink!r}"
        found, evidence = one.finding.found, one.finding.evidence
        if one.is_contradiction:
            yield (
                Kind.CONTRADICTION,
                f"{name} is {found}, and the ledger says {one.ledger_says}: {evidence}; "
                f"nothing repairs this by itself, see `semel cycle resolve`",
            )
        elif one.decision is RecoveryDecision.UNKNOWN_LEAVE_AS_IS:
            yield (
                Kind.NOT_OURS,
                f"{name} is held, and this ledger does not know it; it is left as it is: look "
                f"whether another ledger, or an older backup of this one, does",
            )
        elif not one.in_flight or (one.age_seconds or 0) > LONG_IN_FLIGHT_SECONDS:
            does = "commits" if one.decision is RecoveryDecision.COMMIT_FROM_TOKEN else "aborts"
            yield (
                Kind.STRANDED,
                f"{name} is {found}, and the ledger says {one.ledger_says}: starting the job, "
                f"or `semel recover`, {does} it",
            )


def _of_attempts(seen: Examination) -> Iterable[tuple[Kind, str]]:
    told = {one.txn for one in seen.stranded}
    for attempt in seen.attempts:
        name = short_name(attempt.record.txn)
        for sink in attempt.lost_promises:
            yield (
                Kind.SINK_MISSING,
                f"{name} is committed, and sink {sink!r} has promised it but is not "
                f"configured: configure it again, or see `semel cycle resolve --without`",
            )
        if not attempt.in_flight and attempt.record.txn not in told:
            does = (
                "finishes it"
                if attempt.decision is RecoveryDecision.COMMIT_FROM_TOKEN
                else "gives it up, and the batch runs again"
            )
            yield (
                Kind.STRANDED,
                f"{name} is {attempt.record.state} in the ledger and no process works on it: "
                f"starting the job, or `semel recover`, {does}",
            )


def _of_owner(owner: ScopeOwner, seen: Examination) -> Iterable[tuple[Kind, str]]:
    if owner.ownership is Ownership.EXPIRED and seen.attempts:
        yield (
            Kind.LEASE_LOST,
            f"process {owner.pid} on {owner.host} (epoch {owner.epoch}) stopped renewing its lease "
            f"with {len(seen.attempts)} open; find out whether it still runs before the next start",
        )


def _of_sinks(ledger: Ledger, patient: Patient, seen: Examination) -> Iterable[tuple[Kind, str]]:
    for silence in seen.silent:
        yield (
            Kind.SINK_SILENT,
            f"sink {silence.sink!r} does not answer, and a start waits for it: {silence.reason}",
        )
    silent = {silence.sink for silence in seen.silent}
    for sink in patient.sinks:
        if sink.name in silent:
            continue
        try:
            names = [other.name for other in patient.sinks]
            check_places(ledger, patient.scope, [sink], names)
            check_ledger(ledger, patient.scope, [sink])
            check_marks(ledger, patient.scope, [sink])
        except NeedsOperator as error:
            yield Kind.WRONG_LEDGER, reason_of(error)
        except Exception as error:  # noqa: BLE001  a sink's silence is a finding, not a failure
            yield Kind.SINK_SILENT, f"sink {sink.name!r} does not tell its mark: {reason_of(error)}"


def _of_speed(ledger: Ledger, patient: Patient) -> Iterable[tuple[Kind, str]]:
    done = [r for r in ledger.history(patient.scope, 30) if r.finished_at and r.decided_at]
    if len(done) < ENOUGH_CYCLES:
        return
    commit = statistics.median((r.finished_at or 0) - (r.decided_at or 0) for r in done)
    starts = sorted(r.planned_at for r in done)
    between = [later - earlier for earlier, later in pairwise(starts)]
    interval = (patient.settings.interval_seconds if patient.settings else None) or (
        statistics.median(between)
    )
    if commit > UNNOTICED_COMMIT_SECONDS and commit > SLOW_COMMIT_FRACTION * interval:
        yield (
            Kind.SLOW,
            f"committing takes {commit:.1f} s of the {interval:.1f} s between two cycles (medians "
            f"of {len(done)}): batches wait for sinks",
        )
