"""Commits to a Delta table in every race, and what the table asks of rows."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, Schema, write_deltalake
from deltalake.schema import ArrayType, StructType

from semel import Driver
from semel.clock import SYSTEM_CLOCK
from semel.errors import Misuse, Permanent
from semel.memory.ledger import MemoryLedger
from semel.operate.doctor import Kind, Patient, diagnose
from semel.pipeline.recovery import LedgerSays
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable, Tally
from semel.pipeline.source import BatchRange
from semel.pipeline.txn import CycleId, Scope
from semel.sinks import DeltaSink
from semel.testing import SimulatedClock

SCOPE = Scope("ledger-1", "payments", "main")
NOON = dt.datetime(2026, 1, 31, 12, tzinfo=dt.UTC)
SCHEMA = pa.schema([("id", pa.int64()), ("text", pa.string())])


@pytest.fixture
def uri(tmp_path):
    DeltaTable.create(tmp_path / "rows", SCHEMA)
    return str(tmp_path / "rows")


def txn(batch=0):
    return CycleId(SCOPE, 1, batch).attempt()


def rows(*ids):
    return pa.RecordBatch.from_pylist([{"id": n, "text": f"row {n}"} for n in ids], schema=SCHEMA)


def stage(sink, txn, *batches):
    writer = sink.stager(txn).open(f"task-{uuid.uuid4().hex}")
    for batch in batches:
        writer.write(batch)
    return writer.finish()


def prepared(sink, txn, *batches):
    outcome = sink.prepare(txn, [stage(sink, txn, *batches)])
    assert isinstance(outcome, SinkOK), outcome
    return outcome.token


def committed(sink, txn, *batches):
    token = prepared(sink, txn, *batches)
    assert sink.commit(txn, token) == SinkOK()
    return token


def ids(uri):
    return sorted(DeltaTable(uri).to_pyarrow_table()["id"].to_pylist())


class Overtaken(DeltaSink):
    """Somebody else's commit lands between its look for the proof and its own commit."""

    overtake = None

    def _send(self, *arguments):
        overtake, self.overtake = self.overtake, None
        if overtake is not None:
            overtake()
        super()._send(*arguments)


class LosesReplies(DeltaSink):
    """The answers to its commits are lost, and so are some of the commits themselves."""

    lost_requests = lost_replies = 0

    def _send(self, *arguments):
        if self.lost_requests:
            self.lost_requests -= 1
            raise ConnectionError("no answer")
        super()._send(*arguments)
        if self.lost_replies:
            self.lost_replies -= 1
            raise ConnectionError("no answer")


def test_two_recoverers_of_one_version_append_once(uri):
    slow, one = Overtaken(uri), txn()
    token = prepared(slow, one, rows(1, 2))
    slow.overtake = lambda: DeltaSink(uri).commit(one, token)

    assert slow.commit(one, token) == SinkOK()

    assert ids(uri) == [1, 2]
    assert DeltaTable(uri).version() == 1


def test_a_loser_that_lost_the_race_is_refused(uri):
    slow, loser = Overtaken(uri), txn()
    token = prepared(slow, loser, rows(1))
    slow.overtake = lambda: committed(DeltaSink(uri), txn(), rows(2))

    assert isinstance(slow.commit(loser, token), SinkFatal)

    assert ids(uri) == [2]


def test_a_foreign_writer_beside_us_loses_nothing_and_costs_us_nothing(uri):
    sink = Overtaken(uri)
    for batch in range(3):
        foreign = rows(100 + batch)
        sink.overtake = lambda foreign=foreign: write_deltalake(uri, foreign, mode="append")
        committed(sink, txn(batch), rows(batch))

    assert ids(uri) == [0, 1, 2, 100, 101, 102]
    assert sink.mark(SCOPE).cycle.batch == 2


