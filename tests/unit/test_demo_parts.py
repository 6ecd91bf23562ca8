"""The demo's payments, its choice of moments, and its words."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from examples.demo.audit import Count, Counts
from examples.demo.handler import POLICY, handle
from examples.demo.payments import SCHEMA, UNREADABLE, Payment, payments, troubled
from examples.demo.place import Place, Variant
from examples.demo.progress import Progress, Tail
from examples.demo.run import Kill, Killer, Moment, Plan, RunReport
from examples.demo.words import money, verdict_with_semel, verdict_without
from semel import MessagePipeline, Policy
from semel.messaging import Coordinates, Record
from semel.sinks import MemorySink

PLAN = Plan(seed=1, seconds=30, kills=3, per_second=1_500)
PLACE = Place(Path("/nowhere"), "postgresql://nowhere/demo")


def test_a_seed_decides_the_payments_and_the_kills():
    assert list(islice(payments(7), 500)) == list(islice(payments(7), 500))
    assert list(islice(payments(7), 500)) != list(islice(payments(8), 500))
    assert PLAN.moments == PLAN.moments


def test_refunds_give_back_what_was_paid_once():
    stream = list(islice(payments(7), 5_000))

    refunds = [payment for payment in stream if payment.kind == "refund"]
    paid = [payment for payment in stream if payment.kind == "payment"]

    assert refunds
    left = [(payment.account, payment.amount) for payment in paid]
    for refund in refunds:
        left.remove((refund.account, -refund.amount))


def test_troubles_misspell_three_payments_and_let_some_overtake_their_neighbour():
    sent = troubled(7, 5_000)

    assert {payment.fixed for payment in sent} == set(islice(payments(7), 5_000))
    wrong = [payment for payment in sent if payment.fixed != payment]
    assert len({payment.account for payment in wrong}) == 3
    assert sent == troubled(7, 5_000)
    seen: dict[str, int] = {}
    steps = Counter[int]()
    for payment in sent:
        steps[payment.version - seen.get(payment.account, 0)] += 1
        seen[payment.account] = payment.version
    assert set(steps) == {1, 2, -1}
    assert steps[-1] > 10


def tried(outage: Path, *records: bytes) -> dict[str, Any]:
    sinks = [MemorySink(name=name) for name in ("postgres", "iceberg", "s3", "files")]
    pipeline = MessagePipeline(
        "payments",
        policy=Policy.parse(POLICY),
        database="postgresql://nowhere/demo",
        handler=partial(handle, outage=outage),
        sinks=sinks,
        schemas={sink.name: SCHEMA for sink in sinks},
    )
    keyed = [
        Record(Coordinates("payments-semel", 0, offset), value, b"acc-1")
        for offset, value in enumerate(records)
    ]
    done = pipeline.try_out(keyed)
    return {"rows": done.rows, "sent": done.outgoing, **done.outcomes}


def test_the_handler_parks_what_is_misspelled_and_what_follows_waits(tmp_path: Path):
    paid = [
        Payment("p1", "acc-1", "payment", 250_000, 1),
        Payment("p2", "acc-1", "paymnet", 100, 2),
        Payment("p3", "acc-1", "payment", 100, 3),
    ]

    done = tried(tmp_path / "outage", UNREADABLE, *(one.value for one in (*paid, paid[0])))

    assert done["p2"] == "parked"
    assert done["p3"] == "retryable_failure"
    assert done["rows"] == {
        name: [paid[0]._asdict()] for name in ("postgres", "iceberg", "s3", "files")
    }
    assert [one["topic"] for one in done["sent"]] == ["receipts"]
    assert "deserialization_failure" in done.values()


def test_while_the_provider_is_down_a_payment_is_tried_again(tmp_path: Path):
    done = tried(tmp_path, Payment("p1", "acc-1", "payment", 1, 1).value)

    assert done["p1"] == "retryable_failure"


def test_a_line_that_is_being_written_waits_for_its_end(tmp_path: Path):
    told = tmp_path / "events.jsonl"
    tail = Tail(told)

    assert list(tail.new_events()) == []
    told.write_text('{"event": "SparkReady"}\n{"event": "Bat')
    assert [event["event"] for event in tail.new_events()] == ["SparkReady"]
    with told.open("a") as file:
        file.write('chBegun", "batch": 0}\n')
    assert [event["event"] for event in tail.new_events()] == ["BatchBegun"]


def hear(progress: Progress, *events: dict[str, object]) -> list[tuple[str, str]]:
    return [note for event in events for note in progress.hear(json.loads(json.dumps(event)))]


def test_the_place_of_a_kill_is_the_step_that_had_not_ended():
    progress = Progress(Variant.SEMEL, driver=1)

    hear(
        progress,
        {"event": "BatchBegun", "batch": 4},
        {"event": "StepDone", "step": "begin_txn", "seconds": 0.1},
        {"event": "StepDone", "step": "flush", "seconds": 0.1},
    )

    assert progress.where == "in cycle 4 (commit_offsets)"


def test_recovery_is_told_cycle_by_cycle():
    progress = Progress(Variant.SEMEL, driver=2, last_batch=4)

    notes = hear(
        progress,
        {"event": "LeaseTaken", "epoch": 2},
        {
            "event": "CycleRecovered",
            "cycle": "payments/main/g1.b4",
            "sink": "postgres",
            "decision": "CommitFromToken",
        },
        {
            "event": "CycleRecovered",
            "cycle": "payments/main/g1.b4",
            "sink": "files",
            "decision": "CommitFromToken",
        },
        {"event": "BatchBegun", "batch": 4},
    )

    assert notes == [
        ("recovered", "cycle 4 was decided: carried through in Postgres and Parquet"),
        ("recovered", "epoch 2; Spark runs batch 4 again"),
    ]
    assert progress.rerun == 4


def test_no_driver_dies_before_its_first_batch_is_done():
    progress = Progress(Variant.PLAIN, driver=1)
    killer = Killer(Moment(seconds=0.0, share=0.0))

    hear(progress, {"event": "BatchBegun", "batch": 0})
    assert not killer.is_due(progress)
    hear(progress, {"event": "BatchDone", "batch": 0}, {"event": "BatchBegun", "batch": 1})
    assert killer.is_due(progress)


def plain(duplicates: int) -> tuple[Counts, RunReport]:
    postgres = Count("Postgres", 10, 10 + duplicates, 500, 500 + duplicates, duplicates, 0, 0)
    parquet = Count("Parquet", 2, 2, 400, 400, 0, 0, 0)
    kills = [Kill(1, "in batch 3 (writing to Postgres)", 3)]
    report = RunReport(Variant.PLAIN, PLACE, kills=kills, reruns=[3])
    return Counts(Variant.PLAIN, 10, 500, (postgres, parquet)), report


def test_a_plain_run_that_was_lucky_is_called_lucky():
    assert "was lucky" in verdict_without(*plain(duplicates=0), PLAN)


def test_a_plain_run_that_wrote_twice_is_told_which_batch_and_how_much():
    words = verdict_without(*plain(duplicates=7), PLAN)

    assert "killed in batch 3 (writing to Postgres)" in words
    assert "7 payments twice in Postgres (sum off by 0.07)" in words
    assert "Parquet" not in words.replace("writing to Parquet", "")


def test_a_plain_query_that_reads_messages_is_told_what_it_made_of_them():
    counts, report = plain(duplicates=7)

    words = verdict_without(replace(counts, records=12, misspelled=3, overtaken=5), report, PLAN)

    assert "no trace of the record that is not JSON" in words
    assert "3 misspelled payments as they came, and 5 rows" in words


@pytest.mark.parametrize("wrong", [{"letters_off": 1}, {"waiting": 1}, {"overtaken": 1}])
def test_rows_that_are_right_do_not_excuse_messages_that_are_not(wrong: dict[str, int]):
    counts, report = plain(duplicates=0)
    right = replace(counts, variant=Variant.SEMEL, records=12)
    convicted = replace(right, **wrong)

    assert right.is_clean
    assert "nothing waits" in verdict_with_semel(right, report)
    assert not convicted.is_clean
    assert "must never happen" in verdict_with_semel(convicted, report)


def test_an_outage_is_told_when_it_begins_and_ends():
    progress = Progress(Variant.SEMEL, driver=1)

    (begun,) = hear(progress, {"event": "CircuitOpened"})
    stood_still = progress.stands_still
    (ended,) = hear(progress, {"event": "CircuitClosed", "seconds": 3.21})

    assert "stands still" in begun[1]
    assert stood_still
    assert not progress.stands_still
    assert "3.2 s" in ended[1]


def test_money_keeps_its_cents():
    assert [money(cents) for cents in (0, 5, -123_456, 45_269_694_69)] == [
        "0.00",
        "0.05",
        "-1,234.56",
        "45,269,694.69",
    ]
