"""How times, counts and lists read to a person."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping

_UNITS = (("d", 86400), ("h", 3600), ("min", 60))


def lasting(seconds: float | None) -> str:
    """Say how long: ``340 ms``, ``12 s``, ``5 min 12 s``, ``3 h 5 min``."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{max(seconds, 0) * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    left = round(seconds)
    if left < 60:
        return f"{left} s"
    for (unit, size), (smaller, part) in zip(_UNITS, (*_UNITS[1:], ("s", 1)), strict=True):
        if left >= size:
            rest = left % size // part
            return f"{left // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    raise AssertionError(seconds)


def at(seconds: float | None) -> str:
    """Say when, in UTC, to the second."""
    if seconds is None:
        return "-"
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def counted(number: int, singular: str, plural: str | None = None) -> str:
    """Say how many of what: ``1 row``, ``3,000 rows``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def some_of(shown: int, total: int, singular: str, place: str) -> str:
    """Say how many of what there are, and how many are shown: ``50 of 3,000 rows in …``."""
    first = f"{shown:,} of " if total > shown else ""
    return f"{first}{counted(total, singular)} in {place}"


def pairs(values: Mapping[str, object]) -> str:
    """Put names and values on one line."""
    shown = (f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in values.items())
    return ", ".join(shown) or "-"


def listed(names: Iterable[str], most: int = 5) -> str:
    """Name some of many."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return (", ".join(every[:most]) or "-") + more
