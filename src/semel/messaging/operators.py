"""The stores that only operators need, and the transaction that has them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from semel.messaging.approvals import Approvals
from semel.messaging.audit import AuditTrail
from semel.messaging.changes import RowChange
from semel.messaging.database import Database, Unit
from semel.messaging.replays import Replays
from semel.messaging.revisions import Revisions


class OperatorUnit(Unit, Protocol):
    """One open transaction with the stores that operators need beside the engine's."""

    @property
    def audit(self) -> AuditTrail:
        """What operators did."""
        ...

    @property
    def revisions(self) -> Revisions:
        """What people changed in messages."""
        ...

    @property
    def approvals(self) -> Approvals:
        """What waits for a second person."""
        ...

    @property
    def replays(self) -> Replays:
        """The replays that were begun."""
        ...

    def watching(self) -> AbstractAsyncContextManager[list[RowChange]]:
        """Collect what the block changes outside of semel's own tables: for dry runs.

        The list is complete when the block has ended, which sends the session's pending
        writes and fails where a commit would: for constraints that are checked at its end.
        """
        ...


class OperatorDatabase(Database, Protocol):
    """A database whose transactions have the operators' stores, too."""

    def begin(self) -> AbstractAsyncContextManager[OperatorUnit]:
        """Open a transaction, as `Database.begin` does."""
        ...
