"""One pass of the seven steps, with one answer for every way in which a step can fail.

    begin_txn ▶ flush ▶ commit_offsets ▶ pre_commit_2pc ▶ commit_txn ▶ commit_2pc ▶ store_commit
        │         └───────────┴────────────────┴──────────────┘            │             │
      Fatal              Aborted (abort path)                    no way back: Fatal    Fatal

The decision is `commit_txn`.  Before it a cycle is aborted; after it a cycle
is carried through, if not now then by recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias, runtime_checkable

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import NEVER_PASSES, InDoubt, Misuse, Permanent, SemelError, reason_of
from semel.events import EVENTS, CommitSlow, CycleEnded, Events, StepDone, StepFailed
from semel.pipeline.sink import SinkFatal, SinkOK, SinkOutcome
from semel.pipeline.txn import SinkTxnId


class Step(StrEnum):
    """The seven steps, in order."""

    BEGIN_TXN = "begin_txn"
    FLUSH = "flush"
    COMMIT_OFFSETS = "commit_offsets"
    PRE_COMMIT_2PC = "pre_commit_2pc"
    COMMIT_TXN = "commit_txn"
    COMMIT_2PC = "commit_2pc"
    STORE_COMMIT = "store_commit"


class StepFailure(StrEnum):
    """How a step can fail."""

    ERROR = "error"
    NEVER_PASSES = "error that would come again"
    SINK_RETRYABLE = "SinkRetryable"
    SINK_FATAL = "SinkFatal"
    NOT_COMMITTED = "surely not committed"
    UNKNOWN = "unknown"


class Consequence(StrEnum):
    """What the failure of a step means for the cycle."""

    FATAL = "CommitFatal; nothing else is called"
    ABORT = "CommitAborted, after the abort path"
    ABORT_THEN_FATAL = "CommitFatal, after the abort path"
    WIN_ABORT = (
        "try to win ABORT by compare-and-set: won, CommitAborted; lost, the COMMIT stands and the "
        "cycle goes on; no answer, CommitFatal and the sinks stay prepared"
    )
    STRANDED = "CommitFatal naming every stranded (sink, transaction); never an abort"


FAILURES: Final[Mapping[tuple[Step, StepFailure], Consequence]] = {
    (Step.BEGIN_TXN, StepFailure.ERROR): Consequence.FATAL,
    (Step.FLUSH, StepFailure.ERROR): Consequence.ABORT,
    (Step.FLUSH, StepFailure.NEVER_PASSES): Consequence.ABORT_THEN_FATAL,
    (Step.COMMIT_OFFSETS, StepFailure.ERROR): Consequence.ABORT,
    (Step.COMMIT_OFFSETS, StepFailure.NEVER_PASSES): Consequence.ABORT_THEN_FATAL,
    (Step.PRE_COMMIT_2PC, StepFailure.ERROR): Consequence.ABORT,
    (Step.PRE_COMMIT_2PC, StepFailure.NEVER_PASSES): Consequence.ABORT_THEN_FATAL,
    (Step.PRE_COMMIT_2PC, StepFailure.SINK_RETRYABLE): Consequence.ABORT,
    (Step.PRE_COMMIT_2PC, StepFailure.SINK_FATAL): Consequence.ABORT_THEN_FATAL,
    (Step.COMMIT_TXN, StepFailure.NOT_COMMITTED): Consequence.ABORT,
    (Step.COMMIT_TXN, StepFailure.UNKNOWN): Consequence.WIN_ABORT,
    (Step.COMMIT_2PC, StepFailure.ERROR): Consequence.STRANDED,
    (Step.COMMIT_2PC, StepFailure.SINK_RETRYABLE): Consequence.STRANDED,
    (Step.COMMIT_2PC, StepFailure.SINK_FATAL): Consequence.STRANDED,
    (Step.STORE_COMMIT, StepFailure.ERROR): Consequence.FATAL,
}
"""The failure table.  The docs print it from here."""


class CommitAnswer(StrEnum):
    """What `commit_txn` learnt about the decision."""

    COMMITTED = "committed"
    NOT_COMMITTED = "not_committed"
    """Certainly not committed, and it never will be."""

    UNKNOWN = "unknown"
    """No answer; the COMMIT may still arrive at the ledger."""


class AbortAnswer(StrEnum):
    """What `abort_txn` achieved by compare-and-set."""

    WON = "won"
    """ABORT is decided; the attempt can never commit."""

    LOST = "lost"
    """COMMIT stands."""

    NO_ANSWER = "no_answer"


@dataclass(frozen=True, slots=True)
class SinkAnswer:
    """One sink's answer to one call of a step."""

    sink: str
    txn: SinkTxnId
    outcome: SinkOutcome


