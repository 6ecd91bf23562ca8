"""`semel consumers` and `semel inbox`, unknown names, and questions about nothing."""

from __future__ import annotations

import asyncio

import pytest

from semel.message import Message, Partition
from semel.messaging.handler import consumer
from semel.messaging.records import Gap, InboxMessage, Member
from semel.messaging.send.outbox import OutboxEntry
from semel.messaging.settings import ConsumerSettings
from semel.operate.consumers import overview
from semel.sql.database import SqlDatabase
from tests.messaging.act_world import bury, park
from tests.stores.world import DatabaseWorld

ON = ("--consumer", "billing")


@consumer("billing", policy=ConsumerSettings(versioned=True))
async def billing(message): ...


async def fill(world):
    await bury(world, "d1")
    await park(world, "p1", "p2", key="k")
    stored = InboxMessage.of("inboxed", Message("i1", {"n": 1}, b'{"n": 1}'))
    running = Member(
        "outage", "one", "{}", frozenset({Partition("t", 0)}), 10, standing_since=1e9, lag=17
    )
    async with world.database.begin() as unit:
        await unit.inbox.store(stored)
        await unit.members.enter(running, 60.0)
        await unit.versions.open_gap(Gap("gapped", "k", 2, 4))
        await unit.outbox.add([OutboxEntry("o1", "payments", b"{}")])


@pytest.fixture
def books(books):
    books.fill(fill)
    return books


def test_every_consumer_is_on_one_page_with_what_needs_a_person(books):
    found = books.ask("consumers", code=1)

    by_name = {one["consumer"]: one for one in found["consumers"]}
    assert sorted(by_name) == ["billing", "gapped", "inboxed", "outage"]
    billing = by_name["billing"]
    assert (billing["dead_letters"], billing["parked"], billing["parked_keys"]) == (1, 1, 1)
    assert (by_name["gapped"]["gaps"], by_name["inboxed"]["inbox"]) == (1, 1)
    outage = by_name["outage"]
    assert (outage["processes"], outage["lag"], outage["standing_since"]) == (1, 17, 1e9)
    assert all(one["needs_attention"] for one in by_name.values())
    assert found["outboxes"][0]["pending"] == 1

    text = books.read("consumers", code=1)
    assert "2001-09-09" in text
    assert "outbox outbox: 1 pending, 0 parked, no relay runs" in text
    assert "dead letters" in text
    assert "stale claims" not in text, "a column in which no consumer has anything"


def test_nothing_needs_a_person_where_nothing_waits(tmp_path, monkeypatch, books):
    empty = type(books)(tmp_path / "empty.db")
    monkeypatch.setenv("SEMEL_DATABASE", empty.url)

    assert empty.ask("consumers")["consumers"] == []
    assert "no consumer has written anything" in empty.read("consumers")


def test_the_inbox_is_listed_without_payloads(books):
    found = books.ask("inbox", "--consumer", "inboxed")

    assert [one["message_id"] for one in found["messages"]] == ["i1"]
    assert (found["due"], "payload" in found["messages"][0]) == (1, False)
    assert found["has_more"] is False
    assert "i1" in books.read("inbox", "--consumer", "inboxed")

    async def more(world):
        async with world.database.begin() as unit:
            await unit.inbox.store(InboxMessage.of("inboxed", Message("i2", {}, b"{}")))

    books.fill(more)
    first = books.read("inbox", "--consumer", "inboxed", "--limit", "1")
    assert "1 message in inbox inboxed, 2 due; there are more, see --limit" in first


@pytest.mark.parametrize(
    "command",
    [
        ("dlq", "list"),
        ("parking", "list"),
        ("parking", "keys"),
        ("claims", "list"),
        ("gaps", "list"),
        ("inbox",),
        ("audit", "completeness"),
        ("replay", "list"),
    ],
)
def test_a_consumer_that_nobody_knows_is_a_wrong_argument_everywhere(books, command):
    error = books.ask(*command, "--consumer", "biling", code=2)["error"]

    assert "there is no consumer 'biling'" in error
    assert "billing, gapped" in error


@pytest.mark.parametrize(
    "command",
    [
        ("dlq", "retry", "nothing", *ON),
        ("dlq", "park", "nothing", *ON),
        ("dlq", "skip", "nothing", *ON),
        ("dlq", "delete", "nothing", *ON),
        ("parking", "classify", "nothing", *ON, "--label", "x"),
        ("parking", "release", "nothing", *ON),
        ("parking", "skip", "nothing", *ON),
        ("parking", "delete", "nothing", *ON),
        ("outbox", "retry", "nothing"),
        ("outbox", "drop", "nothing"),
        ("gaps", "close", "--key", "nothing", *ON),
        ("consumer", "hand-over", "billing"),
        ("gaps", "close", "--key", "nothing", "--pass-over", "--handler", f"{__name__}:billing"),
    ],
)
def test_nothing_is_asked_about_what_does_not_exist(books, command):
    text = books.read(*command, "--actor", "ann", "--reason", "because", code=2)

    assert "[y/N]" not in text
    assert "nothing" in text


@pytest.mark.parametrize("more", [(), ("--refuse",)])
def test_nothing_is_asked_about_a_request_that_does_not_exist_or_is_decided(books, more):
    ann, bob = ("--actor", "ann", "--reason", "because"), ("--actor", "bob", *more)
    assert "there is no request 1" in books.read("parking", "approve", "1", *bob, code=2)

    books.act("dlq", "delete", "d1", *ON, "--actor", "ann")
    asked = books.read("parking", "approve", "1", *bob, answer="n\n", code=130)
    books.ask("parking", "approve", "1", *bob, "--shared-account", "--yes")
    decided = books.read("parking", "approve", "1", *ann, code=2)

    assert "d1 of billing" in asked
    assert "request 1 was decided already" in decided
    assert "[y/N]" not in decided


@pytest.mark.postgres
def test_names_are_found_in_postgresql_too(postgres_url):
    async def scenario():
        database = SqlDatabase(postgres_url)
        try:
            await database.create_tables()
            await fill(DatabaseWorld(database, None))
            return await overview(database)
        finally:
            await database.close()

    found = asyncio.run(scenario())
    assert [one.consumer for one in found.consumers] == ["billing", "gapped", "inboxed", "outage"]
