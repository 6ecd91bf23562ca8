"""Ids as databases keep them: themselves, or a hash where they are long or no plain text."""

from __future__ import annotations

import hashlib
from typing import Final

from semel.message import digest_of

LONGEST_ID_BYTES: Final = 512


def stored_id(message_id: str) -> str:
    """Return the id as databases keep it: itself, or a hash where it is long or no plain text.

    Ids that look like such a hash are hashed, too, so that two ids never meet.
    """
    raw = message_id.encode("utf-8", "surrogatepass")
    plain = len(raw) <= LONGEST_ID_BYTES and is_plain_text(message_id)
    if plain and not message_id.startswith("sha256:"):
        return message_id
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def original_id(message_id: str) -> str | None:
    """Return what is kept beside a hashed id, for people; None where nothing was hashed."""
    if stored_id(message_id) == message_id:
        return None
    return message_id.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def hash_of_key(key: str) -> str:
    """Return what is written of a key where nothing is ever erased: it may name a person."""
    return digest_of(key.encode("utf-8", "surrogatepass"))


def is_plain_text(text: str) -> bool:
    """Tell whether every database takes *text* as it is."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text
