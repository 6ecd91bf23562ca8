"""A service and a relay on a broker that fails, and a member that wakes up too late."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict

import pytest

from semel.kafka.broker import KafkaBroker
from semel.kafka.client import GroupProtocol
from semel.messaging.send.relay import Relay
from semel.outboxes import Outbox
from semel.testing.worker import opened
from tests.crash.scripted import MESSAGE_ID

pytestmark = [
    *(pytest.mark.kafka, pytest.mark.postgres, pytest.mark.kill, pytest.mark.slow),
    pytest.mark.timeout(300),
]


def finish(scene, *running):
    """Let services work off the rest and stop, then ask the oracle."""
    for ended in scene.work_off(*running):
        assert ended.code == 0, ended.output
    print(scene.assert_as_expected().table())


@pytest.mark.parametrize(
    ("kind", "protocol", "kills"),
    [
        ("batched", "consumer", 1),
        pytest.param("single", "classic", 3, marks=pytest.mark.soak),
        pytest.param("lanes", "consumer", 3, marks=pytest.mark.soak),
    ],
)
def test_a_broker_that_is_killed_under_load_costs_no_message(
    make_scene, kafka_server, kind, protocol, kills
):
    scene = make_scene(kind, protocol=GroupProtocol(protocol), partitions=4)
    running = [scene.start(), scene.start()]
    for kill in range(kills):
        before = scene.committed()
        scene.send_mixed(80, kill)
        scene.wait_until(lambda before=before: scene.committed() > before)
        scene.send_mixed(20, 100 + kill)

        kafka_server.stop("immediate")
        kafka_server.start()

    finish(scene, *running)


API_KEYS = {"produce": 0, "fetch": 1, "commit": 8}
"""How a request of the protocol begins; then come its version, its number and its client."""


@pytest.mark.parametrize(
    ("request_name", "fault", "protocol"),
    [
        ("fetch", "hold_reply_to", "consumer"),
        pytest.param("fetch", "lose_request", "consumer", marks=pytest.mark.soak),
        pytest.param("fetch", "swallow_reply_to", "classic", marks=pytest.mark.soak),
        pytest.param("commit", "hold_reply_to", "classic", marks=pytest.mark.soak),
        pytest.param("commit", "lose_request", "classic", marks=pytest.mark.soak),
        ("commit", "swallow_reply_to", "consumer"),
        pytest.param("produce", "hold_reply_to", "consumer", marks=pytest.mark.soak),
        ("produce", "lose_request", "classic"),
        pytest.param("produce", "swallow_reply_to", "classic", marks=pytest.mark.soak),
    ],
)
def test_a_request_or_reply_that_is_lost_or_late_costs_no_message(
    make_scene, kafka_server, request_name, fault, protocol
):
    scene = make_scene(
        "batched",
        protocol=GroupProtocol(protocol),
        partitions=2,
        bootstrap=kafka_server.cut_bootstrap,
    )
    begins = rb"\x00%c\x00[\x00-\x20].{4}\x00\x05semel" % API_KEYS[request_name]
    running = [scene.start()]
    for cut in range(2):
        scene.send_mixed(10, cut)
        getattr(kafka_server.proxy, fault)(re.compile(begins, re.DOTALL))
        scene.send_mixed(10, 10 + cut)

        assert kafka_server.proxy.wait_until_swallowed()
        scene.send_mixed(5, 20 + cut)
        kafka_server.proxy.release()

    finish(scene, *running)


@pytest.mark.parametrize(
    ("kind", "where", "protocol"),
    [
        ("batched", "settle:before", "consumer"),
        pytest.param("single", "message_commit:before", "classic", marks=pytest.mark.soak),
        pytest.param("batched", "settle:before", "classic", marks=pytest.mark.soak),
        pytest.param("leased", "leased_complete:before", "consumer", marks=pytest.mark.soak),
        pytest.param("single", "handle:after", "consumer", marks=pytest.mark.soak),
    ],
)
def test_a_member_that_wakes_after_its_partitions_moved_commits_nothing(
    make_scene, kind, where, protocol
):
    scene = make_scene(kind, protocol=GroupProtocol(protocol), partitions=2, relays=False)
    scene.send_mixed(40)
    late = scene.start(stop_at=where)
    before = scene.members()
    other = scene.start()
    scene.wait_until(lambda: not before.keys() & scene.members().keys())
    scene.wait_until(lambda: sum(scene.members().values()) == 2)
    if where.startswith("settle"):
        # All is in the database and committed by the other member: only a late commit of an
        # older offset could still change anything.
        scene.wait_until(scene.is_done)

    late.wake()
    scene.wait_until(lambda: len(scene.members()) == 2)
    if where.startswith("settle"):
        assert scene.is_done(), "the late member committed an older offset"
    scene.send_mixed(20, 2)

    finish(scene, late, other)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 5))]
)
def test_a_relay_whose_broker_is_killed_in_mid_batch_loses_nothing_and_keeps_the_order(
    make_scene, kafka_server, seed
):
    number, keys = 3_000, 7
    scene = make_scene()

    def arrived():
        places = scene.broker.partitions(scene.receipts)
        return sum(scene.broker.bounds(place)[1] for place in places)

    async def relayed():
        publisher = KafkaBroker(kafka_server.bootstrap).publisher()
        async with opened(scene.database) as database:
            async with database.begin() as unit:
                for each in range(number):
                    await Outbox().add(unit.session, scene.receipts, each, key=f"k{each % keys}")
            relay = Relay(database, publisher, batch=50)
            relaying = asyncio.create_task(relay.run_until_empty())
            while await asyncio.to_thread(arrived) < 300 * seed:
                assert not relaying.done()
            await asyncio.to_thread(kafka_server.stop, "immediate")
            assert not relaying.done(), "the relay was too quick to be interrupted"
            await asyncio.to_thread(kafka_server.start)
            async with asyncio.timeout(120):
                await relaying
        await publisher.close()

    asyncio.run(relayed())

    found = defaultdict(dict)
    records = scene.broker.records(scene.receipts)
    for record in records:
        # What came twice has the same id: a reader that remembers ids sees it once.
        found[record.key].setdefault(record.headers[MESSAGE_ID], int(record.value))
    assert {key: list(values.values()) for key, values in found.items()} == {
        f"k{key}".encode(): list(range(key, number, keys)) for key in range(keys)
    }
    print(f"{number} messages, {len(records) - number} of them twice")
