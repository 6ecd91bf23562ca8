"""The seven steps, and what the failure table says about each way they can fail."""

from __future__ import annotations

from itertools import product

import pytest

from semel.errors import InDoubt, LeaseLost, LedgerUnavailable, Misuse, NeedsOperator, Permanent
from semel.events import CommitSlow, CycleEnded, Events, StepDone, StepFailed
from semel.pipeline.cycle import (
    FAILURES,
    SLOW_COMMIT_FRACTION,
    AbortAnswer,
    CommitAborted,
    CommitAnswer,
    CommitFatal,
    CommitSucceeded,
    Consequence,
    CycleRefused,
    Step,
    StepFailure,
    run_commit_cycle,
)
from semel.pipeline.sink import SinkFatal, SinkRetryable
from semel.testing.clock import SimulatedClock
from semel.testing.crash import Crash
from tests.recorder import RecordingCoordinator, ScriptedCoordinator

STEPS = [step.value for step in Step]
ABORT_PATH = ["abort_txn", "store_abort", "abort_2pc"]
SINKS = ("files", "postgres")

POSSIBLE = {
    Step.BEGIN_TXN: {StepFailure.ERROR},
    Step.FLUSH: {StepFailure.ERROR, StepFailure.NEVER_PASSES},
    Step.COMMIT_OFFSETS: {StepFailure.ERROR, StepFailure.NEVER_PASSES},
    Step.PRE_COMMIT_2PC: {
        StepFailure.ERROR,
        StepFailure.NEVER_PASSES,
        StepFailure.SINK_RETRYABLE,
        StepFailure.SINK_FATAL,
    },
    Step.COMMIT_TXN: {StepFailure.NOT_COMMITTED, StepFailure.UNKNOWN},
    Step.COMMIT_2PC: {StepFailure.ERROR, StepFailure.SINK_RETRYABLE, StepFailure.SINK_FATAL},
    Step.STORE_COMMIT: {StepFailure.ERROR},
}


def up_to(step: str) -> list[str]:
    return STEPS[: STEPS.index(step) + 1]


def walk(script=None, **options):
    coordinator = ScriptedCoordinator(script or {}, SINKS)
    return run_commit_cycle(coordinator, **options), coordinator


@pytest.fixture
def seen() -> list:
    return []


@pytest.fixture
def events(seen) -> Events:
    events = Events()
    events.subscribe(seen.append)
    return events


def test_the_seven_steps_are_walked_in_order():
    coordinator = RecordingCoordinator(SINKS)

    outcome = run_commit_cycle(coordinator)

    assert isinstance(outcome, CommitSucceeded)
    assert coordinator.calls == STEPS


@pytest.mark.parametrize(("step", "failure"), list(product(Step, StepFailure)))
def test_the_failure_table_has_an_answer_for_every_way_a_step_can_fail_and_no_other(step, failure):
    assert ((step, failure) in FAILURES) == (failure in POSSIBLE[step])


def test_no_verdict_after_the_decision_aborts_anything():
    after = [v for (step, _), v in FAILURES.items() if step in (Step.COMMIT_2PC, Step.STORE_COMMIT)]

    assert set(after) <= {Consequence.FATAL, Consequence.STRANDED}


def test_a_transaction_that_cannot_begin_is_fatal_and_nothing_else_is_called():
    error = LeaseLost("app/main", 1, 2)

    outcome, coordinator = walk({"begin_txn": [error]})

    assert isinstance(outcome, CommitFatal)
    assert outcome.reason == f"begin_txn: {error}"
    assert outcome.cause is error
    assert coordinator.calls == ["begin_txn"]


@pytest.mark.parametrize("step", ["flush", "commit_offsets", "pre_commit_2pc"])
@pytest.mark.parametrize("error", [ValueError("no"), LedgerUnavailable("l", "away"), OSError()])
def test_an_error_before_the_decision_aborts_the_cycle(step, error):
    outcome, coordinator = walk({step: [error]})

    assert isinstance(outcome, CommitAborted)
    assert outcome.reason.startswith(f"{step}: ")
    assert coordinator.calls == up_to(step) + ABORT_PATH


