"""A process that runs a consumer on a `FileBroker`, to be killed as often as a test likes.

    python -m semel.testing.worker '{"consumer": "shop.py:on_paid", "database": …, "broker": …}'

It ends with 0 when nothing is left to do, or after SIGTERM as a service ends:
finish, commit, settle, leave.  `semel.testing.trial` starts it in a fork.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, Final, Self, get_origin, get_type_hints

from sqlalchemy import event

from semel.clock import SYSTEM_CLOCK, Clock
from semel.crashpoints import CrashPoint, install
from semel.errors import InDoubt, Misuse, Retryable
from semel.memory.broker import FileBroker
from semel.memory.broker_groups import Patience
from semel.messaging.database import Database
from semel.messaging.handler import Consumer
from semel.messaging.receive.broker import Subscription
from semel.messaging.receive.runner import Runner
from semel.messaging.send.relay import Relay
from semel.messaging.settings import ConsumerSettings, RunnerSettings
from semel.policy.vocabulary import Mode
from semel.sql.database import SqlDatabase

IDLE_POLL_SECONDS: Final = 0.02
JUMP_SECONDS: Final = 86_400.0


class Until(StrEnum):
    """When a worker ends by itself."""

    IDLE = "idle"
    """When all is handled, retried and sent."""

    SIGNAL = "signal"
    """Never: it waits for SIGTERM."""


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker does; travels as JSON."""

    database: str
    """URL of the database, which has semel's tables."""

    broker: str
    """Path of the `FileBroker`."""

    consumer: str
    """``module:name`` or ``path/to/file.py:name`` of a `Consumer`."""

    topics: tuple[str, ...]
    group: str = "workers"
    mode: Mode = Mode.TRANSACTIONAL
    concurrency: int = 1
    max_records: int = 10
    policy: Mapping[str, Any] = field(default_factory=dict)
    """Settings that replace the consumer's own, by their names."""

    relays: bool = True
    """A relay of the outbox runs beside the consumer."""

    until: Until = Until.IDLE
    session_seconds: float = 3.0
    member_seconds: float = 60.0
    stop_seconds: float = 10.0
    relay_lease_seconds: float = 2.0
    clock_jumps: bool = False
    """The wall clock goes forth and back by a day at every look."""

    trace: str = ""
    """A file for the name of every window passed."""

    runner: str = ""
    """Like *consumer*: a `Runner` to be used instead."""

    def to_json(self, **changes: Any) -> str:
        """Write it as JSON, with some of it changed."""
        return json.dumps(asdict(replace(self, **changes)))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls(**typed(cls, json.loads(text)))


class WorkerBroker(FileBroker):
    """A `FileBroker` whose members are named after their process."""

    def name_member(self, group: str) -> str:
        """Make up a name for a new member."""
        return f"{os.getpid()}.{super().name_member(group)}"


class JumpingClock:
    """A clock whose time of day is a day ahead or a day behind, by turns."""

    def __init__(self) -> None:
        self._looks = count()

    def now(self) -> float:
        """Return a wrong time."""
        ahead = next(self._looks) % 2 == 0
        return _time() + (JUMP_SECONDS if ahead else -JUMP_SECONDS)

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


_time: Final = time.time


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the worker that the one argument describes; return how it ended."""
    (text,) = sys.argv[1:] if arguments is None else arguments
    worker = Worker.from_json(text)
    speaking = logging.StreamHandler()
    speaking.setFormatter(_Nouns())
    logging.basicConfig(level=logging.WARNING, handlers=[speaking], force=True)
    if worker.trace:
        trace_into(Path(worker.trace))
    return asyncio.run(run(worker))


async def run(worker: Worker) -> int:
    """Work until the worker's end."""
    clock: Clock = SYSTEM_CLOCK
    if worker.clock_jumps:
        clock = JumpingClock()
        time.time = clock.now
    broker = WorkerBroker(
        worker.broker, clock=clock, patience=Patience(session_seconds=worker.session_seconds)
    )
    async with opened(worker.database) as database:
        subscription = await broker.subscribe(worker.group, worker.topics)
        relay = Relay(database, broker.publisher(), lease_seconds=worker.relay_lease_seconds)
        relaying = asyncio.create_task(relay.run()) if worker.relays else None
        await _consume(worker, broker, subscription, database, clock)
        if relaying is not None:
            relay.stop()
            await relaying
    print("done", flush=True)
    return 0


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[SqlDatabase]:
    """Open a database; SQLite does not wait for the disk, which only a machine's death needs."""
    database = SqlDatabase(url)
    if not database.is_postgres:
        event.listen(database.engine.sync_engine, "connect", _without_syncs)
    try:
        yield database
    finally:
        await database.close()


