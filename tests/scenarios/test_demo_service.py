"""The demo of a service, as its users run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from semel.testing.services.processes import java
from tests.conftest import require
from tests.scenarios.test_demo import assert_nothing_is_left, temporary, wait_until

__all__ = ["temporary"]

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.slow]


def start_demo(temporary: Path, *options: str) -> subprocess.Popen[str]:
    require(java)
    return subprocess.Popen(
        [sys.executable, "-m", "examples.service_demo", "--plain-output", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        # As in a shell without job control, Ctrl-C would be ignored otherwise.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


@pytest.mark.kill
def test_a_killed_service_passes_its_audit_and_leaves_nothing(temporary: Path):
    demo = start_demo(temporary, "--seconds=2", "--kills=1", "--no-contrast")
    output, _ = demo.communicate(timeout=150)

    assert demo.returncode == 0, output
    assert output.count("kill -9   service") == 1
    assert "3 held keys of billing" in output
    assert "✓ once" in output
    assert "Traceback" not in output
    assert_nothing_is_left(temporary)


def test_ctrl_c_ends_the_service_and_its_servers(temporary: Path):
    demo = start_demo(temporary, "--seconds=60", "--kills=0", "--no-contrast")
    wait_until(lambda: any(temporary.glob("*/semel.log")), seconds=60)

    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)

    assert demo.returncode == 130, output
    assert "nothing is left behind" in output
    assert_nothing_is_left(temporary)
