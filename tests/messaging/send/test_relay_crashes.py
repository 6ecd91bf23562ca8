"""A relay that dies at any window loses nothing, and repeats only under the same id."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from semel.crashpoints import CrashPoint
from semel.errors import Permanent
from semel.messaging.send.relay import LEASE_SECONDS
from semel.testing.crash import Crash, crash_at, trace
from tests.messaging.outgoing import Broker, by_key, fill, keyed, left, pass_time, relay, run

WINDOWS = [point for point in CrashPoint if point.step.startswith("relay")]
NAMES = [f"k{n % 3}-{n}" for n in range(12)]
BATCH = 3


async def filled(world):
    await fill(world, *keyed(NAMES))


def test_a_run_passes_every_window_of_the_relay(database):
    async def test(world):
        await filled(world)
        with trace() as windows:
            await relay(world, Broker(), batch=BATCH).run_until_empty()
        assert {window.point for window in windows} == set(WINDOWS)
        assert {window.sink for window in windows} == {"outbox"}

    run(database, test)


@pytest.mark.parametrize(("point", "occurrence"), [*product(WINDOWS, [1, 2, 4])])
def test_a_crash_loses_nothing_and_repeats_only_under_the_same_id(database, point, occurrence):
    async def test(world):
        broker = Broker()
        await filled(world)

        with crash_at(point, occurrence=occurrence), pytest.raises(Crash):
            await relay(world, broker, batch=BATCH).run_until_empty()
        await pass_time(world, LEASE_SECONDS + 1)
        await relay(world, broker, batch=BATCH).run_until_empty()

        assert by_key(broker.ids) == by_key(NAMES)
        assert max(Counter(broker.ids).values()) <= 2
        # Two batches can be published and not yet deleted.
        assert len(broker.ids) - len(NAMES) <= 2 * BATCH
        assert await left(world) == []

    run(database, test)


@pytest.mark.parametrize("point", WINDOWS)
def test_a_crash_beside_a_refused_message_parks_it_all_the_same(database, point):
    async def test(world):
        broker = Broker()
        broker.refusals = {"k1-4": [Permanent("too large")]}
        await filled(world)

        with crash_at(point, occurrence=2), pytest.raises(Crash):
            await relay(world, broker, batch=BATCH).run_until_empty()
        await pass_time(world, LEASE_SECONDS + 1)
        await relay(world, broker, batch=BATCH).run_until_empty()

        assert await left(world) == ["k1-4", "k1-7", "k1-10"]
        assert set(broker.ids) == set(NAMES) - {"k1-4", "k1-7", "k1-10"}

    run(database, test)


def test_crash_after_crash_the_outbox_gets_empty(database):
    async def test(world):
        broker = Broker()
        await filled(world)
        crashes = 0
        for point, occurrence in product(WINDOWS, [1, 2]):
            try:
                with crash_at(point, occurrence=occurrence):
                    await relay(world, broker, batch=BATCH).run_until_empty()
            except Crash:
                crashes += 1
                await pass_time(world, LEASE_SECONDS + 1)
        await relay(world, broker, batch=BATCH).run_until_empty()

        assert crashes >= 4
        assert by_key(broker.ids) == by_key(NAMES)
        assert await left(world) == []

    run(database, test)
