"""The executable contract of a broker: of a subscription, a publisher and a reader.

    fetch     what one member fetches, and when
    sharing   commits, groups, rebalances, fencing
    publish   what is sent, and what is read outside any group

An implementation says how to make the three, and how to do what tests cannot do
by themselves; what it cannot do either, it names in `cannot`:

    class TestMemoryBroker(BrokerContract):
        async def open(self): ...
        async def create_topic(self, topic, partitions): ...
        async def subscribe(self, group, topics): ...
        def make_publisher(self): ...
        def make_reader(self): ...
        async def kill(self, member): ...
"""

from __future__ import annotations

from semel.testing.contracts.broker_fetch import FetchRules
from semel.testing.contracts.broker_publish import PublishRules, ReadRules
from semel.testing.contracts.broker_sharing import (
    CommitRules,
    FencingRules,
    RevokingRules,
    SharingRules,
)
from semel.testing.contracts.broker_world import BrokerAbility

__all__ = ["BrokerAbility", "BrokerContract", "rules"]


class BrokerContract(
    FetchRules, CommitRules, SharingRules, RevokingRules, FencingRules, PublishRules, ReadRules
):
    """Everything that `semel.messaging.broker` asks of a broker; derive a test class from it."""


def rules(contract: type[BrokerContract] = BrokerContract) -> list[str]:
    """List the contract's tests by name."""
    return [name for name in dir(contract) if name.startswith("test_")]
