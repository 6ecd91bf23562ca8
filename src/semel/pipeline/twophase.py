"""The two-phase steps of a coordinator, carried out on its sinks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import NEVER_PASSES, reason_of
from semel.events import EVENTS, Events, SinkRetried
from semel.pipeline.cycle import Coordinator, CountsRows, SinkAnswer
from semel.pipeline.sink import (
    Receipt,
    SharesTransaction,
    SinkFatal,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Token,
    TwoPhaseSink,
)
from semel.pipeline.txn import SinkTxnId

Answer = TypeVar("Answer")

Each = Callable[[Sequence[Callable[[], Any]]], list[Any]]
"""Makes calls, at once or in turn, and returns their answers in order."""

Group: TypeAlias = tuple[TwoPhaseSink, ...]
"""The sinks that share one transaction, in order; mostly one."""


@runtime_checkable
class KeepsTokens(Protocol):
    """A coordinator that makes tokens durable before the decision."""

    def keep_tokens(self, txn: SinkTxnId, tokens: Mapping[str, Token]) -> None:
        """Store every sink's token; called once all sinks are prepared."""


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


def in_groups(sinks: Iterable[TwoPhaseSink], only: Collection[str] | None = None) -> list[Group]:
    """Join the sinks that can share a transaction; return the groups, or *only* their part."""
    found: dict[Hashable, list[TwoPhaseSink]] = {}
    for sink in sinks:
        shared = sink.transaction_key if isinstance(sink, SharesTransaction) else None
        found.setdefault((shared, sink.name if shared is None else ""), []).append(sink)
    for group in found.values():
        for sink in group:
            if len(group) > 1 and isinstance(sink, SharesTransaction):
                sink.join(group)
    if only is None:
        return [tuple(group) for group in found.values()]
    parts = [tuple(s for s in group if s.name in only) for group in found.values()]
    return [part for part in parts if part]


