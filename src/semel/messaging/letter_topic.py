"""Keeping a dead letter, and telling the topic of dead letters where a consumer has one.

The record carries the payload and key as they came, the original's headers, and
what failed in headers that begin with ``dead-letter-``.  It goes through the
outbox: durable with the dead letter itself, or never sent.
"""

from __future__ import annotations

import datetime as dt
import logging
from typing import Final

from semel.message import digest_of, raw_of, value_of
from semel.messaging.database import Unit
from semel.messaging.deadletters import DeadLetter
from semel.messaging.ids import is_plain_text
from semel.messaging.outbox import (
    MESSAGE_ID_HEADER,
    OutboxConflict,
    OutboxEntry,
    outgoing_id,
    parent_of,
)
from semel.messaging.settings import ConsumerSettings

log = logging.getLogger("semel.messaging")

PREFIX: Final = "dead-letter-"


async def keep_letter(unit: Unit, settings: ConsumerSettings, letter: DeadLetter) -> bool:
    """Write a dead letter, and with it the record for the consumer's topic of dead letters.

    False where the message had one.
    """
    is_new = await unit.dead_letters.put(letter)
    # Without its payload it would be another message: it is erased, and goes nowhere.
    if settings.dead_letter_topic and letter.erased_at is None:
        await _publish(unit, settings, letter)
    return is_new


async def _publish(unit: Unit, settings: ConsumerSettings, letter: DeadLetter) -> None:
    record = record_of(letter, settings.dead_letter_topic, settings.dead_letter_outbox)
    try:
        await unit.outbox.add([record])
    except OutboxConflict as error:
        # Somebody else's message has the record's id.  The letter is kept all the same: without
        # it the message would come back for ever, and its partition would stand still.
        nouns = {"consumer": letter.consumer, "id": letter.message_id, "reason": str(error)}
        # Without the traceback, which shows what the message failed with, and its parameters.
        log.error("dead letter kept and not published", extra=nouns)  # noqa: TRY400


def record_of(letter: DeadLetter, topic: str, outbox: str) -> OutboxEntry:
    """Return what a topic of dead letters gets; where a tombstone failed, that is a tombstone.

    Its id is the same for the same failure of the same record, and another one when the
    message fails again after somebody sent it back.
    """
    value = value_of(letter.payload, letter.payload_hash)
    return OutboxEntry(
        _id_of(letter, value, topic),
        topic,
        value,
        letter.key if letter.key is not None and is_plain_text(letter.key) else None,
        headers_of(letter),
        outbox=outbox,
        parent=parent_of(letter.consumer, letter.message_id),
        parent_key=letter.key,
    )


def _id_of(letter: DeadLetter, value: bytes | None, topic: str) -> str:
    # Conflicts of one id fail at the time of its first payload, all of them, and may have one
    # payload under several keys: the time alone does not tell their records apart.
    key = None if letter.key is None else digest_of(raw_of(letter.key))
    which = digest_of(f"{letter.source} {key} {digest_of(value)}".encode())
    failed_at = round(letter.last_failed_at * 1e6)
    return outgoing_id(letter.consumer, letter.message_id, f"{topic} {which}", failed_at)


def headers_of(letter: DeadLetter) -> dict[str, bytes]:
    """Return the original's headers, and the fields of a dead letter beside them."""
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
    # The record has an id of its own, which the relay writes.
    carried = {name: value for name, value in letter.headers.items() if name != MESSAGE_ID_HEADER}
    said = {
        f"{PREFIX}{name}": str(value).encode("utf-8", "backslashreplace")
        for name, value in fields.items()
        if value is not None
    }
    return {**carried, **said}


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat()
