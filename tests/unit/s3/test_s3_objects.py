"""The S3 sink on a real store: parts, folders, what is lost, what the store cannot do."""

from __future__ import annotations

import datetime as dt
import json
import os
from itertools import count

import pyarrow as pa
import pytest

from semel import Driver, crashpoints
from semel.crashpoints import CrashPoint
from semel.errors import Misuse, NeedsOperator, Permanent, Retryable
from semel.lease import Takeover
from semel.memory.ledger import MemoryLedger
from semel.operate.backfill import add_sink
from semel.operate.resolution import Choice, Way, plan_resolution, resolve
from semel.operate.status import Pipeline
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable, Tally, tally_of
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId, Scope
from semel.s3.staging import UploadedFile
from semel.s3.store import ObjectStore
from semel.sinks import S3Sink, committed_objects, read_committed
from semel.testing.crash import Crash as DriverCrash
from semel.testing.crash import crash_at
from semel.testing.local import local_stage
from semel.testing.services import CutProxy

pytestmark = pytest.mark.seaweedfs

SCOPE = Scope("ledger", "payments", "main")
numbers = count(1)


class Crash(BaseException):
    """The end of a process."""


@pytest.fixture
def place(monkeypatch, seaweedfs):
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    made = []

    class Place:
        url = f"s3://{seaweedfs.bucket}/unit-{next(numbers)}"
        endpoint = seaweedfs.endpoint

        def sink(self, **options):
            sink = S3Sink(self.url, **{"endpoint": self.endpoint, **options})
            sink.fence(SCOPE, 1)
            made.append(sink)
            return sink

        def rows(self):
            return read_committed(self.url, endpoint=self.endpoint).read_all().to_pylist()

    yield Place()
    for sink in made:
        sink.close()


def prepared(sink, batch, number=0):
    txn = CycleId(SCOPE, 1, number).attempt()
    writer = sink.stager(txn).open("task")
    writer.write(batch)
    receipts = [writer.finish()]
    outcome = sink.prepare(txn, receipts)
    assert isinstance(outcome, SinkOK), outcome
    return txn, outcome.token, receipts


def committed(sink, batch, number=0):
    txn, token, receipts = prepared(sink, batch, number)
    assert sink.commit(txn, token) == SinkOK()
    return txn, token, receipts


@pytest.mark.parametrize(
    ("format", "compression"),
    [("parquet", None), ("jsonl", "gzip"), ("jsonl", "zstd"), ("csv", "none"), ("csv", "zstd")],
)
def test_rows_are_read_back_with_the_columns_of_their_folders(place, format, compression):
    sink = place.sink(format=format, compression=compression, partition_by=["day", "to"])
    day = dt.date(2026, 1, 31)
    rows = [
        {"id": n, "day": day, "to": to, "text": "x,\n"} for n, to in enumerate(["a/b", None, "é"])
    ]
    batch = pa.RecordBatch.from_pylist(
        rows,
        pa.schema(
            [("id", pa.int64()), ("day", pa.date32()), ("to", pa.string()), ("text", pa.string())]
        ),
    )
    sink.check(batch.schema)

    txn, token, receipts = committed(sink, batch)

    assert sorted(place.rows(), key=lambda row: row["id"]) == rows
    assert sink.visible_tally(txn.cycle, json.loads(json.dumps(token))) == tally_of(receipts)
    paths = committed_objects(place.url, scheme="s3a", endpoint=place.endpoint)
    assert len(paths) == 3
    assert any("/day=2026-01-31/to=a%2Fb/part-" in path for path in paths)


