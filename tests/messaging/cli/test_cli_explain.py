"""`semel explain`, `gaps` and `audit completeness`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from semel.message import Partition
from semel.messaging.outcome import OutcomeRange
from semel.messaging.send.outbox import outgoing_id
from semel.policy.vocabulary import GapPolicy
from tests.messaging.cli_shop import CONSUMER, MODULE, Shop
from tests.messaging.replay_world import gapped


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(tmp_path / "shop.db", monkeypatch)


def test_a_message_is_explained_to_people_and_to_programs(shop):
    shop.bury("m1")
    shop.act("replay", "run", *CONSUMER, "--dead-letters")

    document = shop.ask("explain", "m1")
    text = shop.read("explain", "m1")

    (story,) = document["stories"]
    assert (story["consumer"], story["standing"]) == ("billing", "it was handled")
    (failed,) = story["failures"]
    assert (failed["number"], failed["error_code"], failed["failure_class"]) == (
        1,
        "REJECTED",
        "poison",
    )
    assert failed["reason"]
    assert f"attempt 1 failed with REJECTED: {failed['reason']}" in " ".join(text.split())
    assert "ann: dlq.retry" in text
    assert "billing: it was handled" in text
    assert story["deliveries"].startswith("none noted at its offset")
    assert f"deliveries: {story['deliveries']}" in text
    assert "those that were delivered are not kept" in story["children"]
    assert "no consumer in" in shop.ask("explain", "m9", code=2)["error"]


def test_what_a_message_sent_is_looked_for_where_one_says(shop):
    shop.deliver("m1")
    child = outgoing_id("billing", "m1", "invoices", 0)
    shop.deliver(child)

    text = " ".join(shop.read("explain", "m1", "--sent-to", "invoices").split())

    assert f"child {child} to invoices, for billing: it was handled" in text
    assert (
        f"number 2 to invoices, if it was sent, is {outgoing_id('billing', 'm1', 'invoices', 1)}"
        in text
    )


def test_gaps_are_listed_and_closed_with_a_reason(shop):
    shop.fill(lambda world: gapped(world, GapPolicy.ALERT))
    close = ("gaps", "close", "--consumer", "billing", "--key", "k")

    listed = shop.ask("gaps", "list", code=1)
    refused = shop.ask(*close, "--yes", code=2)
    closed = shop.act(*close)

    assert [(gap["first_missing"], gap["last_missing"]) for gap in listed["gaps"]] == [(2, 3)]
    assert "needs a reason" in refused["error"]
    assert (len(closed["gaps"]), closed["passed_over"]) == (1, False)
    assert "nothing is missing" in shop.read("gaps", "list")


def test_a_gap_is_passed_over(shop):
    async def fill(world: Any) -> None:
        shop.offer(await gapped(world, GapPolicy.PARK_KEY))

    shop.fill(fill)
    close = ("gaps", "close", "--key", "k", "--pass-over", "--reason", "lost for good")

    refused = shop.ask(*close, "--consumer", "billing", "--yes", code=2)
    text = shop.read(*close, *CONSUMER, answer="y\n")

    assert "2 to 3" in text
    assert "passed over" in text
    assert "--handler MODULE:NAME" in refused["error"]


def test_completeness_names_the_missing_offsets(shop):
    async def record(world: Any) -> None:
        place = Partition("payments", 0)
        async with world.database.begin() as unit:
            await unit.outcomes.record("billing", [OutcomeRange(place, 0, 4, "success")])

    shop.fill(record)
    ask = ("audit", "completeness", "--consumer", "billing")

    whole = shop.ask(*ask)
    broken = shop.ask(*ask, "--committed", "payments/0=8", code=1)
    text = shop.read(*ask, "--committed", "payments/0=8", "--first", "payments/0=0", code=1)

    assert whole["partitions"][0]["complete"]
    assert broken["partitions"][0]["missing"] == [{"first": 5, "last": 7}]
    assert "5 to 7" in text
    assert "1 partition: 1 incomplete" in text
    assert "all accounted for" in shop.read(*ask)
    assert "such as payments/0=1200" in shop.ask(*ask, "--committed", "p=x", code=2)["error"]


def test_completeness_names_what_was_kept_and_is_nowhere_any_more(shop):
    place = Partition("payments", 0)
    outcomes = [(0, 4, "success"), (5, 7, "parked"), (6, 6, "ended_skipped")]

    async def record(world: Any) -> None:
        async with world.database.begin() as unit:
            await unit.outcomes.record("billing", [OutcomeRange(place, *one) for one in outcomes])

    shop.fill(record)
    ask = ("audit", "completeness", "--consumer", "billing")

    (found,) = shop.ask(*ask, code=1)["partitions"]
    text = " ".join(shop.read(*ask, code=1).split())

    nowhere = [{"first": 5, "last": 5}, {"first": 7, "last": 7}]
    assert (found["complete"], found["missing"], found["lost"]) == (False, nowhere, nowhere)
    assert (found["counts"]["handled"], found["counts"]["skipped"]) == (5, 1)
    assert "skipped 1" in text
    assert "payments/0: 5, 7 waited, or were parked or dead" in text
    assert "1 partition: 1 incomplete" in text


def test_completeness_asks_the_broker_about_holes(shop):
    for _ in range(2):
        shop.broker.put("payments", b"{}")
    shop.broker.skip(Partition("payments", 0))

    found = shop.ask(
        *("audit", "completeness", "--consumer", "billing", "--first", "payments/0=0"),
        *("--committed", "payments/0=3", "--reader", f"{MODULE}:reader"),
        code=1,
    )

    (place,) = found["partitions"]
    assert place["missing"] == [{"first": 0, "last": 1}]
    assert place["holes"] == [{"first": 2, "last": 2}]


def test_completeness_of_a_consumer_that_nobody_knows_is_no_good_news(shop):
    ask = ("audit", "completeness", "--consumer", "biling")

    found = shop.ask(*ask, code=1)
    text = shop.read(*ask, code=1)

    assert (found["known"], found["partitions"]) == (False, [])
    assert "nothing is known of a consumer 'biling'" in text
    assert "all accounted for" not in text
