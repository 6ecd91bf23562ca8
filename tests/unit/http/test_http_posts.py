"""The fallback for services without two phases: one POST per chunk, under one key."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections import Counter

import pyarrow as pa
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from test_http_sink import SECRET, Served, Service, secret_headers

from semel import crashpoints
from semel.crashpoints import CrashPoint
from semel.errors import SemelError
from semel.memory.ledger import MemoryLedger
from semel.operate.resolution import Choice, Way, plan_resolution, resolve
from semel.operate.status import Pipeline
from semel.pipeline.cycle import CommitFatal
from semel.pipeline.driver import Driver, Settings
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff
from semel.pipeline.txn import CycleId, Scope
from semel.sinks import CallbackSink, HttpPostSink, HttpSink
from semel.testing import SinkContract
from semel.testing.local import local_stage

SCOPE = Scope("ledger", "payments", "main")
ONCE = Backoff(tries=1)


class Remembering:
    """A service that takes rows by POST, and remembers the keys."""

    def __init__(self):
        self.taken, self.posts, self.answers = {}, Counter(), []
        self.app = Starlette(routes=[Route("/rows{more:path}", self.take, methods=["POST"])])

    async def take(self, request):
        if self.answers:
            return JSONResponse({"reason": "so it is"}, self.answers.pop(0))
        body = gzip.decompress(await request.body())
        key = request.headers["Idempotency-Key"]
        self.posts[key] += 1
        self.taken.setdefault(key, [json.loads(line) for line in body.splitlines()])
        return Response(status_code=202)

    def rows(self):
        return [row for rows in self.taken.values() for row in rows]


@pytest.fixture(scope="module")
def served():
    service = Remembering()
    with Served(service.app) as there:
        service.url = f"{there.url}/rows"
        yield service


@pytest.fixture
def service(served):
    served.__dict__.update(taken={}, posts=Counter(), answers=[])
    return served


class TestHttpPostSink(SinkContract):
    secrets = (SECRET,)

    @pytest.fixture(autouse=True)
    def place(self, tmp_path, service):
        self.path, self.service = tmp_path / "staging", service
        self.sinks = []
        yield
        for sink in self.sinks:
            sink.close()

    def make_sink(self):
        sink = HttpPostSink(
            self.service.url, staging=str(self.path), headers=secret_headers, chunk_bytes=1000
        )
        self.sinks.append(sink)
        return sink

    def visible_rows(self, sink):
        return self.service.rows()

    def leavings(self, sink):
        return [*self.path.glob("*/semel-*/prepared/*"), *self.path.glob("*/semel-*/from=*/*/*")]

    def lose(self, sink, txn):
        shutil.rmtree(sink._area.folder(txn))


@pytest.fixture
def sink(service, tmp_path):
    sink = HttpPostSink(service.url, staging=str(tmp_path), chunk_bytes=20, tries=2)
    sink.fence(SCOPE, 1)
    yield sink
    sink.close()


def prepared(sink):
    txn = CycleId(SCOPE, 1, 0).attempt()
    writer = sink.stager(txn).open("task")
    writer.write(pa.RecordBatch.from_pydict({"id": [1, 2, 3], "text": ["a", None, "a long text"]}))
    outcome = sink.prepare(txn, [writer.finish()])
    assert isinstance(outcome, SinkOK), outcome
    return txn, outcome.token


class Crash(BaseException):
    """The end of a process."""


@pytest.mark.parametrize("point", [CrashPoint.HELD_PREPARE_SEALED, CrashPoint.HELD_SENT])
def test_chunks_are_posted_again_under_their_keys_after_a_crash(sink, service, point):
    def crash(reached, name):
        if reached is point:
            raise Crash

    txn, token = prepared(sink)
    before = crashpoints.install(crash)
    try:
        if point is CrashPoint.HELD_SENT:
            with pytest.raises(Crash):
                sink.commit(txn, token)
    finally:
        crashpoints.install(before)

    assert sink.recover(SCOPE) == [txn]
    assert sink.commit(txn, token) == SinkOK()

    again = 2 if point is CrashPoint.HELD_SENT else 1
    where = hashlib.sha256(service.url.encode()).hexdigest()[:12]
    keys = [f"{SCOPE.slug}.http.{where}.g1.b0.{number}" for number in range(len(service.posts))]
    assert service.posts == Counter(dict.fromkeys(keys, again))
    assert len(keys) > 1
    assert sorted(row["id"] for row in service.rows()) == [1, 2, 3]
    assert sink.look_up(txn, token).found is Found.VISIBLE


def test_sinks_of_one_pipeline_never_share_a_key_at_a_service(service, tmp_path):
    for name, path in (("payments", ""), ("refunds", ""), ("refunds-2", "?"), ("payments", "?")):
        url = f"{service.url}{path.replace('?', '/refunds')}"
        sink = HttpPostSink(url, staging=str(tmp_path / f"{name}{len(url)}"), name=name)
        sink.fence(SCOPE, 1)
        assert sink.commit(*prepared(sink)) == SinkOK()
        sink.close()

    assert sorted(service.posts.values()) == [1] * 4
    assert len(service.rows()) == 12


@pytest.mark.parametrize(("status", "kind"), [(409, SinkOK), (503, SinkOK), (422, SinkFatal)])
def test_an_answer_to_a_post_is_waited_out_or_stops_the_cycle(sink, service, status, kind):
    txn, token = prepared(sink)
    service.answers = [status]

    assert isinstance(sink.commit(txn, token), kind)

    assert sink.look_up(txn, token).found is (Found.VISIBLE if kind is SinkOK else Found.HELD)
    assert sink.commit(txn, token) == SinkOK()


def test_a_service_that_is_down_leaves_the_cycle_prepared(sink, service):
    txn, token = prepared(sink)
    service.answers = [503] * 99

    assert isinstance(sink.commit(txn, token), SinkRetryable)

    service.answers = []
    assert sink.commit(txn, token) == SinkOK()


def refused_for_good(*_):
    raise ValueError("row 3 has no currency")


@pytest.mark.parametrize("kind", ["receiver", "post", "callback"])
def test_rows_that_are_refused_for_good_after_the_decision_stop_the_pipeline_no_longer(
    service, tmp_path, kind
):
    with Service(tmp_path, refused_for_good) as receiving:
        sink = {
            # Two: the server closes a connection behind a 500, and the next question may meet that.
            "receiver": lambda: HttpSink(receiving.url, name="new", tries=2),
            "post": lambda: HttpPostSink(service.url, staging=str(tmp_path), name="new"),
            "callback": lambda: CallbackSink(refused_for_good, staging=str(tmp_path), name="new"),
        }[kind]()
        service.answers = [422] * 99
        driver = Driver("shop", MemoryLedger(), [sink], settings=Settings(commit_backoff=ONCE))
        driver.start()
        driver.ledger.open_generation(driver.lease, "checkpoint")
        cycle = CycleId(driver.scope, 1, 0)
        batch = BatchRange.of_offsets({"orders/0": (0, 2)})
        stage = local_stage([sink], [{"id": 1}, {"id": 2}], as_batch=pa.RecordBatch.from_pylist)
        outcome = driver.run_cycle(cycle, lambda: batch, stage)
        assert isinstance(outcome, CommitFatal)
        driver.stop()
        with pytest.raises(SemelError, match=r"cannot commit|did not commit"):
            driver.start()
        driver.stop()

        pipeline, choice = Pipeline.of(driver), Choice(Way.ABANDON, "new")
        record, plan = plan_resolution(pipeline, cycle.label, choice)
        done = resolve(pipeline, record, plan, choice, who="ann", why="no currency")

        assert done.finished, done
        assert sink.recover(driver.scope) == []
        driver.start()
        driver.stop()
        sink.close()


def test_the_guarantee_says_that_it_is_weaker(sink):
    assert "remembers Idempotency-Key" in sink.guarantee().weakened_by[0]


del SinkContract
