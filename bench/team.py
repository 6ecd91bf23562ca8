"""Workers in processes of their own, which begin together when told to."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

from bench.harness import timed

Work = TypeVar("Work")


class Team(Generic[Work]):
    """Processes that get their work, make themselves ready, and wait for the start."""

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...], size: int) -> None:
        # A fork would share the sockets and the loop of this process.
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def seconds(self, work: Iterable[Work]) -> float:
        """Give each its part, wait until all are ready, and time how long all of them take."""
        for pipe, part in zip(self._pipes, work, strict=True):
            pipe.send(part)
        self._hear_all()
        with timed() as watch:
            for pipe in self._pipes:
                pipe.send("go")
            self._hear_all()
        return watch.seconds

    def _hear_all(self) -> None:
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        """Send them home."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