@pytest.mark.parametrize("step", ["flush", "commit_offsets", "pre_commit_2pc"])
@pytest.mark.parametrize("error", [Permanent("no"), Misuse("no"), NeedsOperator("no")])
def test_what_can_never_pass_is_fatal_after_the_abort_path(step, error):
    outcome, coordinator = walk({step: [error]})

    assert outcome == CommitFatal(f"{step}: no")
    assert coordinator.calls == up_to(step) + ABORT_PATH
    if isinstance(error, NeedsOperator):
        assert outcome.cause is error
    else:
        assert isinstance(outcome.cause, CycleRefused)
        assert outcome.cause.reason == f"{step}: no"


def test_the_reason_of_a_foreign_error_carries_its_type():
    outcome, _ = walk({"flush": [KeyError("column")]})

    assert outcome == CommitAborted("flush: KeyError: 'column'")


def test_one_sink_that_cannot_prepare_now_aborts_all():
    outcome, coordinator = walk({"pre_commit_2pc": [{"postgres": SinkRetryable("no connection")}]})

    assert outcome == CommitAborted("pre_commit_2pc: postgres: no connection")
    assert coordinator.calls == up_to("pre_commit_2pc") + ABORT_PATH


def test_a_sink_that_can_never_prepare_is_fatal_after_the_abort_path():
    answers = {"files": SinkRetryable("slow"), "postgres": SinkFatal("no table entries")}

    outcome, coordinator = walk({"pre_commit_2pc": [answers]})

    assert outcome == CommitFatal("pre_commit_2pc: files: slow; postgres: no table entries")
    assert isinstance(outcome.cause, CycleRefused)
    assert coordinator.calls == up_to("pre_commit_2pc") + ABORT_PATH


