"""What a database refuses outside of any message: loud in the log, and asked again."""

from __future__ import annotations

import logging

from semel.messaging.database import Database
from semel.messaging.reasons import reason_of

log = logging.getLogger("semel.messaging")


def is_refusal(database: Database, consumer: str, error: Exception) -> bool:
    """Tell whether *error* is the database's own, and log it; False where it is something else.

    A failover, a migration or a missing right passes, and a service that had ended would not
    come back by itself.  It may be a bug as well, so that it is told as one, every time.
    """
    if not database.classification.is_of_database(error):
        return False
    why = reason_of(error)
    statement = getattr(error, "statement", None)
    log.error(
        "the database refuses, and is asked again: %s",
        why,
        extra={"consumer": consumer, "why": why, "statement": statement},
    )
    return True
