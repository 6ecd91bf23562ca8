"""What is done with a payment, and the policy for what cannot be done; tasks import this."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from examples.demo.payments import Payment
from semel import NonRetryableMessageError, RetryableMessageError, Send

POLICY: Final = """
deliverySemantics:
  topics:
    payments-semel: {key: account, ordering: per-key, retention: 7d}
  consumers:
    payments:
      messageId: {from: payload:id}
      versioned: true
      gaps: retry
      retry: {maxAttempts: 20, initialDelayMs: 200, maxDelayMs: 2000, mode: retry-table}
      onExhausted: park
      dlq: {enabled: true, owner: team-payments}
      circuit: {failures: 20}
      outbox: true
"""

RECEIPTS: Final = "receipts"
"""The topic of what is sent for large payments."""


def handle(message: Any, *, outage: Path) -> Iterator[tuple[str, dict[str, Any]] | Send]:
    """Write a payment to Postgres and Iceberg, a large one to S3 and Parquet files, too."""
    if outage.exists():
        raise RetryableMessageError("the provider is down")
    payment = Payment(**message.payload)
    if payment.kind not in ("payment", "refund"):
        raise NonRetryableMessageError(f"no such kind: {payment.kind}", code="NO_SUCH_KIND")
    yield "postgres", payment._asdict()
    yield "iceberg", payment._asdict()
    if payment.is_large:
        yield "s3", payment._asdict()
        yield "files", payment._asdict()
        yield Send(RECEIPTS, payment._asdict(), key=payment.account)
