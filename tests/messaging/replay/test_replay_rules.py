"""Replays: what a policy forbids, how far back they reach, and what one name stands for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from semel.codec import FromHeader
from semel.errors import Misuse
from semel.message import Message
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handler import consumer
from semel.messaging.records import DeadLetterFilter
from semel.messaging.settings import (
    DAY_SECONDS,
    DEFAULT_WINDOW_SECONDS,
    ConsumerSettings,
    Order,
    ReplayRule,
    ReplayRules,
    RetryPolicy,
)
from semel.operate.explain import close_gaps
from semel.operate.replay import (
    MOST_REASONS,
    OTHER_REASONS,
    Cursor,
    ReplayNotAllowed,
    ReplaySettings,
    abandon_replay,
)
from semel.operate.replay_message import Replayed, ReplayResult, replaying
from semel.operate.retention import ReplayRuns, Retention, prune
from semel.operate.selection import Ids, Letters, Offsets, Times, Waiting, parked_key
from semel.operate.stores import Act, ReplayState
from semel.policy.model import Policy
from semel.policy.vocabulary import GapPolicy, Mode, RetryMode
from semel.sql.operators import SqlReplays
from tests.messaging.act_world import acts, letters
from tests.messaging.places import InMemory, InPostgres, InSqlite
from tests.messaging.replay_world import (
    ALL_AT_ONCE,
    DEAD,
    P0,
    PARKS,
    Service,
    counts,
    dead,
    gapped,
    message,
)
from tests.messaging.worlds import memory_world
from tests.stores.world import in_world

POLICY = """
deliverySemantics:
  topics:
    payments: {{retention: 7d, replayAllowed: {payments}}}
    refunds: {{retention: 7d, replayAllowed: {refunds}, replayWindow: 2d}}
  consumers:
    billing: {{topics: [payments, refunds], retry: {{maxAttempts: 3}}, dlq: {{owner: team-a}}}}
