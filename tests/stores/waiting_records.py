"""What the waiting room keeps of a message, and what an update, a revision and an erasure leave."""

from __future__ import annotations

from dataclasses import replace

from semel.message import Partition
from semel.messaging.records import WaitingFilter, WaitingMessage, Waits, conflict_id
from semel.messaging.redact import ERASED_REASON
from tests.stores.claims_world import rolled_back
from tests.stores.waiting_world import (
    CONSUMER,
    behind,
    due,
    find,
    get,
    parked,
    put,
    remove,
    waiting,
)
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

T0 = 1_700_000_000.0

FULL = WaitingMessage(
    consumer=CONSUMER,
    message_id="m1",
    waits=Waits.PARKED,
    key="customer-7",
    payload=b'{"amount": 12}',
    held=True,
    attempts=5,
    reason="no such customer",
    error_code="PRECONDITION_FAILED",
    exception="shop.NoSuchCustomer",
    since=T0 + 1.5,
    headers={"trace": b"\x00\xff", "empty": b""},
    topic="payments",
    partition=3,
    offset=41,
    timestamp=T0 - 5.5,
    payload_hash="ab" * 32,
    message_type="Paid",
    schema_version="2",
    correlation_id="c-1",
    first_failed_at=T0 + 0.25,
    label="data",
)

STRANGE = ("x" * 5000, "nul\0inside", "half a \ud83d pair", "sha256:" + "0" * 64, "Ä🐟", "")


