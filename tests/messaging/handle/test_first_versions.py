"""Where a producer begins to count: the first version of a key is never an old one."""

from __future__ import annotations

from typing import Any

import pytest

from semel.codec import FromHeader, FromPayload, Reading
from semel.message import Message
from semel.messaging.failed.waiting import InSequence, in_sequence
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import Consumer, consumer
from semel.messaging.outcome import Handled, Outcome, ParkedAway, Skipped
from semel.messaging.settings import ConsumerSettings
from semel.operate.explain import pass_over_gaps
from semel.policy.vocabulary import GapPolicy
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

READING = Reading(FromHeader("id"), version_from=FromPayload("v"))


@pytest.mark.parametrize(
    ("version", "current", "first", "expected"),
    [
        (0, None, 1, InSequence.NEXT),
        (1, None, 1, InSequence.NEXT),
        (2, None, 1, InSequence.GAP),
        (0, None, 0, InSequence.NEXT),
        (1, None, 0, InSequence.GAP),
        (-3, None, 1, InSequence.NEXT),
        (100, None, 100, InSequence.NEXT),
        (0, 0, 1, InSequence.OLD),
        (1, 0, 1, InSequence.NEXT),
        (2, 0, 1, InSequence.GAP),
        (-2, -3, 1, InSequence.NEXT),
        (0, 1, 0, InSequence.OLD),
    ],
)
def test_a_version_is_old_next_or_beyond_a_gap(version, current, first, expected):
    assert in_sequence(version, current, first) is expected


def counting(first_version: int = 1) -> tuple[Consumer, list[int | None]]:
    applied: list[int | None] = []
    settings = ConsumerSettings(
        versioned=True, first_version=first_version, gaps=GapPolicy.PARK_KEY, holds_keys=True
    )

    @consumer("c", policy=settings, reading=READING)
    async def handle(message: Message, session: Any) -> None:
        applied.append(message.version)

    return handle, applied


async def deliver(world: DatabaseWorld, to: Consumer, *versions: int) -> list[type[Outcome]]:
    return [
        type(
            await handle_message(
                to, world.database, Message(f"m{number}-{version}", {}, key="k", version=version)
            )
        )
        for number, version in enumerate(versions)
    ]


class FirstVersions(DatabaseContract):
    @in_world
    async def test_a_producer_that_counts_from_zero_has_its_zero_applied(
        self, world: DatabaseWorld
    ) -> None:
        handle, applied = counting()

        outcomes = await deliver(world, handle, 0, 0, 1, 2)

        assert outcomes == [Handled, Skipped, Handled, Handled]
        assert applied == [0, 1, 2]

    @in_world
    async def test_a_declared_first_version_that_is_missing_is_a_gap(
        self, world: DatabaseWorld
    ) -> None:
        handle, applied = counting(first_version=0)

        outcomes = await deliver(world, handle, 1, 0)
        async with world.database.begin() as unit:
            gaps = await unit.versions.gaps("c", 10)

        assert outcomes == [ParkedAway, Handled]
        assert applied == [0]
        assert gaps == []

    @in_world
    async def test_a_gap_before_the_first_version_can_be_passed_over(
        self, world: DatabaseWorld
    ) -> None:
        handle, _ = counting(first_version=0)
        await deliver(world, handle, 1)

        gaps = await pass_over_gaps(world.database, handle, "k", actor="ann", reason="never sent")

        assert [(gap.expected, gap.found) for gap in gaps] == [(0, 1)]
        async with world.database.begin() as unit:
            assert await unit.versions.current("c", "k") == 0


class TestInSqlite(InSqlite, FirstVersions):
    pass


class TestInPostgres(InPostgres, FirstVersions):
    pass
