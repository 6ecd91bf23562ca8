"""Cycles as operators write them."""

from __future__ import annotations

from semel.errors import Misuse
from semel.pipeline.txn import CycleId, Scope


def cycle_of(scope: Scope, label: str) -> CycleId:
    """Read ``g1.b42``.

    Raises:
        Misuse: it is not a cycle's label.
    """
    try:
        return CycleId.parse(scope, label)
    except ValueError as error:
        raise Misuse(f"--cycle {label}: write it as g1.b42, as `semel history` does") from error
