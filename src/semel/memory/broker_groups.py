"""A consumer group, as its coordinator sees it.

               a member joins, leaves or is not heard of
        STABLE ─────────────────────────────────────────▶ REBALANCING
           ▲                                                   │
           └───── every member has given up what it had ───────┘

Rebalances are eager: each member gives up all of its partitions, and may commit
until it has.  Whoever takes too long, to be heard of or to give up, is put out of
the group; from then on its commits are refused.

Rules only, without a clock and without a place: a broker keeps groups wherever
it likes, and calls `Group.advance` in the transaction of every other call.
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
    """A member that is not heard of for so long is taken for dead."""

    rebalance_seconds: float = 60.0
    """A member that has not given up its partitions by then is put out."""


@dataclass(slots=True)
class Membership:
    """One member of a group."""

    topics: tuple[str, ...]
    heard_at: float
    owned: frozenset[Partition] = frozenset()
    is_ready: bool = False
    """It has given up what it had, and waits for the next generation."""


@dataclass(slots=True)
class Group:
    """Members, generation and committed offsets of one group."""

    name: str
    generation: int = 0
    is_rebalancing: bool = False
    rebalance_until: float = 0.0
    members: dict[str, Membership] = field(default_factory=dict)
    """By name, in the order in which they joined."""

    committed: dict[Partition, int] = field(default_factory=dict)
    """The next offset to read of each partition."""

    rewinds: dict[Partition, int] = field(default_factory=dict)
    """Committed offsets that the next generation starts with, whatever is committed until then."""

    def join(self, name: str, topics: Iterable[str], now: float, patience: Patience) -> None:
        """Let a member in; it gets partitions with the next generation."""
        self.rebalance(now, patience)
        self.members[name] = Membership(tuple(topics), now, is_ready=True)

    def leave(self, name: str, now: float, patience: Patience) -> None:
        """Put a member out; the others share what it had."""
        if self.members.pop(name, None) is not None:
            self.rebalance(now, patience)

    def hear(self, names: Iterable[str], now: float) -> None:
        """Note that members are alive."""
        for name in names:
            if name in self.members:
                self.members[name].heard_at = now

    def give_up(self, name: str) -> None:
        """Take a member's partitions: it has ended what it did with them."""
        if self.is_rebalancing and name in self.members:
            self.members[name].owned = frozenset()
            self.members[name].is_ready = True

    def rebalance(self, now: float, patience: Patience) -> None:
        """Ask every member for its partitions, unless that is under way."""
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
            Misuse: one of the offsets is none.
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
                raise Misuse(f"{partition}: {offset} is no offset")
        self.committed.update(offsets)

    def overdue(self, now: float, patience: Patience) -> list[str]:
        """List the members that are not waited for any longer."""
        is_late = self.is_rebalancing and now >= self.rebalance_until
        return [
            name
            for name, member in self.members.items()
            if now - member.heard_at >= patience.session_seconds
            or (is_late and not member.is_ready)
        ]

    def advance(self, now: float, topics: Mapping[str, int], patience: Patience) -> None:
        """Do what is due: put the overdue out, and begin a generation where all are ready."""
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
    """Share the partitions of each topic among its subscribers, neighbours together.

    *members* maps names to topics, *topics* names to numbers of partitions.
    """
    shares: dict[str, set[Partition]] = {name: set() for name in members}
    for topic, partitions in topics.items():
        takers = [name for name, wanted in members.items() if topic in wanted]
        for number in range(partitions if takers else 0):
            taker = takers[number * len(takers) // partitions]
            shares[taker].add(Partition(topic, number))
    return {name: frozenset(share) for name, share in shares.items()}
