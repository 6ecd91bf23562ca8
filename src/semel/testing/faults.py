"""Sinks and ledgers that fail at the call one names.

    ledger = faulty_ledger(MemoryLedger(), Fault("decide_commit", Failing.LOST_REPLY))

A fault strikes once, at the n-th call of one method, and the wrapped thing is
left in exactly the state that such a failure leaves in the real world.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, cast

from semel.errors import InDoubt, LedgerUnavailable, Retryable, SemelError
from semel.pipeline.ledger import Ledger
from semel.pipeline.sink import SinkFatal, SinkRetryable, TwoPhaseSink


class FaultKind(StrEnum):
    """What becomes of a call, and of its answer."""

    REFUSED = "refused"
    """The call has no effect; the answer is `SinkRetryable`, or an error of semel."""

    FATAL = "fatal"
    """The call has no effect; the answer is `SinkFatal`.  For sinks only."""

    BROKEN = "broken"
    """The call has no effect; it raises an exception of some driver."""

    LOST_REPLY = "lost_reply"
    """The call has its effect, and the answer is lost."""

    LATE = "late"
    """The answer is lost, and it happens only later: it was still on its way."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure of one call."""

    method: str
    failing: FaultKind
    occurrence: int = 1
    calls_later: int = 1
    """For `FaultKind.LATE`: before which of the following calls it happens."""

    def __str__(self) -> str:
        late = f" (+{self.calls_later} calls)" if self.failing is FaultKind.LATE else ""
        return f"{self.method}#{self.occurrence} {self.failing}{late}"


OUTCOME_METHODS: Final = ("prepare", "commit", "abort")
"""A sink's methods that answer with a `SinkOutcome`."""

IN_DOUBT_METHODS: Final = ("decide_commit", "decide_abort")
"""A ledger's methods whose lost answer leaves the decision in doubt."""


class ConnectionBroke(OSError):
    """An exception of a driver outside semel."""


@dataclass(slots=True)
class FaultPlan:
    """Which faults are still to come, how often each method was called, and what is late."""

    faults: list[Fault] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    number: int = 0
    """Of all calls so far."""

    late: list[tuple[int, Callable[[], Any]]] = field(default_factory=list)
    """By number of all calls so far: what happens then."""

    def take(self, method: str) -> Fault | None:
        """Count a call, let what is due happen, and return the fault that strikes it."""
        self.calls[method] += 1
        self.number += 1
        if self.late:
            self.land(self.number)
        for fault in self.faults:
            if fault.method == method and fault.occurrence == self.calls[method]:
                self.faults.remove(fault)
                return fault
        return None

    def put_off(self, fault: Fault, call: Callable[[], Any]) -> None:
        """Let *call* happen later."""
        self.late.append((self.number + fault.calls_later, call))

    def land(self, until: float = float("inf")) -> None:
        """Let everything happen that is due by now; refused like any other late request."""
        due = [call for at, call in self.late if at <= until]
        self.late = [(at, call) for at, call in self.late if at > until]
        for call in due:
            # The caller of a late call is gone, so a refusal has no reader.
            with contextlib.suppress(SemelError):
                call()


def faulty_sink(sink: TwoPhaseSink, *faults: Fault, plan: FaultPlan | None = None) -> TwoPhaseSink:
    """Return *sink* with *faults*; *plan* keeps faults longer than the sink's object."""
    return cast("TwoPhaseSink", _Faulty(sink, _plan(plan, faults), _sink_answer))


def faulty_ledger(ledger: Ledger, *faults: Fault, plan: FaultPlan | None = None) -> Ledger:
    """Return *ledger* with *faults*; *plan* keeps faults longer than the ledger's object."""
    return cast("Ledger", _Faulty(ledger, _plan(plan, faults), _ledger_answer))


def _plan(plan: FaultPlan | None, faults: tuple[Fault, ...]) -> FaultPlan:
    plan = plan or FaultPlan()
    plan.faults.extend(faults)
    return plan


class _Faulty:
    """Everything of the wrapped thing, its methods counted and struck by the plan's faults."""

    def __init__(self, inner: Any, plan: FaultPlan, answer: Callable[[Fault], Any]) -> None:
        self._inner = inner
        self._plan = plan
        self._answer = answer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **named: Any) -> Any:
            fault = self._plan.take(name)
            if fault is None:
                return found(*arguments, **named)
            if fault.failing is FaultKind.LATE:
                self._plan.put_off(fault, lambda: found(*arguments, **named))
            elif fault.failing is FaultKind.LOST_REPLY:
                found(*arguments, **named)
            return self._answer(fault)

        return call


def _sink_answer(fault: Fault) -> Any:
    words = f"simulated: {fault}"
    answers = fault.method in OUTCOME_METHODS
    if fault.failing is FaultKind.REFUSED and answers:
        return SinkRetryable(words)
    if fault.failing is FaultKind.FATAL and answers:
        return SinkFatal(words)
    if fault.failing is FaultKind.REFUSED:
        raise Retryable(words)
    raise ConnectionBroke(words)


def _ledger_answer(fault: Fault) -> Any:
    words = f"simulated: {fault}"
    if fault.failing is FaultKind.BROKEN:
        raise ConnectionBroke(words)
    if fault.method in IN_DOUBT_METHODS and fault.failing is not FaultKind.REFUSED:
        raise InDoubt(words)
    raise LedgerUnavailable("memory:", words)
