"""A scope whose first owner has stopped somewhere, for the tests of recovery."""

from __future__ import annotations

from semel.events import Events
from semel.lease import Owner, Takeover
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink, MemoryStore
from semel.pipeline.ledger import CycleState
from semel.pipeline.recovery import recover
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId, Scope
from semel.testing.clock import SimulatedClock
from semel.testing.local import local_stage

ROWS = ["a", "b", "c"]


class Place:
    """A scope whose first owner has stopped somewhere, and a second one that recovers."""

    def __init__(self) -> None:
        self.clock = SimulatedClock()
        self.ledger = MemoryLedger(self.clock)
        self.scope = Scope(self.ledger.ledger_id, "app", "main")
        self.stores = {name: MemoryStore(clock=self.clock) for name in ("left", "right")}
        self.sinks = self.new_sinks()
        self.lease = self.take_over()
        self.ledger.open_generation(self.lease, "checkpoint")
        for sink in self.sinks:
            sink.fence(self.scope, self.lease.epoch)
        self.events = Events()
        self.seen = []
        self.events.subscribe(self.seen.append)

    def new_sinks(self):
        return [MemorySink(name, store=store) for name, store in self.stores.items()]

    def take_over(self):
        return self.ledger.acquire(self.scope, Owner.here(), 30.0, Takeover.FORCE)

    def attempt(self, batch: int, state: CycleState, name: str = "a1"):
        """Bring an attempt into *state*, as the first owner."""
        txn = CycleId(self.scope, 1, batch).attempt(name)
        self.ledger.plan(self.lease, txn)
        receipts = local_stage(self.sinks, ROWS)(txn)
        start = batch * len(ROWS)
        self.ledger.set_range(
            self.lease, txn, BatchRange.of_offsets({"": (start, start + len(ROWS))})
        )
        if state is CycleState.PLANNED:
            return txn
        tokens = {s.name: s.prepare(txn, receipts[s.name]).token for s in self.sinks}
        self.ledger.set_prepared(self.lease, txn, tokens, {})
        if state is CycleState.ABORTED:
            self.ledger.decide_abort(txn)
        if state in (CycleState.COMMITTED, CycleState.FINISHED):
            self.ledger.decide_commit(self.lease, txn)
        if state is CycleState.FINISHED:
            for sink in self.sinks:
                sink.commit(txn, tokens[sink.name])
            self.ledger.finish(self.lease, txn)
        return txn

    def recover(self, sinks=None, ledger=None):
        lease = self.take_over()
        return recover(
            ledger or self.ledger,
            lease,
            self.new_sinks() if sinks is None else sinks,
            events=self.events,
            clock=self.clock,
        )

    def found(self, txn):
        return [sink.look_up(txn, None).found for sink in self.sinks]

    @property
    def left(self):
        return [[*store.staged, *store.prepared] for store in self.stores.values()]
