"""Recovery: a new owner settles everything that earlier owners left, before its first batch.

    check the places and the ledger ──▶ fence ──▶ open attempts ──▶ what sinks still hold ──▶ sweep

Recovery may crash at any point and be repeated.  A sink that does not answer
blocks the start, because its silence proves nothing.

An operator's `adopt` accepts what other ledgers have committed in the sinks so
far.  The first start after it records how far that is; later commits of another
ledger are refused again.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import LeaseLost, Misuse, NeedsOperator, Retryable, SemelError, reason_of
from semel.events import (
    EVENTS,
    CycleRecovered,
    Events,
    LeavingsSwept,
    SinkReturned,
    SinkStranded,
    log,
)
from semel.pipeline.ledger import (
    AttemptRecord,
    CycleState,
    Decision,
    Ledger,
    ScopeLease,
    is_loser,
    mark_of,
)
from semel.pipeline.sink import (
    AbortsTogether,
    KnowsItsPlace,
    SharesTransaction,
    SinkFatal,
    SinkOK,
    SinkOutcome,
    SinkRetryable,
    Tenant,
    Token,
    TwoPhaseSink,
)
from semel.pipeline.twophase import (
    COMMIT_BACKOFF,
    Backoff,
    Group,
    at_sink,
    commit_with_retries,
    in_groups,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

ADOPT: Final = "adopt"

REMEMBERED: Final = 1000
"""How many attempts are searched for cycles that a sink has missed."""


ACCEPT: Final = "accept ledgers"
"""The recorded act of the first start after an adoption."""


PLACES: Final = "place sinks"
"""The recorded act of the first start with a sink: where it writes."""


def places_of(ledger: Ledger, scope: Scope) -> dict[str, str]:
    """Return where the sinks of *scope* write, by name; those that were removed, too."""
    kept = (act.detail["places"] for act in ledger.acts(scope) if "places" in act.detail)
    return dict(next(kept, {}))


def check_places(
    ledger: Ledger, scope: Scope, sinks: Sequence[TwoPhaseSink], names: Collection[str] = ()
) -> dict[str, str]:
    """Refuse a known sink at another place, and a known place under another name.

    *names* are those of all sinks of the pipeline, if *sinks* are only some of them.
    Returns the places with those of new sinks, for the caller to record.

    Raises:
        NeedsOperator: both facts, and the command that settles it.
        Misuse: two sinks at one place have a transaction each.
    """
    known = places_of(ledger, scope)
    found = dict(known)
    configured = {*names, *(sink.name for sink in sinks)}
    is_adopted = _accepted(ledger, scope) is None
    holders: dict[str, tuple[str, Hashable]] = {}
    for sink in sinks:
        if not isinstance(sink, KnowsItsPlace):
            continue
        place, was = sink.find_place(), known.get(sink.name)
        if isinstance(sink, SharesTransaction):
            other, key = holders.setdefault(place, (sink.name, sink.transaction_key))
            _refuse_apart(sink, place, other, key)
        if place and was not in (None, place):
            raise NeedsOperator(
                f"sink {sink.name!r} of {scope} has written to {was} until now, and is set to "
                f"write to {place}: set it back, give the new place a sink with another name, or "
                f"accept it with `semel sink move --sink {sink.name}`"
            )
        if not place:
            continue
        found[sink.name] = place
        if was is None and not is_adopted:
            _refuse_known(sink.name, scope, place, known, configured)
            _refuse_filled(sink.name, scope, place, sink.tenants(), configured)
    later = {sink.name for sink in sinks}
    for sink in sinks:
        later.discard(sink.name)
        if isinstance(sink, SharesTransaction):
            _check_parents(sink, sink.name, holders, later)
    return found


def _refuse_apart(sink: SharesTransaction, place: str, other: str, key: Hashable) -> None:
    """Refuse two sinks at one place whose held transactions would wait for each other."""
    if sink.transaction_key != key:
        name = getattr(sink, "name", "")
        raise Misuse(
            f"sinks {other!r} and {name!r} both write to {place}, each in a transaction of its own "
            f"because their URLs, roles or bookkeeping schemas differ, and would wait for each "
            f"other's rows: give them the same ones, or write the rows with one of the two"
        )


def _check_parents(
    sink: SharesTransaction,
    name: str,
    holders: Mapping[str, tuple[str, Hashable]],
    later: Collection[str],
) -> None:
    """Refuse a sink that would not see the new rows of another one, to which its own refer.

    A parent that comes *later* is only a warning: perhaps its rows are older, or the foreign key
    is deferred.
    """
    for place in sink.find_parents():
        parent, key = holders.get(place, ("", sink.transaction_key))
        if key != sink.transaction_key:
            raise Misuse(
                f"rows of sink {name!r} refer to rows of sink {parent!r} by a foreign key, and do "
                f"not see those of the same batch, because the URLs, roles or bookkeeping schemas "
                f"differ, and with them the transactions: give both sinks the same ones, and list "
                f"{parent!r} first"
            )
        if parent in later:
            log.warning(
                f"sink {parent!r} is listed after sink {name!r}, whose rows refer to its rows by a "
                f"foreign key: list {parent!r} first, or rows of one batch do not find each other"
            )


def _refuse_known(
    name: str, scope: Scope, place: str, known: Mapping[str, str], names: Collection[str]
) -> None:
    """Refuse a new sink at a place that the ledger knows under another name."""
    for other, there in known.items():
        if there == place and other not in names:
            raise NeedsOperator(
                f"sink {name!r} of {scope} is new, and its place, {place}, is known as that of "
                f"sink {other!r}: call it {other!r} again, or rename it with "
                f"`semel sink rename --from {other} --to {name}`"
            )


def _refuse_filled(
    name: str, scope: Scope, place: str, tenants: Iterable[Tenant], names: Collection[str]
) -> None:
    """Refuse a new sink at a place that another sink, app or ledger has filled."""
    for tenant in tenants:
        here = f"{place} holds rows of {tenant}"
        if tenant.scope == scope:
            if tenant.sink not in names:
                raise NeedsOperator(
                    f"sink {name!r} of {scope} is new, and {here}: call it {tenant.sink!r} again, "
                    f"or rename it with `semel sink rename --from {tenant.sink} --to {name}`"
                )
        elif tenant.scope.ledger != scope.ledger:
            if (tenant.scope.app, tenant.scope.query) == (scope.app, scope.query):
                continue  # `check_ledger` refuses it, and says so
            raise NeedsOperator(
                f"sink {name!r} of {scope} is new, and {here}, which were decided in another "
                f"ledger: give this sink a place of its own, use the other ledger, or share the "
                f"place with `semel sink move --sink {name}`"
            )
        elif tenant.scope.app != scope.app:
            raise NeedsOperator(
                f"sink {name!r} of {scope} is new, and {here}: if the app has a new name, use "
                f"`semel app rename --from {tenant.scope.app}`; else give this "
                f"sink a place of its own, or share it with `semel sink move --sink {name}`"
            )


def check_ledger(ledger: Ledger, scope: Scope, sinks: Iterable[TwoPhaseSink]) -> bool:
    """Refuse a scope whose sinks another ledger has filled, beyond what was adopted.

    Returns whether there is an adoption without a call of `accept_ledgers`.

    Raises:
        NeedsOperator: every cycle committed under the other ledger would be repeated.
    """
    accepted = _accepted(ledger, scope)
    if accepted is None:
        return True
    for sink in sinks:
        for other, mark in _others(sink, scope):
            if accepted.get(sink.name, {}).get(other) != mark:
                raise NeedsOperator(
                    f"sink {sink.name!r} holds cycles of {scope} that were decided in another "
                    f"ledger ({other}) and are not in {ledger.url}: use the other ledger, restore "
                    f"a backup of it, give this sink a place of its own, or accept this one with "
                    f"`semel adopt`"
                )
    return False


def accept_ledgers(ledger: Ledger, scope: Scope, sinks: Iterable[TwoPhaseSink]) -> None:
    """Record the marks of other ledgers: their later commits are not adopted."""
    found = {sink.name: dict(_others(sink, scope)) for sink in sinks}
    why = "the first start after an adoption"
    ledger.record_act(scope, "semel", ACCEPT, why, {"marks": found})


def _accepted(ledger: Ledger, scope: Scope) -> Mapping[str, Mapping[str, str]] | None:
    """Return the accepted marks of other ledgers, by sink; None if all are, after `adopt`."""
    # The newest act comes first, so an adoption overrides what was accepted before it.
    for act in ledger.acts(scope):
        if act.act == ADOPT:
            return None
        if act.act == ACCEPT:
            marks: Mapping[str, Mapping[str, str]] = act.detail["marks"]
            return marks
    return {}


def _others(sink: TwoPhaseSink, scope: Scope) -> Iterator[tuple[str, str]]:
    """Yield the other ledgers that committed here for this app and query, with marks.

    Under whatever name of the sink: a ledger that used two has the mark of the later cycle.
    """
    if not isinstance(sink, KnowsItsPlace):
        return
    for tenant in sorted(sink.tenants(), key=lambda tenant: tenant.mark):
        other = tenant.scope
        if other != scope and (other.app, other.query) == (scope.app, scope.query):
            yield other.ledger, tenant.mark


def check_marks(ledger: Ledger, scope: Scope, sinks: Iterable[TwoPhaseSink]) -> None:
    """Refuse a ledger that is older than its sinks.

    With an adopted generation the operator confirmed this ledger for all earlier ones.

    Raises:
        NeedsOperator: a sink has committed a cycle of this scope that the ledger does not know.
    """
    for sink in sinks:
        mark = sink.mark(scope)
        if mark is None:
            continue
        known = ledger.committed(mark.cycle)
        newest = mark_of(ledger, scope)
        if known is not None and known.txn == mark:
            continue
        if known is None and newest is not None and mark.cycle < newest.cycle:
            continue  # pruned from the ledger; the mark says that it was finished
        if mark.cycle.generation < _adopted_generation(ledger, scope):
            continue
        raise NeedsOperator(
            f"sink {sink.name!r} has committed cycle {mark.cycle} (attempt {mark.attempt[:8]}), "
            f"which is not committed in ledger {ledger.url}: the ledger is older than its "
            f"sinks, probably restored from a backup; restore a newer one, or accept this one with "
            f"`semel adopt`, as generation {mark.cycle.generation + 1} or later"
        )


def missed_cycles(ledger: Ledger, scope: Scope, sink: TwoPhaseSink) -> list[CycleId]:
    """List the remembered cycles that were committed without *sink* after its own last one.

    It was not configured for them, and gets their rows only by `semel sink add`.
    """
    mark, newest = sink.mark(scope), mark_of(ledger, scope)
    if mark is None or newest is None or mark.cycle >= newest.cycle:
        return []
    return sorted(
        attempt.txn.cycle
        for attempt in ledger.history(scope, REMEMBERED)
        if attempt.state.is_committed
        and attempt.txn.cycle > mark.cycle
        and sink.name not in {*attempt.tokens, *attempt.rows}
    )


def _adopted_generation(ledger: Ledger, scope: Scope) -> int:
    """Return the newest generation that an operator adopted; 0 if none was."""
    adopted = [act.detail for act in ledger.acts(scope) if act.act == ADOPT]
    return max((int(detail["generation"]) for detail in adopted), default=0)


# One attempt may be locked by another process; after this many retryable answers in a row the
# sink itself does not answer, and a thousand timeouts would prove no more.
SILENT_IN_A_ROW: Final = 3


def abort_all(
    sink: TwoPhaseSink, tokens: Mapping[SinkTxnId, Token | None]
) -> Iterator[tuple[SinkTxnId, SinkOutcome]]:
    """Abort every attempt of *tokens*, whose ABORT is won; a failed one does not stop the rest.

    If the sink stops answering, the remaining attempts are left to the next start.
    """
    together = _aborted_together(sink, tokens)
    yield from ((txn, SinkOK()) for txn in together)
    silent = 0
    for txn, token in tokens.items():
        if txn in together:
            continue
        outcome = at_sink("recover_abort", sink, partial(sink.abort, txn, token))
        yield txn, outcome
        silent = silent + 1 if isinstance(outcome, SinkRetryable) else 0
        if silent == SILENT_IN_A_ROW:
            return


def _aborted_together(
    sink: TwoPhaseSink, tokens: Mapping[SinkTxnId, Token | None]
) -> Collection[SinkTxnId]:
    if len(tokens) < 2 or not isinstance(sink, AbortsTogether):
        return ()
    reach(CrashPoint.RECOVER_ABORT_BEFORE, sink.name)
    try:
        together = sink.abort_together(list(tokens))
    except Exception as error:  # noqa: BLE001  each is aborted alone below, with its own answer
        log.warning(
            "attempts are aborted one by one",
            extra={"sink": sink.name, "reason": reason_of(error)},
        )
        return ()
    reach(CrashPoint.RECOVER_ABORT_AFTER, sink.name)
    return together


class Unsettled(SemelError):
    """A sink did not do what recovery asked."""

    def __init__(self, sink: str, txn: str, act: str, reason: str) -> None:
        super().__init__(sink, txn, act, reason)
        self.sink = sink
        self.txn = txn
        self.act = act
        self.reason = reason


class SinkBlocksStart(Unsettled, Retryable):
    """A sink did not do what recovery asked, and may do so later."""

    def __str__(self) -> str:
        return (
            f"recovery of {self.txn}: sink {self.sink!r} did not {self.act}: {self.reason}; "
            f"the start waits for it, nothing is lost"
        )


class CycleStuck(Unsettled, NeedsOperator):
    """A sink can never do what the decision demands."""

    def __str__(self) -> str:
        return (
            f"recovery of {self.txn}: sink {self.sink!r} cannot {self.act}: {self.reason}; "
            f"see `semel doctor`, then `semel cycle resolve`"
        )


def unsettled(
    sink: TwoPhaseSink, txn: SinkTxnId, outcome: SinkOutcome, act: str
) -> Unsettled | None:
    """Return the error for an outcome that is not OK."""
    match outcome:
        case SinkOK():
            return None
        case SinkRetryable(reason):
            return SinkBlocksStart(sink.name, str(txn), act, reason)
        case SinkFatal(reason):
            return CycleStuck(sink.name, str(txn), act, reason)


class RecoveryDecision(StrEnum):
    """What is done with a transaction that a sink still holds."""

    COMMIT_FROM_TOKEN = "CommitFromToken"
    ABORT_FROM_TOKEN = "AbortFromToken"
    UNKNOWN_LEAVE_AS_IS = "UnknownLeaveAsIs"


class LedgerSays(StrEnum):
    """The ledger's answer about a transaction that a sink holds."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNDECIDED = "undecided, and its owner is fenced"
    BELOW_MARK = "not known, at or below the mark"
    NOTHING = "not known"