def test_a_large_object_is_uploaded_in_parts_and_the_next_one_begins_at_the_target_size(place):
    sink = place.sink(format="jsonl", object_bytes=11 << 20, part_bytes=5 << 20)
    batch = pa.RecordBatch.from_pydict({"text": ["x" * (1 << 20)] * 3})
    txn = CycleId(SCOPE, 1, 0).attempt()
    writer = sink.stager(txn).open("task")

    for _ in range(5):
        writer.write(batch)
    receipt = writer.finish()

    assert [len(one["tags"]) for one in receipt.detail["objects"]] == [3, 1]
    outcome = sink.prepare(txn, [receipt])
    assert sink.commit(txn, outcome.token) == SinkOK()
    assert sink.visible_tally(txn.cycle, outcome.token) == receipt.tally


def test_a_task_keeps_less_than_two_parts_of_its_rows_in_memory(place, monkeypatch):
    sink = place.sink(format="jsonl", part_bytes=5 << 20)
    waiting = []
    upload = UploadedFile._upload

    def watched(file, part):
        waiting.append(len(file._waiting) + len(part))
        upload(file, part)

    monkeypatch.setattr(UploadedFile, "_upload", watched)
    writer = sink.stager(CycleId(SCOPE, 1, 0).attempt()).open("task")

    for _ in range(12):
        writer.write(pa.RecordBatch.from_pydict({"text": ["x" * (1 << 20)] * 2}))

    assert len(waiting) == 4
    assert max(waiting) < 2 * (5 << 20)
    (open_upload,) = sink.open_uploads()
    assert len(sink.store.parts(open_upload.key, open_upload.upload_id)[0]) == 4
    writer.discard()
    assert sink.open_uploads() == []


ROWS = pa.RecordBatch.from_pydict({"id": [1, 2]})


@pytest.mark.parametrize("point", [CrashPoint.S3_COMMIT_COMPLETED, CrashPoint.S3_COMMIT_MANIFEST])
def test_a_commit_that_died_half_way_is_finished_by_the_evidence_of_the_objects(place, point):
    sink = place.sink()
    txn, token, _ = prepared(sink, ROWS)

    def crash(reached, name):
        if reached is point:
            raise Crash

    before = crashpoints.install(crash)
    try:
        with pytest.raises(Crash):
            sink.commit(txn, token)
    finally:
        crashpoints.install(before)

    successor = place.sink()
    # Amazon's S3 answers NoSuchUpload to a second completion; SeaweedFS repeats its answer.
    (one,) = successor.store.get(f"_semel/{SCOPE.slug}/prepared/{txn.label}.json")["objects"]
    successor.store.give_up(one["name"], one["upload_id"])
    assert successor.commit(txn, token) == SinkOK()
    assert [row["id"] for row in place.rows()] == [1, 2]
    assert successor.recover(SCOPE) == []


def test_a_pipeline_goes_on_after_a_lifecycle_rule_has_aborted_what_was_promised(place):
    sink = place.sink(partition_by=["to"])
    driver = Driver("shop", MemoryLedger(), [sink])
    cycle = CycleId(driver.scope, 1, 0)
    ranges = BatchRange.of_offsets({"t/0": (0, 2)})
    rows = [{"id": 1, "to": "a"}, {"id": 2, "to": "b"}]
    stage = local_stage([sink], rows, as_batch=pa.RecordBatch.from_pylist)
    driver.start()
    with crash_at(CrashPoint.COMMIT_2PC_BEFORE, "s3"), pytest.raises(DriverCrash):
        driver.run_cycle(cycle, lambda: ranges, stage)
    driver.stop()
    _, second = sink.open_uploads()
    sink.store.give_up(second.key, second.upload_id)
    with pytest.raises(NeedsOperator, match="its upload is gone"):
        driver.start()
    # Of the two objects one was completed: a reader that lists the prefix sees it.
    assert [name for name, _ in sink.store.names("to=")]

    pipeline, choice, who = Pipeline.of(driver), Choice(Way.WITHOUT, "s3"), {"who": "a", "why": "b"}
    record, plan = plan_resolution(pipeline, "g1.b0", choice)
    assert resolve(pipeline, record, plan, choice, takeover=Takeover.FORCE, **who).finished
    assert [name for name, _ in sink.store.names("to=")] == []
    driver.start()
    driver.stop()
    done = add_sink(pipeline, "s3", lambda sink, past: stage, **who)

    assert (done.cycles, done.rows) == (1, 2)
    assert sorted(row["id"] for row in place.rows()) == [1, 2]


