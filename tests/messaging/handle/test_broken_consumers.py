"""The jury that every consumer engine stands before: the honest one goes free, no other does."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.messaging.broken_consumers import MUTANTS
from tests.messaging.jury import Invariant, Violation
from tests.messaging.jury_inbox import walk_inbox
from tests.messaging.jury_world import walk


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    log = logging.getLogger("semel")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    yield
    log.setLevel(level)


def walk_until_convicted(name: str) -> Violation | None:
    try:
        if name.startswith("the_inbox_"):
            walk_inbox()
        walk()
    except Violation as violation:
        return violation
    return None


def test_the_honest_engine_is_acquitted():
    assert walk() + walk_inbox() > 40


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_honest_engine_is_acquitted_of_every_history():
    assert walk(whole=True) + walk_inbox() > 150


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_consumer_engine_with_a_broken_rule_is_convicted(mutant, monkeypatch):
    mutant.patch(monkeypatch)

    violation = walk_until_convicted(mutant.name)

    assert violation is not None
    assert violation.invariant in mutant.convicted_by, violation


def test_every_invariant_convicts_some_engine():
    assert {i for mutant in MUTANTS for i in mutant.convicted_by} == set(Invariant)
