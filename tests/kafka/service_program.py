"""A service on Kafka in a process of its own, to be killed: a broker, a runner, a relay."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from semel.kafka.broker import KafkaBroker
from semel.kafka.client import GroupProtocol
from semel.messaging.receive.runner import Runner
from semel.messaging.send.relay import Relay
from semel.messaging.settings import RunnerSettings
from semel.testing.worker import Worker, consumer_of, opened, trace_into
from tests.crash import scripted

READY = "ready"


@dataclass(frozen=True, slots=True)
class Service(Worker):
    """What a service does; *broker* is a ``kafka://`` URL."""

    protocol: GroupProtocol = GroupProtocol.CONSUMER
    receipts: str = ""
    """The topic of the handler's outgoing messages."""

    behind: str = ""
    """The client of the FastStream broker in front: ``aiokafka`` or ``confluent``."""


def main(arguments: Sequence[str]) -> int:
    """Run the service until SIGTERM."""
    service = Service.from_json(arguments[0])
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, force=True)
    if service.trace:
        trace_into(Path(service.trace))
    scripted.RECEIPTS = service.receipts
    return asyncio.run(run(service))


async def run(service: Service) -> int:
    broker = KafkaBroker(service.broker, protocol=service.protocol)
    settings = RunnerSettings(
        mode=service.mode,
        max_records=service.max_records,
        concurrency=service.concurrency,
        wait_seconds=0.05,
        stop_seconds=service.stop_seconds,
        member_seconds=service.member_seconds,
    )
    async with opened(service.database) as database:
        publisher = broker.publisher()
        relay = Relay(database, publisher, lease_seconds=service.relay_lease_seconds)
        relaying = asyncio.create_task(relay.run()) if service.relays else None
        if service.behind:
            await import_module("tests.kafka.faststream_service").run(service, database, settings)
        else:
            subscription = await broker.subscribe(service.group, service.topics)
            runner = Runner(consumer_of(service), subscription, database, settings)
            # The runner takes signals before it waits for the first time.
            asyncio.get_running_loop().call_soon(say_ready)
            await runner.run_until_signal()
        if relaying is not None:
            relay.stop()
            await relaying
        await publisher.close()
    return 0


def say_ready() -> None:
    """Tell the test that a signal stops this service from now on."""
    print(READY, flush=True)
