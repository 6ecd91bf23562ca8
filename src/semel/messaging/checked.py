"""Settings that say what they mean: names are made enum members, numbers lie in their range."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from semel.errors import Misuse


def choose(settings: Any, **kinds: type[StrEnum]) -> None:
    """Make enum members of the fields that are named, on a frozen dataclass, too.

    Raises:
        Misuse: a value is none of its enum; the sentence names the field, the value and all
            that are allowed.
    """
    for name, kind in kinds.items():
        value = getattr(settings, name)
        try:
            object.__setattr__(settings, name, kind(value))
        except ValueError:
            allowed = ", ".join(repr(member.value) for member in kind)
            raise Misuse(f"{_where(settings, name)} is {value!r}; it may be {allowed}") from None


def count_from_one(settings: Any, *names: str) -> None:
    """Make sure that fields are whole numbers from 1 on.

    Raises:
        Misuse: one is not.
    """
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise Misuse(f"{_where(settings, name)} is {value!r}; it is a number from 1 on")


def lasting(settings: Any, *names: str) -> None:
    """Make sure that fields are seconds, and more than none.

    Raises:
        Misuse: one is not.
    """
    not_negative(settings, *names)
    for name in names:
        if not getattr(settings, name):
            raise Misuse(f"{_where(settings, name)} is 0; it is more than no seconds")


def not_negative(settings: Any, *names: str) -> None:
    """Make sure that fields are seconds, none at least.

    Raises:
        Misuse: one is not.
    """
    for name in names:
        value = getattr(settings, name)
        # Written so that what is no number at all ("nan") is refused, too.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and value >= 0):
            raise Misuse(f"{_where(settings, name)} is {value!r}; it is a number of seconds")


def _where(settings: Any, name: str) -> str:
    return f"{type(settings).__name__}.{name}"
