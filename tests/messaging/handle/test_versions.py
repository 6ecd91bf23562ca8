"""Versions of an aggregate: old ones are skipped; missing ones are waited for, or fetched."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from semel.message import Message
from semel.messaging.outcome import Handled, ParkedAway, RetryLater, Skipped
from semel.messaging.settings import ConsumerSettings, Order, RetryPolicy
from semel.policy.vocabulary import GapPolicy
from tests.messaging.handled import Place, message
from tests.messaging.worlds import Effect


def versioned(gaps: GapPolicy) -> ConsumerSettings:
    return ConsumerSettings(
        retry=RetryPolicy(jitter=False, max_attempts=2), versioned=True, gaps=gaps
    )


def test_old_versions_are_skipped_and_the_next_is_applied():
    place = Place(versioned(GapPolicy.RETRY))

    first = place.deliver(message(1, "case", version=1))
    old = place.deliver(message(2, "case", version=1))
    following = place.deliver(message(3, "case", version=2))

    assert isinstance(first, Handled)
    assert old == Skipped("old version")
    assert isinstance(following, Handled)


def test_a_gap_is_listed_and_closed_when_the_missing_version_came():
    place = Place(versioned(GapPolicy.RETRY))
    place.deliver(message(1, "case", version=1))

    early = place.deliver(message(3, "case", version=3))
    [gap] = place.ask(lambda unit: unit.versions.gaps("billing", 10))
    place.deliver(message(2, "case", version=2))
    place.clock.advance(60)
    late = place.deliver(message(3, "case", version=3))

    assert isinstance(early, RetryLater)
    assert (gap.expected, gap.found) == (2, 3)
    assert isinstance(late, Handled)
    assert place.ask(lambda unit: unit.versions.gaps("billing", 10)) == []
    assert place.payments == ["m1", "m2", "m3"]


def test_an_alert_applies_across_the_gap_and_keeps_it_listed():
    place = Place(versioned(GapPolicy.ALERT))

    outcome = place.deliver(message(3, "case", version=3))

    assert isinstance(outcome, Handled)
    [gap] = place.ask(lambda unit: unit.versions.gaps("billing", 10))
    assert (gap.expected, gap.found) == (1, 3)


def test_missing_versions_are_fetched_by_the_consumers_own_function():
    async def fetch(message: Message, session: AsyncSession, gap: Any) -> None:
        for version in range(gap.expected, gap.found):
            session.add(Effect("payments", f"fetched {version}"))

    place = Place(versioned(GapPolicy.FETCH), fetch_missing=fetch)

    outcome = place.deliver(message(3, "case", version=3))

    assert isinstance(outcome, Handled)
    assert place.payments == ["fetched 1", "fetched 2", "m3"]
    assert place.ask(lambda unit: unit.versions.gaps("billing", 10)) == []


def test_a_gap_may_park_the_key():
    settings = ConsumerSettings(
        versioned=True, gaps=GapPolicy.PARK_KEY, order=Order.KEY, holds_keys=True
    )
    place = Place(settings)

    outcome = place.deliver(message(3, "case", version=3))
    following = place.deliver(message(4, "case", version=4))
    missing = place.deliver(message(1, "case", version=1))

    assert isinstance(outcome, ParkedAway)
    assert isinstance(following, ParkedAway)
    assert isinstance(missing, Handled)
