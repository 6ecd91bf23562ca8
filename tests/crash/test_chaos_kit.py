"""The kit with which users prove sinks of their own: it passes good ones and convicts bad ones."""

from __future__ import annotations

import logging

import pyarrow.dataset as ds
import pytest

from semel.files.sink import FilesSink
from semel.memory.sink import MemorySink, MemoryStore, Shown
from semel.pipeline.sink import SinkOK
from semel.testing.chaos import ChaosContract, prove
from semel.testing.world import Invariant, Violation


@pytest.fixture(autouse=True)
def _quiet():
    log = logging.getLogger("semel")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(level)


class Stores(dict):
    """The destinations of memory sinks, by place."""

    def __missing__(self, place):
        return self.setdefault(place, MemoryStore())


def prove_memory(kind) -> str:
    stores = Stores()
    return str(prove(lambda place: kind("mine", store=stores[place]), lambda sink: sink.visible))


def test_a_good_sink_is_proved_in_a_few_lines():
    assert "histories" in prove_memory(MemorySink)


class TestMemorySink(ChaosContract):
    stores = Stores()

    def make_sink(self, place):
        return MemorySink("mine", store=self.stores[place])

    def visible_rows(self, sink):
        return sink.visible


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=[pytest.mark.soak])])
def test_the_files_sink_is_proved_in_a_few_lines(tmp_path, every):
    def visible_rows(sink):
        folders = list((tmp_path / sink.name).glob("cycle=*"))
        files = [file for folder in folders for file in folder.glob("*.parquet")]
        return ds.dataset(files, format="parquet").to_table().to_pylist() if files else []

    proof = prove(lambda place: FilesSink(tmp_path / place, name=place), visible_rows, every=every)

    print(proof)


class ShowsTooEarly(MemorySink):
    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkOK):
            super().commit(txn, outcome.token)
        return outcome


class CommitsAgain(MemorySink):
    """Appends at every commit, with or without proof."""

    def commit(self, txn, token):
        shown = self.store.visible.get(txn.cycle)
        if shown is not None:
            rows = (*shown.held.rows, *shown.held.rows)
            held = shown.held.__class__(shown.held.digest, rows, shown.held.tally, 0.0)
            self.store.visible[txn.cycle] = Shown(txn, held, 0.0)
        return super().commit(txn, token)


class ForgetsWhatItHolds(MemorySink):
    """Keeps prepared rows in the process, and says OK where they are gone."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        self.mine = self.store.prepared.pop(txn, None)
        return outcome

    def commit(self, txn, token):
        mine = getattr(self, "mine", None)
        if mine is None:
            return SinkOK()
        self.store.prepared[txn] = mine
        return super().commit(txn, token)


class SweepsNothing(MemorySink):
    def sweep(self, scope, is_loser):
        return []

    def left(self):
        return [*self.store.staged, *self.store.prepared]


@pytest.mark.parametrize(
    ("kind", "invariant"),
    [
        (ShowsTooEarly, Invariant.ONLY_COMMITTED),
        (CommitsAgain, Invariant.NOTHING_TWICE),
        (ForgetsWhatItHolds, Invariant.ALL_COMMITTED),
    ],
)
def test_a_bad_sink_is_convicted(kind, invariant):
    with pytest.raises(Violation) as convicted:
        prove_memory(kind)

    assert convicted.value.invariant is invariant


def test_a_sink_that_sweeps_nothing_is_convicted_by_whoever_can_look_inside():
    stores = Stores()

    with pytest.raises(Violation, match=Invariant.NOTHING_LEFT):
        prove(
            lambda place: SweepsNothing("mine", store=stores[place]),
            lambda sink: sink.visible,
            left_behind=lambda sink: sink.left(),
        )