DECIDE: Final[Mapping[LedgerSays, RecoveryDecision]] = {
    LedgerSays.COMMITTED: RecoveryDecision.COMMIT_FROM_TOKEN,
    LedgerSays.ABORTED: RecoveryDecision.ABORT_FROM_TOKEN,
    LedgerSays.UNDECIDED: RecoveryDecision.ABORT_FROM_TOKEN,  # after winning ABORT
    LedgerSays.BELOW_MARK: RecoveryDecision.ABORT_FROM_TOKEN,  # another attempt was taken
    LedgerSays.NOTHING: RecoveryDecision.UNKNOWN_LEAVE_AS_IS,
}
"""The recovery table.  The docs print it from here."""


@dataclass(frozen=True, slots=True)
class SettledTxn:
    """One transaction of one sink, and what was (or would be) done with it."""

    sink: str
    txn: SinkTxnId
    says: LedgerSays
    decision: RecoveryDecision


@dataclass(slots=True)
class RecoveryReport:
    """What recovery did."""

    settled: list[SettledTxn] = field(default_factory=list)
    finished: list[SinkTxnId] = field(default_factory=list)
    """Attempts that were carried through."""

    aborted: list[SinkTxnId] = field(default_factory=list)
    """Attempts that were given up."""

    swept: dict[str, int] = field(default_factory=dict)
    """By sink: the number of losing attempts whose staged data was removed."""

    @property
    def left_as_is(self) -> list[SettledTxn]:
        """The transactions that only a person can settle."""
        unknown = RecoveryDecision.UNKNOWN_LEAVE_AS_IS
        return [settled for settled in self.settled if settled.decision is unknown]


