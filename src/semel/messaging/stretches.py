"""Neighbouring offsets: adding them up, and cutting them where a broker has records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from semel.message import Partition
from semel.messaging.broker import Reader

PAGE: Final = 1000


@dataclass(frozen=True, slots=True, order=True)
class Stretch:
    """Neighbouring offsets, both ends included."""

    first: int
    last: int

    @property
    def length(self) -> int:
        """How many they are."""
        return self.last - self.first + 1


def offsets_in(stretches: Iterable[Stretch]) -> Iterator[int]:
    """Return the offsets of several stretches, one by one."""
    for stretch in stretches:
        yield from range(stretch.first, stretch.last + 1)


def add(stretches: list[Stretch], new: Stretch) -> None:
    """Append a stretch, or make the last one longer where *new* continues it."""
    if stretches and stretches[-1].last == new.first - 1:
        stretches[-1] = Stretch(stretches[-1].first, new.last)
    else:
        stretches.append(new)


async def pieces(
    reader: Reader, partition: Partition, stretch: Stretch, start: int
) -> list[tuple[Stretch, bool | None]]:
    """Cut a stretch into what has records, what has none, and what nobody can say."""
    found: list[tuple[Stretch, bool | None]] = []
    if stretch.first < start:
        gone = Stretch(stretch.first, min(stretch.last, start - 1))
        found.append((gone, None))
    for first in range(max(stretch.first, start), stretch.last + 1, PAGE):
        last = min(first + PAGE - 1, stretch.last)
        have = {record.at.offset for record in await reader.read(partition, first, last)}
        for offset in range(first, last + 1):
            found.append((Stretch(offset, offset), offset in have))
    return found
