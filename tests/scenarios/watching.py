"""What a runner does to its database and its broker, in order; and databases that fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from semel.errors import Fenced
from semel.message import Partition, Record


class Watched:
    """Whatever *inside* is, with some of its calls written down."""

    def __init__(self, inside: Any, say: Callable[[str], None], calls: Collection[str]) -> None:
        self.inside = inside
        self._say = say
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name in self._calls:
            self._say(name)
        return getattr(self.inside, name)


class WatchedUnit:
    """A transaction whose claims are written down."""

    def __init__(self, inside: Any, say: Callable[[str], None]) -> None:
        self._inside = inside
        self.claims = Watched(
            inside.claims, lambda _: say("claim"), ("try_claim", "try_claim_many")
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)


class WatchedDatabase:
    """A database whose transactions that claim something are written down."""

    def __init__(self, inside: Any, said: list[str]) -> None:
        self.inside = inside
        self.classification = inside.classification
        self.said = said
        self.before_commit: list[Exception] = []
        """Raised, one after the other, in place of the commits of transactions that claim."""

        self.after_commit: list[Exception] = []
        """Raised, one after the other, behind such commits."""

    @asynccontextmanager
    async def begin(self) -> AsyncIterator[WatchedUnit]:
        claimed: list[str] = []

        def say(word: str) -> None:
            if not claimed:
                self.said.append("begin")
            claimed.append(word)
            self.said.append(word)

        async with self.inside.begin() as unit:
            yield WatchedUnit(unit, say)
            if claimed and self.before_commit:
                raise self.before_commit.pop(0)
        if claimed:
            self.said.append("commit")
            if self.after_commit:
                raise self.after_commit.pop(0)


class WatchedSubscription:
    """A member whose fetches and commits are written down."""

    def __init__(self, inside: Any, said: list[str]) -> None:
        self.inside = inside
        self.said = said

    async def fetch(self, max_records: int, wait_seconds: float) -> Sequence[Record]:
        found: Sequence[Record] = await self.inside.fetch(max_records, wait_seconds)
        if found:
            self.said.append("consume")
        return found

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        self.said.append("broker commit")
        try:
            await self.inside.commit(offsets)
        except Fenced:
            self.said.append("refused")
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)
