"""What a person can do about versions that did not come (B-14).

    close       take a gap off the list: it was looked at
    pass over   decide that the versions never come: the lowest one that did is next

Each is one transaction with its entry in the audit trail.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace
from typing import Final

from semel.errors import Misuse
from semel.messaging.acts import acting, need_actor, need_reason
from semel.messaging.audit import Act
from semel.messaging.consumer import Consumer
from semel.messaging.database import Database, Unit
from semel.messaging.ids import hash_of_key
from semel.messaging.overtaking import let_go, waiting_versions
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
    database: Database, consumer: Consumer, key: str, *, actor: str, reason: str
) -> list[Gap]:
    """Decide that a key's missing versions never come, up to the lowest one that did.

    That one is next: where it only waits behind later ones, it has its turn; where it is
    parked, it stays so until somebody releases it.  What is missing behind it stays listed.
    Returns what was passed over.

    Raises:
        Misuse: the key has no open gap, its next version waits, or no reason is given.
    """
    name = consumer.name
    async with acting(database) as unit:
        if consumer.settings.holds_waiting_keys:
            await unit.waiting.hold(name, [key])  # nothing queues up unseen
        gaps = await _gaps(unit, name, key)
        current = await unit.versions.current(name, key)
        ahead = [gap for gap in gaps if current is None or gap.found - 1 > current]
        done = [gap for gap in gaps if gap not in ahead]
        rest: list[Gap] = []
        if ahead:
            due = min(gap.expected for gap in ahead) if current is None else current + 1
            came = await waiting_versions(consumer, unit, key) | {gap.found for gap in ahead}
            following = min(one for one in came if current is None or one > current)
            if following > due:
                done.append(replace(ahead[0], expected=due, found=following))
                rest = await _shorten(unit, ahead, following, came)
                await unit.versions.advance(name, key, following - 1)
                await let_go(consumer, unit, key, following)
            elif not done:
                raise Misuse(
                    f"version {following} of the key {key!r} is next, and waits: release or skip it"
                )
        await _close(unit, done, "gap.pass", actor, reason)
        for gap in rest:
            await unit.versions.open_gap(gap)
    return done


async def _shorten(unit: Unit, gaps: list[Gap], following: int, came: Set[int]) -> list[Gap]:
    """End the gaps that go on behind *following* before it; return what is missing behind it."""
    rest: list[Gap] = []
    for gap in gaps:
        if gap.expected <= following < gap.found:
            await unit.versions.open_gap(replace(gap, found=following))
            rest += _missing(gap, following, came)
    return rest


def _missing(gap: Gap, after: int, came: Set[int]) -> Iterator[Gap]:
    before = after
    for version in sorted(one for one in came if after < one <= gap.found):
        if version > before + 1:
            yield replace(gap, expected=before + 1, found=version)
        before = version


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
    await unit.versions.close_gaps(consumer, key, max(gap.found for gap in gaps) - 1, reason)
    details = {"key_hash": hash_of_key(key), "missing": missing}
    await unit.audit.append(Act(need_actor(actor), act, consumer, reason=reason, details=details))
