"""PostgreSQL, Iceberg, Delta, S3, HTTP and Kafka under one decision, killed, cut off and slow."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from semel.ledgers import open_ledger
from semel.operate import verification
from semel.operate.status import Pipeline, cut_of
from semel.pipeline.driver import Settings
from semel.pipeline.txn import Scope
from semel.testing.kill import Zygote
from semel.testing.services import CutProxy
from tests.crash.local_driver import APP, DONE, FENCED, STOPPED
from tests.crash.local_receiver import Receiver
from tests.crash.local_scene import DECIDED, MODULES, Scene, Way, ways
from tests.points import PIPELINE_POINTS

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.seaweedfs,
    pytest.mark.kill,
    pytest.mark.timeout(1200),
]

SINKS = ("postgres-staging", "iceberg", "delta", "s3", "http", "kafka")

# Where a crash is worst: right before and right after the decision, and around each commit.
UNDECIDED_STEPS = ("tokens", "commit_txn:before")
DECIDED_STEPS = (
    *("commit_txn:after", "commit_2pc", "store_commit:before"),
    *("postgres_commit_sent", "table_commit", "s3_commit", "kafka_slot_commit"),
)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """A process that forks drivers with every sink."""
    more = ("semel.delta.sink", "semel.http.sink", "semel.kafka.sink", "pyiceberg.catalog.rest")
    with Zygote("tests.crash.local_driver:main", (*MODULES, *more)) as zygote:
        yield zygote


@pytest.fixture
def receiver(tmp_path) -> Iterator[Receiver]:
    with Receiver(tmp_path) as receiver:
        yield receiver


@pytest.fixture
def make_scene(zygote, tmp_path, postgres_url, seaweedfs, receiver, kafka_server):
    def make(batches=3, **more) -> Scene:
        return Scene(
            zygote,
            tmp_path / "scene",
            SINKS,
            batches,
            postgres_url,
            s3=seaweedfs,
            receiver=receiver,
            kafka=kafka_server,
            **more,
        )

    return make


@pytest.fixture(scope="module")
def found(zygote, tmp_path_factory, postgres_server, seaweedfs, kafka_server) -> Iterator[list]:
    """Every window of a pipeline with all six."""
    databases = []
    with ExitStack() as opened:

        def make_scene() -> Scene:
            databases.append(f"six_{len(databases)}")
            folder = tmp_path_factory.mktemp("six")
            return Scene(
                zygote,
                folder / "scene",
                SINKS,
                3,
                postgres_server.create_database(databases[-1]),
                s3=seaweedfs,
                receiver=opened.enter_context(Receiver(folder)),
                kafka=kafka_server,
            )

        yield ways(make_scene)
    for name in databases:
        postgres_server.drop_database(name)


def test_every_crash_point_is_a_window_of_six_sinks(found):
    reached = {(w.window.partition(":")[0], w.window.rpartition(":")[2]) for w in found}

    # The other mode of PostgreSQL, files, and what is held for services are in tests of their own.
    others = ("files_", "held_sent", "postgres_task", "postgres_proof", "postgres_commit_prepared")
    # A sink that appends rewrites no files.
    others += ("table_commit_rewritten",)
    here = [point for point in PIPELINE_POINTS if not point.step.startswith(others)]
    assert {(point.step, point.side) for point in here} == reached


def test_operators_questions_are_answered_by_every_sink(make_scene):
    scene = make_scene(batches=2)
    scene.program.run()
    sinks, ledger = scene.sinks(), open_ledger(scene.ledger)
    pipeline = Pipeline(ledger, Scope(ledger.ledger_id, APP, "main"), tuple(sinks), Settings())

    found = verification.verify(pipeline, verification.cycles_to_verify(pipeline, 10))
    cut = cut_of(ledger, pipeline.scope, sinks)

    verdicts = {(check.sink, check.verdict.value) for check in found.checks}
    compared = {(kind, "equal") for kind in ("postgres-staging", "iceberg", "delta", "s3")}
    assert verdicts == compared | {("http", "cannot_tell"), ("kafka", "cannot_tell")}
    assert (found.cycles, cut.cycle, cut.positions[0].ends) == (2, "g1.b1", {"": 12})
    assert {(sink.sink, sink.mark, sink.agrees) for sink in cut.sinks} == {
        (kind, "g1.b1", True) for kind in SINKS
    }
    # Where readers find the cycle, as the page about visibility says.
    with scene.lake_table() as table:
        cycles = {one.summary["semel.cycle"] for one in table.metadata.snapshots}
    assert cycles == {"local/main/g1.b0", "local/main/g1.b1"}
    versions = [entry.get("semel.cycle") for entry in scene.delta_table().history()]
    assert versions == ["local/main/g1.b1", "local/main/g1.b0", None]
    for sink in sinks:
        sink.close()
    ledger.close()


def kill_at(scene: Scene, chosen: list[Way]) -> None:
    for way in chosen:
        way.kill(scene)
    scene.program.run_until_done()
    print(f"{len(chosen)} kills")
    scene.assert_clean()


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 12))]
)
def test_six_sinks_killed_at_one_window_after_another_lose_and_repeat_nothing(
    make_scene, found, part
):
    """A twelfth of all windows, in the order of a shuffle; the rest is for the soak."""
    chosen = random.Random(2).sample(found, len(found))[part::12]

    kill_at(make_scene(batches=2 * len(chosen)), chosen)


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 6))]
)
def test_six_sinks_killed_twice_in_a_row_around_the_decision_lose_and_repeat_nothing(
    make_scene, found, part
):
    """The process that settles what the first kill left is killed in the middle of it."""
    worst = [way for way in found if way.window.startswith(UNDECIDED_STEPS + DECIDED_STEPS)]
    order = random.Random(3)
    chosen = order.sample(worst, len(worst))[part::6]
    scene = make_scene(batches=2 * len(chosen))

    for way in chosen:
        way.kill(scene)
        act = "abort" if way.window.startswith(UNDECIDED_STEPS) else "commit"
        where = f"recover_{act}:{order.choice(SINKS)}:{order.choice(['before', 'after'])}"
        again = scene.program.run(crash_at=where)
        assert again.was_killed, f"{where} was not reached after {way}:\n{again.output}"
    scene.program.run_until_done()

    scene.assert_clean()


@pytest.mark.parametrize(
    "kind", ["iceberg", *(pytest.param(k, marks=pytest.mark.soak) for k in SINKS if k != "iceberg")]
)
def test_two_processes_that_recover_the_same_cycle_show_it_once(make_scene, kind):
    """Both stand right before they commit at one sink, and are woken together."""
    scene = make_scene()
    scene.program.run(crash_at=f"{DECIDED}#2")
    where = f"recover_commit:{kind}:before"
    first = scene.program.start(stop_at=where)
    second = scene.program.start("--takeover", "force", stop_at=where)

    try:
        first.wake()
        second.wake()
        ends = [first.wait(), second.wait()]
    finally:
        first.kill()
        second.kill()

    assert ends[0].code in (FENCED, STOPPED), ends[0].output
    assert ends[1].code in (DONE, STOPPED), ends[1].output
    scene.program.run_until_done()
    scene.assert_clean()


COMMITS = {
    "postgres-staging": b"COMMIT",
    "iceberg": b"assert-ref-snapshot-id",
    "delta": b"/_delta_log/",
    "s3": b"/_commits/",
    "http": b"POST /commit/",
    # EndTxn: its number, a version, the request's number, and the client's name.
    "kafka": re.compile(rb"\x00\x1a\x00[\x00-\x05]....\x00\x05semel", re.S),
}
"""What the request contains by which a sink commits."""


@pytest.fixture
def proxies(postgres_server, seaweedfs, receiver, kafka_server) -> Iterator[dict[str, CutProxy]]:
    """A proxy before each service; Kafka's stands before it already."""
    with ExitStack() as opened:
        ports = {
            "postgres-staging": postgres_server.port,
            "iceberg": seaweedfs.catalog_port,
            "s3": seaweedfs.port,
            "http": receiver.port,
        }
        made = {kind: opened.enter_context(CutProxy(port)) for kind, port in ports.items()}
        yield {**made, "delta": made["s3"], "kafka": kafka_server.proxy}
        kafka_server.proxy.cut_off()
        kafka_server.proxy.accept()