def test_an_object_that_was_removed_after_the_commit_is_missed(place):
    sink = place.sink()
    txn, token, _ = committed(sink, ROWS)
    sink.store.delete([name for name, _ in sink.store.names("part-")])
    (name,) = [o["name"] for o in sink.store.get(f"_commits/g1.b0-{SCOPE.slug}.json")["objects"]]

    sink.store.delete([name])

    outcome = sink.commit(txn, token)
    assert isinstance(outcome, SinkFatal)
    assert "no longer complete" in outcome.reason
    assert sink.visible_tally(txn.cycle, token) is None


def test_open_uploads_are_listed_over_all_pages_with_their_time(place, monkeypatch):
    sink = place.sink()
    txns = [CycleId(SCOPE, 1, 0).attempt() for _ in range(7)]
    for txn in txns:
        sink.stager(txn).open("task").write(ROWS)
    call = ObjectStore.call

    def two_at_once(store, operation, name=None, **arguments):
        if operation == "list_multipart_uploads":
            arguments["MaxUploads"] = 2
        return call(store, operation, name, **arguments)

    monkeypatch.setattr(ObjectStore, "call", two_at_once)
    uploads = sink.open_uploads()

    assert len({one.upload_id for one in uploads}) == 7
    assert all(abs(one.since - dt.datetime.now(dt.UTC).timestamp()) < 60 for one in uploads)
    left = sink.leftovers(SCOPE)
    assert {(one.txn, one.what) for one in left} == {(txn, "1 open upload(s)") for txn in txns}
    assert {one.since for one in left} == {one.since for one in uploads}
    assert set(sink.sweep(SCOPE, lambda txn: True)) == set(txns)
    assert sink.leftovers(SCOPE) == []
    assert sink.open_uploads() == []


def test_lifecycle_rules_that_would_delete_rows_are_named_in_the_guarantee(place):
    sink = place.sink()
    other = {"ID": "other", "Status": "Enabled", "Filter": {"Prefix": "elsewhere/"}}
    rules = [
        {
            "ID": "tidy",
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 2},
        },
        {
            "ID": "old",
            "Status": "Enabled",
            "Filter": {"Prefix": sink.store.prefix},
            "Expiration": {"Days": 30},
        },
        {**other, "Expiration": {"Days": 1}},
    ]
    assert sink.guarantee().weakened_by == ()
    client = sink.store.client
    client.put_bucket_lifecycle_configuration(
        Bucket=sink.store.bucket, LifecycleConfiguration={"Rules": rules}
    )

    try:
        first, second = sink.guarantee().weakened_by
    finally:
        client.delete_bucket_lifecycle(Bucket=sink.store.bucket)

    assert "rule tidy of semel aborts uploads after 2 days" in first
    assert "rule old of semel deletes objects" in second


def test_a_store_without_conditional_put_works_and_the_guarantee_says_what_is_weaker(
    place, monkeypatch
):
    call = ObjectStore.call

    def unconditional(store, operation, name=None, **arguments):
        arguments.pop("IfNoneMatch", None)
        return call(store, operation, name, **arguments)

    monkeypatch.setattr(ObjectStore, "call", unconditional)
    sink = place.sink()
    untried = sink.guarantee()
    sink.check(None)

    committed(sink, ROWS)

    assert [row["id"] for row in place.rows()] == [1, 2]
    assert "unknown until `check` has tried it" in untried.not_covered[-1]
    assert untried.weakened_by == ()
    assert not any("unknown" in what for what in sink.guarantee().not_covered)
    assert "use a store with conditional PUT" in sink.guarantee().weakened_by[0]


