"""A simulated world in which processes die, but source, checkpoint, ledger and sinks stay.

It contains the oracle, too, which compares the source's rows with what the sinks
show and keep, the ledger's decisions and its positions.  It uses neither the
cycle nor recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import count
from typing import Any, Final

from semel.crashpoints import CrashPoint, reach
from semel.errors import Fenced, Retryable, SemelError
from semel.events import Events
from semel.lease import Owner, Takeover
from semel.memory.ledger import MemoryLedger
from semel.pipeline.cycle import CommitAborted, CommitFatal
from semel.pipeline.driver import CycleOutcome, Driver, Settings
from semel.pipeline.ledger import is_loser
from semel.pipeline.sink import Batch, TwoPhaseSink
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff, one_by_one
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.testing.clock import SimulatedClock
from semel.testing.faults import Fault, FaultPlan, faulty_ledger, faulty_sink
from semel.testing.local import local_stage
from semel.testing.sink_audit import key_of

APP: Final = "simulated"
LEDGER: Final = "ledger"
"""The ledger's name among the things that can fail; no sink may have it."""

# More starts and more runs of a batch than two faults and two crashes can cost: a driver
# that needs more makes no progress.
MOST_TRIES: Final = 8


IMPATIENT: Final = Settings(
    lease_seconds=10.0,
    cycle_backoff=Backoff(tries=2),
    commit_backoff=Backoff(tries=2),
    tidy_every=2,
)
"""Few tries, so that histories are short, and much tidying, so that it is in them."""


class Invariant(StrEnum):
    """What holds in every history."""

    ONLY_COMMITTED = "every visible row belongs to a committed cycle"
    ALL_COMMITTED = "every committed cycle's rows are visible in every sink after recovery"
    NOTHING_TWICE = "nothing is visible twice"
    NOTHING_LEFT = "nothing staged or held is left behind"
    POSITIONS = "positions equal the committed ranges"
    PROGRESS = "in the end every row of the source is visible"
    FENCED = "an owner that was fenced changes nothing more"


class Violation(AssertionError):
    """An invariant does not hold; the history says how to get there again."""

    def __init__(self, invariant: Invariant, what: str) -> None:
        super().__init__(invariant, what)
        self.invariant = invariant
        self.what = what
        self.history = ""

    def __str__(self) -> str:
        return f"violated: {self.invariant}\n  {self.what}\n  history: {self.history}"


