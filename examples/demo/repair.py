"""What an operator does at the end: look, fix the misspelled payments, and release them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing

import psycopg
from rich.console import Console

from examples.demo.payments import Payment
from examples.demo.place import Place
from examples.demo.run import DemoFailed

PARKED = "SELECT message_id, payload FROM semel.waiting_message WHERE waits = 'parked' ORDER BY 1"


def repair(place: Place, console: Console) -> None:
    """Show what is dead and what is parked; fix that and release it."""
    with closing(psycopg.connect(place.url)) as connection:
        parked = connection.execute(PARKED).fetchall()
    mine = ("--consumer", "payments")
    why = ("--actor", "ann", "--yes", "--reason")
    run_semel(console, place.url, "dlq", "list", *mine)
    run_semel(console, place.url, "parking", "keys", *mine)
    for name, payload in parked:
        fixed = place.scratch / f"{name}.json"
        fixed.write_bytes(Payment(**json.loads(payload)).fixed.value)
        options = ("--payload", str(fixed), "--keep-id")
        run_semel(console, place.url, "parking", "fix", name, *mine, *options, *why, "a typo")
    names = [name for name, _ in parked]
    run_semel(console, place.url, "parking", "release", *names, *mine, *why, "the kind is fixed")
    console.print()


def run_semel(
    console: Console, database: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> None:
    """Run a command, and show it as a terminal would.

    Raises:
        DemoFailed: it failed.
    """
    shown = " ".join(f'"{word}"' if " " in word else word for word in arguments)
    console.print(f"\n$ semel {shown}", style="bold", soft_wrap=True)
    done = subprocess.run(
        [sys.executable, "-m", "semel", *arguments],
        env={**os.environ, **(environment or {}), "SEMEL_DATABASE": database},
        capture_output=True,
        text=True,
        check=False,
    )
    console.print((done.stdout + done.stderr).rstrip(), markup=False, soft_wrap=True)
    if done.returncode > 1:  # 1 means that something needs attention
        raise DemoFailed(f"semel {shown} ended with exit code {done.returncode}")
