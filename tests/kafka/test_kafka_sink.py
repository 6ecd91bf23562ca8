"""The Kafka sink on a real broker: the contract, crashes at every window, what prepare finds."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import time
import uuid
from collections import Counter
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from semel.errors import Misuse, Permanent, Retryable
from semel.kafka.sink import KafkaSink
from semel.pipeline.sink import Found, SinkFatal, SinkOK
from semel.pipeline.txn import CycleId, Scope
from semel.testing import SinkContract
from semel.testing.chaos import world_of
from semel.testing.explore import explore_crashes
from semel.testing.plugin import start_or_skip
from semel.testing.services import KafkaServer
from tests.kafka.committed import wait_for_commits

pytestmark = pytest.mark.kafka

SCHEMA = pa.schema([("key", pa.string()), ("value", pa.string())])


def read(server, topic, isolation="read_committed"):
    """Return all records of a topic that such a reader sees now."""
    wait_for_commits(server.bootstrap, topic)
    consumer = Consumer(
        {
            "bootstrap.servers": server.bootstrap,
            "group.id": "reader",
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 5,
            "enable.auto.commit": False,
        }
    )
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
    left, found = set(partitions), []
    while left:
        record = consumer.poll(10)
        assert record is not None, "no broker answers"
        if record.error() is None:
            found.append(record)
        else:
            left.discard(record.partition())
    consumer.close()
    return found


class TestKafkaSink(SinkContract):
    slots = 1
    secrets = ("can4ry",)

    @pytest.fixture(autouse=True)
    def topic_and_place(self, kafka_server, tmp_path):
        self.server, self.path = kafka_server, tmp_path / "staging"
        self.topic = f"sink-{uuid.uuid4().hex[:8]}"
        kafka_server.create_topic(self.topic)
        self.made = []
        yield
        for sink in self.made:
            sink.close()

    def make_sink(self):
        sink = KafkaSink(
            self.server.bootstrap,
            self.topic,
            staging=str(self.path),
            slots=self.slots,
            # All tests have the same scope, by which a broker finds the markers.
            name=self.topic,
            config={"sasl.password": self.secrets[0]},
        )
        self.made.append(sink)
        return sink

    def schema(self):
        return SCHEMA

    def make_batch(self, ids):
        rows = [{"key": str(i), "value": f"row {i}"} for i in ids]
        return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)

    def visible_rows(self, sink):
        for record in read(self.server, self.topic):
            yield {"id": int(record.key()), "text": record.value().decode()}

    def leavings(self, sink):
        return [*self.path.glob("*/semel-*/prepared/*"), *self.path.glob("*/semel-*/from=*/*/*")]

    def lose(self, sink, txn):
        shutil.rmtree(sink._area.folder(txn))


@pytest.mark.soak
class TestKafkaSinkWithSlots(TestKafkaSink):
    slots = 3


@pytest.fixture
def topic(kafka_server):
    name = f"sink-{uuid.uuid4().hex[:8]}"
    kafka_server.create_topic(name, 2)
    return name


SCOPE = Scope("ledger", "app", "main")


def txn_of(batch=0):
    return CycleId(SCOPE, 1, batch).attempt()


def staged(sink, txn, *rows, schema=None):
    writer = sink.stager(txn).open(f"task-{uuid.uuid4().hex[:8]}")
    writer.write(pa.RecordBatch.from_pylist(list(rows), schema=schema))
    return writer.finish()


def sent(sink, *rows, schema=None, batch=0):
    txn = txn_of(batch)
    outcome = sink.prepare(txn, [staged(sink, txn, *rows, schema=schema)])
    assert isinstance(outcome, SinkOK), outcome
    assert sink.commit(txn, outcome.token) == SinkOK()


@pytest.mark.parametrize("every", [22, pytest.param(1, marks=pytest.mark.soak)])
def test_a_crash_at_any_window_loses_and_doubles_nothing(kafka_server, tmp_path, every):
    topics, runs = {}, count(1)

    def make_sink(place):
        if place not in topics:
            topics[place] = f"crash-{next(runs)}-{uuid.uuid4().hex[:8]}"
            kafka_server.create_topic(topics[place])
        sink = KafkaSink(
            kafka_server.bootstrap,
            topics[place],
            staging=str(tmp_path / place),
            slots=2,
            name=topics[place],
        )
        sink.seen = topics[place]
        return sink

    def visible_rows(sink):
        records = read(kafka_server, sink.seen)
        return [{"key": r.key().decode(), "value": r.value().decode()} for r in records]

    world = world_of(
        make_sink,
        visible_rows,
        rows=[[{"key": f"k{b}{n}", "value": f"v{n}"} for n in range(4)] for b in range(3)],
        as_batch=lambda rows: pa.RecordBatch.from_pylist(list(rows), schema=SCHEMA),
        left_behind=lambda sink: list(tmp_path.glob(f"*/{sink.name}/semel-*/from=*/*/*")),
    )

    assert explore_crashes(world, depth=1, every=every).histories > 5


def test_a_record_arrives_as_sparks_own_writer_would_send_it(kafka_server, topic, tmp_path):
    sink = KafkaSink(kafka_server.bootstrap, staging=str(tmp_path), name=topic)
    sink.fence(Scope("ledger", "app", "main"), 1)
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    schema = pa.schema(
        [
            ("topic", pa.string()),
            ("partition", pa.int32()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", headers),
        ]
    )
    given = [{"key": "h", "value": b"\xff"}, {"key": "h", "value": None}]
    named = {"topic": topic, "partition": 1, "key": b"\xfe", "value": b"v", "headers": given}
    bare = {"topic": topic, "partition": None, "key": b"key", "value": None, "headers": None}

    sent(sink, named, bare, schema=schema)

    found = {record.key(): record for record in read(kafka_server, topic)}
    assert found[b"\xfe"].partition() == 1
    assert found[b"\xfe"].headers() == [("h", b"\xff"), ("h", None)]
    # A Java client's murmur2 of these bytes, in two partitions.
    assert (found[b"key"].partition(), found[b"key"].value()) == (murmur2(b"key") % 2, None)
    sink.close()


def murmur2(data):
    """Kafka's own hash of a key, as its Java client documents it."""
    mask, m, h = 0xFFFFFFFF, 0x5BD1E995, 0x9747B28C ^ len(data)
    for at in range(0, len(data) // 4 * 4, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        h = (h * m & mask) ^ ((k ^ k >> 24) * m & mask)
    rest = data[len(data) // 4 * 4 :]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return (h ^ h >> 15) & 0x7FFFFFFF


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"key": "k7", "value": "x" * 1_100_000},
            "a record of 1100130 bytes, because of column value of the record with key 'k7': "
            "max.message.bytes is 1048588",
        ),
        (
            {"key": "k" * 1_100_000, "value": "x"},
            f"because of column key of the record with key '{'k' * 60}': max.message.bytes",
        ),
        ({"value": "x" * 1_100_000}, "because of column value of a record without a key"),
        (
            {"key": "k7", "value": "x", "partition": 7},
            "has no partition 7, which column partition of the record with key 'k7' names",
        ),
        ({"value": "x", "topic": "no-such-topic"}, "topic no-such-topic does not exist"),
    ],
)
def test_what_kafka_would_refuse_is_found_in_prepare(kafka_server, topic, tmp_path, row, words):
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic)
    sink.fence(Scope("ledger", "app", "main"), 1)
    txn = txn_of()
    harmless = {"key": "k1", "value": "y"}

    receipts = [staged(sink, txn, row, harmless), staged(sink, txn, harmless)]
    outcome = sink.prepare(txn, receipts)

    assert isinstance(outcome, SinkFatal)
    assert words in outcome.reason
    sink.close()


