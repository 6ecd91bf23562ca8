"""Reading a record: decode the payload, find the id, the key, the type and the version.

A record that cannot be read is an answer, `Unreadable`, and not an exception:
its bytes become a dead letter, so its offset is never skipped silently.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias

from semel.errors import Misuse, Permanent, Retryable, reason_of
from semel.message import (
    UNREADABLE,
    Coordinates,
    Message,
    Record,
    StoredRecord,
    digest_of,
    producer_id,
    text_of,
)


class Undecodable(Permanent):
    """The codec cannot read the payload."""


class SchemaIncompatible(Undecodable):
    """The payload is readable, but its schema is not one of this consumer's."""


class Codec(Protocol):
    """Turns a payload's bytes into the handler's payload; never called for a tombstone."""

    name: str

    def decode(self, raw: bytes, headers: Mapping[str, bytes]) -> Any:
        """Read *raw*.

        Raises:
            Undecodable: the bytes are broken; another attempt fails, too.
            SchemaIncompatible: they have another schema; a new release may read them.
            Retryable: what is needed to read them does not answer; the record comes back.
        """
        ...


class JsonCodec:
    """UTF-8 JSON; numbers beyond 64 bits keep their digits, duplicated keys are refused."""

    name = "json"

    def decode(self, raw: bytes, headers: Mapping[str, bytes]) -> Any:
        """Read *raw* as JSON."""
        try:
            text = raw.decode()
            # Its error says what is wrong.
            return json.loads(text) if text.startswith("\ufeff") else _DECODER.decode(text)
        except (ValueError, RecursionError) as error:
            raise Undecodable(f"not JSON: {reason_of(error)}") from error


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


# `json.loads` makes such a decoder at each call.
_DECODER: Final = json.JSONDecoder(object_pairs_hook=_without_repeated_keys)


class RawCodec:
    """The bytes as they are."""

    name = "raw"

    def decode(self, raw: bytes, headers: Mapping[str, bytes]) -> Any:
        """Return *raw*."""
        return raw


@dataclass(frozen=True, slots=True)
class FromHeader:
    """A value that the producer puts into a header."""

    name: str

    def find(self, record: Record, payload: Any) -> Any:
        """Return the header's text, or None."""
        found = record.headers.get(self.name)
        return None if found is None else text_of(found)

    def __str__(self) -> str:
        return f"header {self.name!r}"


@dataclass(frozen=True, slots=True)
class FromPayload:
    """A value in the payload; dots lead into nested objects.

    For an object that the codec made, the attributes are looked up, except methods.  Lists,
    texts and numbers have no fields.
    """

    path: str

    def find(self, record: Record, payload: Any) -> Any:
        """Return the field's value, or None."""
        found = payload
        for step in self.path.split("."):
            found = found.get(step) if isinstance(found, Mapping) else _attribute(found, step)
            if found is None:
                return None
        return found

    def __str__(self) -> str:
        return f"payload field {self.path!r}"


def _attribute(found: Any, name: str) -> Any:
    # An attribute of a built-in value, such as `count` of a list, is not a producer's field.
    value = None if type(found).__module__ == "builtins" else getattr(found, name, None)
    return None if callable(value) else value


@dataclass(frozen=True, slots=True)
class FromCoordinates:
    """``topic/partition/offset``, for producers that give no id.

    Recognises only repeated deliveries of one record.  A message that is produced again, or
    copied to another topic, has other coordinates and is handled again.
    """

    def find(self, record: Record, payload: Any) -> Any:
        """Return the record's coordinates."""
        return str(record.at)

    def __str__(self) -> str:
        return "coordinates"


@dataclass(frozen=True, slots=True)
class FromKey:
    """The record's key."""

    def find(self, record: Record, payload: Any) -> Any:
        """Return the key's text, or None."""
        return None if record.key is None else text_of(record.key)

    def __str__(self) -> str:
        return "record key"


LARGEST_VERSION: Final = 2**63 - 1
"""The largest BIGINT of a database."""

Place: TypeAlias = FromHeader | FromPayload | FromCoordinates | FromKey


