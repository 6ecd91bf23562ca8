"""The way of one message through FastStream, inside a transaction that semel began.

    deliver ─▶ FastStream: middlewares, Depends ─▶ the function, with what semel gives

FastStream's subscriber of a broker inherits from `Delivering`, and says how to make the broker's
own message of one of ours.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Final, TypeAlias, TypeVar, Union, get_args, get_origin

from fast_depends.dependencies.model import Dependant
from fast_depends.utils import get_typed_signature
from faststream import AckPolicy
from faststream._internal.broker import BrokerUsecase
from faststream._internal.endpoint.call_wrapper import HandlerCallWrapper
from faststream._internal.endpoint.subscriber import SubscriberUsecase
from faststream.message import AckStatus, StreamMessage
from faststream.response import Response, ensure_response
from pydantic import TypeAdapter, ValidationError
from sqlalchemy.ext.asyncio import AsyncSession

from semel.errors import Misuse
from semel.message import (
    Coordinates,
    Message,
    Record,
    headers_from,
    pairs_of,
    raw_of,
    value_of,
)
from semel.messaging.failure import NonRetryableMessageError
from semel.messaging.handle.lease import Lease
from semel.messaging.handler import SECOND, Consumer
from semel.messaging.receive.broker import Outgoing, Subscription
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import RunnerSettings
from semel.policy.vocabulary import Mode

log = logging.getLogger("semel.faststream")

Kind = TypeVar("Kind", bound="Delivering")
Parser: TypeAlias = Callable[..., Awaitable[StreamMessage[Any]]]

PUBLISHER: Final = (
    "a publisher sends after the database's commit, so a crash between them loses the message; "
    "use semel.Outbox in the function"
)


class Delivering(SubscriberUsecase[Any]):
    """A subscriber of FastStream whose function runs inside semel's transactions."""

    semel: Any
    """The `Semel` that it belongs to."""

    made: Consumer
    settings: RunnerSettings
    function: Callable[..., Any]

    def incoming(self, message: Message) -> Any:
        """Return the broker's own message, as FastStream's parser expects it."""
        raise NotImplementedError

    def _build_fastdepends_model(self) -> None:
        """Check what is known only when all decorators have been applied."""
        super()._build_fastdepends_model()
        name, config = self.made.name, self._outer_config.fd_config
        if not config.use_fastdepends or config.get_dependent is not None:
            raise Misuse(
                f"consumer {name}: FastStream must inject the arguments itself; use a broker "
                f"without apply_types=False, not FastAPI's router"
            )
        (dependant,) = [call.dependant for call in self.calls]
        options = dependant.flat_params if dependant else []
        for option in options:
            if unwrapped(option.field_type)[0] in GIVEN:
                raise Misuse(
                    f"consumer {name}: a dependency takes {option.field_name}, which only the "
                    f"function gets; take it there, and pass it on"
                )
        needed = [option.field_name for option in options]
        if len(needed) > 1:
            raise Misuse(
                f"consumer {name}: the message is one argument, not {', '.join(needed)}; a "
                f"dependency can take Context(), or other dependencies"
            )
        for publisher in self.semel.broker.publishers:
            if self.function in publisher.specification.calls:
                raise Misuse(f"consumer {name}: {PUBLISHER}")

    async def deliver(self, message: Message, second: Any) -> None:
        """Handle one message as FastStream does: middlewares, dependencies, the function."""
        model = self.made.reading.model
        if message.payload is None and model is not None:
            # The reading leaves a tombstone as it is; not every function takes one.
            try:
                model(None)
            except ValidationError as error:
                reason = "a tombstone: the function does not take None"
                raise NonRetryableMessageError(reason, "TOMBSTONE") from error
        if self.calls[0].parser is None:
            # A replay, which needs no broker.
            if isinstance(self.semel.broker, BrokerUsecase):
                self.semel.broker._setup_logger()
            self._build_fastdepends_model()
        called = HandlerCall(message, second)
        token = CALL.set(called)
        try:
            await super().process_message(self.incoming(message))
        finally:
            CALL.reset(token)
        # A middleware may have swallowed it; but what failed must not be committed.
        if called.error is not None:
            raise called.error
        if not called.was_called:
            reason = "a middleware of FastStream did not pass the message on to the function"
            raise NonRetryableMessageError(reason, "NOT_CALLED")


