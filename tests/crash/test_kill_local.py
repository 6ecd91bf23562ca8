"""Real processes, really killed: every row is in every sink once, whatever died when."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from local_scene import KINDS, Scene, Way, ways

from semel.crashpoints import CrashPoint
from semel.testing.kill import Zygote
from tests.crash.local_driver import DONE, FENCED
from tests.points import PIPELINE_POINTS

pytestmark = [pytest.mark.postgres, pytest.mark.kill, pytest.mark.timeout(600)]


@pytest.fixture
def all_sinks(zygote: Zygote, tmp_path: Path, postgres_url: str, seaweedfs):
    """Make scenes with every sink at once."""
    return lambda batches=4: Scene(
        zygote, tmp_path / "scene", KINDS, batches, postgres_url, s3=seaweedfs
    )


def test_a_run_in_peace_is_clean(all_sinks):
    scene = all_sinks()

    assert scene.program.run().code == DONE

    scene.assert_clean()


def test_the_audit_convicts_every_kind_of_sink(all_sinks):
    scene = all_sinks()
    scene.program.run()
    with psycopg.connect(scene.postgres, autocommit=True) as connection:
        connection.execute("insert into entries_staging select * from entries_staging limit 1")
        connection.execute("delete from entries_prepared where id = 7")
    shutil.rmtree(next((scene.folder / "files").glob("cycle=*")))
    sink = scene._s3_sink()
    sink.store.delete([f"_commits/{sink.store.names('_commits/')[0][0]}"])
    sink.close()
    lines = next((scene.folder / "jsonl").glob("cycle=*/*.jsonl"))
    lines.write_text(lines.read_text().replace("row", "raw"))
    with scene.lake_table() as table:
        table.delete("id = 7")

    files, jsonl, staging, prepared, iceberg, s3 = scene.audit().sinks

    assert len(files.missing) == len(s3.missing) == 6
    assert len(jsonl.missing) == len(jsonl.foreign) > 0
    assert len(staging.duplicated) == 1
    assert (len(prepared.missing), len(prepared.torn)) == (1, 1)
    assert len(iceberg.missing) == 1


@pytest.fixture(scope="module")
def found(zygote, tmp_path_factory, postgres_server, seaweedfs) -> Iterator[list[Way]]:
    """Every window of a pipeline with all sinks."""
    databases = []

    def make_scene() -> Scene:
        name = f"walk_{len(databases)}"
        databases.append(name)
        url = postgres_server.create_database(name)
        return Scene(zygote, tmp_path_factory.mktemp("walk"), KINDS, 3, url, s3=seaweedfs)

    yield ways(make_scene)
    for name in databases:
        postgres_server.drop_database(name)


def test_every_crash_point_is_a_window_of_the_local_driver(found):
    reached = {(w.window.partition(":")[0], w.window.rpartition(":")[2]) for w in found}

    # Kafka's are crashed in tests/kafka/test_kafka_sink.py, with a broker, and those of POSTs and
    # upserts in tests/unit/http/test_http_posts.py and tests/unit/iceberg/test_iceberg_writes.py.
    elsewhere = ("kafka_", "held_", CrashPoint.TABLE_COMMIT_REWRITTEN.step)
    here = [point for point in PIPELINE_POINTS if not point.step.startswith(elsewhere)]
    assert {(point.step, point.side) for point in here} == reached


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 4))]
)
def test_a_driver_killed_at_one_window_after_another_loses_and_repeats_nothing(
    all_sinks, found, part
):
    """A quarter of all windows, in the order of a shuffle; the rest is for the soak."""
    chosen = random.Random(1).sample(found, len(found))[part::4]
    scene = all_sinks(batches=2 * len(chosen))

    for way in chosen:
        way.kill(scene)
    scene.program.run_until_done()

    print(f"{len(chosen)} kills at {len(chosen)} of {len(found)} windows")
    scene.assert_clean()


@pytest.mark.soak
@pytest.mark.parametrize("kinds", [(kind,) for kind in KINDS], ids=lambda kinds: kinds[0])
@pytest.mark.parametrize("occurrence", [1, 2])
def test_a_driver_of_one_sink_killed_at_any_window_loses_and_repeats_nothing(
    zygote, tmp_path, postgres_url, found, kinds, occurrence, seaweedfs
):
    others = [kind for kind in KINDS if kind not in kinds]
    mine = [way for way in found if not any(f":{kind}:" in way.window for kind in others)]
    scene = Scene(zygote, tmp_path / "scene", kinds, 4 * len(mine), postgres_url, s3=seaweedfs)

    for way in mine:
        rare = way.killed_before_at or way.options or way.window.startswith(("acquire", "fence"))
        way.kill(scene, 1 if rare else occurrence)
    scene.program.run_until_done()

    scene.assert_clean()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))]
)
def test_a_driver_killed_at_random_times_loses_and_repeats_nothing(all_sinks, seed):
    scene = all_sinks(batches=60)
    moments = random.Random(seed)
    kills = 0

    for _ in range(15):
        ended = scene.program.run(kill_after=moments.uniform(0.02, 0.8))
        kills += ended.was_killed
        if ended.code == DONE:
            break
    scene.program.run_until_done()

    assert kills > 0
    scene.assert_clean()


@pytest.mark.parametrize("takeover", ["force", "wait"])
@pytest.mark.parametrize(
    "where",
    [
        "stage:postgres-prepared:written",
        "tokens:after",
        "commit_txn:before",
        "commit_txn:after",
        "commit_2pc:postgres-staging:before",
        "store_commit:before",
    ],
)
def test_a_stopped_driver_that_is_woken_after_a_takeover_changes_nothing_and_says_so(
    all_sinks, where, takeover
):
    scene = all_sinks()
    first = scene.program.start("--lease-seconds", "1", stop_at=f"{where}#2")

    try:
        second = scene.program.run("--takeover", takeover)
        assert second.code == DONE, second.output
        scene.assert_clean()
        first.wake()
        ended = first.wait()
    finally:
        first.kill()

    assert ended.code == FENCED, ended.output
    assert "fenced" in ended.output
    assert scene.program.run().code == DONE
    scene.assert_clean()


def test_a_stopped_driver_that_wakes_while_its_successor_works_disturbs_nobody(all_sinks):
    scene = all_sinks(batches=6)
    first = scene.program.start(stop_at="commit_txn:before#2")
    second = scene.program.start("--takeover", "force", stop_at="commit_txn:before#2")

    try:
        first.wake()
        assert first.wait().code == FENCED
        second.wake()
        ended = second.wait()
    finally:
        first.kill()
        second.kill()

    assert ended.code == DONE
    assert "CommitAborted" not in ended.output
    scene.assert_clean()
