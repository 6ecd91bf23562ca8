"""`semel parking`, `semel audit`, `semel erase` and `semel retention`."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from semel.cli.database import this_account
from semel.messaging.handle.claims import ClaimState
from semel.messaging.settings import DAY_SECONDS
from semel.sql.tables import audit_entry
from tests.messaging.act_world import acts, bury, claim_of, details, park, queue, waiting_of

ON = ("--consumer", "billing")


@pytest.fixture
def books(books):
    books.fill(lambda world: park(world, "m1", "m2", "m3", key="customer-7"))
    books.fill(lambda world: park(world, "n1"))
    return books


def test_waiting_messages_are_listed_in_order(books):
    document = books.ask("parking", "list", *ON)

    assert [m["message_id"] for m in document["messages"]] == ["m1", "m2", "m3", "n1"]
    parked = books.ask("parking", "list", "--waits", "parked", "--key", "customer-7")
    assert [m["message_id"] for m in parked["messages"]] == ["m1"]
    assert "4 waiting messages" in books.read("parking", "list")


def test_held_keys_are_listed_with_their_queue(books):
    (key,) = books.ask("parking", "keys", *ON)["keys"]

    assert (key["key"], key["head"]["message_id"], key["behind"]) == ("customer-7", "m1", 2)
    assert "1 held key of billing" in books.read("parking", "keys", *ON)
    books.fill(lambda world: park(world, "o1", key="customer-8"))
    assert "there are more" in books.read("parking", "keys", *ON, "--limit", 1)


def test_a_message_is_shown_with_all_that_is_known(books):
    books.act("parking", "classify", "m2", *ON, "--label", "data")

    document = books.ask("parking", "show", "m2", *ON, "--actor", "bob")

    assert document["payload"]["text"] == '{"id": "m2"}'
    assert (document["ahead"], document["behind"]) == (1, 1)
    assert document["claim"] == "PARKED"
    assert document["message"]["label"] == "data"
    assert document["acts"] == ["park.classify by ann", "park.inspect by bob"]
    assert "1 ahead, 1 behind" in books.read("parking", "show", "m2", *ON)


def test_a_fix_shows_the_difference_and_keeps_the_original(books, tmp_path):
    fixed = tmp_path / "fixed.json"
    fixed.write_text('{"id": "m1", "amount": 12}')

    given = ("--payload", fixed, "--keep-id", "--actor", "ann")
    silent = books.read("parking", "fix", "m1", *ON, *given, answer="n\n", code=2)
    assert "amount" not in silent
    assert books.fill(acts) == []
    why = ("--reason", "because")
    asked = books.read("parking", "fix", "m1", *ON, *given, *why, answer="n\n", code=130)
    assert '+  "amount": 12' in asked
    assert books.fill(acts) == [("ann", "park.inspect", "m1")]
    document = books.act("parking", "fix", "m1", *ON, "--payload", fixed, "--keep-id")

    assert (document["revision"], document["handled_as"]) == (1, "m1")
    assert '+  "amount": 12' in document["diff"]
    shown = books.ask("parking", "show", "m1", *ON)
    assert [r["payload"]["text"] for r in shown["revisions"]] == [
        '{"id": "m1"}',
        '{"id": "m1", "amount": 12}',
    ]
    assert "revision 1 keep-id  by ann: because" in books.read("parking", "show", "m1", *ON)


def test_a_fix_may_come_from_stdin_and_give_a_new_id(books):
    document = books.act(
        "parking", "fix", "m1", *ON, "--payload", "-", "--new-id", "m1-b", stdin=b"{}"
    )

    assert document["handled_as"] == "m1-b"
    assert books.fill(queue)[0] == ("m1-b", "parked")
    assert books.fill(lambda world: waiting_of(world, "m1-b")).payload == b"{}"


def test_a_message_that_was_handled_is_fixed_only_for_a_second_effect(books):
    async def handled(world):
        async with world.database.begin() as unit:
            await unit.claims.mark_completed("billing", "m1")

    books.fill(handled)
    fix = ("parking", "fix", "m1", *ON, "--payload", "-", "--second-effect")

    refused = books.act(*fix[:-1], "--new-id", "m1-b", stdin=b"{}", code=4)
    without_id = books.act(*fix, "--keep-id", stdin=b"{}", code=2)
    document = books.act(*fix, "--new-id", "m1-b", stdin=b"{}")

    assert "--second-effect" in refused["error"]
    assert "--new-id" in without_id["error"]
    assert document["handled_as"] == "m1-b"


def test_a_fix_says_which_id_it_means(books, tmp_path):
    fixed = tmp_path / "fixed.json"
    fixed.write_text("{}")

    for wrong in ((), ("--keep-id", "--new-id", "x")):
        document = books.act("parking", "fix", "m1", *ON, "--payload", fixed, *wrong, code=2)
        assert "--keep-id and --new-id" in document["error"]
    missing = ("--payload", tmp_path / "none", "--keep-id")
    assert "no file" in books.act("parking", "fix", "m1", *ON, *missing, code=2)["error"]
    nobody = ("--payload", fixed, "--keep-id")
    assert "no message" in books.act("parking", "fix", "nobody", *ON, *nobody, code=2)["error"]


def test_messages_and_keys_are_released(books, tmp_path, monkeypatch):
    policy = tmp_path / "policy.yaml"
    policy.write_text("deliverySemantics: {consumers: {billing: {replay: {allowed: false}}}}")
    refused = books.act("parking", "release", "n1", *ON, "--policy", policy, code=1)
    assert "replay" in str(refused["messages"][0])
    with monkeypatch.context() as named:
        named.setenv("SEMEL_POLICY", str(policy))
        assert books.act("parking", "release", "n1", *ON, code=1) == refused
    assert books.act("parking", "release", "n1", *ON)["messages"][0]["note"] == "released"
    document = books.act("parking", "release", "--key", "customer-7", *ON)

    assert [one["message_id"] for one in document["messages"]] == ["m1"]
    assert books.fill(queue) == [
        ("m1", "retry"),
        ("m2", "behind"),
        ("m3", "behind"),
        ("n1", "retry"),
    ]
    refused = books.act("parking", "release", "m2", *ON, code=1)["messages"][0]
    assert "not parked" in refused["why_not"]
    assert "ids, or --key" in books.act("parking", "release", *ON, code=2)["error"]
    both = ("n1", "--key", "customer-7")
    assert "ids, or --key" in books.act("parking", "release", *both, *ON, code=2)["error"]


def test_messages_are_skipped_with_a_reason(books):
    books.act("parking", "skip", "m1", "n1", *ON)

    assert books.fill(queue) == [("m2", "behind"), ("m3", "behind")]
    row = books.fill(lambda world: claim_of(world, "m1"))
    assert (row.state, row.marker) == (ClaimState.COMPLETED, "SKIPPED")


def test_a_deletion_waits_for_a_second_person_who_may_refuse(books):
    number = books.act("parking", "delete", "m1", *ON)["request"]["number"]

    (request,) = books.ask("parking", "requests")["requests"]
    assert (request["number"], request["asked_by"]) == (number, "ann")
    assert "asked by ann" in books.read("parking", "requests")
    refused = books.act("parking", "approve", number, "--refuse", who="bob")
    assert refused["request"]["decision"] == "refused"
    assert books.ask("parking", "requests")["requests"] == []
    again = books.read(
        "parking", "delete", "m1", *ON, "--reason", "really", "--actor", "ann", "--yes"
    )
    assert f"semel parking approve {number + 1}" in again
    bob = ("parking", "approve", number + 1, "--actor", "bob", "--yes")
    refusal = books.read(*bob, code=2)
    assert "also made from the account" in refusal
    assert books.fill(queue)[0] == ("m1", "parked")
    done = books.read(*bob, "--shared-account")
    assert "was deleted" in done
    said = books.fill(details)
    assert said["shared_account"] is True
    assert said["account"] == this_account()
    assert books.fill(queue)[0] == ("m2", "behind")


def test_the_audit_trail_is_listed(books):
    books.act("parking", "skip", "m1", *ON)
    books.act("parking", "skip", "n1", *ON)

    document = books.ask("audit", "list")
    assert [entry["message_id"] for entry in document["entries"]] == ["m1", "n1"]
    assert [e["number"] for e in books.ask("audit", "list", "-n", "1")["entries"]] == [2]
    assert [e["number"] for e in books.ask("audit", "list", "--after", "1")["entries"]] == [2]
    about = books.ask("audit", "list", *ON, "--message", "m1")
    assert [entry["number"] for entry in about["entries"]] == [1]
    assert "together" in books.ask("audit", "list", "--message", "m1", code=2)["error"]
    assert "park.skip" in books.read("audit", "list")


def test_a_changed_trail_is_found(books):
    books.act("parking", "skip", "m1", *ON)
    whole = books.ask("audit", "verify")
    assert (whole["whole"], whole["entries"]) == (True, 1)
    assert "the chain is whole, 1 entry" in books.read("audit", "verify", "--head", whole["head"])

    async def change(world):
        async with world.database.begin() as unit:
            await unit.session.execute(update(audit_entry).values(reason="another"))

    books.fill(change)

    broken = books.ask("audit", "verify", code=1)
    assert broken["broken"] == "entry 1 was changed"
    assert "broken" in books.read("audit", "verify", code=1)
    assert "64 hex" in books.ask("audit", "verify", "--head", "1:x", code=2)["error"]


def test_payloads_are_erased(books):
    books.fill(lambda world: bury(world, "dead"))

    document = books.act("erase", "--key", "customer-7")

    assert (document["dead_letters"], document["waiting"]) == (1, 3)
    assert books.fill(lambda world: waiting_of(world, "m1")).payload is None
    text = books.read("erase", "--message", "n1", "--reason", "asked", "--yes")
    assert "erased: 0 dead letters, 1 waiting" in text
    assert "run it again when such attempts are over" in " ".join(text.split())
    assert document["left"].startswith("keys, ids, hashes and the audit trail stay")
    assert "--key, or --message" in books.act("erase", code=2)["error"]
    assert "reason" in books.ask("erase", "--key", "k", "--yes", code=2)["error"]


def test_old_claims_are_deleted_and_the_windows_checked(books):
    books.act("parking", "skip", "n1", *ON)
    books.fill(lambda world: world.age(15 * DAY_SECONDS))

    document = books.act("retention", *ON)

    assert document["claims"] == 1
    assert document["shortest_seconds"] == 14 * DAY_SECONDS
    assert books.fill(acts)[-1] == ("ann", "retention", "")
    assert books.fill(details)["claims"] == 1
    refused = books.act("retention", *ON, "--topic-days", "30", code=2)
    assert "forgets duplicates" in refused["error"]
    assert "deleted: 0 claims" in books.read("retention", *ON, "--yes")
