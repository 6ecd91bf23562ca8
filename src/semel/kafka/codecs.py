"""Codecs for what Confluent's serialisers write: Avro, Protobuf and JSON Schema.

    0 │ schema id, 4 bytes │ message indexes (Protobuf) │ payload
    or the payload alone, and the schema's GUID in the header `__value_schema_id`

    the schema registry does not answer                         Retryable            it comes back
    it does not know the schema, or the reader cannot use it    SchemaIncompatible   dead letter
    no framing, or a payload that is broken under its schema    Undecodable          dead letter

`decode` runs on the event loop.  The first look-up of a schema blocks it, for 3 seconds at most
unless the settings say otherwise; the client keeps the schema for all later messages.  A question
that got no answer is not repeated for a second.  Reasons never quote a payload.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Self, TypeAlias

from semel.clock import SYSTEM_CLOCK
from semel.codec import JsonCodec, SchemaIncompatible, Undecodable
from semel.errors import Misuse, Retryable, SemelError, reason_of, require
from semel.message import pairs_of
from semel.secrets import masked, scrubbed

RegistryAddress: TypeAlias = str | Mapping[str, Any]
"""A URL, or the settings of confluent_kafka's `SchemaRegistryClient`."""

# The event loop waits for the answer: the runner tries again, and not the client.
DEFAULTS: Final = {"timeout": 3.0, "max.retries": 0}
REST_SECONDS: Final = 1.0

# A registry numbers schemas by Java's int, and answers a larger id like a wrong URL.
LARGEST_ID: Final = 2**31 - 1
# The registry's own answers.  A plain 404 may come from a proxy in front of it.
NOT_FOUND: Final = range(40400, 40500)

LOOK_UPS: Final = {"get_schema": "schema id", "get_schema_by_guid": "schema GUID"}
RUN_ON_READ: Final = frozenset({"READ", "WRITEREAD"})


class _OtherSchema(Exception):
    """The reader cannot use the producer's schema."""


class _RegistryCodec:
    """What the three codecs share: the framing, and the meaning of errors."""

    name: str
    _kind: str
    _reads_as = "the reader's schema"
    _unresolvable: tuple[type[Exception], ...] = (_OtherSchema,)
    _read: Callable[[bytes, Any], Any]
    _arguments: tuple[Any, ...]

    def __new__(cls, *args: Any, **named: Any) -> Self:
        """Keep the arguments: a codec is pickled as these, because its client cannot be."""
        made = super().__new__(cls)
        made._arguments = (uuid.uuid4().hex, cls, args, named)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_once, self._arguments

    def __init__(self, registry: RegistryAddress) -> None:
        self._package = require("confluent_kafka.schema_registry", "schema-registry")
        self._serde = require("confluent_kafka.schema_registry.serde", "schema-registry")
        self._values = require("confluent_kafka.serialization", "schema-registry")
        self._registry = _Registry(registry, self._package, self._kind)
        self._conf = {"subject.name.strategy": self._subject}

    def decode(self, raw: bytes, headers: Mapping[str, bytes]) -> Any:
        """Read *raw*, whose schema the registry knows.

        Raises:
            Undecodable: no framing, or the payload is broken under its own schema.
            SchemaIncompatible: the registry or the reader does not know its schema.
            Retryable: the registry does not answer; nothing was decided.
        """
        value = self._values.MessageField.VALUE
        context = self._values.SerializationContext(None, value, list(pairs_of(headers)))
        schema = self._schema_named_in(raw, context)
        try:
            return self._read(raw, context)
        except SemelError:
            raise
        except self._unresolvable as error:
            told = f"{schema} of {self._registry} cannot be read as {self._reads_as}"
            raise SchemaIncompatible(told) from error
        except Exception as error:
            told = f"the payload is broken under {schema}: {type(error).__name__}"
            raise Undecodable(told) from error

    def close(self) -> None:
        """Close the connections to the registry."""
        self._registry.client.__exit__(None, None, None)

    def _schema_named_in(self, raw: bytes, context: Any) -> str:
        found = self._serde.SchemaId(self._kind)
        try:
            self._package.dual_schema_id_deserializer(raw, context, found)
        except Exception as error:
            told = "there is no magic byte with a schema id, in the payload or in a header"
            raise Undecodable(told) from error
        if found.id is None:
            return f"{LOOK_UPS['get_schema_by_guid']} {found.guid}"
        if found.id > LARGEST_ID:
            raise Undecodable(f"{found.id} is no schema id: it is larger than {LARGEST_ID}")
        return f"{LOOK_UPS['get_schema']} {found.id}"

    def _subject(self, context: Any, written: str | None) -> None:
        """Return no subject: with one, the client would run the rules of schemas."""


_MADE: Final[dict[str, _RegistryCodec]] = {}


def _made_once(key: str, cls: type[_RegistryCodec], args: Any, named: Any) -> _RegistryCodec:
    """Make a codec that was pickled, once in this process: its client keeps the schemas."""
    if key not in _MADE:
        made = _MADE[key] = cls(*args, **named)
        made._arguments = (key, cls, args, named)
    return _MADE[key]


