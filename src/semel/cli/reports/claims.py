"""What `semel claims list` answers."""

from __future__ import annotations

from dataclasses import dataclass

from semel.operate.stores import OperatorDatabase


@dataclass(frozen=True, slots=True)
class ClaimReport:
    """One claim under a lease."""

    message_id: str
    owner: str
    """Who holds the lease, or held it last."""

    attempts: int
    lease_until: float
    seconds_left: float
    """Until the lease ends, on the database's clock; negative since it has ended."""

    source: str
    """Coordinates of the delivery that was claimed first."""

    first_seen_at: float
    error_code: str
    """Of the last failure."""

    @property
    def is_stale(self) -> bool:
        """Tell whether the lease has run out."""
        return self.seconds_left <= 0


@dataclass(frozen=True, slots=True)
class ClaimList:
    """The answer to `semel claims list`."""

    database: str
    consumer: str
    claims: list[ClaimReport]
    has_more: bool
    """There are more than were asked for."""

    @property
    def needs_attention(self) -> bool:
        """Tell whether a lease has run out."""
        return any(claim.is_stale for claim in self.claims)


async def claim_list(
    database: OperatorDatabase, name: str, consumer: str, limit: int, *, stale: bool
) -> ClaimList:
    """List the claims under a lease; where asked, only those whose lease has run out."""
    async with database.begin() as unit:
        rows = await unit.claims.in_progress(consumer, limit + 1, expired=stale)
        now = await unit.now()
    claims = [
        ClaimReport(
            row.message_id,
            row.owner,
            row.attempts,
            row.lease_until,
            row.lease_until - now,
            row.source,
            row.first_seen_at,
            row.error_code,
        )
        for row in rows
    ]
    return ClaimList(name, consumer, claims[:limit], len(claims) > limit)