@pytest.mark.parametrize(
    "answer",
    [
        CommitAnswer.NOT_COMMITTED,
        LeaseLost("app/main", 1, 2),
        NeedsOperator("overlap"),
        LedgerUnavailable("l", "away"),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_a_decision_that_was_surely_not_taken_aborts_the_cycle(answer):
    outcome, coordinator = walk({"commit_txn": [answer]})

    assert isinstance(outcome, CommitAborted)
    assert outcome.reason.startswith("commit_txn: ")
    assert coordinator.calls == up_to("commit_txn") + ABORT_PATH


UNKNOWN = {
    "the answer unknown": CommitAnswer.UNKNOWN,
    "in doubt": InDoubt("no reply"),
    "an error of some driver": OSError("reset by peer"),
    "an answer that is none": None,
}


@pytest.mark.parametrize("answer", UNKNOWN.values(), ids=UNKNOWN)
class TestADecisionThatIsUnknown:
    def test_is_aborted_once_the_abort_is_won(self, answer):
        outcome, coordinator = walk({"commit_txn": [answer]})

        assert isinstance(outcome, CommitAborted)
        assert outcome.reason.startswith("commit_txn: ")
        assert outcome.reason.endswith("ABORT was won")
        assert coordinator.calls == up_to("commit_txn") + ABORT_PATH

    def test_goes_on_when_the_commit_stands(self, answer):
        outcome, coordinator = walk({"commit_txn": [answer], "abort_txn": [AbortAnswer.LOST]})

        assert isinstance(outcome, CommitSucceeded)
        assert coordinator.calls == [*up_to("commit_txn"), "abort_txn", *STEPS[5:]]

    @pytest.mark.parametrize("silence", [AbortAnswer.NO_ANSWER, InDoubt("again"), OSError("gone")])
    def test_is_fatal_and_nothing_is_aborted_when_nobody_answers(self, answer, silence):
        outcome, coordinator = walk({"commit_txn": [answer], "abort_txn": [silence]})

        assert isinstance(outcome, CommitFatal)
        assert outcome.reason.startswith("commit_txn: ")
        assert "the sinks stay prepared" in outcome.reason
        assert coordinator.calls == [*up_to("commit_txn"), "abort_txn"]

    def test_can_still_be_stranded_when_the_commit_stands(self, answer):
        script = {
            "commit_txn": [answer],
            "abort_txn": [AbortAnswer.LOST],
            "commit_2pc": [{"files": SinkRetryable("disk full")}],
        }

        outcome, coordinator = walk(script)

        assert outcome == CommitFatal("commit_2pc: files: disk full", (("files", coordinator.txn),))
        assert coordinator.calls == [*up_to("commit_txn"), "abort_txn", "commit_2pc"]


@pytest.mark.parametrize("refusal", [SinkRetryable("busy"), SinkFatal("vanished")])
def test_sinks_that_cannot_finish_are_named_and_nothing_is_aborted(refusal):
    outcome, coordinator = walk({"commit_2pc": [{"files": refusal, "postgres": refusal}]})

    assert isinstance(outcome, CommitFatal)
    words = refusal.reason
    assert outcome.reason == f"commit_2pc: files: {words}; postgres: {words}"
    assert outcome.stranded == (("files", coordinator.txn), ("postgres", coordinator.txn))
    assert coordinator.calls == up_to("commit_2pc")


def test_only_the_sinks_that_are_not_finished_are_stranded():
    outcome, coordinator = walk({"commit_2pc": [{"postgres": SinkRetryable("busy")}]})

    assert outcome.stranded == (("postgres", coordinator.txn),)


@pytest.mark.parametrize("step", ["commit_2pc", "store_commit"])
def test_an_error_after_the_decision_is_fatal_and_nothing_is_aborted(step):
    outcome, coordinator = walk({step: [RuntimeError("no")]})

    assert isinstance(outcome, CommitFatal)
    assert outcome.reason == f"{step}: RuntimeError: no"
    assert coordinator.calls == up_to(step)


ABORT_FAILURES = {
    "abort_txn": [AbortAnswer.NO_ANSWER, ValueError("a"), InDoubt("b")],
    "store_abort": [ValueError("c"), NeedsOperator("d")],
    "abort_2pc": [ValueError("e"), {"files": SinkRetryable("f")}, {"postgres": SinkFatal("g")}],
}


@pytest.mark.parametrize("step", ["flush", "commit_offsets", "pre_commit_2pc"])
@pytest.mark.parametrize(
    "failing",
    [
        {a: t, b: s, c: p}
        for (a, b, c) in [tuple(ABORT_FAILURES)]
        for t, s, p in product(*([None, *answers] for answers in ABORT_FAILURES.values()))
    ],
    ids=str,
)
def test_nothing_in_the_abort_path_changes_the_outcome_or_stops_the_rest(step, failing):
    script = {name: [answer] for name, answer in failing.items() if answer is not None}

    outcome, coordinator = walk({step: [ValueError("first")], **script})

    assert outcome == CommitAborted(f"{step}: ValueError: first")
    assert coordinator.calls == up_to(step) + ABORT_PATH


def test_an_abort_that_lost_before_the_decision_was_sent_drops_nothing():
    outcome, coordinator = walk({"flush": [ValueError("x")], "abort_txn": [AbortAnswer.LOST]})

    assert outcome == CommitAborted("flush: ValueError: x")
    assert coordinator.calls == ["begin_txn", "flush", "abort_txn"]


@pytest.mark.parametrize("answer", [AbortAnswer.NO_ANSWER, AbortAnswer.LOST, OSError("away")])
def test_nothing_is_dropped_after_a_sent_commit_unless_the_abort_was_won(answer):
    script = {"commit_txn": [CommitAnswer.NOT_COMMITTED], "abort_txn": [answer]}

    outcome, coordinator = walk(script)

    assert isinstance(outcome, CommitAborted)
    assert coordinator.calls == [*up_to("commit_txn"), "abort_txn"]


@pytest.mark.parametrize("step", [*STEPS, *ABORT_PATH])
def test_a_crash_runs_no_more_code(step):
    script = {step: [Crash()]}
    if step in ABORT_PATH:
        script["flush"] = [ValueError("to get there")]
    coordinator = ScriptedCoordinator(script, SINKS)

    with pytest.raises(Crash):
        run_commit_cycle(coordinator)

    assert coordinator.calls[-1] == step


def test_every_step_is_timed(events, seen):
    clock = SimulatedClock()
    coordinator = _Slow(clock, {"flush": 2.0, "commit_2pc": 1.0})

    outcome = run_commit_cycle(coordinator, events=events, clock=clock)

    expected = dict.fromkeys(STEPS, 0.0) | {"flush": 2.0, "commit_2pc": 1.0}
    assert outcome.step_seconds == expected
    assert [e.step for e in seen if isinstance(e, StepDone)] == STEPS
    ended = seen[-1]
    assert isinstance(ended, CycleEnded)
    assert (ended.outcome, ended.seconds, ended.step_seconds) == ("succeeded", 3.0, expected)


@pytest.mark.parametrize(
    ("script", "ended"),
    [
        ({"flush": [ValueError("x")]}, "aborted"),
        ({"store_commit": [ValueError("x")]}, "fatal"),
        ({}, "succeeded"),
    ],
)
def test_the_end_of_a_cycle_is_an_event_with_its_reason(script, ended, events, seen):
    outcome, coordinator = walk(script, events=events)

    last = [e for e in seen if isinstance(e, CycleEnded)]
    assert [(e.scope, e.cycle, e.outcome) for e in last] == [
        (coordinator.scope_label, coordinator.label, ended)
    ]
    assert last[0].reason == getattr(outcome, "reason", "")


def test_every_failure_is_an_event_those_of_the_abort_path_too(events, seen):
    script = {
        "flush": [ValueError("1")],
        "abort_txn": [ValueError("2")],
        "store_abort": [ValueError("3")],
        "abort_2pc": [{"files": SinkRetryable("4"), "postgres": SinkFatal("5")}],
    }

    walk(script, events=events)

    assert [(e.step, e.reason) for e in seen if isinstance(e, StepFailed)] == [
        ("flush", "flush: ValueError: 1"),
        ("abort_txn", "abort_txn: ValueError: 2"),
        ("store_abort", "store_abort: ValueError: 3"),
        ("abort_2pc", "abort_2pc: files: 4"),
        ("abort_2pc", "abort_2pc: postgres: 5"),
    ]


def test_a_failure_after_a_standing_commit_is_an_event(events, seen):
    script = {
        "commit_txn": [CommitAnswer.UNKNOWN],
        "abort_txn": [AbortAnswer.LOST],
        "store_commit": [ValueError("x")],
    }

    walk(script, events=events)

    failed = [e.step for e in seen if isinstance(e, StepFailed)]
    assert failed == ["commit_txn", "store_commit"]


@pytest.mark.parametrize(
    ("commit_seconds", "interval", "is_slow"),
    [
        (SLOW_COMMIT_FRACTION * 10 + 0.01, 10.0, True),
        (SLOW_COMMIT_FRACTION * 10, 10.0, False),
        (100.0, None, False),
    ],
)
def test_a_commit_that_takes_much_of_the_interval_is_an_event(
    commit_seconds, interval, is_slow, events, seen
):
    clock = SimulatedClock()
    coordinator = _Slow(clock, {"commit_txn": commit_seconds / 2, "commit_2pc": commit_seconds / 2})

    run_commit_cycle(coordinator, interval_seconds=interval, events=events, clock=clock)

    slow = [(e.commit_seconds, e.interval_seconds) for e in seen if isinstance(e, CommitSlow)]
    assert slow == ([(commit_seconds, interval)] if is_slow else [])


class _Slow(RecordingCoordinator):
    def __init__(self, clock, seconds):
        super().__init__(SINKS)
        self._clock = clock
        self._seconds = seconds

    def _answer(self, step, usual):
        self._clock.advance(self._seconds.get(step, 0.0))
        return super()._answer(step, usual)
