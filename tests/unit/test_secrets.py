"""No password is ever shown, and each one is found where it was put."""

from __future__ import annotations

import pytest

from semel.secrets import masked, resolve, scrubbed


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
        ("sqlite:///payments.ledger", "sqlite:///payments.ledger"),
        ("memory:", "memory:"),
    ],
)
def test_a_masked_url_shows_everything_but_its_password(url, shown):
    assert masked(url) == shown


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
