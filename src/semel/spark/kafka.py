"""The Kafka sources of a query, asked through the client of Spark's own connector.

ids        a topic that is deleted and created again under its name has another id
start      ``startingOffsets`` that go on where the ledger ends
publish    the committed positions, as the offsets of a consumer group
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from semel.errors import Misuse, NeedsOperator, Retryable, reason_of
from semel.events import log
from semel.pipeline.source import BatchRange, Positions, SourceKind, SourceRange

ASK_MILLISECONDS: Final = 10_000
PUBLISH_MILLISECONDS: Final = 3_000
"""A cycle does not wait longer for a group's offsets, which only dashboards read."""

SERVERS: Final = "kafka.bootstrap.servers"
EARLIEST: Final = -2
"""Spark's number for a partition's beginning."""


class TopicIdsUnknown(Retryable):
    """A Kafka cluster did not return the ids of its topics."""

    def __init__(self, servers: str, reason: str) -> None:
        super().__init__(servers, reason)
        self.servers = servers
        self.reason = reason

    def __str__(self) -> str:
        return f"Kafka at {self.servers} did not return its topics' ids: {self.reason}"


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as its cluster describes it."""

    id: str
    partitions: tuple[int, ...]


class KafkaSources:
    """The Kafka sources of a query.

    If a topic is deleted and created again under its name, a query continues silently: the
    offsets fit, but the records are others.  Only the topic's id shows it.
    """

    def __init__(self, spark: Any, source_options: Sequence[Mapping[str, str]]) -> None:
        self._spark = spark
        by_place = [_lowered(options) for options in source_options]
        self._servers = [options.get(SERVERS, "") for options in by_place]
        self._options = {options[SERVERS]: options for options in by_place if SERVERS in options}
        self._clusters: dict[str, KafkaCluster] = {}

    def __bool__(self) -> bool:
        return self._spark is not None and bool(self._options)

    def added_to(self, batch: BatchRange) -> BatchRange:
        """Return *batch* with the ids of its topics, if the cluster has ids.

        Raises:
            TopicIdsUnknown: without its id, a recreated topic would be read silently.
        """
        return BatchRange(tuple(self._added(source) for source in batch.sources))

    def _added(self, source: SourceRange) -> SourceRange:
        if source.kind is not SourceKind.OFFSETS or not self:
            return source
        topics = sorted({partition.rpartition("/")[0] for partition in source.spans})
        ids: dict[str, str] = {}
        servers = self._clusters_of(int(source.source))
        for server in servers:
            wanted = [topic for topic in topics if topic not in ids]
            try:
                ids |= self._ask(server, wanted) if wanted else {}
            except Exception as error:  # Py4J raises the JVM's exceptions
                raise TopicIdsUnknown(server, reason_of(error)) from error
        if unknown := [topic for topic in topics if topic not in ids]:
            raise TopicIdsUnknown(", ".join(servers), f"there is no topic {unknown[0]}")
        return replace(source, topic_ids=ids)

    def _clusters_of(self, place: int) -> list[str]:
        """Return the clusters, the source's own first: another may have the same topic."""
        own = self._servers[place] if place < len(self._servers) else ""
        others = [server for server in sorted(self._options) if server != own]
        return [own, *others] if own else others

    def _ask(self, server: str, topics: Sequence[str]) -> dict[str, str]:
        """Return the ids of those of *topics* that the cluster has."""
        return {name: topic.id for name, topic in self._cluster(server).describe(topics).items()}

    def _cluster(self, server: str) -> KafkaCluster:
        if server not in self._clusters:
            self._clusters[server] = KafkaCluster(self._spark, self._options[server])
        return self._clusters[server]

    def ends(self, batch: BatchRange) -> dict[str, int]:
        """Return where the partitions of *batch* end now; without those of clusters that are mute.

        It is for metrics only, so a failure is only logged.
        """
        found: dict[str, int] = {}
        for source in batch.sources:
            if source.kind is not SourceKind.OFFSETS or not self:
                continue
            server = self._clusters_of(int(source.source))[0]
            try:
                found |= self._cluster(server).ends([*source.spans])
            except Exception as error:  # noqa: BLE001  a committed cycle cannot fail because of it
                log.warning("lag not measured", extra={"reason": reason_of(error)})
        return found

    def publish(self, group: str, batch: BatchRange) -> None:
        """Make the ends of *batch* the offsets of a consumer group, for tools that show lag.

        Nothing reads them to decide anything, so a failure is only logged: the next cycle
        publishes again.
        """
        for source in batch.sources:
            if source.kind is not SourceKind.OFFSETS or not self:
                continue
            server = self._clusters_of(int(source.source))[0]
            ends = {partition: span.end for partition, span in source.spans.items()}
            try:
                self._cluster(server).publish(group, ends)
            except Exception as error:  # noqa: BLE001  a committed cycle cannot fail because of it
                about = {"group": group, "reason": reason_of(error)}
                log.warning("offsets of the consumer group not published", extra=about)


