"""Settings of consumers and runners: what they mean, and what is refused before anything runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.errors import Misuse
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.failure import RetryableMessageError
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.outcome import Handled, ParkedAway
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, Order, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import (
    BatchPolicy,
    Duplicates,
    GapPolicy,
    GiveUp,
    Mode,
    RetryMode,
    StalePolicy,
)
from tests.messaging.places import InPostgres, InSqlite
from tests.messaging.worlds import memory_database
from tests.stores.world import in_world

AT_ONCE = RetryPolicy(initial_delay_seconds=0.0, max_delay_seconds=0.0)
IN_TABLE = replace(AT_ONCE, mode=RetryMode.RETRY_TABLE)
QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=1.0)

ENUMS: list[tuple[type, str, Iterable[StrEnum]]] = [
    (ConsumerSettings, "on_exhausted", GiveUp),
    (ConsumerSettings, "on_hopeless", GiveUp),
    (ConsumerSettings, "duplicates", Duplicates),
    (ConsumerSettings, "gaps", GapPolicy),
    (ConsumerSettings, "stale", StalePolicy),
    (ConsumerSettings, "order", Order),
    (ConsumerSettings, "batch", BatchPolicy),
    (RunnerSettings, "mode", Mode),
    (RetryPolicy, "mode", [RetryMode.BLOCKING, RetryMode.RETRY_TABLE]),
]
SILLY: list[tuple[type, str, Any]] = [
    (ConsumerSettings, "lease_seconds", 0),
    (ConsumerSettings, "lease_seconds", -5),
    (ConsumerSettings, "lease_seconds", "60"),
    (ConsumerSettings, "held_retry_seconds", -1),
    (ConsumerSettings, "held_retry_seconds", float("nan")),
    (ConsumerSettings, "stale_grace_seconds", -1),
    (ConsumerSettings, "poison_attempts", 0),
    (ConsumerSettings, "poison_attempts", True),
    (ConsumerSettings, "chunk", 0),
    (ConsumerSettings, "conflict_tries", 1.5),
    (RunnerSettings, "max_records", 0),
    (RunnerSettings, "concurrency", 0),
    (RunnerSettings, "wait_seconds", -1),
    (RunnerSettings, "stop_seconds", -1),
    (RunnerSettings, "cancel_seconds", -1),
    (RunnerSettings, "member_seconds", 0),
    (RunnerSettings, "lag_seconds", -1),
    (RetryPolicy, "max_attempts", 0),
    (RetryPolicy, "max_poison_attempts", 0),
    (RetryPolicy, "initial_delay_seconds", -1),
    (RetryPolicy, "max_delay_seconds", float("nan")),
    (RetryPolicy, "retryable", "TIMEOUT"),
]


@pytest.mark.parametrize(("made", "field", "kind"), ENUMS)
def test_an_enum_may_be_given_by_its_value(made, field, kind):
    for member in kind:
        assert getattr(made(**{field: member.value}), field) is member


@pytest.mark.parametrize(("made", "field", "kind"), ENUMS)
def test_what_is_none_of_the_enum_is_refused_with_all_that_are(made, field, kind):
    with pytest.raises(Misuse) as refused:
        made(**{field: "typo"})

    said = str(refused.value)
    assert f"{made.__name__}.{field} must be" in said
    assert "got 'typo'" in said
    assert all(repr(member.value) in said for member in kind)


@pytest.mark.parametrize(("made", "field", "value"), SILLY)
def test_a_number_that_means_nothing_is_refused_by_its_field(made, field, value):
    with pytest.raises(Misuse, match=f"{made.__name__}.{field} must be "):
        made(**{field: value})


def test_codes_may_be_given_in_any_collection():
    policy = RetryPolicy(retryable=["A"], non_retryable={"B"})  # type: ignore[arg-type]

    assert (policy.retryable, policy.non_retryable) == (frozenset("A"), frozenset("B"))


WAITS: list[dict[str, Any]] = [
    {"retry": IN_TABLE},
    {"batch": BatchPolicy.DEAD_LETTER},
    {"on_exhausted": GiveUp.PARK},
    {"on_hopeless": GiveUp.PARK},
    {"versioned": True, "gaps": GapPolicy.PARK_KEY},
]


@pytest.mark.parametrize("waits", WAITS)
def test_order_per_key_holds_the_keys_of_whatever_waits(waits):
    assert ConsumerSettings(**waits).holds_waiting_keys
    assert not ConsumerSettings(**waits, order=Order.NONE).holds_waiting_keys
    with pytest.raises(Misuse, match=r"leave it out, or use order=Order\.NONE"):
        ConsumerSettings(**waits, holds_keys=False)


def test_keys_are_not_held_where_nothing_waits_beside_its_partition():
    assert not ConsumerSettings().holds_waiting_keys
    assert not ConsumerSettings(order=Order.PARTITION, on_hopeless=GiveUp.PARK).holds_waiting_keys
    assert ConsumerSettings(holds_keys=True).holds_waiting_keys


@pytest.mark.parametrize("stored", [{"retry": IN_TABLE}, {"batch": BatchPolicy.DEAD_LETTER}])
def test_the_order_of_a_partition_is_refused_with_the_retry_table(stored):
    with pytest.raises(Misuse, match=r"use RetryMode\.BLOCKING.*or order=Order\.KEY"):
        ConsumerSettings(**stored, order=Order.PARTITION)


def test_settings_that_are_changed_later_are_checked_again():
    assert replace(ConsumerSettings(), retry=IN_TABLE).holds_waiting_keys
    assert not replace(ConsumerSettings(retry=IN_TABLE), retry=AT_ONCE).holds_waiting_keys


def message(number: int, key: str = "k") -> Message:
    headers = {"message-id": f"m{number}".encode()}
    at = Coordinates("payments", 0, number)
    return Message(f"m{number}", json.loads("{}"), b"{}", key, headers=headers, source=at)


class Orders:
    @pytest.mark.parametrize("waits", WAITS[:2])
    def test_a_later_message_of_a_key_never_overtakes_one_that_waits(self, waits):
        settings = ConsumerSettings(**{"retry": AT_ONCE, **waits})

        @in_world
        async def scenario(_, world):
            seen: list[str] = []

            @consumer("billing", policy=settings, id_from=FromHeader("message-id"))
            async def handle(message: Message, session: Any) -> None:
                if message.id == "m1" and message.attempt == 1:
                    raise RetryableMessageError("down")
                seen.append(message.id)

            first = await handle_message(handle, world.database, message(1))
            later = await handle_message(handle, world.database, message(2))
            other = await handle_message(handle, world.database, message(3, "other"))
            while await retry_due(handle, world.database):
                pass

            assert type(first).__name__ == "RetryStored"
            assert (type(later), type(other)) == (ParkedAway, Handled)
            assert seen == ["m3", "m1", "m2"]

        scenario(self)


class TestOrdersInSqlite(InSqlite, Orders):
    pass


class TestOrdersInPostgres(InPostgres, Orders):
    pass


ONE_BATCH = RunnerSettings(mode=Mode.BATCHED)


@pytest.mark.parametrize("policy", [BatchPolicy.STOP, BatchPolicy.FAIL_BATCH])
@pytest.mark.parametrize(
    "settings",
    [RunnerSettings(), RunnerSettings(mode=Mode.LEASED), replace(ONE_BATCH, concurrency=2)],
)
def test_a_policy_for_one_batch_is_refused_where_there_is_not_one(policy, settings):
    async def scenario() -> None:
        broker = MemoryBroker({"payments": 1})
        subscription = await broker.subscribe("billing", ["payments"])
        chosen = consumer("billing", policy=ConsumerSettings(batch=policy))(one)
        Runner(chosen, subscription, memory_database(), ONE_BATCH)

        with pytest.raises(Misuse, match=r"use mode=Mode\.BATCHED with concurrency=1"):
            Runner(chosen, subscription, memory_database(), settings)

    asyncio.run(scenario())


def test_a_mode_given_by_its_value_is_the_mode():
    async def scenario() -> None:
        broker = MemoryBroker({"payments": 1})
        broker.put("payments", b"{}", headers={"message-id": b"m1"})
        subscription = await broker.subscribe("billing", ["payments"])
        await broker.settled("billing")
        got: list[str] = []

        @consumer("billing")
        async def handle(message: Message, lease: Any) -> None:
            got.append(type(lease).__name__)

        leased = RunnerSettings(mode="leased", wait_seconds=0.01)  # type: ignore[arg-type]
        await Runner(handle, subscription, memory_database(), leased).run_until_idle()

        assert got == ["Lease"]

    asyncio.run(scenario())


async def one(message):
    return ("one",)


async def two(message, session):
    return ("two", session)


async def by_name(message, session=None):
    return ("two", session)


async def many(*arguments):
    return ("two", arguments[1])


async def with_default(message, tries=3):
    return ("one",) if tries == 3 else ("wrong", tries)


async def with_more(message, session, tries=3):
    return ("two", session) if tries == 3 else ("wrong", tries)


class Callable:
    async def __call__(self, message, lease):
        return ("two", lease)


async def only_by_name(message, *, session):
    """Take the session by its name."""


async def maybe_by_name(message, *, session=None):
    """Take the session by its name, or not."""


async def three(message, one, other):
    """Take too much."""


async def none():
    """Take nothing."""


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (one, ("one",)),
        (two, ("two", "a session")),
        (by_name, ("two", "a session")),
        (many, ("two", "a session")),
        (with_default, ("one",)),
        (with_more, ("two", "a session")),
        (Callable(), ("two", "a session")),
    ],
)
def test_a_handler_gets_the_session_where_it_takes_one(handler, expected):
    made = consumer("billing")(handler)

    assert asyncio.run(made.invoke(message(1), "a session")) == expected


@pytest.mark.parametrize("handler", [only_by_name, maybe_by_name, three, none])
def test_a_handler_that_cannot_be_called_is_refused_when_it_is_decorated(handler):
    with pytest.raises(Misuse, match=r"consumer billing: its handler takes \("):
        consumer("billing")(handler)
