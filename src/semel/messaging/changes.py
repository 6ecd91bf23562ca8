"""What a batch of messages changes in semel's tables, as rows of one schema.

    a pass over the batch  ──▶  changes  ──▶  a sink: a fixed list of statements, and how many
                                              rows each of them must change

A pass reads claims, versions and waiting messages without locks.  Everything that it read and
that leads to a change stands in the change as *seen*; the statements compare it, and if another
process has changed it meanwhile, the attempt is aborted and the batch is read again.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, NamedTuple, Protocol

from semel.message import headers_to_text
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import Waits, original_id, stored_id


class Op(StrEnum):
    """What a change does, in the order in which a sink carries them out."""

    TAKE = "take"
    """A waiting message was handled or given up: delete its row, and change its claim."""

    AGAIN = "again"
    """A waiting message failed, or waits for something else: change its row and its claim."""

    RETAKE = "retake"
    """A delivered message has a claim that is open: it failed without a waiting row, or its
    lease has ended.  Change the claim."""

    CLAIM = "claim"
    """A delivered message is new: insert its claim."""

    LEAN = "lean"
    """A delivered message is new and has passed: insert its lean claim."""

    WAIT = "wait"
    """A message begins to wait: insert its row, behind those of its key that were seen."""

    LETTER = "letter"
    """Insert a dead letter; of a second one for the same message the newer stays."""

    VERSION = "version"
    """A key's applied version rises from the one that was seen."""

    GAP = "gap"
    """Versions of a key are missing: insert the gap unless it is known."""

    CLOSE = "close"
    """The gaps of a key up to a version are closed, and what waited for them is due."""

    ATTEMPT = "attempt"
    """An attempt failed: insert it."""

    SEND = "send"
    """An outgoing message: insert it into the outbox unless it is there."""

    COUNT = "count"
    """How many offsets of a partition had an outcome in this cycle."""


@dataclass(slots=True)
class MessageChange:
    """One row.  Ids and keys are as databases store them; times are the database's own."""

    op: str
    message_id: str = ""
    original_id: str | None = None
    """The id itself, where `message_id` is a hash."""

    key: str | None = None
    payload_hash: str = ""
    source: str = ""
    """The coordinates of the record, as a claim has them."""

    state: str = ""
    """The claim's new state.  WAIT: ``held`` if the row holds its key, and then its place is
    compared.  COUNT: the outcome.  CLOSE: how."""

    attempts: int = 0
    """The claim's, and the waiting row's, new number of attempts."""

    error_code: str = ""
    marker: str = ""
    delay_us: int = 0
    """In how many microseconds it is due."""

    place: int | None = None
    """TAKE, AGAIN: the place of the waiting row.  WAIT: the highest place of its key that was
    seen, or null if the key had no row."""

    seen_state: str = ""
    """The state of the claim that was read."""

    seen_attempts: int = 0
    """The attempts of the claim that was read (RETAKE), or of the waiting row (TAKE, AGAIN)."""

    seen_waits: str = ""
    topic: str = ""
    partition: int | None = None
    offset: int | None = None
    ordinal: int = 0
    """The number among the messages that one message sends."""

    version: int | None = None
    """VERSION: the applied one; GAP: the expected one; CLOSE: up to and without this one;
    COUNT: the last offset."""

    seen_version: int | None = None
    """VERSION: the one that was read; GAP: the one that came; CLOSE: from this one on;
    COUNT: the first offset."""

    total: int = 0
    detail: str | None = None
    """The other columns of the row, as a JSON object: names of columns, payloads as base64."""


NAMES: Final = tuple(one.name for one in fields(MessageChange))

TYPES: Final[Mapping[str, str]] = {
    "attempts": "integer",
    "delay_us": "bigint",
    "place": "bigint",
    "seen_attempts": "integer",
    "partition": "integer",
    "offset": "bigint",
    "ordinal": "integer",
    "version": "bigint",
    "seen_version": "bigint",
    "total": "bigint",
}
"""The SQL types of the columns; those that are not named are text."""


def detail_of(**columns: Any) -> str:
    """Return columns as JSON: bytes as base64, headers as text, flags as numbers."""
    return json.dumps({name: _in_json(name, value) for name, value in columns.items()})


def _in_json(name: str, value: Any) -> Any:
    if name == "headers":
        return headers_to_text(value)
    if isinstance(value, bytes):
        return b64encode(value).decode("ascii")
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return value


LATEST_US: Final = 253_402_300_799_000_000
"""The end of the year 9999."""


def micros(seconds: float) -> int:
    """Return a record's time in microseconds; producers write anything, so it is limited."""
    return 0 if seconds != seconds else int(min(max(seconds * 1e6, 0.0), LATEST_US))


def names_of(message_id: str, key: str | None) -> dict[str, Any]:
    """Return the fields of a change that name its message."""
    stored = stored_id(message_id)
    return {
        "message_id": stored,
        "original_id": None if stored == message_id else original_id(message_id),
        "key": None if key is None else stored_id(key),
    }


class SeenClaim(NamedTuple):
    """What a pass reads of an existing claim."""

    state: ClaimState
    attempts: int
    payload_hash: str
    is_due: bool
    """It failed and may be tried again, or its lease has ended; by the database's clock."""

    waits: bool = False
    """The waiting table has the message."""

    had_effect: bool = True


@dataclass(frozen=True, slots=True)
class SeenWaiting:
    """A waiting message that comes back, with what its change must compare."""

    place: int
    message_id: str
    key: str | None
    waits: Waits
    attempts: int
    payload: bytes | None
    payload_hash: str
    headers: str
    topic: str
    partition: int | None
    offset: int | None
    timestamp: float
    claim_state: str
    """The state of its claim."""

    is_due: bool = True
    """Its time has come; a message behind others has no time of its own."""

    message_type: str = ""
    schema_version: str = ""
    correlation_id: str = ""
    originals: str | None = None
    first_failed_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ComeBack:
    """The waiting messages of one cycle: heads that are due, with the queues of their keys."""

    rows: Sequence[SeenWaiting] = ()
    """Ordered by place."""

    held: Mapping[str, int] = field(default_factory=dict)
    """The keys with waiting messages that do not come back now, as they are stored, each with
    the highest place of its rows: their new messages wait behind these."""


class MessagesReader(Protocol):
    """What a pass asks, in tasks; it can be pickled."""

    def claims(self, message_ids: Sequence[str]) -> Mapping[str, SeenClaim]:
        """Return the claims of those of these messages, by id as it was given, that have one."""
        ...

    def versions(self, keys: Iterable[str]) -> Mapping[str, int | None]:
        """Return the applied versions of those of these keys that have one, by key as given."""
        ...

    def suspects(self) -> Mapping[str, int]:
        """Return how often the process died at each noted message, by stored id."""
        ...

    def note(self, message_ids: Sequence[str]) -> None:
        """Note, durably and at once, that these messages (by stored id) are about to be tried."""
        ...

    def clear(self, message_ids: Sequence[str]) -> None:
        """Remove the notes of messages that did not kill the process."""
        ...