@pytest.fixture
def behind_proxy(make_scene, proxies, postgres_url):
    """Make a scene that reaches one of its sinks through a proxy."""

    def make(kind: str) -> tuple[Scene, CutProxy]:
        proxy = proxies[kind]
        url = postgres_url.replace(f":{proxy.target_port}/", f":{proxy.port}/")
        return make_scene(proxies=[proxy], lake_on_s3=True, through=url), proxy

    return make


@pytest.mark.parametrize("kind", SINKS)
def test_a_lost_reply_to_the_commit_of_one_sink_neither_loses_nor_repeats_a_row(behind_proxy, kind):
    scene, proxy = behind_proxy(kind)
    driver = scene.program.start(stop_at=f"commit_2pc:{kind}:before#2")

    try:
        proxy.swallow_reply_to(COMMITS[kind])
        driver.wake()
        ended = driver.wait()
    finally:
        driver.kill()

    assert proxy.wait_until_swallowed(0), f"nothing was committed:\n{ended.output}"
    assert "CommitAborted" not in ended.output
    assert ended.code in (DONE, STOPPED), ended.output
    scene.program.run_until_done()
    scene.assert_clean()


@pytest.mark.parametrize(
    "kind", ["http", *(pytest.param(k, marks=pytest.mark.soak) for k in SINKS if k != "http")]
)
def test_a_sink_that_is_cut_off_after_the_decision_is_waited_for_and_the_others_go_on(
    behind_proxy, kind
):
    scene, proxy = behind_proxy(kind)
    driver = scene.program.start(stop_at=f"commit_2pc:{kind}:before#2")

    try:
        proxy.refuse()
        proxy.cut()
        driver.wake()
        ended = driver.wait(300)
        again = scene.program.run(deadline_seconds=300)
    finally:
        driver.kill()
        proxy.accept()

    assert ended.code == STOPPED, ended.output
    assert again.code == STOPPED, again.output
    shown = {one.sink: one.found for one in scene.audit().sinks}
    assert shown.pop(kind) == 6
    # The files of both kinds of tables are in the store that is S3 here.
    store = {"iceberg", "delta", "s3"} if kind in ("delta", "s3") else {kind}
    others = [found for sink, found in shown.items() if sink not in store]
    assert set(others) == {12}
    scene.program.run_until_done()
    scene.assert_clean()


