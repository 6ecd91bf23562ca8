"""What must hold before a message is handled again: somebody looked, and not too often."""

from __future__ import annotations

from typing import Final

from semel.messaging.acts import NotPossible
from semel.messaging.database import Unit
from semel.messaging.deadletters import DeadLetter

LOOKED_AT: Final = "dlq.inspect"
"""The act by which the audit trail says that a person looked at a dead letter."""

SENT_BACK: Final = frozenset({"dlq.retry", "inbox.retry", "park.release"})
"""The acts by which a message is handled again; the loop guard counts them."""

LEFT_LETTERS: Final = SENT_BACK | {"dlq.park"}
"""The acts after which a dead letter is another failure than the one that somebody saw."""


async def times_sent_back(unit: Unit, consumer: str, message_id: str) -> int:
    """Count how often a message was sent back, by replays and by hand together."""
    entries = await unit.audit.about(consumer, message_id)
    return sum(entry.act.act in SENT_BACK for entry in entries)


async def need_not_too_often(unit: Unit, consumer: str, message_id: str, at_most: int) -> int:
    """Return how often a message was sent back; the loop guard.

    Raises:
        NotPossible: that was *at_most* times, or more.
    """
    times = await times_sent_back(unit, consumer, message_id)
    if times < at_most:
        return times
    raise NotPossible(
        consumer,
        message_id,
        f"it was sent back {times} times and failed every time; find out why, then allow more, "
        f"or park it",
    )


async def need_review(unit: Unit, letter: DeadLetter) -> None:
    """See that a person looked at a dead letter since it failed last, if its policy wants that.

    Raises:
        NotPossible: it does, and nobody has.
    """
    if not letter.needs_review:
        return
    acts = [e.act.act for e in await unit.audit.about(letter.consumer, letter.message_id)]
    # Whoever looked before it was sent back saw another failure.
    for act in reversed(acts):
        if act == LOOKED_AT:
            return
        if act in LEFT_LETTERS:
            break
    raise NotPossible(
        letter.consumer,
        letter.message_id,
        "its policy wants a person to look at it first (dlq.manualReviewRequired), and nobody has "
        "since it failed last: semel dlq show",
    )