def topic_with(server, **settings):
    name = f"sink-{uuid.uuid4().hex[:8]}"
    config = {key.replace("_", "."): value for key, value in settings.items()}
    admin = AdminClient({"bootstrap.servers": server.bootstrap})
    admin.create_topics([NewTopic(name, 1, 1, config=config)])[name].result(30)
    return name


def test_a_record_between_the_limits_of_client_and_topic_is_sent(kafka_server, topic, tmp_path):
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic)
    sink.fence(SCOPE, 1)

    # The client's own limit is 1000000 bytes, that of a topic 1048588.
    sent(sink, {"value": os.urandom(1_048_588 - 128)})

    assert len(read(kafka_server, topic)) == 1
    sink.close()


def test_a_topic_of_large_records_takes_them_as_far_as_the_client_may_send_them(
    kafka_server, tmp_path
):
    topic = topic_with(kafka_server, max_message_bytes="30000000")

    def made(**config):
        sink = KafkaSink(
            kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic, config=config
        )
        sink.fence(SCOPE, 1)
        return sink

    row = {"key": "big", "value": os.urandom(20_000_000)}
    limited = made(**{"message.max.bytes": "15000000"})
    txn = txn_of()

    outcome = limited.prepare(txn, [staged(limited, txn, row)])
    sink = made()
    sent(sink, row)

    assert "the client's message.max.bytes is 15000000" in outcome.reason
    assert [len(record.value()) for record in read(kafka_server, topic)] == [20_000_000]
    limited.close()
    sink.close()


