"""What a new owner does with everything its predecessor left."""

from __future__ import annotations

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import Fenced, NeedsOperator, Retryable
from semel.events import CycleRecovered, Events, LeavingsSwept
from semel.lease import Owner, Takeover
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.memory.store import MemoryStore
from semel.pipeline.ledger import is_loser
from semel.pipeline.recovery import (
    DECIDE,
    LedgerSays,
    RecoveryDecision,
    recover,
    sweep,
    what_ledger_says,
)
from semel.pipeline.settle import SILENT_IN_A_ROW, CycleStuck, SinkBlocksStart
from semel.pipeline.sink import Found
from semel.pipeline.source import BatchRange
from semel.pipeline.states import CycleState
from semel.pipeline.txn import CycleId, Scope
from semel.testing.clock import SimulatedClock
from semel.testing.crash import Crash, crash_at
from semel.testing.faults import Failing, Fault, FaultPlan, faulty_ledger, faulty_sink
from semel.testing.local import local_stage

ROWS = ["a", "b", "c"]


class Place:
    """A scope whose first owner has stopped somewhere, and a second one that recovers."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.ledger = MemoryLedger(self.clock)
        self.scope = Scope(self.ledger.ledger_id, "app", "main")
        self.stores = {name: MemoryStore(clock=self.clock) for name in ("left", "right")}
        self.sinks = self.new_sinks()
        self.lease = self.take_over()
        self.ledger.open_generation(self.lease, "checkpoint")
        for sink in self.sinks:
            sink.fence(self.scope, self.lease.epoch)
        self.events = Events()
        self.seen = []
        self.events.subscribe(self.seen.append)

    def new_sinks(self):
        return [MemorySink(name, store=store) for name, store in self.stores.items()]

    def take_over(self):
        return self.ledger.acquire(self.scope, Owner.here(), 30.0, Takeover.FORCE)

    def attempt(self, batch: int, state: CycleState, name: str = "a1"):
        """Bring an attempt into *state*, as the first owner."""
        txn = CycleId(self.scope, 1, batch).attempt(name)
        self.ledger.plan(self.lease, txn)
        receipts = local_stage(self.sinks, ROWS)(txn)
        start = batch * len(ROWS)
        self.ledger.set_range(
            self.lease, txn, BatchRange.of_offsets({"": (start, start + len(ROWS))})
        )
        if state is CycleState.PLANNED:
            return txn
        tokens = {s.name: s.prepare(txn, receipts[s.name]).token for s in self.sinks}
        self.ledger.set_prepared(self.lease, txn, tokens, {})
        if state is CycleState.ABORTED:
            self.ledger.decide_abort(txn)
        if state in (CycleState.COMMITTED, CycleState.FINISHED):
            self.ledger.decide_commit(self.lease, txn)
        if state is CycleState.FINISHED:
            for sink in self.sinks:
                sink.commit(txn, tokens[sink.name])
            self.ledger.finish(self.lease, txn)
        return txn

    def recover(self, sinks=None, ledger=None):
        lease = self.take_over()
        return recover(
            ledger or self.ledger,
            lease,
            self.new_sinks() if sinks is None else sinks,
            events=self.events,
            clock=self.clock,
        )

    def found(self, txn):
        return [sink.look_up(txn, None).found for sink in self.sinks]

    @property
    def left(self):
        return [[*store.staged, *store.prepared] for store in self.stores.values()]


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.mark.parametrize("says", LedgerSays)
def test_recovery_has_a_decision_for_everything_the_ledger_can_say(says):
    assert says in DECIDE


def test_only_what_is_committed_is_committed_and_only_the_unknown_is_left():
    commits = [says for says, d in DECIDE.items() if d is RecoveryDecision.COMMIT_FROM_TOKEN]
    leaves = [says for says, d in DECIDE.items() if d is RecoveryDecision.UNKNOWN_LEAVE_AS_IS]

    assert commits == [LedgerSays.COMMITTED]
    assert leaves == [LedgerSays.NOTHING]


def test_an_empty_scope_needs_nothing(place):
    report = place.recover()

    assert (report.settled, report.finished, report.aborted, report.swept) == ([], [], [], {})


def test_a_committed_attempt_is_carried_through(place):
    txn = place.attempt(0, CycleState.COMMITTED)

    report = place.recover()

    assert report.finished == [txn]
    assert place.found(txn) == [Found.VISIBLE, Found.VISIBLE]
    assert place.ledger.attempt(txn).state is CycleState.FINISHED
    assert place.left == [[], []]
    assert [(e.sink, e.decision) for e in place.seen if isinstance(e, CycleRecovered)] == [
        ("left", "CommitFromToken"),
        ("right", "CommitFromToken"),
    ]


@pytest.mark.parametrize("state", [CycleState.PLANNED, CycleState.PREPARED])
def test_an_undecided_attempt_is_given_up_after_winning_the_abort(place, state):
    txn = place.attempt(0, state)

    report = place.recover()

    assert report.aborted == [txn]
    assert place.ledger.attempt(txn).state is CycleState.ABORTED
    assert place.found(txn) == [Found.GONE, Found.GONE]
    assert place.left == [[], []]


def test_what_a_sink_holds_of_an_aborted_attempt_is_dropped(place):
    txn = place.attempt(0, CycleState.ABORTED)

    report = place.recover()

    assert {(s.sink, s.txn, s.says) for s in report.settled} == {
        ("left", txn, LedgerSays.ABORTED),
        ("right", txn, LedgerSays.ABORTED),
    }
    assert place.left == [[], []]


def test_cycles_are_carried_through_in_their_order(place):
    first = place.attempt(0, CycleState.COMMITTED)
    second = place.attempt(1, CycleState.COMMITTED)

    report = place.recover()

    assert report.finished == [first, second]


def test_a_transaction_that_the_ledger_does_not_know_is_left_as_it_is(place):
    stranger = CycleId(place.scope, 1, 7).attempt("stranger")
    sink = place.sinks[0]
    sink.prepare(stranger, local_stage([sink], ROWS)(stranger)["left"])

    report = place.recover()

    assert [(s.sink, s.txn, s.decision) for s in report.left_as_is] == [
        ("left", stranger, RecoveryDecision.UNKNOWN_LEAVE_AS_IS)
    ]
    assert sink.look_up(stranger, None).found is Found.HELD
    assert stranger in place.stores["left"].staged


def test_another_ledgers_transaction_is_not_even_seen(place):
    other = CycleId(Scope("another-ledger", "app", "main"), 1, 0).attempt("a1")
    sink = place.sinks[0]
    sink.prepare(other, local_stage([sink], ROWS)(other)["left"])

    report = place.recover()

    assert report.settled == []
    assert sink.look_up(other, None).found is Found.HELD


def test_an_unknown_attempt_at_or_below_the_mark_belongs_to_a_loser(place):
    place.attempt(0, CycleState.FINISHED)
    place.attempt(1, CycleState.FINISHED)
    sink = place.sinks[0]
    loser = CycleId(place.scope, 1, 0).attempt("loser")
    place.stores["left"].prepared[loser] = next(iter(place.stores["left"].visible.values())).held

    report = place.recover()

    assert [s.says for s in report.settled] == [LedgerSays.BELOW_MARK]
    assert sink.look_up(loser, None).found is Found.GONE


def test_what_the_ledger_says_is_asked_without_changing_anything(place):
    undecided = place.attempt(0, CycleState.PREPARED)
    other_scope = CycleId(Scope("another-ledger", "app", "main"), 1, 0).attempt("a1")

    says = what_ledger_says(place.ledger, place.scope, [undecided, other_scope])

    assert says == {undecided: LedgerSays.UNDECIDED, other_scope: LedgerSays.NOTHING}
    assert place.ledger.attempt(undecided).state is CycleState.PREPARED


@pytest.mark.parametrize("state", [CycleState.COMMITTED, CycleState.PREPARED])
@pytest.mark.parametrize(
    "method", ["fence", "recover", "sweep", "mark"], ids=lambda method: f"{method} does not answer"
)
def test_a_sink_that_does_not_answer_blocks_the_start_and_nothing_is_lost(place, method, state):
    txn = place.attempt(0, state)
    left, right = place.new_sinks()
    broken = faulty_sink(right, Fault(method, Failing.REFUSED))

    with pytest.raises(Retryable):
        place.recover([left, broken])
    place.recover()

    expected = Found.VISIBLE if state is CycleState.COMMITTED else Found.GONE
    assert place.found(txn) == [expected, expected]
    assert place.left == [[], []]


def test_a_sink_that_cannot_commit_now_blocks_the_start(place):
    place.attempt(0, CycleState.COMMITTED)
    left, right = place.new_sinks()
    plan = FaultPlan([Fault("commit", Failing.REFUSED, n) for n in range(1, 10)])

    with pytest.raises(SinkBlocksStart, match=r"'right' did not commit.*nothing is lost"):
        place.recover([left, faulty_sink(right, plan=plan)])

    assert plan.calls["commit"] > 1


def test_a_sink_that_can_never_commit_needs_an_operator(place):
    txn = place.attempt(0, CycleState.COMMITTED)
    left, right = place.new_sinks()

    with pytest.raises(CycleStuck, match="'right' cannot commit") as stuck:
        place.recover([left, faulty_sink(right, Fault("commit", Failing.FATAL))])

    assert isinstance(stuck.value, NeedsOperator)
    assert place.ledger.attempt(txn).state is CycleState.COMMITTED


def test_a_sink_that_has_promised_but_is_not_configured_stops_the_start(place):
    place.attempt(0, CycleState.COMMITTED)
    left, _ = place.new_sinks()

    with pytest.raises(NeedsOperator, match="sink 'right' has promised it but is not configured"):
        place.recover([left])


def test_a_sink_that_holds_an_aborted_attempt_but_is_not_configured_is_named(place, caplog):
    txn = place.attempt(0, CycleState.PREPARED)
    left, _ = place.new_sinks()

    report = place.recover([left])

    assert place.found(txn) == [Found.GONE, Found.HELD]
    assert [(settled.sink, settled.txn) for settled in report.left_as_is] == [("right", txn)]
    assert "sink 'right' is not configured any more" in caplog.text
    place.recover()
    assert place.found(txn) == [Found.GONE, Found.GONE]


def test_a_new_sink_does_not_disturb_recovery(place):
    txn = place.attempt(0, CycleState.COMMITTED)

    place.recover([*place.new_sinks(), MemorySink("new")])

    assert place.found(txn) == [Found.VISIBLE, Found.VISIBLE]


def test_a_ledger_that_is_older_than_its_sinks_is_refused(place):
    place.attempt(0, CycleState.FINISHED)
    restored = MemoryLedger(place.clock, ledger_id=place.ledger.ledger_id)
    for _ in range(3):
        lease = restored.acquire(place.scope, Owner.here(), 30.0, Takeover.FORCE)

    with pytest.raises(NeedsOperator, match="the ledger is older than its sinks"):
        recover(restored, lease, place.new_sinks(), clock=place.clock)


def test_a_ledger_that_knows_another_attempt_as_committed_is_refused(place):
    txn = place.attempt(0, CycleState.FINISHED)
    place.stores["left"].marks[place.scope] = txn.cycle.attempt("other")

    with pytest.raises(NeedsOperator, match="the ledger is older than its sinks"):
        place.recover()


def test_a_mark_that_was_pruned_from_the_ledger_is_fine(place):
    old = place.attempt(0, CycleState.FINISHED)
    place.attempt(1, CycleState.FINISHED)
    place.attempt(2, CycleState.FINISHED)
    place.ledger.prune(place.scope, keep=1)
    place.stores["left"].marks[place.scope] = old

    report = place.recover()

    assert report.settled == []


def test_a_sink_that_has_seen_a_newer_epoch_refuses(place):
    place.sinks[1].fence(place.scope, 99)

    with pytest.raises(Fenced):
        place.recover()


def test_sinks_are_fenced_before_anything_is_read(place):
    left, right = (FaultPlan(), FaultPlan())
    sinks = [faulty_sink(s, plan=p) for s, p in zip(place.new_sinks(), (left, right), strict=True)]

    with crash_at(CrashPoint.FENCE_AFTER, "right"), pytest.raises(Crash):
        place.recover(sinks)

    assert set(left.calls) == set(right.calls) == {"fence"}


def test_an_owner_that_was_overtaken_in_its_recovery_leaves_its_successors_attempt_alone(place):
    sleeper = place.take_over()
    place.lease = place.take_over()
    for sink in place.sinks:
        sink.fence(place.scope, place.lease.epoch)
    txn = place.attempt(0, CycleState.PREPARED)
    sinks = place.new_sinks()
    for sink in sinks:
        sink.fence = lambda scope, epoch: None  # it was stopped after this

    with pytest.raises(Fenced):
        recover(place.ledger, sleeper, sinks, clock=place.clock)

    assert place.ledger.attempt(txn).state is CycleState.PREPARED
    assert place.found(txn) == [Found.HELD, Found.HELD]


RECOVERY_POINTS = [
    point
    for point in CrashPoint
    if point.step.startswith("recover_") or point.step in ("fence", "sweep")
]


@pytest.mark.parametrize("point", RECOVERY_POINTS)
@pytest.mark.parametrize("sink", ["left", "right"])
def test_recovery_may_crash_anywhere_and_be_repeated(place, point, sink):
    committed = place.attempt(0, CycleState.COMMITTED)
    undecided = place.attempt(1, CycleState.PREPARED)
    where = None if point.step == "recover_finish" else sink

    with crash_at(point, where), pytest.raises(Crash):
        place.recover()
    place.recover()
    report = place.recover()

    assert (report.finished, report.aborted, report.swept) == ([], [], {})
    assert place.found(committed) == [Found.VISIBLE, Found.VISIBLE]
    assert place.found(undecided) == [Found.GONE, Found.GONE]
    assert place.left == [[], []]


def test_an_abort_that_the_ledger_does_not_confirm_stops_recovery_before_anything_is_dropped(place):
    txn = place.attempt(0, CycleState.PREPARED)
    silent = faulty_ledger(place.ledger, Fault("abort_undecided", Failing.REFUSED))

    with pytest.raises(Retryable):
        place.recover(ledger=silent)

    assert place.found(txn) == [Found.HELD, Found.HELD]


def test_an_attempt_that_a_sink_does_not_give_up_stops_the_start_but_not_the_others(place):
    committed = place.attempt(0, CycleState.COMMITTED)
    first, second, third = (place.attempt(n, CycleState.PREPARED) for n in (1, 2, 3))
    left, right = place.new_sinks()

    with pytest.raises(SinkBlocksStart, match="did not abort") as blocked:
        place.recover([faulty_sink(left, Fault("abort", Failing.REFUSED)), right])

    assert blocked.value.txn == str(first)
    assert place.found(first) == [Found.HELD, Found.GONE]
    assert place.found(second) == place.found(third) == [Found.GONE, Found.GONE]
    assert place.found(committed) == [Found.VISIBLE, Found.VISIBLE]
    place.recover()
    assert place.left == [[], []]


@pytest.mark.parametrize(
    ("failing", "told"), [(Failing.FATAL, CycleStuck), (Failing.REFUSED, SinkBlocksStart)]
)
def test_a_sink_that_does_not_commit_stops_the_start_but_not_the_other_sinks(place, failing, told):
    txn = place.attempt(0, CycleState.COMMITTED)
    left, right = place.new_sinks()
    faults = [Fault("commit", failing, number) for number in range(1, 5)]

    with pytest.raises(told) as stopped:
        place.recover([faulty_sink(left, *faults), right])

    assert (stopped.value.sink, stopped.value.act) == ("left", "commit")
    assert place.found(txn) == [Found.HELD, Found.VISIBLE]
    assert place.ledger.attempt(txn).state is CycleState.COMMITTED
    assert place.recover().finished == [txn]
    assert place.found(txn) == [Found.VISIBLE, Found.VISIBLE]


def test_a_later_cycle_waits_for_an_earlier_one_that_a_sink_does_not_commit(place):
    first, second = (place.attempt(number, CycleState.COMMITTED) for number in (0, 1))
    left, right = place.new_sinks()

    with pytest.raises(CycleStuck):
        place.recover([faulty_sink(left, Fault("commit", Failing.FATAL, 1)), right])

    assert place.found(first) == [Found.HELD, Found.VISIBLE]
    assert place.found(second) == [Found.HELD, Found.HELD]
    assert place.recover().finished == [first, second]


def test_a_sink_that_is_configured_no_more_does_not_keep_the_others_from_committing(place):
    txn = place.attempt(0, CycleState.COMMITTED)

    with pytest.raises(NeedsOperator, match="'left' has promised it but is not configured"):
        place.recover(place.new_sinks()[1:])

    assert place.found(txn) == [Found.HELD, Found.VISIBLE]
    assert place.ledger.attempt(txn).state is CycleState.COMMITTED


def test_an_attempt_that_only_a_person_can_settle_is_told_before_one_that_can_wait(place):
    waits, stuck = (place.attempt(n, CycleState.PREPARED) for n in (0, 1))
    left, right = place.new_sinks()
    faults = [Fault("abort", Failing.REFUSED, 1), Fault("abort", Failing.FATAL, 2)]

    with pytest.raises(CycleStuck) as told:
        place.recover([faulty_sink(left, *faults), right])

    assert told.value.txn == str(stuck)
    assert place.found(waits) == [Found.HELD, Found.GONE]


def test_a_sink_that_has_fallen_silent_is_not_asked_a_thousand_times(place):
    for number in range(20):
        place.attempt(number, CycleState.PREPARED)
    left, right = place.new_sinks()
    plan = FaultPlan([Fault("abort", Failing.BROKEN, n) for n in range(1, 21)])

    with pytest.raises(SinkBlocksStart):
        place.recover([faulty_sink(left, plan=plan), right])

    assert plan.calls["abort"] == SILENT_IN_A_ROW
    place.recover()
    assert place.left == [[], []]


def test_the_late_tasks_of_an_aborted_attempt_are_swept(place):
    txn = place.attempt(0, CycleState.ABORTED)
    place.recover()
    local_stage(place.sinks, ROWS)(txn)

    swept = sweep(place.ledger, place.scope, place.sinks, place.events)

    assert swept == {"left": 1, "right": 1}
    assert place.left == [[], []]
    assert [e.sink for e in place.seen if isinstance(e, LeavingsSwept)][-2:] == ["left", "right"]


def test_only_losers_are_losers(place):
    finished = place.attempt(0, CycleState.FINISHED)
    committed = place.attempt(1, CycleState.COMMITTED)
    prepared = place.attempt(2, CycleState.PREPARED)
    planned = place.attempt(3, CycleState.PLANNED)
    aborted = place.attempt(4, CycleState.ABORTED)
    verdict = is_loser(place.ledger, place.scope)

    assert verdict(aborted)
    assert verdict(CycleId(place.scope, 1, 0).attempt("below"))
    assert not any(map(verdict, [finished, committed, prepared, planned]))
    assert not verdict(CycleId(place.scope, 1, 9).attempt("above"))
    assert not verdict(CycleId(Scope("other", "app", "main"), 1, 0).attempt("foreign"))
