"""Replays: which messages one is about."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from semel.errors import Misuse
from semel.messaging.records import DeadLetterFilter, WaitingFilter, Waits
from semel.messaging.settings import Order
from semel.operate.replay import Replay, ReplaySettings
from semel.operate.selection import (
    Ids,
    Letters,
    MessageSource,
    Offsets,
    Times,
    Waiting,
    from_json,
    to_json,
)
from semel.sql.store import MessageStore
from tests.messaging.act_world import acts
from tests.messaging.places import InMemory
from tests.messaging.replay_world import DEAD, P0, PARKS, Service, counts, dead
from tests.messaging.worlds import memory_world
from tests.stores.world import in_world


class TestSelections(InMemory):
    """Which messages it is about."""

    @in_world
    async def test_records_are_selected_by_the_brokers_time(self, world):
        service = await Service(world).open()
        for message_id in ("m1", "m2", "m3"):
            service.put(message_id)
            service.clock.advance(60)
        began = service.clock.now() - 180

        report = await service.run(Times(P0, began + 60, began + 120))

        assert counts(report) == {"handled": 1}
        assert await service.paid() == ["m2"]

    @in_world
    async def test_letters_are_selected_by_their_filter(self, world):
        service = await dead(world, 3)

        report = await service.run(Letters(DeadLetterFilter(message_id="m1")))

        assert counts(report) == {"handled": 1}
        assert await service.paid() == ["m1"]

    @in_world
    async def test_messages_are_found_without_loading_their_payloads(self, world):
        for selection, settings in ((Letters(), DEAD), (Waiting(), PARKS)):
            service = await Service(world, settings).open()
            name = type(selection).__name__
            service.refuse(name)
            await service.deliver(name)
            source = MessageSource(selection, service.consumer, world.database)

            with pytest.MonkeyPatch.context() as patched:
                patched.delattr(MessageStore, "find")
                found = [item.message_id async for item in source.items()]

            assert found == [name]

    @in_world
    async def test_a_letter_that_comes_while_it_runs_is_not_part_of_it(self, world):
        service = await dead(world, 2)
        replay = service.replay(Letters(), ReplaySettings(canary=(1,), asks_after_canary=True))
        await replay.run()
        await world.age(1)
        service.refuse("late")
        await service.deliver("late")

        report = await service.run(None)

        assert counts(report) == {"handled": 2}

    @in_world
    async def test_waiting_messages_are_selected_by_label_and_code(self, world):
        service = await Service(world, replace(PARKS, order=Order.NONE, holds_keys=False)).open()
        service.refuse("m1", "m2")
        await service.deliver("m1", "m2")
        service.heal()
        async with world.database.begin() as unit:
            await unit.waiting.label("billing", "m2", "data")

        report = await service.run(Waiting(WaitingFilter(label="data", waits=Waits.PARKED)))

        assert counts(report) == {"handled": 1}
        assert await service.paid() == ["m2"]

    @pytest.mark.parametrize(
        "selection",
        [
            Ids(("a", "b")),
            Letters(DeadLetterFilter("billing", until=12.5)),
            Waiting(WaitingFilter("billing", waits=Waits.PARKED, key="k")),
            Offsets(P0, 3, 9),
            Times(P0, 1.0, 2.0, 5, 6),
        ],
        ids=lambda selection: type(selection).__name__,
    )
    def test_a_selection_survives_its_table(self, selection):
        assert from_json(to_json(selection)) == selection

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "moods"}', '{"kind": "ids"}'])
    def test_something_else_is_no_selection(self, text):
        with pytest.raises(Misuse, match="is not a selection"):
            from_json(text)

    @pytest.mark.parametrize(
        ("selection", "why"),
        [
            (Ids(()), "at least one id"),
            (Letters(DeadLetterFilter("shipping")), "about consumer shipping"),
            (Waiting(WaitingFilter("shipping")), "about consumer shipping"),
            (Offsets(P0, 5, 4), "no offsets from 5 to 4"),
            (Times(P0, 2.0, 2.0), "begins before it ends"),
            (None, "select its messages"),
        ],
    )
    def test_what_selects_nothing_is_refused(self, selection, why):
        async def scenario() -> None:
            async with memory_world() as world:
                with pytest.raises(Misuse, match=why):
                    await (await Service(world).open()).run(selection)
                assert await acts(world) == []

        asyncio.run(scenario())

    @in_world
    async def test_a_topic_needs_a_reader(self, world):
        service = await Service(world).open()

        with pytest.raises(Misuse, match="reader"):
            await Replay(service.consumer, world.database, Offsets(P0, 0, 1), actor="ann").run()
