"""Child processes that end with this one, and what every service needs around them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple, Self, TypeAlias

from semel.errors import Permanent

StopMode: TypeAlias = Literal["fast", "immediate"]
"""fast: finish cleanly, with open work rolled back. immediate: like a crash of the service."""

# Below the ephemeral ports of Linux (32768) and macOS (49152).  In that range, a client that
# retries while its service restarts can be given the service's own port and keep it.
_PORTS = range(12_000, 32_000)

# What a guard does once its pipe has ended: $1 is the group, $2 a temporary folder or nothing.
# PostgreSQL's processes leave the group, and end by themselves within a moment of their parent.
_GUARD = 'read -r _; kill -9 "-$1"; [ -z "$2" ] || { sleep 1; rm -rf "$2"; }'

# How long a service may need to end by itself before it is killed.
_END_SECONDS = 30.0


class ServiceUnavailable(Permanent):
    """A service cannot start here; the message says what is missing and how to get it."""


def free_port(host: str = "127.0.0.1") -> int:
    """Find a free port on *host*."""
    for port in random.sample(_PORTS, 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((host, port))
                return port
    raise ServiceUnavailable(f"no free port on {host} between {_PORTS.start} and {_PORTS.stop}")


def package_folder(package: str, extra: str) -> Path:
    """Find an installed package's folder without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ServiceUnavailable(f"{package} is not installed: pip install 'semel[{extra}]'")
    return Path(spec.submodule_search_locations[0])


@cache
def java() -> str:
    """Find a Java that Spark and Kafka can run on."""
    home = os.environ.get("JAVA_HOME")
    executable = str(Path(home, "bin", "java")) if home else shutil.which("java")
    advice = "put Java 17 or newer on PATH (apt install openjdk-17-jre-headless)"
    if executable is None or not Path(executable).is_file():
        raise ServiceUnavailable(f"there is no Java: {advice}")
    answer = subprocess.run([executable, "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)', answer.stderr)
    if found is None or int(found[1]) < 17:
        raise ServiceUnavailable(f"{executable} is older than Java 17: {advice}")
    return executable


class RunAs(NamedTuple):
    """The user and group of a child; only root may choose them."""

    user: int
    group: int


class Child:
    """A process in a group of its own, which ends when this process ends, however that happens.

    A guard waits for the end of a pipe that only this process (and a fork of it that never
    calls exec) holds, then kills the group and removes the *temporary* folder.  Linux's
    parent-death signal would be shorter, but it also fires when merely the *thread* that started
    the child ends, and it does not reach the child's own children.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
        run_as: RunAs | None = None,
        temporary: Path | None = None,
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=None if environment is None else {**os.environ, **environment},
                user=run_as and run_as.user,
                group=run_as and run_as.group,
                extra_groups=None if run_as is None else [],
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(self.pid), str(temporary or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process's id, which is its group's, too."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the process ended; minus the number of the signal that ended it."""
        return self._process.poll()

    def last_lines(self) -> str:
        """Quote the end of the log, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def end(self, with_signal: signal.Signals = signal.SIGTERM) -> None:
        """Send *with_signal*, wait, and kill whatever is left of the group."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(with_signal)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        # Before its pipe closes: by then the group's number may belong to somebody else.
        self._guard.kill()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()


class Lifetime:
    """A service's children and its folder, from `start` to the end of the `with` block.

    After `stop`, `start` continues with the same files and the same ports.  Files in a folder of
    our own making go when the `with` block ends, or with the object.
    """

    def __init__(self, directory: Path | str | None = None) -> None:
        self._given = None if directory is None else Path(directory)
        self._folder: Path | None = None
        self._children: list[Child] = []

    @property
    def folder(self) -> Path:
        """The folder of the service's files, made when it is first needed."""
        if self._folder is None:
            if self._given is not None:
                self._given.mkdir(parents=True, exist_ok=True)
                self._folder = self._given
            else:
                self._folder = Path(tempfile.mkdtemp(prefix="semel-"))
            self._clear_away = weakref.finalize(
                self, _clear_away, os.getpid(), self._children, self._temporary
            )
        return self._folder

    @property
    def _temporary(self) -> Path | None:
        return self._folder if self._given is None else None

    @property
    def pids(self) -> list[int]:
        """The processes this object started and has not ended yet."""
        return [child.pid for child in self._children]

    def start(self) -> Self:
        """Start, and return when the service answers; nothing is left behind if it does not."""
        if self._children:
            return self
        try:
            self._launch()
        except BaseException:
            self.stop("immediate")
            raise
        return self

    def stop(self, mode: StopMode = "fast") -> None:
        """End every process and keep the files."""
        with_signal = self._signals()[mode]
        while self._children:
            self._children[-1].end(with_signal)
            self._children.pop()

    def _launch(self) -> None:
        raise NotImplementedError

    def _signals(self) -> Mapping[StopMode, signal.Signals]:
        return {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}

    def _spawn(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        run_as: RunAs | None = None,
    ) -> Child:
        log = self.folder / f"{name}.log"
        child = Child(command, log, environment, run_as, self._temporary)
        self._children.append(child)
        return child

    def _wait_until(self, ready: Callable[[], bool], what: str, seconds: float) -> None:
        """Poll *ready* until it holds, a child has died, or *seconds* are over."""
        deadline = time.monotonic() + seconds
        while not ready():
            for child in self._children:
                if not child.is_alive():
                    raise ServiceUnavailable(f"{what} ended at once:\n{child.last_lines()}")
            if time.monotonic() > deadline:
                log = self._children[0].last_lines()
                raise ServiceUnavailable(f"{what} did not answer in {seconds:.0f} s:\n{log}")
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Files that are removed anyway need not be written out first.
        self.stop("immediate" if self._given is None else "fast")
        self._clear_away()


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Say whether somebody accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def _clear_away(owner: int, children: list[Child], folder: Path | None) -> None:
    if os.getpid() != owner:
        return  # a fork of the owner ends; the service is not its own
    while children:
        children.pop().end(signal.SIGKILL)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
