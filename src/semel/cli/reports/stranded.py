"""What sinks hold and the ledger has open, with evidence and the decision that follows.

    open attempts of the ledger ──┐
                                  ├──▶ look_up in the sink ──▶ the recovery table's decision
    what each sink still holds ───┘

Read-only: no lease is taken and nothing is decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from semel.cli.reports.ownership import OwnerReport
from semel.errors import reason_of
from semel.pipeline.ledger import AttemptRecord, Ledger
from semel.pipeline.recovery import DECIDE, RecoveryDecision, what_ledger_says
from semel.pipeline.sink import Finding, Found, TwoPhaseSink
from semel.pipeline.txn import Scope, SinkTxnId


@dataclass(frozen=True, slots=True)
class Stranded:
    """One transaction of one sink that is prepared, or should be, and is not finished."""

    scope: str
    sink: str
    cycle: str
    attempt: str
    ledger_says: str
    found: str
    """held, visible, gone or unreachable."""

    evidence: str
    decision: str
    """CommitFromToken, AbortFromToken or UnknownLeaveAsIs."""

    rows: int | None
    age_seconds: float | None
    in_flight: bool
    """The scope's live owner is at work on it."""

    @property
    def is_contradiction(self) -> bool:
        """Tell whether the sink cannot do what the decision demands.

        While an owner is at work, its ledger and its sinks are asked at different moments.
        """
        if self.in_flight:
            return False
        commits = self.decision == RecoveryDecision.COMMIT_FROM_TOKEN
        aborts = self.decision == RecoveryDecision.ABORT_FROM_TOKEN
        return (commits and self.found == Found.GONE) or (aborts and self.found == Found.VISIBLE)


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """One attempt that the ledger has open."""

    scope: str
    cycle: str
    attempt: str
    state: str
    epoch: int
    decision: str
    rows: dict[str, int]
    age_seconds: float
    in_flight: bool
    missing_sinks: list[str]
    """Sinks that have promised it and are not configured."""


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


def examine(
    ledger: Ledger,
    scope: Scope,
    sinks: Sequence[TwoPhaseSink],
    owner: OwnerReport,
    now: float,
) -> Examination:
    """Ask the ledger and every sink what is unfinished."""
    still_open = {record.txn: record for record in ledger.open_attempts(scope)}
    held: dict[str, list[SinkTxnId]] = {}
    silent = []
    for sink in sinks:
        try:
            held[sink.name] = sink.recover(scope)
        except Exception as error:  # noqa: BLE001  a sink's silence is a finding, not a failure
            silent.append(SinkSilence(sink.name, reason_of(error)))
    asked = _Asked(ledger, scope, still_open, owner, now, held.values())
    attempts = [asked.open_attempt(record, sinks) for record in still_open.values()]
    stranded = [
        asked.stranded(sink, txn)
        for sink in sinks
        if sink.name in held
        for txn in _in_question(still_open, sink, held[sink.name])
    ]
    kept = [one for one in stranded if one.found == Found.HELD or _is_amiss(one)]
    return Examination(attempts, kept, silent)


def _is_amiss(one: Stranded) -> bool:
    return one.found == Found.UNREACHABLE or one.is_contradiction


def _in_question(
    still_open: Mapping[SinkTxnId, AttemptRecord], sink: TwoPhaseSink, held: Iterable[SinkTxnId]
) -> list[SinkTxnId]:
    """What the sink holds, and what the ledger says it has promised."""
    promised = [txn for txn, record in still_open.items() if sink.name in record.tokens]
    return list(dict.fromkeys([*promised, *held]))


class _Asked:
    """The ledger's side of an examination, read once."""

    def __init__(
        self,
        ledger: Ledger,
        scope: Scope,
        still_open: Mapping[SinkTxnId, AttemptRecord],
        owner: OwnerReport,
        now: float,
        held: Iterable[Iterable[SinkTxnId]],
    ) -> None:
        self._scope = scope
        self._owner = owner
        self._now = now
        txns = dict.fromkeys([*still_open, *(txn for some in held for txn in some)])
        self._says = what_ledger_says(ledger, scope, txns)
        self._records = {txn: still_open.get(txn) or ledger.attempt(txn) for txn in txns}

    def open_attempt(self, record: AttemptRecord, sinks: Sequence[TwoPhaseSink]) -> OpenAttempt:
        txn = record.txn
        return OpenAttempt(
            scope=str(self._scope),
            cycle=txn.cycle.label,
            attempt=txn.attempt,
            state=record.state.value,
            epoch=record.epoch,
            decision=DECIDE[self._says[txn]].value,
            rows=dict(record.rows),
            age_seconds=max(0.0, self._now - record.planned_at),
            in_flight=self._in_flight(record),
            missing_sinks=sorted(set(record.tokens) - {s.name for s in sinks}) if sinks else [],
        )

    def stranded(self, sink: TwoPhaseSink, txn: SinkTxnId) -> Stranded:
        record = self._records[txn]
        finding = _look_up(sink, txn, record)
        says = self._says[txn]
        since = finding.since or (record.planned_at if record else None)
        return Stranded(
            scope=str(self._scope),
            sink=sink.name,
            cycle=txn.cycle.label,
            attempt=txn.attempt,
            ledger_says=says.value,
            found=finding.found.value,
            evidence=finding.evidence,
            decision=DECIDE[says].value,
            rows=record.rows.get(sink.name) if record else None,
            age_seconds=None if since is None else max(0.0, self._now - since),
            in_flight=record is not None and self._in_flight(record),
        )

    def _in_flight(self, record: AttemptRecord) -> bool:
        return self._owner.is_live and record.epoch == self._owner.epoch


def _look_up(sink: TwoPhaseSink, txn: SinkTxnId, record: AttemptRecord | None) -> Finding:
    try:
        return sink.look_up(txn, record.tokens.get(sink.name) if record else None)
    except Exception as error:  # noqa: BLE001  look_up never raises, but a broken sink may
        return Finding(Found.UNREACHABLE, reason_of(error))
