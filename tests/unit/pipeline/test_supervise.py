"""Which failures start a query again, which end it, and what is said then."""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from semel.errors import LeaseHeld, LedgerUnavailable, Misuse, NeedsOperator, Permanent
from semel.events import CycleEnded, Events, QueryRestarted
from semel.pipeline.cycle import CycleRefused
from semel.pipeline.twophase import Backoff
from semel.spark.supervise import NEXT, Exit, supervise
from semel.testing.clock import SimulatedClock

AWAY = LedgerUnavailable("sqlite:///l", "locked")


class Pipeline:
    """What `supervise` sees of an `ExactlyOnce`."""

    app, query = "app", "main"

    def __init__(self) -> None:
        self.events = Events()
        self.failure: BaseException | None = None
        self.outcome = None
        self.stopped = 0

    def recover(self) -> None:
        pass

    def stop(self) -> None:
        self.stopped += 1


class Query:
    def __init__(self, ends: Callable[[], None]) -> None:
        self.awaitTermination = ends
        self.stopped = False

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


def run(pipeline: Any, *ends: Callable[[], None], tries: int = 3) -> tuple[Exit, list[Query]]:
    left, queries = list(ends), []

    def start() -> Any:
        queries.append(Query(left.pop(0)))
        return queries[-1]

    code = supervise(pipeline, start, backoff=Backoff(tries=tries), clock=SimulatedClock())
    return code, queries


def failing(pipeline: Pipeline, error: BaseException, *before: CycleEnded) -> Callable[[], None]:
    """Fail as Spark does: the exception itself is on the pipeline only."""

    def ends() -> None:
        for event in before:
            pipeline.events.emit(event)
        pipeline.failure = error
        raise RuntimeError("STREAM_FAILED")

    return ends


def test_what_may_pass_is_tried_again_until_it_does(pipeline):
    seen = []
    pipeline.events.subscribe(seen.append)

    code, queries = run(pipeline, failing(pipeline, AWAY), lambda: None)

    assert (code, len(queries), pipeline.stopped) == (Exit.DONE, 2, 1)
    assert [type(event) for event in seen] == [QueryRestarted]


def test_restarts_are_bounded(pipeline):
    code, queries = run(pipeline, *[failing(pipeline, AWAY)] * 9)

    assert (code, len(queries)) == (Exit.GAVE_UP, 3)


@pytest.mark.parametrize(("scope", "starts"), [("app/main", 9), ("app/other", 3)])
def test_only_the_pipelines_own_progress_begins_the_count_anew(pipeline, scope, starts):
    progress = CycleEnded(scope, "g1.b0", "succeeded")
    ends = [failing(pipeline, AWAY, progress)] * 8

    code, queries = run(pipeline, *ends, lambda: None)

    assert len(queries) == starts
    assert code is (Exit.DONE if starts == 9 else Exit.GAVE_UP)


def test_an_end_says_why_and_what_an_operator_does_next(pipeline, caplog):
    caplog.set_level(logging.INFO, logger="semel")
    held = LeaseHeld("app/main", "process 7 on h", 3.0)

    code, _ = run(pipeline, failing(pipeline, held))

    assert code is Exit.FENCED
    assert "process 7 on h" in caplog.text
    assert NEXT[Exit.FENCED] in caplog.text


def test_ctrl_c_while_waiting_stops_the_query_and_releases_the_scope(pipeline):
    def interrupted() -> None:
        raise KeyboardInterrupt

    code, (query,) = run(pipeline, interrupted)

    assert code is Exit.INTERRUPTED
    assert query.stopped
    assert pipeline.stopped == 1


def test_ctrl_c_inside_a_batch_is_an_interruption_and_no_failure(pipeline):
    code, queries = run(pipeline, failing(pipeline, KeyboardInterrupt()))

    assert (code, len(queries)) == (Exit.INTERRUPTED, 1)


def test_sigterm_stops_the_query_and_releases_the_scope(pipeline):
    ended = Event()

    def terminated() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.wait(10)

    query = Query(terminated)
    query.stop = ended.set

    code = supervise(pipeline, lambda: query)

    assert code is Exit.TERMINATED
    assert pipeline.stopped == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_before_the_query_runs_starts_none(pipeline):
    pipeline.recover = lambda: os.kill(os.getpid(), signal.SIGTERM)

    code, queries = run(pipeline)

    assert (code, queries, pipeline.stopped) == (Exit.TERMINATED, [], 1)


@pytest.mark.parametrize(
    "error",
    [CycleRefused("g1.b0", "a NUL in note"), Misuse("no checkpoint"), Permanent("no table")],
)
def test_what_can_never_pass_is_not_started_again(pipeline, error, caplog):
    code, queries = run(pipeline, *[failing(pipeline, error)] * 9)

    assert (code, len(queries)) == (Exit.REFUSED, 1)
    assert str(error) in caplog.text


def test_sigterm_does_not_hide_what_needs_an_operator(pipeline):
    def ends() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        failing(pipeline, NeedsOperator("the marks contradict each other"))()

    code, _ = run(pipeline, ends)

    assert code is Exit.OPERATOR


def test_a_programs_own_handler_of_sigterm_is_left_in_place(pipeline):
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("SIGTERM"))
    try:
        code, _ = run(pipeline, lambda: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)

    assert (code, came) == (Exit.DONE, ["SIGTERM"])


def test_ctrl_c_counts_as_one_even_if_the_query_cannot_be_stopped(pipeline):
    def interrupted() -> None:
        raise KeyboardInterrupt

    query = Query(interrupted)
    query.stop = failing(pipeline, RuntimeError("the gateway is closed"))

    assert supervise(pipeline, lambda: query) is Exit.INTERRUPTED
    assert pipeline.stopped == 1


def test_an_error_that_is_not_semels_ends_it(pipeline):
    code, queries = run(pipeline, failing(pipeline, ValueError("x")))

    assert (code, len(queries)) == (Exit.FAILED, 1)


def test_the_settings_of_supervisors_in_the_docs_name_the_codes_that_a_restart_cannot_help():
    text = Path("docs/operate/index.md").read_text(encoding="utf-8")
    helpless = {Exit.FENCED, Exit.OPERATOR, Exit.REFUSED}

    for setting in (r"RestartPreventExitStatus=([\d ]+)", r"operator: In, values: \[([\d, ]+)\]"):
        (found,) = re.findall(setting, text)
        assert {int(code) for code in re.findall(r"\d+", found)} == helpless
    restarted = f"should restart on {Exit.FAILED:d}, {Exit.STRANDED:d} and {Exit.GAVE_UP:d}"
    assert restarted in text
