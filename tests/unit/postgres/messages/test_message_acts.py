"""Services and people beside the sink: real claims, acts and hand-overs around its cycles."""

from __future__ import annotations

import asyncio

import pytest
from typer.testing import CliRunner

from semel.cli.app import app
from semel.lease import Owner
from semel.ledgers import open_ledger
from semel.messaging.changes import MessageChange, Op
from semel.messaging.handle.claims import ClaimRequest, Duplicate, RunByPipeline
from semel.operate import audit
from semel.operate.audit import CycleUnsettled, acting, write_down
from semel.operate.consumers import NotHandedOver, hand_over
from semel.operate.parking import skip
from semel.pipeline.sink import SinkOK
from semel.pipeline.txn import CycleId, Scope
from semel.postgres.messages import MessagesSink
from tests.unit.postgres.messages.message_place import (
    CONSUMER,
    asked,
    claim,
    committed,
    of_waiting,
    prepared,
    rows_of,
    txn,
    wait,
)

pytestmark = pytest.mark.postgres

ANN = {"actor": "ann", "reason": "it was wrong"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(audit, "SETTLE_SECONDS", 0.05)


def claimed(url, message_id):
    async def question(database):
        async with database.begin() as unit:
            return await unit.claims.try_claim(CONSUMER, ClaimRequest(message_id))

    return asked(url, question)


def test_a_service_claims_nothing_once_the_sink_has_started(url, sink, database):
    committed(sink, claim("a"))

    for message_id in ("a", "b"):
        with pytest.raises(RunByPipeline, match="search-indexer/main"):
            claimed(url, message_id)

    assert rows_of(database, "SELECT message_id FROM processed_message") == [("a",)]


def test_an_act_is_refused_between_a_lost_driver_and_recovery_which_then_goes_through(
    url, sink, database
):
    committed(sink, claim("a", state="FAILED_RETRYABLE"), wait("a"))
    (seen,) = sink.come_back().rows
    of = txn()
    promise = prepared(sink, of, of_waiting(Op.TAKE, seen, "COMPLETED"))
    assert isinstance(promise, SinkOK)
    sink.close()  # the driver dies after the decision: its session and its locks are gone

    with pytest.raises(CycleUnsettled, match=f"cycle {of.cycle.label} of search-indexer/main"):
        asked(url, lambda database: skip(database, CONSUMER, "a", **ANN))
    recovering = MessagesSink(url, CONSUMER)
    assert isinstance(recovering.commit(of, promise.token), SinkOK)
    recovering.close()

    assert rows_of(database, "SELECT state, marker FROM processed_message") == [("COMPLETED", "")]
    with pytest.raises(audit.NoSuchMessage):
        asked(url, lambda database: skip(database, CONSUMER, "a", **ANN))


def test_an_act_that_locked_nothing_before_it_wrote_looks_at_the_books_afterwards(
    url, sink, database
):
    of, promised = txn(), []

    def promise_and_die():
        promised.append(prepared(sink, of, MessageChange(Op.VERSION, key="k", version=1)))
        sink.close()

    async def pass_over(database):
        async with acting(database) as unit:
            await asyncio.to_thread(promise_and_die)
            await unit.versions.advance(CONSUMER, "k", 4)
            await write_down(unit, "ann", "gap.pass", CONSUMER, reason="it never comes")

    with pytest.raises(CycleUnsettled):
        asked(url, pass_over)
    recovering = MessagesSink(url, CONSUMER)
    outcome = recovering.commit(of, promised[0].token)
    recovering.close()

    assert isinstance(outcome, SinkOK), outcome
    assert rows_of(database, "SELECT key, version FROM aggregate_version") == [("k", 1)]


def test_an_act_waits_for_a_cycle_that_commits_and_finds_what_it_did(url, sink, monkeypatch):
    monkeypatch.setattr(audit, "SETTLE_SECONDS", 10.0)
    committed(sink, claim("a", state="PARKED"), wait("a", waits="parked"))
    of = txn()
    promise = prepared(sink, of, claim("b"))

    async def question(database):
        act = asyncio.create_task(skip(database, CONSUMER, "a", **ANN))
        await asyncio.wait({act}, timeout=0.2)
        assert not act.done()
        await asyncio.to_thread(sink.commit, of, promise.token)
        await act

    asked(url, question)


def test_a_consumer_goes_to_a_pipeline_and_back_with_its_claims(url, database, tmp_path):
    ledger = open_ledger(f"sqlite:///{tmp_path / 'pipeline.ledger'}")
    scope = Scope(ledger.ledger_id, "search-indexer", "main")
    lease = ledger.acquire(scope, Owner.here(), 60.0)
    claimed(url, "of the service")
    sink = MessagesSink(url, CONSUMER)
    sink.check(None)
    sink.fence(scope, lease.epoch)
    of = CycleId(scope, 1, 1).attempt()
    promise = prepared(sink, of, claim("of the pipeline"))
    ledger.release(lease)

    async def hand(database):
        return await hand_over(database, CONSUMER, ledger, **ANN)

    sink.close()
    with pytest.raises(NotHandedOver, match="prepared in the books"):
        asked(url, hand)
    recovering = MessagesSink(url, CONSUMER)
    recovering.commit(of, promise.token)
    recovering.close()
    done = asked(url, hand)

    assert (done.consumer, done.pipeline) == (CONSUMER, "search-indexer/main")
    assert isinstance(claimed(url, "of the pipeline"), Duplicate)
    assert isinstance(claimed(url, "of the service"), Duplicate)
    assert rows_of(database, "SELECT * FROM consumer_engine") == []
    ledger.close()


@pytest.mark.parametrize("more", ["", "schema=semel"])
def test_the_command_finds_the_ledger_in_the_database_itself(url, database, more):
    ledger = open_ledger(url)
    scope = Scope(ledger.ledger_id, "search-indexer", "main")
    lease = ledger.acquire(scope, Owner.here(), 60.0)
    sink = MessagesSink(url, CONSUMER)
    sink.check(None)
    sink.fence(scope, lease.epoch)
    sink.close()
    given = url.replace("postgresql", "postgresql+asyncpg", 1)
    given += f"{'&' if '?' in url else '?'}{more}" if more else ""
    named = ("--database", given, "--reason", "it is time", "--yes")
    command = ("consumer", "hand-over", CONSUMER, *named)

    try:
        refused = CliRunner().invoke(app, command)
    finally:
        ledger.release(lease)
    done = CliRunner().invoke(app, command)

    assert refused.exit_code == 4, refused.output
    assert "it runs, process" in refused.output
    assert done.exit_code == 0, done.output
    assert "services may claim for it again" in done.output
    assert rows_of(database, "SELECT * FROM consumer_engine") == []
    ledger.close()
