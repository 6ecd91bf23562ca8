"""Four hundred deliveries of fifty messages, all at once, a third of them failing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

import pytest
from sqlalchemy import text

from semel.messaging.handle.claims import Claimed, ClaimRequest, Locked
from tests.messaging.worlds import postgres_world, sqlite_world

DELIVERIES = 400
IDS = 50


async def deliver(world, message_id, fails):
    """Handle one delivery as a consumer does; a delivery that is held elsewhere comes back."""
    for _ in range(100):
        with suppress(Locked, ZeroDivisionError):
            async with world.database.begin() as unit:
                answer = await unit.claims.try_claim("billing", ClaimRequest(message_id))
                if not isinstance(answer, Claimed):
                    return answer
                await unit.session.execute(
                    text("INSERT INTO effect VALUES (:id)"), {"id": message_id}
                )
                if fails:
                    fails = False
                    raise ZeroDivisionError
            return answer
    raise AssertionError(f"{message_id} was held elsewhere a hundred times")


async def storm(open_world, workers):
    """Deliver every message about eight times, 30 % of the attempts fail; count the effects."""
    chance = random.Random(7)
    deliveries = [(f"m{n % IDS}", chance.random() < 0.3) for n in range(DELIVERIES)]
    chance.shuffle(deliveries)
    async with open_world() as world:
        async with world.database.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE effect (id text)"))

        async def worker():
            wins = []
            while deliveries:
                message_id, fails = deliveries.pop()
                if isinstance(await deliver(world, message_id, fails), Claimed):
                    wins.append(message_id)
            return wins

        won = await asyncio.gather(*[worker() for _ in range(workers)])
        async with world.database.engine.connect() as connection:
            effects = (await connection.execute(text("SELECT id FROM effect"))).scalars().all()
    return Counter(id for wins in won for id in wins), Counter(effects)


ONCE = {f"m{n}": 1 for n in range(IDS)}


def test_of_many_deliveries_at_once_one_has_an_effect_in_sqlite(tmp_path):
    wins, effects = asyncio.run(storm(lambda: sqlite_world(tmp_path), workers=4))

    assert wins == ONCE
    assert effects == ONCE


@pytest.mark.postgres
def test_of_many_deliveries_at_once_one_has_an_effect_in_postgres(quick_postgres_server):
    wins, effects = asyncio.run(storm(lambda: postgres_world(quick_postgres_server), workers=12))

    assert wins == ONCE
    assert effects == ONCE
