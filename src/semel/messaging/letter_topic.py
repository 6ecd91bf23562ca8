"""Keeping a dead letter, and telling the topic of dead letters where a consumer has one.

The record carries the payload and key as they came, the original's headers, and
what failed in headers that begin with ``dead-letter-``.  It goes through the
outbox: durable with the dead letter itself, or never sent.
"""

from __future__ import annotations

import datetime as dt
from typing import Final

from semel.messaging.database import Unit
from semel.messaging.deadletters import DeadLetter
from semel.messaging.ids import is_plain_text
from semel.messaging.outbox import MESSAGE_ID_HEADER, OutboxEntry, outgoing_id, parent_of
from semel.messaging.settings import ConsumerSettings

PREFIX: Final = "dead-letter-"


async def keep_letter(unit: Unit, settings: ConsumerSettings, letter: DeadLetter) -> None:
    """Write a dead letter, and with it the record for the consumer's topic of dead letters."""
    await unit.dead_letters.put(letter)
    # Without its payload it would be another message: it is erased, and goes nowhere.
    if settings.dead_letter_topic and letter.erased_at is None:
        await unit.outbox.add(
            [record_of(letter, settings.dead_letter_topic, settings.dead_letter_outbox)]
        )


def record_of(letter: DeadLetter, topic: str, outbox: str) -> OutboxEntry:
    """Return what a topic of dead letters gets.

    Its id is the same for the same failure, and another one when the message fails again
    after somebody sent it back.
    """
    return OutboxEntry(
        outgoing_id(letter.consumer, letter.message_id, topic, round(letter.last_failed_at * 1e6)),
        topic,
        letter.payload,
        letter.key if letter.key is not None and is_plain_text(letter.key) else None,
        headers_of(letter),
        outbox=outbox,
        parent=parent_of(letter.consumer, letter.message_id),
        parent_key=letter.key,
    )


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
