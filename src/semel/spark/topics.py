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
        self._options = {
            options["kafka.bootstrap.servers"]: options
            for options in source_options
            if "kafka.bootstrap.servers" in options
        }
        self._servers = sorted(self._options)
        self._admins: dict[str, Any] = {}

    def added_to(self, batch: BatchRange) -> BatchRange:
        """Return *batch* with the ids of its topics, where the cluster tells them."""
        return BatchRange(tuple(self._added(source) for source in batch.sources))

    def _added(self, source: SourceRange) -> SourceRange:
        if source.kind is not SourceKind.OFFSETS or self._spark is None or not self._servers:
            return source
        topics = sorted({partition.rpartition("/")[0] for partition in source.spans})
        ids: dict[str, str] = {}
        reason = ""
        for server in self._servers:  # which cluster has which topic, only asking tells
            for topic in topics:
                if topic not in ids:
                    try:
                        ids[topic] = self._ask(server, topic)
                    except Exception as error:  # noqa: BLE001  Py4J raises what the JVM did
                        reason = reason_of(error)
        if len(ids) < len(topics):
            # Without its id, a topic made again would be read on silently.
            raise TopicIdsUnknown(", ".join(self._servers), reason)
        return replace(source, topic_ids=ids)

    def _ask(self, server: str, topic: str) -> str:
        jvm = self._spark._jvm
        names = jvm.java.util.ArrayList()
        names.add(topic)
        future = self._admin(server).describeTopics(names).topicNameValues().get(topic)
        unit = jvm.java.util.concurrent.TimeUnit.MILLISECONDS
        return str(future.get(ASK_MILLISECONDS, unit).topicId().toString())

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
