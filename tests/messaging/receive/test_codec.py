"""From a record to a message: ids from declared places only, and nothing unreadable is lost."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from semel.codec import (
    FromCoordinates,
    FromHeader,
    FromKey,
    FromPayload,
    JsonCodec,
    RawCodec,
    Reading,
    SchemaIncompatible,
    Undecodable,
    Unread,
    Unreadable,
    coordinates_of,
)
from semel.errors import Misuse
from semel.message import Coordinates, Message, Record, digest_of, json_of, raw_of
from semel.messaging.handle.claims import ClaimRequest
from semel.messaging.records import stored_id

AT = Coordinates("orders", 3, 42)


def record(
    value: bytes | None = b"{}",
    key: bytes | None = None,
    headers: dict[str, bytes] | None = None,
) -> Record:
    return Record(AT, value, key, headers or {}, 12.5)


def read(value: Any, id_from: Any = None, **options: Any) -> Message | Unreadable:
    raw = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
    given = {name: options.pop(name) for name in ("key", "headers") if name in options}
    reading = Reading(id_from or FromPayload("id"), **options)
    return reading.read(record(raw, **given))


def understood(found: Message | Unreadable) -> Message:
    assert isinstance(found, Message), found
    return found


def refused(found: Message | Unreadable) -> Unreadable:
    assert isinstance(found, Unreadable), found
    return found


def test_a_message_has_whatever_its_record_says():
    headers = {"message-id": b"m1", "correlation-id": b"c", "schema-version": b"7"}
    found = understood(
        read(
            {"type": "paid", "v": 4},
            FromHeader("message-id"),
            key=b"alice",
            headers=headers,
            version_from=FromPayload("v"),
        )
    )

    assert (found.id, found.key, found.type, found.version) == ("m1", "alice", "paid", 4)
    assert (found.correlation_id, found.schema_version) == ("c", "7")
    assert (found.source, found.timestamp, found.headers) == (AT, 12.5, headers)
    assert found.raw == b'{"type": "paid", "v": 4}'
    assert found.digest == digest_of(found.raw)
    assert (found.is_duplicate, found.attempt) == (False, 1)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (FromHeader("event"), "from header"),
        (FromPayload("id"), "from payload"),
        (FromPayload("meta.event.id"), "nested"),
        (FromCoordinates(), "orders/3/42"),
        (FromKey(), "the key"),
    ],
)
def test_the_id_comes_from_the_declared_place(place, expected):
    payload = {"id": "from payload", "meta": {"event": {"id": "nested"}}}

    found = read(payload, place, key=b"the key", headers={"event": b"from header"})

    assert understood(found).id == expected


@pytest.mark.parametrize(
    "place",
    [
        FromHeader("event"),
        FromPayload("absent"),
        FromPayload("meta.absent.id"),
        FromPayload("text.id"),
        FromKey(),
    ],
)
def test_a_message_without_an_id_is_refused_and_says_where_it_was_looked_for(place):
    found = refused(read({"meta": {}, "text": "plain"}, place))

    assert found.why is Unread.NO_ID
    assert str(place) in found.reason
    assert found.id == "unreadable:orders/3/42"


@pytest.mark.parametrize("wrong", ["", None, True, False, 1.5, [], ["a"], {}, {"a": 1}])
def test_an_id_is_a_text_or_a_whole_number(wrong):
    assert refused(read({"id": wrong})).why is Unread.NO_ID


def test_an_empty_header_or_key_is_no_id():
    assert refused(read({}, FromHeader("id"), headers={"id": b""})).why is Unread.NO_ID
    assert refused(read({}, FromKey(), key=b"")).why is Unread.NO_ID


@given(st.integers())
def test_a_whole_number_of_any_size_is_an_id_with_all_its_digits(number):
    assert understood(read({"id": number})).id == str(number)


def test_numbers_beyond_64_bits_keep_their_digits():
    assert understood(read(b'{"id": "m", "n": 123456789012345678901234567890}')).payload["n"] == (
        123456789012345678901234567890
    )


def test_a_number_that_is_absurdly_long_is_unreadable_and_not_a_crash():
    assert refused(read(b'{"id": ' + b"9" * 10_000 + b"}")).why is Unread.UNDECODABLE


@given(st.binary(min_size=1), st.binary(min_size=1))
@example(b"\xff", b"\\xff")
@example(b"\xed\xa0\x80", b"\\ud800")
def test_two_ids_in_a_header_are_one_only_if_their_bytes_are(first, second):
    found = [
        stored_id(understood(read({}, FromHeader("id"), headers={"id": raw})).id)
        for raw in (first, second)
    ]

    assert (found[0] == found[1]) == (first == second)


@given(st.binary())
def test_a_key_of_any_bytes_is_read_as_text_that_gives_them_back(raw):
    key = understood(read({}, FromCoordinates(), key=raw)).key

    assert key is not None
    assert raw_of(key) == raw


@given(st.text(st.characters(codec=None)))
def test_any_text_can_be_written_as_bytes(text):
    assert isinstance(raw_of(text), bytes)


def test_a_number_and_its_digits_are_one_id():
    as_number, as_text = (understood(read({"id": given})) for given in (17, "17"))

    assert as_number.id == as_text.id == "17"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"not json",
        b'{"id": "a", "id": "b"}',
        b'{"id": "m", "deep": {"k": 1, "k": 2}}',
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "not utf-8", "text", "key twice", "nested key twice", "deep"],
)
def test_what_is_no_json_is_undecodable_and_keeps_its_bytes(raw):
    found = refused(read(raw))

    assert found.why is Unread.UNDECODABLE
    assert found.record.value == raw


@pytest.mark.parametrize("payload", [[], "text", 5, True])
def test_json_that_is_no_object_has_no_id_in_it(payload):
    assert refused(read(payload)).why is Unread.NO_ID


@pytest.mark.parametrize("payload", [[], "text", 5])
def test_json_that_is_no_object_can_have_its_id_elsewhere(payload):
    assert understood(read(payload, FromCoordinates())).payload == payload


@given(st.binary(max_size=64))
def test_no_bytes_make_the_reading_raise(raw):
    found = Reading(FromPayload("id")).read(record(raw))

    assert isinstance(found, Message | Unreadable)


@pytest.mark.parametrize("codec", [JsonCodec(), RawCodec()])
def test_a_tombstone_has_no_payload_and_is_shown_to_no_codec_and_no_model(codec):
    found = understood(read(None, FromKey(), key=b"k", codec=codec, model=len))

    assert (found.payload, found.raw, found.type) == (None, b"", "")
    assert found.digest != digest_of(b"")


def test_a_tombstone_cannot_have_its_id_in_its_payload():
    assert refused(read(None)).why is Unread.NO_ID


def test_raw_bytes_are_handed_on_as_they_are():
    found = understood(read(b"\x00\xff", FromKey(), key=b"k", codec=RawCodec()))

    assert found.payload == b"\x00\xff"


@dataclass
class Payment:
    """What a model's validator makes."""

    amount: int


