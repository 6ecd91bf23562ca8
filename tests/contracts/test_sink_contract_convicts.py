"""The sink contract is able to convict: one broken sink per rule."""

from __future__ import annotations

import pytest
from broken_sinks import CONVICTED_BY

from semel.memory.sink import MemorySink, MemoryStore
from semel.testing import SinkContract


def contract_of(sink_class):
    class Contract(SinkContract):
        secrets = ("opensesame",)

        def __init__(self):
            self.memory = MemoryStore()

        def make_sink(self):
            return sink_class(store=self.memory)

        def visible_rows(self, sink):
            return sink.visible

        def leavings(self, sink):
            return [*self.memory.staged, *self.memory.prepared]

        def lose(self, sink, txn):
            self.memory.prepared.pop(txn, None)

    return Contract


@pytest.mark.parametrize("broken", CONVICTED_BY, ids=lambda sink: sink.__name__)
def test_a_broken_sink_is_convicted_by_the_rule_it_breaks(broken):
    found = contract_of(broken).violations()

    assert f"test_{CONVICTED_BY[broken]}" in found


def test_the_reference_is_acquitted():
    assert contract_of(MemorySink).violations() == {}


def test_every_broken_sink_names_a_rule_that_exists():
    assert {f"test_{rule}" for rule in CONVICTED_BY.values()} <= set(SinkContract.rules())


def test_every_rule_convicts_somebody():
    convicting = {rule for broken in CONVICTED_BY for rule in contract_of(broken).violations()}

    assert set(SinkContract.rules()) <= convicting
