"""Resolving a stuck cycle: it is committed, and recovery cannot finish it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, runtime_checkable

from semel.clock import SYSTEM_CLOCK
from semel.errors import Misuse, SemelError, reason_of
from semel.events import Events
from semel.lease import Owner, Takeover
from semel.operate.status import GIVES_UP, RESOLVE, RESOLVED, Pipeline, cycle_of, given_up
from semel.pipeline.ledger import AttemptRecord, CycleState, ScopeLease
from semel.pipeline.sink import Found, SinkOK, SinkOutcome, Token, TwoPhaseSink
from semel.pipeline.twophase import commit_with_retries, guarded, in_groups
from semel.pipeline.txn import CycleId, SinkTxnId


@runtime_checkable
class ResolvesByRetry(Protocol):
    """A sink with a retry of its own, beyond an ordinary commit."""

    def resolve_retry(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Try the commit again."""
        ...


@runtime_checkable
class ResolvesByDiverting(Protocol):
    """A sink that can divert refused rows."""

    def resolve_divert(self, txn: SinkTxnId, token: Token, reject_table: str) -> Any:
        """Commit what can be committed and divert the rest."""
        ...


class Way(StrEnum):
    """What is done with a sink that refuses."""

    RETRY = "retry"
    DIVERT = "divert"
    WITHOUT = "without"
    """The sink is not configured any more, or has lost the rows: they are given up."""

    ABANDON = "abandon"
    """The sink holds the rows and will never take them: they are dropped there, and given up."""


@dataclass(frozen=True, slots=True)
class SinkOfCycle:
    """How one sink stands in the cycle, and what will be done with it."""

    sink: str
    found: str
    """held, visible, gone, unreachable, or not configured."""

    evidence: str
    rows: int | None
    will: str
    """retry, divert, without, abandon, or nothing."""


@dataclass(frozen=True, slots=True)
class ResolutionPlan:
    """The answer of `plan_resolution`: how every sink stands, and what will be done."""

    scope: str
    ledger: str
    cycle: str
    attempt: str
    state: str
    sinks: list[SinkOfCycle]


@dataclass(frozen=True, slots=True)
class SinkResolved:
    """What became of one sink."""

    sink: str
    did: str
    is_done: bool
    reason: str = ""
    written: int | None = None
    """Rows, where a diversion counted them."""

    diverted: int | None = None
    reject_table: str | None = None


@dataclass(frozen=True, slots=True)
class Resolution:
    """The answer of `resolve`."""

    plan: ResolutionPlan
    who: str
    why: str
    sinks: list[SinkResolved]
    finished: bool
    """Every sink is done, and the ledger says so."""

    @property
    def needs_attention(self) -> bool:
        """Return whether the cycle is still stuck."""
        return not self.finished


@dataclass(frozen=True, slots=True)
class Choice:
    """What the operator chose."""

    way: Way
    sink: str | None = None
    """Only this sink; None: every sink that is not done."""

    reject_table: str = ""


def plan_resolution(
    pipeline: Pipeline, label: str, choice: Choice
) -> tuple[AttemptRecord, ResolutionPlan]:
    """Look at every sink of a committed cycle; changes nothing.

    Raises:
        Misuse: the cycle is not committed, or the choice does not fit it.
    """
    record = _committed(pipeline, label)
    configured = {sink.name: sink for sink in pipeline.sinks}
    _check_choice(choice, record, configured)
    _check_alone(choice, record, configured)
    sinks = [_of_sink(record, name, configured.get(name), choice) for name in sorted(record.tokens)]
    return record, ResolutionPlan(
        scope=str(pipeline.scope),
        ledger=pipeline.ledger.url,
        cycle=label,
        attempt=record.txn.attempt,
        state=record.state.value,
        sinks=sinks,
    )


def _committed(pipeline: Pipeline, label: str) -> AttemptRecord:
    cycle = cycle_of(pipeline.scope, label)
    record = pipeline.ledger.committed(cycle)
    if record is None:
        raise Misuse(
            f"cycle {cycle} is not committed, so there is nothing to carry through: undecided "
            f"attempts are settled by `semel recover`; see `semel history --cycle {label}`"
        )
    return record


