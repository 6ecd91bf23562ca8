"""The contracts convict stores that are broken on purpose, each by the rule it breaks."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from sqlalchemy.exc import IntegrityError

from semel.sql import operators as audit_sql
from semel.sql import waiting as waiting_sql
from semel.sql.database import SqlDatabase
from semel.sql.operators import SqlAuditTrail
from semel.sql.waiting import SqlWaitingStore
from tests.contracts.broken_letters import LETTERS_CONVICTED_BY, ROOMS_CONVICTED_BY
from tests.contracts.broken_records import (
    APPROVALS_CONVICTED_BY,
    ATTEMPTS_CONVICTED_BY,
    REVISIONS_CONVICTED_BY,
    TRAILS_CONVICTED_BY,
)
from tests.messaging.worlds import memory_world, postgres_world
from tests.stores.approvals import ApprovalsContract
from tests.stores.attempts import AttemptsContract
from tests.stores.audit import AuditContract
from tests.stores.deadletters import DeadLettersContract
from tests.stores.revisions import RevisionsContract
from tests.stores.waiting import WaitingContract

IN_MEMORY = [
    *((DeadLettersContract, "dead_letters", *one) for one in LETTERS_CONVICTED_BY.items()),
    *((WaitingContract, "waiting", *one) for one in ROOMS_CONVICTED_BY.items()),
    *((AuditContract, "audit", *one) for one in TRAILS_CONVICTED_BY.items()),
    *((RevisionsContract, "revisions", *one) for one in REVISIONS_CONVICTED_BY.items()),
    *((AttemptsContract, "attempts", *one) for one in ATTEMPTS_CONVICTED_BY.items()),
    *((ApprovalsContract, "approvals", *one) for one in APPROVALS_CONVICTED_BY.items()),
]


@pytest.mark.parametrize(
    ("contract", "store", "broken", "rule"), IN_MEMORY, ids=[one[2].__name__ for one in IN_MEMORY]
)
def test_a_broken_store_is_convicted_by_the_rule_it_breaks(
    contract, store, broken, rule, monkeypatch
):
    use(monkeypatch, SqlDatabase, store, lambda unit: broken(unit.session))

    class Bound(contract):
        def world(self):
            return memory_world()

    with pytest.raises(AssertionError):
        getattr(Bound(), rule)()


class AsksWithoutLocking(SqlWaitingStore):
    """Says which keys are held, and lets others begin to hold them."""

    async def _lock(self, consumer, names):
        return


class TakesWithoutLocking(SqlWaitingStore):
    """Leaves what it took to the next worker as well."""

    async def take_due(self, consumer, limit):
        unlocked = waiting_sql.WHOSE_TURN.order_by(waiting_sql.waiting_message.c.place)
        rows = (await self._run(unlocked.limit(limit), {"by": consumer})).all()
        return [await self.get(row.consumer, row.message_id) for row in rows]


class AppendsWithoutLocking(SqlAuditTrail):
    """Reads the head, and writes behind it whatever others have written meanwhile."""

    async def _run(self, statement):
        return await super()._run(audit_sql.HEAD if statement is audit_sql.LOCK_HEAD else statement)


IN_POSTGRES = [
    (
        WaitingContract,
        "waiting",
        AsksWithoutLocking,
        "test_whoever_asks_for_a_key_waits_for_a_parking_that_commits",
    ),
    (
        WaitingContract,
        "waiting",
        AsksWithoutLocking,
        "test_a_parking_waits_for_whoever_has_asked_for_its_key",
    ),
    (
        WaitingContract,
        "waiting",
        TakesWithoutLocking,
        "test_what_one_worker_has_taken_another_does_not_get",
    ),
    (AuditContract, "audit", AppendsWithoutLocking, "test_appends_at_once_form_one_chain"),
]


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("contract", "store", "broken", "rule"),
    IN_POSTGRES,
    ids=[f"{one[2].__name__}-{one[3]}" for one in IN_POSTGRES],
)
def test_a_store_that_does_not_lock_is_convicted(
    contract, store, broken, rule, monkeypatch, quick_postgres_server
):
    use(monkeypatch, SqlDatabase, store, lambda unit: broken(unit.session))

    class Bound(contract):
        def world(self):
            return postgres_world(quick_postgres_server)

    def try_often():
        for _ in range(5):
            getattr(Bound(), rule)()

    # The database may be the judge.  A race that is not lost at once is lost soon.
    with pytest.raises((AssertionError, IntegrityError)):
        try_often()


def use(monkeypatch, database, store, made):
    """Let every unit of *database* have another store."""
    right = database.begin

    @asynccontextmanager
    async def begin(self):
        async with right(self) as unit:
            setattr(unit, store, made(unit))
            yield unit

    monkeypatch.setattr(database, "begin", begin)
