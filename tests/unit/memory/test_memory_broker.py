"""What the memory broker has beyond the contract: levers and a look at everything."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from semel.errors import Misuse, NeedsOperator
from semel.memory.broker import MemoryBroker, partition_of
from semel.message import Coordinates
from tests.stores.world import asynchronous
from tests.unit.memory.filled_broker import P0, P1, filled, values


@asynchronous
async def test_redelivery_on_demand_goes_back_whatever_is_committed_on_the_way():
    broker = filled("a", "b", "c")
    member = await broker.subscribe("g", ["t"])
    await member.fetch(3, 0)

    async def commit(partitions):
        await member.commit({P0: 3})

    member.on_revoked(commit)
    broker.redeliver("g", P0, 1)
    await broker.settled("g")

    assert values(await member.fetch(3, 0)) == ["b", "c"]
    assert broker.committed("g") == {P0: 1}


@asynchronous
async def test_compaction_keeps_the_last_record_of_each_key_with_its_offset():
    broker = MemoryBroker({"t": 1})
    for key, value in [(b"a", b"1"), (b"b", b"2"), (None, b"3"), (b"a", b"4"), (None, b"5")]:
        broker.put("t", value, key)

    broker.compact("t")

    assert [(r.at.offset, r.value) for r in broker.records("t")] == [
        (1, b"2"),
        (2, b"3"),
        (3, b"4"),
        (4, b"5"),
    ]
    member = await broker.subscribe("g", ["t"])
    assert [record.at.offset for record in await member.fetch(10, 0)] == [1, 2, 3, 4]
    assert await member.end(P0) == 5


@asynchronous
async def test_a_busy_partition_does_not_keep_the_others_waiting():
    broker = filled(partitions=2)
    for number in range(100):
        broker.put("t", b"busy", partition=0)
        if number < 3:
            broker.put("t", b"quiet", partition=1)
    member = await broker.subscribe("g", ["t"])

    found = [record for _ in range(6) for record in await member.fetch(1, 0)]

    assert sum(record.at.place == P1 for record in found) == 3


@asynchronous
async def test_a_partition_whose_records_are_gone_loses_nothing_of_the_others():
    broker = filled(partitions=2)
    for partition in (0, 1):
        for value in (b"a", b"b"):
            broker.put("t", value, partition=partition)
    member = await broker.subscribe("g", ["t"])
    broker.trim(P0, 1)

    found, refused = [], 0
    for _ in range(4):
        try:
            found += await member.fetch(10, 0)
        except NeedsOperator as error:
            assert "offset 0 was requested and the log starts at 1" in str(error)  # noqa: PT017
            refused += 1

    assert [record.at for record in found] == [Coordinates("t", 1, 0), Coordinates("t", 1, 1)]
    assert refused


@asynchronous
async def test_an_offset_beyond_the_end_is_refused():
    broker = filled("a")
    member = await broker.subscribe("g", ["t"])

    member.seek(P0, 5)

    with pytest.raises(NeedsOperator, match="the log ends at 1"):
        await member.fetch(1, 0)


@asynchronous
async def test_whatever_is_closed_is_used_no_more():
    broker = filled()
    member, publisher = await broker.subscribe("g", ["t"]), broker.publisher()
    await broker.close()
    await publisher.close()

    with pytest.raises(Misuse):
        await member.fetch(1, 0)
    with pytest.raises(Misuse):
        await publisher.publish([])
    assert len(asyncio.all_tasks()) == 1


@asynchronous
async def test_a_test_can_look_at_lag_and_commits():
    broker = filled("a", "b", "c")
    broker.skip(P0, 4)
    member = await broker.subscribe("g", ["t"])
    await member.commit({P0: 1})

    assert broker.lag("g", "t") == 2
    assert broker.lag("other", "t") == 3
    assert broker.committed("g") == {P0: 1}


def test_keys_go_to_the_same_partition_in_every_process():
    found = [partition_of("t", f"key-{number}".encode(), 8).number for number in range(8)]

    assert found == [4, 2, 0, 6, 5, 3, 1, 7]


def test_a_broker_stays_in_its_process():
    with pytest.raises(Misuse, match="FileBroker"):
        pickle.dumps(MemoryBroker())
