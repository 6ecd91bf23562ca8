"""What every outcome counts, once: from the broker, the retry table and the inbox."""

from __future__ import annotations

from dataclasses import replace

import pytest

from semel.events import EVENTS, Measurement, Metric
from semel.message import Message
from semel.messaging.failure import Classified, FailureClass
from semel.messaging.outcome import (
    Conflicted,
    DeadLettered,
    Handled,
    ParkedAway,
    RetryLater,
    RetryStored,
    Told,
    tell,
)
from semel.policy.vocabulary import BatchPolicy, Mode, RetryMode
from tests.messaging.measured import Shop, recorded
from tests.messaging.outgoing import AT_ONCE, run

IN_TABLE = replace(AT_ONCE, mode=RetryMode.RETRY_TABLE)

DELIVERED = {"received": 1, "duration": 1}
"""One delivery that was handled; whatever became of it comes on top."""

POISON = {"dlq REJECTED": 1, "poison": 1}
UNREADABLE = {"dlq DESERIALIZATION_FAILED": 1}

BY_DELIVERY = {
    Told.SUCCESS: DELIVERED,
    Told.DUPLICATE_SKIPPED: {**DELIVERED, "duplicates": 1},
    Told.RETRYABLE_FAILURE: {"received": 2, "duration": 2, "retries TIMEOUT": 1},
    Told.TERMINAL_FAILURE: DELIVERED,
    Told.DLQ: {**DELIVERED, **POISON},
    Told.PARKED: {**DELIVERED, "poison": 1},
    Told.DESERIALIZATION_FAILURE: {
        **DELIVERED,
        **UNREADABLE,
        "deserialization_failures DESERIALIZATION_FAILED": 1,
    },
    Told.SCHEMA_INCOMPATIBLE: {**DELIVERED, "dlq SCHEMA_INVALID": 1},
    Told.CONFLICT: {**DELIVERED, "dlq PAYLOAD_CONFLICT": 1, "poison": 1},
}
"""What a delivery counts that ends so, besides the outcome itself."""


async def end_so(shop: Shop, outcome: Told) -> None:
    """Deliver one message that ends with an outcome."""
    match outcome:
        case Told.RETRYABLE_FAILURE:
            shop.fails(1, "TIMEOUT")
        case Told.DLQ | Told.PARKED:
            shop.fails(1, "REJECTED")
        case Told.SCHEMA_INCOMPATIBLE:
            shop.fails(1, "SCHEMA_INVALID")
        case Told.DESERIALIZATION_FAILURE:
            return await shop.deliver(1, value=b"?")
        case Told.CONFLICT:
            return await shop.deliver(1, value=b'{"type": "paid", "n": 2}')
        case _:
            pass
    return await shop.deliver(1)


async def deliver_and_compare(shop: Shop, outcome: Told) -> None:
    if outcome in (Told.DUPLICATE_SKIPPED, Told.CONFLICT, Told.TERMINAL_FAILURE):
        shop.fails(1, *(["REJECTED"] if outcome is Told.TERMINAL_FAILURE else []))
        await shop.deliver(1)
    with recorded() as counted:
        await end_so(shop, outcome)
    expected = {**BY_DELIVERY[outcome], f"processed {outcome.value}": 1}
    if outcome is Told.RETRYABLE_FAILURE:
        expected["processed success"] = 1
    assert counted() == expected


@pytest.mark.parametrize("outcome", Told)
def test_a_delivery_counts_its_outcome_and_what_was_written(database, outcome):
    async def scenario(world):
        gives_up = {"on_hopeless": "park"} if outcome is Told.PARKED else {}
        await deliver_and_compare(Shop(world, **gives_up), outcome)

    run(database, scenario)


@pytest.mark.parametrize("outcome", Told)
@pytest.mark.parametrize("mode", [Mode.BATCHED, Mode.LEASED])
def test_every_mode_counts_the_same(memory, mode, outcome):
    async def scenario(world):
        gives_up = {"on_hopeless": "park"} if outcome is Told.PARKED else {}
        await deliver_and_compare(Shop(world, mode, **gives_up), outcome)

    run(memory, scenario)


TURN = {"duration": 1}

