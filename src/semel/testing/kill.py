"""Real processes that are really killed, and started again until they are done.

    with Zygote("shop.pipeline:main") as zygote:
        program = zygote.program(tmp_path / "log")
        for seed in range(20):
            program.run(kill_after=random.Random(seed).uniform(0.1, 2.0))
        program.run_until_done()

Each process is a fork of one that has imported everything: a hundred kills cost
seconds, not minutes.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from semel.crashpoints import CRASH_VARIABLE, STOP_VARIABLE, hook_from_environment, install

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
        if not self.ends_within(seconds):
            self.kill()
            self.ends_within(DEADLINE_SECONDS)
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
            if self.ends_within(POLL_SECONDS) or time.monotonic() > deadline:
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

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, for some seconds; return whether it came."""
        if self._end is None:
            return True
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        if not poll.poll(seconds * 1000):
            return False
        os.close(self._end)
        self._end = None
        return True


class Zygote:
    """A process that has imported *modules* and forks one that calls ``module:function``.

    The function takes a list of arguments and returns an exit code.
    """

    def __init__(self, function: str, modules: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "semel.testing.kill", function, *modules]
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


class Forked:
    """A zygote's function that is started again and again."""

    def __init__(self, zygote: Zygote, log: Path, first: Sequence[str]) -> None:
        self._zygote = zygote
        self._log = log
        self._first = first

    def start(self, *arguments: str, crash_at: str = "", stop_at: str = "") -> Running:
        """Start the function, in a session of its own.

        It kills itself at the window *crash_at*; where it stops itself at the window *stop_at*,
        this returns when it has.
        """
        planned = {CRASH_VARIABLE: crash_at, STOP_VARIABLE: stop_at}
        environment = {name: where for name, where in planned.items() if where}
        running = self._zygote.fork([*self._first, *arguments], environment, self._log)
        if stop_at:
            running.wait_until_stopped()
        return running

    def run(
        self,
        *arguments: str,
        crash_at: str = "",
        kill_after: float | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> EndedProcess:
        """Run it to its end: its own, at a window, or after some seconds."""
        running = self.start(*arguments, crash_at=crash_at)
        if kill_after is not None and not running.ends_within(kill_after):
            running.kill()
        return running.wait(deadline_seconds)

    def run_until_done(self, *arguments: str, most_starts: int = 5) -> int:
        """Start it until it ends with 0; return how often that was.

        Raises:
            DeadlineMissed: it never did.
        """
        return until_done(lambda: self.run(*arguments), most_starts)


def until_done(run: Callable[[], EndedProcess], most_starts: int) -> int:
    """Call *run* until a process ends with 0; return how often that was.

    Raises:
        DeadlineMissed: none did.
    """
    for number in range(1, most_starts + 1):
        ended = run()
        if ended.code == 0:
            return number
    raise DeadlineMissed(f"not done after {most_starts} starts:\n{ended.output}")


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


# The zygote's side: it imports once, and forks for every line that it reads.

ForkedFunction = Callable[[Sequence[str]], int]


def _serve(function: str, *modules: str) -> None:
    """Be the zygote: fork a process for every request on the standard input; print its id."""
    module, _, name = function.partition(":")
    found: ForkedFunction = getattr(importlib.import_module(module), name)
    for other in modules:
        importlib.import_module(other)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the dead children
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _be(found, *json.loads(line))
        print(pid, flush=True)


def _be(
    function: ForkedFunction,
    arguments: list[str],
    environment: dict[str, str],
    log: str,
    result: str,
) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    install(hook_from_environment())
    code = 1
    try:
        code = function(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  the last thing this process says
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        Path(result).write_text(str(code))
        os._exit(code)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
