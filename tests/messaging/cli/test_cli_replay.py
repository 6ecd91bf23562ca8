"""`semel replay`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from semel.cli.selection import selection_of, words_of
from semel.errors import Misuse
from semel.message import Message, Partition
from semel.messaging.handle.lease import Lease
from semel.messaging.handler import consumer
from semel.messaging.records import DeadLetterFilter, WaitingFilter, Waits
from semel.messaging.settings import ReplayRule, ReplayRules
from semel.operate.selection import Ids, Letters, Offsets, Times, Waiting
from semel.policy.vocabulary import Mode
from semel.testing.clock import SimulatedClock
from tests.messaging.cli_shop import CONSUMER, MODULE, Shop
from tests.messaging.replay_world import PARKS, pay


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    return Shop(tmp_path / "shop.db", monkeypatch)


def test_dead_letters_are_replayed(shop):
    shop.bury("m1", "m2")

    document = shop.act("replay", "run", *CONSUMER, "--dead-letters", "--name", "again")

    assert document["counts"] | {"handled": 2, "failed": 0} == document["counts"]
    assert (document["state"], document["name"]) == ("finished", "again")
    assert document["selection"]["kind"] == "letters"
    assert shop.paid() == ["m1", "m2"]


def test_a_replay_asks_before_it_begins_and_behind_its_canary(shop):
    shop.bury("m1", "m2", "m3")
    run = ("replay", "run", *CONSUMER, "--dead-letters", "--name", "again", "--actor", "ann")

    text = shop.read(*run, answer="y\ny\ny\n")

    assert "Replay dead letters (all)" in text
    assert text.count("Go on?") == 1
    assert "1 tried: look at what they did" in text
    assert "finished" in text
    assert shop.paid() == ["m1", "m2", "m3"]


@pytest.mark.parametrize("which", [("--message", "nobody"), ("--name", "nobody")])
def test_nothing_is_asked_about_a_message_or_a_replay_that_does_not_exist(shop, which):
    shop.bury("m1")

    text = shop.read("replay", "run", *CONSUMER, *which, "--reason", "x", code=2)

    assert "'nobody'" in text
    assert "[y/N]" not in text


@pytest.mark.parametrize(
    ("selection", "words"),
    [
        (Ids(("m1", "[/]")), "messages m1, [/]"),
        (Letters(DeadLetterFilter(key="k", since=0.0)), "(key k, since 1970-01-01 00:00:00Z)"),
        (Waiting(WaitingFilter(waits=Waits.PARKED)), "waiting messages (waits parked)"),
        (Offsets(Partition("t", 0), 0, 9), "offsets 0 to 9 of t/0"),
        (Times(Partition("t", 0), 0.0, 60.0), "records of t/0 from 1970-01-01 00:00:00Z to"),
    ],
)
def test_a_question_says_what_is_selected(selection, words):
    assert words in words_of(selection)


def test_no_means_no_and_nothing_is_changed(shop):
    shop.bury("m1")

    shop.read("replay", "run", *CONSUMER, "--dead-letters", answer="n\n", code=130)

    assert shop.paid() == []
    assert shop.ask("replay", "list")["replays"] == []


def test_a_replay_that_is_left_behind_its_canary_goes_on_by_its_name(shop):
    shop.bury("m1", "m2")
    run = ("replay", "run", *CONSUMER, "--name", "again", "--actor", "ann")
    shop.read(*run, "--dead-letters", answer="y\nn\n", code=130)

    assert shop.ask("replay", "status", "again")["state"] == "stopped"
    assert shop.act("replay", "run", *CONSUMER, "--name", "again")["state"] == "finished"
    assert shop.paid() == ["m1", "m2"]


def test_failures_end_it_with_one_and_the_reason(shop):
    shop.bury("m1", "m2")
    shop.broken = {"m1"}

    document = shop.act("replay", "run", *CONSUMER, "--dead-letters", "--name", "again", code=1)
    text = shop.read("replay", "status", "again", code=1)

    assert (document["state"], document["counts"]["failed"]) == ("failed", 1)
    assert "no such account" in document["why"]
    assert "go on with `semel replay run --name again" in text
    assert "failed" in shop.read("replay", "list")


def test_a_topic_is_replayed_through_a_reader(shop):
    shop.deliver("m1")
    for name in ("m1", "m2"):
        shop.broker.put(
            "payments", f'{{"id": "{name}"}}'.encode(), None, {"message-id": name.encode()}
        )
    there = ("--partition", "payments/0", "--offsets", "0:1")

    document = shop.act("replay", "run", *CONSUMER, *there, "--reader", f"{MODULE}:reader")

    assert document["counts"]["handled"] == 1
    assert document["counts"]["duplicate"] == 1
    assert shop.paid() == ["m1", "m2"]


def test_a_leased_consumer_is_replayed_and_tried(shop):
    shop.bury("m1")

    async def export(message: Message, lease: Lease) -> None:
        async with lease.completing() as session:
            await pay(session, message.id)

    handler = consumer("billing", reading=shop.module.billing.reading)(export)
    vars(shop.module).update(billing=handler, leased=replace(handler, mode=Mode.LEASED))
    letters = ("--dead-letters", "--mode", "leased")

    dry = shop.ask("replay", "dry-run", "--handler", f"{MODULE}:leased", "--dead-letters")
    dry_by_option = shop.ask("replay", "dry-run", *CONSUMER, *letters)
    other = ("--handler", f"{MODULE}:leased", "--dead-letters", "--mode", "transactional")
    refused = shop.act("replay", "run", *other, code=2)
    done = shop.act("replay", "run", *CONSUMER, *letters)

    assert [one["messages"][0]["outcome"] for one in (dry, dry_by_option)] == ["success"] * 2
    assert "is one of mode leased" in refused["error"]
    assert done["counts"]["handled"] == 1
    assert shop.paid() == ["m1"]


def test_what_the_consumers_own_policy_forbids_is_refused_without_a_policy_file(shop):
    shop.bury("m1")
    forbids = ReplayRules(own=ReplayRule("it charges cards"))
    shop.module.billing = replace(shop.module.billing, replays=forbids)

    error = shop.act("replay", "run", *CONSUMER, "--dead-letters", code=4)

    assert "it charges cards; a dry run is allowed" in error["error"]
    assert shop.paid() == []


def test_old_records_are_refused_with_the_reason_and_a_window_lets_them_in(shop):
    shop.broker.clock = SimulatedClock(time.time() - 9 * 86_400)
    shop.deliver()
    shop.broker.put("payments", b'{"id": "m1"}', None, {"message-id": b"m1"})
    there = ("--partition", "payments/0", "--offsets", "0:0", "--reader", f"{MODULE}:reader")
    run = ("replay", "run", *CONSUMER, *there)

    refused = shop.act(*run, "--name", "narrow", code=1)
    text = shop.read("replay", "status", "narrow", code=1)
    handled = shop.act(*run, "--window-days", "10")

    assert refused["counts"]["refused"] == 1
    assert "1 refused: it is older than the replay window of 7 days" in text
    assert "7 days" in next(iter(refused["refusals"]))
    assert handled["counts"]["handled"] == 1


def test_a_replay_is_abandoned_with_a_reason(shop):
    shop.bury("m1", "m2")
    run = ("replay", "run", *CONSUMER, "--name", "again", "--actor", "ann", "--dead-letters")
    shop.read(*run, answer="y\nn\n", code=130)

    unsaid = shop.ask("replay", "abandon", "again", "--yes", code=2)
    done = shop.act("replay", "abandon", "again")

    assert "needs a reason" in unsaid["error"]
    assert done["state"] == "abandoned"
    assert (
        "was abandoned" in shop.act("replay", "run", *CONSUMER, "--name", "again", code=2)["error"]
    )


def test_what_the_policy_forbids_is_refused_and_a_dry_run_is_not(shop, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("deliverySemantics: {consumers: {billing: {replay: {allowed: false}}}}")
    shop.bury("m1")

    error = shop.act("replay", "run", *CONSUMER, "--dead-letters", "--policy", policy, code=4)
    dry = shop.ask("replay", "dry-run", *CONSUMER, "--dead-letters")

    assert "replay is not allowed; a dry run is allowed" in error["error"]
    assert dry["messages"][0]["outcome"] == "success"
    assert shop.paid() == []


def test_a_dry_run_shows_what_would_be_written(shop):
    shop.bury("m1", "m2")
    shop.broken = {"m2"}

    document = shop.ask("replay", "dry-run", *CONSUMER, "--dead-letters", code=1)
    text = shop.read("replay", "dry-run", *CONSUMER, "--message", "m1", "--message", "m9", code=1)

    first, second = document["messages"]
    assert (first["claim"], first["outcome"]) == ("FAILED_TERMINAL", "success")
    assert first["changes"][0]["table"] == "paid"
    assert first["changes"][0]["after"] == {"id": "m1"}
    assert (second["outcome"], second["why"]) == ("dlq", "REJECTED: no such account")
    assert "insert paid: id m1" in text
    assert "its payload is in no table any more" in text
    assert "2 messages tried; nothing was kept" in text
    assert shop.paid() == []


def test_a_parked_key_is_replayed_in_order(shop):
    shop.broken = {"m1"}
    shop.deliver("m1", "m2", key="customer-7", settings=PARKS)
    shop.broken = set()

    document = shop.act("replay", "run", *CONSUMER, "--parked", "--key", "customer-7")

    assert document["counts"]["handled"] == 2
    assert shop.paid() == ["m1", "m2"]


def test_a_replay_that_does_not_run_cannot_be_stopped(shop):
    shop.bury("m1")
    shop.act("replay", "run", *CONSUMER, "--dead-letters", "--name", "again")

    assert "does not run" in shop.act("replay", "stop", "again", code=2)["error"]
    assert "there is no replay" in shop.ask("replay", "status", "never", code=2)["error"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((*CONSUMER,), "say what to replay"),
        ((*CONSUMER, "--message", "m", "--parked"), "choose one of"),
        ((*CONSUMER, "--partition", "payments/0"), "needs --offsets"),
        ((*CONSUMER, "--partition", "payments"), "is not a partition"),
        ((*CONSUMER, "--partition", "p/0", "--offsets", "a:b"), "FIRST:LAST"),
        ((*CONSUMER, "--partition", "p/0", "--offsets", "0:1"), "needs a reader"),
        ((*CONSUMER, "--dead-letters", "--since", "noon"), "is not a time"),
        ((*CONSUMER, "--dead-letters", "--canary", "one"), "numbers with commas"),
        ((*CONSUMER, "--message", "m", "--reader", f"{MODULE}:number"), "reads no topics"),
        (("--handler", f"{MODULE}:number", "--dead-letters"), "found a int"),
        (("--handler", f"{MODULE}:nothing", "--dead-letters"), "has no 'nothing'"),
    ],
)
def test_what_cannot_be_meant_is_refused(shop, arguments, why):
    assert why in shop.act("replay", "run", *arguments, code=2)["error"]


def test_options_make_selections():
    times = {"since": "2026-11-16T08:00", "until": "2026-11-16T09:00:00+00:00"}

    found = [
        selection_of(message=["a"]),
        selection_of(dead_letters=True),
        selection_of(parked=True),
        selection_of(partition="p/0", offsets="1:2"),
        selection_of(partition="p/0", **times),
    ]

    assert [type(one) for one in found] == [Ids, Letters, Waiting, Offsets, Times]
    assert isinstance(found[4], Times)
    assert found[4].until - found[4].since == 3600
    assert selection_of() is None
    with pytest.raises(Misuse):
        selection_of(message=["a"], dead_letters=True)
