"""What becomes of a message behind its delivery counts in the audit, and so does its loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semel.codec import FromHeader
from semel.memory.broker import MemoryBroker
from semel.message import Message, Partition
from semel.messaging.audit_completeness import PartitionAudit, Stretch, audit_completeness
from semel.messaging.completeness import Mark, OutcomeRange
from semel.messaging.consumer import consumer
from semel.messaging.deletion import approve_delete, ask_to_delete, ask_to_delete_dead_letter
from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
from semel.messaging.handling import handle_message
from semel.messaging.parking import KeepId, NewId, fix, release, skip
from semel.messaging.replay import Replay, ReplaySettings
from semel.messaging.retry import GiveUp, RetryMode, RetryPolicy
from semel.messaging.retrying import retry_due
from semel.messaging.revival import park_dead_letter, retry_dead_letter, skip_dead_letter
from semel.messaging.runner import Runner, RunnerSettings
from semel.messaging.selection import Ids, Offsets
from semel.messaging.settings import ConsumerSettings, Duplicates, Mode
from semel.messaging.waiting import WaitingMessage, Waits
from semel.testing.contracts.messaging_world import DatabaseContract, DatabaseWorld, in_world
from tests.messaging.places import InMemory, InPostgres, InSqlite

BILLING = "billing"
PLACE = Partition("payments", 0)
ANN = {"actor": "ann", "reason": "it was wrong"}
QUICK = RunnerSettings(wait_seconds=0.01, stop_seconds=1.0)
TABLE = RetryPolicy(
    max_attempts=2,
    initial_delay_seconds=0,
    max_delay_seconds=0,
    jitter=False,
    mode=RetryMode.RETRY_TABLE,
)
PARKS = {"on_hopeless": GiveUp.PARK, "on_exhausted": GiveUp.PARK}


class Service:
    """A consumer with its runner, whose failures are given by message id."""

    def __init__(self, world: DatabaseWorld, mode: Mode = Mode.TRANSACTIONAL, **settings: Any):
        self.database = world.database
        self.broker = MemoryBroker({"payments": 1})
        self.failures: dict[str, Exception] = {}
        chosen = ConsumerSettings(**{"retry": TABLE, "held_retry_seconds": 0.01, **settings})

        @consumer(BILLING, policy=chosen, id_from=FromHeader("message-id"), mode=mode)
        async def handle(message: Message, session: Any) -> None:
            if message.id in self.failures:
                raise self.failures[message.id]

        self.consumer = handle

    def send(self, *ids: str, value: bytes = b"{}") -> None:
        for message_id in ids:
            headers = {"message-id": message_id.encode()} if message_id else {}
            self.broker.put("payments", value, headers=headers, partition=0)

    async def work(self) -> None:
        """Deliver what was sent, and leave the retries alone."""
        subscription = await self.broker.subscribe(BILLING, ["payments"])
        await self.broker.settled(BILLING)
        settings = replace(QUICK, mode=self.consumer.mode or Mode.TRANSACTIONAL)
        runner = Runner(self.consumer, subscription, self.database, settings)
        await runner.run_until_idle()
        await runner._membership.leave()
        await subscription.close()

    async def retry(self) -> None:
        while await retry_due(self.consumer, self.database):
            pass

    async def audit(self) -> PartitionAudit:
        (found,) = await audit_completeness(self.database, BILLING)
        return found

    async def stands(self) -> dict[str, int]:
        """Say how all offsets stand; everything is accounted for."""
        found = await self.audit()
        assert found.is_complete, found
        return {standing.value: number for standing, number in found.counts.items() if number}


async def lose(database: Any, *ids: str) -> None:
    """Delete messages past everything, as SQL by hand does."""
    async with database.begin() as unit:
        for message_id in ids:
            await unit.waiting.remove(BILLING, message_id)
            await unit.dead_letters.remove(BILLING, message_id)


def dead() -> Exception:
    return NonRetryableMessageError("no such account")


def down() -> Exception:
    return RetryableMessageError("no answer")


async def replayed(service: Service, selection: Ids | Offsets) -> None:
    settings = ReplaySettings(canary=())
    reader = service.broker.reader()
    replay = Replay(
        service.consumer, service.database, selection, settings, actor="ann", reader=reader
    )
    await replay.run()


async def with_one(world: DatabaseWorld, failure: Exception, **settings: Any) -> Service:
    """Deliver three messages, of which the second fails once."""
    service = Service(world, **settings)
    service.failures = {"m1": failure}
    service.send("m0", "m1", "m2")
    await service.work()
    service.failures = {}
    return service


class Ends(DatabaseContract):
    """Each way out of the waiting room and of the dead letters."""

    @in_world
    async def test_a_retry_that_is_handled_counts_as_handled(self, world):
        service = await with_one(world, down())
        assert await service.stands() == {"handled": 2, "waiting": 1}

        await service.retry()

        assert await service.stands() == {"handled": 3}
        assert (await service.audit()).repeated == 0

    @in_world
    async def test_so_do_many_retries_of_one_transaction(self, world):
        service = Service(world)
        names = [f"m{number}" for number in range(9)]
        service.failures = {name: down() for name in names}
        service.send(*names)
        await service.work()
        service.failures = {"m4": dead()}

        await service.retry()

        assert await service.stands() == {"handled": 8, "dead": 1}

    @in_world
    async def test_so_does_a_retry_under_a_lease(self, world):
        service = await with_one(world, down(), mode=Mode.LEASED)

        await replayed(service, Ids(("m1",)))

        assert await service.stands() == {"handled": 3}

    @in_world
    async def test_a_retry_that_fails_too_often_counts_as_dead(self, world):
        service = await with_one(world, down())
        service.failures = {"m1": down()}

        await service.retry()

        assert await service.stands() == {"handled": 2, "dead": 1}

    @in_world
    async def test_what_was_fixed_and_released_counts_as_handled(self, world):
        service = await with_one(world, dead(), **PARKS)
        assert await service.stands() == {"handled": 2, "parked": 1}

        await fix(service.database, BILLING, "m1", b'{"n": 1}', ids=KeepId(), **ANN)
        await release(service.database, BILLING, "m1", **ANN)
        assert await service.stands() == {"handled": 2, "waiting": 1}
        await service.retry()

        assert await service.stands() == {"handled": 3}

    @in_world
    async def test_under_a_new_id_it_counts_for_the_offset_it_came_from(self, world):
        service = await with_one(world, dead(), **PARKS)

        await fix(service.database, BILLING, "m1", b'{"n": 1}', ids=NewId("m1b"), **ANN)
        assert await service.stands() == {"handled": 2, "parked": 1}
        await skip(service.database, BILLING, "m1b", **ANN)

        assert await service.stands() == {"handled": 2, "skipped": 1}

    @in_world
    async def test_what_a_person_skips_has_a_standing_of_its_own(self, world):
        parked = await with_one(world, dead(), **PARKS)
        await skip(parked.database, BILLING, "m1", **ANN)
        assert await parked.stands() == {"handled": 2, "skipped": 1}

        parked.send("m1")
        await parked.work()

        assert await parked.stands() == {"handled": 2, "skipped": 1, "duplicate": 1}

    @in_world
    async def test_so_has_a_dead_letter_that_a_person_skips(self, world):
        service = await with_one(world, dead())

        await skip_dead_letter(service.database, BILLING, "m1", **ANN)

        assert await service.stands() == {"handled": 2, "skipped": 1}

    @in_world
    async def test_so_has_what_two_people_delete(self, world):
        service = Service(world)
        service.failures = {"m0": dead(), "m1": down()}
        service.send("m0", "m1", "m2")
        await service.work()

        letter = await ask_to_delete_dead_letter(service.database, BILLING, "m0", **ANN)
        waits = await ask_to_delete(service.database, BILLING, "m1", **ANN)
        for request in (letter, waits):
            await approve_delete(service.database, request.number, actor="bob")

        assert await service.stands() == {"handled": 1, "deleted": 2}

    @in_world
    async def test_a_dead_letter_stands_where_it_was_moved_to(self, world):
        service = await with_one(world, dead())
        assert await service.stands() == {"handled": 2, "dead": 1}

        await park_dead_letter(service.database, BILLING, "m1", **ANN)
        assert await service.stands() == {"handled": 2, "parked": 1}
        await release(service.database, BILLING, "m1", **ANN)
        service.failures = {"m1": dead()}
        await service.retry()
        assert await service.stands() == {"handled": 2, "dead": 1}
        await retry_dead_letter(service.database, BILLING, "m1", **ANN)
        service.failures = {}
        await service.retry()

        assert await service.stands() == {"handled": 3}

    @in_world
    async def test_a_replay_of_a_dead_letter_counts_as_handled(self, world):
        service = await with_one(world, dead())

        await replayed(service, Ids(("m1",)))

        assert await service.stands() == {"handled": 3}

    @in_world
    async def test_a_record_that_could_be_read_at_last_counts_as_handled(self, world):
        service = Service(world)
        service.send("m0")
        service.send("m1", value=b"no JSON")
        await service.work()
        assert await service.stands() == {"handled": 1, "dead": 1}

        class Lenient:
            name = "lenient"

            def decode(self, raw: bytes | None, headers: Any) -> dict[str, Any]:
                return {}

        service.consumer = replace(
            service.consumer, reading=replace(service.consumer.reading, codec=Lenient())
        )
        await replayed(service, Offsets(PLACE, 1, 1))

        assert await service.stands() == {"handled": 2}

    @in_world
    async def test_a_replay_of_an_offset_that_was_missing_completes_it(self, world):
        service = Service(world)
        service.send("m0", "m1", "m2")
        async with service.database.begin() as unit:
            ranges = [OutcomeRange(PLACE, n, n, "success") for n in (0, 2)]
            await unit.outcomes.record(BILLING, ranges)
        assert (await service.audit()).missing == (Stretch(1, 1),)

        await replayed(service, Offsets(PLACE, 1, 1))

        assert await service.stands() == {"handled": 3}


class Twins(DatabaseContract):
    """The same message at several offsets is kept once, and no offset is missing for it."""

    @in_world
    async def test_a_twin_of_a_message_that_waits_is_refused_not_lost(self, world):
        slow = replace(TABLE, initial_delay_seconds=60, max_delay_seconds=60)
        service = Service(world, retry=slow)
        service.failures = {"m0": down()}
        service.send("m0", "m0")
        await service.work()
        assert await service.stands() == {"waiting": 1, "refused": 1}

        await skip(service.database, BILLING, "m0", **ANN)

        assert await service.stands() == {"skipped": 1, "refused": 1}

    @in_world
    async def test_so_is_a_twin_that_fails_while_the_first_one_waits(self, world):
        service = Service(world, retry=replace(TABLE, max_attempts=3))
        service.failures = {"m0": down()}
        service.send("m0", "m0")
        await service.work()
        assert await service.stands() == {"waiting": 1, "refused": 1}
        service.failures = {}

        await service.retry()

        assert await service.stands() == {"handled": 1, "refused": 1}

    @in_world
    async def test_a_twin_that_is_handled_first_makes_the_waiting_one_a_duplicate(self, world):
        service = Service(world)
        service.failures = {"m0": down()}
        service.send("m0")
        await service.work()
        service.failures = {}
        service.send("m0")
        await service.work()

        await service.retry()

        assert await service.stands() == {"handled": 1, "duplicate": 1}

    @in_world
    async def test_a_twin_that_dies_first_makes_the_waiting_one_refused(self, world):
        service = Service(world)
        service.failures = {"m0": down()}
        service.send("m0", "m0")
        await service.work()
        await service.retry()

        assert await service.stands() == {"dead": 1, "refused": 1}

    @in_world
    async def test_conflicts_with_one_payload_share_a_dead_letter(self, world):
        service = Service(world)
        service.send("m0")
        service.send("m0", "m0", value=b'{"other": 1}')
        await service.work()

        assert await service.stands() == {"handled": 1, "dead": 1, "refused": 1}

    @in_world
    async def test_a_repetition_that_fails_is_a_dead_letter_once(self, world):
        service = Service(world, duplicates=Duplicates.INVOKE)
        service.send("m0")
        await service.work()
        service.failures = {"m0": dead()}
        service.send("m0", "m0")
        await service.work()

        assert await service.stands() == {"handled": 1, "dead": 1, "refused": 1}


class Losses(DatabaseContract):
    """What goes past the engine is missing."""

    @in_world
    async def test_a_loss_behind_the_broker_is_named(self, world):
        service = Service(world)
        service.failures = {"m1": dead(), "m3": down(), "m5": dead()}
        service.send(*(f"m{number}" for number in range(7)))
        await service.work()
        await skip_dead_letter(service.database, BILLING, "m5", **ANN)
        assert await service.stands() == {"handled": 4, "dead": 1, "waiting": 1, "skipped": 1}

        await lose(service.database, "m1", "m3")

        found = await service.audit()
        assert found.missing == found.lost == (Stretch(1, 1), Stretch(3, 3))
        assert not found.is_complete

    @in_world
    async def test_a_loss_is_no_hole_even_where_the_broker_has_no_record_any_more(self, world):
        service = await with_one(world, dead())
        service.send("m3")
        await service.work()
        await lose(service.database, "m1")
        service.broker.trim(PLACE, 2)

        (found,) = await audit_completeness(
            service.database, BILLING, None, service.broker.reader()
        )

        assert (found.lost, found.holes) == ((Stretch(1, 1),), ())

    @in_world
    async def test_a_loss_is_found_though_no_delivery_could_note_the_outcome(self, world):
        slow = replace(TABLE, initial_delay_seconds=60, max_delay_seconds=60)
        service = Service(world, retry=slow)
        service.failures = {"m0": dead(), "m1": down()}
        service.send("m0", "m1")
        for record in service.broker.records("payments"):
            read = service.consumer.reading.read(record)
            await handle_message(service.consumer, service.database, read)
        await service.work()
        assert await service.stands() == {"dead": 1, "waiting": 1}

        await lose(service.database, "m0", "m1")

        assert (await service.audit()).lost == (Stretch(0, 1),)

    @in_world
    async def test_a_loss_in_the_middle_of_a_large_range_is_found_in_pages(self, world):
        lost, number = 1_537, 2_500
        messages = [
            WaitingMessage(
                BILLING, f"m{n}", Waits.PARKED, None, b"", topic="payments", partition=0, offset=n
            )
            for n in range(number)
            if n != lost
        ]
        async with world.database.begin() as unit:
            await unit.outcomes.record(BILLING, [OutcomeRange(PLACE, 0, number - 1, "parked")])
            await unit.outcomes.record(BILLING, [OutcomeRange(PLACE, 9, 9, Mark.HANDLED.value)])
            for message in messages:
                if message.offset != 9:
                    await unit.waiting.put(message)

        (found,) = await audit_completeness(world.database, BILLING)

        assert found.lost == (Stretch(lost, lost),)
        assert {s.value: n for s, n in found.counts.items() if n} == {
            "handled": 1,
            "parked": number - 2,
        }


class TestEndsInMemory(InMemory, Ends):
    pass


class TestEndsInSqlite(InSqlite, Ends):
    pass


class TestEndsInPostgres(InPostgres, Ends):
    pass


class TestTwinsInMemory(InMemory, Twins):
    pass


class TestTwinsInSqlite(InSqlite, Twins):
    pass


class TestTwinsInPostgres(InPostgres, Twins):
    pass


class TestLossesInMemory(InMemory, Losses):
    pass


class TestLossesInSqlite(InSqlite, Losses):
    pass


class TestLossesInPostgres(InPostgres, Losses):
    pass
