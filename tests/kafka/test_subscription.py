"""What a Kafka subscription does beyond the contract of brokers."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import time
import uuid

import pytest
from confluent_kafka.admin import NewPartitions

from semel.errors import Misuse, NeedsOperator, Permanent, Retryable
from semel.kafka import subscription as module
from semel.kafka.broker import KafkaBroker
from semel.kafka.client import GroupProtocol, kafka
from semel.message import Partition
from semel.messaging.receive.broker import MemberEnded, Outgoing
from semel.testing.services import KafkaServer, free_port

pytestmark = pytest.mark.kafka


@pytest.fixture
def topic(kafka_server):
    name = f"topic-{uuid.uuid4().hex[:8]}"
    kafka_server.create_topic(name)
    return name


async def publish(server, topic, *values):
    publisher = KafkaBroker(server.bootstrap).publisher()
    answers = await publisher.publish([Outgoing(topic, value.encode()) for value in values])
    assert list(answers) == [None] * len(values)
    await publisher.close()


async def take(member, count):
    found = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await member.fetch(count - len(found), 0.5)
    return [record.value.decode() for record in found]


async def assigned(member):
    async with asyncio.timeout(30):
        while not member.assignment:
            assert not await member.fetch(1, 0.05)


def test_a_group_that_starts_at_the_end_reads_what_comes_after_its_first_assignment(
    kafka_server, topic
):
    async def scenario():
        group = f"group-{topic}"
        await publish(kafka_server, topic, "before")
        broker = KafkaBroker(kafka_server.bootstrap, start="end")
        member = await broker.subscribe(group, [topic])
        await assigned(member)
        assert await member.committed(Partition(topic, 0)) == 1
        await member.close()

        await publish(kafka_server, topic, "while it was away")
        member = await broker.subscribe(group, [topic])

        assert await take(member, 1) == ["while it was away"]
        await member.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", GroupProtocol)
def test_a_group_that_starts_at_the_end_misses_nothing_of_a_partition_that_is_added(
    kafka_server, topic, protocol
):
    async def scenario():
        config = {"topic.metadata.refresh.interval.ms": 500}
        broker = KafkaBroker(kafka_server.bootstrap, start="end", protocol=protocol, config=config)
        await publish(kafka_server, topic, "before")
        member = await broker.subscribe(topic, [topic])
        await assigned(member)
        admin = broker._admin()
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(30)
        producer = kafka.Producer({"bootstrap.servers": kafka_server.bootstrap})
        producer.produce(topic, "a", partition=1)
        assert not producer.flush(30)

        assert await take(member, 1) == ["a"]
        await member.close()

    asyncio.run(scenario())


def test_members_that_begin_a_group_together_all_start_at_the_end(kafka_server):
    topic = "begun-together"
    kafka_server.create_topic(topic, 4)

    async def scenario():
        producer = kafka.Producer({"bootstrap.servers": kafka_server.bootstrap})
        for number in range(4):
            producer.produce(topic, "before", partition=number)
        assert not producer.flush(30)
        broker = KafkaBroker(kafka_server.bootstrap, start="end")
        members = [await broker.subscribe(topic, [topic]) for _ in range(3)]
        async with asyncio.timeout(30):
            while not all(member.assignment for member in members):
                for member in members:
                    assert not await member.fetch(10, 0.05)
        assert not any([await member.fetch(10, 0.2) for member in members])
        for member in members:
            await member.close()

    asyncio.run(scenario())


def test_the_start_of_a_new_group_is_known_without_waiting_behind_a_fetch(kafka_server, topic):
    async def scenario():
        await publish(kafka_server, topic, "a")
        slow = {"fetch.wait.max.ms": 5_000}
        member = await KafkaBroker(kafka_server.bootstrap, config=slow).subscribe(topic, [topic])
        await take(member, 1)
        await member.fetch(1, 0.2)  # now a fetch waits at the broker

        async with asyncio.timeout(2):
            assert await member.committed(Partition(topic, 0)) == 0
        await member.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", GroupProtocol)
def test_a_static_member_comes_back_without_a_rebalance_and_keeps_its_partitions_meanwhile(
    kafka_server, protocol
):
    topic = f"static-{protocol}"
    kafka_server.create_topic(topic, 2)
    url = f"kafka://{kafka_server.bootstrap}?protocol={protocol}&instance_id="

    async def join(name):
        member = await KafkaBroker(url + name).subscribe(topic, [topic])
        async with asyncio.timeout(30):
            while len(member.assignment) != 1:
                assert not await other.fetch(1, 0.05)
        return member

    async def scenario():
        nonlocal other
        other = await KafkaBroker(f"{url}b").subscribe(topic, [topic])
        await assigned(other)
        member = await join("a")
        kept, revoked = (member.assignment, other.assignment), []
        other.on_revoked(lambda partitions: revoked.append(partitions))
        await member.close()
        admin = KafkaBroker(url)._admin()
        (group,) = admin.describe_consumer_groups([topic]).values()
        members = {one.group_instance_id for one in group.result(30).members}

        member = await join("a")

        assert members == {"a", "b"}, "the price: a clean stop frees nothing"
        assert (member.assignment, other.assignment) == kept
        assert not revoked
        for one in (member, other):
            await one.close()

    other = None
    asyncio.run(scenario())


def test_a_broker_without_the_group_protocol_consumer_gets_classic():
    async def scenario(server):
        server.create_topic("payments")
        await publish(server, "payments", "a")
        member = await KafkaBroker(server.bootstrap).subscribe("billing", ["payments"])

        assert await take(member, 1) == ["a"]
        await member.commit({Partition("payments", 0): 1})
        await member.close()

    settings = {"group.coordinator.rebalance.protocols": "classic"}
    with KafkaServer(settings=settings).start() as server:
        asyncio.run(scenario(server))


HOLDER = """
import asyncio, sys
from semel.kafka.broker import KafkaBroker

