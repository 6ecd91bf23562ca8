"""Payloads of Confluent's serialisers: what is read, what is refused, and what comes back."""

from __future__ import annotations

import asyncio
import json
import pickle
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from semel.codec import (
    FromHeader,
    FromPayload,
    Reading,
    SchemaIncompatible,
    Undecodable,
    Unread,
    Unreadable,
)
from semel.errors import Misuse, Retryable
from semel.kafka import codecs
from semel.kafka.codecs import AvroCodec, JsonSchemaCodec, ProtobufCodec
from semel.message import Coordinates, Message, Record
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handler import consumer
from semel.messaging.receive.inbox import Inbox, InboxWorker, Stored
from semel.messaging.records import DeadLetterFilter
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import RetryMode
from tests.messaging.served import POLICY, Service
from tests.messaging.worlds import Effect

if TYPE_CHECKING:
    from tests.unit.kafka.schema_registry import SchemaRegistry

Open = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Make codecs and clients, and close their connections after the test."""
    made: list[Any] = []

    def make(kind: Callable[..., Any], *args: Any, **named: Any) -> Any:
        made.append(kind(*args, **named))
        return made[-1]

    yield make
    for one in made:
        one.close()


class Producer:
    """Serialises as a producer does that uses Confluent's client."""

    def __init__(self, registry: SchemaRegistry, opened: Open) -> None:
        from confluent_kafka.schema_registry import SchemaRegistryClient

        self.client = opened(SchemaRegistryClient, {"url": registry.url})

    def avro(self, schema: Any, payload: Any, **options: Any) -> bytes:
        from confluent_kafka.schema_registry.avro import AvroSerializer

        return self._sent(AvroSerializer, json.dumps(schema), payload, **options)

    def json(self, schema: Any, payload: Any) -> bytes:
        from confluent_kafka.schema_registry.json_schema import JSONSerializer

        make = lambda client, schema, conf: JSONSerializer(schema, client, conf=conf)  # noqa: E731
        return self._sent(make, json.dumps(schema), payload)

    def protobuf(self, message: Any) -> bytes:
        from confluent_kafka.schema_registry.protobuf import ProtobufSerializer

        make = lambda client, kind, conf: ProtobufSerializer(kind, client, conf)  # noqa: E731
        return self._sent(make, type(message), message)

    def _sent(
        self,
        make: Any,
        schema: Any,
        payload: Any,
        headers: dict[str, bytes] | None = None,
        conf: Any = None,
    ) -> bytes:
        from confluent_kafka.serialization import MessageField, SerializationContext

        serializer = make(self.client, schema, conf=conf or {})
        context = SerializationContext("payments", MessageField.VALUE, headers)
        raw = serializer(payload, context)
        assert isinstance(raw, bytes)
        return raw


@pytest.fixture
def producer(schema_registry: SchemaRegistry, opened: Open) -> Producer:
    return Producer(schema_registry, opened)


def record_of(**fields: Any) -> dict[str, Any]:
    listed = [{"name": name, **kind} for name, kind in fields.items()]
    return {"type": "record", "name": "Payment", "namespace": "shop", "fields": listed}


TEXT = {"type": "string"}
OLD = record_of(id=TEXT, amount={"type": "int"})
NEW = record_of(id=TEXT, amount={"type": "long"}, currency={"type": "string", "default": "EUR"})
DEMANDING = record_of(id=TEXT, amount={"type": "int"}, shop=TEXT)
PAYMENT = {"id": "p1", "amount": 20}

JSON_OLD = {
    "title": "Payment",
    "type": "object",
    "properties": {"id": TEXT, "amount": {"type": "integer"}},
    "required": ["id"],
}
JSON_DEMANDING = {**JSON_OLD, "required": ["id", "shop"]}


