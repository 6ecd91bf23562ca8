"""Which cluster is asked for the id of a topic."""

from __future__ import annotations

import pytest

from semel.pipeline.source import BatchRange, SourceKind, SourceRange, Span
from semel.spark.kafka import KafkaSources, TopicIdsUnknown

LEFT, RIGHT = {"kafka.bootstrap.servers": "left:9092"}, {"kafka.bootstrap.servers": "right:9092"}


class Clusters(KafkaSources):
    """Two clusters that answer without a JVM."""

    def __init__(self, source_options, topics):
        super().__init__(object(), source_options)
        self._topics = topics
        self.asked = []

    def _ask(self, server, topics):
        self.asked.append((server, *topics))
        known = self._topics[server]
        if known is None:
            raise TimeoutError("no answer")
        return {topic: known[topic] for topic in topics if topic in known}

    def of(self, place: int, *topics: str):
        spans = {f"{topic}/0": Span(0, 1) for topic in topics}
        batch = BatchRange((SourceRange(str(place), SourceKind.OFFSETS, spans),))
        return self.added_to(batch).sources[0].topic_ids


def test_topics_of_one_name_on_two_clusters_have_two_ids():
    topics = {"left:9092": {"events": "l"}, "right:9092": {"events": "r"}}
    clusters = Clusters([LEFT, {}, RIGHT], topics)

    assert clusters.of(0, "events") == {"events": "l"}
    assert clusters.of(2, "events") == {"events": "r"}


def test_all_topics_of_a_source_are_asked_for_at_once():
    clusters = Clusters([LEFT, RIGHT], {"left:9092": {"a": "1", "b": "2"}, "right:9092": None})

    assert clusters.of(0, "a", "b") == {"a": "1", "b": "2"}
    assert clusters.asked == [("left:9092", "a", "b")]


def test_a_source_of_which_spark_does_not_tell_the_cluster_is_found_by_its_topics():
    clusters = Clusters([LEFT, RIGHT], {"left:9092": {}, "right:9092": {"events": "r"}})

    assert clusters.of(7, "events") == {"events": "r"}


def test_a_cluster_that_does_not_answer_is_not_replaced_by_another():
    clusters = Clusters([LEFT, RIGHT], {"left:9092": None, "right:9092": {"events": "r"}})

    with pytest.raises(TopicIdsUnknown, match=r"left:9092 did not return .*: no answer"):
        clusters.of(0, "events")


def test_a_topic_that_no_cluster_has_is_named():
    clusters = Clusters([LEFT], {"left:9092": {"other": "o"}})

    with pytest.raises(TopicIdsUnknown, match="there is no topic events"):
        clusters.of(0, "events", "other")


def test_options_are_read_as_spark_does_whatever_their_case():
    clusters = Clusters([{"Kafka.Bootstrap.Servers": "left:9092"}], {"left:9092": {"events": "l"}})

    assert clusters.of(0, "events") == {"events": "l"}
