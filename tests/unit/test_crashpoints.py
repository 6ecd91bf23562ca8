"""Windows by name, and what a process does when it is told to end or stop in one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from semel.crashpoints import CrashPoint, install, reach
from semel.pipeline.cycle import Step
from semel.testing.crash import Crash, CrashWindow, crash_at, trace

PROGRAM = """
from semel.crashpoints import CrashPoint, reach
for _ in range(3):
    reach(CrashPoint.COMMIT_2PC_AFTER, "files")
    print("files", flush=True)
    reach(CrashPoint.COMMIT_2PC_AFTER, "postgres")
    print("postgres", flush=True)
"""


def run(**environment) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout.split()


def test_every_step_of_the_cycle_has_a_window_on_both_sides():
    values = {point.value for point in CrashPoint}

    assert {f"{step}:{side}" for step in Step for side in ("before", "after")} <= values


@pytest.mark.parametrize("point", CrashPoint)
def test_a_window_is_named_with_its_sink_inside(point):
    assert point.at(None) == point.value
    assert point.at("files") == f"{point.step}:files:{point.side}"


def test_without_a_hook_nothing_happens():
    before = install(None)
    try:
        reach(CrashPoint.FLUSH_BEFORE)
    finally:
        install(before)


def test_a_crash_comes_at_the_named_passage_and_the_hook_goes_with_the_block():
    with crash_at(CrashPoint.COMMIT_2PC_AFTER, "postgres", occurrence=2):
        reach(CrashPoint.COMMIT_2PC_AFTER, "files")
        reach(CrashPoint.COMMIT_2PC_AFTER, "postgres")
        reach(CrashPoint.COMMIT_2PC_AFTER, "files")
        with pytest.raises(Crash, match="commit_2pc:postgres:after"):
            reach(CrashPoint.COMMIT_2PC_AFTER, "postgres")

    reach(CrashPoint.COMMIT_2PC_AFTER, "postgres")


def test_without_a_sink_every_sinks_passage_counts():
    with crash_at(CrashPoint.COMMIT_2PC_AFTER, occurrence=2):
        reach(CrashPoint.COMMIT_2PC_AFTER, "files")
        with pytest.raises(Crash):
            reach(CrashPoint.COMMIT_2PC_AFTER, "postgres")


def test_no_handler_swallows_a_crash():
    assert not issubclass(Crash, Exception)


def test_a_trace_lists_every_passage():
    with trace() as windows:
        reach(CrashPoint.FLUSH_BEFORE)
        reach(CrashPoint.STAGE_AFTER, "files")
        reach(CrashPoint.STAGE_AFTER, "files")

    assert windows == [
        CrashWindow(CrashPoint.FLUSH_BEFORE),
        CrashWindow(CrashPoint.STAGE_AFTER, "files", 1),
        CrashWindow(CrashPoint.STAGE_AFTER, "files", 2),
    ]
    assert [str(window) for window in windows][-1] == "stage:files:after#2"


@pytest.mark.kill
@pytest.mark.parametrize(
    ("spec", "printed"),
    [
        ("commit_2pc:after", []),
        ("commit_2pc:postgres:after", ["files"]),
        ("commit_2pc:files:after#2", ["files", "postgres"]),
        ("commit_2pc:after#4", ["files", "postgres", "files"]),
    ],
)
def test_a_process_kills_itself_at_the_window_it_was_told(spec, printed):
    assert run(SEMEL_CRASH_AT=spec) == (-signal.SIGKILL, printed)


@pytest.mark.kill
def test_only_the_first_process_dies_where_one_death_was_asked_for(tmp_path):
    told = {"SEMEL_CRASH_AT": "commit_2pc:after", "SEMEL_CRASH_ONCE": str(tmp_path / "once")}

    assert run(**told)[0] == -signal.SIGKILL
    assert run(**told) == (0, ["files", "postgres"] * 3)


def test_a_window_that_is_not_reached_kills_nobody():
    assert run(SEMEL_CRASH_AT="commit_2pc:iceberg:after")[0] == 0


@pytest.mark.kill
def test_a_process_stops_itself_and_goes_on_when_it_is_woken():
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "SEMEL_STOP_AT": "commit_2pc:postgres:after#2"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _, status = os.waitpid(program.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        program.send_signal(signal.SIGCONT)
        output, _ = program.communicate(timeout=30)
    finally:
        program.kill()
        program.wait()

    assert program.returncode == 0
    assert output.split() == ["files", "postgres"] * 3
