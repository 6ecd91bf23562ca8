"""`semel recover`: what it says before, what it does, and what it writes down."""

from __future__ import annotations

import json

import pytest

from semel.cli.database import this_account
from semel.crashpoints import CrashPoint
from semel.ledger.sqlite import SqliteLedger
from semel.memory.sink import MemorySink
from semel.operate.stores import Account, acting_from
from semel.pipeline.driver import Driver
from semel.pipeline.sink import SinkFatal, SinkRetryable
from semel.pipeline.txn import CycleId
from tests.messaging.cli_books import CliBooks
from tests.unit.cli.cli_world import MODULE, Shell, World, publish, shell_for

WHY = ("--why", "host lost", "--who", "ann")


@pytest.fixture
def world() -> World:
    return World().start()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, world: World) -> Shell:
    return shell_for(monkeypatch, world)


def everything(world: World):
    scope = world.scope
    return (
        world.ledger.scope_record(scope),
        world.ledger.open_attempts(scope),
        world.ledger.acts(scope),
        [sink.store.snapshot() for sink in world.sinks],
    )


@pytest.mark.parametrize(
    ("point", "decision"),
    [
        (CrashPoint.PRE_COMMIT_2PC_AFTER, "AbortFromToken"),
        (CrashPoint.COMMIT_TXN_BEFORE, "AbortFromToken"),
        (CrashPoint.COMMIT_TXN_AFTER, "CommitFromToken"),
        (CrashPoint.COMMIT_2PC_BEFORE, "CommitFromToken"),
    ],
)
def test_a_dry_run_shows_the_decisions_that_recovery_takes_and_changes_nothing(
    world, shell, point, decision
):
    world.die_at(point)
    before = everything(world)

    plan = shell.ask("recover", "--dry-run", code=1)

    assert plan["dry_run"] is True
    assert {one["decision"] for one in plan["stranded"]} == {decision}
    assert everything(world) == before

    done = shell.ask("recover", *WHY, "--yes")
    taken = {(s["sink"], s["cycle"], s["attempt"], s["decision"]) for s in done["settled"]}
    planned = {(s["sink"], s["cycle"], s["attempt"], s["decision"]) for s in plan["stranded"]}
    assert planned <= taken
    assert world.ledger.open_attempts(world.scope) == []


def test_recovery_finishes_the_committed_cycle_and_lets_go_of_the_scope(world, shell):
    cycle = world.die_at(CrashPoint.COMMIT_2PC_BEFORE)

    done = shell.ask("recover", *WHY, "--yes")

    assert [label.rpartition(".")[0] for label in done["finished"]] == [cycle.label]
    assert all(len(sink.visible) == 3 for sink in world.sinks)
    record = world.ledger.scope_record(world.scope)
    assert record.owner is None
    assert record.epoch == done["epoch"] == 2


def test_who_and_why_are_written_down_before_and_after(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)

    shell.ask("recover", *WHY, "--yes")

    after, before = world.ledger.acts(world.scope)
    assert [before.act, after.act] == ["recover", "recover-done"]
    assert {(act.who, act.why) for act in (before, after)} == {("ann", "host lost")}
    assert after.detail["finished"]