def test_many_records_reach_a_topic_that_takes_few_at_once(kafka_server, topic, tmp_path):
    small = topic_with(kafka_server, max_message_bytes="20000")
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic, slots=1)
    sink.fence(SCOPE, 1)
    rows = [{"topic": topic, "value": os.urandom(5_000)} for _ in range(100)]

    sent(sink, *rows)
    sent(sink, *rows, *({**row, "topic": small} for row in rows), batch=1)

    assert (len(read(kafka_server, topic)), len(read(kafka_server, small))) == (200, 100)
    sink.close()


@pytest.mark.parametrize("partition", [-1, -5])
def test_a_partition_below_0_is_refused_by_the_task(kafka_server, topic, tmp_path, partition):
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic)
    sink.fence(SCOPE, 1)
    rows = [
        {"key": "a", "value": "x", "partition": None},
        {"key": "b", "value": "x", "partition": partition},
    ]

    with pytest.raises(Permanent, match=f"the record with key 'b' has {partition} in column part"):
        staged(sink, txn_of(), *rows)


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_a_compacted_topic_takes_no_record_without_a_key(kafka_server, tmp_path, policy):
    topic = topic_with(kafka_server, cleanup_policy=policy)
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic)
    sink.fence(SCOPE, 1)
    txn = txn_of()
    keyed, bare = {"key": "", "value": "x"}, {"key": None, "value": "x"}

    receipts = [staged(sink, txn, keyed, bare, schema=SCHEMA) for _ in range(2)]
    outcome = sink.prepare(txn, receipts)
    with pytest.raises(Permanent, match="is compacted and takes no record without a key"):
        sink.check(pa.schema([("value", pa.string())]))
    sink.check(SCHEMA)
    sent(sink, keyed, schema=SCHEMA)

    assert isinstance(outcome, SinkFatal)
    assert f"topic {topic} is compacted" in outcome.reason
    assert "2 have a null in column key" in outcome.reason
    assert [record.key() for record in read(kafka_server, topic)] == [b""]
    sink.close()


@pytest.fixture
def forbid(kafka_server):
    """Take the right to write away from everybody, until the test ends."""
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap})
    made = []

    def forbid(kind, name):
        who = (ResourcePatternType.LITERAL, "User:ANONYMOUS", "*")
        allow = AclBinding(kind, name, *who, AclOperation.ALL, AclPermissionType.ALLOW)
        deny = AclBinding(kind, name, *who, AclOperation.WRITE, AclPermissionType.DENY)
        for answer in admin.create_acls([allow, deny]).values():
            answer.result(30)
        made.extend([allow, deny])

    yield forbid
    for answer in admin.delete_acls([filter_of(one) for one in made]).values():
        answer.result(30)


def filter_of(one):
    return AclBindingFilter(
        one.restype, one.name, one.resource_pattern_type, None, None, one.operation,
        one.permission_type,
    )  # fmt: skip


# Another listener with a login, for which everything is forbidden that is not allowed.
GUARDED = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CUT:SASL_PLAINTEXT,CONTROLLER:PLAINTEXT",
    "listener.name.cut.sasl.enabled.mechanisms": "PLAIN",
    "listener.name.cut.plain.sasl.jaas.config": (
        "org.apache.kafka.common.security.plain.PlainLoginModule required user_shop='secret';"
    ),
}
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "sinks" / "kafka.md"
RIGHT = re.compile(r"^\| (topic|group|transactional id) \| (.*?) \| (`.*?`) \|", re.M)


def rights_of_the_page(topic):
    """List the rights that the page names, each by itself."""
    for kind, name, operations in RIGHT.findall(PAGE.read_text()):
        words = re.findall("`(.*?)`", name)
        pattern = ResourcePatternType.PREFIXED if "prefix" in name else ResourcePatternType.LITERAL
        for operation in re.findall("`(.*?)`", operations):
            yield AclBinding(
                ResourceType[kind.upper().replace(" ", "_")],
                words[0] if words else topic,
                pattern,
                "User:shop",
                "*",
                AclOperation[operation],
                AclPermissionType.ALLOW,
            )


