"""The turns of a process: work side by side, one suspect alone, on any loop and thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from semel.errors import Misuse
from semel.messaging.receive.crash import Turns


class Room:
    """What is inside at once, and what happened."""

    def __init__(self, patience_seconds: float = 10.0) -> None:
        self.turns = Turns(patience_seconds)
        self.log: list[str] = []
        self.inside: set[str] = set()
        self.met: set[frozenset[str]] = set()

    async def work(self, name: str, until: asyncio.Event | None = None) -> None:
        async with self.turns.beside_others():
            await self._stay(name, until)

    async def suspect(self, name: str, until: asyncio.Event | None = None) -> None:
        async with self.turns.alone():
            await self._stay(name, until)

    async def _stay(self, name: str, until: asyncio.Event | None) -> None:
        self.log.append(name)
        self.inside.add(name)
        self.met.add(frozenset(self.inside))
        await (asyncio.sleep(0.002) if until is None else until.wait())
        self.met.add(frozenset(self.inside))
        self.inside.discard(name)


def running(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def soon() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_work_runs_side_by_side_and_two_suspects_never_do():
    async def scenario() -> None:
        room = Room()
        names = [f"w{n}" for n in range(20)], [f"s{n}" for n in range(5)]
        await asyncio.gather(
            *(room.work(name) for name in names[0]), *(room.suspect(name) for name in names[1])
        )
        await asyncio.gather(*(room.work(f"later{n}") for n in range(3)))

        with_suspects = {met for met in room.met if any(name[0] == "s" for name in met)}
        assert with_suspects == {frozenset({name}) for name in names[1]}
        assert max(len(met) for met in room.met) > 1
        assert len(room.log) == 28

    running(scenario)


def test_a_suspect_waits_for_what_runs_and_holds_back_what_comes():
    async def scenario() -> None:
        room, done, tried = Room(), asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(room.work("first", done))
        await soon()
        suspect = asyncio.create_task(room.suspect("suspect", tried))
        await soon()
        later = asyncio.create_task(room.work("later"))
        await soon()
        waiting = list(room.log)
        done.set()
        await first
        await soon()
        alone = list(room.log)
        tried.set()
        await asyncio.gather(suspect, later)

        assert (waiting, alone) == (["first"], ["first", "suspect"])
        assert room.log == ["first", "suspect", "later"]

    running(scenario)


def test_a_suspect_that_is_cancelled_while_it_waits_holds_nobody_back():
    async def scenario() -> None:
        room, done = Room(), asyncio.Event()
        first = asyncio.create_task(room.work("first", done))
        await soon()
        suspects = [asyncio.create_task(room.suspect(f"s{n}")) for n in range(2)]
        await soon()
        for suspect in suspects:
            suspect.cancel()
        await asyncio.wait(suspects)
        await room.work("second")
        done.set()
        await first
        await room.suspect("third")

        assert room.log == ["first", "second", "third"]

    running(scenario)


def test_a_suspect_waits_for_new_work_although_other_work_had_been_stuck():
    async def scenario() -> None:
        room, gate, tried = Room(patience_seconds=0.05), asyncio.Event(), asyncio.Event()
        stuck = asyncio.create_task(room.work("stuck", gate))
        await soon()
        await room.suspect("first")
        new = asyncio.create_task(room.work("new", tried))
        await soon()
        gate.set()
        await stuck
        suspect = asyncio.create_task(room.suspect("second"))
        await soon()
        waiting = list(room.log)
        tried.set()
        await asyncio.gather(new, suspect)

        assert waiting == ["stuck", "first", "new"]
        assert frozenset({"first", "stuck"}) in room.met
        assert frozenset({"second"}) in room.met
        assert frozenset({"second", "new"}) not in room.met

    running(scenario)


def test_a_suspect_within_a_suspect_is_refused_and_holds_nobody_back():
    async def scenario() -> None:
        room = Room()
        async with room.turns.alone():
            with pytest.raises(Misuse):
                await room.suspect("within")
        await room.work("work")
        await room.suspect("later")

        assert room.log == ["work", "later"]

    running(scenario)


def test_a_suspect_in_a_task_of_a_suspect_is_refused_and_later_on_is_not():
    async def scenario() -> None:
        room, over = Room(), asyncio.Event()

        async def later() -> None:
            await over.wait()
            await room.suspect("later")

        async with room.turns.alone():
            within = asyncio.create_task(room.suspect("within"))
            left = asyncio.create_task(later())
            with pytest.raises(Misuse):
                await within
        over.set()
        await left

        assert room.log == ["later"]

    running(scenario)


def test_work_and_suspects_that_need_each_other_get_through_after_a_while():
    async def scenario() -> None:
        room, done, tried = Room(patience_seconds=0.05), asyncio.Event(), asyncio.Event()
        endless = asyncio.create_task(room.work("endless", done))
        await soon()
        suspect = asyncio.create_task(room.suspect("suspect", tried))
        await asyncio.sleep(0.02)
        await room.work("held back")
        beside = [*room.log]
        tried.set()
        await suspect
        # What does not end is not waited for again.
        room.turns._patience_seconds = 60.0
        await asyncio.wait_for(room.suspect("next"), 5)
        done.set()
        await endless

        assert sorted(beside) == ["endless", "held back", "suspect"]
        assert room.log[-1] == "next"

    running(scenario)


def test_loops_of_several_threads_share_the_turns():
    room = Room()

    def loop(name: str) -> None:
        async def scenario() -> None:
            for n in range(20):
                await room.suspect(f"s-{name}-{n}")
                await asyncio.gather(*(room.work(f"w-{name}-{n}-{m}") for m in range(3)))

        running(scenario)

    threads = [threading.Thread(target=loop, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    suspected = {met for met in room.met if any(name[0] == "s" for name in met)}
    assert len(room.log) == 3 * 20 * 4
    assert all(len(met) == 1 for met in suspected)


def test_the_next_suspect_holds_work_back_again_that_the_one_before_let_pass():
    async def scenario() -> None:
        turns = Turns(patience_seconds=0.3)
        began = asyncio.Event()

        async def work() -> None:
            async with turns.beside_others():
                began.set()

        async with turns.alone():
            await work()
        began.clear()
        async with turns.alone():
            waits = asyncio.create_task(work())
            await soon()
            is_held_back = not began.is_set()
        await waits

        assert is_held_back

    running(scenario)
