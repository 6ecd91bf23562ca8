"""Making a dead letter of a message that is given up, wherever it was handled."""

from __future__ import annotations

from dataclasses import dataclass

from semel.message import Message
from semel.messaging.consumer import Consumer
from semel.messaging.deadletters import DeadLetter
from semel.messaging.failure import Classified
from semel.messaging.outcome import Told


@dataclass(frozen=True, slots=True)
class Failed:
    """What failed, how, and when it did so first and last."""

    failure: Classified
    told: Told
    first_at: float
    last_at: float


def letter_of(consumer: Consumer, message: Message, failed: Failed) -> DeadLetter:
    """Put a message that failed into words of the dead letters."""
    source, failure = message.source, failed.failure
    return DeadLetter(
        consumer=consumer.name,
        message_id=message.id,
        topic=source.topic if source else "",
        partition=source.partition if source else None,
        offset=source.offset if source else None,
        key=message.key,
        payload=message.raw,
        reason=failure.reason,
        exception=failure.exception,
        error_code=failure.code,
        attempts=message.attempt,
        first_failed_at=failed.first_at,
        last_failed_at=failed.last_at,
        headers=message.headers,
        schema_version=message.schema_version,
        correlation_id=message.correlation_id,
        message_type=message.type,
        timestamp=message.timestamp,
        payload_hash=message.digest,
        owner=consumer.settings.dead_letter_owner,
        outcome=failed.told.value,
        needs_review=consumer.settings.review_dead_letters,
    )