def concurrently(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """Make all calls at once, one thread each; a failure does not stop the others."""
    if len(calls) < 2:
        return [call() for call in calls]
    with ThreadPoolExecutor(len(calls), thread_name_prefix="semel-sink") as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def one_by_one(calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
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
        self._groups = in_groups(sinks)
        self._rows_for = rows_for
        self._next = next_txn_label
        self._backoff = backoff
        self._each = each
        self._events = events
        self._clock = clock
        self._txn: SinkTxnId | None = None
        self._tokens: dict[str, Token] = {}
        # The steps in which sinks have no part.
        self.flush = coordinator.flush
        self.commit_offsets = coordinator.commit_offsets
        self.commit_txn = coordinator.commit_txn
        self.store_commit = coordinator.store_commit
        self.abort_txn = coordinator.abort_txn
        self.store_abort = coordinator.store_abort

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

    def pre_commit_2pc(self) -> Sequence[SinkAnswer]:
        answers = [*self._inner.pre_commit_2pc(), *self._every(self._prepare)]
        tokens = {
            answer.sink: answer.outcome.token or {}
            for answer in answers
            if isinstance(answer.outcome, SinkOK)
        }
        if len(tokens) == len(answers):
            self._tokens = tokens
            if isinstance(self._inner, KeepsTokens):
                reach(CrashPoint.TOKENS_BEFORE)
                self._inner.keep_tokens(self.txn, self._tokens)
                reach(CrashPoint.TOKENS_AFTER)
        return answers

    def commit_2pc(self) -> Sequence[SinkAnswer]:
        return [*self._inner.commit_2pc(), *self._every(self._commit)]

    def abort_2pc(self) -> Sequence[SinkAnswer]:
        return [*self._inner.abort_2pc(), *self._every(self._abort)]

    def _every(
        self, call: Callable[[Group, SinkTxnId], Mapping[str, SinkOutcome]]
    ) -> list[SinkAnswer]:
        txn = self.txn
        answered = self._each([partial(call, group, txn) for group in self._groups])
        return [
            SinkAnswer(sink, txn, outcome)
            for outcomes in answered
            for sink, outcome in outcomes.items()
        ]

    def _prepare(self, group: Group, txn: SinkTxnId) -> Mapping[str, SinkOutcome]:
        receipts = {sink.name: self._rows_for(txn, sink.name) for sink in group}
        first = group[0]
        if len(group) > 1 and isinstance(first, SharesTransaction):
            return at_sinks("pre_commit_2pc", group, lambda: first.prepare_all(txn, receipts))
        outcome = at_sink("pre_commit_2pc", first, lambda: first.prepare(txn, receipts[first.name]))
        return {first.name: outcome}

    def _commit(self, group: Group, txn: SinkTxnId) -> Mapping[str, SinkOutcome]:
        tokens = {sink.name: self._tokens.get(sink.name, {}) for sink in group}
        return commit_with_retries(group, txn, tokens, self._backoff, self._events, self._clock)

    def _abort(self, group: Group, txn: SinkTxnId) -> Mapping[str, SinkOutcome]:
        return {sink.name: self._abort_one(sink, txn) for sink in group}

    def _abort_one(self, sink: TwoPhaseSink, txn: SinkTxnId) -> SinkOutcome:
        return at_sink("abort_2pc", sink, lambda: sink.abort(txn, self._tokens.get(sink.name)))


def commit_with_retries(
    group: Group,
    txn: SinkTxnId,
    tokens: Mapping[str, Token],
    backoff: Backoff,
    events: Events,
    clock: Clock,
) -> Mapping[str, SinkOutcome]:
    """Commit a group, and try again in place while the answer is retryable or unknown."""
    first = group[0]
    outcomes: Mapping[str, SinkOutcome] = {}
    for number in range(1, backoff.tries + 1):
        if len(group) > 1 and isinstance(first, SharesTransaction):
            outcomes = at_sinks("commit_2pc", group, partial(first.commit_all, txn, tokens))
        else:
            commit = partial(first.commit, txn, tokens[first.name])
            outcomes = {first.name: at_sink("commit_2pc", first, commit)}
        refused = {n: o.reason for n, o in outcomes.items() if isinstance(o, SinkRetryable)}
        # Sinks that were rolled back because another one can never commit wait for a person.
        if not refused or any(isinstance(o, SinkFatal) for o in outcomes.values()):
            break
        for sink, reason in refused.items():
            events.emit(SinkRetried(str(txn.scope), str(txn.cycle), sink, number, reason))
        if number < backoff.tries:
            clock.sleep(backoff.wait_seconds(number))
    return outcomes


def at_sinks(
    step: str, group: Group, call: Callable[[], Mapping[str, SinkOutcome]]
) -> Mapping[str, SinkOutcome]:
    """Make a guarded call for a whole group between the crash points of its sinks."""
    for sink in group:
        reach(CrashPoint(f"{step}:before"), sink.name)
    answered: dict[str, SinkOutcome] = {}

    def called() -> SinkOutcome:
        answered.update(call())
        return SinkOK()

    failed = guarded(called)
    for sink in group:
        reach(CrashPoint(f"{step}:after"), sink.name)
    return answered or {sink.name: failed for sink in group}


def at_sink(step: str, sink: TwoPhaseSink, call: Callable[[], SinkOutcome]) -> SinkOutcome:
    """Make a guarded call between the crash points of *step* at *sink*."""
    reach(CrashPoint(f"{step}:before"), sink.name)
    outcome = guarded(call)
    reach(CrashPoint(f"{step}:after"), sink.name)
    return outcome


def guarded(call: Callable[[], SinkOutcome]) -> SinkOutcome:
    """Turn an exception into a retryable outcome: an unknown answer is never OK."""
    try:
        return call()
    except NEVER_PASSES as error:
        return SinkFatal(reason_of(error))
    except Exception as error:  # noqa: BLE001  whatever a sink raises, its answer is unknown
        return SinkRetryable(reason_of(error))
