"""`semel dlq`, and what all commands about a database have in common."""

from __future__ import annotations

from semel.messaging.handle.claims import ClaimState
from semel.operate.retention import erase
from tests.messaging.act_world import ANN, acts, bury, claim_of, letters, queue

ON = ("--consumer", "billing")


async def two_letters(world):
    await bury(world, "m1")
    await bury(world, "m2", payload=b"\xff\x00", error_code="TIMEOUT", key=None)


def test_letters_are_listed_without_their_payloads(books):
    books.fill(two_letters)

    document = books.ask("dlq", "list")

    assert [letter["message_id"] for letter in document["letters"]] == ["m1", "m2"]
    assert document["total"] == 2
    assert document["letters"][0]["source"] == "payments/0/7"
    assert "payload" not in document["letters"][0]
    assert [
        x["message_id"] for x in books.ask("dlq", "list", "--error-code", "TIMEOUT")["letters"]
    ] == ["m2"]
    assert books.ask("dlq", "list", "--limit", "1")["total"] == 2
    shown = books.read("dlq", "list", "-n", "1")
    assert "1 of 2 dead letters" in shown
    assert books.fill(acts) == []


def test_showing_a_letter_is_written_down(books):
    books.fill(two_letters)

    document = books.ask("dlq", "show", "m1", *ON, "--actor", "ann")

    assert document["payload"]["text"] == '{"id": "m1"}'
    assert document["headers"] == {"trace": "t"}
    assert document["letter"]["exception"] == "ValueError"
    assert books.ask("dlq", "show", "m2", *ON)["payload"]["base64"] == "/wA="
    assert books.fill(acts)[0] == ("ann", "dlq.inspect", "m1")
    shown = books.read("dlq", "show", "m1", *ON)
    assert "not a number" in shown
    assert '{"id": "m1"}' in shown


def test_letters_are_sent_back_one_by_one(books):
    books.fill(two_letters)

    document = books.act("dlq", "retry", "m1", "nobody", "m2", *ON, code=1)

    assert [one["done"] for one in document["messages"]] == [True, False, True]
    assert "no message 'nobody'" in document["messages"][1]["why_not"]
    assert books.fill(letters) == 0
    assert books.fill(queue) == [("m1", "retry"), ("m2", "retry")]
    assert [act for _, act, _ in books.fill(acts)] == ["dlq.retry", "dlq.retry"]


def test_letters_are_parked_and_skipped(books):
    books.fill(two_letters)

    assert books.act("dlq", "park", "m1", *ON)["messages"][0]["note"] == "parked"
    assert "skipped" in books.read("dlq", "skip", "m2", *ON, "--reason", "a test", "--yes")

    assert books.fill(queue) == [("m1", "parked")]
    assert books.fill(lambda world: claim_of(world, "m2")).state is ClaimState.COMPLETED


def test_skipping_without_a_reason_changes_nothing(books):
    books.fill(two_letters)

    document = books.ask("dlq", "skip", "m1", *ON, "--yes", code=1)

    assert "reason" in document["messages"][0]["why_not"]
    assert books.fill(letters) == 2


def test_a_letter_is_deleted_by_two_people(books, monkeypatch):
    books.fill(two_letters)

    number = books.act("dlq", "delete", "m1", *ON)["request"]["number"]
    assert books.fill(letters) == 2
    assert "second person" in books.act("parking", "approve", number, code=2)["error"]
    assert "account" in books.act("parking", "approve", number, who="bob", code=2)["error"]
    monkeypatch.setattr("semel.cli.database.this_account", lambda: "bob@laptop")
    done = books.act("parking", "approve", number, who="bob")

    assert (done["request"]["decision"], done["request"]["decided_by"]) == ("approved", "bob")
    assert books.fill(letters) == 1


def test_people_are_asked_before_anything_changes(books):
    books.fill(two_letters)

    assert "Send 1 dead letter back" in books.read(
        "dlq", "retry", "m1", *ON, answer="n\n", code=130
    )
    assert "--yes" in books.ask("dlq", "retry", "m1", *ON, code=2)["error"]
    assert books.fill(letters) == 2
    books.read("dlq", "retry", "m1", *ON, answer="y\n")
    assert books.fill(letters) == 1


def test_the_default_actor_is_the_user(books, monkeypatch):
    monkeypatch.setenv("LOGNAME", "carol")
    books.fill(two_letters)

    books.read("dlq", "show", "m1", *ON)

    assert books.fill(acts) == [("carol", "dlq.inspect", "m1")]


def test_an_erased_letter_says_so(books):
    async def erased(world):
        await bury(world, "m1")
        await erase(world.database, message_id="m1", **ANN)

    books.fill(erased)

    assert "(erased)" in books.read("dlq", "list")
    assert "was erased" in books.read("dlq", "show", "m1", *ON)
    assert books.act("dlq", "retry", "m1", *ON, code=1)["messages"][0]["done"] is False


def test_asking_never_makes_a_database(books, tmp_path, monkeypatch):
    missing = tmp_path / "none.db"

    document = books.ask("dlq", "list", "--database", f"sqlite:///{missing}", code=2)

    assert f"there is no file {missing}" in document["error"]
    assert not missing.exists()
    monkeypatch.delenv("SEMEL_DATABASE")
    assert "--database" in books.ask("dlq", "list", code=2)["error"]
    assert (
        "is not the URL of a database"
        in books.ask("dlq", "list", "--database", "shop", code=2)["error"]
    )
    other = books.ask("dlq", "list", "--database", "mysql://ann:secret@db/shop", code=2)["error"]
    assert "PostgreSQL or SQLite" in other
    assert "secret" not in other


def test_a_database_without_the_tables_is_named(books, tmp_path):
    import sqlite3

    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()

    document = books.ask("dlq", "list", "--database", f"sqlite:///{tmp_path}/other.db", code=2)

    assert "lacks the table" in document["error"]
    assert "semel db create" in document["error"]


def test_a_database_that_does_not_answer_is_tried_later(books):
    url = "postgresql://ann:secret@127.0.0.1:1/shop"

    document = books.ask("dlq", "list", "--database", url, code=75)

    assert "secret" not in document["error"]
