"""`semel.operate` in a script: the answers of the commands, without a command."""

from __future__ import annotations

import pytest

from semel import operate
from semel.crashpoints import CrashPoint
from semel.memory.sink import MemorySink
from tests.unit.cli.cli_world import World


@pytest.fixture
def stranded() -> World:
    world = World().start()
    world.run()
    world.die_at(CrashPoint.COMMIT_2PC_BEFORE, "right")
    return world


def test_a_script_finds_a_stranded_cycle_and_recovers_it(stranded):
    pipeline = operate.Pipeline.of(stranded.driver)
    patient = operate.doctor.Patient(pipeline.scope, pipeline.sinks, pipeline.settings)

    before = operate.status.status_of(stranded.ledger)
    found = operate.doctor.diagnose(stranded.ledger, [patient])
    done = operate.recovery.recover(pipeline, who="ann", why="the host died")
    again = operate.recovery.recover(pipeline, who="ann", why="to be sure")

    assert before.needs_attention
    assert found.needs_attention
    assert [txn.cycle.label for txn in done.report.finished] == ["g1.b1"]
    assert again.epoch is None
    assert not operate.status.status_of(stranded.ledger).needs_attention
    (scope,) = operate.status.history_of(stranded.ledger).scopes
    assert [act.who for act in scope.acts] == ["ann", "ann"]


def test_a_script_verifies_what_readers_see(stranded):
    pipeline = operate.Pipeline.of(stranded.driver)
    operate.recovery.recover(pipeline, who="ann", why="the host died")

    found = operate.verification.verify(
        pipeline, operate.verification.cycles_to_verify(pipeline, 10)
    )

    assert (found.cycles, found.needs_attention) == (2, False)


class Large(MemorySink):
    """A sink with too many claims, or one that does not answer."""

    def outgrown(self) -> str:
        if self.name == "silent":
            raise OSError("no answer")
        return "too many claims" if self.name == "large" else ""


def test_sinks_say_what_they_have_outgrown(stranded):
    sinks = [Large(name) for name in ("small", "large", "silent")]

    (scope,) = operate.status.status_of(stranded.ledger, sinks=sinks).scopes

    assert scope.outgrown == [
        "too many claims",
        "it is not known how much is kept: OSError: no answer",
    ]
