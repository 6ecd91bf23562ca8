"""`semel run`: a consumer as a service, on a broker and a database, until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer

from semel.cli.answer import Answer, answering
from semel.cli.commands.db import need_folder, on_engine
from semel.cli.database import DatabaseOption, database_url
from semel.cli.logs import LogLevel, logging_to_stderr
from semel.cli.options import option
from semel.cli.preamble import command
from semel.cli.render import Line, counted
from semel.cli.selection import ModeOption, load_consumer
from semel.errors import MissingExtra, Misuse, Permanent, Retryable
from semel.messaging.handler import Consumer
from semel.messaging.handler import consumer as consumer_of
from semel.messaging.receive.runner import OWN_CONNECTIONS, Runner
from semel.messaging.send.relay import Relay
from semel.messaging.settings import RunnerSettings, settings_of
from semel.policy.model import Policy
from semel.policy.vocabulary import Mode
from semel.secrets import masked

if TYPE_CHECKING:
    from semel.kafka.broker import KafkaBroker
    from semel.kafka.subscription import KafkaSubscription

log = logging.getLogger("semel.run")

BROKER_VARIABLE: Final = "SEMEL_BROKER"

USUAL_CONNECTIONS: Final = 5
"""As many as SQLAlchemy keeps open where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Served:
    """A service that was stopped."""

    consumer: str
    group: str
    topics: tuple[str, ...]
    database: str
    """Its URL, without the password."""

    sent: int | None
    """How many messages its relay sent; null without --relay."""


@dataclass(frozen=True, slots=True)
class Service:
    """What a service is made of; nothing is connected yet."""

    consumer: Consumer
    settings: RunnerSettings
    group: str
    topics: tuple[str, ...]


@command("run", answering, Served)
def run(
    answer: Answer,
    *,
    consumer: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:CONSUMER",
            help="The consumer, as `@consumer(…)` makes it; looked for in this folder first.",
        ),
    ],
    broker: Annotated[
        str | None,
        option(
            "--broker", f"kafka://host:port,host:port?setting=value  [${BROKER_VARIABLE}]", "URL"
        ),
    ] = None,
    database: DatabaseOption = None,
    topic: Annotated[
        list[str] | None,
        option(
            "--topic -t",
            "What to read; may be given several times.  Default: the topics of --policy.",
            "NAME",
        ),
    ] = None,
    group: Annotated[
        str | None, option("--group", "The consumer group.  Default: the consumer's name.", "NAME")
    ] = None,
    policy: Annotated[
        Path | None, option("--policy", "The policy file with the consumer's settings.", "FILE")
    ] = None,
    mode: ModeOption = None,
    concurrency: Annotated[
        int | None, option("--concurrency", "How many lanes or batches at once.", min=1)
    ] = None,
    max_records: Annotated[
        int | None, option("--max-records", "How many records per fetch, at most.", min=1)
    ] = None,
    stop_seconds: Annotated[
        float | None,
        option("--stop-seconds", "How long a stop waits for running handlers.", min=0.0),
    ] = None,
    relay: Annotated[
        bool, option("--relay", "Also send what handlers write to the outbox, to this broker.")
    ] = False,
    create_tables: Annotated[
        bool, option("--create-tables", "Make semel's tables first, if they are missing.")
    ] = False,
    log_level: Annotated[
        LogLevel, option("--log-level", "The least important log lines.", case_sensitive=False)
    ] = LogLevel.INFO,
    log_json: Annotated[
        bool, option("--log-json", "Write each log line as a JSON document.")
    ] = False,
) -> None:
    """Run a consumer as a service until SIGTERM or SIGINT.

    A stop finishes the messages that are being handled, commits their offsets and leaves the
    group: exit code 0.  A broker or a database that does not answer at the start ends the
    command with 75; later it is asked again until it answers.

    Example: semel run shop:billing --broker kafka://localhost:9092 --topic payments
    """
    url = database_url(answer, database)
    broker = _broker_url(answer, broker)
    given = {"concurrency": concurrency, "max_records": max_records, "stop_seconds": stop_seconds}

    async def serve() -> Served:
        this = cast("asyncio.Task[Served]", asyncio.current_task())
        for number in (signal.SIGTERM, signal.SIGINT):
            # Until the runner has its own handlers: the first process of a container never gets
            # a signal for which it has none.
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
        service = _service(load_consumer(consumer, mode, "consumer"), policy, group, topic, given)
        served = Served(
            service.consumer.name, service.group, service.topics, masked(url), 0 if relay else None
        )
        try:
            sent = await _serve(service, broker, url, relay=relay, create_tables=create_tables)
        except asyncio.CancelledError:
            return served  # a signal came before the runner had begun
        return replace(served, sent=sent)

    with logging_to_stderr(log_level, as_json=log_json, scrub=answer.scrub):
        answer.reply(asyncio.run(serve()), _lines)


