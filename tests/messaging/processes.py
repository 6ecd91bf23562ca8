"""Processes as far as a test can have them: one that is gone, one that runs, and the next one."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count

from semel import lease
from semel.lease import Owner
from semel.messaging.receive import crash as notes

_numbers = count(1)


def gone() -> str:
    """Return the writer of notes that is a process of this host which runs no more."""
    return notes.owner_text(replace(Owner.here(), started=f"made up {next(_numbers)}"))


def running() -> str:
    """Return the writer of notes that is another process of this host, which runs."""
    parent = os.getppid()
    return notes.owner_text(replace(Owner.here(), pid=parent, started=lease._started(parent)))


def elsewhere() -> str:
    """Return the writer of notes that is a process of another host."""
    return notes.owner_text(replace(Owner.here(), host="elsewhere.example"))


def next_process() -> None:
    """Be another process from now on; the one before is gone, and so will be this one."""
    me = gone()
    notes.this_process = lambda: me  # type: ignore[assignment]


# The process of the tests themselves runs on: nothing that it noted ever counts as survived.
next_process()
