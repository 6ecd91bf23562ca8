"""Ids that are made up here, for dead letters that cannot be filed under their own.

    conflict:<16 of the payload's hash>:<the id it came with>    the id has another payload
    unreadable:<topic>/<partition>/<offset>                      there was no id to be read

Nothing is ever handled under such an id.
"""

from __future__ import annotations

import re
from typing import Final

from semel.codec import UNREADABLE
from semel.message import digest_of
from semel.messaging.ids import LONGEST_ID_BYTES, stored_id

CONFLICT: Final = "conflict:"
HASH_DIGITS: Final = 16
CAME_AS_AT: Final = len(CONFLICT) + HASH_DIGITS + 1
"""Where in the id of a conflict the id begins that it came with."""

_MADE_UP: Final = re.compile(
    rf"{CONFLICT}[0-9a-f]{{{HASH_DIGITS}}}:.*|{UNREADABLE}.+/\d+/\d+", re.DOTALL
)


def is_made_up(message_id: str) -> bool:
    """Tell whether an id is one of these."""
    return _MADE_UP.fullmatch(message_id) is not None


def conflict_id(message_id: str, payload_hash: str) -> str:
    """Return what a payload is filed under that came with the id of another one."""
    return f"{CONFLICT}{payload_hash[:HASH_DIGITS]}:{came_as(message_id)}"


def came_as(message_id: str) -> str:
    """Return how conflicts name the id they came with; a hash of it where it is long."""
    kept = stored_id(message_id)
    if len(kept.encode()) <= LONGEST_ID_BYTES - CAME_AS_AT:
        return kept
    return f"sha256:{digest_of(message_id.encode())}"


def is_conflict_with(filed_as: str, message_id: str) -> bool:
    """Tell whether *filed_as* is the id of a conflict that came with *message_id*."""
    return filed_as.startswith(CONFLICT) and filed_as[CAME_AS_AT:] == came_as(message_id)
