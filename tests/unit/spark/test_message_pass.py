"""The pass over a batch of messages, without Spark and without a database."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from threading import Lock
from types import SimpleNamespace

import pyarrow as pa
import pytest

from semel import (
    MessagePipeline,
    NonRetryableMessageError,
    Policy,
    RetryableMessageError,
    Send,
    SqlDatabase,
)
from semel.codec import FromPayload, Reading, Unread, Unreadable
from semel.errors import Misuse, Permanent, Retryable
from semel.events import EVENTS, Measurement
from semel.memory.sink import MemorySink
from semel.message import Coordinates, Message, Record, digest_of
from semel.messaging.changes import MessageChange, Op, SeenClaim, SeenWaiting
from semel.messaging.failure import CLASSIFICATION, Classified, FailureClass
from semel.messaging.handle.claims import ClaimState
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Handled,
    Refused,
    RetryStored,
    Skipped,
    tell,
    tell_received,
    told,
)
from semel.messaging.records import Gap, Waits
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.operate.dryrun import dry_run
from semel.pipeline.cycle import CommitAborted, CommitSucceeded
from semel.pipeline.sink import Receipt
from semel.pipeline.txn import CycleId, Scope, checked_name
from semel.policy.vocabulary import Duplicates, GapPolicy, GiveUp, RetryMode
from semel.postgres.messages import LEAN, ONLY_FAILED
from semel.spark.exactly_once import CycleGaveUp
from semel.spark.messages.frames import (
    COUNTS,
    PassCounts,
    PassTee,
    RowCheck,
    arrow_fields,
    columns_of,
)
from semel.spark.messages.handling import (
    Arrival,
    BeingHandled,
    MessagePass,
    PassSettings,
    stored_record,
)
from semel.spark.messages.pipeline import OutageMet
from semel.testing.clock import SimulatedClock

READING = Reading(FromPayload("id"), key_from=FromPayload("key"))
VERSIONED = Reading(FromPayload("id"), key_from=FromPayload("key"), version_from=FromPayload("v"))
TXN = CycleId(Scope("0" * 32, "billing", "main"), 1, 0).attempt()
RETRY = RetryPolicy(mode=RetryMode.RETRY_TABLE, max_attempts=3, jitter=False)


class Known:
    """What a pass reads, as a test says it."""

    def __init__(
        self,
        claims: Mapping[str, SeenClaim] | None = None,
        versions: Mapping[str, int] | None = None,
        suspects: Mapping[str, int] | None = None,
    ) -> None:
        self._claims, self._versions, self._suspects = claims or {}, versions or {}, suspects or {}
        self.noted: list[str] = []

    def claims(self, message_ids: Sequence[str]) -> Mapping[str, SeenClaim]:
        return {one: self._claims[one] for one in message_ids if one in self._claims}

    def versions(self, keys: Iterable[str]) -> Mapping[str, int | None]:
        return {key: self._versions[key] for key in keys if key in self._versions}

    def suspects(self) -> Mapping[str, int]:
        return self._suspects

    def note(self, message_ids: Sequence[str]) -> None:
        self.noted += message_ids

    def clear(self, message_ids: Sequence[str]) -> None:
        self.noted = [one for one in self.noted if one not in message_ids]


def value(message_id: str, key: str = "k", **more: object) -> bytes:
    return json.dumps({"id": message_id, "key": key, **more}).encode()


def new(offset: int, raw: bytes | None, key: str = "k") -> Arrival:
    return Arrival(Record(Coordinates("t", 0, offset), raw), key)


def back(place: int, raw: bytes, key: str = "k", **more: object) -> Arrival:
    told = json.loads(raw)
    seen = {
        "waits": Waits.RETRY,
        "attempts": 1,
        "payload": raw,
        "payload_hash": digest_of(raw),
        "headers": "",
        "topic": "t",
        "partition": 0,
        "offset": place,
        "timestamp": 0.0,
        "claim_state": "FAILED_RETRYABLE",
        **more,
    }
    waiting = SeenWaiting(place, told["id"], key, **seen)  # type: ignore[arg-type]
    return Arrival(stored_record(waiting), key, waiting)


class World:
    """One pass, and what it made."""

    def __init__(
        self,
        handler: object,
        *,
        known: Known | None = None,
        held: Mapping[str, int] | None = None,
        reading: Reading = READING,
        is_careful: bool = False,
        keeps_claims: bool = True,
        is_lean: bool = False,
        is_alone: bool = False,
        **settings: object,
    ) -> None:
        self.outcomes: dict[str, str] = {}
        of = PassSettings(
            "c",
            handler,  # type: ignore[arg-type]
            reading,
            ConsumerSettings(**{"retry": RETRY, **settings}),  # type: ignore[arg-type]
            CLASSIFICATION,
            {"rows": 0},
            [lambda row: row],
            concurrency=4,
            keeps_claims=keeps_claims,
            is_lean=is_lean,
        )
        self._pass = MessagePass(
            of,
            known or Known(),
            held or {},
            self._note,
            is_careful=is_careful,
            is_alone=is_alone,
        )
        self.rows: list[object] = []
        self.picked: list[int] = []
        self.changes: list[MessageChange] = []

    def _note(self, arrival: Arrival, one: object, outcome: object) -> None:
        self.outcomes[one.id] = told(outcome).value  # type: ignore[attr-defined, arg-type]

    def run(self, *arrivals: Arrival) -> World:
        made = self._pass.run(arrivals)
        self.rows += made.rows.get(0, [])
        self.changes += made.changes
        self.picked += made.picked
        return self

    def of(self, op: Op) -> list[MessageChange]:
        return [change for change in self.changes if change.op == op]


def rows_of(message):
    yield "rows", {"id": message.id}


def failing_once(*ids: str, error: type[Exception] = RetryableMessageError):
    def handle(message):
        if message.id in ids:
            raise error("no")
        yield "rows", {"id": message.id}

    return handle


def test_a_new_message_has_a_claim_and_its_rows():
    world = World(rows_of).run(new(0, value("a")))

    assert world.rows == [{"id": "a"}]
    assert [(c.op, c.message_id, c.state, c.source) for c in world.changes] == [
        ("claim", "a", "COMPLETED", "t/0/0")
    ]


def test_without_claims_only_a_message_that_failed_is_remembered():
    raw = value("b")
    known = Known({"b": SeenClaim(ClaimState.COMPLETED, 2, digest_of(raw), False)})
    once = [new(0, value("a")), new(1, value("a")), new(2, raw)]

    passed = World(rows_of, known=known, keeps_claims=False).run(*once)
    failed = World(failing_once("a"), keeps_claims=False).run(new(0, value("a")))

    assert (passed.rows, passed.changes) == ([{"id": "a"}], [])
    assert passed.outcomes == {"a": "duplicate_skipped", "b": "duplicate_skipped"}
    assert Op.CLAIM in [change.op for change in failed.changes]


def test_a_message_that_passes_has_a_lean_claim_and_others_have_those_that_people_read():
    half = digest_of(value("r"))[:32]
    known = Known({"r": SeenClaim(ClaimState.COMPLETED, 1, half, False)})
    known._claims["x"] = known._claims["r"]

    world = World(failing_once("b"), known=known, is_lean=True)
    # A replay has put r where it waits, because commands do not read its claim.
    waiting = back(1, value("r"), claim_state="", attempts=0)
    world.run(waiting, new(0, value("a")), new(1, value("b", "l"), "l"), new(2, value("x")))

    assert world.rows == [{"id": "a"}]
    assert [change.message_id for change in world.of(Op.LEAN)] == ["a"]
    assert [change.message_id for change in world.of(Op.CLAIM)] == ["b"]
    assert [(one.message_id, one.state) for one in world.of(Op.TAKE)] == [("r", "COMPLETED")]
    assert world.outcomes["r"] == "duplicate_skipped"
    assert world.outcomes["x"] == "conflict"


def test_a_repetition_in_the_batch_and_of_an_earlier_batch_is_skipped():
    raw = value("b")
    known = Known({"b": SeenClaim(ClaimState.COMPLETED, 1, digest_of(raw), False)})

    world = World(rows_of, known=known).run(new(0, value("a")), new(1, value("a")), new(2, raw))

    assert world.rows == [{"id": "a"}]
    assert world.outcomes == {"a": "duplicate_skipped", "b": "duplicate_skipped"}
    assert len(world.changes) == 1


def test_one_id_with_two_payloads_is_a_conflict_with_a_letter_of_its_own():
    world = World(rows_of).run(new(0, value("a")), new(1, value("a", x=1)))

    assert world.rows == [{"id": "a"}]
    (letter,) = world.of(Op.LETTER)
    assert letter.message_id.startswith("conflict:")
    assert json.loads(letter.detail or "")["expected_hash"] == digest_of(value("a"))


def test_an_unreadable_record_becomes_a_dead_letter_with_its_bytes():
    world = World(rows_of).run(new(7, b"{"))

    assert [c.op for c in world.changes] == ["attempt", "claim", "letter"]
    (letter,) = world.of(Op.LETTER)
    assert (letter.message_id, letter.error_code) == ("unreadable:t/0/7", "DESERIALIZATION_FAILED")
    assert json.loads(letter.detail or "")["payload"] == "ew=="
    assert world.of(Op.CLAIM)[0].state == "FAILED_TERMINAL"


def test_behind_a_failed_message_its_key_waits_and_others_go_on():
    world = World(failing_once("a")).run(
        new(0, value("a")), new(1, value("b")), new(2, value("x", "other"), "other")
    )

    assert world.rows == [{"id": "x"}]
    a, b = world.of(Op.WAIT)
    assert (a.message_id, json.loads(a.detail or "")["waits"]) == ("a", "retry")
    assert (b.message_id, json.loads(b.detail or "")["waits"]) == ("b", "behind")
    assert [(c.message_id, c.state, c.attempts) for c in world.of(Op.CLAIM)] == [
        ("a", "FAILED_RETRYABLE", 1),
        ("b", "PARKED", 0),
        ("x", "COMPLETED", 1),
    ]


def test_a_message_that_a_replay_put_there_and_its_topic_delivers_is_handled_once():
    put = {"claim_state": "", "attempts": 0}

    both = World(rows_of).run(back(1, value("a"), **put), new(7, value("a")))
    later = World(rows_of).run(back(1, value("a"), **{**put, "claim_state": "COMPLETED"}))

    assert [row["id"] for row in both.rows] == ["a"]
    assert both.outcomes == {"a": "duplicate_skipped"}
    assert [change.op for change in both.changes] == [Op.TAKE]
    assert (later.rows, [change.op for change in later.changes]) == ([], [Op.TAKE])


def test_new_messages_wait_behind_a_key_that_is_held():
    world = World(rows_of, held={"k": 41}).run(new(0, value("a")))

    assert world.rows == []
    (wait,) = world.of(Op.WAIT)
    assert (wait.state, wait.place) == ("held", 41)


def test_a_queue_is_drained_in_order_and_then_the_new_ones():
    world = World(rows_of).run(
        back(1, value("a")),
        back(2, value("b"), waits=Waits.BEHIND, attempts=0, claim_state="PARKED"),
        new(9, value("c")),
    )

    assert [row["id"] for row in world.rows] == ["a", "b", "c"]
    assert [(c.message_id, c.place, c.seen_waits, c.seen_state) for c in world.of(Op.TAKE)] == [
        ("a", 1, "retry", "FAILED_RETRYABLE"),
        ("b", 2, "behind", "PARKED"),
    ]


def test_a_waiting_message_that_fails_again_keeps_its_queue_waiting():
    world = World(failing_once("a")).run(
        back(1, value("a")), back(2, value("b"), waits=Waits.BEHIND), new(9, value("c"))
    )

    assert world.rows == []
    (again,) = world.of(Op.AGAIN)
    assert (again.message_id, again.attempts, again.seen_attempts) == ("a", 2, 1)
    (behind,) = world.of(Op.WAIT)
    assert (behind.message_id, behind.place) == ("c", 2)


def test_after_its_last_attempt_a_message_is_a_dead_letter_and_its_key_goes_on():
    world = World(failing_once("a")).run(
        back(1, value("a"), attempts=2), back(2, value("b"), waits=Waits.BEHIND)
    )

    assert world.rows == [{"id": "b"}]
    assert world.outcomes == {"a": "dlq", "b": "success"}
    assert [c.message_id for c in world.of(Op.LETTER)] == ["a"]
    assert world.of(Op.TAKE)[0].state == "FAILED_TERMINAL"


def test_what_will_never_pass_is_a_dead_letter_at_once_or_parked_by_policy():
    handler = failing_once("a", error=NonRetryableMessageError)

    dead = World(handler).run(new(0, value("a")))
    parked = World(handler, on_hopeless=GiveUp.PARK).run(new(0, value("a")), new(1, value("b")))

    assert dead.outcomes == {"a": "dlq"}
    assert parked.outcomes == {"a": "parked", "b": "retryable_failure"}


def test_rows_of_a_handler_that_fails_half_way_are_dropped():
    def handle(message):
        yield "rows", {"id": message.id}
        raise RetryableMessageError("no")

    world = World(handle).run(new(0, value("a")))

    assert world.rows == []


def test_a_row_for_no_sink_stops_the_pipeline_and_names_the_sinks():
    with pytest.raises(Misuse, match=r"'tables'; there are sinks: 'rows'"):
        World(lambda message: [("tables", {})]).run(new(0, value("a")))


def test_outgoing_messages_have_the_same_ids_in_every_attempt():
    def handle(message):
        yield Send("mails", {"to": 1}, key="u")
        yield Send("mails", {"to": 2}, key="u")

    first, second = (World(handle).run(new(0, value("a"))) for _ in range(2))

    assert [c.ordinal for c in first.of(Op.SEND)] == [0, 1]
    assert len({c.message_id for c in first.of(Op.SEND)}) == 2
    assert [c.message_id for c in first.changes] == [c.message_id for c in second.changes]


def test_versions_are_applied_in_order_and_old_ones_passed_over():
    world = World(rows_of, reading=VERSIONED, versioned=True, known=Known(versions={"k": 3}))

    world.run(new(0, value("old", v=3)), new(1, value("four", v=4)), new(2, value("five", v=5)))

    assert [row["id"] for row in world.rows] == ["four", "five"]
    assert world.outcomes["old"] == "duplicate_skipped"
    version, _, _ = world._pass.finish()
    assert (version.op, version.seen_version, version.version) == ("version", 3, 5)


def test_a_gap_holds_its_key_until_the_missing_version_comes():
    world = World(rows_of, reading=VERSIONED, versioned=True, gaps=GapPolicy.PARK_KEY)

    world.run(new(0, value("two", v=2)), new(1, value("three", v=3)), new(2, value("one", v=1)))

    assert [row["id"] for row in world.rows] == ["one"]
    assert world.outcomes == {"two": "parked", "three": "retryable_failure", "one": "success"}
    (gap,) = world.of(Op.GAP)
    assert (gap.version, gap.seen_version) == (1, 2)


def test_a_waiting_version_that_others_wait_for_overtakes_them():
    world = World(
        rows_of,
        reading=VERSIONED,
        versioned=True,
        known=Known(versions={"k": 1}),
    ).run(back(1, value("three", v=3)), back(2, value("two", v=2), waits=Waits.BEHIND))

    assert [row["id"] for row in world.rows] == ["two", "three"]


def test_a_message_that_a_service_handles_brings_the_batch_back():
    claim = SeenClaim(ClaimState.IN_PROGRESS, 1, "", False)

    with pytest.raises(BeingHandled, match="'a'"):
        World(rows_of, known=Known({"a": claim})).run(new(0, value("a")))


def test_an_open_claim_without_a_waiting_row_is_taken_again():
    claim = SeenClaim(ClaimState.FAILED_RETRYABLE, 2, "", True)

    world = World(rows_of, known=Known({"a": claim})).run(new(0, value("a")))

    (retake,) = world.of(Op.RETAKE)
    assert (retake.seen_state, retake.seen_attempts, retake.attempts) == ("FAILED_RETRYABLE", 2, 3)


def test_a_redelivery_of_a_waiting_message_is_a_duplicate():
    claim = SeenClaim(ClaimState.FAILED_RETRYABLE, 1, "", True, waits=True)

    world = World(rows_of, known=Known({"a": claim})).run(new(0, value("a")))

    assert (world.rows, world.changes) == ([], [])


def test_async_handlers_run_at_once_for_different_keys_and_in_order_for_one():
    import asyncio

    running, most, order = set(), [0], []

    async def handle(message):
        assert message.key not in running
        running.add(message.key)
        most[0] = max(most[0], len(running))
        await asyncio.sleep(0.001)
        running.remove(message.key)
        order.append(message.id)
        return [("rows", {"id": message.id})]

    arrivals = [new(n, value(f"{k}{n}", k), k) for n in range(3) for k in "abc"]
    World(handle).run(*arrivals)

    assert most[0] == 3
    assert [one for one in order if one[0] == "a"] == ["a0", "a1", "a2"]


def test_messages_are_noted_while_they_are_tried_after_the_process_died():
    known = Known(suspects={"a": 1})
    seen: list[list[str]] = []

    def handle(message):
        seen.append(sorted(known.noted))

    World(handle, known=known, is_careful=True).run(
        new(0, value("a")), new(1, value("b", "l"), "l"), new(2, value("c", "m"), "m")
    )

    assert seen == [["a"], ["b", "c"], ["b", "c"]]
    assert known.noted == []


def test_a_note_of_a_message_that_has_ended_is_cleared():
    claims = {
        "a": SeenClaim(ClaimState.COMPLETED, 1, digest_of(value("a")), False),
        "b": SeenClaim(ClaimState.FAILED_TERMINAL, 1, digest_of(value("b")), False),
        "c": SeenClaim(ClaimState.COMPLETED, 1, "another", False),
    }
    known = Known(claims, suspects=dict.fromkeys("abc", 1))
    known.noted = [*"abc"]

    World(rows_of, known=known, is_careful=True).run(
        *[new(n, value(c)) for n, c in enumerate("abc")]
    )

    assert known.noted == []


def test_beside_a_suspect_nothing_else_is_tried():
    import asyncio

    known = Known(suspects=dict.fromkeys("abcd", 1))
    noted: list[list[str]] = []

    async def handle(message):
        await asyncio.sleep(0)
        noted.append(sorted(known.noted))

    World(handle, known=known, is_careful=True).run(
        *[new(n, value(one, one), one) for n, one in enumerate("abcd")]
    )

    assert noted == [["a"], ["b"], ["c"], ["d"]]


def test_a_note_that_was_shared_parks_no_message_even_where_one_death_would():
    once, twice = (
        World(rows_of, known=Known(suspects={"a": deaths}), is_careful=True, poison_attempts=1).run(
            new(0, value("a"))
        )
        for deaths in (1, 2)
    )

    assert (once.outcomes, twice.outcomes) == ({"a": "success"}, {"a": "parked"})


def test_the_error_of_an_async_handler_is_its_own_and_a_misuse_is_told_first():
    async def handle(message):
        return [("row", {})]

    claim = SeenClaim(ClaimState.IN_PROGRESS, 1, "", False)

    with pytest.raises(Misuse, match=r"'row'; there are sinks: 'rows'"):
        World(handle).run(new(0, value("a")), new(1, value("b", "l"), "l"))
    with pytest.raises(BeingHandled, match="'a'"):
        World(handle, known=Known({"a": claim})).run(new(0, value("a")))


@pytest.mark.parametrize("output", [42, {"id": 1}, ["rows"], [("rows", None)]])
def test_a_handler_whose_output_has_no_known_form_stops_the_pipeline(output):
    with pytest.raises(Misuse, match="must yield pairs of a sink's name and a row"):
        World(lambda message: output).run(new(0, value("a")))


def test_of_one_id_under_two_keys_the_first_by_offset_is_handled():
    def picked(handler):
        return World(handler, is_careful=True, is_alone=True).run(
            new(0, value("x", "k2"), "k2"),
            new(1, value("a", "k1"), "k1"),
            new(2, value("a", "k2"), "k2"),
        )

    by_python, by_spark = picked(rows_of), picked(None)

    assert [c.source for c in by_python.of(Op.CLAIM)] == ["t/0/0", "t/0/1"]
    assert [c.source for c in by_spark.of(Op.CLAIM)] == ["t/0/0", "t/0/1"]
    assert by_spark.picked == [0, 1]


def test_a_conflict_with_the_claim_does_not_make_a_repetition_one():
    raw = value("a")
    known = Known({"a": SeenClaim(ClaimState.COMPLETED, 1, digest_of(raw), False)})

    world = World(rows_of, known=known).run(new(0, value("a", x=1)), new(1, raw))

    assert [c.op for c in world.changes] == ["letter"]
    assert world.outcomes == {"a": "duplicate_skipped"}


def test_an_exception_is_no_death():
    known = Known({"h": SeenClaim(ClaimState.IN_PROGRESS, 1, "", False)}, suspects={"a": 1, "z": 1})
    world = World(rows_of, known=known, is_careful=True)

    with pytest.raises(BeingHandled):
        world.run(new(0, value("a")), new(1, value("h", "l"), "l"))

    assert known.noted == []


def test_a_message_that_killed_the_process_too_often_is_parked_untried():
    world = World(rows_of, known=Known(suspects={"a": 3}), is_careful=True).run(new(0, value("a")))

    assert (world.rows, world.outcomes) == ([], {"a": "parked"})
    assert world.of(Op.CLAIM)[0].error_code == "CRASHED"


def test_a_handler_that_cancels_what_it_waits_for_has_failed():
    import asyncio

    async def handle(message):
        if message.id == "a":
            task = asyncio.ensure_future(asyncio.sleep(60))
            task.cancel()
            await task

    world = World(handle).run(new(0, value("a")), new(1, value("b")))

    assert world.outcomes == {"a": "retryable_failure", "b": "retryable_failure"}


def test_what_was_fetched_for_a_message_that_fails_is_dropped_and_ids_differ():
    def fetch(message, gap):
        yield "rows", {"id": "fetched"}
        yield Send("indexed", {"version": gap.expected})

    def handle(message):
        yield Send("indexed", {"version": message.version})
        if message.attempt == 1:
            raise RetryableMessageError("no")

    def world():
        known = Known(versions={"k": 1})
        made = World(handle, reading=VERSIONED, versioned=True, gaps=GapPolicy.FETCH, known=known)
        made._pass._of = replace(made._pass._of, fetch_missing=fetch)
        return made

    failed = world().run(new(0, value("three", v=3)))
    done = world().run(back(1, value("three", v=3)))

    assert (failed.rows, failed.of(Op.SEND)) == ([], [])
    assert done.rows == [{"id": "fetched"}]
    assert len({change.message_id for change in done.of(Op.SEND)}) == 2


def test_a_version_that_others_wait_for_does_not_wait_behind_them():
    world = World(
        failing_once("two"),
        reading=VERSIONED,
        versioned=True,
        gaps=GapPolicy.PARK_KEY,
        held={"k": 7},
        known=Known(versions={"k": 1}),
    ).run(new(0, value("two", v=2)))

    (wait,) = world.of(Op.WAIT)
    assert (wait.state, wait.place) == ("", None)
    assert json.loads(wait.detail or "")["held"] == 0


def test_only_handled_messages_are_sent_again():
    def handle(message):
        yield Send("mails", {})

    def sent(claim):
        known = Known({"a": claim})
        world = World(handle, known=known, duplicates=Duplicates.INVOKE).run(new(0, value("a")))
        return len(world.of(Op.SEND))

    assert sent(SeenClaim(ClaimState.COMPLETED, 1, "", False)) == 1
    assert sent(SeenClaim(ClaimState.FAILED_RETRYABLE, 1, "", True, waits=True)) == 0


def test_a_key_that_spark_reads_otherwise_needs_a_single_task():
    arrival = Arrival(Record(Coordinates("t", 0, 0), value("a", True)), "true")

    for is_careful in (False, True):
        with pytest.raises(Retryable, match="two ways"):
            World(rows_of, is_careful=is_careful).run(arrival)
    assert World(rows_of, is_careful=True, is_alone=True).run(arrival).rows == [{"id": "a"}]


def test_every_offset_is_counted_by_its_outcome():
    world = World(failing_once("b")).run(
        new(3, value("a")), new(4, value("b")), new(6, value("c")), new(8, value("a"))
    )

    counts = {(c.state, c.seen_version, c.version, c.total) for c in world._pass.finish()}
    assert counts == {
        ("success", 3, 3, 1),
        ("retryable_failure", 4, 6, 2),
        ("duplicate_skipped", 8, 8, 1),
    }


def test_a_pipeline_is_tried_out_on_a_list_without_spark():
    def handle(message):
        if message.payload["amount"] < 0:
            raise NonRetryableMessageError("negative")
        yield "payments", {"id": message.id, "amount": message.payload["amount"]}
        yield Send("receipts", {"of": message.id}, key=message.key)

    pipeline = MessagePipeline(
        "billing",
        database="postgresql://nowhere/none",
        id_from=FromPayload("id"),
        handler=handle,
        sinks=[MemorySink("payments")],
        schemas={"payments": "id string, amount long"},
        messages=MemorySink("messages"),
    )

    tried = pipeline.try_out(
        [{"id": "a", "amount": 1}, {"id": "b", "amount": -1}, b"{", {"id": "a", "amount": 1}]
    )

    assert tried.rows == {"payments": [{"id": "a", "amount": 1}]}
    assert tried.outcomes["b"] == "dlq"
    assert [one.outcome for one in tried.messages].count("deserialization_failure") == 1
    assert [one["topic"] for one in tried.outgoing] == ["receipts"]


class Staged(MessagePipeline):
    """A pipeline whose passes count what a test says."""

    def __init__(self, *passes: tuple[int, int]) -> None:
        super().__init__(
            "billing",
            database="postgresql://nowhere/none",
            handler=rows_of,
            sinks=[],
            messages=MemorySink("messages"),
        )
        self._passes = list(passes)
        self._clock = SimulatedClock()
        self._is_active = lambda: bool(self._passes)

    def _stage_once(self, df, txn, *, is_again):
        tried, outages = self._passes.pop(0)
        return {"messages": [Receipt("t", detail={COUNTS: [tried, outages, [], [], []]})]}


def test_a_batch_stands_still_while_a_dependency_is_down():
    pipeline = Staged((100, 80), (100, 60), (100, 3), (100, 0))

    for _ in range(2):
        with pytest.raises(OutageMet, match="of 100 messages failed"):
            pipeline._stage(None, TXN)
    pipeline._stage(None, TXN)

    assert pipeline._clock.monotonic() > 1.5
    assert pipeline._counts.outages == 3


def test_the_query_lives_as_long_as_the_dependency_is_down_and_its_attempts_are_not_spent():
    pipeline = Staged(*[(100, 80)] * 8, (100, 0), (0, 0))
    seen = []
    pipeline._run_of = lambda df, batch: setattr(pipeline, "_run", pipeline) or pipeline
    pipeline.generation = SimpleNamespace(number=1)
    staged = pipeline._stage_once

    def once(df, txn, *, is_again):
        seen.append(is_again)
        return staged(df, txn, is_again=is_again)

    def run_cycle(cycle, read_range, stage):
        for _ in range(3):
            try:
                stage(TXN)
            except Retryable as error:
                outcome = CommitAborted(str(error))
            else:
                return CommitSucceeded()
        return outcome

    pipeline._stage_once = once
    pipeline._driver = SimpleNamespace(scope=TXN.scope, run_cycle=run_cycle)
    pipeline(None, 0)

    assert seen == [False] * 9
    assert isinstance(pipeline.outcome, CommitSucceeded)


def test_a_query_that_is_stopped_in_an_outage_ends():
    pipeline = Staged((100, 80))
    pipeline._run_of = lambda df, batch: setattr(pipeline, "_run", pipeline) or pipeline
    pipeline.generation = SimpleNamespace(number=1)

    def run_cycle(cycle, read_range, stage):
        with pytest.raises(OutageMet):
            stage(TXN)
        return CommitAborted("down")

    pipeline._driver = SimpleNamespace(scope=TXN.scope, run_cycle=run_cycle)

    with pytest.raises(CycleGaveUp):
        pipeline(None, 0)


def test_messages_that_are_alike_are_counted_as_if_each_was_measured():
    counts, measured = PassCounts(), PassCounts()
    bills, others = (
        Message("a", {}, key="k", source=Coordinates(topic, 0, 0)) for topic in ("bills", "others")
    )
    failure = Classified(FailureClass.POISON, "BROKEN", "no", "")
    delivered, waiting = new(0, b"{}"), back(1, value("a"))
    outcomes = [
        *[(delivered, bills, Handled())] * 3,
        *[(delivered, others, Handled()), (waiting, bills, Handled())] * 2,
        *[(delivered, bills, why) for why in (Skipped(), Skipped("old version"), Skipped())],
        *[(delivered, bills, DeadLettered(failure))] * 2,
        *[(delivered, bills, Conflicted("x", "y")), (delivered, bills, Refused("parked"))] * 2,
        *[(delivered, Unreadable(delivered.record, Unread.NO_ID, "none"), Refused("parked"))] * 2,
    ]

    unsubscribe = EVENTS.subscribe(counts.measured, Measurement)
    for one in outcomes:
        counts.note("c", *one)
    unsubscribe()
    unsubscribe = EVENTS.subscribe(measured.measured, Measurement)
    for arrival, message, outcome in outcomes:
        if arrival.waiting is None:
            tell_received(message, "c")
        tell(message, outcome, "c")
    unsubscribe()

    assert counts.metrics == measured.metrics
    assert counts.metrics["consumer.messages.received.total", "bills", "c", ""] == 12


def test_a_task_leaves_the_garbage_collector_as_it_was():
    pipeline = MessagePipeline(
        "billing", database="postgresql://nowhere/none", handler=rows_of, sinks=[]
    )
    thresholds = []

    class Opened:
        def open(self, task):
            thresholds.append(gc.get_threshold())
            raise Retryable("no database")

    tee = PassTee(
        [("messages", Opened())],
        pipeline.pass_settings,
        [(Known(), {})],
        [],
        attempts=1,
        is_careful=False,
        is_alone=False,
    )
    before = gc.get_threshold()

    with pytest.raises(Retryable):
        tee.write([], "t")

    assert gc.get_threshold() == before
    assert thresholds == [(*before[:2], before[2] * 10)]


def test_gaps_that_were_crossed_come_to_the_driver_in_the_receipts():
    counts = PassCounts()
    gap = Gap("c", "k", 2, 4)
    counts.note("c", new(0, b"{}"), Message("a", {}, key="k"), Handled(gap=gap))
    told = json.loads(json.dumps(counts.to_json()))

    total = PassCounts.of([Receipt("t", detail={COUNTS: told})] * 2)

    assert [tuple(one) for one in total.gaps] == [("k", 2, 4)] * 2


def test_durations_of_calls_are_added_up_by_length():
    counts = PassCounts()
    message = Message("a", {}, key="k", source=Coordinates("t", 0, 0))
    for seconds in (0.1, 0.11, 3.0):
        counts.took("c", message, seconds)
    told = json.loads(json.dumps(counts.to_json()))

    total = PassCounts.of([Receipt("t", detail={COUNTS: told})] * 2)

    found = {key[:3]: [] for key in total.durations}
    for key, one in total.durations.items():
        found[key[:3]].append(one)
    assert found == {("t", "c", ""): [(4, pytest.approx(0.42)), (2, 6.0)]}


@pytest.mark.parametrize("name", ["SearchIndexer", "search.indexer.v2", "s" * 200])
def test_a_pipeline_takes_the_names_that_a_service_takes(name):
    def pipeline(**more):
        database = "postgresql://nowhere/none"
        return MessagePipeline(name, database=database, handler=rows_of, sinks=[], **more)

    made = pipeline()

    assert made.sinks[-1].consumer == made.pass_settings.consumer == name
    assert checked_name("app", made.app) == made.app
    assert made.app != pipeline(app="search").app == "search"
    with pytest.raises(Misuse, match="1 to 200 characters"):
        MessagePipeline("s" * 201, database="postgresql://db/d", handler=rows_of, sinks=[])


def test_a_handler_that_cannot_be_sent_to_a_task_is_named_before_the_query_starts():
    lock = Lock()

    def pay(message):
        with lock:
            yield "rows", {}

    pipeline = MessagePipeline("b", database="postgresql://d/d", handler=pay, sinks=[])

    with pytest.raises(Misuse, match=r"its handler '.*pay' cannot be sent to Spark's tasks"):
        pipeline.write(None)


def test_a_value_without_headers_is_told_to_need_a_record():
    pipeline = MessagePipeline("b", database="postgresql://d/d", handler=rows_of, sinks=[])

    (one,) = pipeline.try_out([b'{"caseId": 1}']).messages

    assert one.reason == (
        "no message id in the header 'message-id'; this message has no headers: give try_out a "
        "Record with them"
    )


@pytest.mark.parametrize(
    ("policy", "is_refused"),
    [
        ("{strategy: notification-id, externalProviderIdempotency: true}", True),
        ("{strategy: notification-id, externalProviderIdempotency: true}, outbox: true", False),
        ("{}, sideEffects: [{name: mail, intent: outbox}]", False),
        ("{}, sideEffects: [{name: mail, idempotencyKey: true}], outbox: true", True),
        ("{}", False),
    ],
)
def test_speculation_is_refused_where_a_handler_calls_another_system(policy, is_refused):
    text = f"""
