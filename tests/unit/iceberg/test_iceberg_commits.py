"""Commits to an Iceberg table in every race: two recoverers, foreign writers, lost replies."""

from __future__ import annotations

import json
import time
import uuid

import pyarrow as pa
import pytest
from pyiceberg.catalog import load_catalog

from semel.iceberg.sink import IcebergTable
from semel.pipeline.sink import Found, SinkFatal, SinkOK, SinkRetryable, Tally
from semel.sinks import IcebergSink
from semel.testing.services import CutProxy
from tests.unit.iceberg.iceberg_place import SCOPE, TABLE, committed, prepared, rows, stage, txn


class Overtaken(IcebergSink):
    """Somebody else's commit lands between its look for the mark and its own commit."""

    overtake = None

    def _send(self, *arguments):
        overtake, self.overtake = self.overtake, None
        if overtake is not None:
            overtake()
        super()._send(*arguments)


class LosesReplies(IcebergSink):
    """The answers to its commits are lost, and so are some of the commits themselves."""

    lost_requests = 0
    lost_replies = 0

    def _send(self, *arguments):
        if self.lost_requests:
            self.lost_requests -= 1
            raise ConnectionError("no answer")
        super()._send(*arguments)
        if self.lost_replies:
            self.lost_replies -= 1
            raise ConnectionError("no answer")


def test_two_recoverers_from_one_base_append_once(plain):
    slow, fast, one = plain.sink(Overtaken), plain.sink(), txn()
    token = prepared(slow, one, rows(1, 2))
    slow.overtake = lambda: fast.commit(one, token)

    outcome = slow.commit(one, token)

    assert outcome == SinkOK()
    assert plain.ids() == [1, 2]
    assert len(plain.table().metadata.snapshots) == 1


def test_a_loser_that_lost_the_race_is_refused(plain):
    slow, fast, loser = plain.sink(Overtaken), plain.sink(), txn()
    token = prepared(slow, loser, rows(1))
    slow.overtake = lambda: committed(fast, txn(), rows(2))

    outcome = slow.commit(loser, token)

    assert isinstance(outcome, SinkFatal)
    assert "another attempt" in outcome.reason
    assert plain.ids() == [2]


def test_a_foreign_writer_beside_us_loses_nothing_and_costs_us_nothing(plain):
    sink = plain.sink(Overtaken)
    for batch in range(3):
        foreign = pa.Table.from_batches([rows(100 + batch)])
        sink.overtake = lambda foreign=foreign: plain.table().append(foreign)
        committed(sink, txn(batch), rows(batch))

    assert plain.ids() == [0, 1, 2, 100, 101, 102]
    assert sink.mark(SCOPE).cycle.batch == 2


@pytest.mark.parametrize(("requests", "replies"), [(0, 1), (2, 0), (1, 1)])
def test_a_commit_whose_reply_is_lost_is_looked_up_and_happens_once(plain, requests, replies):
    sink, one = plain.sink(LosesReplies), txn()
    token = prepared(sink, one, rows(1, 2))
    sink.lost_requests, sink.lost_replies = requests, replies

    assert sink.commit(one, token) == SinkOK()

    assert plain.ids() == [1, 2]
    assert sink.recover(SCOPE) == []


def test_a_catalog_that_never_answers_leaves_the_cycle_prepared(plain):
    sink, one = plain.sink(LosesReplies), txn()
    token = prepared(sink, one, rows(1))
    sink.lost_requests = 99

    assert isinstance(sink.commit(one, token), SinkRetryable)

    assert sink.look_up(one, token).found is Found.HELD
    assert plain.sink().commit(one, token) == SinkOK()
    assert plain.ids() == [1]


def expire_all(lake):
    table = lake.table()
    current = table.metadata.current_snapshot_id
    old = [s.snapshot_id for s in table.metadata.snapshots if s.snapshot_id != current]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    assert len(lake.table().metadata.snapshots) == 1


def test_the_proof_is_found_after_snapshots_were_expired(plain):
    sink, one = plain.sink(), txn()
    token = committed(sink, one, rows(1))
    plain.table().append(pa.Table.from_batches([rows(100)]))
    expire_all(plain)

    assert sink.commit(one, token) == SinkOK()

    assert isinstance(sink.abort(one, token), SinkFatal)
    assert sink.look_up(one, None).found is Found.VISIBLE
    assert sink.mark(SCOPE) == one
    assert plain.ids() == [1, 100]


def test_a_cycle_whose_proof_is_forgotten_is_never_deleted(plain):
    sink, first = plain.sink(), txn(0)
    token = committed(sink, first, rows(0))
    for batch in range(1, 12):
        committed(sink, txn(batch), rows(batch))
    expire_all(plain)

    assert isinstance(sink.commit(first, token), SinkFatal)
    assert isinstance(sink.abort(first, token), SinkFatal)
    assert sink.sweep(SCOPE, lambda _: True) == []

    assert plain.ids() == list(range(12))


def test_a_loser_below_the_mark_is_swept_even_when_old_proofs_are_forgotten(plain):
    sink, loser = plain.sink(), txn(0)
    prepared(sink, loser, rows(100))
    for batch in range(12):
        committed(sink, txn(batch), rows(batch))
    expire_all(plain)

    assert sink.sweep(SCOPE, lambda found: found == loser) == [loser]

    assert plain.ids() == list(range(12))
    assert list(plain.folder.rglob(f"*{loser.attempt}*/**/*.parquet")) == []


def test_a_cycle_without_rows_makes_a_snapshot_because_a_property_alone_is_not_checked(plain):
    sink, one, other = plain.sink(Overtaken), txn(), txn()
    token, others_token = prepared(sink, one), prepared(sink, other)
    sink.overtake = lambda: plain.sink().commit(other, others_token)

    assert isinstance(sink.commit(one, token), SinkFatal)

    assert len(plain.table().metadata.snapshots) == 1
    assert sink.mark(SCOPE) == other


