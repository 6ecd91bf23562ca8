"""A rebalance takes a partition away while its owner is at work, and lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest

from semel.memory.broker_groups import Patience
from semel.message import Message
from semel.messaging.receive.crash import TURNS
from semel.messaging.receive.runner import Runner
from tests.scenarios.services import BATCHED, GROUP, SINGLE, TOPIC, Service
from tests.scenarios.watching import WatchedDatabase, WatchedSubscription

MODES = pytest.mark.parametrize("mode", [SINGLE, BATCHED], ids=["single", "batched"])
PUT_OUT = (5.0, Patience(session_seconds=30.0, rebalance_seconds=0.1), 1)
"""It would wait for its handler, but the group does not wait for it."""

LETS_GO = (0.05, Patience(session_seconds=30.0), 2)
"""It waits no longer for its handler, and gives the partition up."""


@pytest.fixture(autouse=True)
def _two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody wait for a turn, as B does not in a process of its own."""
    monkeypatch.setattr(TURNS, "alone", nullcontext)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@MODES
@pytest.mark.parametrize(
    ("left", "is_refused"),
    [(PUT_OUT, True), (LETS_GO, False)],
    ids=["is put out", "lets go"],
)
def test_what_its_owner_still_handles_when_another_reads_it_happens_once(
    serve, mode, left, is_refused
):
    """A reads and handles; the partition goes to B, which reads the same; A ends and is late."""
    stop_seconds, patience, partitions = left
    place = partitions - 1

    async def scenario(service: Service) -> None:
        at_work, may_end = asyncio.Event(), asyncio.Event()
        said: dict[str, list[str]] = {"A": [], "B": []}

        async def wait(message: Message) -> None:
            if message.id == "m2" and not at_work.is_set():
                at_work.set()
                await may_end.wait()

        async def member(name: str) -> Runner:
            inside = await service.broker.subscribe(GROUP, [TOPIC])
            return Runner(
                service.consumer,
                WatchedSubscription(inside, said[name]),
                WatchedDatabase(service.database, said[name]),
                replace(mode, stop_seconds=stop_seconds),
            )

        # In SQLite there is one writer at a time: B comes no further while A is at work.
        reads = "claim" if service.database.is_postgres else "consume"
        service.wait = wait
        service.send(1, 2, 3, partition=place)
        first = await member("A")
        running = [asyncio.create_task(first.run())]
        await at_work.wait()
        assert service.committed == {}

        second = await member("B")
        running.append(asyncio.create_task(second.run()))
        await until(lambda: reads in said["B"])
        may_end.set()
        await until(lambda: service.committed == {place: 3})
        service.send(4, partition=place)
        await until(lambda: service.committed == {place: 4})
        for runner in (first, second):
            runner.stop()
        await asyncio.gather(*running)

        assert sorted(await service.effects()) == ["m1", "m2", "m3", "m4"]
        assert sorted(service.calls) == ["m1", "m2", "m3", "m4"]
        # A commits m1 by right, and what comes later if it gets the partition back.
        assert ("refused" in said["A"]) is is_refused
        assert service.broker.lag(GROUP, TOPIC) == 0

    serve(scenario, patience=patience, partitions=partitions)
