"""`semel status` and `semel history`."""

from __future__ import annotations

import pytest

from semel.crashpoints import CrashPoint
from semel.pipeline.source import BatchRange, SourceKind, SourceRange
from semel.pipeline.txn import CycleId
from semel.testing.local import local_stage
from tests.unit.cli.cli_world import Shell, World, shell_for

SCOPE_KEYS = {
    "scope", "app", "query", "owner", "generation", "mark", "open", "oldest_open_seconds",
    "positions", "last", "rejected", "given_up", "outgrown", "needs_attention",
    "advice",
}  # fmt: skip
ATTEMPT_KEYS = {
    "cycle", "attempt", "state", "epoch", "rows", "reason", "read", "planned_at", "decided_at",
    "finished_at", "age_seconds", "staging_seconds", "committing_seconds",
}  # fmt: skip


@pytest.fixture
def world() -> World:
    return World().start()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, world: World) -> Shell:
    return shell_for(monkeypatch, world)


def test_status_says_where_a_running_scope_stands(world, shell):
    world.run()
    world.run()

    document = shell.ask("status")

    assert set(document) == {"command", "format", "exit", "ledger", "ledger_id", "scopes"}
    (scope,) = document["scopes"]
    assert set(scope) == SCOPE_KEYS
    assert set(scope["last"]) == ATTEMPT_KEYS
    assert scope["scope"] == "shop/main"
    assert scope["owner"]["ownership"] == "live"
    assert scope["owner"]["lease_left_seconds"] > 0
    assert scope["mark"] == "g1.b1"
    assert scope["open"] == {"planned": 0, "prepared": 0, "committed": 0}
    assert scope["positions"] == [{"source": "0", "ends": {"orders/0": 20}, "files": None}]
    assert scope["last"]["rows"] == {"left": 3, "right": 3}


def test_status_calls_for_attention_when_nobody_works_on_an_open_cycle(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)

    (scope,) = shell.ask("status", code=1)["scopes"]

    assert scope["owner"]["ownership"] == "expired"
    assert scope["open"]["committed"] == 1
    assert scope["oldest_open_seconds"] is not None
    assert "semel doctor" in scope["advice"]


def test_status_reads_well(world, shell):
    world.run()

    text = shell.read("status")

    assert "shop/main" in text
    assert "1 partition: orders/0 10" in text
    assert "g1.b0 finished" in text
    assert "checkpoint-1" in text


def test_status_counts_files_only_when_asked(world, shell):
    files = SourceRange("0", SourceKind.FILES, paths=("a.json", "b.json"))
    world.driver.run_cycle(
        CycleId(world.scope, 1, 0), lambda: BatchRange((files,)), local_stage(world.sinks, ["r"])
    )

    (plain,) = shell.ask("status")["scopes"]
    (counted,) = shell.ask("status", "--files")["scopes"]

    assert plain["positions"] == [{"source": "0", "ends": {}, "files": None}]
    assert counted["positions"] == [{"source": "0", "ends": {}, "files": 2}]


def test_a_filter_that_the_pipeline_does_not_meet_is_refused(shell):
    document = shell.ask("status", "--app", "other", code=2)

    assert "shop/main" in document["error"]


def test_history_lists_attempts_newest_first_with_rows_and_durations(world, shell):
    world.run()
    world.run(rows=5)

    document = shell.ask("history")

    (scope,) = document["scopes"]
    assert set(scope) == {"scope", "attempts", "acts"}
    newest, oldest = scope["attempts"]
    assert set(newest) == ATTEMPT_KEYS
    assert (newest["cycle"], oldest["cycle"]) == ("g1.b1", "g1.b0")
    assert newest["rows"] == {"left": 5, "right": 5}
    assert newest["staging_seconds"] >= 0
    assert newest["committing_seconds"] >= 0
    assert newest["read"] == ["source 0: 10 offsets (orders/0 10..20)"]


def test_history_says_why_an_attempt_was_aborted(world, shell):
    cycle = CycleId(world.scope, 1, 0)
    txn = cycle.attempt("a1")
    world.ledger.plan(world.driver.lease, txn)
    world.ledger.decide_abort(txn, "flush: [disk] full")

    assert shell.ask("history")["scopes"][0]["attempts"][0]["reason"] == "flush: [disk] full"
    assert "flush: [disk] full" in shell.read("history")


def test_history_shows_one_cycle_and_the_limit_holds(world, shell):
    for _ in range(4):
        world.run()

    one = shell.ask("history", "--cycle", "g1.b2")["scopes"][0]["attempts"]
    two = shell.ask("history", "--limit", "2")["scopes"][0]["attempts"]

    assert [attempt["cycle"] for attempt in one] == ["g1.b2"]
    assert [attempt["cycle"] for attempt in two] == ["g1.b3", "g1.b2"]


def test_a_cycle_is_written_as_history_writes_it(shell):
    assert "g1.b42" in shell.ask("history", "--cycle", "42", code=2)["error"]


def test_history_has_what_operators_did(world, shell):
    world.ledger.record_act(world.scope, "ann@host", "recover", "disk was full", {"n": 1})

    (act,) = shell.ask("history")["scopes"][0]["acts"]

    assert (act["who"], act["act"], act["why"]) == ("ann@host", "recover", "disk was full")
    assert "disk was full" in shell.read("history")
