"""Who owns a scope, and until when.

A lease makes a second owner wait; the epoch makes a first owner that lost it
harmless.  Only the epoch is a fence: a stopped process may believe in its
lease for as long as it sleeps.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any


class Takeover(StrEnum):
    """What a start does when another owner's lease is still live."""

    WAIT = "wait"
    """Wait until the lease ends, or its owner is known to be gone."""

    FORCE = "force"
    """Take the scope now; the old owner is fenced."""


@dataclass(frozen=True, slots=True)
class Owner:
    """One start of one process, recognisable on its own host after its death."""

    host: str
    boot: str
    pid: int
    started: str
    instance: str
    pids: str = ""
    """The namespace that *pid* belongs to: two containers of one host count their own."""

    machine: str = ""
    """What tells this machine's earlier boots from those of another one with its name."""

    @classmethod
    def here(cls) -> Owner:
        """Describe this process; every call is another instance."""
        return cls(
            host=socket.gethostname(),
            boot=_boot_id(),
            pid=os.getpid(),
            started=_started(os.getpid()),
            instance=uuid.uuid4().hex,
            pids=_pid_namespace(),
            machine=_machine_id(),
        )

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Owner:
        """Read what `to_json` wrote."""
        return cls(**fields)

    @classmethod
    def read(cls, text: str) -> Owner | None:
        """Read what `to_json` wrote from its text; None for somebody who does not say who it is."""
        try:
            return cls.from_json(json.loads(text))
        except (ValueError, TypeError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Write the owner as plain values."""
        return asdict(self)

    def is_gone(self) -> bool:
        """Tell whether this owner surely no longer runs; False when it cannot be known.

        A host's name alone proves nothing: containers share names and kernels, and another
        boot may be that of another machine.
        """
        if self.host != socket.gethostname() or not self.boot:
            return False
        if self.boot != _boot_id():
            return bool(self.machine) and self.machine == _machine_id()
        if self.pids != _pid_namespace():
            return False
        return _started(self.pid) != self.started

    def is_running(self) -> bool:
        """Tell whether this owner surely runs, on this machine; False when it cannot be known."""
        here = (socket.gethostname(), _boot_id(), _pid_namespace())
        if (self.host, self.boot, self.pids) != here or not self.boot:
            return False
        return bool(self.started) and _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> str:
    """The kernel's start time of *pid* ("" when there is none): a pid alone is used again."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def owner_text(owner: Owner, worker: str = "") -> str:
    """Write an owner, and one worker of it, as one text that tables keep."""
    return json.dumps(replace(owner, instance=worker).to_json(), sort_keys=True)


@cache
def this_process() -> str:
    """Return the text of this process, where no worker of it is named."""
    return owner_text(Owner.here())


os.register_at_fork(after_in_child=this_process.cache_clear)
