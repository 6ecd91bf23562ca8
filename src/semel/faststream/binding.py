"""What a FastStream service opens: subscribers with a runner in place of FastStream's loop.

    start ─▶ runner ─▶ claim ─▶ FastStream: middlewares, Depends, handler ─▶ commit ─▶ settle
    stop  ─▶ the runner finishes what runs ─▶ FastStream stops the consumer

FastStream never sees a message outside of the runner's transaction, and never acknowledges one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal, TypeVar

from faststream._internal.broker.registrator import Registrator

from semel.codec import Codec, FromPayload, Place, Reading
from semel.errors import Misuse
from semel.faststream.delivery import taken_apart, through
from semel.memory.broker import MemoryBroker
from semel.messaging.failure import FailureClass, Rule
from semel.messaging.handler import Consumer
from semel.messaging.handler import consumer as make_consumer
from semel.messaging.receive.runner import check_settings
from semel.messaging.settings import ConsumerSettings, RunnerSettings, settings_of
from semel.policy.model import Policy
from semel.policy.vocabulary import RetryMode
from semel.sql.database import SqlDatabase

PACKAGES: Final = {"aiokafka": "aiokafka", "confluent": "confluent_kafka", "rabbit": "aio_pika"}
CLIENTS: Final = [
    import_module(f"semel.faststream.{name}")
    for name, package in PACKAGES.items()
    if find_spec(package)
]
"""What each client does its own way: the modules of this part with `make_subscriber`."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Semel:
    """Subscribers of a FastStream broker whose effects happen once.

    *database* is a URL, whose tables are created at the start, or a `SqlDatabase` of your own.
    """

    def __init__(self, broker: Registrator[Any, Any], *, database: SqlDatabase | str) -> None:
        self._client: Any = next((one for one in CLIENTS if one.fits(broker)), None)
        if self._client is None:
            raise Misuse(
                f"semel needs a KafkaBroker of faststream.kafka, one of faststream.confluent and "
                f"pip install 'semel[kafka]', or a RabbitBroker and pip install 'semel[rabbit]', "
                f"got {type(broker).__module__}.{type(broker).__name__}"
            )
        self.broker = broker
        self._is_own = isinstance(database, str)
        self.database = SqlDatabase(database) if isinstance(database, str) else database
        self.consumers: dict[str, Consumer] = {}
        """By name: for replays, dry runs, and `semel replay --handler`."""

        self.memory = MemoryBroker()
        """Where `TestKafkaBroker` publishes to."""

        self.memory_lock = asyncio.Lock()
        self._subscribers: list[Any] = []
        self._has_tables = False

    def subscriber(
        self,
        *topics: Any,
        consumer: str,
        group_id: str = "",
        policy: ConsumerSettings | Policy | None = None,
        runner: RunnerSettings | None = None,
        id_from: Place | None = None,
        codec: Codec | None = None,
        reading: Reading | None = None,
        rules: Mapping[type[BaseException], Rule] | None = None,
        codes: Mapping[str, FailureClass] | None = None,
        auto_offset_reset: Literal["earliest", "latest"] | None = None,
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Handle each message of *topics* once; the decorator returns the function unchanged.

        The first argument is the message, as its annotation says; a message that does not fit
        becomes a dead letter.  Arguments of the types `AsyncSession`, `semel.Message` and
        `Lease` are given by semel, all others by FastStream, for each message anew.  Without
        *id_from*, *reading* or a policy file, the id is the payload's field ``id``.  *options*
        are FastStream's.  Without *auto_offset_reset*, a new group of Kafka begins at the earliest
        record.

        Raises:
            Misuse: an option or the function contradicts the guarantee; the error says why.
        """
        client, refused = self._client, self._client.REFUSED
        ours = {"group_id": group_id or None, "auto_offset_reset": auto_offset_reset}
        asked = options.keys() | {name for name, value in ours.items() if value is not None}
        for name in sorted(asked & refused.keys()):
            raise Misuse(f"consumer {consumer}: {name}= is refused: {refused[name]}")
        if consumer in self.consumers:
            raise Misuse(
                f"consumer {consumer}: a second subscriber has this name; their claims would be "
                f"the same, and each would skip what the other handled"
            )
        if "group_id" in refused:
            group_id = consumer
        begins = "earliest" if auto_offset_reset is None else auto_offset_reset
        if not topics or not group_id or begins not in ("earliest", "latest"):
            raise Misuse(
                f"consumer {consumer}: name its topics and its group_id; auto_offset_reset must be "
                f"'earliest' or 'latest', got {auto_offset_reset!r}"
            )
        if isinstance(policy, Policy):
            runner = runner or settings_of(policy, consumer)[1]
        elif reading is None:
            id_from = id_from or FromPayload("id")
        settings = runner or RunnerSettings()
        if hasattr(client, "checked"):
            policy = client.checked(consumer, policy, settings, id_from, reading)

        def decorate(function: Function) -> Function:
            given, seen, model = taken_apart(consumer, function, settings.mode)
            subscriber = client.make_subscriber(self.broker, topics, group_id, settings, **options)
            made = make_consumer(
                consumer,
                policy=policy,
                id_from=id_from,
                codec=codec,
                reading=reading,
                rules=rules,
                codes=codes,
                mode=settings.mode,
            )(subscriber.deliver)
            if made.settings.retry.mode is RetryMode.RETRY_TOPIC:
                raise Misuse(
                    f"consumer {consumer}: its subscriber does not read the retry topic; use "
                    f"retry.mode: retry-table, or run it with `semel run`"
                )
            if made.reading.model is None and model is not None:
                made = replace(made, reading=replace(made.reading, model=model.validate_python))
            # Here, because FastStream starts a task that fails again and again.
            check_settings(made, self.database, settings)
            subscriber.semel, subscriber.made, subscriber.settings = self, made, settings
            subscriber.begins, subscriber.function = begins, function
            subscriber(through(function, given, seen))
            self.consumers[consumer] = made
            self._subscribers.append(subscriber)
            return function

        return decorate

    async def open(self) -> None:
        """Create the tables, if the database was given as a URL; a broker that starts does it."""
        if self._is_own and not self._has_tables:
            await self.database.create_tables()
            self._has_tables = True

    async def close(self) -> None:
        """Close the connections, unless a subscriber still runs or the database is your own.

        A broker that stops does it; `TestKafkaBroker` does not stop its broker.
        """
        if self._is_own and all(one.work is None for one in self._subscribers):
            await self.database.close()
