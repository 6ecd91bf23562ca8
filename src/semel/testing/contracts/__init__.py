"""The contracts of semel's protocols as abstract pytest classes, for users' implementations too.

sink     sink_prepare sink_finish sink_keeping sink_rows sink_world
ledger   ledger_leases ledger_decisions ledger_positions ledger_records ledger_world
broker   broker_fetch broker_sharing broker_world
claims
contract    what all of them have

The first file of a line is the whole contract; its parts follow, and the last one (…_world)
holds what an author supplies.
"""

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
    from semel.testing.contracts.broker import BrokerContract
    from semel.testing.contracts.broker_world import BrokerAbility
    from semel.testing.contracts.claims import ClaimsContract
    from semel.testing.contracts.ledger import LedgerContract

__all__ = [
    "BrokerAbility",
    "BrokerContract",
    "Capability",
    "ClaimsContract",
    "LedgerContract",
    "SinkContract",
]

# Unlike the sink's, these need pytest.
__getattr__ = lazily(
    __name__,
    {
        "BrokerAbility": "semel.testing.contracts.broker",
        "BrokerContract": "semel.testing.contracts.broker",
        "ClaimsContract": "semel.testing.contracts.claims",
        "LedgerContract": "semel.testing.contracts.ledger",
    },
)
