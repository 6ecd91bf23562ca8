"""A pipeline of messages, crashed at every window, and met by a service and by an operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import psycopg
import pytest

from semel.crashpoints import CrashPoint
from semel.postgres.connect import pool
from semel.testing.crash import Crash, CrashWindow, WindowCounter, hooked, trace
from tests.crash.messages.message_scene import CONSUMER, Scene, make_scene
from tests.unit.postgres.messages.message_place import empty

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="module")
def place(quick_postgres_server) -> Iterator[str]:
    url = quick_postgres_server.create_database("windows")
    make_scene(url)
    yield url
    pool().close_all()
    quick_postgres_server.drop_database("windows")


@pytest.fixture
def new_scene(place) -> Callable[[], Scene]:
    """Return what makes a scene with empty tables and a ledger of its own."""

    def make() -> Scene:
        pool().close_all()
        empty(place, "effects")
        return Scene(place)

    return make


@pytest.fixture
def windows(new_scene) -> list[CrashWindow]:
    """Every window of a run without a crash, which ends as it should."""
    scene = new_scene()
    with trace() as windows:
        scene.run()
    assert scene.verdicts() == []
    assert len(windows) > 150
    return windows


def at(wanted: CrashWindow, act: Callable[[], None]):
    """Carry out *act* at one window."""
    counter = WindowCounter()

    def hook(point: CrashPoint, sink: str | None) -> None:
        if counter.pass_through(point, sink) == wanted:
            act()

    return hooked(hook)


def crash() -> None:
    raise Crash


def failures_of_crashes(new_scene, windows) -> list[str]:
    wrong = []
    for window in windows:
        scene = new_scene()
        with at(window, crash):
            scene.survive()
        scene.run()
        wrong += [f"{window}: {verdict}" for verdict in scene.verdicts()]
    return wrong


def test_a_crash_at_a_window_loses_and_doubles_nothing(new_scene, windows):
    assert failures_of_crashes(new_scene, windows[8::24]) == []


@pytest.mark.soak
@pytest.mark.parametrize("part", range(4))
def test_a_crash_at_every_window_loses_and_doubles_nothing(new_scene, windows, part):
    assert failures_of_crashes(new_scene, windows[part::4]) == []


def skip(scene: Scene) -> str:
    """Skip b1, as an operator does: lock, change, and only then look at the books."""
    with scene.connect() as database:
        database.execute("SET lock_timeout = '100ms'")
        try:
            with database.transaction(force_rollback=False):
                gone = database.execute(
                    "DELETE FROM waiting_message WHERE message_id = 'b1' RETURNING 1"
                ).fetchone()
                if gone is None:
                    return "not there"
                database.execute(
                    "UPDATE processed_message SET state = 'COMPLETED', marker = 'SKIPPED' "
                    "WHERE message_id = 'b1'"
                )
                held = database.execute(
                    "SELECT 1 FROM semel.sink_attempt a WHERE state = 'prepared' AND NOT EXISTS "
                    "(SELECT FROM semel.sink_proof p WHERE p.scope = a.scope AND p.sink = a.sink "
                    "AND p.generation = a.generation AND p.batch = a.batch "
                    "AND p.attempt = a.attempt)"
                ).fetchone()
                if held is not None:
                    raise psycopg.Rollback
                return "skipped"
        except psycopg.errors.LockNotAvailable:
            return "locked"
    return "refused"


def failures_of_acts(new_scene, windows, *, crashes: bool) -> tuple[list[str], set[str]]:
    """Let an operator skip b1 at each window, live or after a crash."""
    wrong, answers = [], set()
    for window in windows:
        scene = new_scene()
        told = []

        def act(scene: Scene = scene, told: list[str] = told) -> None:
            if crashes:
                raise Crash
            told.append(skip(scene))

        with at(window, act):
            scene.survive()
        if crashes:
            told.append(skip(scene))
            scene.run()
        [answer] = told
        answers.add(answer)
        skipped = ["b1"] if answer == "skipped" else []
        wrong += [f"{window}, {answer}: {verdict}" for verdict in scene.verdicts(skipped)]
    return wrong, answers


def of_retries(windows: list[CrashWindow]) -> list[CrashWindow]:
    """Return the windows of the second and the third cycle, in which b1 comes back."""
    begins = [n for n, window in enumerate(windows) if window.point is CrashPoint.BEGIN_TXN_BEFORE]
    return windows[begins[1] : begins[3]]


def test_an_act_at_a_window_is_read_refused_or_waits(new_scene, windows):
    wrong, answers = failures_of_acts(new_scene, of_retries(windows)[2::14], crashes=False)

    assert wrong == []
    assert "skipped" in answers


def test_an_act_after_a_crash_is_refused_if_a_cycle_is_not_settled(new_scene, windows):
    decided = [w for w in of_retries(windows) if w.point is CrashPoint.COMMIT_TXN_AFTER]

    wrong, answers = failures_of_acts(new_scene, decided, crashes=True)

    assert wrong == []
    assert answers == {"refused"}


@pytest.mark.soak
@pytest.mark.parametrize("crashes", [False, True])
def test_an_act_at_every_window_leaves_one_end_for_every_message(new_scene, windows, crashes):
    wrong, answers = failures_of_acts(new_scene, of_retries(windows), crashes=crashes)

    assert wrong == []
    assert {"skipped", "refused" if crashes else "locked"} <= answers


def claim_as_a_service(scene: Scene) -> bool:
    """Handle c2, as a service does: claim and effect in one transaction."""
    with scene.connect() as database:
        database.execute("SET lock_timeout = '100ms'")
        with suppress(psycopg.errors.LockNotAvailable), database.transaction():
            database.execute(
                "INSERT INTO processed_message (consumer_name, message_id, state, payload_hash) "
                "VALUES (%s, 'c2', 'COMPLETED', 'h')",
                [CONSUMER],
            )
            database.execute("INSERT INTO effects (id, key) VALUES ('c2', 'c')")
            return True
    return False


def test_a_service_that_claims_while_a_cycle_stages_costs_one_attempt(new_scene, windows):
    scene = new_scene()

    with at(CrashWindow(CrashPoint.FLUSH_AFTER, None, 2), lambda: claim_as_a_service(scene)):
        scene.run()

    assert scene.verdicts(by_others=["c2"]) == []
    assert scene.attempts == len([w for w in windows if w.point is CrashPoint.FLUSH_AFTER]) + 1


@pytest.mark.soak
def test_a_service_that_claims_at_any_window_before_the_decision_doubles_nothing(
    new_scene, windows
):
    wrong = []
    decisions = [n for n, w in enumerate(windows) if w.point is CrashPoint.COMMIT_TXN_BEFORE]
    for window in windows[decisions[0] : decisions[1] + 1]:
        scene, claimed = new_scene(), []
        with at(window, lambda of=scene, to=claimed: to.append(claim_as_a_service(of))):
            scene.run()
        others = ["c2"] if claimed == [True] else []
        wrong += [f"{window}, {claimed}: {one}" for one in scene.verdicts(by_others=others)]

    assert wrong == []
