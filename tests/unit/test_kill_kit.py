"""The kit that kills real processes and starts them again."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from semel.testing.kill import DeadlineMissed, Forked, Zygote

pytestmark = pytest.mark.kill


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote("tests.unit.kill_program:main") as zygote:
        yield zygote


@pytest.fixture
def program(zygote, tmp_path) -> Forked:
    return zygote.program(tmp_path / "log", str(tmp_path / "tries"))


def test_a_program_runs_to_its_own_end(program):
    ended = program.run("word")

    assert (ended.code, ended.output) == (7, "here word\nfurther\n")


def test_a_program_is_killed_at_a_window(program):
    ended = program.run(crash_at="flush:before")

    assert ended.was_killed
    assert ended.output == "here\n"


def test_a_program_is_killed_after_some_time(program):
    assert program.run("linger", kill_after=0.2).was_killed


def test_a_program_is_started_until_it_is_done(program):
    assert program.run_until_done() == 3


def test_a_program_that_is_never_done_is_given_up(program):
    with pytest.raises(DeadlineMissed, match="not done after 2 starts"):
        program.run_until_done(most_starts=2)


def test_a_program_that_misses_its_deadline_is_killed_and_quoted(program):
    with pytest.raises(DeadlineMissed, match="here linger"):
        program.run("linger", deadline_seconds=1.0)


def test_a_program_stops_at_a_window_and_is_woken(program):
    running = program.start(stop_at="flush:before")

    assert running.output == "here\n"
    running.wake()

    assert running.wait().output == "here\nfurther\n"


def test_a_program_that_does_not_stop_is_not_waited_for(program):
    with pytest.raises(DeadlineMissed, match="did not stop"):
        program.start(stop_at="flush:after")


def test_a_zygote_forks_a_function_as_often_as_it_is_asked(tmp_path):
    with Zygote("tests.crash.local_driver:main") as zygote:
        forked = zygote.program(tmp_path / "log", str(tmp_path))
        first = forked.run()
        second = forked.run("--sink", "none=nowhere")

    assert first.code == 2
    assert "the following arguments are required: --sink" in first.output
    assert second.code == 1


@pytest.mark.parametrize("has_begun_to_tell", [False, True])
def test_a_fork_that_is_killed_before_it_has_said_anything_was_killed(
    tmp_path, monkeypatch, has_begun_to_tell
):
    """It has no session of its own, no log and no code yet, or an empty file for the code."""
    unborn = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    request = io.StringIO()
    zygote = Zygote("tests.crash.local_driver:main")
    with zygote, monkeypatch.context() as pipes:
        pipes.setattr(zygote._process, "stdin", request)
        pipes.setattr(zygote._process, "stdout", io.StringIO(f"{unborn.pid}\n"))
        running = zygote.program(tmp_path / "log").start()
    if has_begun_to_tell:
        Path(json.loads(request.getvalue())[3]).touch()

    running.kill()
    ended = running.wait(10)

    assert (ended.was_killed, ended.output) == (True, "")
    assert unborn.wait(10) < 0
    unborn.stdin.close()