def _broker_url(answer: Answer, url: str | None) -> str:
    url = url or os.environ.get(BROKER_VARIABLE)
    if not url:
        raise Misuse(f"say which broker with --broker kafka://host:port (or ${BROKER_VARIABLE})")
    answer.hide(url)
    if not url.startswith("kafka://"):
        raise Misuse(
            f"--broker {masked(url)} is not the URL of a broker; write kafka://host:port,host:port"
        )
    return url


def _service(
    consumer: Consumer,
    file: Path | None,
    group: str | None,
    topics: Sequence[str] | None,
    given: dict[str, Any],
) -> Service:
    """Put a service together of a policy, where there is one, and of options that win over it.

    Raises:
        Misuse: there are no topics; or the policy is refused, or contradicts the consumer.
    """
    settings = RunnerSettings(mode=consumer.mode or Mode.TRANSACTIONAL)
    if file is not None:
        policy = Policy.load(file)
        topics = topics or policy.topics_of(consumer.name)
        _, settings = settings_of(policy, consumer.name, topics)
        consumer = _under(policy, consumer)
    if not topics:
        raise Misuse("say what to read with --topic NAME, which may be given several times")
    chosen = {name: value for name, value in given.items() if value is not None}
    return Service(
        consumer,
        replace(settings, **chosen),
        group or consumer.name,
        tuple(dict.fromkeys(topics)),
    )


def _under(policy: Policy, given: Consumer) -> Consumer:
    """Return the consumer as the decorator would make it with this policy."""
    return consumer_of(
        given.name,
        policy=policy,
        reading=given.reading,
        batches=given.takes_batches,
        rules=given.rules,
        codes=given.codes,
        inspect=given.inspect,
        fetch_missing=given.fetch_missing,
        rebuild=given.rebuild,
        mode=given.mode,
    )(given.handler)


async def _serve(
    service: Service, kafka: str, tables: str, *, relay: bool, create_tables: bool
) -> int | None:
    """Connect, and work until a signal; return how many messages the relay sent."""
    from semel.kafka.broker import KafkaBroker

    try:
        from semel.sql.database import open_existing
        from semel.sql.schema import create
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "sqlalchemy", "sqlalchemy") from error

    broker = KafkaBroker(kafka)
    facts = {
        "consumer": service.consumer.name,
        "group": service.group,
        "topics": ",".join(service.topics),
    }
    log.info("service starts", extra={**facts, "mode": service.settings.mode.value})
    async with AsyncExitStack() as stack:
        if create_tables:
            await on_engine(tables, need_folder, create)
        # One more for the relay.
        needed = service.settings.concurrency + OWN_CONNECTIONS + 1
        database = await open_existing(tables, max(needed, USUAL_CONNECTIONS))
        stack.push_async_callback(database.close)
        subscription = await _subscribe(broker, service)
        stack.push_async_callback(subscription.close)
        runner = Runner(service.consumer, subscription, database, service.settings)
        # Everything is loaded now, and stays: without this, each full collection walks all of it
        # again, and a busy relay spends a third of its time there.
        gc.freeze()
        stack.callback(gc.unfreeze)
        log.info("service runs", extra=facts)
        sent = None
        if relay:
            publisher = broker.publisher()
            stack.push_async_callback(publisher.close)
            sent = await _with_relay(runner, Relay(database, publisher))
        else:
            await runner.run_until_signal()
    log.info("service stopped", extra=facts)
    return sent


async def _with_relay(runner: Runner, relay: Relay) -> int:
    relaying = asyncio.create_task(relay.run())
    # An error of the relay ends the service: messages would wait in the outbox unnoticed.
    relaying.add_done_callback(lambda _: runner.stop())
    try:
        await runner.run_until_signal()
    finally:
        relay.stop()
        await relaying
    return relay.published


async def _subscribe(broker: KafkaBroker, service: Service) -> KafkaSubscription:
    try:
        return await broker.subscribe(service.group, service.consumer.topics(*service.topics))
    except Permanent as error:
        raise Misuse(str(error)) from error  # a name that does not exist
    except Retryable as error:
        raise Retryable(
            f"{error}; start the broker, or correct --broker, and start again: nothing was read"
        ) from error


def _lines(served: Served) -> Iterator[Line]:
    sent = "" if served.sent is None else f"; its relay sent {counted(served.sent, 'message')}"
    yield f"consumer {served.consumer}, group {served.group}: stopped{sent}"
