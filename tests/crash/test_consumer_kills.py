"""Workers killed at every window: each message ends in one state, and its effect is there once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from consumer_scene import QUICK_RETRY, Scene

from semel.messaging.handle.claims import ClaimState
from semel.testing.trial import Trial
from tests.points import MESSAGING_POINTS

pytestmark = [pytest.mark.postgres, pytest.mark.kill, pytest.mark.timeout(600)]

NAIVE = Path(__file__).with_name("naive_runners.py")

ALWAYS = {
    *("member_enter:after", "member_leave:before", "careful_attempt:after", "retry_take:after"),
    *("claim:before", "handle:after", "failure:before", "failure:after"),
    *("outcomes:after", "settle:before", "settle:after"),
    *("relay_read:after", "relay_publish:before", "relay_publish:after"),
    *("relay_delete:before", "relay_delete:after"),
}
IN_ONE_TRANSACTION = {*ALWAYS, "claim:after", "message_commit:before", "message_commit:after"}
UNDER_A_LEASE = {
    *ALWAYS,
    *("leased_claim:after", "leased_complete:before", "leased_complete:after"),
}
BY_KIND = {"single": IN_ONE_TRANSACTION, "batched": IN_ONE_TRANSACTION, "leased": UNDER_A_LEASE}

ELSEWHERE = {"act:before", "act:after", "replay:before", "replay:after"}
"""Windows of operators' acts, which no worker passes: the tests of those acts kill there."""

RETRY_MODE = {"single": "blocking", "batched": "retry-table", "leased": "retry-table"}
COMBINATIONS = [(kind, on) for kind in BY_KIND for on in ("sqlite", "postgres")]
PARTS = len(COMBINATIONS)


@pytest.fixture
def make_scene(workers, tmp_path, request):
    """Make scenes on either database."""

    def make(kind="single", on="sqlite", **more):
        url = request.getfixturevalue("postgres_url") if on == "postgres" else ""
        return Scene(workers, tmp_path / "scene", kind, database=url, **more)

    return make


def of_all_kinds(kind: str) -> dict[str, object]:
    """Return the settings with which a worker passes every window of its kind."""
    return {"policy": {"retry": {**QUICK_RETRY, "mode": RETRY_MODE[kind]}}}


def send_some(scene: Scene, seed: int) -> None:
    """Send what takes a worker through every window."""
    scene.say("transient", "a", times=1)
    scene.say("poison")
    scene.send_mixed(4, seed)


def test_every_window_is_in_one_of_the_lists():
    named = IN_ONE_TRANSACTION | UNDER_A_LEASE | ELSEWHERE

    assert named == {point.value for point in MESSAGING_POINTS}
    assert set(Trial.KILLS) < IN_ONE_TRANSACTION


@pytest.mark.parametrize("kind", BY_KIND)
def test_a_worker_passes_the_windows_of_its_kind(make_scene, kind):
    scene = make_scene(kind, **of_all_kinds(kind))
    send_some(scene, 1)
    scene.run(crash_at="claim:before")

    assert set(scene.windows()) == BY_KIND[kind]

    scene.assert_as_expected()


@pytest.mark.parametrize(("kind", "on"), COMBINATIONS)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, PARTS))]
)
def test_workers_killed_at_one_window_after_another_lose_and_repeat_nothing(
    make_scene, kind, on, part
):
    """At each window in normal operation, and at another one while the next worker is careful.

    All combinations together go through every window; the others are for the soak.
    """
    scene = make_scene(kind, on, **of_all_kinds(kind))
    chance = random.Random(part)
    mine = (COMBINATIONS.index((kind, on)) + part) % PARTS
    chosen = random.Random(1).sample(sorted(BY_KIND[kind]), len(BY_KIND[kind]))[mine::PARTS]

    kills = 0
    for number, window in enumerate(chosen):
        send_some(scene, number)
        if window == "careful_attempt:after":
            assert scene.run(crash_at="handle:after").was_killed
        ended = scene.run(crash_at=window)
        assert ended.was_killed, f"{window} was not reached:\n{ended.output}"
        kills += 1 + scene.run(crash_at=chance.choice(chosen)).was_killed
        scene.run_until_done()

    result = scene.assert_as_expected()
    print(f"{kills} kills at {len(chosen)} windows, {result.table()}")


@pytest.mark.parametrize("kind", ["lanes", "batch-handler"])
def test_workers_of_the_other_kinds_lose_and_repeat_nothing_either(make_scene, kind):
    scene = make_scene(kind)
    scene.send_mixed(25)

    for window in ("claim:after", "handle:after#2", "message_commit:before", "outcomes:after"):
        assert scene.run(crash_at=window).was_killed
    scene.run_until_done()

    scene.assert_as_expected()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("single", "blocking"),
        ("lanes", "blocking"),
        ("batched", "retry-table"),
        ("leased", "blocking"),
    ],
)
def test_a_message_that_kills_its_process_is_parked_and_the_others_are_handled_once(
    make_scene, kind, mode
):
    retry = {**QUICK_RETRY, "mode": mode, "max_attempts": 4}
    scene = make_scene(kind, policy={"poison_attempts": 2, "retry": retry})
    scene.send_mixed(5)
    scene.say("kill", "a")
    scene.send_mixed(8, 2)

    starts = scene.run_until_done()

    assert starts <= 6
    scene.assert_as_expected()


def test_a_message_that_kills_its_process_when_it_is_retried_is_parked_too(make_scene):
    retry = {**QUICK_RETRY, "mode": "retry-table"}
    scene = make_scene(policy={"poison_attempts": 2, "retry": retry})
    killer = scene.say("transient", times=1, then="kill")
    scene.send_mixed(6)
    scene.expected[killer] = ClaimState.PARKED

    starts = scene.run_until_done()

    assert starts <= 5
    scene.assert_as_expected()


def test_a_message_that_fails_is_not_taken_for_one_that_kills(make_scene):
    """Behind a crash it is tried alone, and fails more often than a killer may kill."""
    retry = {**QUICK_RETRY, "max_attempts": 6}
    scene = make_scene(policy={"poison_attempts": 2, "retry": retry})
    scene.say("transient", times=5)
    assert scene.run(crash_at="claim:before").was_killed

    assert scene.run().code == 0

    scene.assert_as_expected()


def test_two_members_find_out_the_message_that_kills_them_and_go_on(make_scene):
    scene = make_scene(partitions=2, policy={"poison_attempts": 2})
    scene.send_mixed(10)
    scene.say("kill", "b")
    scene.send_mixed(10, 2)

    for _ in range(12):
        both = [scene.start(), scene.start()]
        if [scene.end(worker).code for worker in both] == [0, 0]:
            break

    scene.assert_as_expected()


@pytest.mark.parametrize(
    ("runner", "crash_at", "finding"),
    [
        ("AckFirst", "settle:after", "lost"),
        ("ClaimFirst", "claim:after#3", "missing_effects"),
        ("EffectFirst", "handle:after#3", "doubled_effects"),
    ],
)
def test_a_naive_runner_is_right_in_peace_and_convicted_by_a_kill(
    make_scene, runner, crash_at, finding
):
    scene = make_scene(runner=f"{NAIVE}:{runner}")
    for _ in range(5):
        scene.say()
    assert scene.run().code == 0
    scene.assert_as_expected()

    for _ in range(5):
        scene.say()
    assert scene.run(crash_at=crash_at).was_killed
    scene.run_until_done()

    assert getattr(scene.audit(), finding), scene.audit().table()
