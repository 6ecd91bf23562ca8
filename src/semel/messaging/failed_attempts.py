"""Keeping a failed attempt, in the transaction that writes what became of the message."""

from __future__ import annotations

from functools import cache

from semel.lease import Owner
from semel.message import Message
from semel.messaging.attempts import FailedAttempt
from semel.messaging.claims import ClaimRow, ClaimState
from semel.messaging.database import Unit
from semel.messaging.failure import Classified
from semel.messaging.inbox import InboxMessage
from semel.messaging.notes import this_process


async def keep_attempt(
    unit: Unit, consumer: str, message: Message, failure: Classified, claim: ClaimRow | None
) -> None:
    """Keep that a message failed, whose *claim* says so already."""
    # Where a repetition fails, the claim is as old as the effect.
    is_its_time = claim is not None and claim.state is not ClaimState.COMPLETED
    await unit.attempts.add(
        _attempt(
            consumer,
            message.id,
            message.key,
            message.attempt,
            failure,
            is_erased=claim is not None and claim.erased_at is not None,
            at=claim.failed_at or 0.0 if claim is not None and is_its_time else 0.0,
        )
    )


async def keep_attempt_of_inbox(
    unit: Unit, consumer: str, message_id: str, failure: Classified
) -> InboxMessage | None:
    """Keep that a stored message failed, whose row counts it already; return the row.

    None, and nothing kept, where it is processed: others have handled it meanwhile.
    """
    stored = await unit.inbox.get(consumer, message_id)
    if stored is None or stored.processed_at is not None:
        return None
    is_erased = stored.erased_at is not None
    await unit.attempts.add(
        _attempt(consumer, message_id, stored.key, stored.attempts, failure, is_erased=is_erased)
    )
    return stored


def _attempt(
    consumer: str,
    message_id: str,
    key: str | None,
    number: int,
    failure: Classified,
    *,
    is_erased: bool,
    at: float = 0.0,
) -> FailedAttempt:
    return FailedAttempt(
        consumer,
        message_id,
        number,
        failure.code,
        failure.failure_class.value,
        # An exception may quote what was erased.
        "" if is_erased else failure.reason,
        failure.exception,
        _worker(this_process()),
        key,
        at,
    )


@cache
def _worker(process: str) -> str:
    owner = Owner.read(process)
    return "" if owner is None else str(owner)