class Unread(StrEnum):
    """Why a record could not be read as a message."""

    UNDECODABLE = "undecodable"
    SCHEMA_INCOMPATIBLE = "schema_incompatible"
    NO_ID = "no_id"
    BAD_FIELD = "bad_field"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A record that this consumer cannot read, with its bytes unchanged."""

    record: Record
    why: Unread
    reason: str

    @property
    def id(self) -> str:
        """The id of its dead letter: generated from the coordinates, if the record has none."""
        if isinstance(self.record, StoredRecord):
            return self.record.message.id
        return unreadable_id(self.record.at)


def unreadable_id(at: Coordinates) -> str:
    """Return the generated id of the unreadable record at these coordinates."""
    return f"{UNREADABLE}{at}"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a consumer reads records."""

    id_from: Place
    codec: Codec = field(default_factory=JsonCodec)
    key_from: Place = field(default_factory=FromKey)
    type_from: Place = field(default_factory=lambda: FromPayload("type"))
    version_from: Place | None = None
    schema_version_from: Place = field(default_factory=lambda: FromHeader("schema-version"))
    correlation_from: Place = field(default_factory=lambda: FromHeader("correlation-id"))
    model: Callable[[Any], Any] | None = None
    """Turns the decoded payload into the handler's type, for example a pydantic validator."""

    def read(self, record: Record) -> Message | Unreadable:
        """Turn *record* into a message, or return why that is not possible.

        Raises:
            Retryable: that is not known yet; nothing was decided, and the record must come back.
        """
        try:
            payload = self._decoded(record.value, record.headers)
            if isinstance(record, StoredRecord):
                return self._stored(record, payload)
            found = self.id_from.find(record, payload)
            try:
                message_id = producer_id(found)
            except Misuse as error:
                why = "no message id" if found in (None, "") else str(error)
                return Unreadable(record, Unread.NO_ID, f"{why} in the {self.id_from}")
            return Message(
                id=message_id,
                payload=self._modelled(record.value, payload),
                raw=record.value or b"",
                key=self._text_at(self.key_from, record, payload),
                type=self._text_at(self.type_from, record, payload) or "",
                headers=record.headers,
                source=record.at,
                timestamp=record.timestamp,
                version=self._version(record, payload),
                schema_version=self._text_at(self.schema_version_from, record, payload) or "",
                correlation_id=self._text_at(self.correlation_from, record, payload) or "",
                digest=digest_of(record.value),
            )
        except SchemaIncompatible as error:
            return Unreadable(record, Unread.SCHEMA_INCOMPATIBLE, reason_of(error))
        except Undecodable as error:
            return Unreadable(record, Unread.UNDECODABLE, reason_of(error))
        except (Misuse, Retryable):
            raise
        except Exception as error:  # noqa: BLE001  a model's validator raises what it likes
            return Unreadable(record, Unread.BAD_FIELD, reason_of(error))

    def _stored(self, record: StoredRecord, payload: Any) -> Message:
        """Read what a person may have changed since the record was stored.

        Not the id and the key: a person may have given it another id, and a message that was
        stored in an inbox has them from the code that received it.
        """
        known = record.message
        return replace(
            known,
            payload=self._modelled(record.value, payload),
            type=self._text_at(self.type_from, record, payload) or known.type,
            version=self._version(record, payload),
            schema_version=self._text_at(self.schema_version_from, record, payload)
            or known.schema_version,
            correlation_id=self._text_at(self.correlation_from, record, payload)
            or known.correlation_id,
        )

    def _decoded(self, value: bytes | None, headers: Mapping[str, bytes]) -> Any:
        return None if value is None else self.codec.decode(value, headers)

    def _modelled(self, value: bytes | None, payload: Any) -> Any:
        return payload if value is None or self.model is None else self.model(payload)

    def _text_at(self, place: Place, record: Record, payload: Any) -> str | None:
        found = place.find(record, payload)
        return None if found is None else str(found)

    def _version(self, record: Record, payload: Any) -> int | None:
        if self.version_from is None:
            return None
        found = self.version_from.find(record, payload)
        if found is None or isinstance(found, bool):
            raise Undecodable(f"no version in the {self.version_from}")
        try:
            # int() would truncate 1.5 to 1, and the message would pass for a duplicate.
            version = None if isinstance(found, float) else int(found)
        except (TypeError, ValueError):
            version = None
        if version is None or abs(version) > LARGEST_VERSION:
            raise Undecodable(
                f"the version in the {self.version_from} must be a whole number, got {found!r}"
            )
        return version


def coordinates_of(text: str) -> Coordinates:
    """Read ``topic/partition/offset``.

    Raises:
        Misuse: *text* does not have this form.
    """
    topic, _, rest = text.rpartition("/")
    topic, _, partition = topic.rpartition("/")
    if not topic or not partition.isdecimal() or not rest.isdecimal():
        raise Misuse(f"{text!r} does not have the form topic/partition/offset")
    return Coordinates(topic, int(partition), int(rest))