@pytest.mark.parametrize(("requests", "replies"), [(0, 1), (2, 0), (1, 1)])
def test_a_commit_whose_reply_is_lost_is_looked_up_and_happens_once(uri, requests, replies):
    sink, one = LosesReplies(uri), txn()
    token = prepared(sink, one, rows(1, 2))
    sink.lost_requests, sink.lost_replies = requests, replies

    assert sink.commit(one, token) == SinkOK()

    assert ids(uri) == [1, 2]
    assert sink.recover(SCOPE) == []


def test_a_storage_that_never_answers_leaves_the_cycle_prepared(uri):
    sink, one = LosesReplies(uri), txn()
    token = prepared(sink, one, rows(1))
    sink.lost_requests = 99

    assert isinstance(sink.commit(one, token), SinkRetryable)

    assert sink.look_up(one, token).found is Found.HELD
    assert DeltaSink(uri).commit(one, token) == SinkOK()
    assert ids(uri) == [1]


def test_the_proof_is_in_the_checkpoints_of_the_log(uri):
    sink, one = DeltaSink(uri), txn()
    token = committed(sink, one, rows(1))
    table = DeltaTable(uri)
    table.create_checkpoint()
    table_log = Path(uri, "_delta_log")
    for path in table_log.glob("*.json"):
        path.unlink()
    assert list(table_log.glob("*.checkpoint.parquet"))

    assert sink.commit(one, token) == SinkOK()

    assert sink.mark(SCOPE) == one
    assert isinstance(sink.abort(one, token), SinkFatal)


def test_a_cycle_whose_proof_is_forgotten_is_never_deleted(uri):
    sink, first, loser = DeltaSink(uri), txn(0), txn(0)
    prepared(sink, loser, rows(100))
    token = committed(sink, first, rows(0))
    for batch in range(1, 12):
        committed(sink, txn(batch), rows(batch))

    assert isinstance(sink.commit(first, token), SinkFatal)
    assert isinstance(sink.abort(first, token), SinkFatal)
    assert sink.sweep(SCOPE, lambda _: True) == [loser]

    assert ids(uri) == list(range(12))


def test_a_vacuum_keeps_the_records_and_what_is_committed(uri):
    sink, one, two = DeltaSink(uri), txn(0), txn(1)
    token = committed(sink, one, rows(1))
    held = prepared(sink, two)

    DeltaTable(uri).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)

    assert sink.mark(SCOPE) == one
    assert sink.commit(one, token) == SinkOK()
    assert sink.commit(two, held) == SinkOK()
    assert ids(uri) == [1]


def test_a_table_that_was_made_again_is_not_written(uri):
    sink, one = DeltaSink(uri), txn()
    token = prepared(sink, one, rows(1))
    DeltaTable.create(uri, SCHEMA, mode="overwrite")

    outcome = sink.commit(one, token)

    assert isinstance(outcome, SinkFatal)
    assert "made again" in outcome.reason


EVENTS = pa.schema(
    [
        ("id", pa.int32()),
        ("day", pa.date32()),
        ("kind", pa.string()),
        ("at", pa.timestamp("us", "UTC")),
    ]
)


def events(count=12):
    found = [
        {
            "id": n,
            "day": dt.date(2026, 1, 1 + n % 3),
            "kind": None if n % 4 == 0 else f"a/b={n % 2}",
            "at": dt.datetime(2026, 1, 1, n, tzinfo=dt.UTC),
        }
        for n in range(count)
    ]
    return pa.RecordBatch.from_pylist(found, schema=EVENTS)


def test_rows_go_into_the_partitions_of_the_table(tmp_path):
    uri = str(tmp_path / "events")
    DeltaTable.create(uri, EVENTS, partition_by=["day", "kind"])
    sink, one = DeltaSink(uri), txn()
    sink.check(EVENTS)

    token = committed(sink, one, events())

    table = DeltaTable(uri)
    found = table.to_pyarrow_table().sort_by("id").select(EVENTS.names).to_pylist()
    assert found == events().to_pylist()
    assert len(table.partitions()) == 9
    assert sink.visible_tally(one.cycle, token) == Tally(token["rows"], token["hash"])


