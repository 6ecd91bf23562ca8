"""What recovery does when a sink, or the ledger, does not answer, cannot commit, or is gone."""

from __future__ import annotations

import pytest

from semel.errors import NeedsOperator, Retryable
from semel.pipeline.ledger import CycleState
from semel.pipeline.recovery import SILENT_IN_A_ROW, CycleStuck, SinkBlocksStart
from semel.pipeline.sink import Found
from semel.testing.faults import Fault, FaultKind, FaultPlan, faulty_ledger, faulty_sink
from tests.unit.pipeline.recovery_place import Place


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.mark.parametrize("state", [CycleState.COMMITTED, CycleState.PREPARED])
@pytest.mark.parametrize(
    "method", ["fence", "recover", "sweep", "mark"], ids=lambda method: f"{method} does not answer"
)
def test_a_sink_that_does_not_answer_blocks_the_start_and_nothing_is_lost(place, method, state):
    txn = place.attempt(0, state)
    left, right = place.new_sinks()
    broken = faulty_sink(right, Fault(method, FaultKind.REFUSED))

    with pytest.raises(Retryable):
        place.recover([left, broken])
    place.recover()

    expected = Found.VISIBLE if state is CycleState.COMMITTED else Found.GONE
    assert place.found(txn) == [expected, expected]
    assert place.left == [[], []]


def test_a_sink_that_cannot_commit_now_blocks_the_start(place):
    place.attempt(0, CycleState.COMMITTED)
    left, right = place.new_sinks()
    plan = FaultPlan([Fault("commit", FaultKind.REFUSED, n) for n in range(1, 10)])

    with pytest.raises(SinkBlocksStart, match=r"'right' did not commit.*nothing is lost"):
        place.recover([left, faulty_sink(right, plan=plan)])

    assert plan.calls["commit"] > 1


def test_a_sink_that_can_never_commit_needs_an_operator(place):
    txn = place.attempt(0, CycleState.COMMITTED)
    left, right = place.new_sinks()

    with pytest.raises(CycleStuck, match="'right' cannot commit") as stuck:
        place.recover([left, faulty_sink(right, Fault("commit", FaultKind.FATAL))])

    assert isinstance(stuck.value, NeedsOperator)
    assert place.ledger.attempt(txn).state is CycleState.COMMITTED


def test_a_sink_that_has_promised_but_is_not_configured_stops_the_start(place):
    place.attempt(0, CycleState.COMMITTED)
    left, _ = place.new_sinks()

    with pytest.raises(NeedsOperator, match="sink 'right' has prepared it but is not configured"):
        place.recover([left])


def test_a_sink_that_holds_an_aborted_attempt_but_is_not_configured_is_named(place, caplog):
    txn = place.attempt(0, CycleState.PREPARED)
    left, _ = place.new_sinks()

    report = place.recover([left])

    assert place.found(txn) == [Found.GONE, Found.HELD]
    assert [(settled.sink, settled.txn) for settled in report.left_as_is] == [("right", txn)]
    assert "sink 'right' is no longer configured" in caplog.text
    place.recover()
    assert place.found(txn) == [Found.GONE, Found.GONE]


def test_an_abort_that_the_ledger_does_not_confirm_stops_recovery_before_anything_is_dropped(place):
    txn = place.attempt(0, CycleState.PREPARED)
    silent = faulty_ledger(place.ledger, Fault("abort_undecided", FaultKind.REFUSED))

    with pytest.raises(Retryable):
        place.recover(ledger=silent)

    assert place.found(txn) == [Found.HELD, Found.HELD]


def test_an_attempt_that_a_sink_does_not_give_up_stops_the_start_but_not_the_others(place):
    committed = place.attempt(0, CycleState.COMMITTED)
    first, second, third = (place.attempt(n, CycleState.PREPARED) for n in (1, 2, 3))
    left, right = place.new_sinks()

    with pytest.raises(SinkBlocksStart, match="did not abort") as blocked:
        place.recover([faulty_sink(left, Fault("abort", FaultKind.REFUSED)), right])

    assert blocked.value.txn == str(first)
    assert place.found(first) == [Found.HELD, Found.GONE]
    assert place.found(second) == place.found(third) == [Found.GONE, Found.GONE]
    assert place.found(committed) == [Found.VISIBLE, Found.VISIBLE]
    place.recover()
    assert place.left == [[], []]


@pytest.mark.parametrize(
    ("failing", "told"), [(FaultKind.FATAL, CycleStuck), (FaultKind.REFUSED, SinkBlocksStart)]
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
        place.recover([faulty_sink(left, Fault("commit", FaultKind.FATAL, 1)), right])

    assert place.found(first) == [Found.HELD, Found.VISIBLE]
    assert place.found(second) == [Found.HELD, Found.HELD]
    assert place.recover().finished == [first, second]


def test_a_sink_that_is_configured_no_more_does_not_keep_the_others_from_committing(place):
    txn = place.attempt(0, CycleState.COMMITTED)

    with pytest.raises(NeedsOperator, match="'left' has prepared it but is not configured"):
        place.recover(place.new_sinks()[1:])

    assert place.found(txn) == [Found.HELD, Found.VISIBLE]
    assert place.ledger.attempt(txn).state is CycleState.COMMITTED


def test_an_attempt_that_only_a_person_can_settle_is_told_before_one_that_can_wait(place):
    waits, stuck = (place.attempt(n, CycleState.PREPARED) for n in (0, 1))
    left, right = place.new_sinks()
    faults = [Fault("abort", FaultKind.REFUSED, 1), Fault("abort", FaultKind.FATAL, 2)]

    with pytest.raises(CycleStuck) as told:
        place.recover([faulty_sink(left, *faults), right])

    assert told.value.txn == str(stuck)
    assert place.found(waits) == [Found.HELD, Found.GONE]


def test_a_sink_that_has_fallen_silent_is_not_asked_a_thousand_times(place):
    for number in range(20):
        place.attempt(number, CycleState.PREPARED)
    left, right = place.new_sinks()
    plan = FaultPlan([Fault("abort", FaultKind.BROKEN, n) for n in range(1, 21)])

    with pytest.raises(SinkBlocksStart):
        place.recover([faulty_sink(left, plan=plan), right])

    assert plan.calls["abort"] == SILENT_IN_A_ROW
    place.recover()
    assert place.left == [[], []]
