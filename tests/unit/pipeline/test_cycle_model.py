"""Random scripts of failures, compared with a model of the cycle that was written from the table.

The model knows nothing of the engine: it is the failure table of the design as
a plain function from answers to calls and an outcome.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from semel.errors import InDoubt, LeaseLost, LedgerUnavailable, Permanent
from semel.pipeline.cycle import (
    AbortAnswer,
    CommitAborted,
    CommitAnswer,
    CommitFatal,
    CommitSucceeded,
    run_commit_cycle,
)
from semel.pipeline.sink import SinkFatal, SinkOK, SinkRetryable
from tests.recorder import ScriptedCoordinator

SINKS = ("files", "postgres")
OUTCOMES = {CommitSucceeded: "succeeded", CommitAborted: "aborted", CommitFatal: "fatal"}


def model(answers: dict[str, str]) -> tuple[list[str], str, str]:
    """Say which steps are called, how it ends, and at which step it failed."""
    calls: list[str] = []

    def ask(step: str) -> str:
        calls.append(step)
        return answers[step]

    def abort(sent: bool) -> str:
        won = ask("abort_txn")
        if won == "won" or (won == "silent" and not sent):
            ask("store_abort")
            ask("abort_2pc")
        return won

    if ask("begin_txn") != "ok":
        return calls, "fatal", "begin_txn"
    for step in ("flush", "commit_offsets", "pre_commit_2pc"):
        answer = ask(step)
        if answer != "ok":
            abort(sent=False)
            return calls, "fatal" if answer == "fatal" else "aborted", step
    decision = ask("commit_txn")
    if decision == "no":
        abort(sent=True)
        return calls, "aborted", "commit_txn"
    if decision == "unknown":
        won = abort(sent=True)
        if won != "lost":
            return calls, {"won": "aborted", "silent": "fatal"}[won], "commit_txn"
    for step in ("commit_2pc", "store_commit"):
        if ask(step) != "ok":
            return calls, "fatal", step
    return calls, "succeeded", ""


ERRORS = [ValueError("broken"), LedgerUnavailable("l", "away"), LeaseLost("app/main", 1, 2)]
RETRYABLE, FATAL = SinkRetryable("later"), SinkFatal("never")
MAY_PASS, COMES_AGAIN = ERRORS[:2], [LeaseLost("app/main", 1, 2), Permanent("a NUL")]
PLAIN = {"ok": [None], "error": MAY_PASS, "fatal": COMES_AGAIN}
OF_SINKS = {
    "ok": [{}, {"files": SinkOK({"x": 1})}],
    "error": [*MAY_PASS, {"files": RETRYABLE}, {"files": RETRYABLE, "postgres": RETRYABLE}],
    "fatal": [{"postgres": FATAL}, {"files": RETRYABLE, "postgres": FATAL}, *COMES_AGAIN],
}
ANSWERS = {
    "begin_txn": PLAIN,
    "flush": PLAIN,
    "commit_offsets": PLAIN,
    "pre_commit_2pc": OF_SINKS,
    "commit_txn": {
        "ok": [CommitAnswer.COMMITTED],
        "no": [CommitAnswer.NOT_COMMITTED, *ERRORS[1:]],
        "unknown": [CommitAnswer.UNKNOWN, InDoubt("no reply"), OSError("reset"), ERRORS[0]],
    },
    "commit_2pc": OF_SINKS,
    "store_commit": PLAIN,
    "abort_txn": {
        "won": [AbortAnswer.WON],
        "lost": [AbortAnswer.LOST],
        "silent": [AbortAnswer.NO_ANSWER, InDoubt("no reply"), *ERRORS],
    },
    "store_abort": PLAIN,
    "abort_2pc": OF_SINKS,
}


@st.composite
def scripts(draw):
    """Draw for every step what kind of answer it gives, and the answer itself."""
    kinds = {step: draw(st.sampled_from(list(by_kind))) for step, by_kind in ANSWERS.items()}
    said = {step: draw(st.sampled_from(ANSWERS[step][kind])) for step, kind in kinds.items()}
    return kinds, said


CALM = {step: next(iter(by_kind)) for step, by_kind in ANSWERS.items()}


@settings(max_examples=600, deadline=None)
@given(scripts())
@example((CALM, {step: ANSWERS[step][kind][0] for step, kind in CALM.items()}))
def test_the_cycle_calls_and_answers_what_the_table_says(script):
    kinds, said = script
    coordinator = ScriptedCoordinator({step: [answer] for step, answer in said.items()}, SINKS)

    outcome = run_commit_cycle(coordinator)

    calls, ended, failed_at = model(kinds)
    assert coordinator.calls == calls
    assert OUTCOMES[type(outcome)] == ended
    assert getattr(outcome, "reason", "").partition(":")[0] == failed_at
