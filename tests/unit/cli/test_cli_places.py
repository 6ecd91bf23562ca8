"""`semel sink rename | move` and `semel app rename`: names and places change, with an audit."""

from __future__ import annotations

import json
import sys
import types
from functools import partial

from typer.testing import CliRunner

from semel import Driver
from semel.cli.app import app
from semel.files.sink import FilesSink
from semel.memory.ledger import MemoryLedger
from tests.snapshots import compare, normal
from tests.unit.pipeline.test_places import run_one

WHY = ("--who", "ann", "--why", "a better name", "--yes", "--pipeline", "places_pipeline:made")


def typed(monkeypatch, driver: Driver, *words: str):
    module = types.ModuleType("places_pipeline")
    module.made = driver
    monkeypatch.setitem(sys.modules, "places_pipeline", module)
    done = CliRunner().invoke(app, [*words, *WHY, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_names_and_places_are_changed_by_commands(monkeypatch, tmp_path):
    ledger, lake = MemoryLedger(), tmp_path / "lake"
    run_one(Driver("pay", ledger, [FilesSink(lake)]))

    named = Driver("pay", ledger, [FilesSink(lake, name="lake")])
    moved = Driver("pay", ledger, [FilesSink(tmp_path / "two", name="lake")])
    renamed = Driver("payments", ledger, [FilesSink(tmp_path / "two", name="lake")])
    ask = partial(typed, monkeypatch)
    done = {
        "sink rename": ask(named, "sink", "rename", "--from", "files", "--to", "lake"),
        "sink move": ask(moved, "sink", "move", "--sink", "lake"),
        "app rename": ask(renamed, "app", "rename", "--from", "pay"),
    }

    compare("places", {name: normal(document, tmp_path) for name, document in done.items()})
    run_one(renamed, 1)
    acts = [(act.act, act.who) for act in ledger.acts(renamed.scope) if act.who != "semel"]
    assert acts == [("app-rename", "ann"), ("sink-move", "ann"), ("sink-rename", "ann")]
