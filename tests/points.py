"""The crash points of each half."""

from __future__ import annotations

from typing import Final

from semel.crashpoints import CrashPoint

MESSAGING_POINTS: Final = frozenset(
    point
    for point in CrashPoint
    if point.step.split("_")[0]
    in {
        *("member", "careful", "claim", "handle", "message", "leased", "failure"),
        *("retry", "outcomes", "settle", "relay", "act", "replay"),
    }
)
"""The crash points of the half that handles one message at a time."""

PIPELINE_POINTS: Final = frozenset(CrashPoint) - MESSAGING_POINTS
"""The crash points of the half that handles a batch at a time."""