def test_a_table_that_was_dropped_and_made_again_is_not_written(plain):
    sink, one = plain.sink(), txn()
    token = prepared(sink, one, rows(1))
    plain.catalog.drop_table(TABLE)
    plain.create(("id", pa.int64()), ("text", pa.string()))

    outcome = sink.commit(one, token)

    assert isinstance(outcome, SinkFatal)
    assert "made again" in outcome.reason
    assert plain.ids() == []
    assert sink.look_up(one, token).found is Found.GONE
    assert sink.abort(one, None) == SinkOK(), "an operator gives it up"


def test_a_mark_that_somebody_changed_stops_the_sink(plain):
    sink, one = plain.sink(), txn(5)
    token = prepared(sink, one, rows(1))
    key = f"semel.marks.{SCOPE.slug}"
    with plain.table().transaction() as change:
        change.set_properties({key: json.dumps({"scope": "gone"})})

    outcome = sink.commit(one, token)

    assert isinstance(outcome, SinkFatal)
    assert "semel did not write" in outcome.reason
    assert plain.ids() == []


def test_files_of_attempts_that_are_not_held_are_listed_until_they_are_swept(plain):
    sink, held, dead, done = plain.sink(), txn(1), txn(1), txn(0)
    committed(sink, done, rows(1))
    prepared(sink, held, rows(2))
    stage(sink, dead, rows(3, 4))

    (left,) = sink.leftovers(SCOPE)

    assert (left.txn, left.what[:10]) == (dead, "1 file(s),")
    assert abs(left.since - time.time()) < 60
    assert sink.sweep(SCOPE, lambda found: found == dead) == [dead]
    assert sink.leftovers(SCOPE) == []


def test_an_abort_leaves_no_manifests_and_a_lost_race_some_that_no_snapshot_uses(plain):
    def unused():
        table = plain.table()
        lists = {one.manifest_list for one in table.metadata.snapshots}
        manifests = {one["path"] for one in table.inspect.all_manifests().to_pylist()}
        found = (plain.folder / "lake/db/rows/metadata").glob("*.avro")
        return {f"file://{path}" for path in found} - lists - manifests

    sink, loser, one = plain.sink(Overtaken), txn(0), txn(0)
    assert sink.abort(loser, prepared(sink, loser, rows(1))) == SinkOK()
    assert unused() == set()

    token = prepared(sink, one, rows(2))
    sink.overtake = lambda: plain.table().append(pa.Table.from_batches([rows(3)]))
    assert sink.commit(one, token) == SinkOK()

    assert len(unused()) == 2
    assert plain.ids() == [2, 3]


def test_a_cycle_loads_the_table_three_times_and_copies_none_of_its_history(plain, monkeypatch):
    sink, loads, drafts = plain.sink(), [], []
    for batch in range(5):
        committed(sink, txn(batch), rows(batch))
    load, send = IcebergSink._load, IcebergTable._send

    def counted(found):
        loads.append(1)
        return load(found)

    def watched(table, draft):
        drafts.append(len(draft.table_metadata.snapshots))
        send(table, draft)

    monkeypatch.setattr(IcebergSink, "_load", counted)
    monkeypatch.setattr(IcebergTable, "_send", watched)
    committed(sink, txn(5), rows(5))

    assert (len(loads), drafts) == (3, [2]), "the newest snapshot, and the new one"
    assert len(plain.table().metadata.snapshots) == len(plain.table().metadata.snapshot_log) == 6
    assert plain.ids() == list(range(6))


def test_people_find_the_cycle_in_the_snapshots_summary(plain):
    one = txn(7)
    committed(plain.sink(), one, rows(1))

    summary = plain.table().current_snapshot().summary

    assert summary.get("semel.cycle") == "payments/main/g1.b7"
    assert summary.get("added-records") == "1"


def test_rows_that_somebody_deleted_are_missed_by_the_tally(plain):
    sink, one = plain.sink(), txn()
    token = committed(sink, one, rows(1, 2, 3))
    assert sink.visible_tally(one.cycle, token) == Tally(token["rows"], token["hash"])

    plain.table().delete("id < 10")

    assert sink.visible_tally(one.cycle, token) == Tally()


@pytest.mark.seaweedfs
@pytest.mark.parametrize("lose", ["lose_request", "swallow_reply_to"])
def test_a_rest_catalog_whose_answer_is_cut_off_has_the_rows_once(seaweedfs, lose):
    proxy = CutProxy(seaweedfs.catalog_port).start()
    table = f"db.cut_{uuid.uuid4().hex[:8]}"
    uri = f"http://127.0.0.1:{proxy.port}"
    lake = load_catalog("lake", **seaweedfs.catalog_properties())
    lake.create_namespace_if_not_exists("db")
    lake.create_table(table, schema=rows(1).schema)
    sink = IcebergSink(
        table, catalog="lake", properties={**seaweedfs.catalog_properties(), "uri": uri}
    )
    first, second = txn(0), txn(1)
    try:
        committed(sink, first, rows(1))
        token = prepared(sink, second, rows(2))

        getattr(proxy, lose)(b"assert-ref-snapshot-id")
        outcome = sink.commit(second, token)

        assert proxy.wait_until_swallowed()
        assert outcome == SinkOK()
        assert sorted(lake.load_table(table).scan().to_arrow()["id"].to_pylist()) == [1, 2]
        assert len(lake.load_table(table).metadata.snapshots) == 2
    finally:
        sink.close()
        proxy.stop()