def test_an_empty_text_of_a_partition_is_null_for_readers_and_for_the_tally(tmp_path):
    uri = str(tmp_path / "events")
    DeltaTable.create(uri, EVENTS, partition_by=["kind"])
    kinds = pa.array(["", None, "x"])
    batch = events(3).set_column(2, EVENTS.field("kind"), kinds)
    sink, one = DeltaSink(uri, write="overwrite"), txn()

    token = committed(sink, one, batch)

    found = DeltaTable(uri).to_pyarrow_table().sort_by("id")
    assert found["kind"].to_pylist() == [None, None, "x"]
    assert len(DeltaTable(uri).partitions()) == 2
    assert sink.visible_tally(one.cycle, token) == Tally(token["rows"], token["hash"])


def test_rows_without_a_column_of_the_partitions_are_refused_before_the_first_batch(tmp_path):
    DeltaTable.create(tmp_path / "events", EVENTS, partition_by=["day"])

    with pytest.raises(Permanent, match="day"):
        DeltaSink(tmp_path / "events").check(EVENTS.remove(1))


@pytest.mark.parametrize("columns", [[], ["n"]])
def test_the_size_of_a_file_is_that_of_its_bytes_and_not_of_its_rows_in_memory(tmp_path, columns):
    schema = pa.schema([("n", pa.int64()), ("raw", pa.binary())])
    DeltaTable.create(tmp_path / "raw", schema, partition_by=columns)
    sink = DeltaSink(tmp_path / "raw", file_bytes=50_000)

    def files(raw):
        batches = [{"n": [0] * 40, "raw": [raw(250) for _ in range(40)]} for _ in range(30)]
        return stage(sink, txn(), *map(pa.RecordBatch.from_pydict, batches)).detail["files"]

    (small,), large = files(bytes), files(random.Random(1).randbytes)

    assert small["size"] < 50_000
    assert len(large) > 2
    assert all(50_000 <= file["size"] < 110_000 for file in large[:-1])


def test_an_overwrite_replaces_the_partitions_that_have_rows_and_no_others(tmp_path):
    uri = str(tmp_path / "events")
    DeltaTable.create(uri, EVENTS, partition_by=["day", "kind"])
    write_deltalake(uri, events(12), mode="append")
    sink = DeltaSink(uri, write="overwrite")
    sink.check(EVENTS)

    # Of day 1 the kinds a/b=1 and null, of which ids 3, 9, and 0 are in the table.
    mine = events().take([3, 0])
    token = committed(sink, txn(0), mine)

    assert ids(uri) == [n for n in range(12) if n != 9]
    assert sink.visible_tally(txn(0).cycle, token) == Tally(token["rows"], token["hash"])
    committed(sink, txn(1), events().take([9]))
    assert ids(uri) == [n for n in range(12) if n != 3]
    assert sink.visible_tally(txn(0).cycle, token) is None
    committed(sink, txn(2))
    assert len(ids(uri)) == 11


def test_an_overwrite_replaces_what_a_foreign_writer_adds_meanwhile(tmp_path):
    uri = str(tmp_path / "events")
    DeltaTable.create(uri, EVENTS, partition_by=["day"])
    sink = Overtaken(uri, write="overwrite")
    token = prepared(sink, one := txn(), events().take([0]))
    sink.overtake = lambda: write_deltalake(uri, events().take([1, 3]), mode="append")

    assert sink.commit(one, token) == SinkOK()

    assert ids(uri) == [0, 1]


def test_tables_whose_files_must_stay_refuse_an_overwrite(uri, tmp_path):
    for number, (setting, reason) in enumerate(
        [
            ("delta.appendOnly", "delta.appendOnly=true"),
            ("delta.enableDeletionVectors", "the feature deletionVectors"),
        ]
    ):
        table = str(tmp_path / f"t{number}")
        DeltaTable.create(table, EVENTS, partition_by=["day"], configuration={setting: "true"})
        with pytest.raises(Permanent, match=reason):
            DeltaSink(table, write="overwrite").check(None)
    with pytest.raises(Permanent, match="no partitions"):
        DeltaSink(uri, write="overwrite").check(None)


