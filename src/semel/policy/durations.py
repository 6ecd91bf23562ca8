"""Durations as a policy file writes them: ``7d``, ``36h``, ``90s``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

# Seven digits: the longest, of weeks, is still a duration that Python can hold.
PATTERN: Final = r"^[1-9][0-9]{0,6}(ms|s|m|h|d|w)$"

_UNITS: Final[Mapping[str, timedelta]] = {
    "w": timedelta(weeks=1),
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}


def parse_duration(text: str) -> timedelta | None:
    """Read a duration; None where *text* is none."""
    found = re.fullmatch(PATTERN, text)
    if found is None:
        return None
    unit = found[1]
    return int(text.removesuffix(unit)) * _UNITS[unit]


def duration_words(duration: timedelta) -> str:
    """Write a duration with the largest unit that needs no fraction, weeks left out."""
    for unit, length in _UNITS.items():
        if unit != "w" and duration >= length and not duration % length:
            return f"{duration // length}{unit}"
    return f"{duration / timedelta(milliseconds=1):g}ms"
