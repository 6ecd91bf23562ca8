"""What readers of committed records see, and when."""

from __future__ import annotations

import time

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec


def wait_for_commits(bootstrap: str, topic: str, seconds: float = 5.0) -> None:
    """Wait until readers of committed records see to the end: a broker answers a commit earlier.

    A transaction that stays open keeps them from it, and is waited for in vain.
    """
    admin = AdminClient({"bootstrap.servers": bootstrap})
    partitions = admin.list_topics(topic, timeout=10).topics[topic].partitions
    latest = {TopicPartition(topic, number): OffsetSpec.latest() for number in partitions}

    def ends(isolation: IsolationLevel) -> list[int]:
        found = admin.list_offsets(latest, isolation_level=isolation)
        return [found[one].result(10).offset for one in latest]

    deadline = time.monotonic() + seconds
    while ends(IsolationLevel.READ_COMMITTED) != ends(IsolationLevel.READ_UNCOMMITTED):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
