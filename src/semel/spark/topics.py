"""Kafka's own ids of the topics that a query reads.

If a topic is deleted and created again under its name, a query continues silently:
the offsets fit, but the records are others.  Only the topic's id shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from semel.errors import Retryable, reason_of
from semel.pipeline.source import BatchRange, SourceKind, SourceRange

ASK_MILLISECONDS = 10_000
SERVERS = "kafka.bootstrap.servers"


class TopicIdsUnknown(Retryable):
    """A Kafka cluster did not return the ids of its topics."""

    def __init__(self, servers: str, reason: str) -> None:
        super().__init__(servers, reason)
        self.servers = servers
        self.reason = reason

    def __str__(self) -> str:
        return f"Kafka at {self.servers} did not return its topics' ids: {self.reason}"


class TopicIds:
    """Asks each Kafka source's cluster, through the client of Spark's connector."""

    def __init__(self, spark: Any, source_options: Sequence[Mapping[str, str]]) -> None:
        self._spark = spark
        by_place = [{name.lower(): options[name] for name in options} for options in source_options]
        self._servers = [options.get(SERVERS, "") for options in by_place]
        self._options = {options[SERVERS]: options for options in by_place if SERVERS in options}
        self._admins: dict[str, Any] = {}

    def added_to(self, batch: BatchRange) -> BatchRange:
        """Return *batch* with the ids of its topics, if the cluster has ids.

        Raises:
            TopicIdsUnknown: without its id, a recreated topic would be read silently.
        """
        return BatchRange(tuple(self._added(source) for source in batch.sources))

    def _added(self, source: SourceRange) -> SourceRange:
        if source.kind is not SourceKind.OFFSETS or self._spark is None or not self._options:
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
        jvm = self._spark._jvm
        names = jvm.java.util.ArrayList()
        for topic in topics:
            names.add(topic)
        answers = self._admin(server).describeTopics(names).topicNameValues()
        unit = jvm.java.util.concurrent.TimeUnit.MILLISECONDS
        ids = {}
        for topic in topics:
            try:
                described = answers.get(topic).get(ASK_MILLISECONDS, unit)
            except Exception as error:
                if not _is_no_such_topic(error):
                    raise
            else:
                ids[topic] = str(described.topicId().toString())
        return ids

    def _admin(self, server: str) -> Any:
        if server not in self._admins:
            jvm = self._spark._jvm
            properties = jvm.java.util.Properties()
            for name, value in self._options[server].items():
                if name.startswith("kafka."):
                    properties.setProperty(name.removeprefix("kafka."), value)
            loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
            admin = loader.loadClass("org.apache.kafka.clients.admin.Admin")
            parameter = jvm.java.lang.Class.forName("java.util.Properties")
            types = self._spark.sparkContext._gateway.new_array(jvm.java.lang.Class, 1)
            types[0] = parameter
            arguments = self._spark.sparkContext._gateway.new_array(jvm.java.lang.Object, 1)
            arguments[0] = properties
            self._admins[server] = admin.getMethod("create", types).invoke(None, arguments)
        return self._admins[server]


def _is_no_such_topic(error: BaseException) -> bool:
    """Return whether *error* is Kafka's "no such topic", and not a missing answer."""
    cause = getattr(error, "java_exception", None)
    while cause is not None:
        if cause.getClass().getSimpleName() == "UnknownTopicOrPartitionException":
            return True
        cause = cause.getCause()
    return False
