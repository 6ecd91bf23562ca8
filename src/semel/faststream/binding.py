"""What a FastStream service opens, and what it may not ask for.

broker = KafkaBroker("localhost:9092")
semel = Semel(broker, database="postgresql+asyncpg://…")

@semel.subscriber("payments", consumer="billing", group_id="billing")
async def on_paid(event: Paid, session: AsyncSession) -> None:
    session.add(Payment(id=event.id, amount=event.amount))

app = FastStream(broker)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any, Final, Literal, TypeVar

from fast_depends.utils import get_typed_signature
from faststream._internal.endpoint.call_wrapper import HandlerCallWrapper
from faststream.kafka.broker.registrator import KafkaRegistrator
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from semel.codec import Codec, FromPayload, Place, Reading
from semel.errors import Misuse
from semel.faststream.subscriber import (
    MARGIN_SECONDS,
    PUBLISHER,
    Delivery,
    RunnerSubscriber,
    make_subscriber,
    through,
)
from semel.message import Message
from semel.messaging.consumer import SECOND, Consumer
from semel.messaging.consumer import consumer as make_consumer
from semel.messaging.failure import FailureClass, NonRetryableMessageError, Rule
from semel.messaging.handle.lease import Lease
from semel.messaging.settings import ConsumerSettings, RunnerSettings, settings_of
from semel.policy.model import Policy
from semel.policy.vocabulary import Mode
from semel.sql.database import SqlDatabase

Function = TypeVar("Function", bound=Callable[..., Any])

REFUSED: Final[Mapping[str, str]] = {
    "ack_policy": "offsets are committed after the database; FastStream acknowledges nothing",
    "batch": "use runner=RunnerSettings(mode=Mode.BATCHED); the function stays as it is",
    "max_workers": "use runner=RunnerSettings(concurrency=…), which keeps the order of a key",
    "max_records": "use runner=RunnerSettings(max_records=…)",
    "max_poll_records": "use runner=RunnerSettings(max_records=…)",
    "batch_timeout_ms": "use runner=RunnerSettings(wait_seconds=…)",
    "pattern": "name the topics: a new topic would move partitions between running members",
    "partitions": "without a group, two processes would handle the same partition",
    "listener": "semel listens itself, to commit before partitions are revoked",
    "parser": "use reading= or codec=; headers and tombstones arrive as they were sent",
    "decoder": "use reading= or codec=",
    "value_deserializer": "use reading= or codec=",
    "key_deserializer": "use reading= with key_from",
    "no_reply": f"semel never replies: {PUBLISHER}",
    "auto_commit_interval_ms": "offsets are committed after the database, never by a timer",
    "persistent": "a subscriber stays as long as its broker",
}
"""FastStream's options that a user may not give, and why."""


