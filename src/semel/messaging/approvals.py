"""Approvals: acts that one person asks for and another one decides (B-17)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from semel.messaging.sweep import Sweep


class Decision(StrEnum):
    """What the second person said."""

    OPEN = ""
    APPROVED = "approved"
    REFUSED = "refused"


class Asked(StrEnum):
    """What can be asked for."""

    DELETE_WAITING = "park.delete"
    """Take a message out of the waiting room for good."""

    DELETE_LETTER = "dlq.delete"
    """Take a dead letter away for good."""


@dataclass(frozen=True, slots=True)
class Approval:
    """One request, and what became of it."""

    number: int
    act: Asked
    consumer: str
    message_id: str
    asked_by: str
    reason: str
    asked_at: float
    decided_by: str | None = None
    decided_at: float | None = None
    decision: Decision = Decision.OPEN
    payload_hash: str = ""
    """Of what the first person saw: another payload needs another request."""


class Approvals(Protocol):
    """The requests, in one open transaction.

    The contract is executable: `semel.testing.contracts.ApprovalsContract`.
    """

    async def ask(
        self,
        act: Asked,
        consumer: str,
        message_id: str,
        asked_by: str,
        reason: str,
        payload_hash: str = "",
    ) -> Approval:
        """Write a request, with a number and the database's time."""
        ...

    async def get(self, number: int) -> Approval | None:
        """Return one request."""
        ...

    async def open_ones(self, consumer: str | None, limit: int) -> Sequence[Approval]:
        """Return requests that nobody has decided, the oldest first."""
        ...

    async def about(self, consumer: str, message_id: str) -> Sequence[Approval]:
        """Return the requests about one message, in order."""
        ...

    async def decide(self, number: int, decided_by: str, decision: Decision) -> bool:
        """Write the decision; False, and nothing changed, where there is one already."""
        ...

    async def delete_decided(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete requests decided so long ago whose message is gone; return how many.

        With a *sweep*: only behind what it reached.
        """
        ...
