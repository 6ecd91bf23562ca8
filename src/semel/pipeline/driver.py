"""The driver: one process that owns a scope, recovers it and runs its cycles.

    start: acquire ──▶ fence ──▶ recover      run_cycle: attempt, and again while aborted

Spark's `ExactlyOnce` uses a driver; a program without Spark can do so directly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, LeaseHeld, LeaseLost, Misuse, NeedsOperator, reason_of
from semel.events import (
    EVENTS,
    CycleEnded,
    Events,
    LeaseEnded,
    LeaseTaken,
    RowsRejected,
    SinkStranded,
    log,
)
from semel.lease import Owner, Takeover
from semel.pipeline.cycle import (
    AbortAnswer,
    CommitAborted,
    CommitAnswer,
    CommitFatal,
    CommitSucceeded,
    SinkAnswer,
    run_commit_cycle,
)
from semel.pipeline.generation import note_topics
from semel.pipeline.ledger import AttemptRecord, CycleState, Decision, Ledger, ScopeLease
from semel.pipeline.recovery import RecoveryReport, recover, sweep
from semel.pipeline.sink import (
    REJECTED,
    OwnsItsPlace,
    Receipt,
    SinkOK,
    Token,
    TwoPhaseSink,
    tally_of,
)
from semel.pipeline.source import BatchRange, discontinuities
from semel.pipeline.twophase import (
    COMMIT_BACKOFF,
    Backoff,
    Each,
    commit_with_retries,
    concurrently,
    in_groups,
    with_two_phase_sinks,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId, checked_name

Stage: TypeAlias = Callable[[SinkTxnId], Mapping[str, Sequence[Receipt]]]
"""Runs the processing for one attempt; returns the winning receipts by sink name."""


REASON_LENGTH: Final = 1000


@dataclass
class LedgerCoordinator:
    """One attempt at one cycle, recorded and decided in a ledger.

    It has no answers of sinks: `with_two_phase_sinks` adds them.
    """

    ledger: Ledger
    lease: ScopeLease
    txn: SinkTxnId
    stage: Stage
    read_range: Callable[[], BatchRange]
    receipts: Mapping[str, Sequence[Receipt]] = field(default_factory=dict)
    """Those of the winning tasks, by sink."""

    rejected: Mapping[str, int] = field(default_factory=dict)
    """By sink: the rows that can never be written, and are in its reject table."""

    @property
    def label(self) -> str:
        return str(self.txn.cycle)

    @property
    def scope_label(self) -> str:
        return str(self.txn.scope)

    @property
    def row_counts(self) -> Mapping[str, int]:
        return {name: tally_of(receipts).rows for name, receipts in self.receipts.items()}

    def begin_txn(self) -> None:
        self.ledger.plan(self.lease, self.txn)

    def flush(self) -> None:
        self.receipts = self.stage(self.txn)

    def commit_offsets(self) -> None:
        self.ledger.set_range(self.lease, self.txn, self.read_range())

    def pre_commit_2pc(self) -> Sequence[SinkAnswer]:
        return ()

    def keep_tokens(self, txn: SinkTxnId, tokens: Mapping[str, Token]) -> None:
        self.rejected = {
            name: rows for name, token in tokens.items() if (rows := token.get(REJECTED, 0))
        }
        self.ledger.set_prepared(self.lease, txn, tokens, self.row_counts)

    def commit_txn(self) -> CommitAnswer:
        """Decide COMMIT, with the new positions, in one ledger transaction."""
        self.ledger.decide_commit(self.lease, self.txn)
        return CommitAnswer.COMMITTED

    def commit_2pc(self) -> Sequence[SinkAnswer]:
        return ()

    def store_commit(self) -> None:
        """Close the cycle and raise the mark."""
        self.ledger.finish(self.lease, self.txn)

    def abort_txn(self, reason: str) -> AbortAnswer:
        # A reason may carry the trace of a JVM; the log has the whole of it.
        decision = self.ledger.decide_abort(self.txn, reason[:REASON_LENGTH])
        return AbortAnswer.WON if decision is Decision.ABORT else AbortAnswer.LOST

    def store_abort(self) -> None:
        self.receipts = {}

    def abort_2pc(self) -> Sequence[SinkAnswer]:
        return ()


class Heartbeat:
    """Renews a driver's lease in the background until it is stopped or the lease is lost.

    When *is_active* returns False, the query has ended and the lease is released, so that
    no successor waits for a process that runs on without its query.
    """

    def __init__(
        self,
        ledger: Ledger,
        lease: ScopeLease,
        events: Events = EVENTS,
        is_active: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ledger = ledger
        self._lease = lease
        self._events = events
        self._is_active = is_active
        self._stop = threading.Event()
        self.lost = False
        self._thread = threading.Thread(
            target=self._run, name=f"semel-lease-{lease.scope}", daemon=True
        )

    def start(self) -> Heartbeat:
        """Begin to renew."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop renewing and wait for a renewal under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._lease.seconds)

    def _run(self) -> None:
        # A third of the lease, so that two renewals may fail before it is lost.
        while not self._stop.wait(self._lease.seconds / 3):
            try:
                if not self._is_active():
                    self._ledger.release(self._lease)
                    return
                self._ledger.renew(self._lease)
            except LeaseLost:
                self.lost = True
                self._events.emit(LeaseEnded(str(self._lease.scope), self._lease.epoch, "lost"))
                return
            except Exception as error:  # noqa: BLE001  the decision checks the epoch anyway
                reason = reason_of(error)
                log.warning("lease not renewed", extra={"reason": reason})