BY_TABLE = {
    Told.SUCCESS: ([""], TURN),
    Told.RETRYABLE_FAILURE: (["TIMEOUT", ""], {"duration": 2, "retries TIMEOUT": 1}),
    Told.DLQ: (["REJECTED"], {**TURN, **POISON}),
    Told.PARKED: (["REJECTED"], {**TURN, "poison": 1}),
    Told.SCHEMA_INCOMPATIBLE: (["SCHEMA_INVALID"], {**TURN, "dlq SCHEMA_INVALID": 1}),
    Told.DUPLICATE_SKIPPED: ([""], {**TURN, "duplicates": 1}),
}
"""How a message fails that waits in the retry table, and what its turns there count.

The others cannot happen there: what cannot be read, is a conflict or a dead letter does not wait.
"""


@pytest.mark.parametrize("outcome", BY_TABLE)
@pytest.mark.parametrize("messages", [1, 3])
def test_a_turn_in_the_retry_table_counts_as_a_delivery_does(database, outcome, messages):
    async def scenario(world):
        gives_up = {"on_hopeless": "park"} if outcome is Told.PARKED else {}
        shop, (codes, counts) = Shop(world, retry=IN_TABLE, **gives_up), BY_TABLE[outcome]
        for number in range(messages):
            shop.fails(number, "DEPENDENCY_UNAVAILABLE", *codes)
        await shop.deliver(*range(messages))
        if outcome is Told.DUPLICATE_SKIPPED:
            for number in range(messages):
                await shop.past_the_room(number)
        with recorded() as counted:
            await shop.retry()

        expected = {**counts, f"processed {outcome.value}": 1}
        if outcome is Told.RETRYABLE_FAILURE:
            expected["processed success"] = 1
        assert counted() == {name: number * messages for name, number in expected.items()}

    run(database, scenario)


@pytest.mark.parametrize("mode", [Mode.TRANSACTIONAL, Mode.LEASED])
@pytest.mark.parametrize("gives_up", ["dlq", "park"])
def test_attempts_that_are_used_up_in_the_retry_table_count_each_and_once(memory, mode, gives_up):
    async def scenario(world):
        shop = Shop(world, mode, retry=IN_TABLE, on_exhausted=gives_up)
        shop.fails(1, "TIMEOUT", "TIMEOUT", "TIMEOUT")
        with recorded() as counted:
            await shop.deliver(1)
            await shop.retry()

        end = {"processed parked": 1}
        if gives_up == "dlq":
            end = {"processed dlq": 1, "dlq TIMEOUT": 1}
        tried = {"received": 1, "duration": 3, "retries TIMEOUT": 2}
        assert counted() == {**tried, "processed retryable_failure": 2, **end}

    run(memory, scenario)


STORED = {"received": 1, "duration": 1}

BY_INBOX = {
    Told.SUCCESS: STORED,
    Told.DUPLICATE_SKIPPED: {"received": 1, "duplicates": 1},
    Told.RETRYABLE_FAILURE: {"received": 1, "duration": 2, "retries TIMEOUT": 1},
    Told.TERMINAL_FAILURE: {"received": 1},
    Told.DLQ: {**STORED, **POISON},
    Told.DESERIALIZATION_FAILURE: {
        **STORED,
        **UNREADABLE,
        "deserialization_failures DESERIALIZATION_FAILED": 1,
    },
    Told.SCHEMA_INCOMPATIBLE: {**STORED, "dlq SCHEMA_INVALID": 1},
    Told.CONFLICT: {"received": 1, "dlq PAYLOAD_CONFLICT": 1, "poison": 1},
}
"""What a message counts that goes through the inbox."""


@pytest.mark.parametrize("outcome", BY_INBOX)
def test_a_message_of_the_inbox_counts_as_a_delivery_does(database, outcome):
    async def scenario(world):
        shop = Shop(world)
        if outcome in (Told.DUPLICATE_SKIPPED, Told.CONFLICT):
            await shop.store(1)
        if outcome is Told.TERMINAL_FAILURE:
            # As a replay leaves a message that never was in the inbox.
            shop.fails(1, "REJECTED")
            await shop.past_the_room(1)
        codes = {
            Told.RETRYABLE_FAILURE: "TIMEOUT",
            Told.DLQ: "REJECTED",
            Told.SCHEMA_INCOMPATIBLE: "SCHEMA_INVALID",
        }
        raws = {Told.DESERIALIZATION_FAILURE: b"?", Told.CONFLICT: b'{"n": 2}'}
        shop.fails(1, *([codes[outcome]] if outcome in codes else []))
        with recorded() as counted:
            await shop.store(1, raws.get(outcome, b'{"type": "paid"}'))

        expected = {**BY_INBOX[outcome], f"processed {outcome.value}": 1}
        if outcome is Told.RETRYABLE_FAILURE:
            expected["processed success"] = 1
        assert counted() == expected

    run(database, scenario)


