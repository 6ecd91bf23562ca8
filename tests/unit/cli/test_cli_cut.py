"""`semel cut`: through which cycle every sink is visible."""

from __future__ import annotations

import json

import pytest

from semel.crashpoints import CrashPoint
from semel.memory.sink import MemorySink
from semel.operate.status import cut_of
from semel.pipeline.driver import Driver
from tests.unit.cli.cli_world import MODULE, Shell, World, publish, shell_for


@pytest.fixture
def world() -> World:
    return World().start()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, world: World) -> Shell:
    return shell_for(monkeypatch, world)


def test_nothing_is_visible_before_the_first_cycle(world, shell):
    (scope,) = shell.ask("cut")["scopes"]

    assert (scope["cycle"], scope["positions"]) == (None, [])
    assert "nothing finished yet" in shell.read("cut")


def test_the_cut_is_the_last_cycle_that_every_sink_shows(world, shell):
    world.run()
    world.run()

    (scope,) = shell.ask("cut")["scopes"]

    assert scope["cycle"] == "g1.b1"
    assert scope["positions"] == [{"source": "0", "ends": {"orders/0": 20}, "files": None}]
    assert scope["finished_at"] > 0
    assert [(s["sink"], s["mark"], s["agrees"]) for s in scope["sinks"]] == [
        ("left", "g1.b1", True),
        ("right", "g1.b1", True),
    ]
    assert "1 partition: orders/0 20" in shell.read("cut")


def test_a_cycle_that_only_some_sinks_show_is_not_in_the_cut(world, shell):
    world.run()
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE, "right")

    (scope,) = shell.ask("cut")["scopes"]

    assert scope["cycle"] == "g1.b0"
    assert scope["positions"][0]["ends"] == {"orders/0": 10}
    assert [(s["mark"], s["agrees"]) for s in scope["sinks"]] == [("g1.b1", True), ("g1.b0", True)]


def test_an_undecided_cycle_moves_nothing(world, shell):
    world.run()
    world.die_at(CrashPoint.COMMIT_TXN_BEFORE)

    (scope,) = shell.ask("cut")["scopes"]

    assert (scope["cycle"], scope["positions"][0]["ends"]) == ("g1.b0", {"orders/0": 10})


def test_a_cycle_that_ends_while_the_cut_is_read_does_not_tear_it(world):
    world.run()
    read = world.ledger.positions
    cycles = iter([world.run])

    class Busy:
        """A ledger in which a cycle ends between two questions."""

        def __getattr__(self, name):
            return getattr(world.ledger, name)

        def positions(self, *arguments):
            for run in cycles:
                run()
            return read(*arguments)

    found = cut_of(Busy(), world.scope)

    assert (found.cycle, found.positions[0].ends) == ("g1.b1", {"orders/0": 20})


def test_a_sink_that_shows_less_or_does_not_answer_is_named(monkeypatch, world, shell):
    world.run()
    behind = MemorySink("behind")
    monkeypatch.setattr(world.sinks[1], "mark", _silence)
    publish(monkeypatch, driver=Driver("shop", world.ledger, [*world.sinks, behind]))

    (scope,) = shell.ask("cut", code=1)["scopes"]

    assert [(s["sink"], s["agrees"]) for s in scope["sinks"]] == [
        ("left", True),
        ("right", False),
        ("behind", False),
    ]
    assert "nobody at home" in scope["sinks"][1]["reason"]
    assert "took no part in the last cycles" in scope["sinks"][2]["reason"]


def _silence(*_):
    raise ConnectionError("nobody at home")


def test_the_cut_can_be_left_in_a_file_for_readers(tmp_path, world, shell):
    world.run()
    file = tmp_path / "cut.json"
    file.write_text("old")

    shell.ask("cut", "--to", str(file))

    kept = json.loads(file.read_text())
    assert (kept["cycle"], kept["positions"][0]["ends"]) == ("g1.b0", {"orders/0": 10})
    assert [path.name for path in tmp_path.iterdir()] == ["cut.json"]
    document = shell.ask("cut", "--to", str(tmp_path / "none" / "cut.json"), code=2)
    assert "No such file" in document["error"]


def test_a_file_holds_the_cut_of_one_scope(monkeypatch, tmp_path):
    world = World().start()
    Driver("other", world.ledger, world.sinks).start()
    publish(monkeypatch, ledger=world.ledger)
    monkeypatch.setattr("semel.cli.target.open_ledger", lambda url: world.ledger)
    shell = shell_for(monkeypatch, world)

    done = shell.type("cut", "--ledger", "sqlite:///x", "--to", str(tmp_path / "cut.json"))

    assert (done.exit_code, MODULE) == (2, "shop_pipeline")
    assert "give --app" in done.output