def message_class(name: str = "Payment", package: str = "shop", **numbers: int) -> Any:
    """Make what protoc generates of a message with these text fields."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name=f"{name}.proto".lower(), package=package, syntax="proto3"
    )
    message = file.message_type.add(name=name)
    for field, number in numbers.items():
        message.field.add(name=field, number=number, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))


def test_avro_is_read_by_the_schema_that_it_was_written_with(schema_registry, producer, opened):
    codec = opened(AvroCodec, schema_registry.url)

    raw = producer.avro(OLD, PAYMENT)

    assert raw[:1] == b"\0"
    assert codec.decode(raw, {}) == PAYMENT


def test_a_reader_with_a_default_reads_what_was_written_before_the_field(
    schema_registry, producer, opened
):
    codec = opened(AvroCodec, schema_registry.url, json.dumps(NEW))

    assert codec.decode(producer.avro(OLD, PAYMENT), {}) == {**PAYMENT, "currency": "EUR"}


@pytest.mark.parametrize(
    "reader",
    [DEMANDING, record_of(id=TEXT, amount=TEXT), {**OLD, "name": "Refund"}],
    ids=["field without default", "other type", "other name"],
)
def test_avro_that_the_reader_cannot_resolve_names_its_schema(
    schema_registry, producer, opened, reader
):
    codec = opened(AvroCodec, schema_registry.url, json.dumps(reader))

    with pytest.raises(SchemaIncompatible, match=f"schema id 1 of .*{schema_registry.url}"):
        codec.decode(producer.avro(OLD, PAYMENT), {})


def test_a_schema_that_references_another_is_read(schema_registry, producer, opened):
    from confluent_kafka.schema_registry import Schema, SchemaReference
    from confluent_kafka.schema_registry.avro import AvroSerializer

    money = {"type": "record", "name": "Money", "namespace": "shop", "fields": []}
    money["fields"] = [{"name": "cents", "type": "int"}]
    producer.client.register_schema("money", Schema(json.dumps(money), "AVRO"))
    invoice = {"type": "record", "name": "Invoice", "namespace": "shop"}
    invoice["fields"] = [{"name": "total", "type": "shop.Money"}]
    refers = Schema(json.dumps(invoice), "AVRO", [SchemaReference("shop.Money", "money", 1)])
    raw = producer._sent(AvroSerializer, refers, {"total": {"cents": 5}})

    assert opened(AvroCodec, schema_registry.url).decode(raw, {}) == {"total": {"cents": 5}}


def test_a_schema_named_in_a_header_is_found_by_its_guid(schema_registry, producer, opened):
    from confluent_kafka.schema_registry import header_schema_id_serializer

    headers: dict[str, bytes] = {}
    conf = {"schema.id.serializer": header_schema_id_serializer}
    payment = {"id": "payment-1", "amount": 20}
    raw = producer.avro(OLD, payment, headers=headers, conf=conf)

    codec = opened(AvroCodec, {"url": schema_registry.url})

    assert list(headers) == ["__value_schema_id"]
    assert codec.decode(raw, headers) == payment
    assert any(asked.startswith("/schemas/guids/") for asked in schema_registry.asked)


def test_a_schema_is_looked_up_once(schema_registry, producer, opened):
    codec = opened(AvroCodec, schema_registry.url)
    raw = producer.avro(OLD, PAYMENT)
    schema_registry.asked.clear()

    for _ in range(3):
        codec.decode(raw, {})

    assert len(schema_registry.asked) == 1


def test_protobuf_is_read_as_the_message_of_the_reader(schema_registry, producer, opened):
    written = message_class(id=1, amount=2)
    wanted = message_class(id=1, currency=3)
    codec = opened(ProtobufCodec, schema_registry.url, wanted)

    found = codec.decode(producer.protobuf(written(id="p1", amount="20")), {})

    assert isinstance(found, wanted)
    assert (found.id, found.currency) == ("p1", "")


def test_another_message_of_protobuf_is_not_read_as_this_one(schema_registry, producer, opened):
    written = message_class("Refund", id=1)
    codec = opened(ProtobufCodec, schema_registry.url, message_class(id=1))

    with pytest.raises(SchemaIncompatible, match=r"schema id 1 .*message shop\.Payment"):
        codec.decode(producer.protobuf(written(id="p1")), {})


def test_json_must_be_valid_under_its_own_schema(schema_registry, producer, opened):
    codec = opened(JsonSchemaCodec, schema_registry.url)
    raw = producer.json(JSON_OLD, PAYMENT)

    assert codec.decode(raw, {}) == PAYMENT
    for payload in (b'{"id": 7}', b'{"id": "p1", "id": "p2"}', b"{"):
        with pytest.raises(Undecodable) as refused:
            codec.decode(raw[:5] + payload, {})
        assert not isinstance(refused.value, SchemaIncompatible)


def test_json_that_the_readers_schema_refuses_is_of_another_schema(
    schema_registry, producer, opened
):
    codec = opened(JsonSchemaCodec, schema_registry.url, json.dumps(JSON_DEMANDING))

    assert codec.decode(producer.json(JSON_OLD, {"id": "p1", "shop": "s"}), {})["shop"] == "s"
    with pytest.raises(SchemaIncompatible, match="schema id 1"):
        codec.decode(producer.json(JSON_OLD, PAYMENT), {})


def test_a_refusal_does_not_quote_the_payload(schema_registry, producer, opened):
    raw = producer.json(JSON_OLD, PAYMENT)[:5] + b'{"id": "p1", "amount": "my secret"}'

    with pytest.raises(Undecodable) as refused:
        opened(JsonSchemaCodec, schema_registry.url).decode(raw, {})

    assert "secret" not in str(refused.value)


def every_codec(registry: SchemaRegistry, opened: Open) -> list[Any]:
    return [
        opened(AvroCodec, registry.url),
        opened(ProtobufCodec, registry.url, message_class(id=1)),
        opened(JsonSchemaCodec, registry.url),
    ]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0",
        b"\0\0\0\0",
        b'{"id": "p1"}',
        b"\x07\0\0\0\x01\x02\x03",
        b"\0\xff\xff\xff\xff\x02",
    ],
)
def test_bytes_without_the_framing_are_undecodable_and_nobody_is_asked(
    schema_registry, opened, raw
):
    for codec in every_codec(schema_registry, opened):
        with pytest.raises(Undecodable) as refused:
            codec.decode(raw, {})
        assert not isinstance(refused.value, SchemaIncompatible), codec.name

    assert schema_registry.asked == []


def test_a_payload_that_ends_too_early_is_undecodable(schema_registry, producer, opened):
    avro, protobuf, _ = every_codec(schema_registry, opened)
    payment = message_class(id=1)

    for codec, raw in (
        (avro, producer.avro(OLD, {"id": "long enough", "amount": 20})),
        (protobuf, producer.protobuf(payment(id="long enough"))),
    ):
        with pytest.raises(Undecodable, match="broken under schema id") as refused:
            codec.decode(raw[:-4], {})
        assert not isinstance(refused.value, SchemaIncompatible)


def test_a_schema_that_the_registry_does_not_know_is_named_with_the_registry(
    schema_registry, opened
):
    raw = struct.pack(">bI", 0, 4711) + b"\0payload"

    for codec in every_codec(schema_registry, opened):
        with pytest.raises(SchemaIncompatible) as refused:
            codec.decode(raw, {})
        assert "schema id 4711" in str(refused.value)
        assert schema_registry.url in str(refused.value)


def test_a_schema_of_another_format_is_incompatible(schema_registry, producer, opened):
    raw = producer.avro(OLD, PAYMENT)

    with pytest.raises(SchemaIncompatible, match="is of type AVRO"):
        opened(JsonSchemaCodec, schema_registry.url).decode(raw, {})


def test_a_schema_whose_rules_would_have_to_run_is_refused(schema_registry, producer, opened):
    raw = producer.avro(OLD, PAYMENT)
    rule = {"name": "decrypt", "kind": "TRANSFORM", "mode": "WRITEREAD", "type": "ENCRYPT"}
    schema_registry.schemas[0]["ruleSet"] = {"domainRules": [rule]}

    with pytest.raises(SchemaIncompatible, match="rules to run on reading"):
        opened(AvroCodec, schema_registry.url).decode(raw, {})


@pytest.mark.parametrize(
    "instead",
    [
        (500, {"error_code": 50001, "message": "Error in the backend"}),
        (503, b"<html>no healthy upstream</html>"),
        (401, {"error_code": 401, "message": "Unauthorized"}),
        (404, b"<html>default backend</html>"),
        (200, b"<html>please log in</html>"),
    ],
    ids=["error", "proxy", "credentials", "another server", "not JSON"],
)
def test_an_answer_that_is_not_the_registrys_decides_nothing(
    schema_registry, producer, opened, monkeypatch, instead
):
    monkeypatch.setattr(codecs, "REST_SECONDS", 0.0)
    codec = opened(AvroCodec, schema_registry.url)
    raw = producer.avro(OLD, PAYMENT)

    schema_registry.instead = instead
    with pytest.raises(Retryable, match="schema id 1"):
        codec.decode(raw, {})
    schema_registry.instead = None

    assert codec.decode(raw, {}) == PAYMENT


def test_a_registry_that_was_down_is_asked_again(schema_registry, producer, opened, monkeypatch):
    monkeypatch.setattr(codecs, "REST_SECONDS", 0.0)
    codec = opened(AvroCodec, schema_registry.url)
    raw = producer.avro(OLD, PAYMENT)

    schema_registry.stop()
    with pytest.raises(Retryable, match="does not answer"):
        codec.decode(raw, {})
    schema_registry.start()

    assert codec.decode(raw, {}) == PAYMENT


def test_a_registry_that_hangs_is_waited_for_once_and_not_for_every_message(
    schema_registry, producer, opened, monkeypatch
):
    monkeypatch.setattr(codecs, "REST_SECONDS", 60.0)
    codec = opened(AvroCodec, {"url": schema_registry.url, "timeout": 0.1})
    raw = producer.avro(OLD, PAYMENT)
    schema_registry.answering.clear()
    schema_registry.asked.clear()

    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(Retryable):
            codec.decode(raw, {})

    assert time.monotonic() - began < 20
    assert len(schema_registry.asked) == 1


def test_known_schemas_are_read_while_the_registry_is_down(schema_registry, producer, opened):
    codec = opened(AvroCodec, schema_registry.url)
    raw = producer.avro(OLD, PAYMENT)
    codec.decode(raw, {})

    schema_registry.stop()
    found = codec.decode(raw, {})
    schema_registry.start()

    assert found == PAYMENT


def test_what_is_wrong_with_a_codec_is_said_when_it_is_made(schema_registry):
    with pytest.raises(Misuse, match="Unrecognized properties: timeuot"):
        AvroCodec({"url": schema_registry.url, "timeuot": 1})
    with pytest.raises(Misuse, match="schema is wrong"):
        AvroCodec(schema_registry.url, '{"type": "recrod"}')


def test_a_password_in_the_url_is_not_told(schema_registry, opened):
    host = schema_registry.url.removeprefix("http://")
    codec = opened(AvroCodec, f"http://semel:s3cret@{host}")

    with pytest.raises(SchemaIncompatible) as refused:
        codec.decode(struct.pack(">bI", 0, 4711) + b"\0payload", {})

    assert f"http://semel:***@{host}" in str(refused.value)


def test_a_tombstone_needs_no_schema(schema_registry, opened):
    codec = opened(AvroCodec, schema_registry.url)
    record = Record(Coordinates("payments", 0, 7), None, headers={"message-id": b"m1"})

    found = Reading(FromHeader("message-id"), codec).read(record)

    assert isinstance(found, Message)
    assert found.payload is None
    assert schema_registry.asked == []


def test_ids_are_found_in_what_the_codecs_make(schema_registry, producer, opened):
    avro, protobuf, json_schema = every_codec(schema_registry, opened)
    sent = [
        (avro, producer.avro(OLD, PAYMENT)),
        (protobuf, producer.protobuf(message_class(id=1)(id="p1"))),
        (json_schema, producer.json(JSON_OLD, PAYMENT)),
    ]

    for codec, raw in sent:
        found = Reading(FromPayload("id"), codec).read(Record(Coordinates("payments", 0, 7), raw))
        assert isinstance(found, Message), found
        assert found.id == "p1"


def test_an_unknown_schema_is_told_as_such_and_keeps_its_bytes(schema_registry, opened):
    raw = struct.pack(">bI", 0, 4711) + b"\0payload"
    reading = Reading(FromPayload("id"), opened(AvroCodec, schema_registry.url))

    found = reading.read(Record(Coordinates("payments", 0, 7), raw))

    assert isinstance(found, Unreadable)
    assert (found.why, found.record.value) == (Unread.SCHEMA_INCOMPATIBLE, raw)


class Served(Service):
    """A service whose payloads are Avro."""

    def __init__(self, codec: AvroCodec, retry: RetryPolicy = POLICY) -> None:
        super().__init__()
        self.called: list[str] = []
        settings = ConsumerSettings(retry=retry, held_retry_seconds=0.01)

        @consumer("billing", policy=settings, reading=Reading(FromPayload("id"), codec))
        async def handle(message: Message, session: Any) -> None:
            self.called.append(message.id)
            session.add(Effect("paid", message.id))
            self.fail(message)

        self.consumer = handle

    async def letters(self) -> list[Any]:
        async with self.database.begin() as unit:
            return list(await unit.dead_letters.find(DeadLetterFilter(consumer="billing"), 10))


def test_records_come_back_until_the_registry_does_and_are_handled_once(
    schema_registry, producer, opened, monkeypatch
):
    monkeypatch.setattr(codecs, "REST_SECONDS", 0.0)
    service = Served(opened(AvroCodec, schema_registry.url))
    for number in range(3):
        service.broker.put("payments", producer.avro(OLD, {"id": f"p{number}", "amount": 1}))

    async def scenario() -> None:
        runner = await service.runner()
        schema_registry.stop()
        for _ in range(3):
            assert await runner._pass()
        assert (service.called, service.committed, await service.letters()) == ([], {}, [])
        schema_registry.start()
        await runner.run_until_idle()
        await runner._membership.leave()
        await runner.subscription.close()

        assert service.called == ["p0", "p1", "p2"]
        assert service.committed == {"payments/0": 3}
        assert await service.letters() == []

    asyncio.run(scenario())


def test_an_unknown_schema_becomes_a_dead_letter_with_its_bytes_and_blocks_nothing(
    schema_registry, producer, opened
):
    service = Served(opened(AvroCodec, schema_registry.url))
    unknown = struct.pack(">bI", 0, 4711) + b"\0payload"
    service.broker.put("payments", unknown)
    service.broker.put("payments", producer.avro(OLD, PAYMENT))

    async def scenario() -> None:
        await service.work()

        (letter,) = await service.letters()
        assert letter.payload == unknown
        assert [outcome for _, _, outcome in await service.ranges()] == [
            "schema_incompatible",
            "success",
        ]
        assert service.called == ["p1"]

    asyncio.run(scenario())


def test_an_inbox_keeps_what_cannot_be_read_while_the_registry_is_down(
    schema_registry, producer, opened, monkeypatch
):
    monkeypatch.setattr(codecs, "REST_SECONDS", 0.0)
    service = Served(opened(AvroCodec, schema_registry.url))
    raw = producer.avro(OLD, PAYMENT)

    async def scenario() -> None:
        inbox = Inbox(service.consumer, service.database)
        assert isinstance(await inbox.store(Message("p1", None, raw)), Stored)
        worker = InboxWorker(service.consumer, service.database)
        schema_registry.stop()
        running = asyncio.create_task(worker.run_until_empty())
        await asyncio.sleep(1.5)
        assert not running.done()
        assert await service.letters() == []
        schema_registry.start()
        await asyncio.wait_for(running, 20)

        assert service.called == ["p1"]
        assert await service.letters() == []

    asyncio.run(scenario())


def test_a_waiting_message_is_not_parked_while_the_registry_is_down(
    schema_registry, producer, opened, monkeypatch
):
    monkeypatch.setattr(codecs, "REST_SECONDS", 0.0)
    in_table = RetryPolicy(initial_delay_seconds=0.0, mode=RetryMode.RETRY_TABLE)
    service = Served(opened(AvroCodec, schema_registry.url), in_table)
    restarted = Served(opened(AvroCodec, schema_registry.url), in_table)
    for number in range(2):
        service.broker.put("payments", producer.avro(OLD, {"id": f"p{number}", "amount": 1}))

    def fail(message: Message) -> None:
        raise RetryableMessageError("down")

    async def scenario() -> None:
        service.fail = fail
        await service.work()
        schema_registry.stop()
        with pytest.raises(Retryable):
            await retry_due(restarted.consumer, service.database)
        schema_registry.start()
        await retry_due(restarted.consumer, service.database)

        assert restarted.called == ["p0", "p1"]
        assert service.paid == ["p0", "p1"]
        assert await service.letters() == []

    asyncio.run(scenario())


def test_a_codec_is_pickled_as_its_arguments_and_made_once_in_each_process(
    schema_registry, producer, opened, monkeypatch
):
    """Spark sends the consumer to its workers, one of which handles many tasks."""
    sent = message_class(id=1)
    sent.__module__ = __name__  # as the module that protoc writes has its classes
    monkeypatch.setattr(sys.modules[__name__], "Payment", sent, raising=False)
    settings = {"url": schema_registry.url, "basic.auth.user.info": "ann:hunter2"}
    avro = opened(AvroCodec, settings, reader_schema=json.dumps(NEW))
    text = opened(JsonSchemaCodec, settings, json.dumps(JSON_OLD))
    message = opened(ProtobufCodec, settings, message_type=sent)

    reading = pickle.dumps(Reading(FromHeader("id"), codec=avro))
    again, other, third = (pickle.loads(pickle.dumps(one)) for one in (avro, text, message))

    assert again.decode(producer.avro(OLD, PAYMENT), {}) == {**PAYMENT, "currency": "EUR"}
    assert other.decode(producer.json(JSON_OLD, PAYMENT), {}) == PAYMENT
    assert third.decode(producer.protobuf(sent(id="p1")), {}).id == "p1"
    assert pickle.loads(reading).codec is again
    assert pickle.loads(pickle.dumps(again)) is again
    assert "hunter2" not in repr(again) + repr(pickle.loads(reading))
    for one in (again, other, third):
        one.close()