@pytest.mark.parametrize("mode", [Mode.TRANSACTIONAL, Mode.BATCHED])
def test_a_letter_that_comes_again_behind_a_blocking_retry_is_one_letter(memory, mode):
    async def scenario(world):
        shop = Shop(world, mode)
        shop.fails(1, "TIMEOUT")
        with recorded() as counted:
            shop.send(1)
            await shop.deliver(2, value=b"?")

        assert counted() == {
            "received": 4,
            "duration": 4,
            "processed retryable_failure": 1,
            "retries TIMEOUT": 1,
            "processed success": 1,
            "processed deserialization_failure": 2,
            "dlq DESERIALIZATION_FAILED": 1,
            "deserialization_failures DESERIALIZATION_FAILED": 1,
        }

    run(memory, scenario)


def test_a_conflict_that_comes_again_is_one_letter(database):
    async def scenario(world):
        shop, other = Shop(world), b'{"type": "paid", "n": 2}'
        await shop.deliver(1)
        with recorded() as counted:
            await shop.deliver(1, 1, value=other)

        deliveries = {"received": 2, "duration": 2, "processed conflict": 2}
        assert counted() == {**deliveries, "dlq PAYLOAD_CONFLICT": 1, "poison": 1}

    run(database, scenario)


def test_a_batch_that_falls_back_counts_every_message_once(database):
    async def scenario(world):
        shop = Shop(world, Mode.BATCHED)
        # Each failure undoes a chunk, and the handlers before it are called again.
        shop.fails(2, "REJECTED")
        with recorded() as counted:
            await shop.deliver(0, 1, 2, 3)

        assert counted() == {
            "received": 4,
            "duration": 4,
            "processed success": 3,
            "processed dlq": 1,
            "dlq REJECTED": 1,
            "poison": 1,
        }

    run(database, scenario)


@pytest.mark.parametrize("policy", [BatchPolicy.STOP, BatchPolicy.FAIL_BATCH])
def test_messages_that_only_come_back_with_another_one_are_no_retries(memory, policy):
    async def scenario(world):
        shop = Shop(world, Mode.BATCHED, batch=policy)
        shop.fails(0, "TIMEOUT")
        with recorded() as counted:
            await shop.deliver(0, 1, 2)

        assert counted() == {
            "received": 6,
            "retries TIMEOUT": 1,
            "duration": 4,
            "processed retryable_failure": 1,
            "processed success": 3,
        }

    run(memory, scenario)


def test_every_failure_is_counted_by_the_type_of_its_message():
    found: list[tuple[str, ...]] = []
    failures = [("retry", RetryLater(1.0, failed("TIMEOUT"))), ("stored", RetryStored(failed("A")))]
    failures += [("dead", DeadLettered(failed("B"))), ("parked", ParkedAway("?", failed("C")))]
    failures += [("conflict", Conflicted("x", "y")), ("behind", ParkedAway("behind"))]
    failures += [("known", DeadLettered(failed("D"), is_new=False)), ("done", Handled())]

    def note(one: Measurement) -> None:
        if one.metric is Metric.FAILURES:
            found.append((one.labels["event_type"], one.labels["reason"]))

    stop = EVENTS.subscribe(note, Measurement)
    for kind, outcome in failures:
        tell(Message("m1", {}, type=kind), outcome, "group")
    stop()

    assert found == [
        ("retry", "TIMEOUT"),
        ("stored", "A"),
        ("dead", "B"),
        ("parked", "C"),
        ("conflict", "PAYLOAD_CONFLICT"),
    ]


def failed(code: str) -> Classified:
    return Classified(FailureClass.TRANSIENT, code, "", "")
