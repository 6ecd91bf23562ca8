"""What is wrong with a scope, with evidence, and what to read about it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final

from semel.cli.reports.ownership import OwnerReport, Ownership, owner_report
from semel.cli.reports.stranded import Examination, OpenAttempt, SinkSilence, Stranded, examine
from semel.cli.reports.weakness import Weakness, of_ledger, weaknesses
from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import NeedsOperator, reason_of
from semel.pipeline.cycle import SLOW_COMMIT_FRACTION
from semel.pipeline.driver import Settings
from semel.pipeline.ledger import Ledger
from semel.pipeline.recovery import RecoveryDecision, check_ledger, check_marks
from semel.pipeline.sink import TwoPhaseSink
from semel.pipeline.txn import Scope

# A commit that takes longer than this is no longer "in flight" to an operator.
LONG_IN_FLIGHT_SECONDS: Final = 300.0
# Fewer finished cycles say nothing about a rhythm.
ENOUGH_CYCLES: Final = 5
# Below this nobody minds, whatever the share of the interval.
UNNOTICED_COMMIT_SECONDS: Final = 0.5


class Kind(StrEnum):
    """What is wrong; the stable word for scripts."""

    STRANDED = "stranded"
    """Prepared and not finished, and nobody is at work on it."""

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

    SLOW = "slow"
    """Committing takes a meaningful part of the time between cycles."""


RUNBOOKS: Final = {
    Kind.STRANDED: "docs/operate/runbooks/sink-not-finished.md",
    Kind.CONTRADICTION: "docs/operate/runbooks/sink-not-finished.md",
    Kind.NOT_OURS: "docs/operate/runbooks/sink-not-finished.md",
    Kind.SINK_SILENT: "docs/operate/runbooks/sink-not-finished.md",
    Kind.SINK_MISSING: "docs/operate/runbooks/sink-not-finished.md",
    Kind.WRONG_LEDGER: "docs/operate/runbooks/wrong-ledger.md",
    Kind.LEASE_LOST: "docs/operate/runbooks/lost-lease.md",
    Kind.SLOW: "docs/operate/runbooks/slow-commits.md",
}
"""What to read about each kind."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that needs a person."""

    scope: str
    kind: str
    what: str
    """A sentence: which thing, what is wrong, what to do."""

    runbook: str


@dataclass(frozen=True, slots=True)
class ScopeDiagnosis:
    """One scope's health."""

    scope: str
    owner: OwnerReport
    sinks_asked: list[str]
    """Empty where only the ledger was asked."""

    attempts: list[OpenAttempt]
    stranded: list[Stranded]
    silent: list[SinkSilence]
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The answer to `semel doctor`."""

    ledger: str
    scopes: list[ScopeDiagnosis]
    weakened_by: list[Weakness]
    """Settings in force; they count only with --strict."""

    strict: bool

    @property
    def needs_attention(self) -> bool:
        """Tell whether there is a problem, or with --strict a weakness."""
        found = any(scope.problems for scope in self.scopes)
        return found or (self.strict and bool(self.weakened_by))


@dataclass(frozen=True, slots=True)
class Patient:
    """What the doctor looks at: a scope, and its sinks and settings where they are known."""

    scope: Scope
    sinks: Sequence[TwoPhaseSink] = ()
    settings: Settings | None = None


def doctor_report(
    ledger: Ledger, patients: Iterable[Patient], strict: bool = False, clock: Clock = SYSTEM_CLOCK
) -> DoctorReport:
    """Examine every patient; changes nothing."""
    patients = list(patients)
    weak: list[Weakness] = []
    for patient in patients:
        weak += [
            found
            for found in weaknesses(ledger, patient.sinks, patient.settings)
            if found not in weak
        ]
    if not patients:
        weak += of_ledger(ledger)
    diagnoses = [_diagnose(ledger, patient, clock.now()) for patient in patients]
    return DoctorReport(ledger.url, diagnoses, weak, strict)


def _diagnose(ledger: Ledger, patient: Patient, now: float) -> ScopeDiagnosis:
    scope = patient.scope
    owner = owner_report(ledger.scope_record(scope))
    seen = examine(ledger, scope, patient.sinks, owner, now)
    diagnosis = ScopeDiagnosis(
        str(scope),
        owner,
        [sink.name for sink in patient.sinks],
        seen.attempts,
        seen.stranded,
        seen.silent,
    )
    found = [
        *_of_stranded(seen),
        *_of_attempts(seen),
        *_of_owner(owner, seen),
        *_of_sinks(ledger, patient, seen),
        *_of_speed(ledger, patient),
    ]
    diagnosis.problems.extend(
        Problem(str(scope), kind.value, what, RUNBOOKS[kind]) for kind, what in found
    )
    return diagnosis


def _of_stranded(seen: Examination) -> Iterable[tuple[Kind, str]]:
    for one in seen.stranded:
        name = f"{one.cycle} (attempt {one.attempt[:8]}) in sink {one.sink!r}"
        if one.is_contradiction:
            yield (
                Kind.CONTRADICTION,
                f"{name} is {one.found}, and the ledger says {one.ledger_says}: {one.evidence}; "
                f"nothing repairs this by itself, see `semel cycle resolve`",
            )
        elif one.decision == RecoveryDecision.UNKNOWN_LEAVE_AS_IS:
            yield (
                Kind.NOT_OURS,
                f"{name} is held, and this ledger does not know it; it is left as it is: look "
                f"whether another ledger, or an older backup of this one, does",
            )
        elif not one.in_flight or (one.age_seconds or 0) > LONG_IN_FLIGHT_SECONDS:
            does = "commits" if one.decision == RecoveryDecision.COMMIT_FROM_TOKEN else "aborts"
            yield (
                Kind.STRANDED,
                f"{name} is {one.found}, and the ledger says {one.ledger_says}: starting the job, "
                f"or `semel recover`, {does} it",
            )


def _of_attempts(seen: Examination) -> Iterable[tuple[Kind, str]]:
    held = {(one.cycle, one.attempt) for one in seen.stranded}
    for attempt in seen.attempts:
        name = f"{attempt.cycle} (attempt {attempt.attempt[:8]})"
        for sink in attempt.missing_sinks:
            if attempt.state == "committed":
                yield (
                    Kind.SINK_MISSING,
                    f"{name} is committed, and sink {sink!r} has promised it but is not "
                    f"configured: configure it again, or see `semel cycle resolve --without`",
                )
        told = (attempt.cycle, attempt.attempt) in held
        if not attempt.in_flight and not told:
            does = (
                "finishes it"
                if attempt.decision == RecoveryDecision.COMMIT_FROM_TOKEN
                else "gives it up, and the batch runs again"
            )
            yield (
                Kind.STRANDED,
                f"{name} is {attempt.state} in the ledger and nobody is at work on it: starting "
                f"the job, or `semel recover`, {does}",
            )


def _of_owner(owner: OwnerReport, seen: Examination) -> Iterable[tuple[Kind, str]]:
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
