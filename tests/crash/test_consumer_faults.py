"""A database that falls over, an answer that is lost, and a stop that is asked for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from consumer_scene import QUICK_RETRY, Scene

from semel.testing.kill import DEADLINE_SECONDS, POLL_SECONDS, Running
from semel.testing.services import CutProxy, PostgresServer

pytestmark = [pytest.mark.postgres, pytest.mark.kill, pytest.mark.timeout(600)]

SOAK = pytest.mark.soak


def wait_until(met: Callable[[], bool], worker: Running) -> None:
    """Wait while a worker runs, with a deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not met():
        assert not worker.ends_within(POLL_SECONDS), f"it ended:\n{worker.output}"
        assert time.monotonic() < deadline, f"it never happened:\n{worker.output}"


def committed(scene: Scene) -> int:
    return sum(scene.broker.committed(scene.worker.group).values())


@pytest.fixture(scope="module")
def falling_server() -> Iterator[PostgresServer]:
    """A server of these tests' own: nobody else is on it when it falls over."""
    with PostgresServer(18) as server:
        yield server


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("single", 1),
        pytest.param("single", 5, marks=SOAK),
        pytest.param("leased", 5, marks=SOAK),
        pytest.param("batched", 5, marks=SOAK),
    ],
)
def test_workers_outlive_a_database_that_falls_over_under_load(
    workers, tmp_path, falling_server, kind, times
):
    name = f"falls_{kind}_{times}"
    url = falling_server.create_database(name)
    scene = Scene(workers, tmp_path / "scene", kind, database=url, partitions=2)
    scene.send_mixed(10)
    both = [scene.start(until="signal"), scene.start(until="signal")]

    try:
        for number in range(times):
            before = committed(scene)
            scene.send_mixed(20, number)
            wait_until(lambda before=before: committed(scene) > before, both[0])
            falling_server.stop("immediate")
            falling_server.start()
        scene.send_mixed(5, 99)
        assert scene.run().code == 0
        for worker in both:
            os.kill(worker.pid, signal.SIGTERM)
        ended = [scene.end(worker) for worker in both]
    finally:
        for worker in both:
            worker.kill()

    assert [end.code for end in ended] == [0, 0], "\n".join(end.output for end in ended)
    scene.assert_as_expected()
    falling_server.drop_database(name)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("single", "message_commit:before#3"),
        ("batched", "message_commit:before"),
        ("leased", "leased_complete:before#3"),
        ("single", "failure:before"),
    ],
)
def test_a_lost_answer_to_a_commit_brings_the_message_back_as_a_duplicate(
    workers, tmp_path, postgres_server, postgres_url, kind, where
):
    with CutProxy(postgres_server.port) as proxy:
        url = postgres_url.replace(f":{proxy.target_port}/", f":{proxy.port}/")
        scene = Scene(workers, tmp_path / "s", kind, database=postgres_url, through=url)
        scene.send_mixed(10, 3)
        worker = scene.start(stop_at=where)
        try:
            proxy.swallow_reply_to(b"COMMIT")
            worker.wake()
            ended = scene.end(worker)
        finally:
            worker.kill()
        assert proxy.wait_until_swallowed(0), ended.output

    assert ended.code == 0, ended.output
    scene.assert_as_expected()


@pytest.mark.parametrize(
    "kind", ["single", "batched", *(pytest.param(k, marks=SOAK) for k in ("lanes", "leased"))]
)
def test_a_worker_that_is_asked_to_stop_finishes_settles_and_leaves(workers, tmp_path, kind):
    scene = Scene(workers, tmp_path / "scene", kind, partitions=2, max_records=3)
    for number in range(40):
        scene.say(key=f"k{number}")
    worker = scene.start(until="signal")

    try:
        wait_until(lambda: committed(scene) > 0, worker)
        os.kill(worker.pid, signal.SIGTERM)
        ended = scene.end(worker)
    finally:
        worker.kill()

    assert ended.code == 0, ended.output
    found = scene.found()
    assert (found.members, found.suspects, found.waiting) == ((), frozenset(), frozenset())
    assert len(found.effects) == committed(scene), "what was handled is settled"
    assert not scene.broker.store.peek(scene.worker.group).members
    scene.run_until_done()
    scene.assert_as_expected()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("single", "blocking"),
        ("single", "retry-table"),
        pytest.param("batched", "blocking", marks=SOAK),
        pytest.param("leased", "blocking", marks=SOAK),
    ],
)
def test_a_handler_that_outlasts_the_deadline_is_cancelled_and_its_message_comes_back(
    workers, tmp_path, kind, mode
):
    """In the waiting room's worker as well as in the broker's."""
    scene = Scene(
        workers,
        tmp_path / "scene",
        kind,
        stop_seconds=0.3,
        policy={"retry": {**QUICK_RETRY, "mode": mode}, "lease_seconds": 1.0},
    )
    began = tmp_path / "began"
    slow = {"seconds": 600, "once": str(began)}
    if mode == "retry-table":
        scene.say("transient", times=1, then="slow", **slow)
    else:
        scene.say("slow", **slow)
    scene.say()
    worker = scene.start(until="signal")

    try:
        wait_until(began.exists, worker)
        os.kill(worker.pid, signal.SIGTERM)
        ended = scene.end(worker, 20)
    finally:
        worker.kill()

    assert ended.code == 0, ended.output
    assert "m0" not in scene.found().effects
    scene.run_until_done()
    scene.assert_as_expected()


def test_a_worker_works_in_a_folder_of_its_own(tmp_path: Path, workers) -> None:
    scene = Scene(workers, tmp_path / "scene")
    scene.say()

    assert scene.run().code == 0

    assert {path.name.partition("-")[0].partition(".")[0] for path in scene.folder.iterdir()} <= {
        *("broker", "database", "log"),
    }
