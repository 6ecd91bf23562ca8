"""Several workers at once, killed and stopped at random, with duplicates, poison and rebalances."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field

import pytest
from consumer_scene import QUICK_RETRY, Scene

from semel.message import Partition
from semel.testing.kill import Running

pytestmark = [pytest.mark.postgres, pytest.mark.kill, pytest.mark.timeout(900)]

PARTITIONS = 4


@dataclass
class Crowd:
    """Some workers, of which one or another is killed, and replaced."""

    scene: Scene
    size: int
    chance: random.Random
    kills: int = 0
    running: list[Running] = field(default_factory=list)

    def fill_up(self) -> None:
        while len(self.running) < self.size:
            self.running.append(self.scene.start())

    def go_on(self) -> None:
        """Let them work for a moment, then do something to them."""
        scene, chance = self.scene, self.chance
        self.fill_up()
        victim = chance.choice(self.running)
        if not victim.ends_within(chance.uniform(0.05, 0.4)):
            match chance.choices(["kill", "term", "rebalance", "redeliver"], [6, 1, 1, 1])[0]:
                case "kill":
                    victim.kill()
                case "term":
                    os.kill(victim.pid, signal.SIGTERM)
                case "rebalance":
                    scene.broker.rebalance(scene.worker.group)
                    return
                case "redeliver":
                    partition = Partition(scene.topic, chance.randrange(PARTITIONS))
                    offset = scene.broker.committed(scene.worker.group).get(partition, 0)
                    scene.broker.redeliver(scene.worker.group, partition, max(0, offset - 3))
                    return
        self.running.remove(victim)
        ended = scene.end(victim)
        assert ended.code in (0, -signal.SIGKILL), ended.output
        self.kills += ended.was_killed

    def end(self) -> None:
        """Let them work off what is left."""
        self.fill_up()
        for worker in self.running:
            ended = self.scene.end(worker, 120)
            assert ended.code == 0, ended.output
        self.scene.run_until_done()

    def kill(self) -> None:
        """Let none of them outlive the test."""
        for worker in self.running:
            worker.kill()


def kill_at_random(scene: Scene, size: int, kills: int, seed: int) -> int:
    """Run a crowd under load until so many were killed; return how many messages that took."""
    crowd = Crowd(scene, size, random.Random(seed))
    scene.send_mixed(20, seed)
    try:
        step = 0
        while crowd.kills < kills:
            step += 1
            scene.send_mixed(3, seed * 1000 + step)
            crowd.go_on()
        crowd.end()
    finally:
        crowd.kill()
    result = scene.assert_as_expected()
    print(f"{crowd.kills} kills of {size} workers: {result.table()}")
    return result.messages


RANDOM = [
    # on, kind, workers, kills, seed
    ("postgres", "single", 2, 5, 1),
    ("sqlite", "batched", 4, 5, 2),
    *(
        pytest.param("postgres", kind, size, 30, seed, marks=pytest.mark.soak)
        for seed, (kind, size) in enumerate(
            [("single", 4), ("lanes", 2), ("batched", 4), ("leased", 4), ("leased", 2)], 3
        )
    ),
    *(
        pytest.param("sqlite", kind, size, 30, seed, marks=pytest.mark.soak)
        for seed, (kind, size) in enumerate([("single", 2), ("batched", 4), ("leased", 2)], 8)
    ),
]


@pytest.mark.parametrize(("on", "kind", "size", "kills", "seed"), RANDOM)
def test_workers_killed_at_random_lose_and_repeat_nothing(
    workers, tmp_path, request, on, kind, size, kills, seed
):
    url = request.getfixturevalue("postgres_url") if on == "postgres" else ""
    mode = ["blocking", "retry-table"][seed % 2]
    scene = Scene(
        workers,
        tmp_path / "scene",
        kind,
        database=url,
        partitions=PARTITIONS,
        policy={"retry": {**QUICK_RETRY, "mode": mode}},
    )

    kill_at_random(scene, size, kills, seed)


@pytest.mark.parametrize(
    ("kind", "where", "said"),
    [
        # It finds the partition gone before it tries to commit, and says nothing.
        ("single", "message_commit:after#2", ""),
        ("single", "settle:before", "is no longer"),
        # Which of the two it notices first depends on the group's heartbeat.
        ("batched", "settle:before", "partitions lost|is no longer"),
        ("leased", "leased_claim:after#2", "claim lost"),
        pytest.param("single", "outcomes:after", "partitions lost", marks=pytest.mark.soak),
        pytest.param(
            "leased", "leased_complete:after#2", "partitions lost", marks=pytest.mark.soak
        ),
    ],
)
def test_a_stopped_worker_that_is_woken_after_a_takeover_does_no_harm(
    workers, tmp_path, postgres_url, kind, where, said
):
    """Its claim, its commit or its offsets are refused, or a duplicate.

    On SQLite it could keep the only lock that there is, and a relay beside it the leader's.
    """
    scene = Scene(
        workers,
        tmp_path / "scene",
        kind,
        database=postgres_url,
        session_seconds=1.0,
        relays=False,
    )
    scene.send_mixed(12)
    zombie = scene.start(stop_at=where)

    try:
        assert scene.run().code == 0
        took_over = scene.audit(scene.expected)
        zombie.wake()
        ended = scene.end(zombie)
    finally:
        zombie.kill()

    assert (took_over.lost, took_over.doubled_effects) == ((), ())
    assert ended.code == 0, ended.output
    assert any(words in ended.output for words in said.split("|"))
    scene.assert_as_expected()


@pytest.mark.parametrize(
    "where", ["handle:after#2", pytest.param("message_commit:before#2", marks=pytest.mark.soak)]
)
def test_a_worker_stopped_inside_its_transaction_keeps_its_message_until_it_wakes(
    workers, tmp_path, postgres_url, where
):
    scene = Scene(
        workers, tmp_path / "scene", database=postgres_url, partitions=2, session_seconds=1.0
    )
    for number in range(8):
        scene.say(key=f"k{number}")
    zombie = scene.start(stop_at=where)
    second = scene.start()

    try:
        # All but its own message, and what stands behind it, is handled meanwhile.
        other = [p for p, held in held_by(scene, second).items() if not held]
        zombie.wake()
        codes = [scene.end(zombie).code, scene.end(second).code]
    finally:
        zombie.kill()
        second.kill()

    assert other
    assert codes == [0, 0]
    scene.assert_as_expected()


def held_by(scene: Scene, worker: Running) -> dict[Partition, bool]:
    """Wait until a worker has committed the end of one partition; say which are not at theirs."""
    ends = {p: scene.broker.store.bounds(p)[1] for p in scene.broker.partitions(scene.topic)}
    for _ in range(6000):
        committed = scene.broker.committed(scene.worker.group)
        held = {p: committed.get(p, 0) < end for p, end in ends.items()}
        if not all(held.values()) or worker.ends_within(0.01):
            return held
    raise AssertionError(f"no partition was worked off: {worker.output}")


def test_a_clock_that_jumps_by_days_changes_nothing(workers, tmp_path, postgres_url):
    """Leases and due times are on the database's clock, sessions on a monotonic one."""
    retry = {**QUICK_RETRY, "mode": "retry-table"}
    scene = Scene(
        workers,
        tmp_path / "scene",
        "leased",
        database=postgres_url,
        partitions=2,
        policy={"retry": retry},
        clock_jumps=True,
    )
    slow = scene.say("slow", "a", seconds=1.2)
    scene.send_mixed(15)
    crashing = scene.start(crash_at="leased_claim:after#3")
    steady = scene.start()

    try:
        codes = [scene.end(crashing).code, scene.end(steady).code]
    finally:
        steady.kill()
        crashing.kill()
    scene.run_until_done()

    assert set(codes) <= {0, -signal.SIGKILL}
    assert slow in scene.found().effects
    scene.assert_as_expected()