def test_a_lost_reply_to_the_manifest_is_answered_by_looking_at_it(place, seaweedfs):
    with CutProxy(seaweedfs.port) as proxy:
        sink = place.sink(endpoint=f"http://127.0.0.1:{proxy.port}")
        txn, token, _ = prepared(sink, ROWS)
        proxy.swallow_reply_to(b"/_commits/g1.b0-" + SCOPE.slug.encode() + b".json HTTP")

        outcome = sink.commit(txn, token)

        assert isinstance(outcome, SinkOK | SinkRetryable), outcome
        assert sink.commit(txn, token) == SinkOK()
        sink.close()
    assert [row["id"] for row in place.rows()] == [1, 2]


def test_a_store_that_does_not_answer_is_retryable_and_unreachable(place):
    sink = place.sink()
    txn, token, _ = prepared(sink, ROWS)
    sink.store.close()
    sink.store.endpoint = "http://127.0.0.1:9"

    assert isinstance(sink.commit(txn, token), SinkRetryable)
    assert sink.look_up(txn, token).found is Found.UNREACHABLE
    with pytest.raises(Retryable, match="s3 sink s3"):
        sink.recover(SCOPE)


def test_what_can_never_be_written_is_refused_before_the_first_batch(place):
    schema = pa.schema([("id", pa.int64()), ("ratio", pa.float64())])
    for columns, reason in [(["nope"], "no column"), (["ratio"], "folder")]:
        with pytest.raises(Permanent, match=reason):
            place.sink(partition_by=columns).check(schema)
    bucket = S3Sink("s3://no-such-bucket-here/x", endpoint=os.environ["AWS_ENDPOINT_URL"])
    with pytest.raises(Permanent, match="s3 sink s3"):
        bucket.recover(SCOPE)
    bucket.close()


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("/tmp/lake", {}),
        ("s3://", {}),
        ("s3://key:secret@bucket/x", {}),
        ("S3://key:a/secret@bucket/x", {}),
        ("s3://bucket/a/../b", {}),
        ("s3://bucket", {"part_bytes": 1}),
        ("s3://bucket", {"object_bytes": 0}),
        ("s3://bucket", {"format": "xlsx"}),
        ("s3://bucket", {"endpoint": "http://key:secret@host"}),
    ],
)
def test_wrong_settings_of_an_s3_sink_are_refused_at_once(url, options):
    with pytest.raises(Misuse) as refused:
        S3Sink(url, **options)

    assert "secret" not in str(refused.value)


def test_a_commit_that_slept_does_not_bring_undone_rows_back(place):
    sink = place.sink()
    txn, token, _ = prepared(sink, pa.RecordBatch.from_pydict({"id": [1, 2]}))
    asleep, put_new = place.sink(), ObjectStore.put_new

    def slept(store, name, content):
        """Put the manifest only after another process has committed and undone the cycle."""
        if store is asleep.store and name.startswith("_commits/"):
            assert sink.commit(txn, token) == SinkOK()
            assert sink.undo(txn, token) == SinkOK()
        return put_new(store, name, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "put_new", slept)
        asleep.commit(txn, token)

    assert place.rows() == []
    assert committed_objects(place.url, endpoint=place.endpoint) == []
    assert sink.visible_tally(txn.cycle, token) == Tally()


def test_an_undo_that_died_before_it_deleted_objects_is_ended_by_the_next_one(place, monkeypatch):
    sink = place.sink()
    txn, token, _ = committed(sink, pa.RecordBatch.from_pydict({"id": [1, 2]}))
    delete = ObjectStore.delete

    def dying(store, names):
        monkeypatch.setattr(ObjectStore, "delete", delete)
        raise Retryable("the store is away")

    monkeypatch.setattr(ObjectStore, "delete", dying)
    assert isinstance(sink.undo(txn, token), SinkRetryable)
    assert place.rows() == []

    assert sink.undo(txn, token) == SinkOK()
    assert [name for name, _ in sink.store.names("") if not name.startswith("_")] == []
