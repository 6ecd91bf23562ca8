"""Whether an owner that left its lease behind is surely gone."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from semel.lease import Owner


@pytest.fixture
def dead() -> Owner:
    """An owner of this host whose process has ended."""
    script = "import json; from semel.lease import Owner; print(json.dumps(Owner.here().to_json()))"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True)
    return Owner.from_json(json.loads(ran.stdout))


def test_a_process_that_runs_is_not_gone():
    assert not Owner.here().is_gone()
    assert Owner.here().is_running()


def test_a_process_of_this_host_that_ended_is_gone(dead):
    assert dead.is_gone()
    assert not dead.is_running()


def test_a_pid_that_was_given_to_another_process_does_not_hide_it():
    assert replace(Owner.here(), started="1").is_gone()


def test_a_process_of_this_machine_before_it_was_booted_is_gone(dead, monkeypatch):
    monkeypatch.setattr("semel.lease._machine_id", lambda: "this")

    assert replace(dead, boot="earlier", machine="this").is_gone()


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"host": "another"},
        {"boot": "another", "machine": "another of this name"},
        {"boot": "another", "machine": ""},
        {"boot": ""},
        {"pids": "pid:[1]"},
    ],
    ids=str,
)
def test_a_process_that_cannot_be_seen_from_here_may_still_run(dead, elsewhere):
    assert not replace(dead, **elsewhere).is_gone()
    assert not replace(Owner.here(), **elsewhere).is_running()


def test_an_owner_written_by_an_older_version_is_understood():
    fields = Owner.here().to_json()
    del fields["pids"]

    assert not Owner.from_json(fields).is_gone()
