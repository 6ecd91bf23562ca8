"""What is said aloud, once it is durable: that versions of a key did not come."""

from __future__ import annotations

from collections.abc import Iterable

from semel.events import EVENTS, GapCrossed
from semel.messaging.outcome import Handled, Outcome


def alert(outcomes: Iterable[Outcome]) -> None:
    """Tell of the gaps that messages were applied across; call it after the commit.

    A crash between the two leaves a gap untold, and listed all the same.
    """
    for outcome in outcomes:
        if isinstance(outcome, Handled) and (gap := outcome.gap) is not None:
            EVENTS.emit(GapCrossed(gap.consumer, gap.consumer, gap.key, gap.expected, gap.found))
