"""Each way out of the waiting room and of the dead letters counts in the audit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from semel.message import Coordinates, Message
from semel.messaging.handle.attempt import handle_message
from semel.messaging.outcome import OutcomeRange
from semel.messaging.settings import Order
from semel.operate.completeness import Extent, Stretch, audit_completeness
from semel.operate.deadletters import park_dead_letter, retry_dead_letter, skip_dead_letter
from semel.operate.deletion import approve_delete, ask_to_delete, ask_to_delete_dead_letter
from semel.operate.parking import KeepId, NewId, fix, release, skip
from semel.operate.retention import erase
from semel.operate.selection import Ids, Offsets
from semel.policy.vocabulary import Mode
from tests.messaging.audited import (
    ANN,
    BILLING,
    PARKS,
    PLACE,
    Service,
    dead,
    down,
    replayed,
    with_one,
)
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import DatabaseContract, in_world


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
    async def test_so_does_what_waited_behind_it(self, world):
        service = Service(world, holds_keys=True, order=Order.KEY, **PARKS)
        service.failures = {"m0": dead()}
        service.send("m0", "m1", "m2", key=b"k")
        await service.work()
        assert await service.stands() == {"parked": 3}
        service.failures = {}

        await release(service.database, BILLING, "m0", **ANN)
        await service.retry()

        assert await service.stands() == {"handled": 3}

    @in_world
    async def test_what_is_erased_behind_a_twin_that_was_handled_is_a_duplicate(self, world):
        service = Service(world)
        service.failures = {"m0": down()}
        service.send("m0")
        await service.work()
        service.failures = {}
        service.send("m0")
        await service.work()
        assert await service.stands() == {"waiting": 1, "handled": 1}

        await erase(service.database, message_id="m0", **ANN)

        assert await service.stands() == {"duplicate": 1, "handled": 1}

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

    @in_world
    async def test_so_does_one_that_died_between_the_effect_and_the_note(self, world):
        service = Service(world)
        service.send("m0", "m1", "m2", "m3")
        async with service.database.begin() as unit:
            ranges = [OutcomeRange(PLACE, n, n, "success") for n in (0, 3)]
            await unit.outcomes.record(BILLING, ranges)
        for number in (1, 2):
            lost = Message(f"m{number}", {}, b"{}", source=Coordinates("payments", 0, number))
            await handle_message(service.consumer, service.database, lost)
        async with service.database.begin() as unit:
            await unit.outcomes.record("shipping", [OutcomeRange(PLACE, 0, 3, "success")])

        assert await service.stands() == {"handled": 4}
        (others,) = await audit_completeness(
            service.database, "shipping", {PLACE: Extent(committed=6)}
        )
        assert others.missing == (Stretch(4, 5),)


class TestEndsInSqlite(InSqlite, Ends):
    pass


class TestEndsInPostgres(InPostgres, Ends):
    pass
