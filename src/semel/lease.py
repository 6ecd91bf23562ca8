"""The owner of a scope, and how long its lease lasts.

A lease makes a second owner wait; the epoch fences a first owner that lost the
lease.  Only the epoch is safe: a process that was stopped wakes up believing
that its lease still holds.
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
    """What a starting process does while another owner's lease is live."""

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
    """The namespace of *pid*: two containers of one host can have the same pid."""

    machine: str = ""
    """Identifies the machine, because two machines can have the same host name."""

    @classmethod
    def here(cls) -> Owner:
        """Describe this process; every call returns a new instance."""
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
        """Read the text of `to_json`; None for a text in another form."""
        try:
            return cls.from_json(json.loads(text))
        except (ValueError, TypeError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Write the owner as plain values."""
        return asdict(self)

    def is_gone(self) -> bool:
        """Return whether this owner has certainly ended; False when it cannot be known.

        The host's name is not enough: containers share names and kernels, and another boot
        id may belong to another machine.
        """
        if self.host != socket.gethostname() or not self.boot:
            return False
        if self.boot != _boot_id():
            return bool(self.machine) and self.machine == _machine_id()
        if self.pids != _pid_namespace():
            return False
        return _started(self.pid) != self.started

    def is_running(self) -> bool:
        """Return whether this owner certainly runs on this machine; False if in doubt."""
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
    """Return the kernel's start time of *pid*, or "": the kernel reuses pids."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()
    return "" if state in "ZX" else rest[18]


def is_gone(owner: str) -> bool:
    """Return whether the owner in this text has certainly ended; False for another text."""
    known = Owner.read(owner)
    return known is not None and known.is_gone()


def owner_text(owner: Owner, worker: str = "") -> str:
    """Return an owner and one of its workers as the text that tables store."""
    return json.dumps(replace(owner, instance=worker).to_json(), sort_keys=True)


@cache
def this_process() -> str:
    """Return this process as the text that tables store, without a worker."""
    return owner_text(Owner.here())


os.register_at_fork(after_in_child=this_process.cache_clear)
