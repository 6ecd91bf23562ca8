"""`semel cycle resolve`: the way out of a cycle that recovery cannot finish."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import NeedsOperator
from semel.memory.sink import MemorySink
from semel.pipeline.driver import Driver
from semel.pipeline.ledger import CycleState
from semel.pipeline.sink import SinkFatal
from tests.snapshots import compare, normal
from tests.unit.cli.cli_world import MODULE, Shell, World, publish, shell_for

WHY = ("--why", "keys were taken", "--who", "ann")


@dataclass
class Diverted:
    """What a diverting sink returns."""

    written: int
    diverted: int
    reject_table: str


class StuckSink(MemorySink):
    """A sink that refuses to commit until it is freed, or its rows are diverted."""

    stuck = True

    def commit(self, txn, token):
        return SinkFatal("key 7 is taken") if self.stuck else super().commit(txn, token)

    def resolve_retry(self, txn, token):
        return self.commit(txn, token)

    def resolve_divert(self, txn, token, reject_table):
        if reject_table == "nowhere":
            raise NeedsOperator("there is no table nowhere")
        super().commit(txn, token)
        return Diverted(2, 1, reject_table)


class Kept(MemorySink):
    """A sink that counts what is aborted in it."""

    aborted = 0

    def abort(self, txn, token):
        self.aborted += 1
        return super().abort(txn, token)


@pytest.fixture
def world() -> World:
    world = World(sinks=[StuckSink("left"), MemorySink("right")]).start()
    world.run()
    world.clock.advance(120)
    return world


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, world: World) -> Shell:
    return shell_for(monkeypatch, world)


def state(world: World) -> CycleState:
    return world.ledger.history(world.scope)[0].state


def test_the_cycle_is_stuck_to_begin_with(world, shell):
    assert state(world) is CycleState.COMMITTED
    assert "cycle resolve" in shell.ask("recover", *WHY, "--yes", code=4)["error"]


def test_a_retry_finishes_the_cycle_once_the_cause_is_gone(world, shell):
    resolve = ("cycle", "resolve", "--cycle", "g1.b0", "--retry", *WHY, "--yes")

    still = shell.ask(*resolve, code=1)
    world.sinks[0].stuck = False
    done = shell.ask(*resolve)

    assert set(done) == {"command", "format", "exit", "plan", "who", "why", "sinks", "finished"}
    assert still["finished"] is False
    assert still["sinks"][0]["reason"] == "key 7 is taken"
    assert done["finished"] is True
    assert state(world) is CycleState.FINISHED
    assert [sink["will"] for sink in done["plan"]["sinks"]] == ["retry", "nothing"]
    assert world.ledger.scope_record(world.scope).owner is None


def test_refused_rows_are_diverted_and_counted(world, shell):
    done = shell.ask("cycle", "resolve", "--cycle", "g1.b0", "--divert", "rejects", *WHY, "--yes")

    left = done["sinks"][0]
    assert (left["written"], left["diverted"], left["reject_table"]) == (2, 1, "rejects")
    assert state(world) is CycleState.FINISHED


def test_who_and_why_are_written_down(world, shell):
    shell.ask("cycle", "resolve", "--cycle", "g1.b0", "--divert", "rejects", *WHY, "--yes")

    after, before = world.ledger.acts(world.scope)

    assert [before.act, after.act] == ["cycle-resolve", "cycle-resolve-done"]
    assert before.who == "ann"
    assert after.detail["finished"] is True


def test_a_diversion_that_fails_leaves_the_cycle_as_it_is(world, shell):
    done = shell.ask(
        "cycle", "resolve", "--cycle", "g1.b0", "--divert", "nowhere", *WHY, "--yes", code=1
    )

    assert done["sinks"][0]["reason"] == "there is no table nowhere"
    assert state(world) is CycleState.COMMITTED


def test_a_removed_sinks_rows_can_be_given_up_by_name_only(world, shell, monkeypatch):
    publish(monkeypatch, driver=Driver("shop", world.ledger, world.sinks[1:]))
    resolve = ("cycle", "resolve", "--cycle", "g1.b0", *WHY, "--yes")

    assert "configured" in shell.ask(*resolve, "--without", "right", code=2)["error"]
    assert shell.ask(*resolve, "--retry", code=1)["finished"] is False
    done = shell.ask(*resolve, "--without", "left")

    assert done["finished"] is True
    assert done["sinks"][0]["reason"] == "its rows were given up"


def test_rows_that_configured_sinks_lost_are_given_up_one_sink_after_the_other(monkeypatch):
    world = World(sinks=[Kept("left"), Kept("right"), MemorySink("other")]).start()
    shell = shell_for(monkeypatch, world)
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    resolve = ("cycle", "resolve", "--cycle", "g1.b0", *WHY, "--yes")
    held = shell.ask(*resolve, "--without", "left", code=2)["error"]
    for sink in world.sinks[:2]:
        sink.store.prepared.clear()

    shell.ask("recover", *WHY, "--yes", code=4)
    first = shell.ask(*resolve, "--without", "left", code=1)
    second = shell.ask(*resolve, "--without", "right")

    assert "is configured and answers 'held'" in held
    assert (first["finished"], second["finished"]) == (False, True)
    assert state(world) is CycleState.FINISHED
    assert [sink.aborted for sink in world.sinks[:2]] == [1, 1]
    assert sorted(world.sinks[2].visible) == ["g1.b0-0", "g1.b0-1", "g1.b0-2"]
    shell.ask("recover", *WHY, "--yes")


def test_rows_that_a_sink_holds_and_refuses_are_abandoned_and_said(world, shell):
    resolve = ("cycle", "resolve", "--cycle", "g1.b0", "--without", "left", *WHY, "--yes")
    assert "--abandon" in shell.ask(*resolve, code=2)["error"]

    done = shell.ask(*resolve, "--abandon")

    assert done["finished"] is True
    assert [one["will"] for one in done["plan"]["sinks"]] == ["abandon", "nothing"]
    assert world.sinks[0].store.prepared == {}
    assert shell.ask("status")["scopes"][0]["given_up"] == {"left": 3}
    assert "given up rows" in shell.read("status")
    assert "g1.b0: left abandon" in " ".join(shell.read("history").split())
    shell.ask("recover", *WHY, "--yes")


def test_a_finished_cycle_is_undone_once_and_said(monkeypatch, tmp_path):
    world = World().start()
    world.run()
    world.run()
    world.stop()
    shell = shell_for(monkeypatch, world)
    undo = ("cycle", "undo", "--cycle", "g1.b0", *WHY)

    plan = shell.ask(*undo, "--dry-run")
    assert [one["will"] for one in plan["sinks"]] == ["undo", "undo"]
    assert "--why" in shell.ask(*undo[:4], "--yes", code=2)["error"]
    assert len(world.sinks[0].visible) == 6, "nothing was changed"
    done = shell.ask(*undo, "--yes")

    documents = {"cycle undo --dry-run": plan, "cycle undo": done}
    compare("undo", {name: normal(document, tmp_path) for name, document in documents.items()})
    assert (done["decided_by"], done["plan"]["undone_before"]) == ("shop/main-undo", False)
    assert sorted(world.sinks[0].visible) == ["g1.b1-0", "g1.b1-1", "g1.b1-2"]
    assert "g1.b0: left undo, right undo" in " ".join(shell.read("history").split())
    assert "undone before" in shell.read(*undo, "--yes")
    assert shell.ask("verify")["checks"]


def test_a_sink_that_cannot_undo_is_named_and_may_be_left_as_it_is(monkeypatch):
    class Topic(MemorySink):
        undo = None

    world = World(sinks=[MemorySink("left"), Topic("events")]).start()
    world.run()
    shell = shell_for(monkeypatch, world)
    undo = ("cycle", "undo", "--cycle", "g1.b0", *WHY, "--yes")

    plan = shell.ask(*undo, "--dry-run", code=1)
    assert "no way to take away" in plan["sinks"][0]["refusal"]
    assert "events: Topic" in shell.ask(*undo, code=4)["error"]
    shell.ask(*undo, "--without", "events")

    assert [len(sink.visible) for sink in world.sinks] == [0, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "choose one of"),
        (("--retry", "--divert", "t"), "choose one of"),
        (("--retry", "--sink", "middle"), "has no part"),
        (("--divert", "t", "--sink", "right"), None),
        (("--without", "left", "--sink", "left"), "leave --sink out"),
        (("--retry", "--abandon"), "--without SINK --abandon"),
    ],
)
def test_a_choice_that_does_not_fit_is_refused(world, shell, options, words):
    code = 2 if words else 1
    document = shell.ask("cycle", "resolve", "--cycle", "g1.b0", *options, *WHY, "--yes", code=code)

    if words:
        assert words in document["error"]
    else:
        assert document["finished"] is False, "the other sink is still stuck"


def test_a_sink_that_cannot_divert_says_so(world, shell):
    world.sinks[0].stuck = False
    world.driver.start()
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)

    document = shell.ask(
        "cycle", "resolve", "--cycle", "g1.b1", "--divert", "t", *WHY, "--yes", code=2
    )

    assert "'right' cannot divert" in document["error"]


def test_an_uncommitted_cycle_is_recoverys(shell):
    document = shell.ask("cycle", "resolve", "--cycle", "g1.b9", "--retry", *WHY, code=2)

    assert "semel recover" in document["error"]


def test_it_says_what_it_will_do_and_asks(world, shell):
    done = shell.type(
        "cycle", "resolve", "--cycle", "g1.b0", "--retry", *WHY,
        "--pipeline", f"{MODULE}:driver", answer="n\n",
    )  # fmt: skip

    assert done.exit_code == 130
    assert "3 rows are held" in done.output
    assert world.ledger.acts(world.scope) == []