class ValidationError(ValueError):
    """As pydantic's: an error with a text of its own."""

    def __str__(self) -> str:
        return "1 validation error for Payment\namount\n  Input should be a valid integer"


def validate(payload: Any) -> Payment:
    if not isinstance(payload.get("amount"), int):
        raise ValidationError
    return Payment(payload["amount"])


def test_a_model_makes_the_handlers_own_type():
    assert understood(read({"id": "m", "amount": 5}, model=validate)).payload == Payment(5)


def test_what_a_model_refuses_is_unreadable_with_its_reason():
    found = refused(read({"id": "m", "amount": "five"}, model=validate))

    assert found.why is Unread.BAD_FIELD
    assert "validation error" in found.reason


def test_a_model_may_raise_anything():
    def explode(payload: Any) -> Any:
        raise KeyError("amount")

    assert refused(read({"id": "m"}, model=explode)).why is Unread.BAD_FIELD


def test_a_program_that_is_wrong_is_not_taken_for_a_broken_record():
    def misuse(payload: Any) -> Any:
        raise Misuse("the model was given twice")

    with pytest.raises(Misuse):
        read({"id": "m"}, model=misuse)


class Versioned:
    """A codec that knows one version of a schema."""

    name = "versioned"

    def decode(self, raw: bytes, headers: Any) -> Any:
        if headers.get("schema-version") != b"1":
            raise SchemaIncompatible("schema version 2 is not known to this release")
        return JsonCodec().decode(raw, headers)


