"""The dead letters, as lists and one by one."""

from __future__ import annotations

from dataclasses import dataclass

from semel.cli.messages import Payload, headers_of, payload_of
from semel.messaging.records import DeadLetter, DeadLetterFilter
from semel.operate.deadletters import LetterInspection, inspect_dead_letter
from semel.operate.stores import OperatorDatabase


@dataclass(frozen=True, slots=True)
class LetterLine:
    """A dead letter in a list."""

    consumer: str
    message_id: str
    key: str | None
    source: str | None
    """Topic, partition and offset of the record."""

    outcome: str
    error_code: str
    exception: str
    reason: str
    attempts: int
    first_failed_at: float
    last_failed_at: float
    owner: str
    erased: bool


@dataclass(frozen=True, slots=True)
class LetterList:
    """The answer to `semel dlq list`."""

    database: str
    total: int
    """How many match; the list may show fewer."""

    letters: list[LetterLine]

    @property
    def needs_attention(self) -> bool:
        """A list needs none."""
        return False


@dataclass(frozen=True, slots=True)
class LetterReport:
    """The answer to `semel dlq show`."""

    database: str
    letter: LetterLine
    payload: Payload
    headers: dict[str, str]
    message_type: str
    schema_version: str
    correlation_id: str
    timestamp: float
    """The broker's time of the record."""

    expected_hash: str
    """For a conflict: the hash of the payload that came first."""

    sent_back: int
    """How often it was sent back to its consumer."""

    acts: list[str]
    """What people did with it, in order."""

    @property
    def needs_attention(self) -> bool:
        """Looking needs none."""
        return False


async def letter_list(
    database: OperatorDatabase, name: str, which: DeadLetterFilter, limit: int
) -> LetterList:
    """List dead letters, the oldest first."""
    async with database.begin() as unit:
        letters = await unit.dead_letters.find(which, limit)
        total = await unit.dead_letters.count(which)
    return LetterList(name, total, [_line(letter) for letter in letters])


async def letter_report(
    database: OperatorDatabase, name: str, consumer: str, message_id: str, actor: str
) -> LetterReport:
    """Show one dead letter with its payload; who looked is written down."""
    found: LetterInspection = await inspect_dead_letter(database, consumer, message_id, actor=actor)
    letter = found.letter
    return LetterReport(
        name,
        _line(letter),
        payload_of(letter.payload, letter.payload_hash),
        headers_of(letter.headers),
        letter.message_type,
        letter.schema_version,
        letter.correlation_id,
        letter.timestamp,
        letter.expected_hash,
        found.sent_back,
        [f"{entry.act.act} by {entry.act.actor}" for entry in found.acts],
    )


def _line(letter: DeadLetter) -> LetterLine:
    return LetterLine(
        letter.consumer,
        letter.message_id,
        letter.key,
        str(letter.source) if letter.source else None,
        letter.outcome,
        letter.error_code,
        letter.exception,
        letter.reason,
        letter.attempts,
        letter.first_failed_at,
        letter.last_failed_at,
        letter.owner,
        letter.erased_at is not None,
    )
