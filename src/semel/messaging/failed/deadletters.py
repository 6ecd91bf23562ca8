"""Dead letters: made of messages that are given up, stored, and published if there is a topic.

A record of the dead-letter topic has the original payload, key and headers, and describes the
failure in headers that begin with ``dead-letter-``.  If the record came from a dead-letter topic
itself, the first of each of these headers stays, and the new ones follow.  It goes through the
outbox, in the transaction that stores the dead letter: both are durable, or neither is.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from semel.message import Message, digest_of, headers_from, pairs_of, raw_of, value_of
from semel.messaging.database import Unit
from semel.messaging.failure import Classified
from semel.messaging.handler import Consumer
from semel.messaging.outcome import Told
from semel.messaging.records import DeadLetter, fields_of_message
from semel.messaging.send.outbox import (
    MESSAGE_ID_HEADER,
    OutboxConflict,
    OutboxEntry,
    outgoing_id,
    parent_of,
)
from semel.messaging.settings import ConsumerSettings

log = logging.getLogger("semel.messaging")


@dataclass(frozen=True, slots=True)
class Failed:
    """What failed, how, and when it failed first and last."""

    failure: Classified
    told: Told
    first_at: float
    last_at: float


def letter_of(consumer: Consumer, message: Message, failed: Failed) -> DeadLetter:
    """Return the dead letter of a message that failed."""
    failure = failed.failure
    return DeadLetter(
        **fields_of_message(consumer.name, message),
        attempts=message.attempt,
        reason=failure.reason,
        exception=failure.exception,
        error_code=failure.code,
        first_failed_at=failed.first_at,
        last_failed_at=failed.last_at,
        owner=consumer.settings.dead_letter_owner,
        outcome=failed.told.value,
        needs_review=consumer.settings.review_dead_letters,
    )


PREFIX: Final = "dead-letter-"

ORIGINAL_ID: Final = f"{PREFIX}header-{MESSAGE_ID_HEADER}"
"""The header ``message-id`` of the original, as the record of its dead letter carries it."""

RETRY_PREFIX: Final = "semel-retry-"
"""The headers of the record of a retry; `semel.messaging.failed.retrytopic` writes them."""


async def keep_letter(unit: Unit, settings: ConsumerSettings, letter: DeadLetter) -> bool:
    """Write a dead letter, and the record for the consumer's dead-letter topic.

    False if the message had one.
    """
    is_new = await unit.dead_letters.put(letter)
    # An erased letter is not published: without its payload it would be another message.
    topic = topic_of(settings, letter)
    if topic and letter.erased_at is None:
        await _publish(unit, letter, topic, settings.dead_letter_outbox)
    return is_new


UNREADABLE: Final = frozenset({Told.DESERIALIZATION_FAILURE.value, Told.SCHEMA_INCOMPATIBLE.value})


def topic_of(settings: ConsumerSettings, letter: DeadLetter) -> str:
    """Return the topic that a dead letter is published to; empty: none."""
    own = settings.unreadable_topic if letter.outcome in UNREADABLE else ""
    return own or settings.dead_letter_topic


async def _publish(unit: Unit, letter: DeadLetter, topic: str, outbox: str) -> None:
    record = record_of(letter, topic, outbox)
    try:
        await unit.outbox.add([record])
    except OutboxConflict as error:
        # Another outgoing message has the record's id.  Keep the dead letter nevertheless: without
        # it the message would come back again and again, and block its partition.
        nouns = {"consumer": letter.consumer, "id": letter.message_id, "reason": str(error)}
        # Without the traceback: it would show the parameters of the failed statement.
        log.error("dead letter kept and not published", extra=nouns)  # noqa: TRY400


def record_of(letter: DeadLetter, topic: str, outbox: str) -> OutboxEntry:
    """Return the record for the dead-letter topic; a tombstone that failed stays a tombstone.

    The id is the same for the same failure of the same record, and another one if the message
    fails again after an operator sent it back.
    """
    value = value_of(letter.payload, letter.payload_hash)
    return OutboxEntry(
        _id_of(letter, value, topic),
        topic,
        value,
        letter.key,
        headers_of(letter),
        outbox=outbox,
        parent=parent_of(letter.consumer, letter.message_id),
        parent_key=letter.key,
    )


def _id_of(letter: DeadLetter, value: bytes | None, topic: str) -> str:
    # All conflicts with one id have the time of the first payload's failure, and may have the same
    # payload under several keys: the time alone does not distinguish their records.
    key = None if letter.key is None else digest_of(raw_of(letter.key))
    which = digest_of(f"{letter.source} {key} {digest_of(value)}".encode())
    failed_at = round(letter.last_failed_at * 1e6)
    return outgoing_id(letter.consumer, letter.message_id, f"{topic} {which}", failed_at)


def headers_of(letter: DeadLetter) -> Mapping[str, bytes]:
    """Return the original's headers and those that describe the dead letter."""
    fields: dict[str, object] = {
        "consumer": letter.consumer,
        "message-id": letter.message_id,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "key": letter.key,
        "reason": letter.reason,
        "exception": letter.exception,
        "error-code": letter.error_code,
        "attempts": letter.attempts,
        "first-failed-at": _moment(letter.first_failed_at),
        "last-failed-at": _moment(letter.last_failed_at),
        "schema-version": letter.schema_version,
        "correlation-id": letter.correlation_id,
        "owner": letter.owner,
        "outcome": letter.outcome,
    }
    # The original's id by another name, because the relay writes the record's own.  Of several
    # earlier dead letters the first knows where the message came from.
    earlier: dict[str, bytes | None] = {}
    carried: list[tuple[str, bytes | None]] = []
    for name, value in pairs_of(letter.headers):
        if name.startswith(PREFIX):
            earlier.setdefault(name, value)
        else:
            carried.append((ORIGINAL_ID if name == MESSAGE_ID_HEADER else name, value))
    said = [
        (f"{PREFIX}{name}", raw_of(str(value)))
        for name, value in fields.items()
        if value is not None
    ]
    return headers_from([*earlier.items(), *carried, *said])


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat()


def is_letter_record(entry: OutboxEntry) -> bool:
    """Return whether an entry of the outbox is the record of a dead letter, or of a retry."""
    return any(name.startswith((PREFIX, RETRY_PREFIX)) for name in entry.headers)


async def erase_letter_records(unit: Unit, consumer: str, message_id: str) -> None:
    """Erase the records of a failed message that are still in the outbox.

    The other entries that the message caused belong to a durable effect, and stay.
    """
    for entry in await unit.outbox.children(parent_of(consumer, message_id)):
        if is_letter_record(entry):
            await unit.outbox.erase(message_id=entry.message_id)