def test_a_schema_that_is_not_known_is_told_from_broken_bytes():
    known = read({"id": "m"}, codec=Versioned(), headers={"schema-version": b"1"})
    unknown = read({"id": "m"}, codec=Versioned(), headers={"schema-version": b"2"})
    broken = read(b"{", codec=Versioned(), headers={"schema-version": b"1"})

    assert understood(known).id == "m"
    assert refused(unknown).why is Unread.SCHEMA_INCOMPATIBLE
    assert refused(broken).why is Unread.UNDECODABLE


@pytest.mark.parametrize(
    ("version", "expected"), [(1, 1), ("7", 7), (0, 0), (2**63 - 1, 2**63 - 1)]
)
def test_a_version_is_a_whole_number(version, expected):
    found = read({"id": "m", "v": version}, version_from=FromPayload("v"))

    assert understood(found).version == expected


@pytest.mark.parametrize("version", [None, True, "x", "", 1.5, 4.0, [], {}, 2**63])
def test_a_version_that_is_none_makes_the_message_unreadable(version):
    found = read({"id": "m", "v": version}, version_from=FromPayload("v"))

    assert refused(found).why is Unread.UNDECODABLE


def test_the_same_bytes_have_the_same_hash_and_others_another():
    one, same, other = (understood(read(raw)) for raw in (b'{"id":1}', b'{"id":1}', b'{"id": 1}'))

    assert one.digest == same.digest
    assert one.digest != other.digest


@given(st.text(st.characters(exclude_characters="\n"), min_size=1), st.integers(0), st.integers(0))
def test_coordinates_are_read_as_they_are_written(topic, partition, offset):
    assert coordinates_of(str(Coordinates(topic, partition, offset))) == Coordinates(
        topic, partition, offset
    )


@pytest.mark.parametrize("text", ["", "topic", "topic/1", "topic/x/1", "topic/1/x", "/1/2"])
def test_what_are_no_coordinates_is_refused(text):
    with pytest.raises(Misuse):
        coordinates_of(text)


def test_undecodable_is_permanent_and_names_what_it_is_not():
    with pytest.raises(Undecodable, match="not JSON"):
        JsonCodec().decode(b"{", {})


@pytest.mark.parametrize(
    ("payload", "name"),
    [(["a", "b"], "count"), ("plain", "title"), (7, "real"), ({"n": 7}, "n.numerator")],
)
def test_what_python_adds_to_a_list_a_text_or_a_number_is_no_field_of_the_payload(payload, name):
    place = FromPayload(name)

    assert refused(read(payload, place)).why is Unread.NO_ID
    found = understood(read(payload, FromCoordinates(), key_from=place, type_from=place))
    assert (found.key, found.type) == (None, "")


def test_attributes_of_a_codecs_own_objects_are_fields_and_their_methods_are_not():
    class Order(NamedTuple):
        id: str
        place: tuple[int, ...]

    class Orders:
        name = "orders"

        def decode(self, raw, headers):
            return Order(raw.decode(), (1, 2))

    def reading(path):
        return Reading(FromPayload(path), codec=Orders()).read(record(b"order-7"))

    assert understood(reading("id")).id == "order-7"
    for path in ("count", "place.count", "id.title"):
        assert refused(reading(path)).why is Unread.NO_ID


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    ("payload", "written"),
    [
        ({"tags": {"b", "a", "c"}}, b'{"tags":["a","b","c"]}'),
        ({"mixed": frozenset({1, "x"})}, b'{"mixed":["x",1]}'),
        ({"colour": Colour.RED}, b'{"colour":"red"}'),
        ([{Colour.BLUE}], b'[["blue"]]'),
    ],
)
def test_sets_and_enums_have_a_hash_that_tells_them_apart(payload, written):
    assert json_of(payload) == written


def test_a_message_without_an_id_cannot_be_claimed():
    with pytest.raises(Misuse, match="without an id"):
        ClaimRequest("")
