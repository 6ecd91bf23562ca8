"""Real processes that are really killed, and started again until they are done.

    program = Program([sys.executable, "pipeline.py"], log=tmp_path / "log")
    for seed in range(20):
        program.run(kill_after=random.Random(seed).uniform(0.1, 2.0))
    program.run_until_done()

A `Zygote` starts a Python function instead of a command, in a fork of a
process that has imported everything: a hundred kills cost seconds, not minutes.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

from semel.crashpoints import CRASH_VARIABLE, STOP_VARIABLE

DEADLINE_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.005


class DeadlineMissed(AssertionError):
    """A process did not do in time what it was waited for; its last words are the message."""


@dataclass(frozen=True, slots=True)
class EndedProcess:
    """How a process ended, and what it said."""

    code: int
    """Its exit code; minus the number of the signal that killed it."""

    output: str

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL


class Running:
    """One process in a session of its own."""

    def __init__(self, pid: int, log: Path, said_before: int, code: Callable[[], int]) -> None:
        self.pid = pid
        self._log = log
        self._said_before = said_before
        self._code = code
        try:
            self._end: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end = None  # it is over already

    def wait(self, seconds: float = DEADLINE_SECONDS) -> EndedProcess:
        """Wait for its end.

        Raises:
            DeadlineMissed: it runs on; it was killed.
        """
        if not self._ends_within(seconds):
            self.kill()
            self._ends_within(DEADLINE_SECONDS)
            self._code()
            raise DeadlineMissed(f"not over after {seconds} s:\n{self.output}")
        return EndedProcess(self._code(), self.output)

    def kill(self) -> None:
        """End its whole session with SIGKILL."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # It is over, or was just forked and has no session of its own yet.
            if self._end is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._end, signal.SIGKILL)

    def wait_until_stopped(self, seconds: float = DEADLINE_SECONDS) -> None:
        """Wait until it has stopped itself, as ``SEMEL_STOP_AT`` told it.

        Raises:
            DeadlineMissed: it ended, or ran on and was killed.
        """
        deadline = time.monotonic() + seconds
        while _state(self.pid) != "T":
            if self._ends_within(POLL_SECONDS) or time.monotonic() > deadline:
                self.kill()
                self.wait()
                raise DeadlineMissed(f"did not stop:\n{self.output}")

    def wake(self) -> None:
        """Continue it."""
        os.kill(self.pid, signal.SIGCONT)

    @property
    def output(self) -> str:
        """What it has said so far."""
        with self._log.open("rb") as log:
            log.seek(self._said_before)
            return log.read().decode(errors="replace")

    def _ends_within(self, seconds: float) -> bool:
        if self._end is None:
            return True
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return False
        os.close(self._end)
        self._end = None
        return True


class Starts(Protocol):
    """Something that starts a process with some arguments and some environment."""

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Running:
        """Start it, and return at once."""
        ...


class _Runs:
    """What can be done with everything that starts."""

    def run(
        self: Starts,
        *arguments: str,
        crash_at: str | None = None,
        kill_after: float | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> EndedProcess:
        """Run it to its end: its own, at a window (`crash_at`), or after some seconds."""
        environment = {CRASH_VARIABLE: crash_at} if crash_at else {}
        running = self.start(*arguments, environment=environment)
        if kill_after is not None and not running._ends_within(kill_after):
            running.kill()
        return running.wait(deadline_seconds)

    def start_and_stop_at(self: Starts, where: str, *arguments: str) -> Running:
        """Start it, and return when it has stopped itself at the window *where*."""
        running = self.start(*arguments, environment={STOP_VARIABLE: where})
        running.wait_until_stopped()
        return running

    def run_until_done(self: Any, *arguments: str, most_starts: int = 5) -> int:
        """Start it until it ends with 0; return how often that was.

        Raises:
            DeadlineMissed: it never did.
        """
        for number in range(1, most_starts + 1):
            ended = self.run(*arguments)
            if ended.code == 0:
                return number
        raise DeadlineMissed(f"not done after {most_starts} starts:\n{ended.output}")


class Program(_Runs):
    """A command that is started again and again."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = list(command)
        self._log = log

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Running:
        """Start the command, in a session of its own."""
        self._log.touch()
        said_before = self._log.stat().st_size
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        return Running(process.pid, self._log, said_before, process.wait)


class Zygote:
    """A process that has imported *modules* and forks one that calls ``module:function``.

    The function takes a list of arguments and returns an exit code.
    """

    def __init__(self, function: str, modules: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "semel.testing.zygote", function, *modules]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def program(self, log: Path, *arguments: str) -> Forked:
        """Make a program of the function, with its first arguments."""
        return Forked(self, log, arguments)

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Running:
        """Start the function in a fork."""
        log.touch()
        said_before = log.stat().st_size
        result = log.with_name(f"{log.name}.{time.monotonic_ns()}.code")
        asked = [list(arguments), dict(environment), str(log), str(result)]
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        if pipe_in is None or pipe_out is None:
            raise DeadlineMissed("the zygote has no pipes")
        pipe_in.write(json.dumps(asked) + "\n")
        pipe_in.flush()
        return Running(int(pipe_out.readline()), log, said_before, lambda: _code_in(result))

    def close(self) -> None:
        """End it; its forks go on."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(DEADLINE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Forked(_Runs):
    """A zygote's function that is started again and again."""

    def __init__(self, zygote: Zygote, log: Path, first: Sequence[str]) -> None:
        self._zygote = zygote
        self._log = log
        self._first = first

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Running:
        """Start the function, in a session of its own."""
        return self._zygote.fork([*self._first, *arguments], environment or {}, self._log)


def _code_in(result: Path) -> int:
    """Read the exit code that a fork has written; a killed fork has written none.

    Nor has one that was killed between opening the file and writing to it.
    """
    try:
        code = result.read_text()
    except FileNotFoundError:
        code = ""
    finally:
        result.unlink(missing_ok=True)
    return int(code) if code else -signal.SIGKILL


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