deliverySemantics:
  topics: {{mails: {{key: id, ordering: per-key}}}}
  consumers: {{sender: {{dlq: {{enabled: true, owner: us}}, idempotency: {policy}}}}}
"""
    pipeline = MessagePipeline(
        "sender",
        policy=Policy.parse(text),
        database="postgresql://d/d",
        handler=rows_of,
        sinks=[],
    )
    df = SimpleNamespace(sparkSession=SimpleNamespace(conf={"spark.speculation": "true"}))

    with pytest.raises(Misuse if is_refused else AttributeError) as refused:
        pipeline.write(df)

    assert ("spark.speculation=false" in str(refused.value)) == is_refused


def test_names_that_differ_have_apps_that_differ():
    names = ["search-indexer", "search.indexer", "Search.Indexer", "s" * 100, "s" * 101]

    apps = {
        MessagePipeline(n, database="postgresql://d/d", handler=rows_of, sinks=[]).app
        for n in names
    }

    assert len(apps) == len(names)
    assert "search-indexer" in apps


def test_few_failures_are_no_outage_until_batches_of_few_messages_add_up():
    pipeline = Staged(*[(1, 1)] * 6, (4, 0))

    for _ in range(3):
        pipeline._stage(None, TXN)
    with pytest.raises(OutageMet):
        pipeline._stage(None, TXN)


def test_one_message_that_fails_is_no_outage_however_many_wait_behind_it():
    counts = PassCounts()
    failure = Classified(FailureClass.DEPENDENCY_OUTAGE, "DEPENDENCY_UNAVAILABLE", "down", "")
    message = Message("a", {}, key="k")
    counts.note("c", new(0, b"{}"), message, RetryStored(failure, 1))
    for offset in range(1, 50):
        counts.note("c", new(offset, b"{}"), message, RetryStored())

    assert (counts.tried, counts.outages) == (1, 1)


def test_a_policy_that_keeps_results_is_refused():
    with pytest.raises(Misuse, match="keepResult"):
        MessagePipeline(
            "billing",
            policy=ConsumerSettings(keeps_results=True),
            database="postgresql://nowhere/none",
            handler=rows_of,
            sinks=[],
            messages=MemorySink("messages"),
        )


def test_a_row_must_fit_its_sink():
    check = RowCheck("rows", ["id", "n"], pa.schema([("id", pa.string()), ("n", pa.int64())]))

    assert check({"id": "é", "n": None})
    for row, why in [
        ({"id": "a", "m": 1}, "has the column 'm'"),
        ({"id": 1}, "a int in column 'id'"),
        ({"id": "a", "n": 2**63}, "a int in column 'n'"),
        ({"id": "\ud800"}, "a str in column 'id'"),
        ({"id": "a", "n": True}, "a bool in column 'n'"),
    ]:
        with pytest.raises(Permanent, match=why):
            check(row)


def test_the_columns_of_a_schema_are_read_without_spark():
    text = "id string, price decimal(10,2), `a b` long, tags array<struct<x: int, y: int>>"

    assert columns_of(text) == {
        "id": "string",
        "price": "decimal(10,2)",
        "a b": "long",
        "tags": "array<struct<x: int, y: int>>",
    }
    with pytest.raises(Misuse, match="cannot be read"):
        columns_of("id")


def test_a_row_is_tried_out_against_the_types_of_its_sink():
    pipeline = MessagePipeline(
        "billing",
        database="postgresql://nowhere/none",
        id_from=FromPayload("id"),
        handler=lambda message: [("rows", {"n": message.payload["n"]})],
        sinks=[MemorySink("rows")],
        schemas={"rows": "n long"},
        messages=MemorySink("messages"),
    )

    tried = pipeline.try_out([{"id": "a", "n": 5}, {"id": "b", "n": "5"}])

    assert tried.outcomes == {"a": "success", "b": "dlq"}
    assert "a str in column 'n', which is int64" in tried.messages[1].reason


def test_the_types_of_a_schema_are_those_of_spark():
    from pyspark.sql import types as spark
    from pyspark.sql.pandas.types import to_arrow_type

    nested = spark.StructType([spark.StructField("x", spark.IntegerType())])
    kinds = {
        "boolean": spark.BooleanType(),
        "tinyint": spark.ByteType(),
        "SMALLINT": spark.ShortType(),
        "int": spark.IntegerType(),
        "bigint": spark.LongType(),
        "float": spark.FloatType(),
        "double": spark.DoubleType(),
        "string": spark.StringType(),
        "binary": spark.BinaryType(),
        "date": spark.DateType(),
        "timestamp": spark.TimestampType(),
        "timestamp_ntz": spark.TimestampNTZType(),
        "decimal(12,2)": spark.DecimalType(12, 2),
        "decimal": spark.DecimalType(10, 0),
        "array<string>": spark.ArrayType(spark.StringType()),
        "map<string, int>": spark.MapType(spark.StringType(), spark.IntegerType()),
        "struct<x: int>": nested,
    }
    fields = arrow_fields(", ".join(f"c{n} {kind}" for n, kind in enumerate(kinds)))

    expected = [to_arrow_type(kind, timezone="UTC") for kind in kinds.values()]
    assert [field.type for field in fields] == expected
    (known,) = arrow_fields("id string not null comment 'its id', v variant")
    assert (known.name, known.nullable) == ("id", False)


def row(offset: int, key: str, raw: bytes, waiting: str | None = None) -> dict[str, object]:
    names = {"route": key, "topic": "t", "partition": 0, "offset": offset, "value": raw}
    return {**dict.fromkeys(KINDS.names), **names, "waiting": waiting}


KINDS = pa.schema(
    [
        ("route", pa.string()),
        ("place", pa.int64()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.float64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("waiting", pa.string()),
    ]
)


def test_each_database_has_a_pass_of_its_own_over_its_keys():
    keys = [f"k{number}" for number in range(20)]
    rows = [row(n, key, value(f"m-{key}", key)) for n, key in enumerate(keys)]
    rows += [row(20 + n, key, value(f"m-{key}", key)) for n, key in enumerate(keys)]
    seen = back(1, value("w", "k0"), "k0").waiting
    told = {one.name: getattr(seen, one.name) for one in fields(seen) if one.name != "payload"}
    rows.insert(0, row(0, "k0", value("w", "k0"), json.dumps({**told, "shard": 1})))
    rows.sort(key=lambda one: str(one["route"]))
    settings = PassSettings(
        "c", rows_of, READING, ConsumerSettings(retry=RETRY), CLASSIFICATION, {"rows": 0}, [dict]
    )
    known = [Known({"m-k1": DONE, "m-k2": DONE}), Known({"m-k1": DONE, "m-k2": DONE})]
    stores = [(known[0], {}), (known[1], {})]
    schemas = [pa.schema([("id", pa.string())])]
    tee = PassTee([], settings, stores, schemas, attempts=1, is_careful=False, is_alone=False)

    made: dict[int, list[dict[str, object]]] = {0: [], 1: [], 2: []}
    for part in tee.parts([pa.RecordBatch.from_pylist(rows, schema=KINDS)]):
        for place, batch in part:
            made[place] += batch.to_pylist()

    expected = {f"m-{key}" for key in keys if key not in ("k1", "k2")}
    assert sorted(one["id"] for one in made[0]) == sorted({*expected, "w"})
    claimed = [{one["message_id"] for one in made[n] if one["op"] == Op.CLAIM} for n in (1, 2)]
    assert claimed[0] | claimed[1] == expected
    assert not claimed[0] & claimed[1]
    assert min(map(len, claimed)) > 4
    assert [one["message_id"] for one in made[2] if one["op"] == Op.TAKE] == ["w"]
    counted = [sum(one["total"] for one in made[n] if one["op"] == Op.COUNT) for n in (1, 2)]
    assert counted == [40, 40]


DONE = SeenClaim(ClaimState.COMPLETED, 1, "", False)


async def _dry_run(pipeline, *messages):
    database = SqlDatabase("sqlite://")
    await database.create_tables()
    consumer = pipeline.as_consumer()
    try:
        return [await dry_run(consumer, database, one) for one in messages]
    finally:
        await database.close()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_dry_run_shows_what_the_pass_would_make(is_async):
    def pay(message):
        if message.payload.get("bad"):
            raise NonRetryableMessageError("no")
        yield "rows", {"id": message.id, "password": "secret"}
        yield Send("paid", {"id": message.id}, key=message.key)

    async def pay_later(message):
        return list(pay(message))

    sink = MemorySink("rows")
    pipeline = MessagePipeline(
        "c",
        database="postgresql://db/shop",
        policy=ConsumerSettings(versioned=True, dead_letter_topic="c.dlq"),
        handler=pay_later if is_async else pay,
        reading=VERSIONED,
        sinks=[sink],
    )
    good, bad = (
        READING.read(Record(Coordinates("t", 0, n), raw))
        for n, raw in enumerate((value("a", v=7), value("b", v=8, bad=True)))
    )

    done, failed = asyncio.run(_dry_run(pipeline, good, bad))

    assert (done.outcome, done.why) == (Handled(), "")
    assert [(c.table, c.after) for c in done.changes] == [("rows", {"id": "a", "password": "***"})]
    assert [(one.topic, one.key) for one in done.outgoing] == [("paid", "k")]
    assert failed.why == "REJECTED: no"
    assert (list(failed.changes), failed.outgoing) == ([], ())


def test_a_pipeline_takes_the_database_url_of_a_service():
    pipeline = MessagePipeline(
        "billing",
        database="postgresql+asyncpg://db/shop?schema=billing",
        handler=rows_of,
        sinks=[],
    )

    assert pipeline.given_ledger == "postgresql://db/shop"
    assert (
        repr(pipeline.sinks[-1])
        == "MessagesSink('postgresql://db/shop', 'billing', name='messages')"
    )


def test_a_pipeline_without_claims_says_what_its_guarantee_rests_on():
    def pipeline(**how):
        url, sink = "postgresql://db/shop", MemorySink("rows")
        return MessagePipeline("c", database=url, handler=rows_of, sinks=[sink], **how)

    assert pipeline(claims="failed").sinks[-1].guarantee().weakened_by == (ONLY_FAILED,)
    assert pipeline(claims="lean").sinks[-1].guarantee().weakened_by == (LEAN,)
    assert pipeline().sinks[-1].guarantee().weakened_by == ()
    with pytest.raises(Misuse, match="write 'all', 'lean' or 'failed'"):
        pipeline(claims="none")