def test_statistics_let_readers_skip_files(uri):
    sink = DeltaSink(uri)
    committed(sink, txn(0), rows(1, 2))
    committed(sink, txn(1), rows(10, 11))

    adds = pa.table(DeltaTable(uri).get_add_actions(flatten=True)).sort_by("min.id").to_pylist()

    assert [(add["min.id"], add["max.id"], add["num_records"]) for add in adds] == [
        (1, 2, 2),
        (10, 11, 2),
    ]
    assert adds[0]["min.text"] == "row 1"
    assert adds[0]["null_count.id"] == 0


def test_a_tally_after_a_compaction_is_unknown_and_after_a_loss_is_not(uri):
    sink, one, two = DeltaSink(uri), txn(0), txn(1)
    token = committed(sink, one, rows(1))
    committed(sink, two, rows(2))
    assert sink.visible_tally(one.cycle, token) == Tally(token["rows"], token["hash"])

    DeltaTable(uri).optimize.compact()

    assert sink.visible_tally(one.cycle, token) is None
    assert ids(uri) == [1, 2]


def test_rows_that_do_not_fit_are_refused_before_the_first_batch(uri):
    sink = DeltaSink(uri)
    sink.check(pa.schema([("id", pa.int32())]))

    with pytest.raises(Permanent, match="more"):
        sink.check(pa.schema([("id", pa.int64()), ("more", pa.string())]))
    with pytest.raises(Permanent, match="id"):
        sink.check(pa.schema([("id", pa.list_(pa.int64()))]))


@pytest.mark.parametrize(
    ("values", "kind", "fitting"),
    [
        (pa.array([0.5, 0.1]), pa.float32(), [0.5, None, math.nan]),
        (pa.array([{"a": 0.1}]), pa.struct([("a", pa.float32())]), [{"a": 0.5}]),
        (pa.array([{"a": 1, "b": 2}]), pa.struct([("a", pa.int64())]), None),
        (pa.array([0.125]), pa.decimal128(8, 2), [0.25]),
        (pa.array([NOON]), pa.date32(), [NOON.replace(hour=0)]),
        (pa.array(["01"]), pa.int64(), ["1", None]),
        (pa.array([1 << 40]), pa.int32(), [1 << 20]),
    ],
    ids=str,
)
def test_values_that_the_type_of_the_table_would_change_are_refused(
    tmp_path, values, kind, fitting
):
    uri = str(tmp_path / "narrow")
    DeltaTable.create(uri, pa.schema([("v", kind)]))
    sink = DeltaSink(uri)
    sink.check(pa.schema([("v", values.type)]))

    with pytest.raises(Permanent, match="column v is "):
        stage(sink, txn(), pa.RecordBatch.from_arrays([values], ["v"]))

    if fitting is not None:
        kept = pa.RecordBatch.from_arrays([pa.array(fitting, values.type)], ["v"])
        token = committed(sink, txn(), kept)
        assert sink.visible_tally(txn().cycle, token) == Tally(token["rows"], token["hash"])


def test_a_table_that_asks_for_more_than_files_is_refused(uri, tmp_path):
    DeltaTable(uri).alter.add_constraint({"positive": "id > 0"})

    with pytest.raises(Permanent, match="constraints"):
        DeltaSink(uri).check(SCHEMA)
    with pytest.raises(Permanent, match=r"DeltaTable\.create"):
        DeltaSink(tmp_path / "nothing").check(None)
    with pytest.raises(Misuse, match="append, overwrite"):
        DeltaSink(uri, write="upsert")


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("delta.invariants", '{"expression": {"expression": "n > 0"}}'),
        ("delta.generationExpression", "id * 2"),
        ("delta.identity.start", 1),
    ],
)
def test_a_table_whose_columns_have_rules_is_refused_also_if_they_come_later(tmp_path, rule, value):
    ruled = Field("n", "long", metadata={rule: value})
    nested = [Field("s", ArrayType(StructType([ruled]), contains_null=True))]
    for number, columns in enumerate([[ruled], nested]):
        uri = str(tmp_path / f"t{number}")
        DeltaTable.create(uri, Schema([Field("id", "long")]))
        sink = DeltaSink(uri)
        sink.check(pa.schema([("id", pa.int64())]))
        DeltaTable.create(uri, Schema([Field("id", "long"), *columns]), mode="overwrite")

        with pytest.raises(Permanent, match=f"{rule}=.* of column n"):
            DeltaSink(uri).check(None)
        with pytest.raises(Permanent, match=rule):
            sink.stager(txn())