def _check_choice(
    choice: Choice, record: AttemptRecord, configured: Mapping[str, TwoPhaseSink]
) -> None:
    name = choice.sink
    if name is not None and name not in record.tokens:
        took_part = ", ".join(sorted(record.tokens)) or "none"
        raise Misuse(f"sink {name!r} has no part in {record.txn.cycle}; these have: {took_part}")
    if name is not None and name not in configured and choice.way not in GIVES_UP:
        raise Misuse(
            f"sink {name!r} is not configured any more: configure it again, or give its rows up "
            f"with --without {name}"
        )


def _check_alone(
    choice: Choice, record: AttemptRecord, configured: Mapping[str, TwoPhaseSink]
) -> None:
    """Refuse to drop rows that are held in one transaction with those of other sinks."""
    if choice.way is not Way.ABANDON:
        return
    for group in in_groups(configured.values(), record.tokens):
        names = [sink.name for sink in group]
        if choice.sink in names and len(names) > 1:
            names.remove(choice.sink)
            raise Misuse(
                f"sink {choice.sink!r} shares a transaction with sink {names[0]!r}, whose rows "
                f"would be dropped with its own: divert the refused rows with --divert TABLE"
            )


def _of_sink(
    record: AttemptRecord, name: str, sink: TwoPhaseSink | None, choice: Choice
) -> SinkOfCycle:
    rows = record.rows.get(name)
    if sink is None:
        gives_up = choice.way in GIVES_UP and choice.sink == name
        will = Way.WITHOUT.value if gives_up else "nothing"
        return SinkOfCycle(name, "not configured", "", rows, will)
    finding = sink.look_up(record.txn, record.tokens[name])
    chosen = choice.sink in (None, name)
    if chosen and choice.way in GIVES_UP and finding.found is not Found.GONE:
        drops = choice.way is Way.ABANDON
        if not drops or finding.found is not Found.HELD:
            advice = "" if drops else ", or --abandon if the sink will never take them"
            raise Misuse(
                f"sink {name!r} is configured and answers {finding.found.value!r}, "
                f"{finding.evidence}: rows are given up only if they are surely lost; use "
                f"--retry{advice}"
            )
    acts = chosen and finding.found is not Found.VISIBLE
    if acts and choice.way is Way.DIVERT and not isinstance(sink, ResolvesByDiverting):
        raise Misuse(f"sink {name!r} cannot divert rows; use --retry, or name another with --sink")
    is_lost = choice.way is Way.ABANDON and finding.found is Found.GONE
    will = (Way.WITHOUT if is_lost else choice.way).value if acts else "nothing"
    return SinkOfCycle(name, finding.found.value, finding.evidence, rows, will)


def resolve(
    pipeline: Pipeline,
    record: AttemptRecord,
    plan: ResolutionPlan,
    choice: Choice,
    *,
    who: str,
    why: str,
    takeover: Takeover = Takeover.WAIT,
) -> Resolution:
    """Do what the plan says, and finish the cycle if every sink is done.

    *record*, *plan* and *choice* are those of `plan_resolution`.  The ledger keeps who and why.

    Raises:
        LeaseHeld: the pipeline is running.
        Retryable, Fenced: a sink or the ledger did not answer, or a newer owner exists.
    """
    ledger, scope = pipeline.ledger, pipeline.scope
    lease = ledger.acquire(scope, Owner.here(), pipeline.settings.lease_seconds, takeover)
    try:
        ledger.record_act(scope, who, RESOLVE, why, asdict(plan) | {"epoch": lease.epoch})
        for sink in pipeline.sinks:
            sink.fence(scope, lease.epoch)
        done = [_resolve_sink(pipeline, record, one, choice) for one in plan.sinks]
        failed = {
            (record.txn.cycle, one.sink) for one in done if one.did in GIVES_UP and not one.is_done
        }
        finished = _finish(pipeline, lease, record, given_up(ledger, scope) - failed)
        detail = {"cycle": plan.cycle, "sinks": [asdict(one) for one in done], "finished": finished}
        ledger.record_act(scope, who, RESOLVED, why, detail)
    finally:
        ledger.release(lease)
    return Resolution(plan, who, why, done, finished)


