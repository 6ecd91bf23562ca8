"""One cycle settled by an operator: a stuck one is resolved, a finished one is undone.

An undo is a cycle itself, in a scope of its own with the query ``<query>-undo``: it is prepared
in every sink, decided once in the ledger, and carried through after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, runtime_checkable

from semel.clock import SYSTEM_CLOCK
from semel.errors import Misuse, NeedsOperator, SemelError, reason_of
from semel.events import Events
from semel.lease import Owner, Takeover
from semel.operate.backfill import run_counted
from semel.operate.status import (
    GIVES_UP,
    RESOLVE,
    RESOLVED,
    UNDO,
    UNDONE,
    Pipeline,
    cycle_of,
    fill_scope,
    given_up,
    undo_scope,
    undone,
)
from semel.pipeline.driver import Driver, Heartbeat
from semel.pipeline.ledger import AttemptRecord, CycleState, ScopeLease, mark_of
from semel.pipeline.sink import (
    Found,
    Receipt,
    SinkFatal,
    SinkFinding,
    SinkOK,
    SinkOutcome,
    Stager,
    Tally,
    Token,
    TwoPhaseSink,
    UndoesCycles,
)
from semel.pipeline.twophase import commit_with_retries, guarded, in_groups
from semel.pipeline.txn import CycleId, Scope, SinkTxnId


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


@dataclass(frozen=True, slots=True)
class SinkOfUndo:
    """What one sink has of the cycle, and what will be done with it."""

    sink: str
    rows: int | None
    will: str
    """undo, without, or nothing."""

    reason: str = ""
    """Why nothing is to be done there."""

    refusal: str = ""
    """Why its rows cannot be taken away."""


@dataclass(frozen=True, slots=True)
class UndoPlan:
    """The answer of `plan_undo`."""

    scope: str
    ledger: str
    cycle: str
    undone_before: bool
    """The decision to undo it stands: nothing more is decided."""

    sinks: list[SinkOfUndo]

    @property
    def needs_attention(self) -> bool:
        """Return whether a sink refuses, and with it the whole undo."""
        return any(sink.refusal for sink in self.sinks)


@dataclass(frozen=True, slots=True)
class Undone:
    """The answer of `undo`."""

    plan: UndoPlan
    who: str
    why: str
    decided_by: str
    """The scope whose ledger records have the decision."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The rows of the cycle in one sink."""

    txn: SinkTxnId
    token: Token
    rows: int


def plan_undo(pipeline: Pipeline, label: str, without: Collection[str] = ()) -> UndoPlan:
    """Ask every sink whether it can take the rows of a finished cycle away; changes nothing.

    The sinks of *without* are left as they are.

    Raises:
        Misuse: the cycle is not finished, or has no part in a sink of *without*.
    """
    return _plan_undo(pipeline, label, without)[0]


def _plan_undo(
    pipeline: Pipeline, label: str, without: Collection[str]
) -> tuple[UndoPlan, dict[str, _Part]]:
    ledger, scope = pipeline.ledger, pipeline.scope
    cycle = cycle_of(scope, label)
    before = any(one == cycle for one, _ in undone(ledger, scope))
    record = ledger.committed(cycle)
    if record is None or record.state is not CycleState.FINISHED:
        raise Misuse(
            f"cycle {cycle} is not finished in ledger {ledger.url}, or is pruned there, so it "
            f"cannot be undone; see `semel history --cycle {label}`"
        )
    configured = {sink.name: sink for sink in pipeline.sinks}
    names = sorted({*record.tokens, *configured})
    sinks, parts = [], {}
    for name in names:
        one, part = _of_undo(pipeline, record, name, configured.get(name))
        if name in without:
            one = replace(one, will="without", refusal="", reason="left as it is")
        elif one.will == "undo" and part is not None and not before:
            parts[name] = part
        if one.will != "nothing" or name in record.tokens:
            sinks.append(replace(one, will="nothing", refusal="") if before else one)
    if strange := sorted({*without} - {one.sink for one in sinks}):
        raise Misuse(f"sink {strange[0]!r} has no rows of {cycle}")
    return UndoPlan(str(scope), ledger.url, label, before, sinks), parts


def _of_undo(
    pipeline: Pipeline, record: AttemptRecord, name: str, sink: TwoPhaseSink | None
) -> tuple[SinkOfUndo, _Part | None]:
    ledger, cycle = pipeline.ledger, record.txn.cycle
    rows = record.rows.get(name)
    if sink is None:
        return SinkOfUndo(name, rows, "undo", refusal="it is not configured any more"), None
    part = None
    if name in record.tokens:
        part = _Part(record.txn, record.tokens[name], rows or 0)
    lost = (cycle, name) in given_up(ledger, pipeline.scope)
    if part is None or (lost and sink.look_up(part.txn, part.token).found is Found.GONE):
        fill = fill_scope(pipeline.scope, name)
        filled = ledger.committed(CycleId(fill, cycle.generation, cycle.batch))
        mark = mark_of(ledger, fill)
        if filled is None and mark is not None and mark.cycle >= cycle:
            words = "`semel sink add` may have written it, and the ledger has forgotten how"
            return SinkOfUndo(name, rows, "undo", refusal=words), None
        if filled is None:
            return SinkOfUndo(name, rows, "nothing", "it has no rows of the cycle"), None
        part = _Part(filled.txn, filled.tokens[name], filled.rows.get(name, 0))
    return SinkOfUndo(name, part.rows, "undo", refusal=_refusal(sink, part)), part


