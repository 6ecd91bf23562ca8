"""What a new owner does with everything its predecessor left."""

from __future__ import annotations

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import Fenced, NeedsOperator
from semel.events import CycleRecovered, LeavingsSwept
from semel.lease import Owner, Takeover
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.pipeline.ledger import CycleState, is_loser
from semel.pipeline.recovery import (
    DECIDE,
    LedgerSays,
    RecoveryDecision,
    recover,
    sweep,
    what_ledger_says,
)
from semel.pipeline.sink import Found
from semel.pipeline.txn import CycleId, Scope
from semel.testing.crash import Crash, crash_at
from semel.testing.faults import FaultPlan, faulty_sink
from semel.testing.local import local_stage
from tests.unit.pipeline.recovery_place import ROWS, Place


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


def test_sinks_are_fenced_before_anything_of_their_scope_is_read(place):
    left, right = (FaultPlan(), FaultPlan())
    sinks = [faulty_sink(s, plan=p) for s, p in zip(place.new_sinks(), (left, right), strict=True)]

    with crash_at(CrashPoint.FENCE_AFTER, "right"), pytest.raises(Crash):
        place.recover(sinks)

    assert {*left.calls, *right.calls} == {"find_place", "tenants", "fence"}


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