class OnRunner(Delivering):
    """A subscriber on Kafka, for which a runner fetches, handles and commits."""

    begins: str
    """Where a topic without committed offsets begins."""

    read: Callable[[Any], Record]
    """Make a record of the client's message."""

    write: Callable[[Record], Any]
    """Make a message as the client delivers them; it belongs to no consumer."""

    group_id: str | None
    runner: Runner | None = None
    work: asyncio.Task[None] | None = None

    async def run(self, member: Subscription) -> None:
        """Run the runner; FastStream calls this in a task of its own."""
        runner = Runner(self.made, member, self.semel.database, self.settings)
        # A task of our own: FastStream cancels the one that this is, and the runner must drain.
        self.runner, self.work = runner, asyncio.create_task(runner.run())
        await asyncio.wait({work := self.work})
        if work.cancelled() or (error := work.exception()) is None:
            return
        log.critical("consumer %s stops, and needs a person", self.made.name, exc_info=error)
        if consumer := getattr(self, "consumer", None):
            # Otherwise this member would hold its partitions, and no member would handle them.
            await consumer.stop()
        if app := self._outer_config.context.get("app"):
            app.exit()

    async def stop(self) -> None:
        """Let the runner finish what runs, then leave the group.

        Raises:
            NeedsOperator: that is why the runner had ended before.
        """
        try:
            if self.runner is not None and self.work is not None:
                self.runner.stop()
                await self.work
        finally:
            await super().stop()
            self.runner = self.work = None
            await self.semel.close()

    def incoming(self, message: Message) -> Any:
        """Return the message as the client would have delivered it."""
        at = message.source or Coordinates("", 0, 0)
        value = value_of(message.raw, message.digest)
        key = None if message.key is None else raw_of(message.key)
        return self.write(Record(at, value, key, message.headers, message.timestamp))

    async def process_message(self, msg: Any) -> Response:
        """Handle a record that `TestKafkaBroker` delivers, by a runner without Kafka."""
        memory, record = self.semel.memory, self.read(msg)
        topic = record.at.topic
        async with self.semel.memory_lock:
            await self.semel.open()
            if not memory.partitions(topic):
                memory.create_topic(topic)
            member = await memory.subscribe(self.group_id or "", [topic])
            # It is the only member: the partition is its own as soon as its task has run.
            while not member.assignment:
                await asyncio.sleep(0)
            again = Outgoing(topic, record.value, record.key or None, record.headers)
            await memory.publisher().publish([again])
            settings = replace(self.settings, wait_seconds=0.0)
            runner = Runner(self.made, member, self.semel.database, settings)
            await runner.run_until_idle()
            runner.stop()
            await runner.run()
        return ensure_response(None)


@dataclass
class HandlerCall:
    """One call of the user's function, on its way through FastStream."""

    message: Message
    second: Any
    """The session, or the lease."""

    was_called: bool = False
    error: BaseException | None = None


CALL: Final[ContextVar[HandlerCall]] = ContextVar("semel.faststream.call")

GIVEN: Final[Mapping[type, str]] = {AsyncSession: "second", Lease: "second", Message: "message"}
"""By the type of an argument that semel gives: the attribute of `HandlerCall`."""