def test_a_sink_that_fails_leaves_the_others_whole_and_is_finished_by_the_next_start(
    make_scene, receiver
):
    scene = make_scene()
    receiver.failing = True

    ended = scene.program.run()

    assert (ended.code, "http" in ended.output) == (STOPPED, True)
    shown = {one.sink: one.found for one in scene.audit().sinks}
    assert shown == {**dict.fromkeys(SINKS, 6), "http": 0}
    receiver.failing = False
    scene.program.run_until_done()
    scene.assert_clean()


def test_a_sink_that_is_slower_than_the_lease_loses_neither_the_lease_nor_a_row(
    make_scene, receiver
):
    scene = make_scene()
    receiver.open.clear()
    driver = scene.program.start("--lease-seconds", "1")

    try:
        assert receiver.asked.wait(60)
        epoch, _ = lease_of(scene)
        begun, poll = time.monotonic(), threading.Event()
        while time.monotonic() < begun + 1.5:
            poll.wait(0.05)
        assert (lease_of(scene)[0], lease_of(scene)[1] > 0) == (epoch, True)
        receiver.open.set()
        ended = driver.wait()
    finally:
        driver.kill()

    assert ended.code == DONE, ended.output
    scene.assert_clean()


def lease_of(scene: Scene) -> tuple[int, float]:
    """Return the epoch, and how long the lease still is."""
    ledger = open_ledger(scene.ledger)
    try:
        record = ledger.scope_record(Scope(ledger.ledger_id, APP, "main"))
        assert record is not None
        return record.epoch, record.lease_left_seconds
    finally:
        ledger.close()
