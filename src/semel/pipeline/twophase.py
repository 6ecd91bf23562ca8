"""The two-phase steps of a coordinator, carried out on its sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, Misuse, NeedsOperator, Permanent, reason_of
from semel.events import EVENTS, Events, SinkRetried
from semel.pipeline.cycle import (
    AbortAnswer,
    CommitAnswer,
    Coordinator,
    CountsRows,
    SinkAnswer,
)
from semel.pipeline.sink import (
    Receipt,
    SinkFatal,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Token,
    TwoPhaseSink,
)
from semel.pipeline.txn import SinkTxnId

Each = Callable[[Sequence[Callable[[], SinkAnswer]]], list[SinkAnswer]]


@runtime_checkable
class KeepsTokens(Protocol):
    """A coordinator that makes tokens durable before the decision."""

    def keep_tokens(self, txn: SinkTxnId, tokens: Mapping[str, Token]) -> None:
        """Store every sink's token; called once all sinks are prepared."""
        ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """How many times a refused commit is tried in place, and the pauses between."""

    tries: int = 4
    first_seconds: float = 0.1
    factor: float = 3.0
    most_seconds: float = 5.0

    def wait_seconds(self, after_try: int) -> float:
        """Return the pause after try number *after_try*, counted from 1."""
        return min(self.most_seconds, self.first_seconds * self.factor ** (after_try - 1))


COMMIT_BACKOFF: Final = Backoff()
"""Four tries within about two seconds; recovery handles longer outages."""


def concurrently(calls: Sequence[Callable[[], SinkAnswer]]) -> list[SinkAnswer]:
    """Make all calls at once, one thread each; a failure does not stop the others."""
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="semel-sink") as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def one_by_one(calls: Sequence[Callable[[], SinkAnswer]]) -> list[SinkAnswer]:
    """Make the calls in order, so that a simulation is deterministic."""
    return [call() for call in calls]


def with_two_phase_sinks(
    coordinator: Coordinator,
    sinks: Sequence[TwoPhaseSink],
    rows_for: Callable[[SinkTxnId, str], Sequence[Receipt]],
    next_txn_label: Callable[[], SinkTxnId],
    *,
    backoff: Backoff = COMMIT_BACKOFF,
    each: Each = concurrently,
    events: Events = EVENTS,
    clock: Clock = SYSTEM_CLOCK,
) -> Coordinator:
    """Return *coordinator* with its two-phase steps carried out on *sinks*.

    *next_txn_label* is called once per cycle, after `begin_txn`; *rows_for* returns the
    receipts of a sink's tasks for that transaction.
    """
    return _WithSinks(coordinator, sinks, rows_for, next_txn_label, backoff, each, events, clock)


