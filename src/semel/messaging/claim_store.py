"""Where claims are kept: the protocol that every database's claims follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from semel.message import Coordinates
from semel.messaging.claims import (
    ClaimAnswer,
    Claimed,
    ClaimRequest,
    ClaimRow,
    Failure,
    StalePolicy,
)
from semel.messaging.sweep import Sweep


class ProcessedMessageStore(Protocol):
    """The claims of one open transaction; nothing here ends it.

    The contract is executable: `semel.testing.contracts.ClaimsContract`.
    """

    async def claim(self, *, consumer_name: str, event_id: str) -> bool:
        """Claim a message; False where it was handled before.

        Raises:
            NotClaimable: it is neither: held elsewhere, not due, parked, dead, or a conflict.
            Retryable: the database could not be asked.
        """
        ...

    async def try_claim(self, consumer: str, request: ClaimRequest) -> ClaimAnswer:
        """Claim in its final state: COMPLETED, if and when the caller's transaction commits."""
        ...

    async def try_claim_many(
        self, consumer: str, requests: Sequence[ClaimRequest]
    ) -> list[ClaimAnswer]:
        """Claim a batch of different ids in one statement, sorted; answers in the given order.

        Raises:
            Locked: one of them is held by another transaction; claim them one by one.
        """
        ...

    async def lease(
        self,
        consumer: str,
        request: ClaimRequest,
        *,
        owner: str,
        seconds: float,
        stale: StalePolicy = StalePolicy.RECLAIM,
    ) -> ClaimAnswer:
        """Claim as IN_PROGRESS with a lease; the caller commits before it handles."""
        ...

    async def renew(self, consumer: str, message_id: str, fence: int, seconds: float) -> bool:
        """Make the lease last *seconds* from now; False where it was lost."""
        ...

    async def lock_expired(self, consumer: str, message_id: str, fence: int) -> bool:
        """Keep a lease that ran out from being renewed or taken until this transaction ends.

        False, and nothing locked, where *fence* is not its fence any more, or it lasts again.
        """
        ...

    async def mark_completed(
        self, consumer: str, message_id: str, fence: int | None = None, result: str | None = None
    ) -> bool:
        """Complete a leased claim; False, and nothing changed, where *fence* is not its fence.

        No result is kept of a message that was erased.  Without a fence: complete whatever is
        not completed (an operator's skip).
        """
        ...

    async def mark_failed(
        self, consumer: str, message_id: str, failure: Failure, fence: int | None = None
    ) -> bool:
        """Write a failed attempt; False, and nothing changed, where its state is `CLOSED`.

        An attempt that fails late finds what others, or a person, made of the message
        meanwhile; only `reopen` leads out of it.  With a fence: only if the claim is still
        leased under it.
        """
        ...

    async def erase(self, consumer: str, message_id: str) -> bool:
        """Remove the kept result of a message, and note that its payload was erased.

        Waits for a transaction that holds the claim; its state stays.  Tells whether there
        was a result.
        """
        ...

    async def erase_key(self, key: str) -> int:
        """Remove the results that were kept with this key, and note that; say how many."""
        ...

    async def undo(self, consumer: str, message_id: str, failure: Failure) -> ClaimRow:
        """Turn a claim that *this* transaction took into a failed attempt, and return it.

        For batches, where the claims of failed messages and the effects of the others
        share a transaction.
        """
        ...

    async def give_back(self, consumer: str, message_id: str, claimed: Claimed) -> None:
        """Let go of a claim that *this* transaction took, as if it had never been asked for."""
        ...

    async def keep_result(
        self, consumer: str, message_id: str, result: str, key: str | None = None
    ) -> None:
        """Write what the handler returned beside a claim that this transaction took.

        With the message's *key*, by which it can be erased.  Nothing is kept of a message
        that was erased.
        """
        ...

    async def pass_over(self, consumer: str, message_id: str, code: str) -> None:
        """Write beside a claim that this transaction took why its message has no effect.

        One of the codes of `WITHOUT_EFFECT`: nothing is sent again for its duplicates.
        """
        ...

    async def expect_payload(self, consumer: str, message_id: str, payload_hash: str) -> None:
        """Replace the hash that repetitions are compared with, after an audited revision."""
        ...

    async def reopen(self, consumer: str, message_id: str) -> bool:
        """Make a dead or parked message claimable again, its attempts counted from the start.

        False, and nothing changed, in every other state.
        """
        ...

    async def look_up(self, consumer: str, message_id: str) -> ClaimRow | None:
        """Read a claim without locking it."""
        ...

    async def in_progress(
        self, consumer: str, limit: int, *, expired: bool = False
    ) -> Sequence[ClaimRow]:
        """List the claims under a lease, the one that ends first before the others.

        With *expired*: only those whose lease has run out.
        """
        ...

    async def consumers_of(self, message_id: str) -> Sequence[str]:
        """Name the consumers that have a claim on a message, in order."""
        ...

    async def handled_from(
        self, consumer: str, places: Sequence[Coordinates]
    ) -> Sequence[Coordinates]:
        """Return those places whose messages have a claim that is COMPLETED, with its effect.

        A claim knows the delivery that was claimed first.  Slow: every claim is looked at.
        """
        ...

    async def delete_expired(
        self, consumer: str, older_than_seconds: float, limit: int, sweep: Sweep | None = None
    ) -> int:
        """Delete at most *limit* terminal claims that were last changed so long ago.

        The claim of a message that waits or is a dead letter stays: whoever sends it back must
        find whether it was handled.  So does that of one whose outgoing messages are still here:
        `semel.messaging.erase` finds them by it.  With a *sweep*: only behind what it reached.
        """
        ...
