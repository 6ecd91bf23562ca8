"""Engines that are broken on purpose, so that a jury is known to convict."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pytest

Invariant = TypeVar("Invariant")

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant(Generic[Invariant]):
    """A broken engine, and which invariants may convict it."""

    name: str
    patch: Patch
    convicted_by: frozenset[Invariant]


def mutants(found: Iterable[tuple[Any, ...]]) -> list[Mutant[Any]]:
    """Name each patch by its function; the invariants stand behind it."""
    return [Mutant(patch.__name__, patch, frozenset(by)) for patch, *by in found]