class RecordRules(DatabaseContract):
    """What is kept of a message."""

    @in_world
    async def test_a_message_comes_back_with_every_field(self, world: DatabaseWorld) -> None:
        await put(world, FULL)

        found = await get(world, "m1")
        assert found == replace(FULL, place=found.place, due_at=found.due_at)

    @in_world
    async def test_ids_and_keys_may_be_any_text(self, world: DatabaseWorld) -> None:
        await put(world, *(replace(FULL, message_id=text, key=text) for text in STRANGE))

        for text in STRANGE:
            found = await get(world, text)
            assert (found.message_id, found.key) == (text, text)
            assert [m.key for m in await find(world, WaitingFilter(key=text))] == [text]
            assert [m.key for m in await find(world, WaitingFilter(message_id=text))] == [text]
        async with world.database.begin() as unit:
            assert await unit.waiting.hold(CONSUMER, STRANGE) == set(STRANGE)
            found_keys = await unit.waiting.held_keys(CONSUMER, 10)
        assert {key.key for key in found_keys} == set(STRANGE)

    @in_world
    async def test_whatever_an_exception_says_can_be_kept(self, world: DatabaseWorld) -> None:
        for text in STRANGE:
            await put(world, replace(FULL, reason=text, correlation_id=text, message_type=text))

        assert (await get(world, "m1")).waits is Waits.PARKED

    @in_world
    async def test_a_time_that_is_not_given_is_the_databases(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            now = await unit.now()

        await put(world, waiting("retried"), behind("queued", "k"))

        retried, queued = await get(world, "retried"), await get(world, "queued")
        assert abs(retried.since - now) < 60
        assert abs(retried.first_failed_at - now) < 60
        assert queued.first_failed_at == 0, "what only queues up has not failed"

    @in_world
    async def test_several_are_taken_out_at_once_and_no_others(self, world: DatabaseWorld) -> None:
        long = "x" * 100_000
        await put(world, *(waiting(name) for name in ("m1", "m2", "m3", long)))

        async with world.database.begin() as unit:
            await unit.waiting.remove_many(CONSUMER, ["m1", "m3", long, "never there"])
            await unit.waiting.remove_many(CONSUMER, [])
            await unit.waiting.remove_many("shipping", ["m2"])

        assert [found.message_id for found in await find(world, WaitingFilter())] == ["m2"]

    @in_world
    async def test_the_offsets_whose_messages_wait_are_found_a_page_at_a_time(
        self, world: DatabaseWorld
    ) -> None:
        here = {5: Waits.RETRY, 1: Waits.PARKED, 3: Waits.BEHIND, 9: Waits.RETRY}
        await put(
            world,
            *(replace(FULL, message_id=f"m{n}", offset=n, waits=w) for n, w in here.items()),
            replace(FULL, message_id="other partition", partition=4, offset=2),
            replace(FULL, message_id="other topic", topic="refunds", offset=2),
            replace(FULL, message_id="no broker", partition=None, offset=None),
        )

        async with world.database.begin() as unit:
            place = Partition("payments", 3)
            pages = [
                await unit.waiting.places(CONSUMER, place, first, 8, 2) for first in (0, 1, 4, 6)
            ]
            others = await unit.waiting.places("shipping", place, 0, 8, 2)

        some = [(1, Waits.PARKED), (3, Waits.BEHIND)]
        assert [list(page) for page in pages] == [some, some, [(5, Waits.RETRY)], []]
        assert list(others) == []

    @in_world
    async def test_a_message_of_a_transaction_that_fails_is_not_there(
        self, world: DatabaseWorld
    ) -> None:
        async with rolled_back(world) as unit:
            await unit.waiting.put(FULL)

        assert await find(world, WaitingFilter()) == []

    @in_world
    async def test_an_update_says_anew_why_it_waits_and_keeps_the_rest(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, FULL, waiting("m2"))
        first = await get(world, "m1")
        again = waiting(
            "m1",
            key="customer-7",
            held=False,
            payload=b"as it was delivered again",
            attempts=6,
            reason="down",
            error_code="TIMEOUT",
            exception="TimeoutError",
        )

        await put(world, again)

        found = await get(world, "m1")
        assert found == replace(
            first,
            waits=Waits.RETRY,
            attempts=6,
            reason="down",
            error_code="TIMEOUT",
            exception="TimeoutError",
            due_at=found.due_at,
        )
        assert found.place < (await get(world, "m2")).place

    @in_world
    async def test_the_first_failure_of_a_message_that_queued_up_is_its_own(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, behind("m1", "k"))
        await put(world, waiting("m1", key="k", first_failed_at=T0 + 3))
        await put(world, waiting("m1", key="k", first_failed_at=T0 + 9))

        assert (await get(world, "m1")).first_failed_at == T0 + 3

    @in_world
    async def test_every_filter_finds_its_messages_and_no_others(
        self, world: DatabaseWorld
    ) -> None:
        odd = waiting("odd", consumer="shipping", key="k", error_code="ODD", since=T0 + 90)
        await put(world, FULL, odd)
        async with world.database.begin() as unit:
            assert await unit.waiting.label("shipping", "odd", "schema")
            assert not await unit.waiting.label("shipping", "nobody", "schema")
        filters = [
            WaitingFilter(consumer="shipping"),
            WaitingFilter(message_id="odd"),
            WaitingFilter(key="k"),
            WaitingFilter(waits=Waits.RETRY),
            WaitingFilter(label="schema"),
            WaitingFilter(error_code="ODD"),
            WaitingFilter(since=T0 + 90),
            WaitingFilter(consumer="shipping", key="k", until=T0 + 91),
            WaitingFilter(consumer="shipping", held=True),
        ]

        for which in filters:
            assert [m.message_id for m in await find(world, which)] == ["odd"], which
            async with world.database.begin() as unit:
                assert await unit.waiting.count(which) == 1, which
        assert [m.message_id for m in await find(world, WaitingFilter(until=T0 + 90))] == ["m1"]
        assert await find(world, WaitingFilter(held=False)) == []

    @in_world
    async def test_a_conflict_is_found_by_the_id_it_came_with(self, world: DatabaseWorld) -> None:
        for name in ("m1", "M1", "x:m1", "n" * 5000):
            its_own = conflict_id(name, "ab" * 32)
            await put(world, waiting(name), waiting(its_own))

            [found] = await find(world, WaitingFilter(conflicts_with=name))
            assert found.message_id == its_own

    @in_world
    async def test_messages_are_found_in_order_of_arrival_and_in_pages(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, *(waiting(name) for name in "cabed"))

        seen: list[str] = []
        which = WaitingFilter(consumer=CONSUMER)
        while page := await find(world, which, limit=2):
            seen += [found.message_id for found in page]
            which = replace(which, after_place=page[-1].place)

        assert seen == list("cabed")

    @in_world
    async def test_removing_says_whether_it_was_there(self, world: DatabaseWorld) -> None:
        await put(world, waiting("m1"), waiting("m1", consumer="shipping"))

        assert await remove(world, "m1")
        assert not await remove(world, "m1")
        assert len(await find(world, WaitingFilter())) == 1

    @in_world
    async def test_a_revision_keeps_the_place_in_the_queue(self, world: DatabaseWorld) -> None:
        await put(world, FULL, behind("m2", "customer-7"))
        before = await get(world, "m1")

        async with world.database.begin() as unit:
            assert await unit.waiting.revise(CONSUMER, "m1", b"new", "ef" * 32, "m1")
            assert not await unit.waiting.revise(CONSUMER, "nobody", b"new", "ef" * 32, "nobody")
        revised = await get(world, "m1")
        async with world.database.begin() as unit:
            assert await unit.waiting.revise(CONSUMER, "m1", b"newer", "0f" * 32, "x" * 5000)

        assert revised == replace(before, payload=b"new", payload_hash="ef" * 32)
        renamed = replace(before, message_id="x" * 5000, payload=b"newer", payload_hash="0f" * 32)
        found = await find(world, WaitingFilter())
        assert [m.message_id for m in found] == ["x" * 5000, "m2"]
        assert found[0] == renamed

    @in_world
    async def test_erasing_takes_the_reason_and_leaves_hashes_and_codes(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, FULL, waiting("m2", key="customer-8", headers={"a": b"b"}))
        before = await get(world, "m1")

        async with world.database.begin() as unit:
            assert await unit.waiting.erase(WaitingFilter(key="customer-7")) == 1
            assert await unit.waiting.erase(WaitingFilter(key="customer-7")) == 0

        found = await get(world, "m1")
        assert found.erased_at is not None
        gone = replace(before, payload=None, headers={}, reason=ERASED_REASON)
        assert found == replace(gone, erased_at=found.erased_at)
        assert (await get(world, "m2")).headers == {"a": b"b"}

    @in_world
    async def test_what_was_erased_is_never_due_again(self, world: DatabaseWorld) -> None:
        await put(world, waiting("m1", key="k"), behind("m2", "k"), parked("m3"))
        async with world.database.begin() as unit:
            await unit.waiting.erase(WaitingFilter())

        await put(world, waiting("m1", key="k", reason="no such customer: Ada"), waiting("m3"))
        async with world.database.begin() as unit:
            assert not await unit.waiting.revise(CONSUMER, "m1", b"back", "ef" * 32, "m1")
            assert not await unit.waiting.release(CONSUMER, "m1")

        assert await due(world) == []
        for found in await find(world, WaitingFilter()):
            assert (found.waits, found.payload) == (Waits.PARKED, None)
            assert found.reason == ERASED_REASON
