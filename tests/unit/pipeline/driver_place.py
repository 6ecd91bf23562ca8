"""A ledger and a sink that the tests of the driver share."""

from __future__ import annotations

from dataclasses import replace

from semel.events import Events
from semel.lease import Owner
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink, MemoryStore
from semel.pipeline.driver import Driver, Settings
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import one_by_one
from semel.pipeline.txn import CycleId
from semel.testing.clock import SimulatedClock
from semel.testing.faults import FaultPlan, faulty_ledger, faulty_sink
from semel.testing.local import local_stage

ROWS = ["a", "b"]


class Place:
    """A ledger and a sink that several drivers use."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.ledger = MemoryLedger(self.clock)
        self.store = MemoryStore(clock=self.clock)
        self.ledger_plan = FaultPlan()
        self.sink_plan = FaultPlan()
        self.seen = []
        self.events = Events()
        self.events.subscribe(self.seen.append)
        self.owners = 0

    def driver(self, **settings) -> Driver:
        self.owners += 1
        return Driver(
            "app",
            faulty_ledger(self.ledger, plan=self.ledger_plan),
            [faulty_sink(MemorySink("sink", store=self.store), plan=self.sink_plan)],
            settings=replace(Settings(lease_seconds=30.0), **settings),
            owner=Owner("elsewhere", "boot", self.owners, "0", f"owner-{self.owners}"),
            each=one_by_one,
            events=self.events,
            clock=self.clock,
        )

    def started(self, **settings) -> Driver:
        driver = self.driver(**settings)
        driver.start()
        driver.ledger.open_generation(driver.lease, "checkpoint")
        return driver

    def run(self, driver: Driver, batch: int = 0, read_range=None, stage=None):
        return driver.run_cycle(
            CycleId(driver.scope, 1, batch),
            read_range or (lambda: BatchRange.of_offsets({"": (batch * 2, batch * 2 + 2)})),
            stage or local_stage(driver.sinks, ROWS),
        )

    def attempts(self, driver: Driver, batch: int = 0):
        return [r.state for r in self.ledger.attempts(CycleId(driver.scope, 1, batch))]

    @property
    def visible(self):
        return sorted(MemorySink("sink", store=self.store).visible)

    @property
    def left(self):
        return [*self.store.staged, *self.store.prepared]