def _resolve_sink(
    pipeline: Pipeline, record: AttemptRecord, one: SinkOfCycle, choice: Choice
) -> SinkResolved:
    done = partial(SinkResolved, one.sink, one.will)
    sink = next((sink for sink in pipeline.sinks if sink.name == one.sink), None)
    token = record.tokens[one.sink]
    if one.will == Way.WITHOUT:
        if sink is not None and (wrong := _not_removed(sink, record.txn, token)):
            return done(False, wrong)
        return done(True, "its rows were given up", written=0)
    if sink is not None and one.will == Way.ABANDON:
        # The decision is COMMIT: only what the sink still refuses is dropped.
        if isinstance(guarded(lambda: sink.commit(record.txn, token)), SinkOK):
            return SinkResolved(one.sink, Way.RETRY.value, True, "it takes the rows now")
        if wrong := _not_dropped(sink, record.txn, token):
            return done(False, wrong)
        return done(True, "its rows were dropped and given up", written=0)
    if sink is None or one.will == "nothing":
        return done(one.found == Found.VISIBLE, one.evidence)
    if one.will == Way.DIVERT and isinstance(sink, ResolvesByDiverting):
        try:
            gone = sink.resolve_divert(record.txn, token, choice.reject_table)
        except SemelError as error:
            return done(False, reason_of(error))
        return done(True, "", gone.written, gone.diverted, gone.reject_table)
    outcome = _retry(pipeline, sink, record.txn, token)
    return done(True) if isinstance(outcome, SinkOK) else done(False, outcome.reason)


def _not_removed(sink: TwoPhaseSink, txn: SinkTxnId, token: Token) -> str:
    """Remove what is left of lost rows; return the reason if that is not possible.

    A part that was left would stop every later start, or be seen beside the rows when they
    are written again.  The scope is fenced, and what is gone can never be committed.
    """
    finding = sink.look_up(txn, token)
    if finding.found is not Found.GONE:
        return f"it answers {finding.found.value!r} now: {finding.evidence}"
    # Without the token: it may be of a place that was dropped and made again.
    outcome = guarded(lambda: sink.abort(txn, None))
    return "" if isinstance(outcome, SinkOK) else outcome.reason


def _not_dropped(sink: TwoPhaseSink, txn: SinkTxnId, token: Token) -> str:
    """Drop the rows that a sink holds; return the reason if they may still be there."""
    finding = sink.look_up(txn, token)
    if finding.found is Found.HELD:
        outcome = guarded(lambda: sink.abort(txn, token))
        if not isinstance(outcome, SinkOK):
            return outcome.reason
        finding = sink.look_up(txn, token)
    if finding.found is Found.GONE:
        return ""
    return f"it answers {finding.found.value!r} now: {finding.evidence}"


def _retry(pipeline: Pipeline, sink: TwoPhaseSink, txn: SinkTxnId, token: Token) -> SinkOutcome:
    if isinstance(sink, ResolvesByRetry):
        return guarded(lambda: sink.resolve_retry(txn, token))
    backoff = pipeline.settings.commit_backoff
    tokens = {sink.name: token}
    return commit_with_retries((sink,), txn, tokens, backoff, Events(), SYSTEM_CLOCK)[sink.name]


def _finish(
    pipeline: Pipeline,
    lease: ScopeLease,
    record: AttemptRecord,
    without: Collection[tuple[CycleId, str]],
) -> bool:
    """Close the cycle in the ledger if every sink shows it, or was given up."""
    if record.state is CycleState.FINISHED:
        return True
    sinks = {sink.name: sink for sink in pipeline.sinks}
    for name, token in record.tokens.items():
        found = sinks[name].look_up(record.txn, token).found if name in sinks else Found.GONE
        is_given_up = found is Found.GONE and (record.txn.cycle, name) in without
        if found is not Found.VISIBLE and not is_given_up:
            return False
    pipeline.ledger.finish(lease, record.txn)
    return True
