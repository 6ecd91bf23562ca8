"""The demo's source: payments and refunds, the same ones for the same seed."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

SCHEMA: Final = "id string, account string, kind string, amount long"
"""What Spark reads; amounts are whole cents, so that sums are exact."""

LARGE_CENTS: Final = 100_000
"""Amounts above this go to the second sink, too."""

REFUND_SHARE: Final = 0.06
ACCOUNTS: Final = 5_000

# Refunds are of recent payments; older ones need not be remembered.
REMEMBERED: Final = 1_000


class Payment(NamedTuple):
    """One message of the stream; a refund has a negative amount."""

    id: str
    account: str
    kind: str
    amount: int

    @property
    def is_large(self) -> bool:
        """Return whether the second sink accepts it."""
        return abs(self.amount) > LARGE_CENTS


def payments(seed: int) -> Iterator[Payment]:
    """Yield an endless stream of payments; a few are refunds of earlier ones."""
    choose = random.Random(seed)
    recent: list[Payment] = []
    number = 0
    while True:
        number += 1
        if recent and choose.random() < REFUND_SHARE:
            refunded = recent.pop(choose.randrange(len(recent)))
            yield Payment(f"r{number:07}", refunded.account, "refund", -refunded.amount)
            continue
        amount = max(100, round(choose.lognormvariate(math.log(12_000), 1.6)))
        paid = Payment(f"p{number:07}", f"acc-{choose.randrange(ACCOUNTS):04}", "payment", amount)
        recent.append(paid)
        del recent[:-REMEMBERED]
        yield paid


class Producer:
    """Puts files of payments into a folder at a steady rate, each one whole or not at all."""

    def __init__(self, folder: Path, seed: int, total: int, per_second: int) -> None:
        self.total = total
        self.sent = 0
        self._folder = folder
        self._per_second = per_second
        self._per_file = max(1, per_second // 4)
        self._payments = islice(payments(seed), total)
        self._files = 0

    @property
    def is_done(self) -> bool:
        """Return whether everything is in the folder."""
        return self.sent >= self.total

    def produce(self, elapsed_seconds: float) -> None:
        """Write the files that are due *elapsed_seconds* after the beginning."""
        due = min(self.total, int(elapsed_seconds * self._per_second))
        while not self.is_done and (self.sent + self._per_file <= due or due == self.total):
            self._write(list(islice(self._payments, self._per_file)))

    def _write(self, rows: list[Payment]) -> None:
        # Spark lists the folder at any time: a hidden name until the file is whole.
        hidden = self._folder / f".{self._files:05}.json"
        hidden.write_text("".join(f"{json.dumps(row._asdict())}\n" for row in rows))
        os.replace(hidden, self._folder / hidden.name.removeprefix("."))
        self._files += 1
        self.sent += len(rows)


class TopicProducer(Producer):
    """Sends payments to a topic of Kafka at a steady rate; what it counts as sent is durable."""

    def __init__(self, bootstrap: str, topic: str, seed: int, total: int, per_second: int) -> None:
        import confluent_kafka

        super().__init__(Path(), seed, total, per_second)
        self._topic = topic
        self._client: Any = confluent_kafka.Producer({"bootstrap.servers": bootstrap})

    def _write(self, rows: list[Payment]) -> None:
        for row in rows:
            self._client.produce(self._topic, json.dumps(row._asdict()), row.account)
        if self._client.flush(60):
            raise OSError("Kafka does not take the payments")
        self.sent += len(rows)


def read_topic(bootstrap: str, topic: str) -> list[Payment]:
    """Read back every payment that was sent to the topic."""
    import confluent_kafka as kafka

    settings = {"bootstrap.servers": bootstrap, "group.id": "audit", "enable.auto.commit": False}
    client = kafka.Consumer(settings)
    try:
        found: list[Any] = []
        numbers = client.list_topics(topic, timeout=30).topics[topic].partitions
        places = [kafka.TopicPartition(topic, number, 0) for number in numbers]
        end = sum(client.get_watermark_offsets(place, timeout=30)[1] for place in places)
        client.assign(places)
        while len(found) < end:
            found += client.consume(10_000, 1.0)
        return [Payment(**json.loads(message.value())) for message in found]
    finally:
        client.close()


def read_source(folder: Path) -> list[Payment]:
    """Read back every payment that was put into the folder."""
    return [
        Payment(**json.loads(line))
        for path in sorted(folder.glob("[0-9]*.json"))
        for line in path.read_text().splitlines()
    ]
