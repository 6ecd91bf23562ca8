"""A service on Kafka that is killed anywhere loses and repeats nothing."""

from __future__ import annotations

import pytest

from semel.kafka.client import GroupProtocol
from semel.testing.trial import Trial
from tests.crash.consumer_scene import QUICK_RETRY
from tests.kafka.kill_scene import KafkaScene, kill_at_random

pytestmark = [
    *(pytest.mark.kafka, pytest.mark.postgres, pytest.mark.kill, pytest.mark.slow),
    pytest.mark.timeout(900),
]

KINDS = {
    # kind: group protocol, where a message waits for its retry, windows that it must pass
    "single": ("classic", "blocking", {*Trial.KILLS}),
    "batched": ("consumer", "retry-table", {*Trial.KILLS, "retry_take:after"}),
    "leased": ("consumer", "retry-table", {"leased_claim:after", "leased_complete:before"}),
}
PARTS = 3 * len(KINDS)
WINDOWS = [
    # kind, which part of the windows, the client of the FastStream broker in front
    *((kind, 0, "") for kind in KINDS),
    *(
        pytest.param(kind, part, behind, marks=pytest.mark.soak)
        for behind, kinds in {"": KINDS, "aiokafka": ["batched"], "confluent": ["leased"]}.items()
        for kind in kinds
        for part in range(0 if behind else 1, PARTS)
    ),
]


def protocol_for(behind: str, protocol: str) -> GroupProtocol:
    """Return the group protocol of a service: aiokafka knows one only."""
    return GroupProtocol.CLASSIC if behind == "aiokafka" else GroupProtocol(protocol)


def send_some(scene: KafkaScene, seed: int) -> None:
    """Send what takes a service through every window."""
    scene.say("transient", "a", times=1)
    scene.say("poison")
    scene.send_mixed(4, seed)


@pytest.mark.parametrize(("kind", "part", "behind"), WINDOWS)
def test_services_killed_at_one_window_after_another_lose_and_repeat_nothing(
    make_scene, kind, part, behind
):
    """Together the kinds go through every third window; each through each one in the soak."""
    protocol, mode, must_pass = KINDS[kind]
    protocol = protocol_for(behind, protocol)
    policy = {"retry": {**QUICK_RETRY, "mode": mode}}
    scene = make_scene(kind, protocol=protocol, policy=policy, behind=behind)
    send_some(scene, 99)
    assert scene.run(crash_at="claim:before").was_killed
    windows = sorted(scene.windows())
    assert must_pass | {"careful_attempt:after", "relay_delete:after"} <= {*windows}
    chosen = windows[(3 * list(KINDS).index(kind) + part) % PARTS :: PARTS]

    for number, window in enumerate(chosen):
        send_some(scene, number)
        if window == "careful_attempt:after":
            assert scene.run(crash_at="handle:after").was_killed
        ended = scene.run(crash_at=window)
        assert ended.was_killed, f"{window} was not reached:\n{ended.output}"
    scene.run_until_done()

    result = scene.assert_as_expected()
    print(f"killed at {len(chosen)} windows, {result.table()}")


RANDOM = [
    # kind, protocol, members, kills, seed, the client of the FastStream broker in front
    ("single", "consumer", 2, 2, 1, ""),
    ("batched", "classic", 4, 2, 2, ""),
    ("batched", "classic", 2, 1, 3, "aiokafka"),
    *(
        pytest.param(kind, protocol, members, 30, seed, behind, marks=pytest.mark.soak)
        for seed, (kind, protocol, members, behind) in enumerate(
            [
                *(("batched", "consumer", 4, ""), ("single", "classic", 2, "")),
                *(("leased", "consumer", 2, ""), ("lanes", "classic", 4, "")),
                *(("lanes", "classic", 4, "aiokafka"), ("batched", "consumer", 2, "confluent")),
            ],
            3,
        )
    ),
]


@pytest.mark.parametrize(("kind", "protocol", "members", "kills", "seed", "behind"), RANDOM)
def test_members_killed_at_random_under_load_lose_and_repeat_nothing(
    make_scene, kind, protocol, members, kills, seed, behind
):
    mode = ["blocking", "retry-table"][seed % 2]
    scene = make_scene(
        kind,
        protocol=GroupProtocol(protocol),
        partitions=4,
        policy={"retry": {**QUICK_RETRY, "mode": mode}},
        behind=behind,
    )

    print(kill_at_random(scene, members, kills, seed))
