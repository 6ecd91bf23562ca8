"""What recovery would do, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from semel.cli.reports.ownership import OwnerReport, owner_report
from semel.cli.reports.stranded import OpenAttempt, SinkSilence, Stranded, examine
from semel.cli.target import Pipeline
from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import SemelError, reason_of
from semel.events import CycleRecovered, Events
from semel.lease import Owner, Takeover
from semel.pipeline.driver import Heartbeat
from semel.pipeline.ledger import Lease
from semel.pipeline.recovery import (
    RecoveryDecision,
    RecoveryReport,
    Settled,
    check_ledger,
    check_marks,
    recover,
)


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The answer to `semel recover --dry-run`: decisions, none of them taken."""

    scope: str
    ledger: str
    dry_run: bool
    owner: OwnerReport
    attempts: list[OpenAttempt]
    stranded: list[Stranded]
    silent: list[SinkSilence]
    blocked_by: list[str]
    """Why recovery would stop half-way; nothing it did until then is undone."""

    @property
    def is_empty(self) -> bool:
        """Tell whether there is nothing to settle."""
        return not (self.attempts or self.stranded)

    @property
    def left_as_is(self) -> list[Stranded]:
        """What recovery does not touch."""
        unknown = RecoveryDecision.UNKNOWN_LEAVE_AS_IS
        return [one for one in self.stranded if one.decision == unknown]

    @property
    def steps(self) -> int:
        """How many transactions will be settled."""
        return len(self.stranded)

    @property
    def needs_attention(self) -> bool:
        """Tell whether there is something to settle, or something in the way."""
        return not self.is_empty or bool(self.blocked_by)


@dataclass(frozen=True, slots=True)
class SettledReport:
    """One transaction of one sink, and what was done with it."""

    sink: str
    cycle: str
    attempt: str
    ledger_says: str
    decision: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """The answer to `semel recover`."""

    scope: str
    ledger: str
    dry_run: bool
    who: str
    why: str
    epoch: int | None
    """The epoch that recovery ran under; None if nothing had to be done."""

    settled: list[SettledReport]
    finished: list[str]
    """Attempts that were carried through."""

    aborted: list[str]
    """Attempts that were given up."""

    swept: dict[str, int]
    """By sink: losing attempts whose leavings were removed."""

    left_as_is: list[SettledReport]

    @property
    def needs_attention(self) -> bool:
        """Tell whether something is left that only a person can settle."""
        return bool(self.left_as_is)


def recovery_plan(pipeline: Pipeline, clock: Clock = SYSTEM_CLOCK) -> RecoveryPlan:
    """Say what recovery would do; takes no lease and changes nothing."""
    ledger, scope = pipeline.ledger, pipeline.scope
    owner = owner_report(ledger.scope_record(scope))
    seen = examine(ledger, scope, pipeline.sinks, owner, clock.now())
    return RecoveryPlan(
        scope=str(scope),
        ledger=ledger.url,
        dry_run=True,
        owner=owner,
        attempts=seen.attempts,
        stranded=seen.stranded,
        silent=seen.silent,
        blocked_by=[*_blocks(pipeline, owner, seen.silent), *_contradictions(seen.stranded)]
        + [
            f"{a.cycle} is committed, and sink {name!r} has promised it but is not configured"
            for a in seen.attempts
            for name in a.missing_sinks
            if a.state == "committed"
        ],
    )


def _blocks(pipeline: Pipeline, owner: OwnerReport, silent: list[SinkSilence]) -> list[str]:
    found = []
    if owner.is_live:
        found.append(
            f"process {owner.pid} on {owner.host} owns the scope for another "
            f"{owner.lease_left_seconds:.0f} s; --takeover fences it"
        )
    found += [f"sink {one.sink!r} does not answer: {one.reason}" for one in silent]
    quiet = {one.sink for one in silent}
    for sink in pipeline.sinks:
        if sink.name not in quiet:
            try:
                check_ledger(pipeline.ledger, pipeline.scope, [sink])
                check_marks(pipeline.ledger, pipeline.scope, [sink])
            except Exception as error:  # noqa: BLE001  whatever it is, it is in the way
                found.append(reason_of(error))
    return found


def _contradictions(stranded: list[Stranded]) -> list[str]:
    return [
        f"{one.cycle} is {one.found} in sink {one.sink!r}, and the ledger says {one.ledger_says}"
        for one in stranded
        if one.is_contradiction
    ]


def carry_out(
    pipeline: Pipeline,
    plan: RecoveryPlan,
    who: str,
    why: str,
    takeover: Takeover,
    progress: Callable[[], None] = lambda: None,
) -> Recovered:
    """Own the scope, settle everything, and let go again; records who and why, before and after.

    Raises:
        LeaseHeld: the owner is alive.
        Retryable, Fenced, NeedsOperator: see `semel.pipeline.recovery.recover`.
    """
    ledger, scope = pipeline.ledger, pipeline.scope
    events = Events()
    events.subscribe(lambda event: progress() if isinstance(event, CycleRecovered) else None)
    lease = ledger.acquire(scope, Owner.here(), pipeline.settings.lease_seconds, takeover)
    heartbeat = Heartbeat(ledger, lease, events).start()
    try:
        ledger.record_act(scope, who, "recover", why, _intention(plan, lease, takeover))
        try:
            report = recover(
                ledger,
                lease,
                pipeline.sinks,
                backoff=pipeline.settings.commit_backoff,
                events=events,
            )
        except SemelError as error:
            detail = {"epoch": lease.epoch, "error": reason_of(error)}
            ledger.record_act(scope, who, "recover-failed", why, detail)
            raise
        result = _recovered(pipeline, who, why, lease, report)
        detail = {k: v for k, v in asdict(result).items() if k not in ("who", "why", "dry_run")}
        ledger.record_act(scope, who, "recover-done", why, detail)
    finally:
        heartbeat.stop()
        ledger.release(lease)
    return result


def nothing_done(pipeline: Pipeline, who: str, why: str) -> Recovered:
    """The answer where there was nothing to settle."""
    empty = RecoveryReport()
    return _recovered(pipeline, who, why, None, empty)


def _intention(plan: RecoveryPlan, lease: Lease, takeover: Takeover) -> dict[str, Any]:
    return {
        "epoch": lease.epoch,
        "takeover": takeover.value,
        "from": str(plan.owner),
        "attempts": [f"{a.cycle}.{a.attempt} {a.decision}" for a in plan.attempts[:100]],
        "stranded": len(plan.stranded),
    }


def _recovered(
    pipeline: Pipeline, who: str, why: str, lease: Lease | None, report: RecoveryReport
) -> Recovered:
    def told(settled: Settled) -> SettledReport:
        txn = settled.txn
        says, decision = settled.says.value, settled.decision.value
        return SettledReport(settled.sink, txn.cycle.label, txn.attempt, says, decision)

    return Recovered(
        scope=str(pipeline.scope),
        ledger=pipeline.ledger.url,
        dry_run=False,
        who=who,
        why=why,
        epoch=lease.epoch if lease else None,
        settled=[told(settled) for settled in report.settled],
        finished=[txn.label for txn in report.finished],
        aborted=[txn.label for txn in report.aborted],
        swept=dict(report.swept),
        left_as_is=[told(settled) for settled in report.left_as_is],
    )
