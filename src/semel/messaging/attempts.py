"""Failed attempts: each try of a message that failed, with its time, its code and its reason.

A message that succeeds at once has none.  The first ones and the latest ones are
kept: a message that is tried for ever does not fill the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from semel.messaging.sweep import Sweep

FIRST_KEPT: Final = 5
LATEST_KEPT: Final = 45
MOST_KEPT: Final = FIRST_KEPT + LATEST_KEPT
"""Of one message; how a long trouble began says more than its middle."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One try that failed."""

    consumer: str
    message_id: str
    number: int
    """Counted from the start again when somebody sends the message back."""

    error_code: str
    failure_class: str
    reason: str = ""
    """Empty once the message's payload was erased: an exception may quote it."""

    exception: str = ""
    worker: str = ""
    """Host and process that wrote it."""

    key: str | None = None
    at: float = 0.0
    """When its claim says so; 0 for now, which the store writes."""


@dataclass(frozen=True, slots=True)
class AttemptFilter:
    """Whose attempts are meant; what is None does not matter."""

    consumer: str | None = None
    message_id: str | None = None
    key: str | None = None


class FailedAttempts(Protocol):
    """The failed attempts, in one open transaction.

    The contract is executable: `semel.testing.contracts.AttemptsContract`.
    """

    async def add(self, attempt: FailedAttempt) -> None:
        """Write a message's next failed attempt, in the transaction that holds its claim.

        Of more than `MOST_KEPT`, those between the first and the latest go.
        """
        ...

    async def of(self, consumer: str, message_id: str) -> Sequence[FailedAttempt]:
        """Return the attempts of one message that are kept, in the order of their writing."""
        ...

    async def erase(self, which: AttemptFilter) -> int:
        """Remove the reasons of matching attempts; times, numbers and codes stay."""
        ...

    async def delete_gone(
        self, consumer: str, ttl_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete attempts so old whose message is gone from everywhere; return how many.

        With a *sweep*: only behind what it reached.
        """
        ...
