"""`semel sink rename | move` and `semel app rename`: names and places change, with an audit."""

from __future__ import annotations

import sys
import types

from typer.testing import CliRunner

from semel import Driver
from semel.cli.app import app
from semel.files.sink import FilesSink
from semel.memory.ledger import MemoryLedger
from tests.unit.pipeline.test_places import run_one

WHY = ("--who", "ann", "--why", "a better name", "--yes", "--pipeline", "places_pipeline:made")


def typed(monkeypatch, driver: Driver, *words: str):
    module = types.ModuleType("places_pipeline")
    module.made = driver
    monkeypatch.setitem(sys.modules, "places_pipeline", module)
    return CliRunner().invoke(app, [*words, *WHY])


def test_names_and_places_are_changed_by_commands(monkeypatch, tmp_path):
    ledger, lake = MemoryLedger(), tmp_path / "lake"
    run_one(Driver("pay", ledger, [FilesSink(lake)]))

    named = Driver("pay", ledger, [FilesSink(lake, name="lake")])
    done = typed(monkeypatch, named, "sink", "rename", "--from", "files", "--to", "lake")
    assert (done.exit_code, "sink files is lake now" in done.output) == (0, True), done.output

    moved = Driver("pay", ledger, [FilesSink(tmp_path / "two", name="lake")])
    done = typed(monkeypatch, moved, "sink", "move", "--sink", "lake")
    assert (done.exit_code, str(tmp_path / "two") in done.output) == (0, True), done.output

    renamed = Driver("payments", ledger, [FilesSink(tmp_path / "two", name="lake")])
    done = typed(monkeypatch, renamed, "app", "rename", "--from", "pay")
    assert (done.exit_code, "app pay is payments now" in done.output) == (0, True), done.output
    run_one(renamed, 1)
    acts = [(act.act, act.who) for act in ledger.acts(renamed.scope) if act.who != "semel"]
    assert acts == [("app-rename", "ann"), ("sink-move", "ann"), ("sink-rename", "ann")]
