"""The contracts of semel's protocols as abstract pytest classes, for users' implementations too."""

import importlib.util
import pkgutil

if importlib.util.find_spec("pytest"):
    import pytest

    # Failing assertions in the contracts then show the values they compared.
    pytest.register_assert_rewrite(
        *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
    )

from typing import TYPE_CHECKING

from semel.lazy import lazily
from semel.testing.contracts.sink import SinkContract
from semel.testing.contracts.sink_world import Capability

if TYPE_CHECKING:
    from semel.testing.contracts.audit import AuditContract
    from semel.testing.contracts.broker import BrokerAbility, BrokerContract
    from semel.testing.contracts.claims import ClaimsContract
    from semel.testing.contracts.deadletters import DeadLettersContract
    from semel.testing.contracts.inbox import InboxContract
    from semel.testing.contracts.ledger import LedgerContract
    from semel.testing.contracts.outbox import OutboxContract
    from semel.testing.contracts.waiting import WaitingContract

__all__ = [
    "AuditContract",
    "BrokerAbility",
    "BrokerContract",
    "Capability",
    "ClaimsContract",
    "DeadLettersContract",
    "InboxContract",
    "LedgerContract",
    "OutboxContract",
    "SinkContract",
    "WaitingContract",
]

# Unlike the sink's, these need pytest.
__getattr__ = lazily(
    __name__,
    {
        "AuditContract": "semel.testing.contracts.audit",
        "BrokerAbility": "semel.testing.contracts.broker",
        "BrokerContract": "semel.testing.contracts.broker",
        "ClaimsContract": "semel.testing.contracts.claims",
        "DeadLettersContract": "semel.testing.contracts.deadletters",
        "InboxContract": "semel.testing.contracts.inbox",
        "LedgerContract": "semel.testing.contracts.ledger",
        "OutboxContract": "semel.testing.contracts.outbox",
        "WaitingContract": "semel.testing.contracts.waiting",
    },
)
