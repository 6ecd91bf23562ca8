"""Dead letters that a person must have looked at before they are handled again."""

from __future__ import annotations

from typing import Final

from semel.messaging.acts import NotPossible
from semel.messaging.database import Unit
from semel.messaging.deadletters import DeadLetter

LOOKED_AT: Final = "dlq.inspect"
"""The act by which the audit trail says that a person looked at a dead letter."""

SENT_BACK: Final = frozenset({"dlq.retry", "dlq.park", "inbox.retry", "park.release"})
"""The acts after which a message may fail anew."""


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
        if act in SENT_BACK:
            break
    raise NotPossible(
        letter.consumer,
        letter.message_id,
        "its policy wants a person to look at it first (dlq.manualReviewRequired), and nobody has "
        "since it failed last: semel dlq show",
    )
