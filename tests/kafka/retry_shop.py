"""A consumer whose process kills itself at a crash point: run by `semel run` in a test."""

from __future__ import annotations

import os
import signal
from collections import Counter

from sqlalchemy import text

from semel import RetryableMessageError, consumer
from semel.crashpoints import CrashPoint, install
from semel.messaging import ConsumerSettings, FromPayload, RetryMode, RetryPolicy

_passed: Counter[str] = Counter()


def _die(point: CrashPoint, sink: str | None) -> None:
    _passed[point.value] += 1
    if f"{point.value}#{_passed[point.value]}" == os.environ.get("DIE_AT"):
        os.kill(os.getpid(), signal.SIGKILL)


install(_die)


@consumer(
    "billing",
    id_from=FromPayload("id"),
    policy=ConsumerSettings(
        retry=RetryPolicy(
            mode=RetryMode.RETRY_TOPIC,
            initial_delay_seconds=0.3,
            max_delay_seconds=0.3,
            jitter=False,
        )
    ),
)
async def billing(message, session):
    if message.attempt <= message.payload.get("fails", 0):
        raise RetryableMessageError("the bank does not answer", "DEPENDENCY_UNAVAILABLE")
    await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.id})
