"""The file broker is shared by real processes, of which some are killed."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from contextlib import contextmanager

import pytest

from semel.memory.broker import FileBroker
from semel.memory.broker_groups import Patience
from semel.message import Partition
from semel.messaging.receive.broker import Outgoing
from tests.stores.world import asynchronous, run

PATIENCE = Patience(session_seconds=1.0)
DEADLINE_SECONDS = 30

PREAMBLE = """
import asyncio, sys
from semel.errors import Fenced
from semel.memory.broker import Patience
from semel.messaging.receive.broker import Outgoing
from semel.memory.broker import FileBroker

broker = FileBroker(sys.argv[1], patience=Patience(session_seconds=1.0))
"""

CONSUMER = (
    PREAMBLE
    + """
async def main():
    member = await broker.subscribe("g", ["t"])
    while True:
        found = await member.fetch(5, 0.1)
        for record in found:
            print(record.value.decode(), flush=True)
        try:
            await member.commit({r.at.place: r.at.offset + 1 for r in found})
        except Fenced:
            pass

asyncio.run(main())
"""
)

SLEEPER = (
    PREAMBLE
    + """
async def main():
    member = await broker.subscribe("g", ["t"])
    while not (found := await member.fetch(1, 0.1)):
        pass
    print(found[0].value.decode(), flush=True)
    sys.stdin.readline()
    try:
        await member.commit({found[0].at.place: 1})
    except Fenced:
        print("fenced", flush=True)

asyncio.run(main())
"""
)

PUBLISHER = (
    PREAMBLE
    + """
async def main():
    publisher = broker.publisher()
    for number in range(50):
        answers = await publisher.publish([Outgoing("t", b"v", b"k")])
        assert answers == [None], answers

broker.create_topic("t", 1)
asyncio.run(main())
"""
)


@contextmanager
def processes(code, path, count):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def publish(broker, values):
    answers = await broker.publisher().publish(
        [Outgoing("t", v.encode(), v.encode()) for v in values]
    )
    assert set(answers) == {None}


async def until(met):
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not met():
            await asyncio.sleep(0.02)


@pytest.mark.kill
def test_the_records_of_a_killed_process_go_to_the_living(tmp_path):
    broker = FileBroker(tmp_path / "broker", {"t": 6}, patience=PATIENCE)
    before, after = [{f"{when}{n}" for n in range(60)} for when in ("before", "after")]

    def shares():
        return [len(member.owned) for member in broker.store.peek("g").members.values()]

    with processes(CONSUMER, broker.path, 3) as (killed, *living):
        run(until(lambda: shares() == [2, 2, 2]))
        run(publish(broker, before))
        run(until(lambda: broker.lag("g", "t") < 60))
        killed.kill()
        run(publish(broker, after))
        run(until(lambda: broker.lag("g", "t") == 0))
        for process in living:
            process.kill()
        handled = [line for p in (killed, *living) for line in p.communicate()[0].split()]

    assert set(handled) == before | after


@pytest.mark.kill
def test_a_process_that_slept_too_long_is_fenced(tmp_path):
    broker = FileBroker(tmp_path / "broker", {"t": 1}, patience=PATIENCE)
    broker.put("t", b"a")

    async def take_over():
        member = await broker.subscribe("g", ["t"])
        found = await member.fetch(1, DEADLINE_SECONDS)
        sleeper.stdin.write("\n")
        sleeper.stdin.flush()
        answer = await asyncio.to_thread(sleeper.stdout.readline)
        committed = await member.committed(Partition("t", 0))
        await member.close()
        return [record.value for record in found], answer, committed

    with processes(SLEEPER, broker.path, 1) as (sleeper,):
        assert sleeper.stdout.readline() == "a\n"
        assert run(take_over()) == ([b"a"], "fenced\n", 0)


def test_processes_that_begin_at_once_append_to_one_log(tmp_path):
    path = tmp_path / "broker"

    with processes(PUBLISHER, path, 4) as started:
        codes = [process.wait(DEADLINE_SECONDS) for process in started]

    assert codes == [0, 0, 0, 0]
    offsets = [record.at.offset for record in FileBroker(path).records("t")]
    assert offsets == list(range(200))


@asynchronous
async def test_what_was_appended_and_committed_is_there_when_the_file_is_opened_again(tmp_path):
    path = tmp_path / "broker"
    broker = FileBroker(path, {"t": 1})
    broker.put("t", b"a", b"k", {"id": b"\xff"})
    broker.put("t", None)
    member = await broker.subscribe("g", ["t"])
    await member.commit({Partition("t", 0): 1})
    before = broker.records("t")
    await broker.close()

    again = FileBroker(path, {"t": 1})

    assert again.records("t") == before
    assert again.committed("g") == {Partition("t", 0): 1}
    successor = await again.subscribe("g", ["t"])
    assert [record.value for record in await successor.fetch(10, 0)] == [None]
    await again.close()


@asynchronous
async def test_two_objects_on_one_file_behave_as_two_processes(tmp_path):
    left = FileBroker(tmp_path / "broker", {"t": 2}, patience=PATIENCE)
    right = pickle.loads(pickle.dumps(left))
    members = [await left.subscribe("g", ["t"]), await right.subscribe("g", ["t"])]
    await until(lambda: all(len(member.assignment) == 1 for member in members))

    waiting = [asyncio.create_task(member.fetch(1, DEADLINE_SECONDS)) for member in members]
    for number in (0, 1):
        right.put("t", b"a", partition=number)
    found = [await task for task in waiting]

    assert sorted(r.at.partition for records in found for r in records) == [0, 1]
    await left.close()
    await until(lambda: len(members[1].assignment) == 2)
    await right.close()
