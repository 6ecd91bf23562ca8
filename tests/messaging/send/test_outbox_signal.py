"""NOTIFY wakes a relay at once, and a lost connection is made again."""

from __future__ import annotations

import asyncio

import pytest
from sqlalchemy import text

from semel.errors import Misuse
from semel.sql import notify as signal
from semel.sql.database import SqlDatabase
from semel.sql.notify import OutboxSignal
from tests.messaging.outgoing import Broker, entry, fill, left, relay, run, until

LISTENERS = (
    "SELECT pid FROM pg_stat_activity WHERE query ILIKE 'listen%' AND pid <> pg_backend_pid()"
)


@pytest.mark.postgres
def test_a_signal_wakes_a_relay_that_would_sleep_for_an_hour(postgres, monkeypatch):
    monkeypatch.setattr(signal, "RECONNECT_SECONDS", 0.01)

    async def test(world):
        broker = Broker()
        sleeping = relay(world, broker, poll_seconds=3600)
        signals = OutboxSignal(world.database)
        await signals.install()
        await signals.install()
        async with asyncio.TaskGroup() as tasks, signals.waking(sleeping):
            tasks.create_task(sleeping.run())
            await fill(world, entry("0"))
            await until(lambda: broker.ids == ["0"])
            await asyncio.sleep(0.3)
            await fill(world, entry("1"))
            await until(lambda: broker.ids == ["0", "1"])
            await end_listeners(world)
            await fill(world, entry("2"))
            await until(lambda: broker.ids == ["0", "1", "2"])
            sleeping.stop()
        await signals.remove()
        await signals.remove()

        assert await left(world) == []

    run(postgres, test)


async def end_listeners(world):
    """End every connection that listens, and wait until there is another one."""
    async with world.database.engine.connect() as connection:
        [before] = (await connection.execute(text(LISTENERS))).scalars().all()
        await connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": before})
        after = [before]
        while after in ([before], []):
            await connection.rollback()
            after = (await connection.execute(text(LISTENERS))).scalars().all()


def test_other_databases_have_no_signals(tmp_path):
    with pytest.raises(Misuse, match="need PostgreSQL"):
        OutboxSignal(SqlDatabase(f"sqlite:///{tmp_path}/a.db"))