@pytest.mark.slow
def test_the_rights_that_the_page_names_are_enough_and_none_is_too_many(tmp_path):
    topic = "guarded"
    with start_or_skip(KafkaServer(settings=GUARDED).start) as server:
        server.create_topic(topic)
        admin = AdminClient({"bootstrap.servers": server.bootstrap})
        bootstrap = f"kafka://shop:secret@{server.cut_bootstrap}?security.protocol=SASL_PLAINTEXT"

        def refusal():
            """Send a record as a new sink, and return why it is refused."""
            name = uuid.uuid4().hex[:8]
            sink = KafkaSink(bootstrap, topic, staging=str(tmp_path), name=name, slots=1)
            txn = txn_of()
            try:
                sink.check(SCHEMA)
                sink.tenants()
                sink.fence(SCOPE, 1)
                outcome = sink.prepare(txn, [staged(sink, txn, {"value": name})])
            except (Permanent, Retryable) as error:
                return str(error)
            else:
                if isinstance(outcome, SinkOK):
                    outcome = sink.commit(txn, outcome.token)
                return getattr(outcome, "reason", "")
            finally:
                sink.close()

        def until(is_refused):
            # A broker learns of a right a moment after it has confirmed it.
            deadline = time.monotonic() + 60
            while bool(found := refusal()) != is_refused:
                assert time.monotonic() < deadline, found or "it was not refused"
            return found

        rights = list(rights_of_the_page(topic))
        assert len(rights) == 8
        for answer in admin.create_acls(rights).values():
            answer.result(30)
        until(False)
        for right in rights:
            for answer in admin.delete_acls([filter_of(right)]).values():
                answer.result(30)
            reason = until(True)
            assert any(word in reason for word in ("uthoriz", "right", "DESCRIBE_CONFIGS")), reason
            admin.create_acls([right])[right].result(30)
            until(False)


@pytest.mark.parametrize("what", ["topic", "markers", "transactional id"])
def test_a_missing_right_is_found_before_the_decision(kafka_server, topic, tmp_path, forbid, what):
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic)
    scope = Scope("ledger", "app", "main")
    sink.fence(scope, 1)
    txn, slug = txn_of(), scope.slug
    receipts = [staged(sink, txn, {"value": "x"})]
    kind = ResourceType.TRANSACTIONAL_ID if what == "transactional id" else ResourceType.TOPIC
    forbid(
        kind,
        {
            "topic": topic,
            "markers": f"semel-markers-{slug}-{topic}",
            "transactional id": f"semel-{slug}-{topic}-0",
        }[what],
    )

    outcome = sink.prepare(txn, receipts)

    assert isinstance(outcome, SinkFatal)
    assert ("may not be written by this login" in outcome.reason) == (what != "transactional id")
    assert "uthoriz" in outcome.reason or "may not" in outcome.reason
    sink.close()


def test_a_task_on_a_machine_with_another_folder_is_stopped_before_it_writes(
    kafka_server, topic, tmp_path
):
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path / "here"), name=topic)
    sink.fence(Scope("ledger", "app", "main"), 1)
    stager = pickle.loads(pickle.dumps(sink.stager(txn_of())))
    (tmp_path / "here").rename(tmp_path / "elsewhere")

    with pytest.raises(Permanent, match="is not shared by the driver and the executors"):
        stager.open("task")
    sink.close()


def test_wrong_rows_and_settings_are_refused_before_the_first_batch(kafka_server, topic, tmp_path):
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic)

    with pytest.raises(Permanent, match="not amount"):
        sink.check(pa.schema([("value", pa.string()), ("amount", pa.int64())]))
    with pytest.raises(Permanent, match="no column value"):
        sink.check(pa.schema([("key", pa.string())]))
    with pytest.raises(Permanent, match="text or bytes"):
        sink.check(pa.schema([("value", pa.list_(pa.int64()))]))
    with pytest.raises(Permanent, match="does not exist"):
        KafkaSink(kafka_server.bootstrap, "none", staging=str(tmp_path), name=topic).check(None)
    with pytest.raises(Misuse, match=r"s3://bucket/prefix.*; got 'nothing://"):
        KafkaSink(kafka_server.bootstrap, topic, staging="nothing://user:secret@here")


