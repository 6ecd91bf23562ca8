"""In an outage a consumer stands still, tries one message from time to time, and loses none."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from semel.codec import FromPayload
from semel.errors import Misuse
from semel.events import EVENTS, CircuitClosed, CircuitOpened
from semel.memory.broker import MemoryBroker
from semel.message import Message
from semel.messaging import handler as circuit
from semel.messaging.classic import MessageEnvelope, consume_envelope
from semel.messaging.failure import CLASSIFICATION, RetryableMessageError, retry_after_of
from semel.messaging.handler import Circuit, consumer
from semel.messaging.outcome import RetryLater, Skipped
from semel.messaging.receive.runner import Runner
from semel.messaging.records import DeadLetterFilter
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.policy.vocabulary import Mode, RetryMode
from semel.testing.clock import SimulatedClock
from tests.messaging.worlds import memory_database

TOPIC, NAME = "payments", "billing"
MESSAGES = 30


class Outage:
    """A service whose dependency is down until it was asked often enough."""

    def __init__(self, calls_until_up, mode=Mode.TRANSACTIONAL, **settings):
        retry = RetryPolicy(
            max_attempts=3, initial_delay_seconds=0, mode=settings.pop("retry", RetryMode.BLOCKING)
        )
        self.broker, self.database = MemoryBroker({TOPIC: 2}), memory_database()
        self.calls, self.handled, self.events = 0, [], []
        for n in range(MESSAGES):
            self.broker.put(TOPIC, f'{{"id": "m{n}"}}'.encode(), key=f"k{n}".encode())

        @consumer(
            NAME,
            policy=ConsumerSettings(retry=retry, held_retry_seconds=0.01, **settings),
            id_from=FromPayload("id"),
        )
        async def handle(message: Message) -> None:
            self.calls += 1
            if self.calls <= calls_until_up:
                raise RetryableMessageError("down")
            self.handled.append(message.id)

        self.consumer = handle
        self.settings = RunnerSettings(mode=mode, wait_seconds=0.02)

    async def serve(self):
        """Run until all is handled or given up; return the dead letters."""
        unsubscribe = EVENTS.subscribe(self.events.append)
        subscription = await self.broker.subscribe(NAME, [TOPIC])
        runner = Runner(self.consumer, subscription, self.database, self.settings)
        running = asyncio.create_task(runner.run())
        try:
            async with asyncio.timeout(30):
                while len(self.handled) + len(letters := await self.letters()) < MESSAGES:
                    await asyncio.sleep(0.02)
        finally:
            unsubscribe()
            runner.stop()
            await running
        return letters

    async def letters(self):
        async with self.database.begin() as unit:
            return await unit.dead_letters.find(DeadLetterFilter(NAME), 100)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(circuit, "FIRST_SECONDS", 0.005)
    monkeypatch.setattr(circuit, "LONGEST_SECONDS", 0.01)


@pytest.mark.parametrize("mode", [Mode.TRANSACTIONAL, Mode.BATCHED, Mode.LEASED])
@pytest.mark.parametrize("retry", [RetryMode.BLOCKING, RetryMode.RETRY_TABLE])
def test_no_message_is_given_up_in_an_outage(mode, retry):
    async def scenario():
        # Without the circuit, three attempts each would be spent after 90 calls.
        outage = Outage(calls_until_up=95, mode=mode, retry=retry)

        assert await outage.serve() == []

        assert sorted(outage.handled) == sorted(f"m{n}" for n in range(MESSAGES))
        kinds = [type(e) for e in outage.events if isinstance(e, CircuitOpened | CircuitClosed)]
        assert (kinds[0], kinds[-1]) == (CircuitOpened, CircuitClosed)
        assert not outage.consumer.circuit.is_open

    asyncio.run(scenario())


def test_the_circuit_is_off_by_one_setting():
    async def scenario():
        outage = Outage(calls_until_up=10**9, circuit_failures=0)

        assert len(await outage.serve()) == MESSAGES
        assert outage.calls == 3 * MESSAGES

    asyncio.run(scenario())


def test_a_stop_during_an_outage_returns_at_once_and_its_row_says_that_it_stood_still():
    async def scenario():
        outage = Outage(calls_until_up=10**9)
        subscription = await outage.broker.subscribe(NAME, [TOPIC])
        runner = Runner(outage.consumer, subscription, outage.database, outage.settings)
        running = asyncio.create_task(runner.run())
        async with asyncio.timeout(10):
            while True:
                await asyncio.sleep(0.02)
                async with outage.database.begin() as unit:
                    members = await unit.members.running(NAME)
                if any(member.standing_since for member in members):
                    break
            assert outage.consumer.circuit.is_open
            runner.stop()
            await running
        assert await outage.letters() == []

    asyncio.run(scenario())


def failure(error):
    return CLASSIFICATION.classify(error)


DOWN, BUG = RetryableMessageError("down"), KeyError("bug")


def circuit_with(clock, *attempts, failures=4, share=0.5):
    """Return a circuit after these attempts, an exception each, or None for a success."""
    found = Circuit("c", failures, share)
    found.clock = clock
    for error in attempts:
        found.succeeded() if error is None else found.failed(failure(error))
    return found


OK = None


@pytest.mark.parametrize(
    ("before", "is_spared"),
    [
        ((DOWN, DOWN), False),
        ((DOWN, DOWN, DOWN), True),
        ((BUG, DOWN, DOWN), False),
        ((DOWN, DOWN, OK, DOWN), False),
        ((OK,) * 19 + (DOWN,) * 3, True),
        ((OK, DOWN) * 9, True),
        ((OK, OK, DOWN) * 9, False),
        ((BUG, DOWN) * 9, True),
    ],
)
def test_some_outages_in_a_row_or_half_of_the_recent_attempts_open_the_circuit(before, is_spared):
    found = circuit_with(SimulatedClock(), *before)

    assert found.spares(failure(DOWN)) is is_spared
    assert found.is_open is is_spared
    assert not found.spares(failure(BUG)), "a failure of the message counts in an outage, too"


def test_a_closed_circuit_begins_anew_so_a_message_that_always_fails_is_given_up():
    found = circuit_with(SimulatedClock(), DOWN, DOWN, DOWN)
    assert found.spares(failure(DOWN))

    found.succeeded()

    for _ in range(3):
        assert not found.spares(failure(DOWN))
        found.failed(failure(DOWN))
    assert found.spares(failure(DOWN))


@pytest.mark.parametrize("retry", [RetryMode.BLOCKING, RetryMode.RETRY_TABLE])
def test_a_few_messages_that_fail_hold_no_healthy_consumer(retry):
    async def scenario():
        outage = Outage(calls_until_up=0, retry=retry, circuit_failures=20)
        bad = {f"m{n}" for n in range(0, MESSAGES, 10)}

        async def handle(message: Message) -> None:
            if message.id in bad:
                raise RetryableMessageError("this customer's system is down")
            outage.handled.append(message.id)

        outage.consumer = replace(outage.consumer, handler=handle)
        letters = await outage.serve()

        assert {letter.message_id for letter in letters} == bad
        assert len(outage.handled) == MESSAGES - len(bad)
        assert not [e for e in outage.events if isinstance(e, CircuitOpened)]

    asyncio.run(scenario())


@pytest.mark.parametrize("keys", [1, 20])
def test_an_outage_that_shows_as_refused_connections_loses_nothing_by_default(keys):
    async def scenario():
        broker, database = MemoryBroker({TOPIC: 1}), memory_database()
        for n in range(20):
            broker.put(TOPIC, f'{{"id": "m{n}"}}'.encode(), key=f"k{n % keys}".encode())
        retry = RetryPolicy(initial_delay_seconds=0.0)
        calls, handled = [], set()

        @consumer(NAME, policy=ConsumerSettings(retry=retry), id_from=FromPayload("id"))
        async def handle(message: Message) -> None:
            calls.append(message.id)
            if len(calls) < 30:
                raise ConnectionRefusedError(111, "refused")
            handled.add(message.id)

        quick = replace(handle.settings, held_retry_seconds=0.0)
        runner = Runner(
            handle.with_settings(quick),
            await broker.subscribe(NAME, [TOPIC]),
            database,
            RunnerSettings(wait_seconds=0.02),
        )
        async with asyncio.timeout(30):
            await runner.run_until_idle()

        assert len(handled) == 20

    asyncio.run(scenario())


def test_an_envelope_tells_the_circuit_how_it_ended():
    class Silent:
        async def ack(self) -> None: ...

        async def nack(self, seconds: float) -> None: ...

    async def scenario():
        outage, answers = Outage(calls_until_up=4), []
        for n in range(5):
            delivery = MessageEnvelope(f"e{n}", "k", {"id": n}, {}, Silent())
            await consume_envelope(outage.consumer, outage.database, delivery)
            answers.append(outage.consumer.circuit.is_open)

        assert answers == [False, False, False, True, False]

    asyncio.run(scenario())


def test_old_failures_do_not_count():
    clock = SimulatedClock()
    found = circuit_with(clock, DOWN, DOWN, DOWN)

    clock.advance(circuit.RECENT_SECONDS + 1)

    assert not found.spares(failure(DOWN))


def test_the_waits_grow_and_the_other_system_may_ask_for_longer_ones(monkeypatch):
    monkeypatch.setattr(circuit, "FIRST_SECONDS", 1.0)
    monkeypatch.setattr(circuit, "LONGEST_SECONDS", 60.0)
    clock = SimulatedClock()
    found = circuit_with(clock, DOWN, DOWN, DOWN)
    found.spares(failure(DOWN))
    waits = []
    for _ in range(8):
        waits.append(round(found.seconds_left))
        clock.advance(found.seconds_left)
        found.trying()
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]

    found.spares(failure(RetryableMessageError("slow down", "RATE_LIMITED", retry_after=90)))
    assert found.seconds_left == 90

    found.succeeded()
    assert not found.is_open
    assert found.seconds_left == 0


def test_duplicates_do_not_lengthen_an_outage(monkeypatch):
    """Behind a message that comes back, all that was handled is delivered again."""
    monkeypatch.setattr(circuit, "FIRST_SECONDS", 1.0)
    monkeypatch.setattr(circuit, "LONGEST_SECONDS", 60.0)
    clock, one = SimulatedClock(), Outage(calls_until_up=0).consumer
    found = one.circuit
    found.clock = clock
    for _ in range(4):
        if not found.spares(failure(DOWN)):
            found.failed(failure(DOWN))

    for _ in range(100):
        clock.advance(found.seconds_left)
        found.trying()
        one.note(Skipped("duplicate"))
    assert found.is_open
    assert found.seconds_left == 0

    found.trying()
    one.note(RetryLater(1.0, failure(DOWN)))
    assert found.seconds_left == 2


@pytest.mark.parametrize(
    ("header", "seconds"), [("7", 7.0), (7, 7.0), ("nonsense", None), ("999999", 3600.0)]
)
def test_a_retry_after_header_is_read_from_the_response_of_an_http_error(header, seconds):
    error = OSError("429")
    error.response = SimpleNamespace(headers={"Retry-After": header})

    assert retry_after_of(error) == seconds


def test_a_retry_after_header_may_be_a_date():
    error = OSError("503")
    error.response = SimpleNamespace(headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})

    assert retry_after_of(error) == 0.0


def test_a_share_that_is_none_is_refused():
    with pytest.raises(Misuse, match="circuit_share"):
        ConsumerSettings(circuit_share=0)
