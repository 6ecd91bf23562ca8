"""One member of a consumer group of a memory broker.

    joined ──▶ assigned ──a rebalance──▶ revoking ──▶ joined
                  │                         ▲
                  └──not heard of, put out──┘

A task of its own keeps each member: it lets the group hear of it, calls the
listeners when partitions have to go, and takes over new ones.  It runs beside
whatever handles the records, as in aiokafka; a listener that wants to wait for
the handlers has to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from semel.errors import Fenced, Misuse
from semel.memory.broker_failures import Call
from semel.memory.broker_groups import Group, Membership
from semel.memory.broker_store import check_readable
from semel.message import Partition, Record
from semel.messaging.broker import Revoked

if TYPE_CHECKING:
    from semel.memory.broker import MemoryBroker


class MemorySubscription:
    """A `semel.messaging.broker.Subscription`; belongs to the event loop that it was made on."""

    def __init__(self, broker: MemoryBroker, group: str, topics: Sequence[str]) -> None:
        """Use `MemoryBroker.subscribe`, which also joins the group."""
        self._broker = broker
        self._group = group
        self._topics = tuple(topics)
        self._member = ""
        self._generation = 0
        self._positions: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._turn = 0
        self._listeners: list[Revoked] = []
        self._keeper: asyncio.Task[None] | None = None
        self._revoking: asyncio.Task[None] | None = None
        self._trouble: Exception | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"MemorySubscription({self._group!r}, {self._member!r}, {sorted(self.assignment)})"

    @property
    def group(self) -> str:
        """The consumer group."""
        return self._group

    @property
    def member(self) -> str:
        """The member's name; it gets another one when it was put out of the group."""
        return self._member

    @property
    def generation(self) -> int:
        """The generation of the group in which the partitions were assigned."""
        return self._generation

    @property
    def is_heard(self) -> bool:
        """It lives, and the group hears of it."""
        return self._keeper is not None and not self._keeper.done()

    @property
    def assignment(self) -> frozenset[Partition]:
        """The partitions that are this member's now."""
        return frozenset(self._positions)

    def on_revoked(self, listener: Revoked) -> None:
        """Call *listener* before partitions are given up; what it commits still counts.

        It is also called when they are lost: then its commits are `Fenced`.  Whatever else it
        raises is raised by the next `fetch`; the partitions go all the same.
        """
        self._listeners.append(listener)

    async def fetch(self, max_records: int, wait_seconds: float) -> Sequence[Record]:
        """Return the next records of partitions that are not paused, in order of offset each.

        Returns without records when partitions begin to be given up.

        Raises:
            NeedsOperator: the position is not in the log; nothing is passed over silently.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_seconds
        # Others get their turn, even where there always is a next record.
        await asyncio.sleep(0)
        self._raise_trouble()
        self._broker.failures.take(Call.FETCH).read()
        before = self._revoking
        while True:
            number = self._broker.bell.number
            found = self._take(max_records)
            left = deadline - loop.time()
            if found or left <= 0 or self._revoking not in (before, None):
                return found
            await self._broker.bell.wait(number, min(left, self._broker.tick_seconds))
            self._raise_trouble()

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        """Commit the next offset to read of each partition.

        Raises:
            Fenced: a partition is no longer this member's; nothing was committed.
        """
        await asyncio.sleep(0)
        lot = self._broker.failures.take(Call.COMMIT)
        lot.before()
        with self._broker.changing(self._group) as group:
            group.commit(self._member, offsets)
        lot.after()

    async def committed(self, partition: Partition) -> int:
        """Return the committed offset; the first one that exists where none was committed."""
        self._broker.failures.take(Call.LOOK_UP).read()
        return self._position(self._broker.store.peek(self._group), partition)

    async def end(self, partition: Partition) -> int:
        """Return the offset that the next record of the partition will have."""
        self._broker.failures.take(Call.LOOK_UP).read()
        return self._broker.store.bounds(partition)[1]

    def seek(self, partition: Partition, offset: int) -> None:
        """Fetch from *offset* on; nothing happens where the partition is no longer assigned."""
        if partition in self._positions:
            self._positions[partition] = offset
            self._broker.bell.ring()

    def pause(self, partition: Partition) -> None:
        """Leave the partition out of fetches, until it is resumed or assigned anew."""
        if partition in self._positions:
            self._paused.add(partition)

    def resume(self, partition: Partition) -> None:
        """Take a paused partition in again; nothing happens where it is no longer assigned."""
        self._paused.discard(partition)
        self._broker.bell.ring()

    async def close(self) -> None:
        """Call the listeners, and leave the group."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.is_heard:
            self._revoking = self._revoking or asyncio.create_task(self._revoke())
            await self._revoking
        await self._end_keeper()
        self._positions.clear()
        with self._broker.changing(self._group) as group:
            group.leave(self._member, self._broker.clock.monotonic(), self._broker.patience)
        self._broker.forget(self)
        self._raise_trouble()

    # What the broker calls.

    def enter(self) -> None:
        """Join the group, and be kept in it."""
        self._join()
        self.revive()

    def revive(self) -> None:
        """Let the group hear of the member (again); a no-op where it does."""
        if not self._is_closed and not self.is_heard:
            self._sync()
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    def kill(self) -> None:
        """Let nobody hear of the member any more, in the middle of whatever it does."""
        for task in (self._keeper, self._revoking):
            if task is not None:
                task.cancel()
        self._keeper = self._revoking = None

    # The keeper.

    async def _end_keeper(self) -> None:
        keeper = self._keeper
        self.kill()
        if keeper is not None:
            await asyncio.wait((keeper,))

    async def _keep(self) -> None:
        while True:
            number = self._broker.bell.number
            try:
                self._sync()
            except Exception as error:  # noqa: BLE001  the next fetch raises it
                self._trouble = error
            await self._broker.bell.wait(number, self._broker.tick_seconds)

    def _sync(self) -> None:
        """Be heard, look what became of the group, and follow."""
        group = self._broker.hear(self)
        me = group.members.get(self._member)
        if self._revoking is not None or self._is_closed:
            return
        if me is None or (group.is_rebalancing and not me.is_ready):
            if self._positions:
                self._revoking = asyncio.get_running_loop().create_task(self._revoke())
            else:
                self._give_up()
        elif not group.is_rebalancing and group.generation != self._generation:
            self._take_over(group, me)

    async def _revoke(self) -> None:
        try:
            await self._tell()
            if not self._is_closed:
                self._give_up()
        except Exception as error:  # noqa: BLE001  the next fetch raises it
            self._trouble = error
        finally:
            # One that was killed may have been revived before this runs.
            if self._revoking is asyncio.current_task():
                self._revoking = None

    async def _tell(self) -> None:
        """Wait for the listeners."""
        partitions = self.assignment
        for listener in self._listeners if partitions else ():
            try:
                await listener(partitions)
            except Fenced as error:
                # The partitions were lost before it could commit, which it cannot change.
                if self._member in self._broker.store.peek(self._group).members:
                    self._trouble = error
            except Exception as error:  # noqa: BLE001  the next fetch raises it
                self._trouble = error

    def _give_up(self) -> None:
        """Let the partitions go; one that was put out of the group joins it anew."""
        self._positions.clear()
        self._paused.clear()
        if self._member in self._broker.store.peek(self._group).members:
            with self._broker.changing(self._group) as group:
                group.give_up(self._member)
        else:
            self._join()

    def _join(self) -> None:
        self._member = self._broker.name_member(self._group)
        with self._broker.changing(self._group) as group:
            now = self._broker.clock.monotonic()
            group.join(self._member, self._topics, now, self._broker.patience)

    def _take_over(self, group: Group, me: Membership) -> None:
        self._generation = group.generation
        self._positions = {p: self._position(group, p) for p in sorted(me.owned)}
        self._paused.clear()
        self._broker.bell.ring()

    def _position(self, group: Group, partition: Partition) -> int:
        start, _ = self._broker.store.bounds(partition)
        return group.committed.get(partition, start)

    def _take(self, max_records: int) -> list[Record]:
        """Take what is there, from another partition first each time."""
        if self._is_closed:
            raise Misuse(f"group {self._group}: the subscription is closed and fetches nothing")
        me = self._broker.store.peek(self._group).members.get(self._member)
        if me is None or self._revoking is not None:
            return []
        mine = [p for p in self._positions if p in me.owned and p not in self._paused]
        self._turn += 1
        found: list[Record] = []
        for number in range(len(mine)):
            partition = mine[(number + self._turn) % len(mine)]
            position = self._positions[partition]
            start, end = self._broker.store.bounds(partition)
            if not start <= position <= end and found:
                break  # what was taken is returned; a later turn begins here and raises
            check_readable(partition, start, end, position)
            limit = max_records - len(found)
            records = self._broker.store.read(partition, position, end - 1, limit)
            if records:
                self._positions[partition] = records[-1].at.offset + 1
                found += records
        return found

    def _raise_trouble(self) -> None:
        trouble, self._trouble = self._trouble, None
        if trouble is not None:
            raise trouble
