"""The documented consumer (claim, handle, commit, return) on a real broker, killed while it works.

FastStream's default acknowledgement loses the message that was being handled, and the oracle of
the other kill tests says so; one option later the outcome is exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("faststream")

from sqlalchemy import text

from semel.codec import FromHeader
from semel.messaging.handler import consumer
from semel.testing.worker import opened
from tests.crash.scripted import MESSAGE_ID

pytestmark = [pytest.mark.kafka, pytest.mark.postgres, pytest.mark.kill]

STUCK = ("p010", "p020")
"""The events in whose handler the first and the second process are killed."""

SENT = [f"p{number:03}" for number in range(30)]
TWICE = SENT[:5]


@consumer("Payments", id_from=FromHeader(MESSAGE_ID))
async def payments(message, session):
    """Tells the oracle the name of the claims, and where a message's id is."""


@pytest.fixture
def scene(make_scene):
    """A topic with events and late duplicates, and the database that outlives the services."""
    scene = make_scene(relays=False)
    scene.worker = replace(scene.worker, consumer=f"{__name__}:payments")
    scene.receipts, scene._effects = "", "SELECT id FROM payments"
    asyncio.run(make_table(scene.database))
    for name in (*SENT, *TWICE):
        scene.put(name, {"event_id": name, "amount": 1})
    return scene


async def make_table(url):
    async with opened(url) as database, database.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE payments (id TEXT, amount INTEGER)"))


@contextlib.contextmanager
def service(scene, acks, stuck_at):
    where = (scene.server.bootstrap, scene.topic, scene.topic, scene.database)
    command = [sys.executable, "-m", "tests.kafka.seed_service", *where, acks, stuck_at]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=root)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def killed_twice(scene, acks, beyond):
    """Kill two services inside a handler, when the committed offset is *beyond* its event."""
    for stuck_at in STUCK:
        with service(scene, acks, stuck_at):
            offset = SENT.index(stuck_at) + beyond
            scene.wait_until(lambda offset=offset: scene.committed() >= offset, 60)
    with service(scene, acks, ""):
        scene.wait_until(lambda: scene.committed() == len(SENT) + len(TWICE), 60)
    return scene.audit()


def test_acknowledged_after_the_commit_each_effect_is_there_once(scene):
    audit = killed_twice(scene, "after the commit", 0)

    assert audit.completed == len(SENT)
    assert audit.lost + audit.missing_effects + audit.doubled_effects + audit.offsets == ()


def test_the_default_acknowledgement_loses_what_a_killed_process_had_begun(scene):
    audit = killed_twice(scene, "default", 1)

    assert audit.offsets == ()  # the group has committed every message
    assert audit.lost == STUCK
    assert audit.completed == len(SENT) - len(STUCK)