def _refusal(sink: TwoPhaseSink, part: _Part) -> str:
    if not isinstance(sink, UndoesCycles):
        return f"{type(sink).__name__} has no way to take away the rows of one cycle"
    try:
        return sink.check_undo(part.txn, part.token)
    except Exception as error:  # noqa: BLE001  one sink's silence must not hide the others' answers
        return reason_of(error)


def undo(
    pipeline: Pipeline,
    label: str,
    without: Collection[str] = (),
    *,
    who: str,
    why: str,
    takeover: Takeover = Takeover.WAIT,
) -> Undone:
    """Take the rows of a finished cycle away, in all its sinks or in none.

    May be repeated: it finishes first what was decided before a crash.  The pipeline may run.

    Raises:
        NeedsOperator: a sink cannot take its rows away; nothing was changed.
        LeaseHeld: another process undoes a cycle of this pipeline.
    """
    ledger, scope = pipeline.ledger, pipeline.scope
    target = undo_scope(scope)
    sinks = [
        _UndoingSink(sink, scope, label if sink.name in without else "") for sink in pipeline.sinks
    ]
    settings = replace(pipeline.settings, takeover=takeover)
    driver = Driver(target.app, ledger, sinks, target.query, settings=settings)
    driver.start()
    beat = Heartbeat(ledger, driver.lease).start()
    try:
        plan, parts = _plan_undo(pipeline, label, without)
        if plan.needs_attention:
            words = "; ".join(f"{one.sink}: {one.refusal}" for one in plan.sinks if one.refusal)
            raise NeedsOperator(f"cycle {scope}/{label} cannot be undone, nothing was: {words}")
        if not plan.undone_before:
            if not parts:
                raise Misuse(f"no sink is left in which cycle {scope}/{label} could be undone")
            ledger.record_act(scope, who, UNDO, why, asdict(plan))
            for sink in sinks:
                sink.part = parts.get(sink.name)
            mark = mark_of(ledger, target)
            number = 0 if mark is None else mark.cycle.batch + 1
            run_counted(driver, CycleId(target, 1, number), partial(_counted, parts, sinks))
        _record_undone(pipeline, label, without, who, why)
    finally:
        beat.stop()
        driver.stop()
    return Undone(plan, who, why, str(target))


def _counted(
    parts: Mapping[str, _Part], sinks: Sequence[TwoPhaseSink], txn: SinkTxnId
) -> Mapping[str, Sequence[Receipt]]:
    """Stage nothing, and count the rows that are taken away."""
    rows = {name: Tally(part.rows) for name, part in parts.items()}
    return {one.name: [Receipt("undo", rows.get(one.name, Tally()))] for one in sinks}


def _record_undone(
    pipeline: Pipeline, label: str, without: Collection[str], who: str, why: str
) -> None:
    ledger, scope = pipeline.ledger, pipeline.scope
    if any(act.act == UNDONE and act.detail["cycle"] == label for act in ledger.acts(scope)):
        return
    cycle = cycle_of(scope, label)
    names = sorted({name for one, name in undone(ledger, scope) if one == cycle} | {*without})
    done = [
        {"sink": name, "did": "without" if name in without else "undo", "is_done": True}
        for name in names
    ]
    ledger.record_act(scope, who, UNDONE, why, {"cycle": label, "sinks": done})


@dataclass(eq=False)
class _UndoingSink:
    """A sink of the scope that undoes: what it commits is that rows are taken away.

    It holds nothing itself: its tokens are in the ledger, and the rows are in the sink.
    """

    _sink: TwoPhaseSink
    _scope: Scope
    _left_out: str
    """The cycle whose rows stay here, though a decision may want them away."""

    part: _Part | None = None
    """What the next cycle takes away here."""

    rows: Any = None

    @property
    def name(self) -> str:
        return self._sink.name

    def check(self, schema: Any) -> None:
        """Do nothing: there are no rows."""

    def fence(self, scope: Scope, epoch: int) -> None:
        """Do nothing: what an older owner still does repeats what was decided."""

    def stager(self, txn: SinkTxnId) -> Stager:
        raise Misuse("an undo stages no rows")

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        if self.part is None:
            return SinkOK({})
        if refusal := _refusal(self._sink, self.part):
            return SinkFatal(refusal)
        target = self.part.txn
        about = {"query": target.scope.query, "txn": target.label, "cycle": target.cycle.label}
        return SinkOK({**about, "token": dict(self.part.token)})

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        if not token or self._left_out == token["cycle"]:
            return SinkOK()
        if not isinstance(self._sink, UndoesCycles):
            return SinkFatal(f"sink {self.name!r} is another one than the one that promised it")
        outcome = self._sink.undo(self._target(token), token["token"])
        if not isinstance(outcome, SinkFatal):
            return outcome
        return SinkFatal(
            f"{outcome.reason}; delete its rows by hand, and run `semel cycle undo --cycle "
            f"{token['cycle']} --without {self.name}`"
        )

    def _target(self, token: Token) -> SinkTxnId:
        return SinkTxnId.parse(replace(self._scope, query=token["query"]), token["txn"])

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        return SinkOK()

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        if not token:
            return SinkFinding(Found.GONE, "it takes nothing away here")
        finding = self._sink.look_up(self._target(token), token["token"])
        turned = {Found.VISIBLE: Found.HELD, Found.GONE: Found.VISIBLE}
        return replace(finding, found=turned.get(finding.found, finding.found))

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        return []

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        return []

    def mark(self, scope: Scope) -> SinkTxnId | None:
        return None

    def close(self) -> None:
        self._sink.close()
