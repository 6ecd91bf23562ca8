"""The rules of a consumer group, as its coordinator applies them.

               a member joins, leaves or misses heartbeats
        STABLE ─────────────────────────────────────────▶ REBALANCING
           ▲                                                   │
           └───── every member has given up what it had ───────┘

Rebalances are eager: each member gives up all of its partitions, and may commit
until it has.  A member that misses heartbeats, or takes too long to give up, is
removed from the group; from then on its commits are refused.

These are rules only, without a clock and without storage: a broker stores groups
itself, and calls `Group.advance` in the transaction of every other call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from semel.errors import Fenced, Misuse
from semel.message import Partition


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a group waits for a member."""

    session_seconds: float = 3.0
    """A member without a heartbeat for this long counts as dead."""

    rebalance_seconds: float = 60.0
    """A member that has not given up its partitions after this long is removed."""


@dataclass(slots=True)
class GroupMember:
    """One member of a group."""

    topics: tuple[str, ...]
    heard_at: float
    owned: frozenset[Partition] = frozenset()
    is_ready: bool = False
    """It has given up its partitions, and waits for the next generation."""


@dataclass(slots=True)
class Group:
    """Members, generation and committed offsets of one group."""

    name: str
    generation: int = 0
    is_rebalancing: bool = False
    rebalance_until: float = 0.0
    members: dict[str, GroupMember] = field(default_factory=dict)
    """By name, in the order in which they joined."""

    committed: dict[Partition, int] = field(default_factory=dict)
    """The next offset to read of each partition."""

    rewinds: dict[Partition, int] = field(default_factory=dict)
    """Offsets that the next generation starts with, in place of the committed ones."""

    def join(self, name: str, topics: Iterable[str], now: float, patience: Patience) -> None:
        """Add a member; it gets partitions with the next generation."""
        self.rebalance(now, patience)
        self.members[name] = GroupMember(tuple(topics), now, is_ready=True)

    def leave(self, name: str, now: float, patience: Patience) -> None:
        """Remove a member; the others share its partitions."""
        if self.members.pop(name, None) is not None:
            self.rebalance(now, patience)

    def hear(self, names: Iterable[str], now: float) -> None:
        """Record heartbeats of members."""
        for name in names:
            if name in self.members:
                self.members[name].heard_at = now

    def give_up(self, name: str) -> None:
        """Take a member's partitions, after it has finished its work on them."""
        if self.is_rebalancing and name in self.members:
            self.members[name].owned = frozenset()
            self.members[name].is_ready = True

    def rebalance(self, now: float, patience: Patience) -> None:
        """Ask every member for its partitions, unless a rebalance is running."""
        if self.is_rebalancing:
            return
        self.is_rebalancing = True
        self.rebalance_until = now + patience.rebalance_seconds
        for member in self.members.values():
            member.is_ready = False

    def commit(self, name: str, offsets: Mapping[Partition, int]) -> None:
        """Move committed offsets, all of them or none.

        Raises:
            Fenced: one of the partitions is not the member's.
            Misuse: one of the offsets is negative.
        """
        owned = self.members[name].owned if name in self.members else frozenset()
        foreign = sorted(partition for partition in offsets if partition not in owned)
        if foreign:
            raise Fenced(
                f"group {self.name}: {', '.join(map(str, foreign))} is no longer {name}'s; "
                f"nothing was committed, and its owner gets the records again"
            )
        for partition, offset in offsets.items():
            if offset < 0:
                raise Misuse(f"{partition}: an offset must be at least 0, got {offset}")
        self.committed.update(offsets)

    def overdue(self, now: float, patience: Patience) -> list[str]:
        """List the members whose time has run out."""
        is_late = self.is_rebalancing and now >= self.rebalance_until
        return [
            name
            for name, member in self.members.items()
            if now - member.heard_at >= patience.session_seconds
            or (is_late and not member.is_ready)
        ]

    def advance(self, now: float, topics: Mapping[str, int], patience: Patience) -> None:
        """Remove overdue members, and begin a generation if all members are ready."""
        for name in self.overdue(now, patience):
            self.leave(name, now, patience)
        if self.is_rebalancing and all(member.is_ready for member in self.members.values()):
            self.is_rebalancing = False
            self.generation += 1
            self.committed.update(self.rewinds)
            self.rewinds.clear()
            shares = assign({n: m.topics for n, m in self.members.items()}, topics)
            for name, member in self.members.items():
                member.owned = shares[name]
                member.is_ready = False


def assign(
    members: Mapping[str, Sequence[str]], topics: Mapping[str, int]
) -> Mapping[str, frozenset[Partition]]:
    """Share the partitions of each topic among its subscribers, in contiguous ranges.

    *members* maps names to topics, *topics* names to numbers of partitions.
    """
    shares: dict[str, set[Partition]] = {name: set() for name in members}
    for topic, partitions in topics.items():
        takers = [name for name, wanted in members.items() if topic in wanted]
        for number in range(partitions if takers else 0):
            taker = takers[number * len(takers) // partitions]
            shares[taker].add(Partition(topic, number))
    return {name: frozenset(share) for name, share in shares.items()}
