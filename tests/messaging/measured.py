"""Measurements as a test compares them, and a consumer whose messages end as they say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from semel.codec import FromHeader
from semel.events import EVENTS, LABELS, Measurement, Metric
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RunnerSettings
from semel.policy.vocabulary import Mode
from tests.messaging.outgoing import AT_ONCE
from tests.stores.world import DatabaseWorld

Counted: TypeAlias = Mapping[str, int]

TOPIC, NAME, GROUP, KIND = "payments", "billing", "billing-group", "paid"

OF_DELIVERIES = (
    Metric.RECEIVED,
    Metric.PROCESSED,
    Metric.DURATION,
    Metric.DUPLICATES,
    Metric.RETRIES,
    Metric.DLQ,
    Metric.DESERIALIZATION_FAILURES,
    Metric.POISON,
)
"""All but those of offsets, which count what the broker did."""


@contextmanager
def recorded() -> Iterator[Callable[[], Counted]]:
    """Record measurements; the function says how many of each kind there were.

    ``processed success``, ``dlq REJECTED``: the metric's short name, and its reason or outcome.
    """
    found: list[Measurement] = []
    stop = EVENTS.subscribe(found.append, Measurement)

    def counted() -> Counted:
        return Counter(_short(one) for one in found if one.metric in OF_DELIVERIES)

    try:
        yield counted
    finally:
        stop()


def _short(measured: Measurement) -> str:
    labels = measured.labels
    assert tuple(labels) == LABELS[measured.metric]
    assert labels["topic"] == TOPIC
    assert labels.get("consumer_group", GROUP) in (GROUP, NAME)
    assert labels.get("event_type", KIND) in (KIND, "")
    if measured.metric is not Metric.DURATION:
        assert measured.value == 1
    words = [measured.metric.name.lower(), *_detail(labels)]
    return " ".join(words)


def _detail(labels: Mapping[str, str]) -> list[str]:
    return [labels[name] for name in ("outcome", "reason") if name in labels]


class Shop:
    """One consumer in one database, however its messages reach it."""

    def __init__(self, world: DatabaseWorld, mode: Mode | None = None, **settings: Any) -> None:
        self.world = world
        self.database = world.database
        self.mode = mode or Mode.TRANSACTIONAL
        self.broker = MemoryBroker({TOPIC: 1})
        self.ends: dict[str, list[str]] = {}
        own = {"retry": AT_ONCE, "held_retry_seconds": 0.01, "circuit_failures": 0}
        policy = ConsumerSettings(**{**own, **settings})

        @consumer(NAME, policy=policy, id_from=FromHeader("message-id"))
        async def handle(message: Message, second: Any) -> None:
            # By attempts, and not by calls: a batch that falls back calls twice for one.
            codes = self.ends.get(message.id, [])
            code = "".join(codes[message.attempt - 1 : message.attempt])
            if code in ("TIMEOUT", "DEPENDENCY_UNAVAILABLE"):
                raise RetryableMessageError("down", code)
            if code:
                raise NonRetryableMessageError("no", code)

        self.consumer = handle

    def fails(self, number: int, *codes: str) -> None:
        """Let the next attempts at a message fail, one with each code."""
        self.ends[f"m{number}"] = [*codes]

    def send(self, *numbers: int, value: bytes = b'{"type": "paid"}') -> None:
        for number in numbers:
            self.broker.put(TOPIC, value, headers={"message-id": f"m{number}".encode()})

    async def deliver(self, *numbers: int, value: bytes = b'{"type": "paid"}') -> None:
        """Send messages, and run a runner until nothing comes any more."""
        self.send(*numbers, value=value)
        runner = await self.runner()
        await runner.run_until_idle()
        await runner._membership.leave()
        await runner.subscription.close()

    async def runner(self) -> Runner:
        subscription = await self.broker.subscribe(GROUP, [TOPIC])
        await self.broker.settled(GROUP)
        settings = RunnerSettings(mode=self.mode, wait_seconds=0.01)
        return Runner(self.consumer, subscription, self.database, settings)

    async def past_the_room(self, number: int) -> None:
        """Handle a delivery of a message that waits, as if its claim were all there is."""
        await handle_message(self.consumer, self.database, message(number))

    async def retry(self) -> None:
        """Handle whatever waits, until nothing is due."""
        while await retry_due(self.consumer, self.database, group=GROUP):
            pass

    async def store(self, number: int, raw: bytes = b'{"type": "paid"}') -> None:
        """Store a message in the inbox, and let its worker have it."""
        await Inbox(self.consumer, self.database).store(message(number, raw))
        await InboxWorker(self.consumer, self.database, poll_seconds=0.01).run_until_empty()


def message(number: int, raw: bytes = b'{"type": "paid"}') -> Message:
    """Return a message of the topic, as the broker's records are read."""
    headers = {"message-id": f"m{number}".encode()}
    source = Coordinates(TOPIC, 0, number)
    return Message(f"m{number}", {}, raw, None, KIND, headers, source)
