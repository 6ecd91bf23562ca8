"""The executable contract of the dead letters.

An implementation binds it in a few lines, by saying how its database is opened:

    class TestMyDeadLetters(DeadLettersContract):
        def world(self):
            return my_world()
"""

from __future__ import annotations

from dataclasses import replace

from semel.message import Partition
from semel.messaging.records import DeadLetter, DeadLetterFilter, conflict_id
from semel.messaging.redact import ERASED_REASON
from tests.stores.claims_world import rolled_back
from tests.stores.world import DatabaseContract, DatabaseWorld, in_world

T0 = 1_700_000_000.0

LETTER = DeadLetter(
    consumer="billing",
    message_id="m1",
    topic="payments",
    partition=3,
    offset=41,
    key="customer-7",
    payload=b'{"amount": 12}',
    reason="the amount is not a number",
    exception="decimal.InvalidOperation",
    error_code="SCHEMA_INVALID",
    attempts=5,
    first_failed_at=T0 + 0.25,
    last_failed_at=T0 + 60.5,
    headers={"trace": b"\x00\xff", "empty": b""},
    schema_version="2",
    correlation_id="c-1",
    message_type="Paid",
    timestamp=T0 - 5.5,
    payload_hash="ab" * 32,
    owner="team-billing",
    outcome="schema_incompatible",
    expected_hash="cd" * 32,
)

STRANGE = ("x" * 5000, "nul\0inside", "half a \ud83d pair", "sha256:" + "0" * 64, "Ä🐟", "")


