"""Ordinary messages as columns: the same as what the pass makes, message by message."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from dataclasses import fields, replace

import pyarrow as pa
import pytest

from semel.codec import (
    FromCoordinates,
    FromHeader,
    FromKey,
    FromPayload,
    JsonCodec,
    RawCodec,
    Reading,
)
from semel.errors import Retryable
from semel.message import Coordinates, Message, Record, digest_of, headers_from
from semel.messaging.changes import SeenClaim, SeenWaiting
from semel.messaging.failure import CLASSIFICATION
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import Waits
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.policy.vocabulary import RetryMode
from semel.spark.messages.columns import are_possible
from semel.spark.messages.frames import PassTee
from semel.spark.messages.handling import PassSettings, route_of, stored_record

MADE = pa.struct([("n", pa.int64())])
SCHEMA = pa.schema(
    [
        ("route", pa.string()),
        ("place", pa.int64()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.float64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("waiting", pa.string()),
        ("semel_row_0", MADE),
        ("semel_failure", pa.struct([("code", pa.string()), ("reason", pa.string())])),
    ]
)
READINGS = [
    Reading(FromPayload("id")),
    Reading(FromHeader("id")),
    Reading(FromHeader("id"), key_from=FromPayload("of.key")),
    Reading(FromHeader("id"), RawCodec(), type_from=FromHeader("kind")),
    Reading(FromCoordinates()),
    Reading(FromKey(), key_from=FromHeader("id")),
    Reading(FromPayload("of.id"), schema_version_from=FromPayload("type")),
]
ODD_IDS = [
    "",
    7,
    True,
    1.5,
    "é",
    "x" * 600,
    "sha256:1",
    "unreadable:t/0/1",
    "conflict:1",
    "a\0",
    {},
]
ODD_VALUES = [None, b"", b"{", b"\xff", b'{"id": "i1", "id": "i2"}', b"[]", b'"i1"']
ODD = ["held", "key", "id", "type", "payload", "value", "raw key", "headers", "waiting", "failure"]
ODD += ["route"]
POLICY = RetryPolicy(mode=RetryMode.RETRY_TABLE, max_attempts=3, jitter=False)


class Claims:
    """The claims that a database has."""

    def __init__(self, claims):
        self._claims = claims

    def claims(self, message_ids):
        return {one: self._claims[one] for one in message_ids if one in self._claims}

    def suspects(self):
        return {}


class Scene:
    """Random batches, and what the tables know of them."""

    def __init__(self, seed: int) -> None:
        self.pick = pick = random.Random(seed)
        self.oddness = pick.choice([0.02, 0.1, 0.3])
        self.odd = pick.sample(ODD, pick.choice([1, 2, len(ODD)]))
        """What is odd: often one thing only, or another one would hide it."""

        self.reading = pick.choice(READINGS)
        self.ids = [f"i{n}" for n in range(pick.choice([4, 15, 60]))]
        self.keys = [f"k{n}" for n in range(pick.choice([2, 6, 20]))]
        self.shards = pick.choice([1, 1, 2])
        rows = [self.row(n) for n in range(pick.randint(1, 40))]
        rows.sort(key=lambda one: (one["route"], *self.order_of(one)))
        cuts = sorted(pick.randint(0, len(rows)) for _ in range(pick.randint(0, 3)))
        self.batches = [
            pa.RecordBatch.from_pylist(rows[first:last], schema=SCHEMA)
            for first, last in zip([0, *cuts], [*cuts, len(rows)], strict=True)
        ]
        self.routes = {one["semel_row_0"]["n"]: one["route"] for one in rows}
        values = [one["value"] for one in rows]
        self.claims = {
            one: self.claim(digest_of(pick.choice(values)))
            for one in (*self.ids, *self.found)
            if pick.random() < 0.2
        }
        self.held = {one: pick.randint(1, 9) for one in self.keys if self.is_odd("held")}
        self.settings = PassSettings(
            "c",
            None,
            self.reading,
            ConsumerSettings(retry=POLICY, holds_keys=pick.choice([None, None, True])),
            CLASSIFICATION,
            {"rows": 0},
            keeps_claims=pick.random() < 0.8,
            is_lean=pick.random() < 0.3,
        )

    found: dict[str, bytes | None]

    def is_odd(self, what: str) -> bool:
        return what in self.odd and self.pick.random() < self.oddness

    @staticmethod
    def order_of(row):
        place = row["place"]
        return place is None, place or 0, row["topic"], row["partition"], row["offset"]

    def claim(self, digest: str) -> SeenClaim:
        of = self.pick
        state = of.choice([ClaimState.COMPLETED] * 9 + [*ClaimState])
        return SeenClaim(state, 1, of.choice([digest, digest[:32], ""]), of.random() < 0.5)

    def row(self, n: int):
        """Return a row; ids repeat, mostly with the same key and payload."""
        of = self.pick
        if n == 0:
            self.found = {}
        one = of.choice(self.ids)
        number = int(one[1:])
        key = None if number % 7 == 3 else self.keys[number % len(self.keys)]
        kind = "bill"
        if self.is_odd("key"):
            key = of.choice([*self.keys, "é", "k" * 600, None])
        if self.is_odd("id"):
            one = of.choice(ODD_IDS)
        if self.is_odd("type"):
            kind = of.choice([5, {"a": 1}, None, "é"])
        told = {"id": one, "type": kind, "of": {"id": one, "key": key}}
        value = json.dumps(
            told | ({"more": of.random()} if self.is_odd("payload") else {})
        ).encode()
        if self.is_odd("value"):
            value = of.choice(ODD_VALUES)
        raw = None if key is None else key.encode()
        if self.is_odd("raw key"):
            raw = b"\xff"
        headers = [("id", str(one).encode()), ("kind", b"bill"), ("id", str(one).encode())]
        if self.is_odd("headers"):
            headers = of.choice([None, [], [("id", None)], [("id", b"i1"), ("id", b"i2")]])
        record = Record(
            Coordinates(of.choice("tu"), of.randint(0, 2), n),
            value,
            raw,
            headers_from(headers or ()),
        )
        read = self.reading.read(record)
        self.found[read.id] = value
        route = str(record.at)
        if isinstance(read, Message):
            route = route_of(read)
        elif raw is not None:
            route = raw.decode("utf-8", "replace")
        if self.is_odd("route") and of.random() < 0.2:
            route = of.choice(self.keys)
        waiting = place = None
        if isinstance(read, Message) and self.is_odd("waiting"):
            place, seen = n + 1, self.waiting(n + 1, read, record)
            told = {one.name: getattr(seen, one.name) for one in fields(seen)}
            del told["payload"]
            shard = of.randrange(self.shards)
            waiting, value = json.dumps({**told, "shard": shard}), seen.payload
            route = route_of(stored_record(seen).message)
        failure = None
        if self.is_odd("failure"):
            code = of.choice(["DEPENDENCY_UNAVAILABLE", "NO", None])
            failure = {"code": code, "reason": "no"}
        return {
            "route": route,
            "place": place,
            "topic": record.at.topic,
            "partition": record.at.partition,
            "offset": n,
            "timestamp": 1.0,
            "key": raw,
            "value": value,
            "headers": headers and [{"key": name, "value": text} for name, text in headers],
            "waiting": waiting,
            "semel_row_0": {"n": n},
            "semel_failure": failure,
        }

    def waiting(self, place: int, read: Message, record: Record) -> SeenWaiting:
        of = self.pick
        return SeenWaiting(
            place,
            read.id,
            read.key,
            of.choice([Waits.RETRY, Waits.PARKED, Waits.BEHIND]),
            1,
            record.value,
            read.digest,
            "",
            record.at.topic,
            record.at.partition,
            record.at.offset,
            1.0,
            of.choice(["FAILED_RETRYABLE", "COMPLETED", ""]),
            is_due=of.random() < 0.7,
        )


def made(scene, *, has_columns: bool):
    """Return all that the batches make: rows by route, changes, counts; or the error."""
    stores = [(Claims(scene.claims), scene.held) for _ in range(scene.shards)]
    schemas, flags = [pa.schema(list(MADE))], {"is_careful": False, "is_alone": False}
    tee = PassTee([], scene.settings, stores, schemas, attempts=1, **flags)
    assert tee._has_columns
    tee._has_columns = has_columns
    rows, changes = defaultdict(list), Counter()
    try:
        for part in tee.parts(scene.batches):
            for place, batch in part:
                for one in batch.to_pylist():
                    if place == 0:
                        rows[scene.routes[one["n"]]].append(one["n"])
                    else:
                        changes[place, *one.values()] += 1
    except Retryable as error:
        return type(error), str(error)
    return rows, changes, tee._counts.to_json()


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_columns_make_what_the_pass_makes(first):
    for seed in range(first, first + 100):
        scene = Scene(seed)

        found = made(scene, has_columns=True)

        assert found == made(scene, has_columns=False), seed


def test_a_message_that_comes_back_under_another_key_is_found():
    scene = Scene(0)
    scene.settings = replace(scene.settings, reading=Reading(FromPayload("id")), keeps_claims=True)
    scene.claims, scene.held, scene.shards = {}, {}, 1
    told = {"place": 1, "message_id": "i1", "key": "k1", "waits": "retry", "attempts": 0}
    told |= {"payload_hash": digest_of(b'{"id": "i1"}'), "headers": "", "topic": "t"}
    told |= {"partition": 0, "offset": 0, "timestamp": 1.0, "claim_state": "", "shard": 0}
    common = {"topic": "t", "partition": 0, "value": b'{"id": "i1"}'}
    rows = [
        {"route": f"k{n}", "key": b"k%d" % n, "offset": n, "semel_row_0": {"n": n}, **common}
        for n in (1, 2, 3)
    ]
    rows[0]["waiting"] = json.dumps(told)
    rows[2]["value"] = b'{"id": "i3"}'
    scene.batches = [pa.RecordBatch.from_pylist(rows, schema=SCHEMA)]
    scene.routes = {1: "k1", 2: "k2", 3: "k3"}

    found = made(scene, has_columns=True)

    assert found == made(scene, has_columns=False)
    assert found[0] == {"k1": [1], "k3": [3]}


class OwnCodec(JsonCodec):
    """A codec of the user's own, which may need the headers."""


@pytest.mark.parametrize(
    ("given", "reading", "rules"),
    [
        ({"handler": print}, {}, {}),
        ({}, {"codec": OwnCodec()}, {}),
        ({}, {"model": dict}, {}),
        ({}, {"version_from": FromPayload("version")}, {}),
        ({}, {}, {"versioned": True}),
    ],
)
def test_what_columns_cannot_do_is_left_to_the_pass(given, reading, rules):
    def settings(given, reading, rules):
        read, of = Reading(FromHeader("id"), **reading), ConsumerSettings(**rules)
        return PassSettings("c", given.get("handler"), read, of, CLASSIFICATION)

    assert are_possible(settings({}, {}, {}))
    assert not are_possible(settings(given, reading, rules))


@pytest.mark.parametrize("again", ["is_careful", "is_alone"])
def test_an_attempt_that_is_repeated_has_no_columns(again):
    flags = {"is_careful": False, "is_alone": False, again: True}

    tee = PassTee([], Scene(0).settings, [(Claims({}), {})], [], attempts=1, **flags)

    assert not tee._has_columns
