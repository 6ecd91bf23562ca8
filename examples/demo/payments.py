"""The demo's source: payments and refunds, the same for the same seed; in Kafka with troubles."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

SCHEMA: Final = "id string, account string, kind string, amount long, version long"
"""What Spark reads; amounts are whole cents, so that sums are exact."""

LARGE_CENTS: Final = 100_000
"""Amounts above this go to the second sink, too."""

REFUND_SHARE: Final = 0.06
ACCOUNTS: Final = 1_000

DUPLICATE_SHARE: Final = 0.08
"""How many records Kafka has a second time, with the same bytes."""

UNREADABLE: Final = b'{"id": "p000'
"""A record that is not JSON."""

OVERTAKING_SHARE: Final = 0.01
"""How many payments come before the one before them, of their account."""

# A producer that tries again sends a record so many places later, at most.
LATE_BY: Final = 1_000

MISSPELLED: Final = {"paymnet": "payment", "refnud": "refund"}
"""Kinds that the handler refuses, and what they should be."""

MISSPELLED_PAYMENTS: Final = 3

# Refunds are of recent payments; older ones need not be remembered.
REMEMBERED: Final = 1_000


class Payment(NamedTuple):
    """One message of the stream; a refund has a negative amount."""

    id: str
    account: str
    kind: str
    amount: int
    version: int
    """Counts the payments of the account, from 1."""

    @property
    def is_large(self) -> bool:
        """Return whether the second sink accepts it."""
        return abs(self.amount) > LARGE_CENTS

    @property
    def fixed(self) -> Payment:
        """The payment that was meant."""
        return self._replace(kind=MISSPELLED.get(self.kind, self.kind))

    @property
    def value(self) -> bytes:
        """The record of the payment."""
        return json.dumps(self._asdict()).encode()


def payments(seed: int) -> Iterator[Payment]:
    """Yield an endless stream of payments; a few are refunds of earlier ones."""
    choose = random.Random(seed)
    recent: list[Payment] = []
    versions: Counter[str] = Counter()
    number = 0
    while True:
        number += 1
        if recent and choose.random() < REFUND_SHARE:
            refunded = recent.pop(choose.randrange(len(recent)))
            account, back = refunded.account, -refunded.amount
            versions[account] += 1
            yield Payment(f"r{number:07}", account, "refund", back, versions[account])
            continue
        amount = max(100, round(choose.lognormvariate(math.log(12_000), 1.6)))
        account = f"acc-{choose.randrange(ACCOUNTS):04}"
        versions[account] += 1
        paid = Payment(f"p{number:07}", account, "payment", amount, versions[account])
        recent.append(paid)
        del recent[:-REMEMBERED]
        yield paid


def troubled(seed: int, total: int) -> list[Payment]:
    """List payments as a careless producer sends them: some misspelled, some out of order."""
    choose = random.Random(f"troubles {seed}")
    sent = list(islice(payments(seed), total))
    wrong = {intended: kind for kind, intended in MISSPELLED.items()}
    # One for an account, and early, so that later payments wait behind it.
    early = {payment.account: at for at, payment in enumerate(sent[: max(10, total // 3)])}
    for at in choose.sample(sorted(early.values()), min(MISSPELLED_PAYMENTS, len(early))):
        sent[at] = sent[at]._replace(kind=wrong[sent[at].kind])
    last: dict[str, int] = {}
    for at, payment in enumerate(sent):
        before = last.pop(payment.account, at)
        # Not a misspelled one: what overtakes it would use up its attempts while that is parked.
        is_near = 0 < at - before < LATE_BY and payment.kind in wrong and sent[before].kind in wrong
        if is_near and choose.random() < OVERTAKING_SHARE:
            sent[before], sent[at] = payment, sent[before]
        else:
            last[payment.account] = at
    return sent


class Producer:
    """Puts files of payments into a folder at a steady rate, each one whole or not at all."""

    def __init__(self, folder: Path, seed: int, total: int, per_second: int) -> None:
        self.total = total
        self.sent = 0
        self._folder = folder
        self._per_second = per_second
        self._per_file = max(1, per_second // 4)
        self._payments: Iterator[Payment] = islice(payments(seed), total)
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
        hidden.write_text("".join(f"{row.value.decode()}\n" for row in rows))
        os.replace(hidden, self._folder / hidden.name.removeprefix("."))
        self._files += 1
        self.sent += len(rows)


class TopicProducer(Producer):
    """Sends payments to a topic of Kafka at a steady rate; what it counts as sent is durable.

    Some records are sent twice, and one is no payment.
    """

    def __init__(self, bootstrap: str, topic: str, seed: int, total: int, per_second: int) -> None:
        import confluent_kafka

        super().__init__(Path(), seed, total, per_second)
        self._topic = topic
        self._payments = iter(troubled(seed, total))
        self._choose = random.Random(f"duplicates {seed}")
        self._recent: list[Payment] = []
        self._client: Any = confluent_kafka.Producer({"bootstrap.servers": bootstrap})

    def _write(self, rows: list[Payment]) -> None:
        if not self.sent:
            self._client.produce(self._topic, UNREADABLE, rows[0].account)
        for row in rows:
            self._send(row)
            self._recent = [*self._recent[-200:], row]
            if self._choose.random() < DUPLICATE_SHARE:
                self._send(self._choose.choice(self._recent))
        if self._client.flush(60):
            raise OSError("Kafka does not take the payments")
        self.sent += len(rows)

    def _send(self, payment: Payment) -> None:
        self._client.produce(self._topic, payment.value, payment.account)


def read_topic(bootstrap: str, topic: str) -> list[bytes]:
    """Read back every record of the topic."""
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
        return [message.value() for message in found]
    finally:
        client.close()


def read_source(folder: Path) -> list[Payment]:
    """Read back every payment that was put into the folder."""
    return [
        Payment(**json.loads(line))
        for path in sorted(folder.glob("[0-9]*.json"))
        for line in path.read_text().splitlines()
    ]
