"""`semel ledger check | backup | restore`, and every command on a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semel.ledger.ledger import EPOCH_LEAP
from semel.ledger.sqlite import SqliteLedger
from semel.memory.ledger import MemoryLedger
from semel.pipeline.driver import Driver
from semel.testing.contracts.ledger_world import owner_elsewhere
from tests.unit.cli.cli_world import Shell, World

WHY = ("--why", "disk replaced", "--who", "ann")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "shop.ledger"
    monkeypatch.setenv("SEMEL_LEDGER", f"sqlite:///{file}")
    return file


@pytest.fixture
def world(path: Path) -> World:
    world = World(SqliteLedger(path)).start()
    world.run()
    return world.stop()


def ask(*arguments: object, code: int = 0):
    done = Shell(World(MemoryLedger())).type(*map(str, arguments), "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_the_environment_names_the_ledger(world):
    assert ask("status")["scopes"][0]["mark"] == "g1.b0"
    assert ask("history")["scopes"][0]["attempts"][0]["rows"] == {"left": 3, "right": 3}


def test_the_doctor_says_that_the_sinks_were_not_asked(world):
    (scope,) = ask("doctor")["scopes"]

    assert scope["sinks_asked"] == []


def test_scopes_are_filtered_by_app_and_query(world):
    other = Driver("billing", world.ledger, world.sinks, "late")
    other.start()
    other.stop()

    assert [scope["scope"] for scope in ask("status")["scopes"]] == ["billing/late", "shop/main"]
    assert [s["scope"] for s in ask("status", "--query", "late")["scopes"]] == ["billing/late"]
    assert "billing/late, shop/main" in ask("status", "--app", "nope", code=2)["error"]


def test_a_sound_ledger_hangs_together(world, monkeypatch):
    monkeypatch.setattr("semel.operate.ledger.of_ledger", lambda ledger: [])

    document = ask("ledger", "check")

    assert set(document) == {
        "command", "format", "exit", "ledger", "ledger_id", "scopes", "weakened_by",
    }  # fmt: skip
    assert document["scopes"][0]["attempts"] == {"finished": 1}
    assert document["scopes"][0]["problems"] == []


def test_a_ledger_in_an_odd_place_needs_attention(world):
    document = ask("ledger", "check", code=1 if "/tmp/" in str(world.ledger.url) else 0)

    assert bool(document["weakened_by"]) == ("/tmp/" in world.ledger.url)


def test_a_copy_takes_the_place_of_a_lost_ledger(world, path, tmp_path):
    made = ask("ledger", "backup", tmp_path / "copy")
    assert made["scopes"] == ["shop/main"]
    assert made["bytes"] == (tmp_path / "copy").stat().st_size
    world.ledger.close()
    (tmp_path / "copy").replace(path)

    document = ask("ledger", "restore", *WHY, "--yes")

    assert document["marks"] == {"shop/main": "g1.b0"}
    assert document["epochs"] == {"shop/main": EPOCH_LEAP + 1}
    restored = SqliteLedger(path)
    assert restored.acts(restored.scopes()[0])[0].who == "ann"


def test_an_owner_that_may_still_run_is_fenced_by_takeover_only(world):
    scope = world.ledger.scopes()[0]
    world.ledger.acquire(scope, owner_elsewhere(), 60)

    refused = ask("ledger", "restore", *WHY, "--yes", code=3)
    done = ask("ledger", "restore", *WHY, "--yes", "--takeover")

    assert "--takeover" in refused["error"]
    assert done["epochs"] == {"shop/main": EPOCH_LEAP + 2}


def test_a_copy_replaces_nothing_and_a_restore_wants_a_reason_and_an_answer(world, tmp_path):
    ask("ledger", "backup", tmp_path / "copy")

    assert "exists already" in ask("ledger", "backup", tmp_path / "copy", code=2)["error"]
    assert "--why" in ask("ledger", "restore", "--yes", code=2)["error"]
    assert "--yes" in ask("ledger", "restore", *WHY, code=2)["error"]
    assert world.ledger.scope_record(world.ledger.scopes()[0]).epoch == 1


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("history",),
        ("doctor",),
        ("ledger", "check"),
        ("ledger", "backup", "copy"),
        ("ledger", "restore", *WHY, "--yes"),
    ],
)
def test_asking_never_makes_a_ledger(path, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    document = ask(*command, code=2)

    assert f"there is no ledger at sqlite:///{path}" in document["error"]
    assert list(tmp_path.iterdir()) == []


def test_another_sqlite_file_is_not_made_a_ledger(path):
    import sqlite3

    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    before = path.read_bytes()

    assert "there is no ledger" in ask("status", code=2)["error"]
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_named(path):
    path.write_text("not a database " * 100)

    assert "not a SQLite database" in ask("status", code=4)["error"]
