"""Real kills of a real Spark driver: every row is in every sink once, whatever died when."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from semel.crashpoints import CrashPoint
from semel.testing.services import jdbc_jars
from tests.conftest import require
from tests.points import PIPELINE_POINTS
from tests.spark.killing import ROWS_A_FILE, Scene, end

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.kill, pytest.mark.timeout(600)]

IN_TASKS = (
    CrashPoint.STAGE_BEFORE,
    CrashPoint.STAGE_WRITTEN,
    CrashPoint.STAGE_AFTER,
    CrashPoint.POSTGRES_STAGE_COPIED,
    CrashPoint.POSTGRES_TASK_PREPARED,
)
ONLY_IN = {
    "staging": {CrashPoint.POSTGRES_STAGE_COPIED, CrashPoint.POSTGRES_COMMIT_SENT},
    "prepared": {
        CrashPoint.POSTGRES_TASK_PREPARED,
        CrashPoint.POSTGRES_PROOF_WRITTEN,
        CrashPoint.POSTGRES_COMMIT_PREPARED_ONE,
    },
}
SAMPLE = {
    "staging": [
        CrashPoint.SPARK_BATCH_AFTER,
        CrashPoint.COMMIT_TXN_AFTER,
        CrashPoint.STAGE_WRITTEN,
    ],
    "prepared": [CrashPoint.COMMIT_TXN_AFTER, CrashPoint.POSTGRES_COMMIT_PREPARED_ONE],
}


def points(mode: str) -> list[CrashPoint]:
    """The windows that a healthy run of the job passes in *mode*."""
    other = ONLY_IN["prepared" if mode == "staging" else "staging"]
    unseen = ("recover", "abort", "sweep")
    return [
        p
        for p in CrashPoint
        if p in PIPELINE_POINTS and p not in other and not p.step.startswith(unseen)
    ]


def kill_at(scene: Scene, point: CrashPoint) -> None:
    once = str(scene.folder / f"{point.value.replace(':', '-')}.once")
    # The second passage is in the middle of the work; the lease is taken once per start.
    passage = 1 if point is CrashPoint.ACQUIRE_AFTER else 2
    code, output = scene.run(SEMEL_CRASH_AT=f"{point.value}#{passage}", SEMEL_CRASH_ONCE=once)
    assert Path(once).exists(), f"{point} was not reached: {output}"
    if point not in IN_TASKS:
        assert code == -signal.SIGKILL


@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_a_driver_killed_at_one_point_after_another_loses_and_repeats_nothing(
    tmp_path: Path, postgres_url: str, mode: str
) -> None:
    scene = Scene(tmp_path / "job", postgres_url, mode, files=8)

    for point in SAMPLE[mode]:
        kill_at(scene, point)
    code, output = scene.run()

    assert code == 0, output
    scene.assert_clean()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("mode", "point"), [(mode, point) for mode in ONLY_IN for point in points(mode)], ids=str
)
def test_a_driver_killed_at_any_point_loses_and_repeats_nothing(
    tmp_path: Path, postgres_url: str, mode: str, point: CrashPoint
) -> None:
    scene = Scene(tmp_path / "job", postgres_url, mode)

    kill_at(scene, point)
    code, output = scene.run()

    assert code == 0, output
    scene.assert_clean()


def test_a_driver_killed_at_a_random_time_loses_and_repeats_nothing(
    tmp_path: Path, postgres_url: str
) -> None:
    scene = Scene(tmp_path / "job", postgres_url)

    assert scene.kill_after(random.Random(1).uniform(0.5, 2.0))
    code, output = scene.run()

    assert code == 0, output
    scene.assert_clean()


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("mode", ["staging", "prepared"])
def test_a_driver_killed_at_many_random_times_loses_and_repeats_nothing(
    tmp_path: Path, postgres_url: str, mode: str
) -> None:
    kills = int(os.environ.get("SEMEL_SOAK_KILLS", "100"))
    rng = random.Random(f"{mode} {os.environ.get('SEMEL_SOAK_SEED', '1')}")
    scene = Scene(tmp_path / "job", postgres_url, mode, files=kills * 6)
    # A cold JVM takes seconds for its first cycle: two of three kills wait until it is over.
    moments = [("", 5.0), ("CycleEnded", 1.5), ("CycleEnded", 1.5)]

    done = 0
    for _ in range(kills):
        behind, seconds = rng.choice(moments)
        done += scene.kill_after(rng.uniform(0.0, seconds), behind)
    # Whatever the killed runs did not get to is left for this one.
    code, output = scene.run(deadline_seconds=1800)

    print(f"{done} kills in {mode} mode")
    assert code == 0, output
    assert done == kills, "the job was finished before its last kill"
    scene.assert_clean()


def test_stopped_drivers_that_wake_after_a_takeover_change_nothing_and_say_so(
    tmp_path: Path, postgres_url: str
) -> None:
    scene = Scene(tmp_path / "job", postgres_url, files=4)
    stopped = []
    try:
        for point in (CrashPoint.COMMIT_TXN_BEFORE, CrashPoint.COMMIT_TXN_AFTER):
            stopped.append(scene.start("--takeover", SEMEL_STOP_AT=f"{point.value}#2"))
            os.waitid(os.P_PID, stopped[-1].pid, os.WSTOPPED | os.WEXITED)
            assert stopped[-1].poll() is None, scene.last_words()
        code, output = scene.run("--takeover")
        assert code == 0, output
        scene.assert_clean()

        for driver in stopped:
            os.kill(driver.pid, signal.SIGCONT)
            woken, _ = driver.communicate(timeout=90)

            assert "EXIT FENCED" in woken
            assert driver.returncode == 3
            scene.assert_clean()
    finally:
        for driver in stopped:
            end(driver)


def test_the_same_audit_convicts_a_plain_query_with_sparks_own_writers(
    tmp_path: Path, postgres_url: str
) -> None:
    require(jdbc_jars)
    scene = Scene(tmp_path / "job", postgres_url, files=3)

    code, _ = scene.run("--plain", SEMEL_CRASH_AT="spark_batch:after#2")
    assert code == -signal.SIGKILL
    code, output = scene.run("--plain")

    assert code == 0, output
    entries, files, _ = scene.audit().sinks
    assert len(entries.duplicated) == len(files.duplicated) == ROWS_A_FILE
    assert set(entries.duplicated) == set(files.duplicated)
    assert entries.missing == files.missing == ()


def test_a_checkpoint_on_another_file_system_survives_a_kill(
    tmp_path: Path, postgres_url: str
) -> None:
    scene = Scene(tmp_path / "job", postgres_url, files=3)
    settings = (
        "--set",
        f"spark.hadoop.fs.viewfs.mounttable.demo.link./data=file://{scene.folder}",
        "--checkpoint",
        "viewfs://demo/data/elsewhere",
    )
    point = f"{CrashPoint.SPARK_BATCH_AFTER.value}#2"
    once = scene.folder / "once"

    scene.run(*settings, SEMEL_CRASH_AT=point, SEMEL_CRASH_ONCE=str(once))
    assert once.exists()
    code, output = scene.run(*settings)

    assert code == 0, output
    assert (scene.folder / "elsewhere" / "offsets").is_dir()
    scene.assert_clean()
