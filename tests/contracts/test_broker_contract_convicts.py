"""The broker contract is able to convict: each of its rules convicts a broker that breaks it."""

from __future__ import annotations

import pytest
from broken_brokers import CONVICTED_BY, broker_with
from broker_place import InThisProcess

from semel.errors import SemelError
from semel.testing import BrokerContract
from semel.testing.clock import SimulatedClock

CASES = [(broken, rule) for broken, broken_rules in CONVICTED_BY.items() for rule in broken_rules]

VERDICTS = (AssertionError, pytest.fail.Exception, SemelError)
"""How a test of the contract fails; anything else is a mistake in the broken broker."""


def contract_of(broker_class):
    class Contract(InThisProcess):
        patience_seconds = 0.5

        async def open(self):
            self.clock = SimulatedClock()
            self.broker = broker_class(clock=self.clock)

    return Contract()


@pytest.mark.parametrize(("broken", "rule"), CASES, ids=[f"{b.__name__}-{r}" for b, r in CASES])
def test_a_broken_broker_is_convicted_by_the_rule_it_breaks(broken, rule):
    with pytest.raises(VERDICTS):
        getattr(contract_of(broker_with(broken)), rule)()


def test_every_rule_convicts_somebody():
    assert {rule for _, rule in CASES} == set(BrokerContract.rules())