def test_a_start_without_transactions_or_a_staging_place_is_refused(
    kafka_server, topic, tmp_path, forbid
):
    def made(staging="staging", **more):
        where = str(tmp_path / staging)
        return KafkaSink(kafka_server.bootstrap, topic, staging=where, name=topic, **more)

    (tmp_path / "file").touch()

    made().check(SCHEMA)
    with pytest.raises(Retryable, match="file/staging does not answer"):
        made("file/staging").check(SCHEMA)
    with pytest.raises(Permanent, match=r"timeout is larger than the maximum"):
        made(transaction_seconds=100_000).check(SCHEMA)
    forbid(ResourceType.TRANSACTIONAL_ID, f"semel-probe-{topic}")
    with pytest.raises(Permanent, match="Transactional Id authorization failed"):
        made().check(SCHEMA)


def test_slots_share_a_batch_and_more_of_them_can_be_added(kafka_server, topic, tmp_path):
    def send(slots, batch):
        sink = KafkaSink(
            kafka_server.bootstrap, topic, staging=str(tmp_path), slots=slots, name=topic
        )
        sink.fence(Scope("ledger", "app", "main"), batch + 1)
        txn = txn_of(batch)
        receipts = [staged(sink, txn, {"key": f"{batch}-{n}", "value": ""}) for n in range(5)]
        token = sink.prepare(txn, receipts).token
        assert sink.commit(txn, token) == SinkOK()
        assert sink.mark(txn.scope) == txn
        sink.close()

    send(1, 0)
    send(4, 1)

    keys = Counter(record.key().decode() for record in read(kafka_server, topic))
    assert keys == Counter(f"{batch}-{n}" for batch in (0, 1) for n in range(5))


def test_the_proofs_of_old_cycles_go_and_their_mark_stays(kafka_server, topic, tmp_path):
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), slots=1, name=topic)
    sink.fence(Scope("ledger", "app", "main"), 1)

    for batch in range(40):
        sent(sink, {"key": str(batch), "value": ""}, batch=batch)

    other = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), slots=1, name=topic)
    other.fence(Scope("ledger", "app", "main"), 2)
    assert other.mark(Scope("ledger", "app", "main")).cycle.batch == 39
    late = txn_of(3)
    assert isinstance(other.prepare(late, []), SinkFatal)
    sink.close()
    other.close()


def test_shards_may_wait_in_an_object_store(kafka_server, topic, seaweedfs):
    login = f"{seaweedfs.access_key}:{seaweedfs.secret_key}"
    where = f"endpoint_override=127.0.0.1:{seaweedfs.port}&scheme=http&region={seaweedfs.region}"
    staging = f"s3://{login}@{seaweedfs.bucket}/{topic}?{where}"
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=staging, name=topic)
    sink.fence(Scope("ledger", "app", "main"), 1)
    txn, loser = txn_of(), txn_of()
    staged(sink, loser, {"value": "lost"})
    outcome = sink.prepare(txn, [staged(sink, txn, {"value": "once"})])
    held = pickle.loads(pickle.dumps(sink)).look_up(txn, outcome.token)

    assert (held.found, sink.commit(txn, outcome.token)) == (Found.HELD, SinkOK())
    assert sink.sweep(txn.scope, lambda found: found == loser) == [loser]
    assert [record.value() for record in read(kafka_server, topic)] == [b"once"]
    assert sink.recover(txn.scope) == []
    assert seaweedfs.secret_key not in repr((sink, outcome, held, sink._area, sink.guarantee()))
    sink.close()


def test_a_topic_tells_who_has_sent_to_it_and_strange_markers_are_passed_over(
    kafka_server, topic, tmp_path
):
    about = ["ledger", "An app", "main", "kafka", f"topic {topic}"]
    strange = (b"no json", b"[]", json.dumps({"about": about, "proofs": [["g1.b0", "a", "d"]]}))
    producer = Producer({"bootstrap.servers": kafka_server.bootstrap})
    for number, value in enumerate(strange):
        name = f"semel-markers-{topic}-{number}"
        kafka_server.create_topic(name)
        producer.produce(name, value)
    producer.flush()
    sink = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name=topic)
    sink.fence(SCOPE, 1)
    assert sink.tenants() == []

    sent(sink, {"value": "one"})

    found = KafkaSink(kafka_server.bootstrap, topic, staging=str(tmp_path), name="other").tenants()
    assert [(tenant.scope, tenant.sink) for tenant in found] == [(SCOPE, topic)]
    elsewhere = KafkaSink(kafka_server.bootstrap, staging=str(tmp_path), name="other")
    assert topic not in {tenant.sink for tenant in elsewhere.tenants()}
    assert elsewhere.find_place() != sink.find_place()
    sink.close()
