"""What counts where a process dies, a transaction is not kept, or a person sends messages back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

from semel.crashpoints import CrashPoint
from semel.events import EVENTS, Measurement, Metric
from semel.message import Message
from semel.messaging.classic import MessageEnvelope, consume_envelope
from semel.messaging.handle import attempt as attempts
from semel.messaging.handler import consumer
from semel.messaging.outcome import NO_LONGER_WAITING, Refused, RetryLater, Skipped, tell
from semel.messaging.receive.broker import INBOX
from semel.messaging.receive.inbox import Inbox, InboxWorker
from semel.messaging.records import Member, WaitingMessage, Waits
from semel.operate.selection import Letters, Offsets
from semel.policy.vocabulary import RetryMode
from tests.messaging import replay_world
from tests.messaging.deaths import POLICY, Deadly, Killed, Starts
from tests.messaging.measured import GROUP, NAME, Counted, Shop, message, recorded
from tests.messaging.outgoing import AT_ONCE, run
from tests.messaging.processes import gone

IN_TABLE = replace(AT_ONCE, mode=RetryMode.RETRY_TABLE)
POISON = {"dlq REJECTED": 1, "poison": 1}


class Ignored:
    """A broker that hears of everything, and does nothing."""

    async def ack(self) -> None:
        pass

    async def nack(self, seconds: float) -> None:
        pass


def of_the_killer(counted: Counted) -> Counted:
    """Leave out what the deliveries count that the process survived."""
    others = ("received", "duration", "duplicates", "processed success")
    usual = (*others, "processed duplicate_skipped")
    return {name: number for name, number in counted.items() if name not in usual}


def test_a_message_that_kills_is_counted_once_when_it_is_parked(database):
    async def scenario(world):
        service = Starts(world)
        service.send(("m0", b"{}"), ("m1", b"{}"))

        @consumer("billing", policy=POLICY)
        async def handle(message: Message, session: Any) -> None:
            if message.id == "m0":
                raise Killed

        with recorded() as counted:
            await service.deaths(handle)
        assert of_the_killer(counted()) == {"processed parked": 1, "poison": 1}

    run(database, scenario)


def test_a_record_that_kills_while_it_is_read_is_counted_once_when_it_is_buried(memory):
    async def scenario(world):
        service = Starts(world)
        service.send(("m0", b"{}"), ("m1", b'"deadly"'), ("m2", b"{}"))

        @consumer("billing", codec=Deadly(), policy=POLICY)
        async def handle(message: Message, session: Any) -> None:
            pass

        with recorded() as counted:
            await service.deaths(handle)
        assert of_the_killer(counted()) == {
            "processed deserialization_failure": 1,
            "deserialization_failures DESERIALIZATION_FAILED": 1,
            "dlq DESERIALIZATION_FAILED": 1,
            "poison": 1,
        }

    run(memory, scenario)


def test_a_message_that_kills_the_inbox_worker_is_counted_when_it_is_parked(database):
    async def scenario(world):
        shop = Shop(world)
        await Inbox(shop.consumer, shop.database).store(message(1))
        async with shop.database.begin() as unit:
            dead = Member(NAME, "dead", json.dumps({}), frozenset({INBOX}), 1)
            await unit.members.enter(dead, 1.0)
            for _ in range(shop.consumer.settings.poison_attempts):
                await unit.members.suspect(NAME, "m1", gone())
        await world.age(2)
        with recorded() as counted:
            await InboxWorker(shop.consumer, shop.database).run_until_empty()
        assert counted() == {"received": 1, "processed parked": 1, "poison": 1}

    run(database, scenario)


def test_a_message_of_the_inbox_that_is_not_kept_counts_when_it_is(memory, monkeypatch):
    commits = 0

    def refuse_one(point: CrashPoint, *names: str) -> None:
        """Refuse the commit of the first message."""
        nonlocal commits
        if point is CrashPoint.MESSAGE_COMMIT_BEFORE:
            commits += 1
            if commits == 1:
                raise ValueError("a constraint that is checked at the commit")

    async def scenario(world):
        shop = Shop(world)
        for number in (1, 2):
            await Inbox(shop.consumer, shop.database).store(message(number))
        monkeypatch.setattr(attempts, "reach", refuse_one)
        with recorded() as counted:
            await InboxWorker(shop.consumer, shop.database).run_until_empty()
        assert counted() == {
            "received": 2,
            "duration": 3,
            "processed retryable_failure": 1,
            "retries HANDLER_FAILED": 1,
            "processed success": 2,
        }

    run(memory, scenario)


def test_the_retry_worker_of_a_runner_counts_under_the_group(memory):
    async def scenario(world):
        shop, ended = Shop(world, retry=IN_TABLE), asyncio.Event()
        shop.fails(1, "TIMEOUT")
        shop.send(1)
        groups: list[tuple[str, str]] = []

        def hear(measured: Measurement) -> None:
            if measured.metric is Metric.PROCESSED:
                groups.append((measured.labels["consumer_group"], measured.labels["outcome"]))
                if measured.labels["outcome"] == "success":
                    ended.set()

        runner = await shop.runner()
        stop = EVENTS.subscribe(hear, Measurement)
        running = asyncio.create_task(runner.run())
        await ended.wait()
        runner.stop()
        await running
        stop()
        assert groups == [(GROUP, "retryable_failure"), (GROUP, "success")]

    run(memory, scenario)


def test_an_envelope_of_an_adapter_counts_after_its_commit(memory):
    async def scenario(world):
        shop = Shop(world)
        shop.fails(1, "REJECTED")
        with recorded() as counted:
            envelope = MessageEnvelope("m1", None, {}, {}, Ignored(), message(1))
            await consume_envelope(shop.consumer, shop.database, envelope)
        assert counted() == {"received": 1, "duration": 1, "processed dlq": 1, **POISON}

    run(memory, scenario)


def test_what_another_worker_had_is_not_told_again():
    waiting = WaitingMessage.of(NAME, message(1), Waits.RETRY, held=False)
    with recorded() as counted:
        tell(waiting, Skipped(NO_LONGER_WAITING), NAME, 0.1)
        tell(waiting, Refused("parked"), NAME, 0.1)
        tell(waiting, RetryLater(1.0), NAME, 0.1)
        assert counted() == {}
        tell(message(1), Refused("parked"), NAME, 0.1)
        assert counted() == {"processed terminal_failure": 1, "duration": 1}


def test_an_inbox_that_handles_at_once_counts_after_its_commit(memory):
    async def scenario(world):
        shop = Shop(world)
        inbox = Inbox(shop.consumer, shop.database)
        with recorded() as counted:
            await inbox.store_and_handle(message(1))
            await inbox.store_and_handle(message(1))
        deliveries = {"received": 2, "duration": 2, "duplicates": 1}
        ends = {"processed success": 1, "processed duplicate_skipped": 1}
        assert counted() == {**deliveries, **ends}

    run(memory, scenario)


def test_a_replay_counts_what_becomes_of_its_messages(database):
    async def scenario(world):
        service = await replay_world.Service(world).open()
        service.put("m1")
        service.refuse("m1")
        for selection in (Offsets(replay_world.P0, 0, 0), Letters()):
            with recorded() as counted:
                await service.replay(selection, name=type(selection).__name__).run()
            assert counted() == {"duration": 1, "processed dlq": 1, **POISON}
        service.heal()
        with recorded() as counted:
            await service.replay(Letters(), name="healed").run()
        assert counted() == {"duration": 1, "processed success": 1}

    run(database, scenario)
