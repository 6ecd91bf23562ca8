"""A memory broker with records in it."""

from __future__ import annotations

from semel.memory.broker import MemoryBroker
from semel.memory.broker_groups import Patience
from semel.message import Partition

P0, P1 = Partition("t", 0), Partition("t", 1)
PATIENCE = Patience(session_seconds=10.0, rebalance_seconds=30.0)


def filled(*values, partitions=1, **settings):
    broker = MemoryBroker({"t": partitions}, patience=PATIENCE, **settings)
    for value in values:
        broker.put("t", value.encode(), b"k")
    return broker


def values(records):
    return [record.value.decode() for record in records]
