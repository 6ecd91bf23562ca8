"""The scripted consumers behind a FastStream broker, as a service that is killed."""

from __future__ import annotations

from typing import Any

from faststream import FastStream, confluent, kafka
from sqlalchemy.ext.asyncio import AsyncSession

from semel import Message, SqlDatabase
from semel.kafka.client import bootstrap_of
from semel.messaging import FromHeader, Mode, RunnerSettings, Semel
from semel.messaging.handle.lease import Lease
from semel.testing.worker import consumer_of
from tests.crash import scripted
from tests.kafka.service_program import Service, say_ready


async def in_session(message: Message, session: AsyncSession) -> None:
    await scripted.effect(message, session)


async def under_lease(message: Message, lease: Lease) -> None:
    await scripted.under_lease.handler(message, lease)


async def run(service: Service, database: SqlDatabase, settings: RunnerSettings) -> None:
    """Run until a signal."""
    bootstrap, config = bootstrap_of(service.broker)
    options: dict[str, Any] = {}
    if service.behind == "confluent":
        broker: Any = confluent.KafkaBroker(bootstrap, config=config, logger=None)
    else:
        broker = kafka.KafkaBroker(bootstrap, logger=None)
        options = {name.replace(".", "_"): int(value) for name, value in config.items()}
    subscribe = Semel(broker, database=database).subscriber(
        *service.topics,
        consumer=scripted.NAME,
        group_id=service.group,
        policy=consumer_of(service).settings,
        runner=settings,
        id_from=FromHeader(scripted.MESSAGE_ID),
        **options,
    )
    subscribe(under_lease if service.mode is Mode.LEASED else in_session)
    await FastStream(broker, after_startup=[say_ready]).run()
