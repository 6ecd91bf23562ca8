"""Recovery by an operator: show what it would do with an earlier owner's cycles, and do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import SemelError, reason_of
from semel.events import CycleRecovered, Events
from semel.lease import Owner, Takeover
from semel.operate.doctor import (
    OpenAttempt,
    Patient,
    SinkSilence,
    Stranded,
    examine,
    obstacles,
)
from semel.operate.status import Pipeline, ScopeOwner, owner_of
from semel.pipeline import recovery
from semel.pipeline.driver import Heartbeat
from semel.pipeline.recovery import RecoveryReport, SettledTxn
from semel.pipeline.txn import Scope


@dataclass(frozen=True, slots=True)
class RecoveryPlan:
    """The answer of `plan_recovery`: decisions, none of them taken."""

    scope: Scope
    ledger: str
    owner: ScopeOwner
    attempts: list[OpenAttempt]
    stranded: list[Stranded]
    silent: list[SinkSilence]
    blocked_by: list[str]
    """Why recovery would stop half-way; nothing it did until then is undone."""

    dry_run: bool = True

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to settle."""
        return not (self.attempts or self.stranded)

    @property
    def needs_attention(self) -> bool:
        """Return whether there is something to settle, or something in the way."""
        return not self.is_empty or bool(self.blocked_by)


@dataclass(frozen=True, slots=True)
class Recovered:
    """The answer of `recover`."""

    scope: Scope
    ledger: str
    who: str
    why: str
    epoch: int | None = None
    """The epoch that recovery ran under; None if nothing had to be done."""

    report: RecoveryReport = field(default_factory=RecoveryReport)
    dry_run: bool = False

    @property
    def needs_attention(self) -> bool:
        """Return whether something is left that only a person can settle."""
        return bool(self.report.left_as_is)


def plan_recovery(pipeline: Pipeline, clock: Clock = SYSTEM_CLOCK) -> RecoveryPlan:
    """Say what recovery would do; takes no lease and changes nothing."""
    ledger, scope = pipeline.ledger, pipeline.scope
    owner = owner_of(ledger.scope_record(scope))
    seen = examine(ledger, scope, pipeline.sinks, owner, clock.now())
    blocked_by = list(obstacles(ledger, Patient(scope, pipeline.sinks), seen))
    if owner.is_live:
        left = f"{owner.lease_left_seconds:.0f} s"
        held = f"process {owner.pid} on {owner.host} owns the scope for another {left}"
        blocked_by.insert(0, f"{held}; --takeover fences it")
    return RecoveryPlan(
        scope, ledger.url, owner, seen.attempts, seen.stranded, seen.silent, blocked_by
    )


def recover(
    pipeline: Pipeline,
    *,
    who: str,
    why: str,
    plan: RecoveryPlan | None = None,
    takeover: Takeover = Takeover.WAIT,
    progress: Callable[[], None] = lambda: None,
) -> Recovered:
    """Own the scope, finish what is committed, give up what is not, and release the scope.

    The ledger keeps who and why, before and after.  Where there is nothing to settle and
    nothing in the way, nothing is changed.  *progress* is called for every transaction.

    Raises:
        LeaseHeld: the owner is alive.
        Retryable, Fenced, NeedsOperator: see `semel.pipeline.recovery.recover`.
    """
    plan = plan or plan_recovery(pipeline)
    ledger, scope = pipeline.ledger, pipeline.scope
    if not plan.needs_attention:
        return Recovered(scope, ledger.url, who, why)
    events = Events()
    events.subscribe(lambda event: progress() if isinstance(event, CycleRecovered) else None)
    lease = ledger.acquire(scope, Owner.here(), pipeline.settings.lease_seconds, takeover)
    heartbeat = Heartbeat(ledger, lease, events).start()
    try:
        intention = {"epoch": lease.epoch, "takeover": takeover.value, **_planned(plan)}
        ledger.record_act(scope, who, "recover", why, intention)
        try:
            report = recovery.recover(
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
        done = Recovered(scope, ledger.url, who, why, lease.epoch, report)
        ledger.record_act(scope, who, "recover-done", why, _done(done))
    finally:
        heartbeat.stop()
        ledger.release(lease)
    return done


def _planned(plan: RecoveryPlan) -> dict[str, Any]:
    """What the ledger keeps of a plan."""
    return {
        "from": str(plan.owner),
        "attempts": [f"{one.record.txn.label} {one.decision}" for one in plan.attempts[:100]],
        "stranded": len(plan.stranded),
    }


def _done(done: Recovered) -> dict[str, Any]:
    """What the ledger keeps of a recovery."""
    report = done.report
    return {
        "scope": str(done.scope),
        "ledger": done.ledger,
        "epoch": done.epoch,
        "settled": [_settled(one) for one in report.settled],
        "finished": [txn.label for txn in report.finished],
        "aborted": [txn.label for txn in report.aborted],
        "swept": dict(report.swept),
        "left_as_is": [_settled(one) for one in report.left_as_is],
    }


def _settled(one: SettledTxn) -> dict[str, str]:
    return {
        "sink": one.sink,
        "cycle": one.txn.cycle.label,
        "attempt": one.txn.attempt,
        "ledger_says": one.says.value,
        "decision": one.decision.value,
    }