class AvroCodec(_RegistryCodec):
    """Avro; the payload is a dict.

    With *reader_schema*, as JSON or as a `Schema` of confluent_kafka, the producer's schema is
    resolved to it by Avro's rules: fields with a default may be missing, others are left out.
    """

    name = "avro"
    _kind = "AVRO"

    def __init__(self, registry: RegistryAddress, reader_schema: Any = None) -> None:
        avro = require("confluent_kafka.schema_registry.avro", "schema-registry")
        fastavro = require("fastavro", "schema-registry")
        super().__init__(registry)
        broken = (fastavro.schema.SchemaParseException, fastavro.schema.UnknownType)
        self._unresolvable = (fastavro.read.SchemaResolutionError, *broken)
        self._read = _made(avro.AvroDeserializer, self._registry, reader_schema, conf=self._conf)


class ProtobufCodec(_RegistryCodec):
    """Protobuf; the payload is a *message_type*, a class that protoc generated.

    The producer's message must have the same full name.  As always in Protobuf, fields that the
    class does not have are passed over, and a field that is not set has its default.
    """

    name = "protobuf"
    _kind = "PROTOBUF"

    def __init__(self, registry: RegistryAddress, message_type: Any) -> None:
        protobuf = require("confluent_kafka.schema_registry.protobuf", "schema-registry")
        super().__init__(registry)
        self._message = message_type.DESCRIPTOR.full_name
        self._reads_as = f"the message {self._message}"
        self._read = _made(protobuf.ProtobufDeserializer, message_type, self._conf, self._registry)

    def _subject(self, context: Any, written: str | None) -> None:
        # The client parses the bytes of any message, and tells the written one's name only here.
        if written not in (None, self._message):
            raise _OtherSchema


class JsonSchemaCodec(_RegistryCodec):
    """JSON that is valid under its producer's schema, and under *schema* if that is given."""

    name = "json-schema"
    _kind = "JSON"

    def __init__(self, registry: RegistryAddress, schema: Any = None) -> None:
        package = require("confluent_kafka.schema_registry.json_schema", "schema-registry")
        super().__init__(registry)
        options = {
            "schema_registry_client": self._registry,
            "conf": self._conf,
            "json_decode": lambda raw: JsonCodec().decode(raw, {}),
        }
        # The client checks one schema only: the reader's, if it has one.
        self._as_written = self._read = _made(package.JSONDeserializer, None, **options)
        if schema is not None:
            self._as_wanted = _made(package.JSONDeserializer, schema, **options)
            self._read = self._as_both

    def _as_both(self, raw: bytes, context: Any) -> Any:
        found = self._as_written(raw, context)
        try:
            self._as_wanted(raw, context)
        except self._values.SerializationError as error:
            raise _OtherSchema from error
        return found


def _made(make: Callable[..., Any], *args: Any, **named: Any) -> Any:
    try:
        return make(*args, **named)
    except SemelError:
        raise
    except Exception as error:
        raise Misuse(f"the codec's schema is wrong: {reason_of(error)}") from error


class _Registry:
    """The registry's client; its errors say what becomes of the message."""

    def __init__(self, address: RegistryAddress, package: Any, kind: str) -> None:
        settings = {"url": address} if isinstance(address, str) else dict(address)
        self._urls = str(settings.get("url", "")).split(",")
        self._kind = kind
        self._not_before: dict[tuple[Any, ...], float] = {}
        try:
            self.client = package.SchemaRegistryClient({**DEFAULTS, **settings})
        except Exception as error:
            raise Misuse(f"{self}: {self._reason(error)}") from error

    def __str__(self) -> str:
        return f"schema registry {','.join(map(masked, self._urls))}"

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.client, name)
        return partial(self._ask, name, found) if callable(found) else found

    def _ask(self, name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        question, what = (name, *args), f"{LOOK_UPS.get(name, name)} {args[0] if args else ''}"
        if SYSTEM_CLOCK.monotonic() < self._not_before.get(question, 0.0):
            raise Retryable(f"{self} did not answer for {what}; it is asked again soon")
        try:
            answer = call(*args, **named)
        except Exception as error:
            if getattr(error, "error_code", None) in NOT_FOUND:
                raise SchemaIncompatible(f"{self} does not know {what}") from error
            self._not_before[question] = SYSTEM_CLOCK.monotonic() + REST_SECONDS
            raise Retryable(f"{self} does not answer for {what}: {self._reason(error)}") from error
        self._not_before.pop(question, None)
        if name in LOOK_UPS and (why := self._unusable(answer)):
            raise SchemaIncompatible(f"{what} of {self} {why}")
        return answer

    def _unusable(self, schema: Any) -> str | None:
        if schema.schema_type != self._kind:
            return f"is of type {schema.schema_type}, and this codec reads {self._kind}"
        rules = schema.rule_set
        steps = () if rules is None else (rules.domain_rules, getattr(rules, "encoding_rules", ()))
        if any(rule.mode in RUN_ON_READ for step in steps for rule in step or ()):
            return "has rules to run on reading, such as decryption, and semel runs none"
        return None

    def _reason(self, error: Exception) -> str:
        text = reason_of(error)
        for url in self._urls:
            text = scrubbed(text, url)
        return text
