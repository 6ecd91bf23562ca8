"""`semel doctor`: stranded transactions, silent sinks, wrong ledgers, weak settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import Retryable
from semel.lease import Takeover
from semel.memory.ledger import MemoryLedger
from semel.memory.sink import MemorySink
from semel.operate.doctor import RUNBOOKS, Kind
from semel.pipeline.driver import Driver
from semel.pipeline.sink import Guarantee
from semel.pipeline.txn import CycleId
from tests.unit.cli.cli_world import Shell, World, publish, shell_for

STRANDED_KEYS = {
    "scope", "sink", "cycle", "attempt", "ledger_says", "found", "evidence", "decision", "rows",
    "age_seconds", "in_flight",
}  # fmt: skip


@pytest.fixture
def world() -> World:
    return World().start()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, world: World) -> Shell:
    return shell_for(monkeypatch, world)


def kinds(document) -> set[str]:
    return {problem["kind"] for scope in document["scopes"] for problem in scope["problems"]}


def test_a_healthy_pipeline_needs_no_attention(world, shell):
    world.run()

    document = shell.ask("doctor")

    assert set(document) == {
        "command", "format", "exit", "ledger", "scopes", "weakened_by", "strict",
    }  # fmt: skip
    (scope,) = document["scopes"]
    assert (scope["stranded"], scope["attempts"], scope["problems"]) == ([], [], [])
    assert scope["sinks_asked"] == ["left", "right"]
    assert "nothing needs attention" in shell.read("doctor")


def test_what_was_committed_and_not_finished_is_stranded_with_evidence(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)

    document = shell.ask("doctor", code=1)

    (scope,) = document["scopes"]
    assert [one["sink"] for one in scope["stranded"]] == ["left", "right"]
    one = scope["stranded"][0]
    assert set(one) == STRANDED_KEYS
    assert one["found"] == "held"
    assert one["evidence"] == "3 rows are held"
    assert one["ledger_says"] == "committed"
    assert one["decision"] == "CommitFromToken"
    assert one["age_seconds"] is not None
    assert kinds(document) == {"stranded", "lease_lost"}
    text = shell.read("doctor", code=1)
    assert "docs/operate/runbooks/sink-not-finished.md" in text
    assert "3 rows are held" in text


def test_what_was_never_decided_will_be_aborted(world, shell):
    world.die_at(CrashPoint.COMMIT_TXN_BEFORE)

    (scope,) = shell.ask("doctor", code=1)["scopes"]

    assert {one["decision"] for one in scope["stranded"]} == {"AbortFromToken"}
    assert scope["attempts"][0]["state"] == "prepared"


def test_an_attempt_without_anything_in_a_sink_is_reported_once(world, shell):
    world.die_at(CrashPoint.FLUSH_BEFORE)

    (scope,) = shell.ask("doctor", code=1)["scopes"]

    assert scope["stranded"] == []
    assert [p["kind"] for p in scope["problems"]] == ["stranded", "lease_lost"]
    assert "the batch runs again" in scope["problems"][0]["what"]


def test_a_live_owners_work_is_in_flight_and_needs_no_attention(world, shell):
    cycle = CycleId(world.scope, 1, 0)
    txn = cycle.attempt("a1")
    world.ledger.plan(world.driver.lease, txn)
    hold(world.sinks[0], txn)

    (scope,) = shell.ask("doctor")["scopes"]

    assert [one["in_flight"] for one in scope["stranded"]] == [True]
    assert scope["problems"] == []


def hold(sink: MemorySink, txn) -> None:
    writer = sink.stager(txn).open("t0")
    writer.write(["row"])
    sink.prepare(txn, [writer.finish()])


def test_what_the_ledger_does_not_know_is_left_as_it_is(world, shell):
    txn = CycleId(world.scope, 1, 99).attempt("foreign")
    hold(world.sinks[0], txn)

    document = shell.ask("doctor", code=1)

    assert kinds(document) == {"not_ours"}
    assert document["scopes"][0]["stranded"][0]["decision"] == "UnknownLeaveAsIs"


def test_promised_rows_that_are_gone_are_a_contradiction(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    world.sinks[0].store.prepared.clear()

    document = shell.ask("doctor", code=1)

    assert "contradiction" in kinds(document)
    assert [one["found"] for one in document["scopes"][0]["stranded"]] == ["gone", "held"]


def test_a_sink_that_does_not_answer_is_a_finding(world, shell, monkeypatch):
    def silence(scope):
        raise Retryable("connection refused")

    monkeypatch.setattr(world.sinks[1], "recover", silence)

    document = shell.ask("doctor", code=1)

    assert document["scopes"][0]["silent"] == [{"sink": "right", "reason": "connection refused"}]
    assert kinds(document) == {"sink_silent"}


def test_a_sink_that_is_no_longer_configured_is_named(world, monkeypatch, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    publish(monkeypatch, driver=Driver("shop", world.ledger, world.sinks[:1]))

    document = shell.ask("doctor", code=1)

    assert "sink_missing" in kinds(document)
    assert document["scopes"][0]["attempts"][0]["missing_sinks"] == ["right"]


def test_a_ledger_older_than_its_sinks_is_recognised(world, shell, monkeypatch):
    world.run()
    restored = MemoryLedger(world.clock, world.ledger.ledger_id)
    publish(monkeypatch, driver=Driver("shop", restored, world.sinks))

    document = shell.ask("doctor", code=1)

    assert kinds(document) == {"wrong_ledger"}
    assert "wrong-ledger.md" in document["scopes"][0]["problems"][0]["runbook"]


def test_another_ledger_than_the_sinks_know_is_recognised(world, shell, monkeypatch):
    world.run()
    publish(monkeypatch, driver=Driver("shop", MemoryLedger(), world.sinks))

    assert kinds(shell.ask("doctor", code=1)) == {"wrong_ledger"}


def test_slow_commits_are_noticed(world, shell, monkeypatch):
    commit = MemorySink.commit

    def slowly(sink, txn, token):
        world.clock.advance(4)
        return commit(sink, txn, token)

    monkeypatch.setattr(MemorySink, "commit", slowly)
    for _ in range(6):
        world.run()

    document = shell.ask("doctor", code=1)

    assert kinds(document) == {"slow"}
    assert "slow-commits.md" in document["scopes"][0]["problems"][0]["runbook"]


def test_weak_settings_are_listed_and_count_only_when_strict(world, shell):
    world.driver.settings = replace(
        world.driver.settings, lease_seconds=2.0, takeover=Takeover.FORCE, keep_cycles=3
    )

    weak = shell.ask("doctor")["weakened_by"]

    assert {one["where"] for one in weak} == {"ledger memory:", "settings"}
    text = " ".join(one["what"] for one in weak)
    assert "lease_seconds=2" in text
    assert "takeover=force" in text
    assert "keep_cycles=3" in text
    assert shell.ask("doctor", "--strict", code=1)["weakened_by"] == weak


def test_what_a_sink_says_weakens_it_is_listed(world, shell, monkeypatch):
    told = Guarantee("rows", "parts", weakened_by=("mode=prepared; use staging",))
    monkeypatch.setattr(MemorySink, "guarantee", lambda self: told)

    weak = shell.ask("doctor")["weakened_by"]

    assert {"where": "sink left", "what": "mode=prepared; use staging"} in weak


def test_the_doctor_changes_nothing(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)
    before = world.ledger.scope_record(world.scope), world.ledger.open_attempts(world.scope)
    held = [sink.store.snapshot() for sink in world.sinks]

    shell.ask("doctor", code=1)

    after = world.ledger.scope_record(world.scope), world.ledger.open_attempts(world.scope)
    assert after == before
    assert [sink.store.snapshot() for sink in world.sinks] == held
    assert world.ledger.acts(world.scope) == []


def test_every_kind_has_a_runbook():
    assert set(RUNBOOKS) == set(Kind)
    root = Path(__file__).parents[3]
    missing = [name for name in set(RUNBOOKS.values()) if not (root / name).is_file()]
    assert missing == []


@pytest.mark.parametrize("name", sorted(set(RUNBOOKS.values())))
def test_a_runbook_leads_from_the_alert_to_the_prevention(name):
    text = (Path(__file__).parents[3] / name).read_text()

    headings = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]

    assert headings == ["Alert", "Diagnosis", "Resolve", "Prevent"]
