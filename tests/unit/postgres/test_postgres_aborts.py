"""What becomes of many attempts that a recovery gives up together."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pyarrow as pa
import pytest

from semel.errors import Retryable
from semel.memory.ledger import MemoryLedger
from semel.pipeline.driver import Driver
from semel.pipeline.recovery import SinkBlocksStart
from semel.pipeline.sink import Found, SinkOK
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId, SinkTxnId
from semel.postgres.connect import pool
from semel.postgres.sink import PostgresSink
from semel.testing.services import CutProxy, PostgresServer
from tests.unit.postgres.postgres_place import SCOPE, left_behind

pytestmark = pytest.mark.postgres

MANY = 230
MODES = ["staging", "prepared"]


def new_sink(url: str, mode: str = "staging", name: str = "postgres") -> PostgresSink:
    return PostgresSink(url, "entries", mode=mode, name=name, lock_seconds=0.5)


def held(sink: PostgresSink, txn: SinkTxnId):
    writer = sink.stager(txn).open("task")
    writer.write(pa.RecordBatch.from_pydict({"id": [txn.cycle.batch]}))
    outcome = sink.prepare(txn, [writer.finish()])
    assert isinstance(outcome, SinkOK), outcome
    return outcome.token


def stranded(sink: PostgresSink, first: int, last: int) -> list[SinkTxnId]:
    """Prepare attempts as a process leaves them that dies before its decisions."""
    txns = [CycleId(SCOPE, 1, number).attempt() for number in range(first, last)]
    for txn in txns:
        held(sink, txn)
        sink.close()
    return txns


@pytest.fixture(scope="module")
def roomy() -> Iterator[str]:
    with PostgresServer(18, {"max_prepared_transactions": "300", "fsync": "off"}).start() as server:
        yield server.url
        pool().close_all()


@pytest.mark.parametrize("mode", MODES)
def test_many_attempts_are_given_up_at_once_and_remembered_as_aborted(roomy, mode):
    with psycopg.connect(roomy, autocommit=True) as database:
        database.execute("CREATE TABLE IF NOT EXISTS entries (id bigint)")
        sink = new_sink(roomy, mode)
        txns = stranded(sink, 0, MANY)

        assert sink.abort_together(txns) == set(txns)

        assert left_behind(database) == []
        assert sink.recover(SCOPE) == []
        assert {sink.look_up(txn, None).evidence for txn in txns} == {"aborted"}
        assert sink.abort_together(txns) == set(txns)


@pytest.mark.parametrize("mode", MODES)
def test_a_committed_attempt_among_them_is_left_alone(url, database, mode):
    sink = new_sink(url, mode)
    committed, loser, other = (CycleId(SCOPE, 1, number).attempt() for number in (1, 2, 3))
    sink.commit(committed, held(sink, committed))
    held(sink, loser)
    held(sink, other)

    assert sink.abort_together([committed, loser]) == {loser}

    assert sink.look_up(committed, None).found is Found.VISIBLE
    assert sink.look_up(other, None).found is Found.HELD
    assert database.execute("SELECT id FROM entries").fetchall() == [(1,)]


def test_an_attempt_at_which_somebody_else_works_is_left_out(url, database):
    sink, elsewhere = new_sink(url), new_sink(url)
    free, busy = (CycleId(SCOPE, 1, number).attempt() for number in (1, 2))
    held(sink, free)
    held(elsewhere, busy)

    assert sink.abort_together([free, busy]) == {free}

    assert len(left_behind(database)) == 1
    assert isinstance(sink.abort(busy, None), SinkOK)
    assert left_behind(database) == []


def test_a_reader_of_one_table_keeps_only_its_attempt(url, database, monkeypatch):
    monkeypatch.setattr("semel.postgres.staging._DROP_LOCK_SECONDS", 0.3)
    ledger, sink = MemoryLedger(), new_sink(url)
    driver = Driver("payments", ledger, [sink])
    driver.start()
    generation = ledger.open_generation(driver.lease, "checkpoint").number
    txns = [CycleId(driver.scope, generation, number).attempt() for number in range(3)]
    for txn in txns:
        ledger.plan(driver.lease, txn)
        ledger.set_range(driver.lease, txn, BatchRange.of_offsets({"": (0, 1)}))
        ledger.set_prepared(driver.lease, txn, {sink.name: held(sink, txn)}, {})
    sink.close()
    with psycopg.connect(url) as reader:
        reader.execute(f'SELECT * FROM semel."{_table_of(database, txns[1])}"')

        with pytest.raises(SinkBlocksStart) as blocked:
            driver.start()

        assert blocked.value.txn == str(txns[1])
        assert len(left_behind(database)) == 1
    driver.start()
    assert left_behind(database) == []


def test_a_server_that_does_not_answer_has_given_up_nothing(url, database, postgres_server):
    sink = new_sink(url)
    txns = stranded(sink, 0, 2)
    with CutProxy(postgres_server.port) as proxy:
        distant = new_sink(url.replace(str(postgres_server.port), str(proxy.port)))
        proxy.refuse()

        with pytest.raises(Retryable):
            distant.abort_together(txns)

    assert len(left_behind(database)) == 2


def _table_of(database, txn: SinkTxnId) -> str:
    (name,) = database.execute(
        "SELECT tablename FROM pg_tables WHERE starts_with(tablename, %s)", [f"stg_{txn.slug}"]
    ).fetchone()
    return name
