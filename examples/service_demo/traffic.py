"""What producers send: payments, some of them twice, some that the service cannot handle."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Final, NamedTuple

from confluent_kafka import Producer

# Few, so that payments wait behind a parked one of their account.
ACCOUNTS: Final = 60

DUPLICATE_SHARE: Final = 0.08

NO_RATE: Final = "p00020", "p00050"
"""In CHF, for which the first release of the service has no rate."""

MISSPELLED: Final = "p00035"
"""In "EURO", which no release knows."""

UNREADABLE: Final = b'{"id": "p000'
"""A record that is not JSON."""


class Payment(NamedTuple):
    """One payment, as it is sent."""

    id: str
    account: str
    currency: str
    amount: int

    @property
    def entry(self) -> tuple[str, str, int]:
        """The row that it must lead to; amounts are chosen so that nothing is rounded."""
        rates = {"EUR": 100, "EURO": 100, "USD": 90, "CHF": 110}
        return self.id, self.account, self.amount * rates[self.currency] // 100


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a run; the same for every variant."""

    seed: int
    seconds: float
    kills: int
    per_second: int = 200

    def payments(self) -> list[Payment]:
        """List the payments, each one once."""
        choose = random.Random(self.seed)
        # At least so many that the ones with a poison are among them.
        total = max(100, round(self.seconds * self.per_second))
        made = []
        for number in range(total):
            name = f"p{number:05}"
            currency = "CHF" if name in NO_RATE else choose.choice(("EUR", "EUR", "USD"))
            currency = "EURO" if name == MISSPELLED else currency
            account = f"acc-{choose.randrange(ACCOUNTS):02}"
            made.append(Payment(name, account, currency, 100 * choose.randrange(1, 500)))
        return made

    def records(self) -> list[tuple[str, bytes]]:
        """List the keys and values that are sent: duplicates and a broken one among them."""
        choose = random.Random(f"duplicates {self.seed}")
        sent: list[tuple[str, bytes]] = []
        for payment in self.payments():
            sent.append((payment.account, json.dumps(payment._asdict()).encode()))
            if choose.random() < DUPLICATE_SHARE:
                sent.append(choose.choice(sent[-200:]))
        sent.insert(len(sent) // 3, ("acc-00", UNREADABLE))
        return sent

    def incidents(self) -> list[tuple[str, float]]:
        """List what happens, and after which share of the records: kills, and one outage."""
        choose = random.Random(f"incidents {self.seed}")
        # The outage is last: a kill soon after it would hide what an early acknowledgement loses.
        names = ["kill"] * self.kills + ["outage"]
        width = 1 / (len(names) + 1)
        return [(name, (at + choose.random()) * width) for at, name in enumerate(names)]


class Sender:
    """Sends the records at a steady rate."""

    def __init__(self, bootstrap: str, topic: str, plan: Plan) -> None:
        self.records = plan.records()
        self.sent = 0
        self._plan, self._topic = plan, topic
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})

    @property
    def is_done(self) -> bool:
        """Return whether everything was sent."""
        return self.sent == len(self.records)

    def send(self, elapsed_seconds: float, share: float) -> None:
        """Send what is due, but not more than *share* of all."""
        due = min(elapsed_seconds * self._plan.per_second, share * len(self.records))
        while self.sent < int(due):
            key, value = self.records[self.sent]
            self._producer.produce(self._topic, key=key, value=value)
            self.sent += 1
        self._producer.poll(0)
        if self.is_done:
            self._producer.flush(30)
