"""The PostgreSQL ledger when an answer is lost on its way."""

from __future__ import annotations

import os
import threading
from contextlib import closing

import pytest

from semel.errors import InDoubt, LedgerUnavailable
from semel.pipeline.ledger import CycleState, Decision
from semel.postgres.ledger import PostgresLedger
from semel.testing.contracts.ledger_world import LedgerOwner
from semel.testing.services.proxy import CutProxy

pytestmark = pytest.mark.postgres


@pytest.fixture
def ledger(postgres_url):
    with closing(PostgresLedger(postgres_url, lock_seconds=0.2)) as made:
        yield made


@pytest.fixture
def proxy(postgres_server):
    with CutProxy(postgres_server.port) as started:
        yield started


@pytest.fixture
def distant(proxy, postgres_server, postgres_url, ledger):
    """A second object, whose connection can be cut."""
    url = postgres_url.replace(f":{postgres_server.port}/", f":{proxy.port}/")
    with closing(PostgresLedger(url, lock_seconds=0.2)) as made:
        assert made.ledger_id == ledger.ledger_id
        yield made


class TestLostAnswers:
    def test_a_commit_without_an_answer_is_in_doubt_and_stands(self, ledger, distant, proxy):
        driver = LedgerOwner.of(distant)
        txn = driver.reach(CycleState.PREPARED)
        proxy.swallow_reply_to(b"COMMIT\0")

        with pytest.raises(InDoubt, match=str(txn)):
            distant.decide_commit(driver.lease, txn)

        assert distant.decide_abort(txn) is Decision.COMMIT
        distant.decide_commit(driver.lease, txn)
        assert driver.end() == 10

    def test_an_abort_without_an_answer_is_in_doubt_and_stands(self, distant, proxy):
        driver = LedgerOwner.of(distant)
        txn = driver.reach(CycleState.PREPARED)
        proxy.swallow_reply_to(b"COMMIT\0")

        with pytest.raises(InDoubt):
            distant.decide_abort(txn)

        assert distant.decide_abort(txn) is Decision.ABORT

    def test_a_connection_lost_before_the_commit_takes_no_decision(self, distant, proxy):
        driver = LedgerOwner.of(distant)
        txn = driver.reach(CycleState.PREPARED)
        proxy.swallow_reply_to(b"UPDATE semel_attempt")

        with pytest.raises(LedgerUnavailable):
            distant.decide_commit(driver.lease, txn)

        assert driver.state(txn) is CycleState.PREPARED
        distant.decide_commit(driver.lease, txn)

    def test_a_commit_that_never_arrives_is_ended_before_the_abort(self, ledger, distant, proxy):
        driver = LedgerOwner.of(distant)
        txn = driver.reach(CycleState.PREPARED)
        session = distant._database._session
        kept = []
        session.commit = lambda: _hangs_up(session, kept)

        with pytest.raises(InDoubt):
            distant.decide_commit(driver.lease, txn)
        with pytest.raises(LedgerUnavailable, match="lock"):
            ledger.decide_abort(txn)

        assert distant.decide_abort(txn) is Decision.ABORT
        assert ledger.decide_abort(txn) is Decision.ABORT
        os.close(kept.pop())

    def test_everything_but_a_decision_is_simply_done_again(self, distant, proxy):
        driver = LedgerOwner.of(distant)
        proxy.swallow_reply_to(b"COMMIT\0")

        with pytest.raises(LedgerUnavailable):
            distant.renew(driver.lease)

        distant.renew(driver.lease)

    def test_a_server_that_refuses_is_unavailable(self, distant, proxy):
        driver = LedgerOwner.of(distant)
        txn = driver.reach(CycleState.PREPARED)
        proxy.refuse()
        proxy.cut()

        with pytest.raises(LedgerUnavailable):
            distant.decide_commit(driver.lease, txn)
        with pytest.raises(LedgerUnavailable):
            distant.decide_abort(txn)

        proxy.accept()
        assert driver.state(txn) is CycleState.PREPARED

    def test_a_heartbeat_survives_the_loss_of_its_connection(self, distant, proxy):
        driver = LedgerOwner.of(distant)
        failed = []

        def beat():
            for _ in range(20):
                try:
                    distant.renew(driver.lease)
                except LedgerUnavailable as error:
                    failed.append(error)

        thread = threading.Thread(target=beat)
        thread.start()
        proxy.cut()
        thread.join(timeout=30)

        assert not thread.is_alive()
        distant.renew(driver.lease)


def _hangs_up(session, kept):
    """Lose the connection without the server's knowing: its transaction stays open."""
    number = session.connection.fileno()
    kept.append(os.dup(number))
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, number)
    os.close(nowhere)
    type(session).commit(session)