class Coordinator(Protocol):
    """What the seven steps do in one system: a ledger, or a transactional producer.

    An exception from any callback is the failure of its step.
    """

    @property
    def label(self) -> str:
        """The cycle's name in reasons, logs and events."""

    @property
    def scope_label(self) -> str:
        """The scope's name in events."""

    def begin_txn(self) -> None:
        """Verify that this process may write, and open the transaction."""

    def flush(self) -> None:
        """Run the processing and stage everything it produces."""

    def commit_offsets(self) -> None:
        """Put the source positions into the transaction."""

    def pre_commit_2pc(self) -> Sequence[SinkAnswer]:
        """Prepare every sink and make its token durable."""

    def commit_txn(self) -> CommitAnswer:
        """Take the decision.

        A `SemelError` other than `InDoubt` means certainly not committed; any other
        exception means UNKNOWN.
        """

    def commit_2pc(self) -> Sequence[SinkAnswer]:
        """Commit every sink, with bounded retries in place, even if others fail."""

    def store_commit(self) -> None:
        """Drain user stores and close the cycle."""

    def abort_txn(self, reason: str) -> AbortAnswer:
        """Try to win ABORT by compare-and-set, on a new connection, and keep the *reason*.

        The connection that sent the COMMIT may be broken, or may still deliver it.
        """

    def store_abort(self) -> None:
        """Drop what user stores buffered."""

    def abort_2pc(self) -> Sequence[SinkAnswer]:
        """Abort every sink, prepared or not."""


@runtime_checkable
class CountsRows(Protocol):
    """A coordinator that knows how many rows the cycle staged."""

    @property
    def row_counts(self) -> Mapping[str, int]:
        """How many, by sink."""


@dataclass(frozen=True, slots=True)
class CommitSucceeded:
    """The cycle is committed and visible in every sink."""

    step_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class CommitAborted:
    """Nothing of this attempt will ever be visible; the cycle may be tried again."""

    reason: str


@dataclass(frozen=True, slots=True)
class CommitFatal:
    """This process must stop; recovery or an operator settles the rest."""

    reason: str
    stranded: tuple[tuple[str, SinkTxnId], ...] = ()
    """Every (sink, transaction) whose decision is COMMIT but whose rows are not visible yet."""

    cause: BaseException | None = field(default=None, compare=False, repr=False)


class CycleRefused(Permanent):
    """A batch can never pass as it is; it was aborted, and none of its rows is visible."""

    def __init__(self, cycle: str, reason: str) -> None:
        super().__init__(cycle, reason)
        self.cycle = cycle
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"cycle {self.cycle} can never pass as it is: {self.reason}; none of its rows is "
            f"visible; change the input or the set-up, then start the query again"
        )


CommitOutcome: TypeAlias = CommitSucceeded | CommitAborted | CommitFatal


# Above this part of the interval, committing leaves too little time for the batches (S1-32).
SLOW_COMMIT_FRACTION: Final = 0.25


def run_commit_cycle(
    coordinator: Coordinator,
    *,
    interval_seconds: float | None = None,
    events: Events = EVENTS,
    clock: Clock = SYSTEM_CLOCK,
) -> CommitOutcome:
    """Run the seven steps once and return the outcome.

    Every callback is guarded: an `Exception` is the failure of its step, and the
    failure table says what follows.  Only a crash (a `BaseException` that is not
    an `Exception`) passes through: a real crash would run no further code either.
    """
    run = _Run(coordinator, events, clock)
    outcome = run.walk()
    run.report(outcome, interval_seconds)
    return outcome


