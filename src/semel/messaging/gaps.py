"""What a person can do about versions that did not come (B-14).

    close       take a gap off the list: it was looked at
    pass over   decide that the versions never come: the one that did is next

Each is one transaction with its entry in the audit trail.
"""

from __future__ import annotations

from typing import Final

from semel.errors import Misuse
from semel.messaging.acts import acting, need_actor, need_reason
from semel.messaging.audit import Act
from semel.messaging.database import Database, Unit
from semel.messaging.ids import hash_of_key
from semel.messaging.sequence import Gap

MOST_GAPS: Final = 10_000


async def open_gaps(database: Database, consumer: str | None, limit: int) -> list[Gap]:
    """Return the open gaps, the oldest first."""
    async with database.begin() as unit:
        return list(await unit.versions.gaps(consumer, limit))


async def close_gaps(
    database: Database, consumer: str, key: str, *, actor: str, reason: str
) -> list[Gap]:
    """Take a key's gaps off the list; nothing else changes.

    Raises:
        Misuse: the key has no open gap, or no reason is given.
    """
    async with acting(database) as unit:
        gaps = await _gaps(unit, consumer, key)
        await _close(unit, gaps, "gap.close", actor, reason)
    return gaps


async def pass_over_gaps(
    database: Database, consumer: str, key: str, *, actor: str, reason: str
) -> list[Gap]:
    """Decide that a key's missing versions never come; the next one that did may be applied.

    A message that was parked because of the gap stays parked until somebody releases it.

    Raises:
        Misuse: the key has no open gap, or no reason is given.
    """
    async with acting(database) as unit:
        gaps = await _gaps(unit, consumer, key)
        before = min(gap.found for gap in gaps) - 1
        current = await unit.versions.current(consumer, key)
        if current is None or current < before:
            await unit.versions.advance(consumer, key, before)
        await _close(unit, gaps, "gap.pass", actor, reason)
    return gaps


async def _gaps(unit: Unit, consumer: str, key: str) -> list[Gap]:
    every = await unit.versions.gaps(consumer, MOST_GAPS)
    gaps = [gap for gap in every if gap.key == key]
    if not gaps:
        raise Misuse(f"consumer {consumer} has no open gap of the key {key!r}")
    return gaps


async def _close(unit: Unit, gaps: list[Gap], act: str, actor: str, reason: str) -> None:
    reason = need_reason(reason, "closing a gap")
    consumer, key = gaps[0].consumer, gaps[0].key
    missing = [[gap.expected, gap.found - 1] for gap in gaps]
    await unit.versions.close_gaps(consumer, key, max(gap.found for gap in gaps), reason)
    details = {"key_hash": hash_of_key(key), "missing": missing}
    await unit.audit.append(Act(need_actor(actor), act, consumer, reason=reason, details=details))