def ask_of_writers(uri, **protocol):
    """Change the protocol of a table that has one version."""
    log = Path(uri, "_delta_log", "00000000000000000000.json")
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = protocol
    log.write_text("\n".join(map(json.dumps, actions)))


ROW_TRACKING = {
    "minReaderVersion": 1,
    "minWriterVersion": 7,
    "writerFeatures": ["appendOnly", "rowTracking", "domainMetadata"],
}


def test_a_table_that_asks_writers_for_more_than_the_sink_does_is_refused(uri):
    sink = DeltaSink(uri)
    sink.check(SCHEMA)

    ask_of_writers(uri, **ROW_TRACKING)
    with pytest.raises(Permanent, match=r"the feature domainMetadata; the feature rowTracking$"):
        sink.check(SCHEMA)
    with pytest.raises(Permanent, match="rowTracking"):
        sink.stager(txn())

    ask_of_writers(uri, minReaderVersion=1, minWriterVersion=6)
    with pytest.raises(Permanent, match="minWriterVersion=6"):
        sink.check(SCHEMA)


@pytest.mark.parametrize(
    "feature",
    ["appendOnly", "changeDataFeed", "deletionVectors", "timestampNtz", "v2Checkpoint"],
)
def test_a_table_with_features_that_ask_nothing_of_new_files_is_written(uri, feature):
    read = [{"readerFeatures": [feature], "minReaderVersion": 3}, {"minReaderVersion": 1}]
    of_writers_only = feature in ("appendOnly", "changeDataFeed")
    ask_of_writers(uri, minWriterVersion=7, writerFeatures=[feature], **read[of_writers_only])
    sink = DeltaSink(uri)
    sink.check(SCHEMA)

    token = committed(sink, txn(), rows(1))

    assert sink.visible_tally(txn().cycle, token) == Tally(token["rows"], token["hash"])


def test_a_commit_that_the_library_refuses_by_itself_is_no_lost_race(uri):
    sink, one = DeltaSink(uri), txn()
    token = prepared(sink, one, rows(1))
    ask_of_writers(uri, **ROW_TRACKING)

    outcome = sink.commit(one, token)

    assert isinstance(outcome, SinkRetryable)
    assert "RowTracking" in outcome.reason
    assert "races" not in outcome.reason


def test_what_a_late_task_left_is_listed_by_the_doctor_and_removed_by_recovery(uri):
    ledger, sink = MemoryLedger(), DeltaSink(uri)
    driver = Driver("payments", ledger, [sink])
    driver.start()
    late = []

    def stage(txn):
        late.append(txn)
        raise OSError("the executors are gone")

    cycle = CycleId(driver.scope, 1, 0)
    driver.run_cycle(cycle, lambda: BatchRange.of_offsets({"t/0": (0, 2)}), stage)
    driver.stop()
    writer = sink.stager(late[0]).open("late")
    writer.write(rows(1, 2))
    writer.finish()
    patients = [Patient(driver.scope, [sink])]

    (now,) = diagnose(ledger, patients).scopes
    in_a_week = SimulatedClock(SYSTEM_CLOCK.now() + 7 * 86_400)
    (later,) = diagnose(ledger, patients, clock=in_a_week).scopes

    (left,) = now.left_behind
    assert (left.txn, left.ledger_says, left.is_swept) == (late[0], LedgerSays.ABORTED, True)
    assert left.what.startswith("1 file(s), ")
    assert 0 <= left.age_seconds < 60
    assert [problem.kind for problem in now.problems] == []
    assert [problem.kind for problem in later.problems] == [Kind.LEFT_BEHIND]
    driver.start()
    assert diagnose(ledger, patients).scopes[0].left_behind == []
    driver.stop()