class _StepFailed(Exception):
    def __init__(
        self,
        step: Step,
        failure: StepFailure,
        reason: str,
        stranded: tuple[tuple[str, SinkTxnId], ...] = (),
    ) -> None:
        super().__init__(step, failure, reason, stranded)
        self.step = step
        self.failure = failure
        self.reason = f"{step}: {reason}"
        self.stranded = stranded


class _Run:
    """The state of one pass: timings, and whether the decision was sent."""

    def __init__(self, coordinator: Coordinator, events: Events, clock: Clock) -> None:
        self._do = coordinator
        self._events = events
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._sent_commit = False

    def walk(self) -> CommitOutcome:
        do = self._do
        try:
            self._step(Step.BEGIN_TXN, do.begin_txn)
            self._step(Step.FLUSH, do.flush)
            self._step(Step.COMMIT_OFFSETS, do.commit_offsets)
            self._sinks(Step.PRE_COMMIT_2PC, do.pre_commit_2pc)
            self._decide()
            self._sinks(Step.COMMIT_2PC, do.commit_2pc)
            self._step(Step.STORE_COMMIT, do.store_commit)
        except _StepFailed as failed:
            return self._after(failed)
        return CommitSucceeded(self._seconds)

    def _after(self, failed: _StepFailed) -> CommitOutcome:
        where = (self._do.scope_label, self._do.label)
        self._events.emit(StepFailed(*where, failed.step, failed.reason))
        match FAILURES[failed.step, failed.failure]:
            case Consequence.FATAL | Consequence.STRANDED:
                return CommitFatal(failed.reason, failed.stranded, failed.__cause__)
            case Consequence.ABORT:
                self._abort_path(failed.reason)
                return CommitAborted(failed.reason)
            case Consequence.ABORT_THEN_FATAL:
                self._abort_path(failed.reason)
                cause = failed.__cause__
                if cause is None or isinstance(cause, Permanent | Misuse):
                    cause = CycleRefused(self._do.label, failed.reason)
                return CommitFatal(failed.reason, cause=cause)
            case Consequence.WIN_ABORT:
                return self._settle_unknown(failed)

    def _settle_unknown(self, failed: _StepFailed) -> CommitOutcome:
        answer = self._win_abort(failed.reason)
        if answer is AbortAnswer.WON:
            self._drop_staged()
            return CommitAborted(f"{failed.reason}; ABORT was won")
        if answer is AbortAnswer.NO_ANSWER:
            return CommitFatal(
                f"{failed.reason}; in doubt: the ledger does not answer, the sinks stay prepared",
                cause=failed.__cause__,
            )
        try:
            self._sinks(Step.COMMIT_2PC, self._do.commit_2pc)
            self._step(Step.STORE_COMMIT, self._do.store_commit)
        except _StepFailed as later:
            return self._after(later)
        return CommitSucceeded(self._seconds)

    def _decide(self) -> None:
        reach(CrashPoint.COMMIT_TXN_BEFORE)
        # Set before the call: an exception from it does not prove that nothing was sent.
        self._sent_commit = True
        began = self._clock.monotonic()
        try:
            answer = self._do.commit_txn()
        except SemelError as error:
            doubt = isinstance(error, InDoubt)
            failure = StepFailure.UNKNOWN if doubt else StepFailure.NOT_COMMITTED
            raise _StepFailed(Step.COMMIT_TXN, failure, reason_of(error)) from error
        except Exception as error:
            raise _StepFailed(Step.COMMIT_TXN, StepFailure.UNKNOWN, reason_of(error)) from error
        reach(CrashPoint.COMMIT_TXN_AFTER)
        if answer is CommitAnswer.NOT_COMMITTED:
            raise _StepFailed(Step.COMMIT_TXN, StepFailure.NOT_COMMITTED, "not committed")
        if answer is not CommitAnswer.COMMITTED:
            raise _StepFailed(Step.COMMIT_TXN, StepFailure.UNKNOWN, "no answer")
        self._done(Step.COMMIT_TXN, began)

    def _step(self, step: Step, callback: Callable[[], None]) -> None:
        reach(CrashPoint(f"{step}:before"))
        began = self._clock.monotonic()
        try:
            callback()
        except Exception as error:
            raise _StepFailed(step, _failure_of(step, error), reason_of(error)) from error
        reach(CrashPoint(f"{step}:after"))
        self._done(step, began)

    def _sinks(self, step: Step, callback: Callable[[], Sequence[SinkAnswer]]) -> None:
        began = self._clock.monotonic()
        try:
            answers = callback()
        except Exception as error:
            raise _StepFailed(step, _failure_of(step, error), reason_of(error)) from error
        refused = [a for a in answers if not isinstance(a.outcome, SinkOK)]
        if refused:
            fatal = any(isinstance(a.outcome, SinkFatal) for a in refused)
            raise _StepFailed(
                step,
                StepFailure.SINK_FATAL if fatal else StepFailure.SINK_RETRYABLE,
                "; ".join(f"{a.sink}: {_words(a.outcome)}" for a in refused),
                tuple((a.sink, a.txn) for a in refused) if step is Step.COMMIT_2PC else (),
            )
        self._done(step, began)

    def _done(self, step: Step, began: float) -> None:
        seconds = self._clock.monotonic() - began
        self._seconds[step] = seconds
        self._events.emit(StepDone(self._do.scope_label, self._do.label, step, seconds))

    def _abort_path(self, reason: str) -> None:
        answer = self._win_abort(reason)
        # If the COMMIT was never sent, no other process can have committed this
        # attempt; if it was sent, only a won ABORT makes it safe to drop anything.
        if answer is AbortAnswer.WON or (answer is AbortAnswer.NO_ANSWER and not self._sent_commit):
            self._drop_staged()

    def _win_abort(self, reason: str) -> AbortAnswer:
        reach(CrashPoint.ABORT_TXN_BEFORE)
        try:
            answer = self._do.abort_txn(reason)
        except Exception as error:  # noqa: BLE001  an error here leaves the decision unknown
            self._failed("abort_txn", error)
            return AbortAnswer.NO_ANSWER
        reach(CrashPoint.ABORT_TXN_AFTER)
        return answer

    def _drop_staged(self) -> None:
        try:
            self._do.store_abort()
        except Exception as error:  # noqa: BLE001  the abort path never stops half-way
            self._failed("store_abort", error)
        try:
            for answer in self._do.abort_2pc():
                if not isinstance(answer.outcome, SinkOK):
                    self._failed("abort_2pc", f"{answer.sink}: {_words(answer.outcome)}")
        except Exception as error:  # noqa: BLE001  recovery sweeps what stays behind
            self._failed("abort_2pc", error)

    def _failed(self, step: str, why: Exception | str) -> None:
        reason = f"{step}: {why if isinstance(why, str) else reason_of(why)}"
        self._events.emit(StepFailed(self._do.scope_label, self._do.label, step, reason))

    def report(self, outcome: CommitOutcome, interval_seconds: float | None) -> None:
        seconds = sum(self._seconds.values())
        where = (self._do.scope_label, self._do.label)
        rows = self._do.row_counts if isinstance(self._do, CountsRows) else {}
        match outcome:
            case CommitSucceeded():
                ended = CycleEnded(*where, "succeeded", "", seconds, self._seconds, rows)
            case CommitAborted(reason):
                ended = CycleEnded(*where, "aborted", reason, seconds, self._seconds)
            case CommitFatal(reason):
                ended = CycleEnded(*where, "fatal", reason, seconds, self._seconds)
        self._events.emit(ended)
        commit = self._seconds.get(Step.COMMIT_2PC, 0.0) + self._seconds.get(Step.COMMIT_TXN, 0.0)
        if interval_seconds and commit > SLOW_COMMIT_FRACTION * interval_seconds:
            self._events.emit(CommitSlow(*where, commit, interval_seconds))


def _failure_of(step: Step, error: Exception) -> StepFailure:
    comes_again = isinstance(error, NEVER_PASSES) and (step, StepFailure.NEVER_PASSES) in FAILURES
    return StepFailure.NEVER_PASSES if comes_again else StepFailure.ERROR


def _words(outcome: SinkOutcome) -> str:
    return "ok" if isinstance(outcome, SinkOK) else outcome.reason
