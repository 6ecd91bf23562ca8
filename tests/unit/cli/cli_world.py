"""A pipeline that the commands can be asked about, healthy or left behind by a crash."""

from __future__ import annotations

import json
import sys
import time
import types
from typing import Any

import pytest
from typer.testing import CliRunner

from semel.cli.app import app
from semel.crashpoints import CrashPoint
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.pipeline.driver import Driver, Settings
from semel.pipeline.ledger import Ledger
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff, one_by_one
from semel.pipeline.txn import CycleId
from semel.testing.clock import SimulatedClock
from semel.testing.crash import Crash, crash_at
from semel.testing.local import local_stage

MODULE = "shop_pipeline"
QUICK = Backoff(tries=2, first_seconds=0.0)


class World:
    """One app with two sinks; the process that drove it may have died."""

    def __init__(self, ledger: Ledger | None = None, sinks: Any = None) -> None:
        self.clock = SimulatedClock(time.time())
        self.ledger = ledger or MemoryLedger(self.clock)
        self.sinks = sinks or [MemorySink("left"), MemorySink("right")]
        self.driver = Driver(
            "shop",
            self.ledger,
            self.sinks,
            settings=Settings(commit_backoff=QUICK),
            each=one_by_one,
        )
        self.scope = self.driver.scope
        self.batch = 0

    def start(self) -> World:
        self.driver.start()
        if not self.ledger.generations(self.scope):
            self.ledger.open_generation(self.driver.lease, "checkpoint-1")
        return self

    def run(self, rows: int = 3) -> CycleId:
        cycle = CycleId(self.scope, 1, self.batch)
        start = 10 * self.batch
        self.batch += 1
        self.driver.run_cycle(
            cycle,
            lambda: BatchRange.of_offsets({"orders/0": (start, start + 10)}),
            local_stage(self.sinks, [f"{cycle.label}-{n}" for n in range(rows)]),
        )
        return cycle

    def die_at(self, point: CrashPoint, sink: str | None = None) -> CycleId:
        """Lose the driver at *point* of the next cycle; its lease runs out."""
        cycle = CycleId(self.scope, 1, self.batch)
        with crash_at(point, sink), pytest.raises(Crash):
            self.run()
        self.clock.advance(120)
        return cycle

    def stop(self) -> World:
        self.driver.stop()
        return self


class Shell:
    """Types commands."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.runner = CliRunner()

    def type(self, *arguments: str, answer: str | None = None) -> Any:
        return self.runner.invoke(app, [*arguments], input=answer)

    def ask(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Type a command with --json about the world's pipeline; return the document."""
        done = self.type(*arguments, "--pipeline", f"{MODULE}:driver", "--json")
        assert done.exit_code == code, done.output
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["exit"] == code
        assert document["format"] == 1
        return document

    def read(self, *arguments: str, code: int = 0) -> str:
        """Type a command about the world's pipeline; return what people read."""
        done = self.type(*arguments, "--pipeline", f"{MODULE}:driver")
        assert done.exit_code == code, done.output
        return done.output


def publish(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """Make *names* importable as `shop_pipeline:name`."""
    module = types.ModuleType(MODULE)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, MODULE, module)


def shell_for(monkeypatch: pytest.MonkeyPatch, world: World) -> Shell:
    """Publish the world's driver and return a shell for it."""
    monkeypatch.delenv("SEMEL_LEDGER", raising=False)
    monkeypatch.delenv("SEMEL_PIPELINE", raising=False)
    publish(monkeypatch, driver=world.driver)
    return Shell(world)
