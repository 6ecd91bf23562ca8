"""The retry topic: a failed message travels to its next attempt as a record of another topic.

    attempt fails ─▶ one transaction: claim FAILED_RETRYABLE + waiting row + record in the outbox
                          relay ─▶ retry topic ─▶ the same consumer, when it is due

The waiting row holds the key, answers audits and operators, and is what the record is compared
with: a record that comes twice, or late, finds another row or none, and is acknowledged.  If the
record does not come back, the retry worker handles the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from semel.codec import Unreadable, coordinates_of
from semel.errors import Misuse
from semel.message import (
    Coordinates,
    Message,
    Pairs,
    Record,
    StoredRecord,
    digest_of,
    headers_from,
    pairs_of,
    producer_id,
    raw_of,
    text_of,
    value_of,
)
from semel.messaging.database import Unit
from semel.messaging.failed.deadletters import RETRY_PREFIX
from semel.messaging.failure import Classified
from semel.messaging.handle.claims import ClaimRow
from semel.messaging.handler import Consumer
from semel.messaging.receive.broker import INBOX
from semel.messaging.send.outbox import MESSAGE_ID_HEADER, OutboxEntry, outgoing_id, parent_of
from semel.policy.vocabulary import RetryMode

LATE_SECONDS: Final = 60.0
"""How late a record may be, beside the longest delay of one before it in its partition."""

# An original header of a name that we or the relay write travels under this one.
ESCAPED: Final = f"{RETRY_PREFIX}header-"


def goes_by_topic(consumer: Consumer, message: Message, claim: ClaimRow) -> bool:
    """Return whether a message waits in the retry topic; not if its payload was erased."""
    is_mode = consumer.settings.retry.mode is RetryMode.RETRY_TOPIC
    return is_mode and message.source is not None and claim.erased_at is None


def patience(consumer: Consumer) -> float:
    """Return how long after its time the retry worker handles a message that did not come."""
    return consumer.settings.retry.max_delay_seconds + LATE_SECONDS


async def send_to_retry(
    unit: Unit, consumer: Consumer, message: Message, failure: Classified, due_at: float
) -> None:
    """Write the record of the next attempt to the outbox, in the transaction of the failure."""
    source = message.source
    if source is None:
        raise ValueError("a message that did not come from a topic has no retry topic")
    topic = consumer.retry_topic(source.topic)
    said: dict[str, str] = {
        "consumer": consumer.name,
        "message-id": message.id,
        "source": str(source),
        "topic": source.topic,
        "partition": str(source.partition),
        "offset": str(source.offset),
        "timestamp": repr(message.timestamp),
        "attempt": str(message.attempt),
        "due": str(round(due_at * 1_000)),
        "error-code": failure.code,
        "reason": failure.reason,
    }
    if message.key is not None:
        said["key"] = message.key
    carried = [(_escaped(name), value) for name, value in pairs_of(message.headers)]
    ours = [(f"{RETRY_PREFIX}{name}", raw_of(value)) for name, value in said.items()]
    entry = OutboxEntry(
        # The time, because attempts are counted from 1 again after a person sent it back.
        outgoing_id(consumer.name, message.id, f"{topic} {said['due']}", message.attempt),
        topic,
        value_of(message.raw, message.digest),
        message.key,
        headers_from([*carried, *ours]),
        outbox=consumer.settings.dead_letter_outbox,
        parent=parent_of(consumer.name, message.id),
        parent_key=message.key,
    )
    await unit.outbox.add([entry])


def _escaped(name: str) -> str:
    is_ours = name == MESSAGE_ID_HEADER or name.startswith(RETRY_PREFIX)
    return f"{ESCAPED}{name}" if is_ours else name


def seconds_until_due(consumer: Consumer, record: Record, now: float) -> float:
    """Return how long a record of the retry topic must wait; 0 for any other record."""
    found = _retry_of(consumer, record)
    return 0.0 if found is None else found.due_at - now


def read_delivery(consumer: Consumer, record: Record) -> Message | Unreadable:
    """Read a record; one of the retry topic is the message that failed, as it first came."""
    found = _retry_of(consumer, record)
    if found is None:
        return consumer.reading.read(record)
    message = found.message
    key = None if message.key is None else raw_of(message.key)
    known = (record.at, record.value, key, message.headers, message.timestamp)
    return consumer.reading.read(StoredRecord(*known, message=message))


class _Retry(NamedTuple):
    message: Message
    """Not decoded."""

    due_at: float


def _retry_of(consumer: Consumer, record: Record) -> _Retry | None:
    """Return what the record of a retry says; None if this consumer did not write it."""
    if consumer.settings.retry.mode is not RetryMode.RETRY_TOPIC:
        return None

    def said(name: str) -> str:
        return text_of(record.headers[f"{RETRY_PREFIX}{name}"])

    try:
        source = coordinates_of(said("source"))
        # Another topic may carry such headers, too: copied, or those of another consumer.
        is_here = consumer.retry_topic(source.topic) == record.at.topic
        if said("consumer") != consumer.name or not is_here:
            return None
        message = Message(
            producer_id(said("message-id")),
            None,
            record.value or b"",
            said("key") if f"{RETRY_PREFIX}key" in record.headers else None,
            headers=headers_from(_carried(pairs_of(record.headers))),
            source=source,
            timestamp=float(said("timestamp")),
            attempt=int(said("attempt")),
            digest=digest_of(record.value),
            fetched_from=record.at,
        )
        return _Retry(message, int(said("due")) / 1_000)
    except (KeyError, ValueError, Misuse):
        return None


def _carried(pairs: Pairs) -> Iterator[tuple[str, bytes | None]]:
    """Yield the pairs of the original."""
    for name, value in pairs:
        if name.startswith(ESCAPED):
            yield name.removeprefix(ESCAPED), value
        elif _escaped(name) == name:
            yield name, value


def came_by_retry(message: Message) -> Coordinates | None:
    """Return where a message was read in a retry topic; None if it came otherwise."""
    at = message.fetched_from
    return None if at is None or at.place == INBOX else at
