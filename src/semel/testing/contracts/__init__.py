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
    from semel.testing.contracts.approvals import ApprovalsContract
    from semel.testing.contracts.attempts import AttemptsContract
    from semel.testing.contracts.audit import AuditContract
    from semel.testing.contracts.broker import BrokerAbility, BrokerContract
    from semel.testing.contracts.claims import ClaimsContract
    from semel.testing.contracts.deadletters import DeadLettersContract
    from semel.testing.contracts.inbox import InboxContract
    from semel.testing.contracts.ledger import LedgerContract
    from semel.testing.contracts.members import MembersContract
    from semel.testing.contracts.outbox import OutboxContract
    from semel.testing.contracts.outcomes import OutcomesContract
    from semel.testing.contracts.replays import ReplaysContract
    from semel.testing.contracts.revisions import RevisionsContract
    from semel.testing.contracts.versions import VersionsContract
    from semel.testing.contracts.waiting import WaitingContract

__all__ = [
    "ApprovalsContract",
    "AttemptsContract",
    "AuditContract",
    "BrokerAbility",
    "BrokerContract",
    "Capability",
    "ClaimsContract",
    "DeadLettersContract",
    "InboxContract",
    "LedgerContract",
    "MembersContract",
    "OutboxContract",
    "OutcomesContract",
    "ReplaysContract",
    "RevisionsContract",
    "SinkContract",
    "VersionsContract",
    "WaitingContract",
]

# Unlike the sink's, these need pytest.
__getattr__ = lazily(
    __name__,
    {
        "ApprovalsContract": "semel.testing.contracts.approvals",
        "AttemptsContract": "semel.testing.contracts.attempts",
        "AuditContract": "semel.testing.contracts.audit",
        "BrokerAbility": "semel.testing.contracts.broker",
        "BrokerContract": "semel.testing.contracts.broker",
        "ClaimsContract": "semel.testing.contracts.claims",
        "DeadLettersContract": "semel.testing.contracts.deadletters",
        "InboxContract": "semel.testing.contracts.inbox",
        "LedgerContract": "semel.testing.contracts.ledger",
        "MembersContract": "semel.testing.contracts.members",
        "OutboxContract": "semel.testing.contracts.outbox",
        "OutcomesContract": "semel.testing.contracts.outcomes",
        "ReplaysContract": "semel.testing.contracts.replays",
        "RevisionsContract": "semel.testing.contracts.revisions",
        "VersionsContract": "semel.testing.contracts.versions",
        "WaitingContract": "semel.testing.contracts.waiting",
    },
)