def taken_apart(
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
        kind, marks = unwrapped(parameter.annotation)
        known = next((known for known in GIVEN if issubclass(kind, known)), None)
        if known is (AsyncSession if mode is Mode.LEASED else Lease):
            raise Misuse(f"consumer {consumer}: in mode {mode} there is no {kind.__name__}")
        if known is not None:
            if any(isinstance(mark, Dependant) for mark in (parameter.default, *marks)):
                raise Misuse(
                    f"consumer {consumer}: semel gives {parameter.name}, that of its transaction; "
                    f"leave Depends out, or annotate a session of another database with Any"
                )
            if kind is not known:
                raise Misuse(
                    f"consumer {consumer}: {parameter.name} is a {kind.__name__}, and semel gives "
                    f"the {known.__name__} of {known.__module__.partition('.')[0]}; annotate that"
                )
            given[parameter.name] = GIVEN[known]
        elif parameter.annotation is parameter.empty and parameter.name in SECOND:
            given[parameter.name] = "second"
        else:
            rest.append(parameter)
    first = [p.annotation for p in rest[:1] if p.default is p.empty]
    model = None if first in ([], [Any], [inspect.Parameter.empty]) else TypeAdapter(first[0])
    return given, inspect.Signature(rest), model


def unwrapped(annotation: Any) -> tuple[type, list[Any]]:
    """Return the type in `Annotated` and in ``… | None``, and what it is annotated with."""
    marks: list[Any] = []
    while (origin := get_origin(annotation)) in (Annotated, Union, UnionType):
        first, *more = get_args(annotation)
        if origin is Annotated:
            annotation, marks = first, marks + more
        else:
            kinds = {first, *more} - {NoneType}
            annotation = kinds.pop() if len(kinds) == 1 else object
    return annotation if isinstance(annotation, type) else object, marks


def through(
    function: Callable[..., Any], given: Mapping[str, str], seen: inspect.Signature
) -> Callable[..., Any]:
    """Return what FastStream calls: it takes *seen*, and adds what semel gives."""

    async def call(*arguments: Any, **named: Any) -> None:
        called = CALL.get()
        called.was_called = True
        ours = {name: getattr(called, source) for name, source in given.items()}
        try:
            await function(**seen.bind(*arguments, **named).arguments, **ours)
        except BaseException as error:
            called.error = error
            raise

    call.__signature__ = seen  # type: ignore[attr-defined]
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__annotations__ = {p.name: p.annotation for p in seen.parameters.values()}
    return call


async def decode(message: StreamMessage[Any], original: Any) -> Any:
    """Return the payload that the runner has read and checked already."""
    return CALL.get().message.payload


def registered(kind: type[Kind], broker: Any, places: tuple[Any, ...], **options: Any) -> Kind:
    """Register a subscriber; its attributes and its function are still to be set."""
    subscriber = broker.subscriber(
        *places, ack_policy=AckPolicy.MANUAL, no_reply=True, decoder=decode, **options
    )
    # FastStream has no way to register a class of one's own; start and stop must be ours, because
    # what runs must end while the consumer is still there.
    subscriber.__class__ = kind
    assert isinstance(subscriber, kind)
    return subscriber


def parser_of(kind: type[OnRunner]) -> Parser:
    """Return a parser that lets FastStream see headers as text: its own fails on other bytes."""

    async def parse(raw: Any, original: Parser) -> StreamMessage[Any]:
        record = kind.read(raw)
        texts = [
            (name, (value or b"").decode(errors="replace").encode())
            for name, value in pairs_of(record.headers)
        ]
        message = await original(kind.write(replace(record, headers=headers_from(texts))))
        message.raw_message = raw
        # `message.ack()` would commit the consumer's position, whatever is still running.
        message.committed = AckStatus.ACKED
        return message

    return parse


NOT_ON_KAFKA: Final[Mapping[str, str]] = {
    "ack_policy": "offsets are committed after the database; FastStream acknowledges nothing",
    "batch": "use runner=RunnerSettings(mode=Mode.BATCHED); the function stays as it is",
    "max_workers": "use runner=RunnerSettings(concurrency=…), which keeps the order of a key",
    "max_records": "use runner=RunnerSettings(max_records=…)",
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
}
"""Options of FastStream's Kafka brokers that a user may not give, and why."""