class Semel:
    """Subscribers of a FastStream broker whose effects happen once.

    *database* is a URL, whose tables are created at the start, or a `SqlDatabase` of your own.
    """

    def __init__(self, broker: KafkaRegistrator, *, database: SqlDatabase | str) -> None:
        if not isinstance(broker, KafkaRegistrator):
            raise Misuse(
                f"semel needs faststream.kafka.KafkaBroker, got {type(broker).__module__}."
                f"{type(broker).__name__}. For confluent-kafka without FastStream, use "
                f"semel.messaging.KafkaBroker and a Runner"
            )
        self.broker = broker
        self._is_own = isinstance(database, str)
        self.database = SqlDatabase(database) if isinstance(database, str) else database
        self.consumers: dict[str, Consumer] = {}
        """By name: for replays, dry runs, and `semel replay --consumer`."""

        self._deliveries: list[Delivery] = []
        self._has_tables = False

    def subscriber(
        self,
        *topics: Any,
        consumer: str,
        group_id: str,
        policy: ConsumerSettings | Policy | None = None,
        runner: RunnerSettings | None = None,
        id_from: Place | None = None,
        codec: Codec | None = None,
        reading: Reading | None = None,
        rules: Mapping[type[BaseException], Rule] | None = None,
        codes: Mapping[str, FailureClass] | None = None,
        auto_offset_reset: Literal["earliest", "latest"] = "earliest",
        **options: Any,
    ) -> Callable[[Function], Function]:
        """Handle each message of *topics* once; the decorator returns the function unchanged.

        The first argument is the message, as its annotation says; a message that does not fit
        becomes a dead letter.  Arguments of the types `AsyncSession`, `semel.Message` and
        `Lease` are given by semel, all others by FastStream, for each message anew.  Without
        *id_from*, *reading* or a policy file, the id is the payload's field ``id``.  *options*
        are FastStream's.

        Raises:
            Misuse: an option or the function contradicts the guarantee; the error says why.
        """
        for name in options:
            if name in REFUSED:
                raise Misuse(f"consumer {consumer}: {name}= is refused: {REFUSED[name]}")
        if consumer in self.consumers:
            raise Misuse(
                f"consumer {consumer}: a second subscriber has this name; their claims would be "
                f"the same, and each would skip what the other handled"
            )
        if not topics or not group_id:
            raise Misuse(f"consumer {consumer}: name its topics and its group_id")
        if auto_offset_reset not in ("earliest", "latest"):
            raise Misuse(
                f"consumer {consumer}: auto_offset_reset must be 'earliest' or 'latest', got "
                f"{auto_offset_reset!r}"
            )
        if isinstance(policy, Policy):
            runner = runner or settings_of(policy, consumer)[1]
        elif reading is None:
            id_from = id_from or FromPayload("id")
        works = runner or RunnerSettings()
        # A revocation waits for the running messages; the group must wait for it.
        patience = works.stop_seconds + works.cancel_seconds + MARGIN_SECONDS
        options.setdefault("rebalance_timeout_ms", round(patience * 1_000))

        def decorate(function: Function) -> Function:
            given, seen, model = _taken_apart(consumer, function, works.mode)
            subscriber = make_subscriber(self.broker, topics, group_id, **options)
            made = make_consumer(
                consumer,
                policy=policy,
                id_from=id_from,
                codec=codec,
                reading=reading,
                rules=rules,
                codes=codes,
                mode=works.mode,
            )(_handler(subscriber, model))
            if made.reading.model is None and model is not None:
                made = replace(made, reading=replace(made.reading, model=model.validate_python))
            self.consumers[consumer] = made
            subscriber.semel = Delivery(
                made,
                self.database,
                works,
                auto_offset_reset,
                self.broker,
                function,
                self._open,
                self._ended,
            )
            self._deliveries.append(subscriber.semel)
            subscriber(through(function, given, seen))
            return function

        return decorate

    async def close(self) -> None:
        """Close the database's connections, if it was given as a URL.

        A broker that stops does it; `TestKafkaBroker` does not stop its broker.
        """
        if self._is_own:
            await self.database.close()

    async def _open(self) -> None:
        if self._is_own and not self._has_tables:
            await self.database.create_tables()
            self._has_tables = True

    async def _ended(self) -> None:
        if all(delivery.running is None for delivery in self._deliveries):
            await self.close()


GIVEN: Final[Mapping[type, str]] = {AsyncSession: "second", Lease: "second", Message: "message"}
"""By the type of an argument that semel gives: the attribute of the attempt."""


def _taken_apart(
    consumer: str, function: Callable[..., Any], mode: Mode
) -> tuple[dict[str, str], inspect.Signature, TypeAdapter[Any] | None]:
    """Return what semel gives to a function, what FastStream sees of it, and the message's type.

    Raises:
        Misuse: the function cannot be called once for each message.
    """
    if isinstance(function, HandlerCallWrapper):
        raise Misuse(f"consumer {consumer}: {PUBLISHER}")
    if not inspect.iscoroutinefunction(function):
        raise Misuse(f"consumer {consumer}: its function must be an async function")
    signature, returned = get_typed_signature(function)
    if returned not in (inspect.Signature.empty, None, NoneType):
        raise Misuse(
            f"consumer {consumer}: its function returns {returned!r}, which FastStream would "
            f"send after the database's commit; annotate None, and send with semel.Outbox"
        )
    given: dict[str, str] = {}
    rest: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = parameter.annotation if isinstance(parameter.annotation, type) else object
        known = next((known for known in GIVEN if issubclass(kind, known)), None)
        if known is (AsyncSession if mode is Mode.LEASED else Lease):
            raise Misuse(f"consumer {consumer}: in mode {mode} there is no {kind.__name__}")
        if known is not None:
            given[parameter.name] = GIVEN[known]
        elif parameter.annotation is parameter.empty and parameter.name in SECOND:
            given[parameter.name] = "second"
        else:
            rest.append(parameter)
    first = [p.annotation for p in rest[:1] if p.default is p.empty]
    model = None if first in ([], [Any], [inspect.Parameter.empty]) else TypeAdapter(first[0])
    return given, inspect.Signature(rest), model


def _handler(
    subscriber: RunnerSubscriber, model: TypeAdapter[Any] | None
) -> Callable[[Message, Any], Any]:
    async def handle(message: Message, second: Any) -> None:
        if message.payload is None and model is not None:
            # The reading leaves a tombstone as it is; not every function takes one.
            try:
                model.validate_python(None)
            except ValidationError as error:
                raise NonRetryableMessageError(
                    "a tombstone: the function does not take None", "TOMBSTONE"
                ) from error
        await subscriber.deliver(message, second)

    return handle
