"""`semel outbox`: what waits, what is stuck, and what people do about it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from semel.cli.app import app
from semel.lease import Owner
from semel.messaging.send.outbox import OutboxEntry
from tests.messaging.act_world import acts


async def three_messages(world):
    async with world.database.begin() as unit:
        await unit.outbox.add(
            [OutboxEntry(f"m{n}", "payments", b"secret", "k" if n < 3 else None) for n in (1, 2, 3)]
        )


async def lead(world):
    async with world.database.begin() as unit:
        owner = json.dumps(Owner.here().to_json())
        return await unit.outbox.lead("outbox", owner, 60.0)


async def two_parked(world):
    await three_messages(world)
    leadership = await lead(world)
    async with world.database.begin() as unit:
        first, _, third = await unit.outbox.read("outbox", 0, 10)
        await unit.outbox.park(leadership, first.place, "too large")
        await unit.outbox.park(leadership, third.place, "no such topic")


async def entries(world):
    async with world.database.begin() as unit:
        return [e.message_id for e in await unit.outbox.read("outbox", 0, 10)]


def test_an_empty_outbox_needs_nobody(books):
    document = books.ask("outbox", "status")

    assert (document["pending"], document["parked"], document["leader"]) == (0, 0, None)
    assert "no relay ever ran" in books.read("outbox", "status")


def test_messages_that_nobody_relays_need_somebody(books):
    async def old(world):
        await three_messages(world)
        await world.age(90)

    books.fill(old)

    document = books.ask("outbox", "status", code=1)

    assert document["pending"] == 3
    assert document["oldest_seconds"] >= 90
    assert "1 min 3" in books.read("outbox", "status", code=1)


def test_the_one_who_relays_is_named(books):
    books.fill(three_messages)
    books.fill(lead)

    document = books.ask("outbox", "status")

    assert document["leader"]["owner"] == str(Owner.here())
    assert (document["leader"]["epoch"], document["pending"]) == (1, 3)
    assert document["leader"]["seconds_left"] > 30
    assert "more unless renewed" in books.read("outbox", "status")


def test_a_relay_that_fell_silent_is_named_too(books):
    async def silent(world):
        await lead(world)
        await world.age(61)

    books.fill(silent)

    assert "none; the last was process" in books.read("outbox", "status")


def test_parked_messages_are_listed_without_their_payloads(books):
    books.fill(two_parked)

    document = books.ask("outbox", "parked")

    assert [(m["message_id"], m["reason"]) for m in document["messages"]] == [
        ("m1", "too large"),
        ("m3", "no such topic"),
    ]
    shown = books.read("outbox", "parked", "-n", "1")
    assert "1 of 2 parked messages" in shown
    assert "secret" not in shown + json.dumps(document)
    assert books.ask("outbox", "status", code=1)["parked"] == 2
    for command in ("status", "parked"):
        unknown = books.ask("outbox", command, "--outbox", "other", code=2)
        assert "there is no outbox 'other' in this database; it has outbox" in unknown["error"]


def test_parked_messages_are_sent_again_one_by_one_and_it_is_written_down(books):
    books.fill(two_parked)

    document = books.act("outbox", "retry", "m1", "m2", "m3", code=1)

    assert [one["done"] for one in document["messages"]] == [True, False, True]
    assert "no parked message 'm2'" in document["messages"][1]["why_not"]
    assert books.fill(entries) == ["m1", "m2", "m3"]
    assert books.fill(acts) == [("ann", "outbox.retry", "m1"), ("ann", "outbox.retry", "m3")]


@pytest.mark.parametrize(
    ("filters", "sent"),
    [
        ((), ["m1", "m3"]),
        (("--topic", "payments"), ["m1", "m3"]),
        (("--topic", "refunds"), []),
        (("--refused-with", "such TOPIC"), ["m3"]),
        (("--topic", "payments", "--refused-with", "too large"), ["m1"]),
    ],
)
def test_all_parked_messages_are_sent_again_or_those_that_are_meant(books, filters, sent):
    books.fill(two_parked)

    document = books.act("outbox", "retry", "--all", *filters)

    assert [(m["message_id"], m["done"]) for m in document["messages"]] == [
        (one, True) for one in sent
    ]
    assert books.fill(entries) == sorted({"m2", *sent})
    assert books.fill(acts) == [("ann", "outbox.retry", one) for one in sent]


def test_all_says_how_many_before_it_is_done(books):
    books.fill(two_parked)

    asked = books.read("outbox", "retry", "--all", answer="n\n", code=130)

    assert "Send 2 messages of outbox again?" in asked
    assert books.ask("outbox", "parked")["total"] == 2
    assert "no such parked message" in books.read("outbox", "retry", "--all", "--topic", "other")


def test_what_was_erased_is_not_among_all(books):
    async def erase_one(world):
        await two_parked(world)
        async with world.database.begin() as unit:
            await unit.outbox.erase(message_id="m1")

    books.fill(erase_one)

    document = books.act("outbox", "retry", "--all")

    assert [one["message_id"] for one in document["messages"]] == ["m3"]


@pytest.mark.parametrize("wrong", [(), ("m1", "--all"), ("m1", "--topic", "payments")])
def test_retrying_needs_names_or_all_and_not_both(books, wrong):
    books.fill(two_parked)

    done = CliRunner().invoke(app, ["outbox", "retry", *wrong, "--yes"])

    assert done.exit_code == 2
    assert "name the messages, or say --all" in done.output
    assert books.ask("outbox", "parked")["total"] == 2


def test_dropping_needs_a_reason_and_is_written_down(books):
    books.fill(two_parked)

    refused = books.ask("outbox", "drop", "m1", "--actor", "ann", "--yes", code=1)
    assert "needs a reason" in refused["messages"][0]["why_not"]
    assert books.ask("outbox", "parked")["total"] == 2
    dropped = books.read("outbox", "drop", "m1", "--actor", "ann", "--reason", "told", "--yes")

    assert "dropped" in dropped
    assert books.ask("outbox", "parked")["total"] == 1
    assert books.fill(acts) == [("ann", "outbox.drop", "m1")]


def test_nothing_is_done_before_somebody_agrees(books):
    books.fill(two_parked)

    books.read("outbox", "drop", "m1", "--reason", "told", answer="n\n", code=130)

    assert books.ask("outbox", "parked")["total"] == 2
