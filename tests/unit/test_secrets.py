"""No password is ever shown, and each one is found where it was put."""

from __future__ import annotations

import json
from functools import partial

import pytest

from semel.secrets import is_ambiguous, masked, resolve, scrubbed, scrubbed_values


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:s3cret@h:5432/db", "postgresql://u:***@h:5432/db"),
        ("postgresql://u:a%40s3cret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:s3c@s3cret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:s3cret/s3cret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:s3cret?s3cret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u@h/db?password=s3cret&x=1", "postgresql://u@h/db?password=***&x=1"),
        ("postgresql://h/db?sslpassword=s3cret", "postgresql://h/db?sslpassword=***"),
        ("kafka://h?sasl.password=s3cret&x=1", "kafka://h?sasl.password=***&x=1"),
        ("postgresql://h1:1,h2:2/db?user=a@b", "postgresql://h1:1,h2:2/db?user=a@b"),
        ("host=h password=s3cret dbname=db", "host=h password=*** dbname=db"),
        ("host=h password='s3 cret' dbname=db", "host=h password=*** dbname=db"),
        ("postgresql://u:12?s3cret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:s3cret/x?y=z@h/db", "postgresql://u:***@h/db"),
        ("postgresql://h:5432?user=a@b", "postgresql://h:5432?user=a@b"),
        ("postgresql://h:1/db?application_name=a@b", "postgresql://h:1/db?application_name=a@b"),
        ("postgresql://u:s3c4/x?y=z@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:12/s3c?y=s3cret@h/db", "postgresql://u:***@h/db"),
        ("postgresql://u:s3cr@s3c?y=s3cret@h/db", "postgresql://u:***@h/db"),
        ("https://h:443/x?token=s3cret&mail=a@b", "https://h:***@b"),
        ("https://h/x#access_token=s3cret", "https://h/x#access_token=***"),
        ("https://h/x?a=1#id=2&access_token=s3cret", "https://h/x?a=1#id=2&access_token=***"),
        ("postgresql://h/db?PassWord=s3cret", "postgresql://h/db?PassWord=***"),
        ("postgresql://h/db?pass%77ord=s3cret", "postgresql://h/db?pass%77ord=***"),
        ("postgresql://h/db?a=1;password=s3cret", "postgresql://h/db?a=1;password=***"),
        ("kafka://h?ssl.key.password=s3cret", "kafka://h?ssl.key.password=***"),
        (
            "kafka://h?sasl.oauthbearer.client.secret=s3cret&client.id=x",
            "kafka://h?sasl.oauthbearer.client.secret=***&client.id=x",
        ),
        ("https://h/x?api_key=s3cret&X-Amz-Signature=s3cret", None),
        ("postgresql:/u:s3cret@h/db", "***@h/db"),
        ("u:s3cret@h/db", "***@h/db"),
        ("host=h user=a@b passwd = s3cret", "host=h user=a@b passwd = ***"),
        ("postgresql://u:s3cret", "postgresql://u:***"),
        ("postgresql://u:s3cret/db", "postgresql://u:***/db"),
        ("postgresql://h1:1,h2:2/db", "postgresql://h1:1,h2:2/db"),
        ("postgresql://[::1]:5432/db", "postgresql://[::1]:5432/db"),
        ("https://s3cret@h/x", "https://***@h/x"),
        ('kafka://h?sasl.jaas.config=Plain required password="s3cret";', None),
        ("sqlite:///payments.ledger", "sqlite:///payments.ledger"),
        ("sqlite:///C:/payments.ledger", "sqlite:///C:/payments.ledger"),
        ("memory:", "memory:"),
    ],
)
def test_a_masked_url_shows_everything_but_its_password(url, shown):
    assert masked(url) == shown or shown is None
    assert "s3c" not in masked(url)
    assert "s3cret" not in scrubbed(f"refused: {url}", url)


def test_a_url_that_may_be_read_in_two_ways_shows_neither_password_and_still_connects():
    url = "postgresql://u:1234/x?y=z@h/db"

    assert masked(url) == "postgresql://u:***@h/db"
    assert "1234" not in scrubbed("refused 1234/x?y=z", url)
    assert resolve("postgresql://h:5432/db?application_name=a@b", "pw").startswith(
        "postgresql://:pw@h:5432/db?"
    )


@pytest.mark.parametrize(
    ("place", "is_so"),
    [
        *((place, True) for place in ("u:p@z@h/db", "u:p/z@h/db", "u:a@b/c@h/db", "u:p@z:1@h/db")),
        *((place, False) for place in ("u@h/db", "h:5432/db", "u:p@h:1/db", "u:p:w@h/db", ":p@h")),
        *((place, False) for place in ("u:p%40@h1:1,h2:2/db", "u:p?z@h/db", "h:1,i:2/db?user=a@b")),
    ],
)
def test_a_url_is_refused_if_a_driver_would_take_a_part_of_the_password_for_the_host(place, is_so):
    assert is_ambiguous(f"postgresql://{place}") == is_so


def test_an_argument_wins_over_the_url_and_the_environment(monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "env")

    assert resolve("postgresql://u:url@h/db", "p@ss/word") == "postgresql://u:p%40ss%2Fword@h/db"
    assert resolve("postgresql://u@h/db", lambda: "called") == "postgresql://u:called@h/db"
    assert resolve("postgresql://h/db", "x") == "postgresql://:x@h/db"


def test_the_url_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("PGPASSWORD", "env")

    assert resolve("postgresql://u:url@h/db") == "postgresql://u:url@h/db"
    assert resolve("postgresql://u@h/db?password=q") == "postgresql://u@h/db?password=q"
    assert resolve("postgresql://u@h/db") == "postgresql://u:env@h/db"


def test_without_any_password_the_url_stays_as_it_is(monkeypatch):
    monkeypatch.delenv("PGPASSWORD", raising=False)

    assert resolve("postgresql://u@h/db") == "postgresql://u@h/db"


def test_a_callable_is_asked_for_every_connection():
    answers = iter(["one", "two"])

    assert resolve("postgresql://u@h/db", lambda: next(answers)).endswith(":one@h/db")
    assert resolve("postgresql://u@h/db", lambda: next(answers)).endswith(":two@h/db")


def test_an_error_text_loses_the_password_in_both_spellings():
    url = "postgresql://u:a%40b@h/db?sslpassword=zz9"

    assert scrubbed("bad a%40b, a@b and zz9", url) == "bad ***, *** and ***"


def test_a_document_stays_json_whatever_the_password_is():
    document = {"exit": 1, "error": 'role "exit" at 1: {,}', "all": [{"error": None, "ok": True}]}

    for password in '"', "1", "exit", "{", ",", "\\", "e":
        shown = scrubbed_values(document, partial(scrubbed, url=f"postgresql://u:{password}@h/db"))

        assert json.loads(json.dumps(shown)).keys() == document.keys()
        assert password not in shown["error"].replace("***", "")