class _WithSinks:
    def __init__(
        self,
        coordinator: Coordinator,
        sinks: Sequence[TwoPhaseSink],
        rows_for: Callable[[SinkTxnId, str], Sequence[Receipt]],
        next_txn_label: Callable[[], SinkTxnId],
        backoff: Backoff,
        each: Each,
        events: Events,
        clock: Clock,
    ) -> None:
        self._inner = coordinator
        self._sinks = sinks
        self._rows_for = rows_for
        self._next = next_txn_label
        self._backoff = backoff
        self._each = each
        self._events = events
        self._clock = clock
        self._txn: SinkTxnId | None = None
        self._tokens: dict[str, Token] = {}

    @property
    def label(self) -> str:
        return self._inner.label

    @property
    def scope_label(self) -> str:
        return self._inner.scope_label

    @property
    def row_counts(self) -> Mapping[str, int]:
        return self._inner.row_counts if isinstance(self._inner, CountsRows) else {}

    @property
    def txn(self) -> SinkTxnId:
        if self._txn is None:
            self._txn = self._next()
        return self._txn

    def begin_txn(self) -> None:
        self._txn = None
        self._tokens = {}
        self._inner.begin_txn()
        self._txn = self._next()

    def flush(self) -> None:
        self._inner.flush()

    def commit_offsets(self) -> None:
        self._inner.commit_offsets()

    def pre_commit_2pc(self) -> Sequence[SinkAnswer]:
        answers = [*self._inner.pre_commit_2pc()]
        answers += self._each([self._prepare(sink) for sink in self._sinks])
        if all(isinstance(answer.outcome, SinkOK) for answer in answers):
            self._tokens = {
                answer.sink: answer.outcome.token or {}
                for answer in answers
                if isinstance(answer.outcome, SinkOK)
            }
            if isinstance(self._inner, KeepsTokens):
                reach(CrashPoint.TOKENS_BEFORE)
                self._inner.keep_tokens(self.txn, self._tokens)
                reach(CrashPoint.TOKENS_AFTER)
        return answers

    def commit_txn(self) -> CommitAnswer:
        return self._inner.commit_txn()

    def commit_2pc(self) -> Sequence[SinkAnswer]:
        answers = [*self._inner.commit_2pc()]
        return answers + self._each([self._commit(sink) for sink in self._sinks])

    def store_commit(self) -> None:
        self._inner.store_commit()

    def abort_txn(self) -> AbortAnswer:
        return self._inner.abort_txn()

    def store_abort(self) -> None:
        self._inner.store_abort()

    def abort_2pc(self) -> Sequence[SinkAnswer]:
        answers = [*self._inner.abort_2pc()]
        return answers + self._each([self._abort(sink) for sink in self._sinks])

    def _prepare(self, sink: TwoPhaseSink) -> Callable[[], SinkAnswer]:
        def call() -> SinkAnswer:
            txn = self.txn
            reach(CrashPoint.PRE_COMMIT_2PC_BEFORE, sink.name)
            outcome = guarded(lambda: sink.prepare(txn, self._rows_for(txn, sink.name)))
            reach(CrashPoint.PRE_COMMIT_2PC_AFTER, sink.name)
            return SinkAnswer(sink.name, txn, outcome)

        return call

    def _commit(self, sink: TwoPhaseSink) -> Callable[[], SinkAnswer]:
        def call() -> SinkAnswer:
            outcome = commit_with_retries(
                sink,
                self.txn,
                self._tokens.get(sink.name, {}),
                self._backoff,
                self._events,
                self._clock,
            )
            return SinkAnswer(sink.name, self.txn, outcome)

        return call

    def _abort(self, sink: TwoPhaseSink) -> Callable[[], SinkAnswer]:
        def call() -> SinkAnswer:
            reach(CrashPoint.ABORT_2PC_BEFORE, sink.name)
            token = self._tokens.get(sink.name)
            outcome = guarded(lambda: sink.abort(self.txn, token))
            reach(CrashPoint.ABORT_2PC_AFTER, sink.name)
            return SinkAnswer(sink.name, self.txn, outcome)

        return call


def commit_with_retries(
    sink: TwoPhaseSink,
    txn: SinkTxnId,
    token: Token,
    backoff: Backoff,
    events: Events,
    clock: Clock,
) -> SinkOutcome:
    """Commit one sink, and try again in place while the answer is retryable or unknown."""
    outcome: SinkOutcome = SinkRetryable("not tried")
    for number in range(1, backoff.tries + 1):
        reach(CrashPoint.COMMIT_2PC_BEFORE, sink.name)
        outcome = guarded(lambda: sink.commit(txn, token))
        reach(CrashPoint.COMMIT_2PC_AFTER, sink.name)
        if not isinstance(outcome, SinkRetryable):
            break
        events.emit(SinkRetried(str(txn.scope), str(txn.cycle), sink.name, number, outcome.reason))
        if number < backoff.tries:
            clock.sleep(backoff.wait_seconds(number))
    return outcome


def guarded(call: Callable[[], SinkOutcome]) -> SinkOutcome:
    """Turn an exception into a retryable outcome: an unknown answer is never OK."""
    try:
        return call()
    except (Permanent, Fenced, NeedsOperator, Misuse) as error:
        return SinkFatal(reason_of(error))
    except Exception as error:  # noqa: BLE001  whatever a sink raises, its answer is unknown
        return SinkRetryable(reason_of(error))
