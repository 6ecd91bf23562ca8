"""The executable contract of a ledger.

    leases      who may write, and what the epoch refuses
    decisions   the arrows, the write-once decision, the mark
    races       threads and processes at once
    positions   where sources stand, and what may follow
    records     order, scopes, generations, pruning, acts

An implementation binds it in a few lines:

    class TestMemoryLedger(LedgerContract):
        def make_ledger(self):
            self.clock = SimulatedClock()
            return MemoryLedger(self.clock)

        def another(self, ledger):
            return ledger

        def expire(self, ledger, scope):
            self.clock.sleep(LEASE_SECONDS)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import pytest

from semel.testing.contracts.ledger_decisions import DecisionRules
from semel.testing.contracts.ledger_leases import LeaseRules
from semel.testing.contracts.ledger_positions import PositionRules
from semel.testing.contracts.ledger_races import RaceRules
from semel.testing.contracts.ledger_records import RecordRules
from semel.testing.contracts.ledger_world import LEASE_SECONDS

__all__ = ["LEASE_SECONDS", "LedgerContract", "violations"]


class LedgerContract(LeaseRules, DecisionRules, RaceRules, PositionRules, RecordRules):
    """Everything a `semel.pipeline.ledger.Ledger` must do; derive a test class from it."""


def violations(contract: type[LedgerContract]) -> Mapping[str, BaseException]:
    """Run the contract without pytest; return the tests that fail, each with an error of it.

    For ledgers that are broken on purpose.
    """
    broken: dict[str, BaseException] = {}
    for name in dir(contract):
        if not name.startswith("test_"):
            continue
        for arguments in _parameters(getattr(contract, name)):
            bound = contract()
            ledger = bound.make_ledger()
            try:
                getattr(bound, name)(ledger, **arguments)
            except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - all are convictions
                broken[name] = error
            finally:
                ledger.close()
    return broken


def _parameters(test: Any) -> Iterator[dict[str, Any]]:
    """Spell out what `pytest.mark.parametrize` says about *test*."""
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    choices = []
    for mark in marks:
        names, values = mark.args
        if isinstance(names, str):
            choices.append([{names: value} for value in values])
        else:
            choices.append([dict(zip(names, value, strict=True)) for value in values])
    for chosen in product(*choices):
        yield {name: value for choice in chosen for name, value in choice.items()}
