"""What a person does with messages of a consumer that a pipeline on Spark runs."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from sqlalchemy import text

from semel.codec import FromHeader, unreadable_id
from semel.errors import Misuse
from semel.lease import Owner
from semel.memory.broker import MemoryBroker
from semel.memory.ledger import MemoryLedger
from semel.message import Coordinates, Partition, digest_of
from semel.messaging.handle.claims import (
    Claimed,
    ClaimRequest,
    ClaimState,
    Failure,
    Locked,
    RunByPipeline,
)
from semel.messaging.handler import consumer
from semel.messaging.records import Gap, Waits
from semel.messaging.settings import ConsumerSettings
from semel.operate import audit, deadletters, deletion, explain, parking, replay, retention
from semel.operate.audit import CycleUnsettled, acting, write_down
from semel.operate.consumers import NotHandedOver, hand_over, overview
from semel.operate.selection import Ids, Offsets
from semel.operate.stores import Account, ReplayState, acting_from
from semel.pipeline.txn import Scope
from tests.messaging.act_world import ANN, bury, claim_of, park, waiting_of
from tests.messaging.engines import SCOPE, attempt, give_back, hand_made, take_over
from tests.messaging.outgoing import run

BOB = {"actor": "bob", "reason": "I agree"}
FIXED = b'{"n": 1}'


@consumer("billing", policy=ConsumerSettings(versioned=True), id_from=FromHeader("message-id"))
async def billing(message, session):
    raise AssertionError("no command handles a message")


@pytest.fixture
def quick(monkeypatch):
    """Acts that give up soon."""
    monkeypatch.setattr(audit, "SETTLE_SECONDS", 0.05)


async def two_people_delete(database):
    with acting_from(Account("ann@here")):
        asked = await deletion.ask_to_delete(database, "billing", "m1", **ANN)
    with acting_from(Account("bob@there")):
        await deletion.approve_delete(database, asked.number, **BOB)


async def gap_of(world):
    async with world.database.begin() as unit:
        await unit.versions.open_gap(Gap("billing", "case-7", 1, 3))


async def parked(world):
    await park(world, "m1", key="case-7")


ACTS = {
    "fix": (
        parked,
        lambda db: parking.fix(db, "billing", "m1", FIXED, ids=parking.KeepId(), **ANN),
    ),
    "release": (parked, lambda db: parking.release(db, "billing", "m1", **ANN)),
    "release a key": (parked, lambda db: parking.release_key(db, "billing", "case-7", **ANN)),
    "skip": (parked, lambda db: parking.skip(db, "billing", "m1", **ANN)),
    "delete": (parked, two_people_delete),
    "send back": (bury, lambda db: deadletters.retry_dead_letter(db, "billing", "m1", **ANN)),
    "park a letter": (bury, lambda db: deadletters.park_dead_letter(db, "billing", "m1", **ANN)),
    "skip a letter": (bury, lambda db: deadletters.skip_dead_letter(db, "billing", "m1", **ANN)),
    "close gaps": (gap_of, lambda db: explain.close_gaps(db, "billing", "case-7", **ANN)),
    "pass over": (gap_of, lambda db: explain.pass_over_gaps(db, billing, "case-7", **ANN)),
    "erase": (parked, lambda db: retention.erase(db, key="case-7", **ANN)),
}


async def everything(world):
    """Return the rows of all tables that a cycle may have read."""
    tables = ("processed_message", "waiting_message", "dead_letter", "sequence_gap")
    async with world.database.begin() as unit:
        return {
            name: sorted(map(repr, await unit.session.execute(text(f"SELECT * FROM {name}"))))
            for name in (*tables, "aggregate_version", "message_revision")
        }


@pytest.mark.postgres
@pytest.mark.parametrize("name", ACTS)
def test_an_act_is_refused_while_a_cycle_of_the_consumer_is_not_settled(postgres, quick, name):
    make, act = ACTS[name]

    async def test(world):
        await make(world)
        await take_over(world.database)
        before = await everything(world)
        with hand_made(world.database) as books:
            books.prepare(attempt(41))

            with pytest.raises(CycleUnsettled) as refused:
                await act(world.database)

            assert str(refused.value) == (
                "cycle g1.b41 of payments/main is not settled, and may change messages of "
                "consumer billing: nothing was changed here; start the pipeline, or "
                "`semel recover`"
            )
            assert await everything(world) == before
            books.prove(attempt(41))
            if name == "delete":
                return  # the request was made before
            await act(world.database)
        assert await everything(world) != before

    run(postgres, test)


@pytest.mark.postgres
def test_an_act_goes_on_as_soon_as_the_cycle_is_settled(postgres):
    async def test(world):
        await parked(world)
        await take_over(world.database)
        with hand_made(world.database) as books:
            books.prepare(attempt(41))
            act = asyncio.create_task(parking.skip(world.database, "billing", "m1", **ANN))
            await asyncio.wait({act}, timeout=0.2)
            assert not act.done()

            books.prove(attempt(41))
            await asyncio.wait_for(act, 10)

        assert (await claim_of(world, "m1")).state is ClaimState.COMPLETED

    run(postgres, test)


@pytest.mark.postgres
def test_a_cycle_that_another_attempt_has_proved_and_one_that_was_aborted_are_settled(
    postgres, quick
):
    async def test(world):
        await parked(world)
        await take_over(world.database)
        with hand_made(world.database) as books:
            books.prepare(attempt(41, "loser"))
            books.prove(attempt(41, "winner"))
            books.abort(attempt(42))
            books.prepare(attempt(7, scope=Scope("ledger1", "payments", "other")))

            await parking.skip(world.database, "billing", "m1", **ANN)

    run(postgres, test)


@pytest.mark.postgres
def test_an_act_looks_at_the_books_after_it_has_waited_for_the_rows(postgres, quick):
    """The transaction of a cycle holds the rows; its process dies, and the rows are free again."""

    async def test(world):
        await parked(world)
        await take_over(world.database)
        with hand_made(world.database) as books:
            async with world.database.begin() as held:
                await held.session.execute(text("SELECT * FROM waiting_message FOR UPDATE"))
                act = asyncio.create_task(parking.skip(world.database, "billing", "m1", **ANN))
                await asyncio.wait({act}, timeout=0.1)
                books.prepare(attempt(41))
            with pytest.raises(CycleUnsettled):
                await act

    run(postgres, test)


@pytest.mark.postgres
def test_acts_about_consumers_of_services_ask_for_no_books(postgres, quick):
    async def test(world):
        await parked(world)
        await take_over(world.database, "shipping")
        with hand_made(world.database) as books:
            books.prepare(attempt(41))
            await parking.inspect(world.database, "billing", "m1", actor="ann")
            await parking.skip(world.database, "billing", "m1", **ANN)

    run(postgres, test)


@pytest.mark.postgres
def test_people_may_look_while_a_cycle_is_not_settled(postgres, quick):
    async def test(world):
        await parked(world)
        await bury(world, "m2")
        await take_over(world.database)
        with hand_made(world.database) as books:
            books.prepare(attempt(41))
            await parking.inspect(world.database, "billing", "m1", actor="ann")
            await deadletters.inspect_dead_letter(world.database, "billing", "m2", actor="ann")
            async with acting(world.database) as unit:
                await write_down(unit, "ann", "pipeline recover", reason="to settle it")

    run(postgres, test)


def test_acts_of_a_pipelines_consumer_mark_rows_and_handle_nothing(database):
    async def test(world):
        await park(world, "m1", "m2", key="case-7")
        await bury(world, "m3")
        await take_over(world.database)

        await parking.release(world.database, "billing", "m1", **ANN)
        await deadletters.retry_dead_letter(world.database, "billing", "m3", **ANN)

        for message_id in ("m1", "m3"):
            waits = await waiting_of(world, message_id)
            claim = await claim_of(world, message_id)
            assert (waits.waits, waits.attempts) == (Waits.RETRY, 0)
            assert (claim.state, claim.attempts) == (ClaimState.FAILED_RETRYABLE, 0)
            async with world.database.begin() as unit:
                assert waits.due_at <= await unit.now()

    run(database, test)


def test_a_replay_makes_messages_due_for_the_pipeline_and_handles_none(database):
    async def test(world):
        await park(world, "m1")
        await bury(world, "m3")
        await take_over(world.database)
        selection = Ids(("m1", "m3", "m9"))
        at_once = replay.ReplaySettings(canary=())
        started = replay.Replay(
            billing, world.database, selection, at_once, actor="ann", name="again"
        )

        report = await started.run()

        assert report.state is ReplayState.FINISHED
        assert {result: n for result, n in report.counts.items() if n} == {
            replay.ReplayResult.SENT: 2,
            replay.ReplayResult.MISSING: 1,
        }
        for message_id in ("m1", "m3"):
            waits, claim = await waiting_of(world, message_id), await claim_of(world, message_id)
            assert (waits.waits, waits.attempts) == (Waits.RETRY, 0)
            assert claim.state is ClaimState.FAILED_RETRYABLE
        async with world.database.begin() as unit:
            done = [entry.act.act for entry in await unit.audit.read(0, 10)]
        assert done == ["replay.begin", "park.release", "dlq.retry", "replay.end"]

    run(database, test)


def offsets_of(world, broker, **settings):
    """A replay of all records of a partition."""
    return replay.Replay(
        billing,
        world.database,
        Offsets(Partition("payments", 0), 0, 4),
        replay.ReplaySettings(**settings),
        actor="ann",
        name="range",
        reader=broker.reader(),
    )


def test_a_replay_of_offsets_puts_what_was_never_handled_where_the_pipeline_finds_it(database):
    async def test(world):
        broker = MemoryBroker({"payments": 1})
        for name in ("m1", "m2", "m3", "m3"):
            headers = {"message-id": name.encode()}
            broker.put("payments", b'{"n": 1}', key=b"k", headers=headers, partition=0)
        await bury(world, "m2", payload=b'{"n": 1}')
        async with world.database.begin() as unit:
            await unit.claims.mark_completed("billing", "m1")
        await take_over(world.database)

        report = await offsets_of(world, broker, canary=()).run()

        assert {result.value: n for result, n in report.counts.items() if n} == {
            "duplicate": 1,
            "sent": 3,
        }
        put = await waiting_of(world, "m3")
        assert (put.waits, put.attempts, put.held, put.payload) == (
            Waits.RETRY,
            0,
            True,
            b'{"n": 1}',
        )
        assert await claim_of(world, "m3") is None

    run(database, test)


def test_a_replay_of_offsets_refuses_what_has_a_claim_or_a_letter_of_its_bytes(memory):
    async def test(world):
        broker = MemoryBroker({"payments": 1})
        for name in ("m1", "m2", "m3"):
            headers = {"message-id": name.encode()}
            broker.put("payments", FIXED, headers=headers, partition=0)
        failed = Failure(ClaimState.FAILED_TERMINAL, 1, "BAD", 0.0, digest_of(FIXED))
        async with world.database.begin() as unit:
            await unit.claims.mark_failed("billing", "m1", failed)
        await bury(world, unreadable_id(Coordinates("payments", 0, 1)))
        await take_over(world.database)

        report = await offsets_of(world, broker, canary=()).run()

        assert {result.value: n for result, n in report.counts.items() if n} == {
            "refused": 2,
            "sent": 1,
        }
        assert [why.rpartition(": ")[2] for why in report.refusals] == [
            "its claim is FAILED_TERMINAL, without a message",
            "retry it",
        ]
        assert await waiting_of(world, "m1") is await waiting_of(world, "m2") is None

    run(memory, test)


@pytest.mark.parametrize(
    ("end", "state", "why"),
    [
        (ClaimState.COMPLETED, ReplayState.FINISHED, ""),
        (ClaimState.FAILED_RETRYABLE, ReplayState.FAILED, "message 'm1' failed: BAD: no"),
        (None, ReplayState.STOPPED, "does it run?"),
    ],
)
def test_the_canary_of_a_replay_waits_for_what_the_pipeline_makes_of_a_message(
    memory, end, state, why
):
    async def test(world):
        broker = MemoryBroker({"payments": 1})
        broker.put("payments", b'{"n": 1}', headers={"message-id": b"m1"}, partition=0)
        await take_over(world.database)
        started = offsets_of(world, broker, canary=(1,), canary_seconds=1.0 if end is None else 30)

        async def pipeline():
            while end is not None and await waiting_of(world, "m1") is None:
                await asyncio.sleep(0.01)
            await give_back(world.database)  # so that a claim can be written here
            async with world.database.begin() as unit:
                row = end and await unit.waiting.get("billing", "m1")
                if end is ClaimState.COMPLETED:
                    await unit.waiting.remove("billing", "m1")
                    await unit.claims.mark_completed("billing", "m1")
                elif end is not None:
                    failed = replace(row, attempts=1, error_code="BAD", reason="no")
                    await unit.waiting.remove("billing", "m1")
                    await unit.waiting.put(failed, delay_seconds=60)

        report, _ = await asyncio.gather(started.run(), pipeline())

        assert (report.state, report.counts[replay.ReplayResult.SENT]) == (state, 1)
        assert why in report.why

    run(memory, test)


@pytest.mark.postgres
def test_a_replay_stops_at_a_cycle_that_is_not_settled_and_goes_on_after_it(postgres, quick):
    async def test(world):
        await bury(world, "m3")
        await take_over(world.database)
        selection = Ids(("m3",))
        with hand_made(world.database) as books:
            books.prepare(attempt(41))
            with pytest.raises(CycleUnsettled):
                await replay.Replay(
                    billing, world.database, selection, actor="ann", name="again"
                ).run()
            assert await waiting_of(world, "m3") is None
            books.prove(attempt(41))

            at_once = replay.ReplaySettings(canary=())
            again = replay.Replay(billing, world.database, None, at_once, actor="ann", name="again")
            assert (await again.run()).state is ReplayState.FINISHED

        assert (await waiting_of(world, "m3")).waits is Waits.RETRY

    run(postgres, test)


def test_retention_leaves_the_claim_of_a_letter_that_was_sent_back(database):
    async def test(world):
        await bury(world, "m3")
        await take_over(world.database)
        await deadletters.retry_dead_letter(world.database, "billing", "m3", **ANN)
        async with world.database.begin() as unit:
            # As a cycle that was decided has read it, before a person parked it again.
            await unit.session.execute(
                text("UPDATE processed_message SET state = 'FAILED_TERMINAL'")
            )
        await world.age(100 * 86_400)

        await retention.prune(world.database, "billing", retention.Retention())

        assert await claim_of(world, "m3") is not None

    run(database, test)


@dataclass
class Pipeline:
    """A scope of a ledger whose pipeline has run, and ended."""

    ledger: MemoryLedger
    scope: Scope

    @contextmanager
    def started(self):
        lease = self.ledger.acquire(self.scope, Owner.here(), 60.0)
        self.ledger.open_generation(lease, "checkpoint")
        yield lease
        self.ledger.release(lease)


@pytest.fixture
def pipeline():
    ledger = MemoryLedger()
    found = Pipeline(ledger, Scope(ledger.ledger_id, "payments", "main"))
    with found.started():
        pass
    return found


def test_a_consumer_goes_from_a_service_to_a_pipeline_and_back(database, pipeline):
    async def test(world):
        calls = []

        @consumer("billing")
        async def handle(message, session):
            calls.append(message.id)

        async with world.database.begin() as unit:
            assert await unit.claims.try_claim("billing", ClaimRequest("m1")) == Claimed()
        await take_over(world.database, scope=pipeline.scope)
        with pytest.raises(RunByPipeline):
            async with world.database.begin() as unit:
                await unit.claims.try_claim("billing", ClaimRequest("m2"))
        (shown,) = (await overview(world.database)).consumers
        assert (shown.consumer, shown.pipeline) == ("billing", "payments/main")

        done = await hand_over(world.database, "billing", pipeline.ledger, **ANN)

        assert (done.consumer, done.pipeline, done.epoch) == ("billing", "payments/main", 1)
        async with world.database.begin() as unit:
            assert await unit.claims.try_claim("billing", ClaimRequest("m2")) == Claimed()
        async with world.database.begin() as unit:
            (entry,) = await unit.audit.read(0, 10)
        assert (entry.act.act, entry.act.consumer) == ("consumer.hand-over", "billing")
        assert entry.act.details["pipeline"] == "payments/main"
        assert (await overview(world.database)).consumers[0].pipeline is None
        await take_over(world.database, scope=pipeline.scope)

    run(database, test)


def test_a_consumer_is_not_handed_over_while_its_pipeline_runs_or_a_cycle_is_open(
    database, pipeline
):
    async def refused(world):
        with pytest.raises(NotHandedOver) as why:
            await hand_over(world.database, "billing", pipeline.ledger, **ANN)
        with pytest.raises(RunByPipeline):
            async with world.database.begin() as unit:
                await unit.claims.try_claim("billing", ClaimRequest("m2"))
        return str(why.value)

    async def test(world):
        await take_over(world.database, scope=pipeline.scope)
        txn = attempt(41, scope=pipeline.scope)
        with pipeline.started() as lease:
            running = await refused(world)
            pipeline.ledger.plan(lease, txn)
        planned = await refused(world)
        pipeline.ledger.decide_abort(txn, "it failed")
        await hand_over(world.database, "billing", pipeline.ledger, **ANN)

        assert running.startswith("consumer billing stays with payments/main: it runs, process")
        assert planned == (
            "consumer billing stays with payments/main: cycle g1.b41 is planned in its ledger: "
            "start the pipeline once more, or `semel recover`"
        )

    run(database, test)


@pytest.mark.postgres
def test_a_consumer_is_not_handed_over_while_the_books_have_a_prepared_cycle(postgres, pipeline):
    async def test(world):
        await take_over(world.database, scope=pipeline.scope)
        with hand_made(world.database) as books:
            books.prepare(attempt(41, scope=pipeline.scope))
            with pytest.raises(NotHandedOver, match=r"cycle g1\.b41 is prepared in the books"):
                await hand_over(world.database, "billing", pipeline.ledger, **ANN)

    run(postgres, test)


@pytest.mark.postgres
def test_a_consumer_is_not_handed_over_while_a_cycle_is_committing(postgres, pipeline):
    """The transaction of a cycle has locked the row of the consumer."""

    async def test(world):
        await take_over(world.database, scope=pipeline.scope)
        async with world.database.begin() as held:
            await held.session.execute(text("SELECT * FROM consumer_engine FOR KEY SHARE"))
            with pytest.raises(Locked):
                await hand_over(world.database, "billing", pipeline.ledger, **ANN)

    run(postgres, test)


def test_a_hand_over_needs_the_ledger_of_the_pipeline_and_a_reason(memory, pipeline):
    async def test(world):
        with pytest.raises(Misuse, match="run by services"):
            await hand_over(world.database, "billing", pipeline.ledger, **ANN)
        await take_over(world.database, scope=SCOPE)
        with pytest.raises(Misuse, match="is not the ledger of payments/main, whose id is ledger1"):
            await hand_over(world.database, "billing", pipeline.ledger, **ANN)
        with pytest.raises(Misuse, match="needs a reason"):
            await hand_over(world.database, "billing", pipeline.ledger, **{**ANN, "reason": " "})
        await give_back(world.database)

    run(memory, test)
