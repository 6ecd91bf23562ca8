"""`semel claims list`: what is in progress, and what nobody finished."""

from __future__ import annotations

import pytest

from tests.stores.claims_world import CONSUMER, LEASE_SECONDS, OWNER, lease

ON = ("--consumer", CONSUMER)


async def one_stale_of_two(world):
    await lease(world, "stuck")
    await lease(world, "running", seconds=LEASE_SECONDS * 10)
    await world.age(LEASE_SECONDS * 2)


@pytest.fixture
def leased(books):
    books.fill(one_stale_of_two)
    return books


def test_a_lease_that_has_run_out_needs_somebody(leased):
    document = leased.ask("claims", "list", *ON, code=1)

    stuck, running = document["claims"]
    assert (stuck["message_id"], stuck["owner"], stuck["attempts"]) == ("stuck", OWNER, 1)
    assert stuck["seconds_left"] < 0 < running["seconds_left"]
    text = leased.read("claims", "list", *ON, code=1)
    assert "ago" in text
    assert f"2 claims of {CONSUMER} in progress" in text


def test_only_stale_ones_are_listed_where_asked(leased):
    (stuck,) = leased.ask("claims", "list", *ON, "--stale", code=1)["claims"]

    assert stuck["message_id"] == "stuck"


def test_what_was_not_shown_is_said(leased):
    assert leased.ask("claims", "list", *ON, "--limit", "1", code=1)["has_more"]
    assert "there are more" in leased.read("claims", "list", *ON, "--limit", "1", code=1)


def test_nothing_in_progress_needs_nobody(books):
    assert books.ask("claims", "list", *ON)["claims"] == []
