"""Who owns a scope, and whether that owner still lives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from semel.pipeline.ledger import ScopeRecord


class Ownership(StrEnum):
    """Whether somebody works on a scope now."""

    LIVE = "live"
    """The lease is live, and the owner is not known to be gone."""

    GONE = "gone"
    """The owner ran on this host, and its process no longer exists."""

    EXPIRED = "expired"
    """The owner stopped renewing its lease: dead, stopped, or cut off."""

    RELEASED = "released"
    """The owner ended cleanly."""

    NEVER = "never"
    """The scope never had an owner."""


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """Keys under ``owner``."""

    ownership: Ownership
    host: str | None
    pid: int | None
    epoch: int
    lease_left_seconds: float

    @property
    def is_live(self) -> bool:
        """Tell whether the scope's open cycles may be somebody's work in progress."""
        return self.ownership is Ownership.LIVE

    def __str__(self) -> str:
        if self.host is None:
            return str(self.ownership)
        return f"process {self.pid} on {self.host} ({self.ownership})"


def owner_report(record: ScopeRecord | None) -> OwnerReport:
    """Judge what the ledger knows of the owner."""
    if record is None:
        return OwnerReport(Ownership.NEVER, None, None, 0, 0.0)
    owner = record.owner
    if owner is None:
        return OwnerReport(Ownership.RELEASED, None, None, record.epoch, 0.0)
    if owner.is_gone():
        ownership = Ownership.GONE
    elif record.lease_left_seconds > 0:
        ownership = Ownership.LIVE
    else:
        ownership = Ownership.EXPIRED
    return OwnerReport(ownership, owner.host, owner.pid, record.epoch, record.lease_left_seconds)
