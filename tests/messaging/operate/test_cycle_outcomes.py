"""The outcomes of cycles on Spark: in the audit of completeness, in stories, and in retention."""

from __future__ import annotations

from dataclasses import replace

from semel.message import Coordinates, Message, Partition
from semel.messaging.handle.claims import ClaimRequest, ClaimState, Failure
from semel.messaging.outcome import OutcomeRange
from semel.messaging.records import WaitingMessage, Waits
from semel.operate.completeness import Completeness, Extent, Stretch, audit_completeness
from semel.operate.explain import explain_message
from semel.operate.parking import skip
from semel.operate.retention import Retention, prune
from tests.messaging.act_world import ANN, bury, letter_of
from tests.messaging.audited import PLACE, Service
from tests.messaging.engines import count
from tests.messaging.outgoing import run

DAY = 86_400.0


async def audited(world, extent=None, reader=None):
    extents = {PLACE: extent} if extent else None
    (audit,) = await audit_completeness(world.database, "billing", extents, reader)
    return audit


def stands(audit):
    return {standing: number for standing, number in audit.counts.items() if number}


async def wait(world, offset, waits=Waits.RETRY):
    """Let the message of an offset wait, as a cycle does."""
    message = Message(f"m{offset}", {}, b"{}", None, source=Coordinates("payments", 0, offset))
    state = ClaimState.FAILED_RETRYABLE if waits is Waits.RETRY else ClaimState.PARKED
    failure = Failure(state, 1, "TIMEOUT", payload_hash=message.digest, source=str(message.source))
    async with world.database.begin() as unit:
        await unit.claims.mark_failed("billing", message.id, failure)
        await unit.waiting.put(WaitingMessage.of("billing", message, waits, held=False))


def test_cycles_are_added_up_and_exceptions_are_found_where_they_are_now(database):
    async def test(world):
        await count(world.database, 1, 0, 99, success=88, duplicate_skipped=10, dlq=2)
        await count(world.database, 2, 100, 199, success=97, retryable_failure=2, parked=1)
        await wait(world, 101)
        await wait(world, 102, Waits.PARKED)  # it was a retry, and failed again since
        await wait(world, 150, Waits.PARKED)
        await bury(world, "m7")
        await bury(world, "m8", offset=8)
        before = await audited(world)
        await skip(world.database, "billing", "m150", **ANN)

        after = await audited(world)

        assert stands(before) == {
            "handled": 185,
            "dead": 2,
            "parked": 2,
            "waiting": 1,
            "duplicate": 10,
        }
        assert (before.first, before.until, before.missing) == (0, 200, ())
        assert before.is_complete
        assert Completeness("billing", [before]).known
        assert stands(after) == {**stands(before), "parked": 1, "skipped": 1}

    run(database, test)


def test_offsets_between_two_cycles_are_missing(database):
    async def test(world):
        await count(world.database, 1, 0, 9, success=10)
        await count(world.database, 3, 20, 29, success=10)

        audit = await audited(world, Extent(committed=40))

        assert audit.unknown == (Stretch(10, 19), Stretch(30, 39))
        assert not audit.is_complete

    run(database, test)


def test_a_message_of_a_cycle_that_is_in_no_table_any_more_is_lost(database):
    async def test(world):
        await count(world.database, 1, 0, 9, success=9, retryable_failure=1)
        await wait(world, 4)
        async with world.database.begin() as unit:
            await unit.waiting.remove_many("billing", ["m4"])

        audit = await audited(world)

        assert audit.lost == (Stretch(4, 4),)
        assert not audit.is_complete

    run(database, test)


def test_a_retry_that_was_handled_meanwhile_counts_as_handled(database):
    async def test(world):
        await count(world.database, 1, 0, 9, success=9, retryable_failure=1)
        await wait(world, 4)
        async with world.database.begin() as unit:
            await unit.waiting.remove_many("billing", ["m4"])
            await unit.claims.mark_completed("billing", "m4")

        audit = await audited(world)

        assert stands(audit) == {"handled": 10}
        assert audit.is_complete

    run(database, test)


def test_what_a_service_handled_before_a_pipeline_took_over_is_part_of_the_same_audit(database):
    async def test(world):
        async with world.database.begin() as unit:
            await unit.outcomes.record("billing", [OutcomeRange(PLACE, 0, 9, "success")])
        await count(world.database, 1, 10, 19, success=9, duplicate_skipped=1)
        async with world.database.begin() as unit:
            await unit.outcomes.record("billing", [OutcomeRange(PLACE, 20, 24, "success")])

        audit = await audited(world)

        assert stands(audit) == {"handled": 24, "duplicate": 1}
        assert audit.is_complete

    run(database, test)


def test_offsets_that_were_read_again_after_a_checkpoint_was_lost_count_once(database):
    async def test(world):
        await count(world.database, 1, 0, 9, success=10)
        await count(world.database, 2, 5, 14, success=5, duplicate_skipped=5)

        audit = await audited(world)

        assert stands(audit) == {"handled": 15}
        assert audit.is_complete
        assert audit.repeated == 5

    run(database, test)


def test_a_reader_tells_offsets_without_a_record_from_losses(memory):
    async def test(world):
        service = Service(world)
        service.send("m0", "m1", "m2")
        reader = service.broker.reader()
        await count(world.database, 1, 0, 2, success=2)

        alone = await audited(world)
        with_reader = await audited(world, reader=reader)

        assert stands(alone) == {"handled": 2, "hole": 1}
        assert alone.is_complete
        assert with_reader.unknown == (Stretch(0, 2),)
        assert not with_reader.is_complete

    run(memory, test)


def test_explain_names_the_cycle_and_the_attempt_that_took_a_message(database):
    async def test(world):
        await count(world.database, 41, 0, 99, success=90, dlq=10)
        await count(world.database, 42, 100, 199, success=100)
        await bury(world, "m7")

        (story,) = (await explain_message(world.database, "m7")).stories

        (moment,) = (one for one in story.moments if one.what == "cycle")
        assert moment.words == "g1.b41, attempt first, offsets 0 to 99: 10 dlq, 90 success"
        assert "on Spark its offset was read in g1.b41 (attempt first)" in story.deliveries

    run(database, test)


def test_retention_deletes_the_outcomes_of_old_cycles_and_no_others(database):
    async def test(world):
        await count(world.database, 1, 0, 9, success=9, dlq=1)
        await world.age(100 * DAY)
        await count(world.database, 2, 10, 19, success=10)

        pruned = await prune(world.database, "billing", replace(Retention(), batch=1))

        assert pruned.cycles == 2
        assert (await audited(world)).first == 10
        assert await letter_of(world, "m7") is None

    run(database, test)


def test_a_consumer_is_known_by_its_cycles_alone(database):
    async def test(world):
        await count(world.database, 1, 0, 9, success=10)

        async with world.database.begin() as unit:
            assert await unit.outcomes.cycle_partitions("billing") == [Partition("payments", 0)]
            assert await unit.claims.try_claim("billing", ClaimRequest("m1"))
        assert (await audited(world)).is_complete

    run(database, test)
