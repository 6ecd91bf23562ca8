"""Every database keeps the contracts of what follows a failure."""

from __future__ import annotations

from tests.messaging.places import InPostgres, InSqlite
from tests.stores.approvals import ApprovalsContract
from tests.stores.attempts import AttemptsContract
from tests.stores.audit import AuditContract
from tests.stores.deadletters import DeadLettersContract
from tests.stores.revisions import RevisionsContract
from tests.stores.waiting import WaitingContract


class TestSqliteDeadLetters(InSqlite, DeadLettersContract):
    pass


class TestSqliteWaitingRoom(InSqlite, WaitingContract):
    pass


class TestSqliteAuditTrail(InSqlite, AuditContract):
    pass


class TestPostgresDeadLetters(InPostgres, DeadLettersContract):
    pass


class TestPostgresWaitingRoom(InPostgres, WaitingContract):
    pass


class TestPostgresAuditTrail(InPostgres, AuditContract):
    pass


class TestSqliteRevisions(InSqlite, RevisionsContract):
    pass


class TestSqliteApprovals(InSqlite, ApprovalsContract):
    pass


class TestPostgresRevisions(InPostgres, RevisionsContract):
    pass


class TestPostgresApprovals(InPostgres, ApprovalsContract):
    pass


class TestSqliteAttempts(InSqlite, AttemptsContract):
    pass


class TestPostgresAttempts(InPostgres, AttemptsContract):
    pass