def test_a_reader_of_another_lineage_reads_the_delta_table(uri, monkeypatch, tmp_path):
    chdb = pytest.importorskip("chdb", reason="pip install chdb (180 MB): ClickHouse in process")
    sink = DeltaSink(uri)
    for batch in range(3):
        committed(sink, txn(batch), rows(2 * batch, 2 * batch + 1))

    monkeypatch.chdir(tmp_path)  # chDB reads below the working folder only
    found = chdb.query(f"SELECT count(), sum(id), max(text) FROM deltaLakeLocal('{uri}')")

    assert str(found).strip() == '6,15,"row 5"'


def test_a_cycle_is_undone_in_a_partitioned_table_beside_other_writers(tmp_path):
    uri = str(tmp_path / "parts")
    DeltaTable.create(uri, SCHEMA, partition_by=["text"])
    sink, one, two = DeltaSink(uri), txn(0), txn(1)
    odd = pa.RecordBatch.from_pylist(
        [{"id": 1, "text": "a b/c=%"}, {"id": 2, "text": None}], SCHEMA
    )
    token = committed(sink, one, odd)
    committed(sink, two, rows(3))
    write_deltalake(uri, pa.Table.from_batches([rows(4)]), mode="append")

    assert sink.check_undo(one, token) == ""
    assert sink.undo(one, token) == SinkOK()

    assert ids(uri) == [3, 4]
    assert sink.visible_tally(one.cycle, token) == Tally()
    assert DeltaTable(uri, version=1).to_pyarrow_table().num_rows == 2, "older versions stay"


def compact(uri):
    DeltaTable(uri).optimize.compact()


def delete(uri):
    DeltaTable(uri).delete("id = 1")


def keep(uri):
    DeltaTable(uri).alter.set_table_properties({"delta.appendOnly": "true"})


@pytest.mark.parametrize(
    ("change", "words"), [(compact, "rewritten"), (delete, "rewritten"), (keep, "appendOnly")]
)
def test_a_cycle_whose_files_are_not_its_own_any_more_is_not_undone(uri, change, words):
    sink, one = DeltaSink(uri), txn(0)
    token = committed(sink, one, rows(1, 2))
    committed(sink, txn(1), rows(3))
    change(uri)
    before = ids(uri)

    assert words in sink.check_undo(one, token)
    assert isinstance(sink.undo(one, token), SinkFatal)
    assert ids(uri) == before


def test_an_overwrite_is_not_undone(tmp_path):
    uri = str(tmp_path / "parts")
    DeltaTable.create(uri, SCHEMA, partition_by=["text"])
    sink, one = DeltaSink(uri, write="overwrite"), txn(0)
    token = committed(sink, one, rows(1))

    assert "replaces rows" in sink.check_undo(one, token)


class LosesAnswers(DeltaSink):
    """Somebody appends between its look and its removal, and then an answer is lost."""

    trouble = 2

    def _load(self):
        loaded = super()._load()
        take_away = loaded.take_away

        def troubled(one):
            self.trouble -= 1
            if self.trouble == 1:
                write_deltalake(self.table, pa.Table.from_batches([rows(9)]), mode="append")
            take_away(one)
            if self.trouble == 0:
                raise ConnectionError("no answer")

        loaded.take_away = troubled
        return loaded


def test_a_lost_race_and_a_lost_answer_undo_a_cycle_once(uri):
    sink, one = LosesAnswers(uri), txn(0)
    token = committed(sink, one, rows(1))

    assert sink.undo(one, token) == SinkOK()

    assert sink.trouble == 0
    assert ids(uri) == [9]
    assert DeltaTable(uri).version() == 3