class DeadLettersContract(DatabaseContract):
    """Everything a `semel.messaging.database.DeadLetters` must do."""

    @in_world
    async def test_a_letter_comes_back_with_every_field(self, world: DatabaseWorld) -> None:
        await put(world, LETTER)

        assert await get(world, "m1") == LETTER

    @in_world
    async def test_a_letter_without_key_and_coordinates_comes_back(
        self, world: DatabaseWorld
    ) -> None:
        bare = replace(LETTER, key=None, partition=None, offset=None, headers={}, payload=b"")
        await put(world, bare)

        assert await get(world, "m1") == bare
        assert bare.source is None

    @in_world
    async def test_the_offsets_that_have_letters_are_found_a_page_at_a_time(
        self, world: DatabaseWorld
    ) -> None:
        await put(
            world,
            *(replace(LETTER, message_id=f"m{n}", offset=n) for n in (5, 1, 3, 9)),
            replace(LETTER, message_id="other partition", partition=4, offset=2),
            replace(LETTER, message_id="other topic", topic="refunds", offset=2),
            replace(LETTER, message_id="no broker", partition=None, offset=None),
        )

        async with world.database.begin() as unit:
            place = Partition("payments", 3)
            pages = [
                await unit.dead_letters.places("billing", place, first, 8, 2)
                for first in (0, 1, 4, 6)
            ]
            others = await unit.dead_letters.places("shipping", place, 0, 8, 2)

        assert [list(page) for page in pages] == [[1, 3], [1, 3], [5], []]
        assert list(others) == []

    @in_world
    async def test_a_letter_is_new_once_for_each_consumer(self, world: DatabaseWorld) -> None:
        async with world.database.begin() as unit:
            assert await unit.dead_letters.put(LETTER)
            assert not await unit.dead_letters.put(LETTER)
        async with world.database.begin() as unit:
            assert not await unit.dead_letters.put(LETTER)
            assert await unit.dead_letters.put(replace(LETTER, consumer="shipping"))
            assert await unit.dead_letters.remove(LETTER.consumer, LETTER.message_id)
            assert await unit.dead_letters.put(LETTER)

    @in_world
    async def test_a_letter_of_a_transaction_that_fails_is_not_there(
        self, world: DatabaseWorld
    ) -> None:
        async with rolled_back(world) as unit:
            await unit.dead_letters.put(LETTER)

        assert await get(world, "m1") is None

    @in_world
    async def test_ids_and_keys_may_be_any_text(self, world: DatabaseWorld) -> None:
        strange = [replace(LETTER, message_id=text, key=text) for text in STRANGE]
        await put(world, *strange)

        for letter in strange:
            assert await get(world, letter.message_id) == letter
            assert await find(world, DeadLetterFilter(key=letter.key)) == [letter]
            assert await find(world, DeadLetterFilter(message_id=letter.message_id)) == [letter]

    @in_world
    async def test_whatever_an_exception_says_can_be_kept(self, world: DatabaseWorld) -> None:
        for text in STRANGE:
            await put(world, replace(LETTER, reason=text, correlation_id=text, message_type=text))

        assert await get(world, "m1") is not None

    @in_world
    async def test_a_later_failure_says_anew_why_and_keeps_the_beginning(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, LETTER)
        later = replace(
            LETTER,
            payload=b"another",
            payload_hash="ef" * 32,
            headers={},
            offset=99,
            reason="the service is down",
            exception="TimeoutError",
            error_code="TIMEOUT",
            attempts=9,
            first_failed_at=T0 + 500,
            last_failed_at=T0 + 501,
            owner="team-two",
            outcome="dlq",
            expected_hash="",
        )

        await put(world, later)

        assert await get(world, "m1") == replace(
            later,
            payload=LETTER.payload,
            payload_hash=LETTER.payload_hash,
            headers=LETTER.headers,
            offset=LETTER.offset,
            first_failed_at=LETTER.first_failed_at,
        )
        assert await count(world, DeadLetterFilter()) == 1

    @in_world
    async def test_each_consumer_has_letters_of_its_own(self, world: DatabaseWorld) -> None:
        other = replace(LETTER, consumer="shipping", reason="no address")
        await put(world, LETTER, other)

        assert await get(world, "m1", "billing") == LETTER
        assert await get(world, "m1", "shipping") == other

    @in_world
    async def test_letters_are_found_oldest_first(self, world: DatabaseWorld) -> None:
        for number in (3, 1, 2):
            await put(world, _numbered(number))

        assert await ids(world, DeadLetterFilter()) == ["n1", "n2", "n3"]

    @in_world
    async def test_every_filter_finds_its_letters_and_no_others(self, world: DatabaseWorld) -> None:
        odd = DeadLetter(
            consumer="shipping",
            message_id="odd",
            topic="orders",
            partition=0,
            offset=1,
            key="customer-9",
            payload=b"",
            reason="",
            exception="",
            error_code="OTHER",
            first_failed_at=T0 + 90,
            last_failed_at=T0,
        )
        await put(world, LETTER, odd)
        filters = [
            DeadLetterFilter(consumer="shipping"),
            DeadLetterFilter(message_id="odd"),
            DeadLetterFilter(key="customer-9"),
            DeadLetterFilter(topic="orders"),
            DeadLetterFilter(error_code="OTHER"),
            DeadLetterFilter(outcome="dlq"),
            DeadLetterFilter(since=T0 + 90),
            DeadLetterFilter(consumer="shipping", key="customer-9", until=T0 + 91),
        ]

        for which in filters:
            assert await ids(world, which) == ["odd"], which
            assert await count(world, which) == 1, which
        assert await ids(world, DeadLetterFilter(until=T0 + 90)) == ["m1"]
        assert await ids(world, DeadLetterFilter(consumer="shipping", key="customer-7")) == []

    @in_world
    async def test_a_conflict_is_found_by_the_id_it_came_with(self, world: DatabaseWorld) -> None:
        names = ("m1", "M1", "x:m1", "100%", "n" * 490, "n" * 5000, "nul\0", "sha256:" + "0" * 64)
        for name in names:
            await put(world, replace(LETTER, message_id=conflict_id(name, "ab" * 32)))
            await put(world, replace(LETTER, message_id=name))

        for name in names:
            found = await find(world, DeadLetterFilter(conflicts_with=name))
            assert [letter.message_id for letter in found] == [conflict_id(name, "ab" * 32)]

    @in_world
    async def test_pages_go_on_where_the_last_one_ended(self, world: DatabaseWorld) -> None:
        letters = [replace(_numbered(n), first_failed_at=T0 + n // 2) for n in range(7)]
        await put(world, *letters)

        seen: list[str] = []
        which = DeadLetterFilter(consumer="billing")
        while page := await find(world, which, limit=3):
            seen += [letter.message_id for letter in page]
            which = replace(which, after=(page[-1].first_failed_at, page[-1].message_id))

        assert seen == [letter.message_id for letter in letters]

    @in_world
    async def test_removing_takes_one_letter_and_says_whether_it_was_there(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, LETTER, replace(LETTER, consumer="shipping"), _numbered(1))

        async with world.database.begin() as unit:
            assert await unit.dead_letters.remove("billing", "m1")
            assert not await unit.dead_letters.remove("billing", "m1")

        assert await count(world, DeadLetterFilter()) == 2

    @in_world
    async def test_erasing_takes_the_reason_and_leaves_hashes_and_codes(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, LETTER, replace(LETTER, message_id="m2", key="customer-8"))

        async with world.database.begin() as unit:
            assert await unit.dead_letters.erase(DeadLetterFilter(key="customer-7")) == 1
            assert await unit.dead_letters.erase(DeadLetterFilter(key="customer-7")) == 0

        found = await get(world, "m1")
        assert found is not None
        assert found.erased_at is not None
        gone = replace(LETTER, payload=None, headers={}, reason=ERASED_REASON)
        assert found == replace(gone, erased_at=found.erased_at)
        other = await get(world, "m2")
        assert other is not None
        assert (other.payload, other.reason) == (LETTER.payload, LETTER.reason)

    @in_world
    async def test_a_new_failure_does_not_bring_back_what_was_erased(
        self, world: DatabaseWorld
    ) -> None:
        await put(world, LETTER)
        async with world.database.begin() as unit:
            await unit.dead_letters.erase(DeadLetterFilter(message_id="m1"))

        await put(world, replace(LETTER, attempts=6, reason="no such customer: Ada"))

        found = await get(world, "m1")
        assert found is not None
        assert (found.attempts, found.reason, found.payload) == (6, ERASED_REASON, None)
        assert found.headers == {}
        assert found.erased_at is not None


def _numbered(number: int) -> DeadLetter:
    return replace(LETTER, message_id=f"n{number}", first_failed_at=T0 + number)


async def put(world: DatabaseWorld, *letters: DeadLetter) -> None:
    """Write letters, one transaction each."""
    for letter in letters:
        async with world.database.begin() as unit:
            await unit.dead_letters.put(letter)


async def get(
    world: DatabaseWorld, message_id: str, consumer: str = "billing"
) -> DeadLetter | None:
    """Read a committed letter."""
    async with world.database.begin() as unit:
        return await unit.dead_letters.get(consumer, message_id)


async def find(world: DatabaseWorld, which: DeadLetterFilter, limit: int = 100) -> list[DeadLetter]:
    """Read committed letters."""
    async with world.database.begin() as unit:
        return list(await unit.dead_letters.find(which, limit))


async def ids(world: DatabaseWorld, which: DeadLetterFilter) -> list[str]:
    """Return the ids of the letters found, in order."""
    return [letter.message_id for letter in await find(world, which)]


async def count(world: DatabaseWorld, which: DeadLetterFilter) -> int:
    """Count committed letters."""
    async with world.database.begin() as unit:
        return await unit.dead_letters.count(which)