class KafkaCluster:
    """One cluster, as the options of a source name it."""

    def __init__(self, spark: Any, options: Mapping[str, str]) -> None:
        self._jvm = spark._jvm
        self._gateway = spark.sparkContext._gateway
        self._options = options
        self._admin: Any = None

    def describe(self, topics: Sequence[str]) -> dict[str, Topic]:
        """Describe those of *topics* that the cluster has."""
        names = self._jvm.java.util.ArrayList()
        for topic in topics:
            names.add(topic)
        answers = self._client().describeTopics(names).topicNameValues()
        found = {}
        for topic in topics:
            try:
                described = answers.get(topic).get(ASK_MILLISECONDS, self._milliseconds)
            except Exception as error:
                if not _is_no_such_topic(error):
                    raise
            else:
                partitions = [one.partition() for one in described.partitions()]
                found[topic] = Topic(str(described.topicId().toString()), (*sorted(partitions),))
        return found

    def names(self) -> list[str]:
        """List the cluster's topics, without Kafka's own."""
        asked = self._client().listTopics().names()
        return sorted(str(name) for name in asked.get(ASK_MILLISECONDS, self._milliseconds))

    def ends(self, partitions: Sequence[str]) -> dict[str, int]:
        """Return the offset behind the last record of each ``topic/partition``."""
        latest = self._class("clients.admin.OffsetSpec").getMethod("latest", self._array([]))
        asked, places = self._jvm.java.util.HashMap(), {}
        for partition in partitions:
            topic, _, number = partition.rpartition("/")
            place = self._make("common.TopicPartition", ["text", "int"], [topic, int(number)])
            places[partition] = place
            asked.put(place, latest.invoke(None, self._array([], "Object")))
        found = self._client().listOffsets(asked).all()
        answers = found.get(ASK_MILLISECONDS, self._milliseconds)
        return {name: int(answers.get(place).offset()) for name, place in places.items()}

    def publish(self, group: str, ends: Mapping[str, int]) -> None:
        """Set a group's offsets, by ``topic/partition``.  The group must have no members."""
        offsets = self._jvm.java.util.HashMap()
        for partition, end in ends.items():
            topic, _, number = partition.rpartition("/")
            place = self._make("common.TopicPartition", ["text", "int"], [topic, int(number)])
            offset = self._make("clients.consumer.OffsetAndMetadata", ["long"], [end])
            offsets.put(place, offset)
        asked = self._client().alterConsumerGroupOffsets(group, offsets).all()
        asked.get(PUBLISH_MILLISECONDS, self._milliseconds)

    @property
    def _milliseconds(self) -> Any:
        return self._jvm.java.util.concurrent.TimeUnit.MILLISECONDS

    def _client(self) -> Any:
        if self._admin is None:
            properties = self._jvm.java.util.Properties()
            for name, value in self._options.items():
                if name.startswith("kafka."):
                    properties.setProperty(name.removeprefix("kafka."), value)
            kind = self._jvm.java.lang.Class.forName("java.util.Properties")
            create = self._class("clients.admin.Admin").getMethod("create", self._array([kind]))
            self._admin = create.invoke(None, self._array([properties], "Object"))
        return self._admin

    def _make(self, name: str, kinds: Sequence[str], values: Sequence[Any]) -> Any:
        """Call a constructor of Kafka's client, whose classes only this loader finds."""
        java = self._jvm.java.lang
        text = java.Class.forName("java.lang.String")
        types = {"text": text, "int": java.Integer.TYPE, "long": java.Long.TYPE}
        constructor = self._class(name).getConstructor(self._array([types[k] for k in kinds]))
        return constructor.newInstance(self._array(values, "Object"))

    def _class(self, name: str) -> Any:
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        return loader.loadClass(f"org.apache.kafka.{name}")

    def _array(self, values: Sequence[Any], kind: str = "Class") -> Any:
        made = self._gateway.new_array(getattr(self._jvm.java.lang, kind), len(values))
        for index, value in enumerate(values):
            made[index] = value
        return made


