"""Rows on their way to a memory sink, from this process and from others."""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import subprocess
import sys
from decimal import Decimal

import pytest

from semel.memory.sink import MemorySink, from_plain, tally_rows, to_plain
from semel.pipeline.sink import Receipt, SinkOK
from semel.pipeline.txn import CycleId, Scope

TXN = CycleId(Scope("ledger", "payments", "main"), 1, 0).attempt("one")
ROWS = [
    {
        "id": 1,
        "amount": Decimal("1.50"),
        "raw": b"\x00",
        "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    },
    {"$": "a key like our tag", "day": dt.date(2026, 1, 1), "time": dt.time(1, 2, 3)},
    ("a", "tuple", [1, None, float("inf")]),
    {1: "a map", ("x",): dt.timedelta(days=-1, seconds=3)},
    "text",
    None,
]


def test_rows_of_every_type_survive_json():
    assert [from_plain(json.loads(json.dumps(to_plain(row)))) for row in ROWS] == ROWS


def test_what_is_no_row_is_refused():
    with pytest.raises(TypeError, match="object"):
        to_plain(object())


def test_the_tally_does_not_depend_on_the_order():
    assert tally_rows(ROWS) == tally_rows(ROWS[::-1])
    assert tally_rows(ROWS) != tally_rows(ROWS[1:])


def test_rows_staged_in_another_process_travel_in_the_receipt():
    sink = MemorySink()
    program = """
import pickle, sys
stager, rows = pickle.load(sys.stdin.buffer)
writer = stager.open("task-1")
writer.write(rows)
print(writer.finish().to_json())
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps((sink.stager(TXN), ROWS)),
        stdout=subprocess.PIPE,
        check=True,
    )

    outcome = sink.prepare(TXN, [Receipt.from_json(ran.stdout.decode())])

    assert isinstance(outcome, SinkOK)
    assert isinstance(sink.commit(TXN, outcome.token), SinkOK)
    assert sink.visible == ROWS


def test_a_forked_copy_of_the_store_is_not_taken_for_the_store(monkeypatch):
    sink = MemorySink()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        writer = sink.stager(TXN).open("task-1")
        writer.write([1, 2])
        receipt = writer.finish()

    outcome = sink.prepare(TXN, [receipt])

    assert sink.store.staged == {}
    assert isinstance(sink.commit(TXN, outcome.token), SinkOK)
    assert sink.visible == [1, 2]


def test_rows_are_visible_in_the_order_of_the_commits():
    sink = MemorySink()
    for number in (1, 0, 2):
        txn = CycleId(Scope("ledger", "payments", f"q{number}"), 1, 0).attempt()
        writer = sink.stager(txn).open("task")
        writer.write([number])
        sink.commit(txn, sink.prepare(txn, [writer.finish()]).token)

    assert sink.visible == [1, 0, 2]
    assert [*sink.visible_by_cycle.values()] == [[1], [0], [2]]