"""
PAYMENTS_ONLY = ReplayRules({"payments": ReplayRule(), "refunds": ReplayRule("no refunds")})


def policy(payments: str = "true", refunds: str = "true") -> Policy:
    return Policy.parse(POLICY.format(payments=payments, refunds=refunds))


class Rules:
    """What holds on every database."""

    @in_world
    async def test_what_the_consumers_own_policy_forbids_is_refused_without_being_told(self, world):
        service = await dead(world, 1)

        @consumer("billing", policy=policy("false", "false"))
        async def forbidden(message, session):
            raise AssertionError("must not run")

        service.consumer = forbidden
        for selection in (Letters(), Ids(("m0",)), Waiting(), Offsets(P0, 0, 0)):
            with pytest.raises(ReplayNotAllowed, match="replay is not allowed"):
                await service.run(selection)

        assert await letters(world) == 1
        assert await acts(world) == []

    @in_world
    async def test_a_record_that_only_the_broker_has_is_judged_by_its_own_topic(self, world):
        service = await Service(world).open()
        service.put("m0")
        service.consumer = replace(service.consumer, replays=PAYMENTS_ONLY)

        report = await service.run(Offsets(P0, 0, 0))

        assert counts(report) == {"handled": 1}
        assert await service.paid() == ["m0"]

    @in_world
    async def test_a_record_that_can_be_read_at_last_is_reviewed_first_where_that_is_asked(
        self, world
    ):
        service = await Service(world, replace(DEAD, review_dead_letters=True)).open()
        service.put("m0", value=b"{")
        await service.run(Offsets(P0, 0, 0))
        service.read_everything()

        by_letters = await service.run(Letters(), name="letters")
        by_offsets = await service.run(Offsets(P0, 0, 0), name="offsets")

        assert counts(by_letters) == counts(by_offsets) == {"refused": 1}
        assert (await service.paid(), await letters(world)) == ([], 1)

    @in_world
    async def test_messages_of_a_forbidden_topic_are_refused_and_the_others_handled(self, world):
        service = await dead(world, 2)
        source = replace(message("r1").source, topic="refunds")
        service.refuse("r1")
        await handle_message(
            service.consumer, world.database, replace(message("r1"), source=source)
        )
        service.heal()
        service.consumer = replace(service.consumer, replays=PAYMENTS_ONLY)

        by_letters = await service.run(Letters())
        by_ids = await service.run(Ids(("r1", "m0")), name="ids")

        assert counts(by_letters) == {"handled": 2, "refused": 1}
        assert by_letters.refusals == {"no refunds": 1}
        assert counts(by_ids) == {"refused": 1, "duplicate": 1}
        assert sorted(await service.paid()) == ["m0", "m1"]
        with pytest.raises(ReplayNotAllowed, match="no refunds"):
            await service.run(Letters(DeadLetterFilter(topic="refunds")), name="refunds")

    @in_world
    async def test_a_stopped_replay_keeps_its_claims_and_doubles_nothing(self, world):
        service = await Service(world).open()
        service.put("m1", "m2", "m3")
        await service.deliver("m2", "m3")
        canary = ReplaySettings(canary=(1,), asks_after_canary=True)

        stopped = await service.run(Offsets(P0, 0, 2), canary)
        await world.age(15 * DAY_SECONDS)
        with pytest.raises(ReplayRuns, match="'again' is not over"):
            await prune(world.database, "billing", Retention())
        report = await service.run(None)

        assert stopped.state is ReplayState.STOPPED
        assert counts(report) == {"handled": 1, "duplicate": 2}
        assert sorted(await service.paid()) == ["m1", "m2", "m3"]

    @in_world
    async def test_an_abandoned_replay_lets_retention_go_on_and_cannot_be_run(self, world):
        service = await dead(world, 2)
        await service.deliver("done")
        await service.run(Letters(), ReplaySettings(canary=(1,), asks_after_canary=True))

        await abandon_replay(world.database, "again", actor="bob", reason="paid by hand")

        with pytest.raises(Misuse, match="'again' was abandoned"):
            await service.run(None)
        with pytest.raises(Misuse, match="'again' is over: it is abandoned"):
            await abandon_replay(world.database, "again", actor="bob", reason="twice")
        assert (await acts(world))[-1] == ("bob", "replay.abandon", "")
        await world.age(15 * DAY_SECONDS)
        assert (await prune(world.database, "billing", Retention())).claims > 0

    @in_world
    async def test_records_that_retention_may_have_forgotten_are_refused_by_default(self, world):
        service = await Service(world).open()
        service.clock.advance(-15 * DAY_SECONDS)
        service.put("old")
        service.clock.advance(15 * DAY_SECONDS)
        service.put("new")

        report = await service.run(Offsets(P0, 0, 1))
        wide = replace(ALL_AT_ONCE, window_seconds=20 * DAY_SECONDS)
        wider = await service.run(Offsets(P0, 0, 1), wide, name="wide")

        assert counts(report) == {"refused": 1, "handled": 1}
        assert next(iter(report.refusals)).startswith(
            "it is older than the replay window of 7 days"
        )
        assert counts(wider) == {"handled": 1, "duplicate": 1}

    @in_world
    async def test_a_name_stands_for_one_selection(self, world):
        service = await Service(world).open()
        service.put("m1", "m2", "m3")
        await service.run(Offsets(P0, 0, 0))

        with pytest.raises(Misuse, match=r'another selection: .*"last": 0.*, not .*"last": 2'):
            await service.run(Offsets(P0, 1, 2))

        assert await service.paid() == ["m1"]


class TestRulesInMemory(InMemory):
    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (Ids(("m0",)), Ids(("m1",))),
            (Letters(), Letters(DeadLetterFilter(topic="refunds"))),
            (Letters(DeadLetterFilter(until=10.0)), Letters(DeadLetterFilter(until=50.0))),
            (Letters(), Letters(DeadLetterFilter(until=4e9))),
            (Times(P0, 1.0, 2.0), Times(P0, 1.0, 3.0)),
            (parked_key("a"), parked_key("b")),
            (Letters(), Ids(("m0",))),
        ],
    )
    def test_another_selection_under_its_name_is_refused_and_the_same_one_goes_on(
        self, first, second
    ):
        @in_world
        async def scenario(self, world):
            service = await Service(world).open()
            begun = await service.run(first)

            assert await service.run(first) == begun
            with pytest.raises(Misuse, match="begun with another selection"):
                await service.run(second)

        scenario(self)

    @in_world
    async def test_a_policy_that_became_stricter_holds_for_a_replay_that_goes_on(self, world):
        service = await dead(world, 2)
        await service.run(Letters(), ReplaySettings(canary=(1,), asks_after_canary=True))
        before = await acts(world)
        service.consumer = replace(
            service.consumer, replays=ReplayRules.of_policy(policy("false", "false"), "billing")
        )

        with pytest.raises(ReplayNotAllowed):
            await service.run(None)

        assert await acts(world) == before

    @in_world
    async def test_a_selected_key_is_in_the_audit_trail_by_its_hash_alone(self, world):
        service = await Service(world, PARKS).open()
        service.refuse("m1")
        await service.deliver("m1", key="alice@example.org")
        service.heal()

        await service.run(parked_key("alice@example.org"))

        assert "alice" not in repr(await trail(world))
        begun = next(act for act in await trail(world) if act.act == "replay.begin")
        assert set(begun.details["selection"]["which"]) == {"consumer", "key_hash"}

    @in_world
    async def test_the_key_of_a_closed_gap_is_in_the_audit_trail_by_its_hash_alone(self, world):
        await gapped(world, GapPolicy.ALERT)

        await close_gaps(world.database, "billing", "k", actor="ann", reason="seen")

        (act,) = await trail(world)
        assert set(act.details) == {"key_hash", "missing"}

    @in_world
    async def test_a_process_whose_replay_is_abandoned_does_nothing_more(self, world):
        service = await dead(world, 3)
        replay = service.replay(Letters())
        taken = replay._take

        async def take(item, found):
            await abandon_replay(world.database, "again", actor="bob", reason="enough")
            return await taken(item, found)

        replay._take = take
        report = await replay.run()

        assert (report.state, report.why) == (ReplayState.ABANDONED, "somebody abandoned it")
        assert len(await service.paid()) == 1


async def trail(world) -> list[Act]:
    async with world.database.begin() as unit:
        return [entry.act for entry in await unit.audit.read(0, 100)]


class TestRulesInSqlite(InSqlite, Rules):
    pass


class TestRulesInPostgres(InPostgres, Rules):
    pass


def test_a_policy_says_topic_by_topic_what_may_be_replayed():
    rules = ReplayRules.of_policy(policy(refunds="false"), "billing")

    assert rules.of("payments") == ReplayRule(None, 7 * DAY_SECONDS)
    assert rules.of("refunds").window_seconds == 2 * DAY_SECONDS
    assert "not allowed" in (rules.of("refunds").refusal or "")
    assert rules.refusal is None


@pytest.mark.parametrize("topics", [(), ("",), (None,), ("elsewhere",), ("payments", "refunds")])
def test_where_the_topic_is_not_known_the_strictest_of_all_holds(topics):
    rule = ReplayRules.of_policy(policy(refunds="false"), "billing").of(*topics)

    assert rule.refusal is not None
    assert rule.window_seconds == 2 * DAY_SECONDS


@pytest.mark.parametrize("turned", [False, True])
def test_a_second_policy_can_only_add_strictness(turned):
    first = ReplayRules.of_policy(policy(refunds="false"), "billing")
    second = ReplayRules({"payments": ReplayRule(None, DAY_SECONDS)}, ReplayRule(None, 1e9))
    joined = second.joined(first) if turned else first.joined(second)

    assert joined.of("payments") == ReplayRule(None, DAY_SECONDS)
    assert joined.of("refunds").refusal == first.of("refunds").refusal
    assert joined.joined(ReplayRules(own=ReplayRule("no"))).refusal == "no"


def test_a_window_is_never_without_end():
    assert ReplayRules().of("payments").reaches_seconds == DEFAULT_WINDOW_SECONDS
    assert ReplayRule(window_seconds=0.0).reaches_seconds == 0.0
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(Misuse, match="window_seconds must be finite"):
            ReplaySettings(window_seconds=wrong)


def test_a_consumer_keeps_what_its_policy_says():
    @consumer("billing", policy=policy(refunds="false"))
    async def billing(message, session):
        pass

    assert billing.mode is Mode.TRANSACTIONAL
    assert billing.replays.of("refunds").refusal is not None
    with pytest.raises(Misuse, match="its policy has mode transactional"):
        consumer("billing", policy=policy(), mode=Mode.LEASED)


def test_the_reasons_of_refusals_are_not_collected_without_end():
    cursor = Cursor()

    for number in range(MOST_REASONS + 3):
        cursor.count(Replayed(f"m{number}", ReplayResult.REFUSED, f"reason {number}"))

    kept = Cursor.read(cursor.text()).refusals
    assert len(kept) == MOST_REASONS + 1
    assert kept[OTHER_REASONS] == 3


@pytest.mark.parametrize(
    "settings",
    [
        ConsumerSettings(order=order, holds_keys=held, retry=RetryPolicy(mode=mode))
        for order, held, mode in [
            (Order.PARTITION, None, RetryMode.BLOCKING),
            (Order.KEY, False, RetryMode.BLOCKING),
            (Order.KEY, True, RetryMode.RETRY_TABLE),
            (Order.NONE, None, RetryMode.RETRY_TABLE),
        ]
    ],
)
def test_a_consumer_of_any_order_can_be_replayed(settings):
    @consumer("billing", policy=settings, id_from=FromHeader("message-id"))
    async def handle(message: Message, session: Any) -> None:
        """Do nothing."""

    replayed = replaying(handle).settings

    assert replayed.stores_retries
    assert replayed.holds_waiting_keys is (settings.order is Order.KEY)


def test_a_replay_that_was_abandoned_meanwhile_is_not_resumed(monkeypatch):
    async def scenario() -> None:
        async with memory_world() as world:
            service = await dead(world, 2)
            service.refuse("m0")
            await service.run(Letters())
            async with world.database.begin() as unit:
                stale = [await unit.replays.get("again")]
            await abandon_replay(world.database, "again", actor="bob", reason="enough")
            get = SqlReplays.get

            async def late(replays, name):
                return stale.pop() if stale else await get(replays, name)

            monkeypatch.setattr(SqlReplays, "get", late)
            with pytest.raises(Misuse, match="was abandoned"):
                await service.run(None)

            assert not stale
            assert "replay.resume" not in [act for _, act, _ in await acts(world)]

    asyncio.run(scenario())