def what_ledger_says(
    ledger: Ledger, scope: Scope, txns: Iterable[SinkTxnId]
) -> dict[SinkTxnId, LedgerSays]:
    """Look up every one of *txns*; changes nothing."""
    mark = mark_of(ledger, scope)
    says = {}
    for txn in txns:
        known = ledger.attempt(txn) if txn.scope == scope else None
        if known is None:
            below = txn.scope == scope and mark is not None and txn.cycle <= mark.cycle
            says[txn] = LedgerSays.BELOW_MARK if below else LedgerSays.NOTHING
        elif known.state is CycleState.ABORTED:
            says[txn] = LedgerSays.ABORTED
        elif known.state.is_committed:
            says[txn] = LedgerSays.COMMITTED
        else:
            says[txn] = LedgerSays.UNDECIDED
    return says


def recover(
    ledger: Ledger,
    lease: ScopeLease,
    sinks: Sequence[TwoPhaseSink],
    *,
    backoff: Backoff = COMMIT_BACKOFF,
    events: Events = EVENTS,
    clock: Clock = SYSTEM_CLOCK,
) -> RecoveryReport:
    """Fence every sink, then settle all that the scope's earlier owners left.

    Raises:
        Retryable: a sink or the ledger did not answer; the start must wait.
        Fenced: a newer owner exists.
        NeedsOperator: records contradict each other, or a promised sink is not configured.
    """
    named = {sink.name: sink for sink in sinks}
    return _Recovery(ledger, lease, named, backoff, events, clock).run()


