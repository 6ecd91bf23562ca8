"""Revisions: what people changed in a message, with what it was before (B-16).

Number 0 is the original and never changes; each fix adds the next number.  With
*keep-id* the revision is handled under the message's own id; with *new-id* under
another one, and both ids' revisions say so.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

KEEP_ID: Final = "keep-id"
NEW_ID: Final = "new-id"

HEX_BYTES_PER_LINE: Final = 16


@dataclass(frozen=True, slots=True)
class Revision:
    """One state of a message's payload."""

    consumer: str
    message_id: str
    payload: bytes | None
    """None once it was erased."""

    payload_hash: str
    number: int = 0
    """0 is the original; given by the store."""

    key: str | None = None
    actor: str = ""
    """Who wrote it; empty for the original."""

    reason: str = ""
    id_policy: str = ""
    """``keep-id`` or ``new-id``; empty for the original."""

    new_id: str | None = None
    """The id under which it is handled, for ``new-id``."""

    at: float = 0.0
    erased_at: float | None = None


@dataclass(frozen=True, slots=True)
class RevisionFilter:
    """Which revisions are meant; what is None does not matter."""

    consumer: str | None = None
    message_id: str | None = None
    key: str | None = None


class Revisions(Protocol):
    """The revisions, in one open transaction.

    The contract is executable: `semel.testing.contracts.RevisionsContract`.
    """

    async def add(self, revision: Revision) -> Revision:
        """Write a message's next revision; return it with its number and time."""
        ...

    async def of(self, consumer: str, message_id: str) -> Sequence[Revision]:
        """Return the revisions of one message, the original first."""
        ...

    async def other_names(self, message_id: str) -> frozenset[str]:
        """Return the ids that people gave to a message of this id, or took from it.

        Those of conflicts that came with this id are among them.
        """
        ...

    async def erase(self, which: RevisionFilter) -> int:
        """Remove the payloads of matching revisions; hashes, names and reasons stay."""
        ...


def readable_diff(before: bytes | None, after: bytes | None) -> str:
    """Compare two payloads line by line: as indented JSON, as text, or as bytes in hex."""
    if before is None or after is None:
        return "(erased)\n"
    for lines_of in (_json_lines, _text_lines, _hex_lines):
        old, new = lines_of(before), lines_of(after)
        if old is not None and new is not None and (old != new or before == after):
            lines = difflib.unified_diff(old, new, "before", "after", lineterm="")
            return "".join(f"{line}\n" for line in lines)
    raise AssertionError("different bytes have different lines in hex")


def _json_lines(payload: bytes) -> list[str] | None:
    try:
        found = json.loads(payload)
    except ValueError:
        return None
    return json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False).splitlines()


def _text_lines(payload: bytes) -> list[str] | None:
    try:
        return payload.decode().splitlines()
    except UnicodeDecodeError:
        return None


def _hex_lines(payload: bytes) -> list[str]:
    step = HEX_BYTES_PER_LINE
    return [payload[at : at + step].hex(" ") for at in range(0, len(payload), step)]
