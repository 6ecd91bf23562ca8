"""The JSON documents of every command about a pipeline, as they are promised to users."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semel.cli.preamble import COMMANDS
from semel.crashpoints import CrashPoint
from semel.ledger.sqlite import SqliteLedger
from semel.memory.sink import MemorySink
from semel.pipeline.driver import Driver
from tests.snapshots import FOLDER, compare, normal
from tests.unit.cli.cli_world import MODULE, Shell, World, publish, shell_for
from tests.unit.cli.test_cli_adopt import write_checkpoint
from tests.unit.cli.test_cli_cycle import StuckSink
from tests.unit.policy.policy_texts import TEMPLATE

WHY = ("--why", "the host died", "--who", "ann")
PIPELINE = ("--pipeline", f"{MODULE}:driver")


def taker(shell: Shell, folder: Path, found: dict[str, Any]) -> Callable[..., None]:
    """Return a function that keeps a command's document under a name."""

    def take(name: str, *arguments: object) -> None:
        done = shell.type(*map(str, arguments), "--json")
        found[name] = normal(json.loads(done.stdout), folder)

    return take


def test_the_documents_about_a_pipeline_keep_their_keys(monkeypatch, tmp_path):
    found: dict[str, Any] = {}
    world = World().start()
    take = taker(shell_for(monkeypatch, world), tmp_path, found)

    take("status: nothing ran", "status", *PIPELINE)
    world.run()
    world.run()
    take("status", "status", *PIPELINE)
    take("status --files", "status", "--files", *PIPELINE)
    take("history", "history", *PIPELINE)
    take("cut", "cut", *PIPELINE)
    take("doctor", "doctor", *PIPELINE)
    take("recover: owned", "recover", *PIPELINE, "--who", "ann")
    world.stop()
    take("recover: nothing", "recover", *PIPELINE, "--who", "ann")
    world.start()
    take("verify", "verify", *PIPELINE)
    take("lint", "lint", *PIPELINE)
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE, "right")
    take("status: stranded", "status", *PIPELINE)
    take("doctor: stranded", "doctor", "--strict", *PIPELINE)
    take("verify: unfinished", "verify", *PIPELINE)
    take("recover --dry-run", "recover", "--dry-run", *PIPELINE)
    take("recover: no reason", "recover", "--yes", *PIPELINE)
    take("recover", "recover", *WHY, "--yes", *PIPELINE)
    take("history: after", "history", *PIPELINE)
    take("history --cycle", "history", "--cycle", "g1.b2", *PIPELINE)
    world.start()
    world.die_at(CrashPoint.COMMIT_TXN_BEFORE)
    take("recover: aborts", "recover", *WHY, "--yes", *PIPELINE)
    monkeypatch.setattr(world.sinks[1], "recover", _silence)
    publish(monkeypatch, driver=Driver("shop", world.ledger, world.sinks))
    take("doctor: silent", "doctor", *PIPELINE)

    compare("pipeline", found)


def _silence(*_: Any) -> Any:
    raise ConnectionError("nobody at home")


def test_the_documents_about_a_stuck_cycle_keep_their_keys(monkeypatch, tmp_path):
    found: dict[str, Any] = {}
    world = World(sinks=[StuckSink("left"), MemorySink("right")]).start()
    take = taker(shell_for(monkeypatch, world), tmp_path, found)
    resolve = ("cycle", "resolve", *PIPELINE, "--cycle", "g1.b0", *WHY, "--yes")
    world.run()
    world.clock.advance(120)

    take("doctor", "doctor", *PIPELINE)
    take("recover", "recover", *PIPELINE, *WHY, "--yes")
    take("cycle resolve --retry: in vain", *resolve, "--retry")
    take("cycle resolve: no choice", *resolve)
    take("cycle resolve --divert", *resolve, "--divert", "rejects")
    take("history", "history", *PIPELINE)

    compare("cycle", found)


def test_the_documents_about_a_ledger_keep_their_keys(monkeypatch, tmp_path):
    found: dict[str, Any] = {}
    path = tmp_path / "shop.ledger"
    monkeypatch.setenv("SEMEL_LEDGER", f"sqlite:///{path}")
    world = World(SqliteLedger(path)).start()
    take = taker(Shell(world), tmp_path, found)
    world.run()
    world.run()
    world.stop()
    adopt = ("adopt", "--app", "shop", "--checkpoint", tmp_path / "cp")

    for number, begin in enumerate((20, 5, 50)):
        write_checkpoint(tmp_path / f"cp{number}", [begin, begin + 10], finished=None)
        take(f"adopt --dry-run {begin}", *adopt[:-1], tmp_path / f"cp{number}", "--dry-run", *WHY)
    take("adopt", *adopt[:-1], tmp_path / "cp2", *WHY, "--yes")
    take("adopt: no checkpoint", *adopt, *WHY, "--yes")
    take("status", "status")
    take("history", "history")
    take("doctor", "doctor")
    take("ledger check", "ledger", "check")
    take("ledger backup", "ledger", "backup", tmp_path / "copy")
    take("ledger restore", "ledger", "restore", *WHY, "--yes", "--takeover")
    take("status: no such app", "status", "--app", "nope")
    # A ledger below /tmp is a finding of its own, and not every machine tests there.
    for name in ("doctor", "ledger check"):
        found[name] |= {"weakened_by": [], "exit": None}

    compare("ledger", found)


def test_the_documents_about_a_policy_keep_their_keys(monkeypatch, tmp_path):
    found: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.yaml").write_text(TEMPLATE)
    (tmp_path / "wrong.yaml").write_text("semel:\n  consumer: 3\n")
    take = taker(Shell(World()), tmp_path, found)

    take("policy lint", "policy", "lint", "policy.yaml")
    take("policy lint: wrong", "policy", "lint", "wrong.yaml")
    take("policy show", "policy", "show", "policy.yaml", "--consumer", "search-indexer")
    take("policy schema", "policy", "schema")
    found["policy schema"] = sorted(found["policy schema"])

    compare("policy", found)


def test_every_command_has_a_document():
    kept = [name for file in FOLDER.glob("*.json") for name in json.loads(file.read_text())]

    assert {
        command
        for command in COMMANDS
        if not any(re.match(rf"{command}($|:| -)", name) for name in kept)
    } == set()


@pytest.mark.parametrize("lost", ["key", "value"])
def test_a_lost_key_and_another_value_are_noticed(lost, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.snapshots.FOLDER", tmp_path)
    monkeypatch.setenv("SEMEL_SNAPSHOTS", "write")
    compare("one", {"status": {"a": 1, "b": [{"c": 2}]}})
    monkeypatch.delenv("SEMEL_SNAPSHOTS")
    compare("one", {"status": {"a": 1, "b": [{"c": 2, "new": 3}]}})

    with pytest.raises(AssertionError):
        compare("one", {"status": {"a": 1, "b": [{} if lost == "key" else {"c": 3}]}})
