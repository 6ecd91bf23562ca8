"""`semel retention`: the days that are typed, or the policy that says them."""

from __future__ import annotations

import pytest

from semel.errors import Misuse
from semel.messaging.settings import DAY_SECONDS
from semel.operate.retention import Retention, retention_of
from semel.policy.lint import review
from semel.policy.model import Policy
from tests.unit.policy.policy_texts import CLEAN_CONSUMER, CLEAN_TOPIC, TEMPLATE, merged, text_of

ON = ("--consumer", "c")
NO_WINDOWS = ("--topic-days", "0", "--replay-days", "0", "--dlq-days", "0", "--parking-days", "0")


def policy(topic=None, **keys):
    return text_of(merged(CLEAN_CONSUMER, keys), merged(CLEAN_TOPIC, topic or {}))


@pytest.mark.parametrize("days", ["nan", "inf", "1e300", "-1", "36526"])
def test_a_time_to_live_that_is_no_time_is_a_mistake(books, days):
    assert "ttl" in books.act("retention", *ON, "--ttl-days", days, code=2)["error"].replace(
        "time to live", "ttl"
    )


@pytest.mark.parametrize("window", ["--topic-days", "--replay-days", "--dlq-days", "--safety"])
def test_a_window_that_is_no_number_is_a_mistake(books, window):
    assert "error" in books.act("retention", *ON, window, "nan", code=2)


def test_claims_are_never_forgotten_at_once(books):
    error = books.act("retention", *ON, "--ttl-days", "0", *NO_WINDOWS, code=2)["error"]

    assert "more than 0 days" in error


def test_the_policy_says_how_long_claims_are_kept(books, tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(policy({"retention": "3d"}, claims={"ttl": "30d"}, dlq={"keep": "10d"}))

    document = books.act("retention", *ON, "--policy", file)

    assert document["ttl_seconds"] == 30 * DAY_SECONDS
    assert document["shortest_seconds"] == 20 * DAY_SECONDS


def test_a_policy_and_days_exclude_each_other(books, tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(policy())

    error = books.act("retention", *ON, "--policy", file, "--ttl-days", "30", code=2)["error"]

    assert "give --policy, or the days" in error


def test_a_policy_whose_windows_outlast_its_claims_deletes_nothing(books, tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(policy({"retention": "30d"}, claims={"ttl": "7d"}))

    assert "forgets duplicates" in books.act("retention", *ON, "--policy", file, code=2)["error"]


def test_a_consumer_that_the_policy_does_not_know_is_named(books, tmp_path):
    file = tmp_path / "policy.yaml"
    file.write_text(policy())

    error = books.act("retention", "--consumer", "d", "--policy", file, code=2)["error"]

    assert "known are c" in error


@pytest.mark.parametrize(
    ("topic", "keys", "days"),
    [
        ({"retention": "5d"}, {}, 10),
        ({"retention": None}, {}, 14),
        ({"retention": None}, {"dlq": {"keep": "1d"}}, 14),
        ({"retention": "5d"}, {"parking": {"keep": "40d"}}, 80),
        ({"retention": "5d", "replayWindow": "20d"}, {}, 40),
        ({"retention": "5d", "replayWindow": "20d", "replayAllowed": False}, {}, 10),
    ],
)
def test_what_the_policy_leaves_out_follows_from_its_windows(topic, keys, days):
    found = retention_of(Policy.parse(policy(topic, **keys)), "c")

    assert found.ttl_seconds == days * DAY_SECONDS


@pytest.mark.parametrize("retention", ["5d", None])
@pytest.mark.parametrize("days", [9, 10, 13, 14, 39, 40])
@pytest.mark.parametrize(
    "keys", [{}, {"dlq": {"enabled": False, "keep": "20d"}}, {"parking": {"keep": "20d"}}]
)
def test_the_lint_refuses_a_time_to_live_where_the_command_does(retention, days, keys):
    text = policy({"retention": retention}, claims={"ttl": f"{days}d"}, **keys)
    said = Policy.parse(text)

    (topic,) = said.topics_of("c")
    found = review(said, "c", topic).findings
    refused = "claims-ttl-too-short" in [finding.code for finding in found]

    if refused:
        with pytest.raises(Misuse, match="forgets duplicates"):
            retention_of(said, "c")
    else:
        assert retention_of(said, "c").ttl_seconds == days * DAY_SECONDS


def test_the_longest_of_several_topics_decides():
    text = TEMPLATE.replace("  consumers:", "    archive: {retention: 60d}\n  consumers:", 1)

    found = retention_of(Policy.parse(text), "search-indexer")

    assert found == Retention(
        ttl_seconds=120 * DAY_SECONDS,
        topic_retention_seconds=60 * DAY_SECONDS,
        replay_window_seconds=60 * DAY_SECONDS,
        dead_letter_age_seconds=0.0,
        parking_age_seconds=0.0,
        safety=2,
    )