def _without_syncs(driver: Any, record: Any) -> None:
    cursor = driver.cursor()
    cursor.execute("PRAGMA synchronous=OFF")
    cursor.close()


async def _consume(
    worker: Worker,
    broker: FileBroker,
    subscription: Subscription,
    database: Database,
    clock: Clock,
) -> None:
    settings = RunnerSettings(
        mode=worker.mode,
        max_records=worker.max_records,
        concurrency=worker.concurrency,
        wait_seconds=0.05,
        stop_seconds=worker.stop_seconds,
        member_seconds=worker.member_seconds,
        lag_seconds=1.0,
    )
    consumer = consumer_of(worker)
    made: type[Runner] = found(worker.runner) if worker.runner else Runner
    runner = made(consumer, subscription, database, settings, clock=clock)
    watching = asyncio.create_task(_stop_when_idle(worker, broker, database, runner))
    try:
        await runner.run_until_signal()
    finally:
        watching.cancel()
        await asyncio.wait({watching})


async def _stop_when_idle(
    worker: Worker, broker: FileBroker, database: Database, runner: Runner
) -> None:
    while worker.until is Until.IDLE:
        if is_at_the_ends(broker, worker) and await _is_empty(worker, database, runner.consumer):
            runner.stop()
            return
        await asyncio.sleep(IDLE_POLL_SECONDS)


def is_at_the_ends(broker: FileBroker, worker: Worker) -> bool:
    """Return whether the group has committed the end of every partition."""
    committed = broker.committed(worker.group)
    partitions = [p for topic in worker.topics for p in broker.partitions(topic)]
    return all(committed.get(p, 0) >= broker.store.bounds(p)[1] for p in partitions)


async def _is_empty(worker: Worker, database: Database, consumer: Consumer) -> bool:
    """Return whether no message waits for its time, and nothing waits to be sent."""
    try:
        async with database.begin() as unit:
            waits = await unit.waiting.seconds_to_next(consumer.name)
            numbers = await unit.outbox.numbers("outbox")
    except (Retryable, InDoubt):
        return False
    return waits is None and not (worker.relays and numbers.pending)


def consumer_of(worker: Worker) -> Consumer:
    """Find the worker's consumer, with the worker's policy."""
    consumer = found(worker.consumer)
    if not isinstance(consumer, Consumer):
        raise Misuse(f"{worker.consumer} is no consumer; make it one with @consumer(…)")
    if not worker.policy:
        return consumer
    said = typed(ConsumerSettings, worker.policy)
    return consumer.with_settings(replace(consumer.settings, **said))


def typed(kind: type, said: Mapping[str, Any]) -> dict[str, Any]:
    """Turn values that came as JSON into those of *kind*'s fields: enums, tuples, dataclasses."""
    hints = get_type_hints(kind)

    def value_of(hint: Any, value: Any) -> Any:
        if get_origin(hint) in (tuple, frozenset):
            return get_origin(hint)(value)
        if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
            return hint(**typed(hint, value))
        return hint(value) if isinstance(hint, type) and issubclass(hint, StrEnum) else value

    return {name: value_of(hints.get(name), value) for name, value in said.items()}


def found(where: str) -> Any:
    """Import ``module:name`` or ``path/to/file.py:name``."""
    module, _, name = where.rpartition(":")
    if not module.endswith(".py"):
        return getattr(importlib.import_module(module), name)
    path = Path(module).absolute()
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise Misuse(f"{path} is no Python file")
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return getattr(sys.modules[path.stem], name)


def trace_into(path: Path) -> None:
    """Write down every window before the environment's own hook for it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(point: CrashPoint, sink: str | None) -> None:
        os.write(file, f"{point.value}\n".encode())
        if planned is not None:
            planned(point, sink)

    planned = install(None)
    install(hook)


class _Nouns(logging.Formatter):
    """Messages with the other fields of a record."""

    def format(self, record: logging.LogRecord) -> str:
        plain = logging.makeLogRecord({}).__dict__
        nouns = {k: v for k, v in record.__dict__.items() if k not in plain}
        return f"{record.getMessage()} {nouns}"


if __name__ == "__main__":
    sys.exit(main())
