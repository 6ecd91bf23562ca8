"""Ids, keys and payloads that no terminal should be told: they are listed all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc

import pytest

from semel.cli.plain import plain, shortened
from semel.message import Message
from semel.messaging.records import DeadLetterFilter, InboxMessage, WaitingFilter, conflict_id
from semel.messaging.send.outbox import OutboxEntry
from semel.operate.deadletters import dead_letters
from semel.operate.explain import explain_message
from semel.operate.outbox import parked_entries
from semel.operate.parking import held_keys, waiting_messages
from semel.operate.retention import erase
from tests.messaging.act_world import ANN, bury, park

ON = ("--consumer", "billing")
ACTS = "\x1b]0;you are root\x07\x9b31m"
BACKWARDS = "gnp.\u202eexe"
HALF = "\udcff\x00"


@pytest.fixture
def books(books):
    books.fill(lambda world: park(world, f"m{ACTS}", key=f"k{ACTS}"))
    books.fill(lambda world: park(world, f"n{BACKWARDS}", key=BACKWARDS))
    books.fill(lambda world: park(world, f"o{HALF}", key=HALF))
    books.fill(lambda world: bury(world, f"d{HALF}{ACTS}"))
    return books


def printed(encoding: str, *arguments: str) -> str:
    """Run a command in a process of its own, as a terminal of that encoding would."""
    done = subprocess.run(
        [sys.executable, "-m", "semel", *arguments],
        env={**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode(encoding)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_a_producer_wrote_does_not_act_on_a_terminal_and_breaks_no_list(books, encoding):
    waiting = printed(encoding, "parking", "list")
    letters = printed(encoding, "dlq", "list")

    assert plain(waiting + letters) == waiting + letters
    assert "\\x1b]0;you" in waiting
    assert "\\u202e" in waiting
    assert "\\udcff\\x00" in waiting
    assert "1 dead letter " in letters


@pytest.mark.parametrize(
    ("typed", "id"),
    [
        (r'json:"o\udcff\u0000"', f"o{HALF}"),
        (r'json:"m\u001b]0;you are root\u0007\u009b31m"', None),
    ],
)
def test_a_message_is_named_in_json_where_a_shell_cannot_say_it(books, typed, id):
    shown = books.ask("parking", "show", typed, *ON)["message"]
    assert shown["message_id"] == (id or f"m{ACTS}")
    assert plain(shown["message_id"]) in books.read("parking", "show", typed, *ON)

    books.act("parking", "skip", typed, *ON)

    left = [m["message_id"] for m in books.ask("parking", "list")["messages"]]
    assert len(left) == 2
    assert shown["message_id"] not in left


def test_keys_and_several_ids_are_named_so_too(books):
    (found,) = books.ask("parking", "list", "--key", r'json:"\udcff\u0000"')["messages"]
    assert found["message_id"] == f"o{HALF}"

    named = [r'json:"o\udcff\u0000"', f"n{BACKWARDS}"]
    done = books.act("parking", "classify", *named, *ON, "--label", "data")

    assert [one["message_id"] for one in done["messages"]] == [f"o{HALF}", f"n{BACKWARDS}"]


def test_what_is_no_json_behind_the_word_is_refused_and_other_ids_are_as_they_are(books):
    assert "is not a text in JSON" in books.read("parking", "show", 'json:"m', *ON, code=2)

    books.fill(lambda world: park(world, "json:m"))
    assert books.ask("parking", "show", "json:m", *ON)["message"]["message_id"] == "json:m"


LONG = f"first-{'x' * 2000}-last"


@pytest.mark.parametrize(
    "command",
    [("parking", "list"), ("parking", "keys", *ON), ("dlq", "list"), ("outbox", "parked")],
)
def test_a_table_shows_little_of_a_long_id_and_json_the_whole(books, command):
    books.fill(lambda world: park(world, LONG, key=LONG))
    books.fill(lambda world: bury(world, LONG))
    books.fill(set_aside)

    text = books.read(*command)
    document = books.ask(*command)

    assert len(text.splitlines()) < 40
    assert "first-xxx" in text
    assert "--json has them whole" in text
    assert LONG in str(document)


async def set_aside(world):
    async with world.database.begin() as unit:
        await unit.outbox.add([OutboxEntry(LONG, "payments", b"{}", LONG)])
        leadership = await unit.outbox.lead("outbox", "ann", 60.0)
        (entry,) = await unit.outbox.read("outbox", 0, 10)
        await unit.outbox.park(leadership, entry.place, "too large")


def test_one_message_is_shown_with_its_whole_id(books):
    books.fill(lambda world: bury(world, LONG))

    assert LONG in books.read("dlq", "show", LONG, *ON).replace("\n", "").replace(" ", "")


@pytest.mark.parametrize("length", [1, 71, 72])
def test_an_id_of_a_usual_length_is_not_shortened(length):
    assert shortened("i" * length) == "i" * length


@pytest.mark.parametrize("length", [73, 74, 2000])
def test_a_shortened_id_is_as_long_as_the_longest_that_is_not_and_has_both_ends(length):
    short = shortened(f"first-{'x' * (length - 11)}-last")

    assert len(short) == 72
    assert short.startswith("first-xxx")
    assert "…" in short
    assert short.endswith("xxx-last")


MARKUP = "[/] [link=https://evil.example]click[/link] [bold"


def test_markup_in_a_code_a_reason_or_a_key_is_shown_as_it_is(books):
    books.fill(lambda w: bury(w, "b1", error_code=MARKUP, reason=MARKUP, exception=MARKUP))
    books.fill(lambda world: park(world, MARKUP, key=MARKUP))

    for shown in ("dlq list", f"dlq show b1 {' '.join(ON)}", "parking list"):
        assert "[link=https://evil" in books.read(*shown.split()).replace("\n", ""), shown


def test_a_question_does_not_act_on_a_terminal(books):
    typed = r'json:"d\udcff\u0000\u001b]0;you are root\u0007\u009b31m"'
    asked = books.read("dlq", "delete", typed, *ON, "--actor", "a", "--reason", "b", code=130)

    assert plain(asked) == asked
    assert "\\x1b]0;you are root" in asked


def test_without_a_terminal_the_answer_is_to_use_yes(books):
    books.fill(lambda world: bury(world, "b1"))
    done = subprocess.run(
        [sys.executable, "-m", "semel", "dlq", "delete", "b1", *ON, "--reason", "b"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=120,
    )

    assert done.returncode == 2, done.stderr
    assert b"add --yes" in done.stderr


def test_a_list_loads_no_payloads(books):
    async def listed(world):
        await bury(world, "b1", payload=b"x" * 1000)
        await park(world, "p1", key="k", payload=b"x" * 1000)
        await set_aside(world)
        letters = await dead_letters(world.database, DeadLetterFilter(), 50)
        waiting = await waiting_messages(world.database, WaitingFilter(), 50)
        keys = await held_keys(world.database, "billing", 50)
        refused = await parked_entries(world.database)
        heads = [key.head for key in keys.keys]
        return [*letters.letters, *waiting.messages, *heads], refused.messages

    messages, entries = books.fill(listed)
    assert {one.payload for one in messages} == {None}
    assert {one.value for one in entries} == {None}


def test_erasing_and_explaining_load_no_payloads_of_others(books):
    """A key, or the conflicts with one id, may have more bytes than there is memory."""
    size, number = 1_000_000, 8

    async def store(world):
        for n in range(number):
            message = Message(f"i{n}", None, b"x" * size, "k")
            async with world.database.begin() as unit:
                await unit.inbox.store(InboxMessage.of("billing", message))
            await bury(world, conflict_id("m1", f"{n:016}"), payload=b"y" * size)

    async def erased(world):
        tracemalloc.start()
        await explain_message(world.database, "m1")
        await erase(world.database, message_id="m1", **ANN)
        await erase(world.database, key="k", **ANN)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    books.fill(store)

    assert books.fill(erased) < 3 * size