def test_nothing_happens_without_a_reason(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    before = everything(world)

    assert "--why" in shell.ask("recover", "--yes", code=2)["error"]
    assert everything(world) == before


def test_nothing_happens_if_the_answer_is_no(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    before = everything(world)

    done = shell.type("recover", "--pipeline", f"{MODULE}:driver", *WHY, answer="n\n")

    assert done.exit_code == 130
    assert "CommitFromToken" in done.output, "it says what it would do before it asks"
    assert everything(world) == before


def test_it_happens_if_the_answer_is_yes(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)

    done = shell.type("recover", "--pipeline", f"{MODULE}:driver", *WHY, answer="y\n")

    assert done.exit_code == 0
    assert "1 cycle finished" in done.output


def test_with_json_nobody_is_asked(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)

    assert "--yes" in shell.ask("recover", *WHY, code=2)["error"]


def test_where_nothing_is_stranded_nothing_is_changed(world, shell):
    world.run()
    world.stop()
    before = everything(world)

    done = shell.ask("recover")

    assert (done["epoch"], done["settled"]) == (None, [])
    assert everything(world) == before
    assert "nothing to settle" in shell.read("recover")


def test_a_live_owner_is_left_alone_unless_told_otherwise(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    world.ledger.renew(world.driver.lease)

    document = shell.ask("recover", *WHY, "--yes", code=3)
    taken = shell.ask("recover", *WHY, "--yes", "--takeover")

    assert "--takeover" in document["error"]
    assert len(taken["finished"]) == 1


def test_what_the_ledger_does_not_know_is_left_and_needs_attention(world, shell):
    world.stop()
    txn = CycleId(world.scope, 1, 99).attempt("foreign")
    writer = world.sinks[0].stager(txn).open("t0")
    writer.write(["row"])
    world.sinks[0].prepare(txn, [writer.finish()])

    done = shell.ask("recover", *WHY, "--yes", code=1)

    assert [left["cycle"] for left in done["left_as_is"]] == ["g1.b99"]
    assert world.sinks[0].recover(world.scope) == [txn]


@pytest.mark.parametrize(
    ("answer", "code", "hint"),
    [
        (SinkRetryable("no route"), 75, "nothing is lost"),
        (SinkFatal("key taken"), 4, "semel cycle resolve"),
    ],
)
def test_a_sink_that_refuses_decides_the_exit_code_and_is_written_down(
    world, shell, monkeypatch, answer, code, hint
):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    monkeypatch.setattr(MemorySink, "commit", lambda self, txn, token: answer)

    document = shell.ask("recover", *WHY, "--yes", code=code)

    assert hint in document["error"]
    assert world.ledger.acts(world.scope)[0].act == "recover-failed"
    assert world.ledger.scope_record(world.scope).owner is None


def test_a_missing_sink_is_named_before_anything_happens(world, shell, monkeypatch):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    publish(monkeypatch, driver=Driver("shop", world.ledger, world.sinks[:1]))

    plan = shell.ask("recover", "--dry-run", code=1)

    assert any("'right'" in block for block in plan["blocked_by"])


def test_many_transactions_are_settled_with_progress_on_stderr_only(world, shell):
    for n in range(30):
        txn = CycleId(world.scope, 1, n).attempt(f"a{n}")
        world.ledger.plan(world.driver.lease, txn)
        writer = world.sinks[0].stager(txn).open("t0")
        writer.write([n])
        world.sinks[0].prepare(txn, [writer.finish()])
    world.clock.advance(120)

    done = shell.type("recover", "--pipeline", f"{MODULE}:driver", "--json", "--yes", *WHY)

    assert done.exit_code == 0
    assert len(json.loads(done.stdout)["aborted"]) == 30


def test_an_act_is_in_the_audit_trail_of_the_messages_with_the_account(
    tmp_path, monkeypatch, world, shell
):
    books = CliBooks(tmp_path / "shop.db")
    monkeypatch.setenv("SEMEL_DATABASE", books.url)
    world.die_at(CrashPoint.COMMIT_TXN_AFTER)

    shell.ask("recover", *WHY, "--yes")

    [entry] = books.ask("audit", "list")["entries"]
    assert (entry["actor"], entry["act"], entry["reason"]) == (
        "ann",
        "pipeline recover",
        "host lost",
    )
    assert entry["details"]["account"] == this_account()


def test_a_database_that_does_not_answer_delays_no_recovery(monkeypatch, world, shell):
    monkeypatch.setenv("SEMEL_DATABASE", "sqlite:////nowhere/shop.db")
    world.die_at(CrashPoint.COMMIT_TXN_AFTER)

    assert "not in the audit trail" in shell.read("recover", *WHY, "--yes")


def test_the_account_is_kept_beside_the_name_in_the_ledger(tmp_path, monkeypatch):
    ledger = SqliteLedger(tmp_path / "ledger.db")
    world = World(ledger).start()
    world.stop()
    with acting_from(Account("root@shop-1")):
        ledger.record_act(world.scope, "ann", "look", "because", {"x": 1})

    assert ledger.acts(world.scope)[-1].detail == {"x": 1, "account": "root@shop-1"}
    ledger.close()