def starting_offsets(
    spark: Any, options: Mapping[str, str], positions: Positions, source: int
) -> str:
    """Return the value of ``startingOffsets`` with which a source goes on after *positions*.

    A partition that the ledger does not know begins at its beginning.

    Raises:
        Misuse: *options* do not name a cluster and topics.
        NeedsOperator: a topic was deleted and created again.
        Retryable: the cluster does not answer.
    """
    known = {
        partition: at for (place, partition), at in positions.ends.items() if place == str(source)
    }
    if not known:
        return "earliest"
    lowered = _lowered(options)
    if SERVERS not in lowered:
        raise Misuse(f"give the options of the Kafka source, with {SERVERS}; got {sorted(options)}")
    cluster = KafkaCluster(spark, lowered)
    starts: dict[str, dict[str, int]] = {}
    try:
        read = _partitions_read(cluster, lowered)
    except Misuse:
        raise
    except Exception as error:  # Py4J raises the JVM's exceptions
        raise TopicIdsUnknown(lowered[SERVERS], reason_of(error)) from error
    for name, topic in read.items():
        for number in topic.partitions:
            at = known.get(f"{name}/{number}")
            if at is not None and at.topic_id and at.topic_id != topic.id:
                raise NeedsOperator(
                    f"topic {name} was deleted and created again (its id was {at.topic_id} and is "
                    f"{topic.id}), so the ledger's positions are another topic's: start with "
                    f"startingOffsets=earliest, and accept it with `semel adopt --topic-recreated`"
                )
            starts.setdefault(name, {})[str(number)] = EARLIEST if at is None else at.end
    return json.dumps(starts)


def _partitions_read(cluster: KafkaCluster, options: Mapping[str, str]) -> dict[str, Topic]:
    """Return the topics that a source with *options* reads, with the partitions of each."""
    if (assigned := options.get("assign")) is not None:
        wanted = {name: tuple(sorted(numbers)) for name, numbers in json.loads(assigned).items()}
        found = cluster.describe(list(wanted))
        return {name: replace(topic, partitions=wanted[name]) for name, topic in found.items()}
    if (listed := options.get("subscribe")) is not None:
        return cluster.describe([name.strip() for name in listed.split(",")])
    if (pattern := options.get("subscribepattern")) is not None:
        matching = [name for name in cluster.names() if re.fullmatch(pattern, name)]
        return cluster.describe(matching)
    raise Misuse("the options of a Kafka source have subscribe, subscribePattern or assign")


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    """Return the options with names in lower case: Spark ignores their case, too."""
    return {name.lower(): options[name] for name in options}


def _is_no_such_topic(error: BaseException) -> bool:
    """Return whether *error* is Kafka's "no such topic", and not a missing answer."""
    cause = getattr(error, "java_exception", None)
    while cause is not None:
        if cause.getClass().getSimpleName() == "UnknownTopicOrPartitionException":
            return True
        cause = cause.getCause()
    return False