@dataclass
class _Recovery:
    _ledger: Ledger
    _lease: ScopeLease
    _sinks: Mapping[str, TwoPhaseSink]
    _backoff: Backoff
    _events: Events
    _clock: Clock
    _report: RecoveryReport = field(default_factory=RecoveryReport)
    _unsettled: list[Unsettled] = field(default_factory=list)

    @property
    def _scope(self) -> Scope:
        return self._lease.scope

    def run(self) -> RecoveryReport:
        # Before anything is written at a place that may be wrong.
        places = check_places(self._ledger, self._scope, list(self._sinks.values()))
        is_adopted = check_ledger(self._ledger, self._scope, self._sinks.values())
        # Then fence: after this an older owner can no longer change what recovery reads.
        for sink in self._sinks.values():
            reach(CrashPoint.FENCE_BEFORE, sink.name)
            sink.fence(self._scope, self._lease.epoch)
            reach(CrashPoint.FENCE_AFTER, sink.name)
        check_marks(self._ledger, self._scope, self._sinks.values())
        if is_adopted:
            accept_ledgers(self._ledger, self._scope, self._sinks.values())
        if places != places_of(self._ledger, self._scope):
            why = "the first start with these sinks"
            self._ledger.record_act(self._scope, "semel", PLACES, why, {"places": places})
        for sink in self._sinks.values():
            if missed := missed_cycles(self._ledger, self._scope, sink):
                ends = str(missed[0]), str(missed[-1])
                self._events.emit(SinkReturned(str(self._scope), sink.name, len(missed), *ends))
        losers, winners = self._decided(self._ledger.open_attempts(self._scope))
        for sink in self._sinks.values():
            given_up = {a.txn: a.tokens.get(sink.name) for a in losers}
            self._abort_all(sink, given_up, dict.fromkeys(given_up, LedgerSays.UNDECIDED))
        for attempt in losers:
            self._name_out_of_reach(attempt)
            self._report.aborted.append(attempt.txn)
        self._tell_stranded(winners)
        for attempt in winners:
            if not self._carry_through(attempt):
                break  # a later cycle must not become visible before this one
        self._stop_if_unsettled()
        for name in {name for attempt in winners for name in attempt.tokens}:
            self._events.emit(SinkStranded(str(self._scope), name, 0, 0.0))
        for sink in self._sinks.values():
            self._settle_held(sink)
        self._stop_if_unsettled()
        self._report.swept = sweep(
            self._ledger, self._scope, list(self._sinks.values()), self._events
        )
        return self._report

    def _tell_stranded(self, winners: Sequence[AttemptRecord]) -> None:
        """Emit how many committed cycles each sink may not show yet, before they are settled."""
        now = self._clock.now()
        decided: dict[str, list[float]] = {}
        for attempt in winners:
            for sink in attempt.tokens:
                decided.setdefault(sink, []).append(attempt.decided_at or now)
        for sink, times in decided.items():
            oldest = max(0.0, now - min(times))
            self._events.emit(SinkStranded(str(self._scope), sink, len(times), oldest))

    def _decided(
        self, left: Sequence[AttemptRecord]
    ) -> tuple[list[AttemptRecord], list[AttemptRecord]]:
        """Win ABORT for every undecided attempt; return the losers and the committed attempts."""
        reason = "recovery: its owner is fenced"
        won = set(self._ledger.abort_undecided(self._lease, reason))
        losers: list[AttemptRecord] = []
        winners: list[AttemptRecord] = []
        for attempt in left:
            has_lost = attempt.txn in won
            if not has_lost and attempt.state is not CycleState.COMMITTED:
                self._refuse_newer(attempt)
                has_lost = self._ledger.decide_abort(attempt.txn, reason) is Decision.ABORT
                # If COMMIT won, the record now holds the tokens that the list lacked.
                attempt = self._ledger.attempt(attempt.txn) or attempt
            (losers if has_lost else winners).append(attempt)
        return losers, winners

    def _stop_if_unsettled(self) -> None:
        """Raise the first error of a sink, one that needs a person before a retryable one."""
        if self._unsettled:
            raise max(self._unsettled, key=lambda error: isinstance(error, CycleStuck))

    def _name_out_of_reach(self, attempt: AttemptRecord) -> None:
        """Report sinks that may hold a part of an aborted attempt but are no longer configured."""
        for name in sorted(set(attempt.tokens) - set(self._sinks)):
            reason = (
                f"sink {name!r} is no longer configured and may hold {attempt.txn}, which is "
                f"aborted: configure it again and start, or remove its staged data by hand"
            )
            log.warning(reason, extra={"scope": str(self._scope), "sink": name})
            unknown = RecoveryDecision.UNKNOWN_LEAVE_AS_IS
            self._note(name, attempt.txn, LedgerSays.UNDECIDED, unknown, reason)

    def _carry_through(self, attempt: AttemptRecord) -> bool:
        """Commit in every sink, even if others fail; return whether the cycle is finished."""
        before = len(self._unsettled)
        for group in in_groups(self._sinks.values(), attempt.tokens):
            self._commit(group, attempt)
        missing = sorted(set(attempt.tokens) - set(self._sinks))
        if missing:
            raise NeedsOperator(
                f"cycle {attempt.txn.cycle} is committed, and sink {missing[0]!r} has prepared it "
                f"but is not configured: configure it again, or see `semel cycle resolve`"
            )
        if len(self._unsettled) > before:
            return False
        reach(CrashPoint.RECOVER_FINISH_BEFORE)
        self._ledger.finish(self._lease, attempt.txn)
        reach(CrashPoint.RECOVER_FINISH_AFTER)
        self._report.finished.append(attempt.txn)
        return True

    def _settle_held(self, sink: TwoPhaseSink) -> None:
        held = sink.recover(self._scope)
        given_up: dict[SinkTxnId, Token | None] = {}
        known = what_ledger_says(self._ledger, self._scope, held)
        for txn, says in known.items():
            decision = DECIDE[says]
            if says is LedgerSays.UNDECIDED:
                self._refuse_newer(self._ledger.attempt(txn))
                standing = self._ledger.decide_abort(txn, "recovery: held by a sink, owner fenced")
                if standing is Decision.COMMIT:
                    decision = RecoveryDecision.COMMIT_FROM_TOKEN
            record = self._ledger.attempt(txn)
            if decision is RecoveryDecision.UNKNOWN_LEAVE_AS_IS:
                self._note(sink.name, txn, says, decision, "not in this ledger; left as it is")
            elif decision is RecoveryDecision.COMMIT_FROM_TOKEN and record is not None:
                self._commit((sink,), record)
            else:
                given_up[txn] = record.tokens.get(sink.name) if record else None
        self._abort_all(sink, given_up, known)

    def _refuse_newer(self, attempt: AttemptRecord | None) -> None:
        """Raise if the attempt belongs to a newer owner: this process was fenced while stopped."""
        if attempt is not None and attempt.epoch > self._lease.epoch:
            raise LeaseLost(str(self._scope), self._lease.epoch, attempt.epoch)

    def _commit(self, group: Group, attempt: AttemptRecord) -> None:
        tokens = {sink.name: attempt.tokens.get(sink.name, {}) for sink in group}
        for sink in group:
            reach(CrashPoint.RECOVER_COMMIT_BEFORE, sink.name)
        outcomes = commit_with_retries(
            group, attempt.txn, tokens, self._backoff, self._events, self._clock
        )
        decision = RecoveryDecision.COMMIT_FROM_TOKEN
        for sink in group:
            reach(CrashPoint.RECOVER_COMMIT_AFTER, sink.name)
            error = unsettled(sink, attempt.txn, outcomes[sink.name], "commit")
            if error is not None:
                self._unsettled.append(error)
                continue
            why = "the decision is COMMIT"
            self._note(sink.name, attempt.txn, LedgerSays.COMMITTED, decision, why)

    def _abort_all(
        self,
        sink: TwoPhaseSink,
        tokens: Mapping[SinkTxnId, Token | None],
        says: Mapping[SinkTxnId, LedgerSays],
    ) -> None:
        decision = RecoveryDecision.ABORT_FROM_TOKEN
        for txn, outcome in abort_all(sink, tokens):
            if (error := unsettled(sink, txn, outcome, "abort")) is not None:
                self._unsettled.append(error)
            else:
                self._note(sink.name, txn, says[txn], decision, "the decision is ABORT")

    def _note(
        self,
        sink: str,
        txn: SinkTxnId,
        says: LedgerSays,
        decision: RecoveryDecision,
        reason: str,
    ) -> None:
        self._report.settled.append(SettledTxn(sink, txn, says, decision))
        self._events.emit(CycleRecovered(str(self._scope), str(txn.cycle), sink, decision, reason))


def sweep(
    ledger: Ledger, scope: Scope, sinks: Sequence[TwoPhaseSink], events: Events = EVENTS
) -> dict[str, int]:
    """Remove the staged data of losing attempts; return the number of attempts by sink."""
    verdict = is_loser(ledger, scope)
    swept = {}
    for sink in sinks:
        reach(CrashPoint.SWEEP_BEFORE, sink.name)
        gone = sink.sweep(scope, verdict)
        reach(CrashPoint.SWEEP_AFTER, sink.name)
        if gone:
            swept[sink.name] = len(gone)
            events.emit(LeavingsSwept(str(scope), sink.name, len(gone)))
    return swept
