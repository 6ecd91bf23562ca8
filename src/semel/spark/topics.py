"""Kafka's own ids of the topics that a query reads.

A topic that is deleted and made again under its name reads on silently: the
offsets fit, the records are others.  Only the topic's id tells.
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
    """A Kafka cluster did not tell the ids of its topics."""

    def __init__(self, servers: str, reason: str) -> None:
        super().__init__(servers, reason)
        self.servers = servers
        self.reason = reason

    def __str__(self) -> str:
        return f"Kafka at {self.servers} did not tell its topics' ids: {self.reason}"


class TopicIds:
    """Asks each Kafka source's cluster, through the client that Spark's connector brings."""

    def __init__(self, spark: Any, source_options: Sequence[Mapping[str, str]]) -> None:
        self._spark = spark
        by_place = [{name.lower(): options[name] for name in options} for options in source_options]
        self._servers = [options.get(SERVERS, "") for options in by_place]
        self._options = {options[SERVERS]: options for options in by_place if SERVERS in options}
        self._admins: dict[str, Any] = {}

    def added_to(self, batch: BatchRange) -> BatchRange:
        """Return *batch* with the ids of its topics, where the cluster tells them.

        Raises:
            TopicIdsUnknown: without its id, a topic made again would be read on silently.
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
            except Exception as error:  # Py4J raises what the JVM did
                raise TopicIdsUnknown(server, reason_of(error)) from error
        if unknown := [topic for topic in topics if topic not in ids]:
            raise TopicIdsUnknown(", ".join(servers), f"there is no topic {unknown[0]}")
        return replace(source, topic_ids=ids)

    def _clusters_of(self, place: int) -> list[str]:
        """List the source's own cluster first: another may have a topic of the same name."""
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
    """Tell Kafka's own "no such topic" from no answer at all."""
    cause = getattr(error, "java_exception", None)
    while cause is not None:
        if cause.getClass().getSimpleName() == "UnknownTopicOrPartitionException":
            return True
        cause = cause.getCause()
    return False