async def hold():
    member = await KafkaBroker(sys.argv[1]).subscribe(sys.argv[2], [sys.argv[2]])
    await member.fetch(1, 30)
    print("holds", flush=True)
    await asyncio.Event().wait()

asyncio.run(hold())
"""


def test_a_static_member_that_was_killed_ends_its_successor_until_its_session_is_over(
    kafka_server, topic
):
    url = f"kafka://{kafka_server.bootstrap}?instance_id=billing-1"

    async def handle():
        """Run a service as a supervisor sees it: until a message came, or it ended by itself."""
        member = await KafkaBroker(url).subscribe(topic, [topic])
        try:
            return await take(member, 1)
        finally:
            await member.close()

    async def scenario():
        await publish(kafka_server, topic, "a")
        command = [sys.executable, "-c", HOLDER, url, topic]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
            assert await asyncio.to_thread(holder.stdout.readline) == b"holds\n"
            holder.kill()

        with pytest.raises(
            MemberEnded, match=r"instance ID is still used.*start the process again"
        ):
            await handle()

        async with asyncio.timeout(30):
            while True:
                try:
                    assert await handle() == ["a"]
                except MemberEnded:
                    continue
                break

    asyncio.run(scenario())


def test_a_topic_that_was_deleted_and_made_again_stops_the_group(kafka_server, topic):
    async def scenario():
        group, broker = f"group-{topic}", KafkaBroker(kafka_server.bootstrap)
        await publish(kafka_server, topic, "a")
        member = await broker.subscribe(group, [topic])
        await take(member, 1)
        await member.commit({Partition(topic, 0): 1})
        (old,) = broker.topic_ids([topic]).values()
        await member.close()
        # Kafka forgets the offsets of a deleted topic; an operator may have put one back.
        client = kafka.Consumer({"bootstrap.servers": broker.bootstrap, "group.id": group})
        place = kafka.TopicPartition(topic, 0, 1, metadata=f"{module.TOPIC_ID}another-id")
        client.commit(offsets=[place], asynchronous=False)
        client.close()
        successor = await broker.subscribe(group, [topic])

        with pytest.raises(
            NeedsOperator, match=re.escape(f"made again (id another-id is now {old}")
        ):
            await take(successor, 1)
        await successor.close()

    asyncio.run(scenario())


def test_a_group_whose_offsets_another_client_has_committed_goes_on_there(kafka_server, topic):
    async def scenario():
        await publish(kafka_server, topic, "a", "b")
        client = kafka.Consumer({"bootstrap.servers": kafka_server.bootstrap, "group.id": topic})
        place = kafka.TopicPartition(topic, 0, 1, metadata="billing-7f9c host=10.0.0.3")
        client.commit(offsets=[place], asynchronous=False)
        client.close()
        member = await KafkaBroker(kafka_server.bootstrap).subscribe(topic, [topic])

        assert await take(member, 1) == ["b"]
        await member.close()

    asyncio.run(scenario())


def test_large_records_are_held_by_their_bytes(kafka_server, topic, monkeypatch):
    monkeypatch.setattr(module, "BUFFERED_BYTES", 2 * 1024**2)

    async def scenario():
        # Of random bytes: what compresses well arrives in one piece.
        values = [random.Random(number).randbytes(100_000).hex() for number in range(100)]
        await publish(kafka_server, topic, *values)
        small = {"queued.max.messages.kbytes": 2 * 1024}
        member = await KafkaBroker(kafka_server.bootstrap, config=small).subscribe(topic, [topic])
        first, held = await take(member, 1), 0
        async with asyncio.timeout(30):
            while not member._paused_there or held != member._buffer[Partition(topic, 0)].size:
                held = member._buffer[Partition(topic, 0)].size
                await asyncio.sleep(0.2)

        assert held < 8 * 1024**2, "20 MB are there"
        assert first + await take(member, 99) == values
        assert not member._buffer
        await member.close()

    asyncio.run(scenario())


def test_marks_of_transactions_are_no_lag(kafka_server, topic):
    settings = {"bootstrap.servers": kafka_server.bootstrap, "transactional.id": topic}
    producer = kafka.Producer(settings)
    producer.list_topics(timeout=30)
    producer.init_transactions(30)

    def transaction(*values):
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value)
        producer.commit_transaction(30)

    async def lag(member):
        place = Partition(topic, 0)
        return await member.end(place) - await member.committed(place)

    async def scenario():
        async def reaches(wanted):
            async with asyncio.timeout(30):
                while await lag(member) != wanted:
                    await member.fetch(0, 0.05)

        broker = KafkaBroker(kafka_server.bootstrap)
        transaction("a", "b")  # offsets 0 and 1; its mark is at 2
        member = await broker.subscribe(topic, [topic])
        assert await take(member, 2) == ["a", "b"]
        await reaches(2)
        await member.commit({Partition(topic, 0): 2})
        assert await lag(member) == 0
        await member.close()

        # A new member begins where nothing is left but the mark.
        member = await broker.subscribe(topic, [topic])
        await reaches(0)
        transaction("c")
        assert await lag(member) > 0
        member.seek(Partition(topic, 0), 0)
        assert await take(member, 3) == ["a", "b", "c"]
        await reaches(2)
        await member.commit({Partition(topic, 0): 4})
        assert await lag(member) == 0
        await member.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("protocol", GroupProtocol)
def test_a_topic_that_is_made_again_under_a_running_member_stops_it(
    kafka_server, topic, protocol, monkeypatch
):
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.5)

    async def scenario():
        broker = KafkaBroker(kafka_server.bootstrap, protocol=protocol)
        await publish(kafka_server, topic, "a", "b")
        member = await broker.subscribe(topic, [topic])
        await take(member, 2)
        await member.commit({Partition(topic, 0): 2})
        admin = broker._admin()
        admin.delete_topics([topic])[topic].result(30)
        while topic in admin.list_topics(timeout=30).topics:
            await asyncio.sleep(0.1)
        kafka_server.create_topic(topic)
        await publish(kafka_server, topic, "c", "d", "e")

        with pytest.raises(NeedsOperator, match="made again"):
            await take(member, 3)
        await member.close()

    asyncio.run(scenario())


def test_an_event_loop_that_does_not_answer_loses_its_partitions(kafka_server, topic, monkeypatch):
    monkeypatch.setattr(module, "LOOP_SECONDS", 2.0)

    async def scenario():
        group = f"group-{topic}"
        await publish(kafka_server, topic, "a")
        quick = {"max.poll.interval.ms": 2_500, "session.timeout.ms": 2_500}
        broker = KafkaBroker(kafka_server.bootstrap, protocol=GroupProtocol.CLASSIC, config=quick)
        hung = await broker.subscribe(group, [topic])
        assert await take(hung, 1) == ["a"]

        # All of this blocks the loop, as a handler does that never awaits.
        admin, until = broker._admin(), time.monotonic() + 40
        while admin.describe_consumer_groups([group])[group].result(30).members:
            assert time.monotonic() < until, "it is still a member"
            time.sleep(0.2)
        await hung.close()

    asyncio.run(scenario())


def test_a_member_with_offsets_to_commit_stops_while_its_broker_is_away(
    kafka_server, topic, monkeypatch
):
    monkeypatch.setattr(module, "CALL_SECONDS", 1.0)

    async def scenario():
        await publish(kafka_server, topic, "a")
        member = await KafkaBroker(kafka_server.cut_bootstrap).subscribe(topic, [topic])
        await take(member, 1)
        kafka_server.proxy.refuse()
        kafka_server.proxy.cut()
        try:
            async with asyncio.timeout(10):
                with pytest.raises(Retryable, match="the broker does not answer"):
                    await member.commit({Partition(topic, 0): 1})
                await member.close()
                await member.close()
        finally:
            kafka_server.proxy.accept()
        # The commit is still on its way, and arrives.
        broker = KafkaBroker(kafka_server.bootstrap)
        await asyncio.to_thread(member._thread.join, 30)
        successor = await broker.subscribe(topic, [topic])
        assert await successor.committed(Partition(topic, 0)) == 1
        await successor.close()

    asyncio.run(scenario())


def test_wrong_settings_and_places_are_named(kafka_server):
    async def scenario():
        with pytest.raises(Permanent, match="has no topic nowhere: create it first"):
            await KafkaBroker(kafka_server.bootstrap).subscribe("g", ["nowhere"])

    asyncio.run(scenario())
    with pytest.raises(Misuse, match=r"enable.auto.commit.*never by a timer"):
        KafkaBroker("x:1", config={"enable.auto.commit": True})
    with pytest.raises(Misuse, match=r"isolation.level.*must not be handled"):
        KafkaBroker("kafka://x:1?isolation.level=read_uncommitted")
    for url, start in (("x:1", "latest"), ("kafka://x:1?start=latest", "end")):
        with pytest.raises(Misuse, match="start must be one of beginning, end, got 'latest'"):
            KafkaBroker(url, start=start)


def test_a_broker_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("semel.kafka.broker.CALL_SECONDS", 1.0)

    async def scenario():
        with pytest.raises(Retryable, match=r"no Kafka broker answers at 127\.0\.0\.1"):
            await KafkaBroker(f"127.0.0.1:{free_port()}").subscribe("g", ["t"])

    asyncio.run(scenario())