@dataclass
class World:
    """What outlives the processes; every process makes its own objects on top of it."""

    batches: Sequence[Sequence[Any]]
    make_sinks: Callable[[], Sequence[TwoPhaseSink]]
    """Makes new objects for the same destinations, as a process does that starts."""

    visible_rows: Callable[[TwoPhaseSink], Sequence[Any]]
    left_behind: Callable[[TwoPhaseSink], Sequence[object]] | None = None
    """Lists what a sink keeps and does not show; None asks the sink itself."""

    as_batch: Callable[[Sequence[Any]], Batch] = list
    faults: Mapping[str, Sequence[Fault]] = field(default_factory=dict)
    """By sink's name, and by `LEDGER`."""

    tasks: int = 1
    settings: Settings = IMPATIENT

    def __post_init__(self) -> None:
        self.clock = SimulatedClock()
        self.ledger = MemoryLedger(self.clock, ledger_id="simulated-ledger")
        self.scope = Scope(self.ledger.ledger_id, APP, "main")
        self.finished: set[int] = set()
        """The checkpoint: batches that need not be run again."""

        self.attempts: list[SinkTxnId] = []
        self._numbers = count(1)
        self._sinks = self.make_sinks()  # the oracle's own eyes
        names = [sink.name for sink in self._sinks]
        self.plans = {n: FaultPlan(list(self.faults.get(n, ()))) for n in [LEDGER, *names]}
        self._ends = [0]
        for batch in self.batches:
            self._ends.append(self._ends[-1] + len(batch))
        self._batch_of = {key_of(row): n for n, rows in enumerate(self.batches) for row in rows}

    def driver(self, takeover: Takeover = Takeover.WAIT) -> Driver:
        """Make what a new process would have: its own driver, sinks and connections."""
        number = next(self._numbers)
        # A host of its own, so that only the end of the lease shows that the owner is gone.
        owner = Owner(f"host-{number}", "boot", number, "0", f"instance-{number}")
        sinks = [faulty_sink(sink, plan=self.plans[sink.name]) for sink in self.make_sinks()]
        return Driver(
            APP,
            faulty_ledger(self.ledger, plan=self.plans[LEDGER]),
            sinks,
            settings=replace(self.settings, takeover=takeover),
            owner=owner,
            each=one_by_one,
            new_attempt=self._new_attempt,
            events=Events(),
            clock=self.clock,
        )

    def _new_attempt(self, cycle: CycleId) -> SinkTxnId:
        self.attempts.append(cycle.attempt(f"a{len(self.attempts) + 1}"))
        return self.attempts[-1]

    def is_owner(self, driver: Driver) -> bool:
        """Return whether the scope was not taken over from *driver*."""
        scope = self.ledger.scope_record(self.scope)
        return scope is not None and scope.epoch == driver.lease.epoch

    def range_of(self, batch: int) -> BatchRange:
        """Return what *batch* reads."""
        return BatchRange.of_offsets({"": (self._ends[batch], self._ends[batch + 1])})

    def next_batch(self) -> int | None:
        """Return the batch that the checkpoint runs next; None when the source is done."""
        return next((n for n in range(len(self.batches)) if n not in self.finished), None)

    def let_lease_end(self) -> None:
        """Let the time pass that a dead owner's successor waits for."""
        self.clock.advance(self.settings.lease_seconds + 1)

    def land_late(self) -> None:
        """Let everything arrive that is still on its way."""
        for plan in self.plans.values():
            plan.land()

    @property
    def calls(self) -> int:
        """How many calls of the ledger and the sinks were made so far."""
        return sum(plan.number for plan in self.plans.values())

    def committed(self) -> set[int]:
        """List the batches whose decision is COMMIT, as the ledger has them in its records."""
        records = self.ledger.history(self.scope, limit=10_000)
        chosen = Counter(r.txn.cycle.batch for r in records if r.state.is_committed)
        twice = [batch for batch, times in chosen.items() if times > 1]
        if twice:
            raise Violation(Invariant.NOTHING_TWICE, f"batch {twice[0]} has two COMMITs")
        scope = self.ledger.scope_record(self.scope)
        mark = scope.mark.cycle.batch if scope and scope.mark else -1
        return {*chosen, *range(mark + 1)}

    def check(self) -> None:
        """Check what holds at every moment."""
        committed = self.committed()
        for sink in self._sinks:
            seen = Counter(key_of(row) for row in self.visible_rows(sink))
            for row, times in seen.items():
                where = f"row {row} in sink {sink.name}"
                if self._batch_of.get(row) not in committed:
                    raise Violation(Invariant.ONLY_COMMITTED, f"{where}; committed: {committed}")
                if times > 1:
                    raise Violation(Invariant.NOTHING_TWICE, f"{where}, {times} times")
        ends = self.ledger.positions(self.scope).ends.values()
        end = max((position.end for position in ends), default=0)
        if committed != set(range(len(committed))) or end != self._ends[len(committed)]:
            what = f"committed batches {sorted(committed)}, the ledger's position is {end}"
            raise Violation(Invariant.POSITIONS, what)

    def check_recovered(self) -> None:
        """Check what holds whenever an owner has started."""
        self.check()
        committed = self.committed()
        for sink in self._sinks:
            seen = {key_of(row) for row in self.visible_rows(sink)}
            for row, batch in self._batch_of.items():
                if batch in committed and row not in seen:
                    what = f"row {row} of batch {batch} is missing in sink {sink.name}"
                    raise Violation(Invariant.ALL_COMMITTED, what)

    def check_final(self) -> None:
        """Check what holds when the source is done and a last start has swept."""
        self.check_recovered()
        if len(self.committed()) < len(self.batches):
            raise Violation(Invariant.PROGRESS, f"committed: {sorted(self.committed())}")
        for sink in self._sinks:
            left = self._left_in(sink)
            if left:
                raise Violation(Invariant.NOTHING_LEFT, f"in sink {sink.name}: {left}")
        still_open = self.ledger.open_attempts(self.scope)
        if still_open:
            raise Violation(Invariant.NOTHING_LEFT, f"in the ledger: {still_open[0].txn}")

    def _left_in(self, sink: TwoPhaseSink) -> Sequence[object]:
        if self.left_behind is not None:
            return self.left_behind(sink)
        swept = sink.sweep(self.scope, is_loser(self.ledger, self.scope))
        return [*sink.recover(self.scope), *swept]


class Process:
    """One start of the program: recover, run what the checkpoint has not, supervised."""

    def __init__(self, world: World, takeover: Takeover = Takeover.WAIT) -> None:
        self._world = world
        self._driver = world.driver(takeover)
        self.outcomes: list[CycleOutcome] = []
        self.last: object = None
        """The last error or outcome."""

    def run(self) -> bool:
        """Run until the source is done; False if it was fenced or could not be done."""
        for _ in range(MOST_TRIES):
            try:
                self._start()
                if self._run_batches():
                    return True
            except (Retryable, OSError) as error:
                self.last = error  # a supervisor waits and starts again
            except SemelError as error:
                self.last = error
                return False  # fenced; or an operator looks, and starts again
        return False

    def _start(self) -> None:
        world = self._world
        self._driver.start()
        if world.is_owner(self._driver):
            world.check_recovered()
        self._driver.ledger.open_generation(self._driver.lease, "checkpoint")

    def _run_batches(self) -> bool:
        world = self._world
        for _ in range(MOST_TRIES * len(world.batches)):
            batch = world.next_batch()
            if batch is None:
                return True
            reach(CrashPoint.SPARK_BATCH_BEFORE)
            outcome = self._driver.run_cycle(
                CycleId(world.scope, 1, batch),
                partial(world.range_of, batch),
                local_stage(
                    self._driver.sinks,
                    world.batches[batch],
                    tasks=world.tasks,
                    as_batch=world.as_batch,
                ),
            )
            self.outcomes.append(outcome)
            self.last = outcome
            if isinstance(outcome, CommitFatal):
                if isinstance(outcome.cause, Fenced):
                    raise outcome.cause
                return False
            if not isinstance(outcome, CommitAborted):
                reach(CrashPoint.SPARK_BATCH_AFTER)
                world.finished.add(batch)
        return False
