"""`semel verify` and `semel lint`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from semel.crashpoints import CrashPoint
from semel.memory.sink import MemorySink, tally_rows
from semel.operate.status import Pipeline
from semel.operate.verification import RowCount, Verdict, compared, staged_rows, verify
from semel.pipeline.driver import Driver
from semel.pipeline.sink import Guarantee, SinkOK, Tally
from semel.sinks import CallbackSink, HttpPostSink, HttpSink, KafkaSink
from tests.unit.cli.cli_world import MODULE, Shell, World, publish, shell_for

CHECK_KEYS = {
    "cycle", "sink", "verdict", "staged", "visible", "source_verdict", "source", "reason",
}  # fmt: skip


class HashingSink(MemorySink):
    """A memory sink whose token carries the hash, as those of real sinks do."""

    def prepare(self, txn, receipts):
        outcome = super().prepare(txn, receipts)
        if isinstance(outcome, SinkOK):
            tally = sum((receipt.tally for receipt in receipts), Tally())
            return SinkOK({**outcome.token, "hash": tally.hash})
        return outcome

    def commit(self, txn, token):
        return super().commit(txn, {name: token[name] for name in token if name != "hash"})


@pytest.fixture
def world() -> World:
    return World(sinks=[HashingSink("left"), MemorySink("right")]).start()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, world: World) -> Shell:
    return shell_for(monkeypatch, world)


def verdicts(document) -> list[tuple[str, str, str]]:
    return [(check["cycle"], check["sink"], check["verdict"]) for check in document["checks"]]


def spoil(sink: MemorySink, cycle, rows) -> None:
    shown = sink.store.visible[cycle]
    sink.store.visible[cycle] = replace(shown, held=replace(shown.held, rows=tuple(rows)))


def test_what_readers_see_is_what_was_staged(world, shell):
    world.run()
    world.run()

    document = shell.ask("verify")

    assert set(document) == {"command", "format", "exit", "scope", "ledger", "cycles", "checks"}
    assert document["cycles"] == 2
    assert set(document["checks"][0]) == CHECK_KEYS
    assert verdicts(document) == [
        ("g1.b1", "left", "equal"),
        ("g1.b1", "right", "equal_rows"),
        ("g1.b0", "left", "equal"),
        ("g1.b0", "right", "equal_rows"),
    ]
    assert "2 cycles: nothing differs" in shell.read("verify")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["g1.b0-0"], "2 rows are missing"),
        (["g1.b0-0", "g1.b0-1", "g1.b0-2", "g1.b0-2"], "1 rows too many"),
        (["g1.b0-0", "g1.b0-1", "other"], "not the same"),
    ],
)
def test_missing_doubled_and_changed_rows_are_found(world, shell, rows, words):
    cycle = world.run()
    spoil(world.sinks[0], cycle, rows)

    document = shell.ask("verify", code=1)

    (check,) = [check for check in document["checks"] if check["sink"] == "left"]
    assert check["verdict"] == "different"
    assert words in check["reason"]
    assert words in shell.read("verify", code=1)


def test_one_cycle_can_be_named_and_must_exist(world, shell):
    world.run()
    world.run()

    named = shell.ask("verify", "--cycle", "g1.b0")
    unknown = shell.ask("verify", "--cycle", "g1.b7", code=2)

    assert {check["cycle"] for check in named["checks"]} == {"g1.b0"}
    assert "no committed attempt" in unknown["error"]


def test_the_newest_or_all(world, shell):
    for _ in range(5):
        world.run()

    assert shell.ask("verify", "--newest", "2")["cycles"] == 2
    assert shell.ask("verify", "--all")["cycles"] == 5


def test_a_sink_that_cannot_attribute_rows_says_so(world, shell, monkeypatch):
    monkeypatch.setattr(MemorySink, "visible_tally", lambda self, cycle, token: None)
    world.run()

    document = shell.ask("verify")

    assert {check["verdict"] for check in document["checks"]} == {"cannot_tell"}
    assert "cannot attribute" in document["checks"][0]["reason"]


@pytest.mark.parametrize(
    ("sink", "why"),
    [
        (KafkaSink("host:1", "t", staging="here"), "does not say which cycle sent it"),
        (HttpSink("https://host/semel"), "a receiver is not asked for its rows"),
        (HttpPostSink("https://host/rows", staging="here"), "the service is not asked"),
        (CallbackSink(print, staging="here"), "only the function knows"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_sink_whose_rows_cannot_be_counted_says_why_and_what_to_compare(world, sink, why):
    world.run()
    sink.name = "left"
    pipeline = Pipeline.of(world.driver)

    found = verify(replace(pipeline, sinks=[sink]), world.ledger.history(world.scope, 1))

    check = found.checks[0]
    assert check.verdict is Verdict.CANNOT_TELL
    assert why in check.reason
    assert "--reread" in check.reason


def test_a_sink_without_an_answer_does_not_hide_the_others(world, shell, monkeypatch):
    def silence(self, cycle, token):
        raise OSError("no route")

    monkeypatch.setattr(HashingSink, "visible_tally", silence, raising=False)
    world.run()

    document = shell.ask("verify", code=1)

    assert [check["verdict"] for check in document["checks"]] == ["no_answer", "equal_rows"]


def test_an_unfinished_cycle_needs_attention(world, shell):
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE)

    assert {c["verdict"] for c in shell.ask("verify", code=1)["checks"]} == {"unfinished"}


def test_a_sink_that_is_no_longer_configured_needs_attention(world, shell, monkeypatch):
    world.run()
    publish(monkeypatch, driver=Driver("shop", world.ledger, world.sinks[:1]))

    assert [c["verdict"] for c in shell.ask("verify", code=1)["checks"]] == [
        "equal",
        "not_configured",
    ]


def test_the_source_is_read_again_by_a_function_of_the_users(world):
    world.run()
    driver = world.driver
    pipeline = Pipeline(world.ledger, world.scope, driver.sinks, driver.settings)
    records = world.ledger.history(world.scope)
    rows = [f"g1.b0-{n}" for n in range(3)]

    same = verify(pipeline, records, lambda batch: {"left": tally_rows(rows)})
    less = verify(pipeline, records, lambda batch: {"left": tally_rows(rows[1:])})

    assert same.checks[0].source_verdict == "equal"
    assert less.checks[0].source_verdict == "different"
    assert less.needs_attention


def test_a_source_that_is_gone_is_reported_per_cycle(world):
    world.run()
    driver = world.driver
    pipeline = Pipeline(world.ledger, world.scope, driver.sinks, driver.settings)

    def gone(batch):
        raise FileNotFoundError("a.json")

    report = verify(pipeline, world.ledger.history(world.scope), gone)

    assert {check.source_verdict for check in report.checks} == {"no_answer"}
    assert "a.json" in report.checks[0].reason


def test_the_source_needs_a_reader_and_the_reader_must_return_a_static_frame(
    world, shell, monkeypatch
):
    world.run()
    publish(monkeypatch, driver=world.driver, reader=lambda batch: [1, 2])

    assert "--reread" in shell.ask("verify", "--source", code=2)["error"]
    wrong = shell.ask("verify", "--reread", f"{MODULE}:reader", code=2)["error"]
    assert "returned list" in wrong
    assert "static DataFrame" in wrong


def test_tokens_carry_rows_and_a_hash_under_either_name():
    assert staged_rows({"rows": 3, "hash": 5}, 0) == RowCount(3, 5)
    assert staged_rows({"rows": 3, "row_hash": 5}, 0) == RowCount(3, 5)
    assert staged_rows({}, 7) == RowCount(7, None)
    assert compared(RowCount(1, 2), RowCount(1, 3)) is Verdict.DIFFERENT
    assert compared(RowCount(1, None), RowCount(1, 3)) is Verdict.EQUAL_ROWS


def test_lint_states_each_sinks_guarantee_with_its_scope(world, shell):
    document = shell.ask("lint", code=1)

    assert set(document) == {
        "command", "format", "exit", "scope", "ledger", "guarantee", "failures_covered",
        "not_covered", "sinks", "weakened_by", "strict",
    }  # fmt: skip
    assert [sink["sink"] for sink in document["sinks"]] == ["left", "right"]
    assert document["sinks"][0]["stated"] is True
    assert "memory" in document["weakened_by"][0]["where"]


def test_lint_never_says_the_bare_words(world, shell):
    assert "exactly-once" not in shell.read("lint", code=1).lower()
    assert "exactly once" not in shell.read("lint", code=1).lower()


def test_lint_is_content_with_a_strong_pipeline(monkeypatch, tmp_path):
    from semel.spark.exactly_once import ExactlyOnce

    monkeypatch.setattr("semel.operate.guarantee._FLEETING", re.compile("^$"))
    ledger = f"sqlite:///{tmp_path / 'x.ledger'}"
    publish(monkeypatch, driver=ExactlyOnce("shop", ledger, [MemorySink("left")]))
    shell = Shell(World())

    assert shell.ask("lint")["sinks"][0]["weakened_by"] == []
    assert not (tmp_path / "x.ledger").exists(), "linting makes no ledger"

    told = Guarantee("rows", "parts", weakened_by=("mode=prepared; use staging",))
    monkeypatch.setattr(MemorySink, "guarantee", lambda self: told)
    assert shell.ask("lint", code=1)["sinks"][0]["weakened_by"] == ["mode=prepared; use staging"]


def test_a_silent_sink_counts_only_when_strict(world, shell, monkeypatch):
    class Quiet:
        """A sink without a guarantee of its own."""

        name = "quiet"
        rows = None

    monkeypatch.setattr("semel.operate.guarantee.of_ledger", lambda ledger: [])
    publish(monkeypatch, driver=Driver("shop", world.ledger, [Quiet()]))

    assert shell.ask("lint")["sinks"][0]["stated"] is False
    assert shell.ask("lint", "--strict", code=1)["strict"] is True
