"""A trial of the scripted consumers as services on a real Kafka broker, with one oracle."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from semel.kafka.broker import KafkaBroker
from semel.kafka.client import GroupProtocol, kafka
from semel.kafka.subscription import record_of
from semel.message import Coordinates, Partition, Record
from semel.operate.completeness import Extent, audit_completeness
from semel.testing.kill import EndedProcess, Running, Zygote
from semel.testing.services import KafkaServer
from semel.testing.trial import TrialAudit
from semel.testing.worker import consumer_of, opened
from tests.crash import scripted
from tests.crash.consumer_scene import Scene
from tests.crash.scripted import MESSAGE_ID
from tests.kafka.service_program import READY, Service

SESSION_MS = 1_500
"""After this time, the group takes the partitions of a dead member away."""

CLASSIC = {"session.timeout.ms": SESSION_MS, "heartbeat.interval.ms": 300}


class KafkaTopics:
    """What the oracle asks a broker, of real topics; it uses no code of the subscription."""

    def __init__(self, server: KafkaServer, topics: Mapping[str, int], group: str) -> None:
        self._topics = topics
        for topic, partitions in topics.items():
            server.create_topic(topic, partitions)
        settings = {"bootstrap.servers": server.bootstrap, "log_level": 2}
        self._producer = kafka.Producer({**settings, "enable.idempotence": True, "linger.ms": 0})
        self._client = kafka.Consumer(
            {**settings, "group.id": group, "enable.auto.commit": False, "enable.partition.eof": 1}
        )
        self.store = self
        self.sent: dict[str, tuple[Any, ...]] = {}
        """By id: the last message, as it was put."""

    def put(
        self,
        topic: str,
        value: bytes,
        key: bytes | None,
        headers: Mapping[str, bytes],
        partition: int | None = None,
    ) -> Coordinates:
        """Send a record and wait until it is durable."""
        found: list[Any] = []
        self._producer.produce(
            topic,
            value,
            key,
            -1 if partition is None else partition,
            headers=list(headers.items()),
            on_delivery=lambda *answer: found.append(answer),
        )
        assert self._producer.flush(60) == 0, "the broker did not take a message"
        ((error, sent),) = found
        assert error is None, error
        self.sent[headers[MESSAGE_ID].decode()] = (topic, value, key, headers, sent.partition())
        return Coordinates(sent.topic(), sent.partition(), sent.offset())

    def partitions(self, topic: str) -> list[Partition]:
        return [Partition(topic, number) for number in range(self._topics[topic])]

    def bounds(self, partition: Partition) -> tuple[int, int]:
        place = kafka.TopicPartition(partition.topic, partition.number)
        return self._client.get_watermark_offsets(place, timeout=10)

    def committed(self, group: str) -> dict[Partition, int]:
        places = [
            kafka.TopicPartition(topic, number)
            for topic, partitions in self._topics.items()
            for number in range(partitions)
        ]
        found = self._client.committed(places, timeout=10)
        return {Partition(at.topic, at.partition): at.offset for at in found if at.offset >= 0}

    def records(self, topic: str) -> list[Record]:
        """Read a whole topic."""
        found: list[Record] = []
        open_ends = set(range(self._topics[topic]))
        self._client.assign([kafka.TopicPartition(topic, number, 0) for number in open_ends])
        deadline = time.monotonic() + 60
        while open_ends:
            assert time.monotonic() < deadline, f"{topic} could not be read"
            for message in self._client.consume(500, 0.5):
                if message.error() is None:
                    found.append(record_of(message))
                elif message.error().code() == kafka.KafkaError._PARTITION_EOF:
                    open_ends.discard(message.partition())
        self._client.unassign()
        return found

    def close(self) -> None:
        self._client.close()


class KafkaScene(Scene):
    """Services of one group, killed and started again until a topic is worked off."""

    def __init__(
        self,
        services: Zygote,
        folder: Path,
        server: KafkaServer,
        database: str,
        kind: str = "single",
        *,
        protocol: GroupProtocol = GroupProtocol.CONSUMER,
        partitions: int = 1,
        bootstrap: str = "",
        config: Mapping[str, Any] | None = None,
        policy: dict[str, Any] | None = None,
        behind: str = "",
        **more: Any,
    ) -> None:
        super().__init__(services, folder, kind, database=database, policy=policy, **more)
        self.server = server
        self.topic = f"kills-{uuid.uuid4().hex[:8]}"
        self.receipts = f"{self.topic}-receipts"
        self._admin = kafka.admin.AdminClient(
            {"bootstrap.servers": server.bootstrap, "log_level": 2}
        )
        self.broker = KafkaTopics(server, {self.topic: partitions, self.receipts: 2}, self.topic)
        settings = {**(CLASSIC if protocol is GroupProtocol.CLASSIC else {}), **(config or {})}
        on_kafka = {
            "broker": f"kafka://{bootstrap or server.bootstrap}?{urlencode(settings)}",
            "topics": (self.topic,),
            "group": self.topic,
            "protocol": protocol,
            "receipts": self.receipts,
            "behind": behind,
        }
        self.worker = Service(**{**asdict(self.worker), **on_kafka})
        self._started: list[Running] = []
        if protocol is GroupProtocol.CONSUMER:
            shorten_sessions(self._admin, self.topic)

    def start(self, **given: Any) -> Running:
        """Start a service, which kills or stops itself at a window, if one is named."""
        self._started.append(super().start(**given))
        return self._started[-1]

    def close(self) -> None:
        """End what a failed test has left running."""
        for one in self._started:
            if not one.ends_within(0.0):
                one.kill()
        self.broker.close()

    def has_ended(self, pid: int) -> None:
        """The broker itself notices a member's end."""

    def put_again(self, id: str) -> None:
        """Send a message a second time, as a producer does that missed the answer."""
        if id in self.broker.sent:  # unreadable records are counted, too, and have no such id
            self.broker.put(*self.broker.sent[id])

    def committed(self) -> int:
        """Return how many records are committed, of all partitions together."""
        for _ in range(5):
            # A broker that has just started does not know its groups for a moment.
            with suppress(kafka.KafkaException):
                return sum(self.broker.committed(self.topic).values())
        raise AssertionError("the broker does not tell the committed offsets")

    def members(self) -> dict[str, int]:
        """Return the number of partitions of each member of the group."""
        (asked,) = self._admin.describe_consumer_groups([self.topic]).values()
        found = asked.result(30).members
        return {one.member_id: len(one.assignment.topic_partitions) for one in found}

    def wait_until(self, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.last_words
            time.sleep(0.02)

    def is_done(self) -> bool:
        """Whether all is handled, retried and sent."""
        try:
            committed = self.broker.committed(self.topic)
            places = self.broker.partitions(self.topic)
            at_end = all(committed.get(p, 0) >= self.broker.bounds(p)[1] for p in places)
        except kafka.KafkaException:
            return False  # the broker is away
        return at_end and asyncio.run(self._is_empty())

    async def _is_empty(self) -> bool:
        async with opened(self.database) as database, database.begin() as unit:
            waits = await unit.waiting.seconds_to_next(scripted.NAME)
            numbers = await unit.outbox.numbers("outbox")
        return waits is None and not (self.worker.relays and numbers.pending)

    def work_off(self, *running: Running, seconds: float = 120.0) -> list[EndedProcess]:
        """Wait until all is done, or one of these has ended; then let all of them stop."""
        deadline = time.monotonic() + seconds
        while not any(one.ends_within(0.05) for one in running):
            if all(READY in one.output for one in running) and self.is_done():
                break
            if time.monotonic() > deadline:
                said = "\n".join(one.output[-2000:] for one in running)
                for one in running:
                    one.kill()
                raise AssertionError(f"not done after {seconds} s:\n{said}")
        for one in running:
            if not one.ends_within(0.0):
                os.kill(one.pid, signal.SIGTERM)
        return [self.end(one) for one in running]

    def run(self, *, crash_at: str = "", seconds: float = 120.0, **changes: Any) -> EndedProcess:
        """Run a service until it has killed itself, or all is done."""
        (ended,) = self.work_off(self.start(crash_at=crash_at, **changes), seconds=seconds)
        return ended

    def assert_as_expected(self) -> TrialAudit:
        """Fail unless offsets, rows, claims, dead letters and outgoing messages agree exactly.

        And unless the completeness audit finds every offset.
        """
        result = super().assert_as_expected()
        for audit in asyncio.run(self._completeness()):
            assert audit.is_complete, audit
        return result

    async def _completeness(self) -> list[Any]:
        ends = {p: self.broker.bounds(p)[1] for p in self.broker.partitions(self.topic)}
        extents = {p: Extent(committed=end, end=end) for p, end in ends.items()}
        reader = KafkaBroker(self.server.bootstrap).reader()
        async with opened(self.database) as database:
            return await audit_completeness(
                database, consumer_of(self.worker).name, extents, reader
            )


def shorten_sessions(client: Any, group: str) -> None:
    """The broker decides how long a session of the new protocol lasts, group by group."""
    admin = kafka.admin
    entry = admin.ConfigEntry(
        "consumer.session.timeout.ms",
        str(SESSION_MS),
        incremental_operation=admin.AlterConfigOpType.SET,
    )
    place = admin.ConfigResource(admin.ResourceType.GROUP, group, incremental_configs=[entry])
    for answer in client.incremental_alter_configs([place]).values():
        answer.result(30)


def kill_at_random(scene: KafkaScene, size: int, kills: int, seed: int) -> str:
    """Kill members under load, let some leave and others join; return the figures."""
    chance, killed, left, begun = random.Random(seed), 0, 0, time.monotonic()
    running: list[Running] = []
    try:
        while killed < kills:
            while len(running) < size:
                running.append(scene.start())
            victim = chance.choice(running)
            until = time.monotonic() + chance.uniform(0.1, 1.5)
            while time.monotonic() < until and not victim.ends_within(0.05):
                scene.send_mixed(3, chance.randrange(1_000_000))
            if READY in victim.output and chance.random() < 0.2:
                os.kill(victim.pid, signal.SIGTERM)
            else:
                victim.kill()
            running.remove(victim)
            ended = scene.end(victim)
            assert ended.code in (0, -signal.SIGKILL), ended.output
            killed += ended.was_killed
            left += not ended.was_killed
        while len(running) < size:
            running.append(scene.start())
        for ended in scene.work_off(*running):
            assert ended.code == 0, ended.output
    finally:
        for one in running:
            one.kill()
    result = scene.assert_as_expected()
    seconds = time.monotonic() - begun
    return f"{killed} kills and {left} stops of {size} members in {seconds:.0f} s: {result.table()}"
