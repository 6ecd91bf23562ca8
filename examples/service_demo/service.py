"""The service with semel: ``python -m examples.service_demo.service``.

KAFKA and DATABASE_URL say where it works.  RELEASE=2 is the release that has a rate for CHF.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from faststream import FastStream
from faststream.kafka import KafkaBroker
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from semel import NonRetryableMessageError
from semel.messaging import ConsumerSettings, GiveUp, Mode, RunnerSettings, Semel

INSERT: Final = text("INSERT INTO entries VALUES (:id, :account, :cents)")

RATES = {"EUR": 100, "USD": 90}
"""Hundredths of a euro."""

if os.environ.get("RELEASE") == "2":
    RATES["CHF"] = 110

# Seconds until the group notices a kill; both services have the same ones.
QUICK: Final = {"session_timeout_ms": 2_000, "heartbeat_interval_ms": 500}


class Paid(BaseModel):
    """A payment; amounts are whole cents."""

    id: str
    account: str
    currency: str
    amount: int


def entry(event: Paid) -> dict[str, object]:
    """Make the row of a payment, in euros."""
    if event.currency not in RATES:
        raise NonRetryableMessageError(f"no rate for {event.currency}", code="NO_RATE")
    cents = event.amount * RATES[event.currency] // 100
    return {"id": event.id, "account": event.account, "cents": cents}


broker = KafkaBroker(os.environ["KAFKA"], logger=None)
semel = Semel(broker, database=os.environ["DATABASE_URL"])


@semel.subscriber(
    "payments-semel",
    consumer="billing",
    group_id="billing-semel",
    policy=ConsumerSettings(on_hopeless=GiveUp.PARK, dead_letter_owner="team-billing"),
    runner=RunnerSettings(mode=Mode.BATCHED, max_in_flight=200, member_seconds=2.0),
    **QUICK,
)
async def on_paid(event: Paid, session: AsyncSession) -> None:
    await session.execute(INSERT, entry(event))


app = FastStream(broker)
billing = semel.consumers["billing"]  # for `semel replay --handler`

if __name__ == "__main__":
    asyncio.run(app.run())