@dataclass(frozen=True, slots=True)
class CycleReplayed:
    """The cycle was committed before; its sinks are finished and no row was staged."""

    txn: SinkTxnId


CycleOutcome: TypeAlias = CommitSucceeded | CycleReplayed | CommitAborted | CommitFatal


CYCLE_BACKOFF: Final = Backoff(tries=3, first_seconds=0.5)
"""Three attempts at a cycle; after a longer outage the query must be started again."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How long a driver waits, how often it retries, and how much it keeps."""

    lease_seconds: float = 30.0
    takeover: Takeover = Takeover.WAIT
    cycle_backoff: Backoff = CYCLE_BACKOFF
    """How many attempts an aborted cycle gets before the batch fails, and the pauses."""

    commit_backoff: Backoff = COMMIT_BACKOFF
    """How often a refused commit is tried in place."""

    interval_seconds: float | None = None
    """The time between cycles, if fixed; a commit that takes a large part of it is reported."""

    keep_cycles: int = 1000
    """How many finished cycles the ledger remembers."""

    tidy_every: int = 50
    """After how many cycles staged data of lost attempts is swept and the ledger pruned."""


class Driver:
    """The owner of one scope, until another process takes it over."""

    def __init__(
        self,
        app: str,
        ledger: Ledger,
        sinks: Sequence[TwoPhaseSink],
        query: str = "main",
        *,
        settings: Settings | None = None,
        owner: Owner | None = None,
        each: Each = concurrently,
        new_attempt: Callable[[CycleId], SinkTxnId] = CycleId.attempt,
        events: Events = EVENTS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        names = [checked_name("sink", sink.name) for sink in sinks]
        if not names:
            raise Misuse("a pipeline needs at least one sink")
        if len(set(names)) < len(names):
            raise Misuse(f"two sinks have the same name among {names}; give each its own name=")
        places = [sink.place for sink in sinks if isinstance(sink, OwnsItsPlace)]
        if len(set(places)) < len(places):
            raise Misuse(f"two sinks write to the same place among {places}; give each its own")
        self.ledger = ledger
        self.sinks = tuple(sinks)
        in_groups(self.sinks)
        self.settings = settings or Settings()
        self.scope = Scope(ledger.ledger_id, app, query)
        self._owner = owner or Owner.here()
        self._each = each
        self._new_attempt = new_attempt
        self._events = events
        self._clock = clock
        self._lease: ScopeLease | None = None
        self._is_recovered = False
        self._cycles = 0

    @property
    def lease(self) -> ScopeLease:
        """This process's lease.

        Raises:
            Misuse: `start` has not been called, or did not succeed.
        """
        if self._lease is None or not self._is_recovered:
            raise Misuse(f"scope {self.scope}: call start() before running cycles")
        return self._lease

    @property
    def is_started(self) -> bool:
        """Whether cycles may be run."""
        return self._is_recovered

    def start(self) -> RecoveryReport:
        """Become the owner and settle what earlier owners left.

        Waits once for another owner's lease to end; an owner that renews it is alive.  May be
        repeated, also after a crash or a fatal outcome.

        Raises:
            LeaseHeld: another process owns the scope and is alive.
            Retryable, Fenced, NeedsOperator: see `recover`.
        """
        self._is_recovered = False
        self._lease = self._acquire()
        reach(CrashPoint.ACQUIRE_AFTER)
        try:
            report = recover(
                self.ledger,
                self._lease,
                self.sinks,
                backoff=self.settings.commit_backoff,
                events=self._events,
                clock=self._clock,
            )
        except Exception:
            self._release_after_failure()
            raise
        self._is_recovered = True
        # Also here: a process that runs only a few cycles never reaches `tidy_every`.
        self._tidying("prune", self._prune)
        return report

    def _release_after_failure(self) -> None:
        """Let a successor start at once: this owner has nothing under way."""
        try:
            self.stop()
        except Exception as error:  # noqa: BLE001  the lease ends by itself, and the cause matters more
            log.warning("release failed", extra={"reason": reason_of(error)})

    def stop(self) -> None:
        """Release the scope and the sinks' connections."""
        lease, self._lease = self._lease, None
        self._is_recovered = False
        try:
            for sink in self.sinks:
                sink.close()
        finally:
            if lease is not None:
                self.ledger.release(lease)
                self._events.emit(LeaseEnded(str(self.scope), lease.epoch, "released"))

    def run_cycle(
        self, cycle: CycleId, read_range: Callable[[], BatchRange], stage: Stage
    ) -> CycleOutcome:
        """Carry one batch through, or find that it was committed before.

        After an aborted attempt a new one is made, a bounded number of times.  After a
        fatal outcome `start` must be called again: recovery settles what is stranded.
        """
        known: CycleReplayed | CommitFatal | None
        try:
            known = self._replay(self.lease, cycle, read_range) or self._refusal(read_range)
        except Fenced as error:
            known = CommitFatal(f"fenced: {error}", cause=error)
        except Exception as error:  # noqa: BLE001  the ledger did not answer before any cycle began
            known = CommitFatal(f"begin_txn: {reason_of(error)}", cause=error)
        if isinstance(known, CommitFatal):
            self._events.emit(CycleEnded(str(self.scope), str(cycle), "fatal", known.reason))
        outcome = known or self._attempts(cycle, read_range, stage)
        if isinstance(outcome, CommitFatal):
            for sink, _ in outcome.stranded:
                self._events.emit(SinkStranded(str(self.scope), sink, 1, 0.0))
            outcome = self._or_fenced(outcome)
            if isinstance(outcome.cause, Fenced) and self._lease is not None:
                self._events.emit(LeaseEnded(str(self.scope), self._lease.epoch, "lost"))
                self._lease = None
            self._is_recovered = False
        self._tidy(outcome)
        return outcome

    def _or_fenced(self, outcome: CommitFatal) -> CommitFatal:
        """Return *outcome* as fenced if a newer owner is the cause of a sink's refusal."""
        if self._lease is None or isinstance(outcome.cause, Fenced):
            return outcome
        try:
            self.ledger.renew(self._lease)
        except Fenced as error:
            return replace(outcome, reason=f"fenced: {error} ({outcome.reason})", cause=error)
        except Exception as error:  # noqa: BLE001  only a check; the outcome is fatal without it, too
            log.warning("renewal failed", extra={"scope": str(self.scope), "reason": str(error)})
        return outcome

    def _acquire(self) -> ScopeLease:
        deadline: float | None = None
        while True:
            before = self.ledger.scope_record(self.scope)
            try:
                lease = self.ledger.acquire(
                    self.scope, self._owner, self.settings.lease_seconds, self.settings.takeover
                )
            except LeaseHeld as held:
                now = self._clock.monotonic()
                if deadline is None:
                    deadline = now + held.seconds_left + 1.0
                if now >= deadline:
                    raise
                self._clock.sleep(min(0.5, max(0.05, held.seconds_left)))
                continue
            old = str(before.owner) if before and before.owner else ""
            self._events.emit(LeaseTaken(str(self.scope), lease.epoch, str(self._owner), old))
            return lease

    def _replay(
        self, lease: ScopeLease, cycle: CycleId, read_range: Callable[[], BatchRange]
    ) -> CycleReplayed | CommitFatal | None:
        record = self.ledger.committed(cycle)
        if record is None:
            return None
        self.ledger.renew(lease)  # raises if fenced: the sinks belong to the successor then
        digest = read_range().digest
        if record.range is not None and record.range.digest != digest:
            return CommitFatal(
                f"begin_txn: cycle {cycle} was committed with another source range (digest "
                f"{record.range.digest[:12]}, now {digest[:12]}): another checkpoint wrote it; "
                f"nothing was written"
            )
        if record.state is not CycleState.FINISHED:
            stranded = self._carry_through(record)
            if stranded is not None:
                return stranded
        self._events.emit(CycleEnded(str(self.scope), str(cycle), "replayed"))
        return CycleReplayed(record.txn)

    def _refusal(self, read_range: Callable[[], BatchRange]) -> CommitFatal | None:
        """Refuse before staging a range that the ledger would refuse at the decision."""
        try:
            batch = read_range()
        except Exception:  # noqa: BLE001  commit_offsets reads it again and says what failed
            return None
        found = discontinuities(self.ledger.positions(self.scope, batch), batch)
        if not found:
            return None
        note_topics(self.ledger, self.scope, batch)
        reason = (
            f"begin_txn: the batch does not start where the ledger ends: {'; '.join(found)}; "
            f"see `semel status`, and `semel adopt` to accept it"
        )
        return CommitFatal(reason, cause=NeedsOperator(reason))

    def _carry_through(self, record: AttemptRecord) -> CommitFatal | None:
        left: dict[str, str] = {}
        for group in in_groups(self.sinks, record.tokens):
            outcomes = commit_with_retries(
                group,
                record.txn,
                record.tokens,
                self.settings.commit_backoff,
                self._events,
                self._clock,
            )
            for name, outcome in outcomes.items():
                if not isinstance(outcome, SinkOK):
                    left[name] = outcome.reason
        if left:
            reason = "; ".join(f"{name}: {why}" for name, why in left.items())
            return CommitFatal(f"commit_2pc: {reason}", tuple((name, record.txn) for name in left))
        self.ledger.finish(self.lease, record.txn)
        return None

    def _attempts(
        self, cycle: CycleId, read_range: Callable[[], BatchRange], stage: Stage
    ) -> CommitSucceeded | CommitAborted | CommitFatal:
        tries = self.settings.cycle_backoff.tries
        for number in range(1, tries + 1):
            outcome = self._attempt(cycle, read_range, stage)
            if not isinstance(outcome, CommitAborted) or number == tries:
                break
            self._clock.sleep(self.settings.cycle_backoff.wait_seconds(number))
            self._tidying("sweep", self._sweep)
        return outcome

    def _attempt(
        self, cycle: CycleId, read_range: Callable[[], BatchRange], stage: Stage
    ) -> CommitSucceeded | CommitAborted | CommitFatal:
        txn = self._new_attempt(cycle)
        base = LedgerCoordinator(self.ledger, self.lease, txn, stage, read_range)
        coordinator = with_two_phase_sinks(
            base,
            self.sinks,
            lambda txn, sink: base.receipts.get(sink, ()),
            lambda: txn,
            backoff=self.settings.commit_backoff,
            each=self._each,
            events=self._events,
            clock=self._clock,
        )
        outcome = run_commit_cycle(
            coordinator,
            interval_seconds=self.settings.interval_seconds,
            events=self._events,
            clock=self._clock,
        )
        if isinstance(outcome, CommitSucceeded):
            for sink, rows in base.rejected.items():
                self._events.emit(RowsRejected(str(self.scope), str(cycle), sink, rows))
        return outcome

    def _tidy(self, outcome: CycleOutcome) -> None:
        self._cycles += 1
        due = self._cycles % self.settings.tidy_every == 0
        if due and isinstance(outcome, CommitSucceeded):
            self._tidying("sweep", self._sweep)
            self._tidying("prune", self._prune)

    def _sweep(self) -> None:
        sweep(self.ledger, self.scope, self.sinks, self._events)

    def _prune(self) -> None:
        self.ledger.prune(self.scope, self.settings.keep_cycles)

    def _tidying(self, what: str, call: Callable[[], None]) -> None:
        """Sweep or prune; after an error, which is logged, the next time tries again."""
        try:
            call()
        except Exception as error:  # noqa: BLE001  no cycle may fail because of tidying
            reason = reason_of(error)
            log.warning(f"{what} failed", extra={"scope": str(self.scope), "reason": reason})
