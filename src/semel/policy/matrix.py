"""The delivery matrix (S3-40): what six common set-ups do in the end.

Computed by the table that the lint uses, so that the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from semel.policy.guarantee import SEMANTICS, Ack, Repetition, listing
from semel.policy.vocabulary import Semantics


class Publishing(StrEnum):
    """What a producer's repeated publish looks like to consumers."""

    NEW_MESSAGE = "another message"
    """Nobody can tell that it is a repetition."""

    ONE_RECORD = "nothing"
    """The broker drops it."""

    SAME_ID = "the same message again"
    """It carries the same id."""


PRODUCER_REPEATS: Final[Mapping[tuple[Publishing, Repetition], bool]] = {
    (Publishing.NEW_MESSAGE, Repetition.APPLIED): True,
    (Publishing.NEW_MESSAGE, Repetition.RECOGNISED): True,
    (Publishing.NEW_MESSAGE, Repetition.ONE_TRANSACTION): True,
    (Publishing.ONE_RECORD, Repetition.APPLIED): False,
    (Publishing.ONE_RECORD, Repetition.RECOGNISED): False,
    (Publishing.ONE_RECORD, Repetition.ONE_TRANSACTION): False,
    (Publishing.SAME_ID, Repetition.APPLIED): True,
    (Publishing.SAME_ID, Repetition.RECOGNISED): False,
    # A transaction does not look at ids.
    (Publishing.SAME_ID, Repetition.ONE_TRANSACTION): True,
}
"""Whether a publish that is repeated has its effect again."""


@dataclass(frozen=True, slots=True)
class SetUp:
    """One row: in words, and as the table sees it."""

    producer: str
    broker: str
    consumer: str
    publishing: Publishing
    ack: Ack
    repetition: Repetition
    effect: str

    @property
    def semantics(self) -> Semantics:
        """What the effect has in the end; a producer's own repetitions weaken it."""
        found = SEMANTICS[self.ack, self.repetition]
        if found is Semantics.AT_MOST_ONCE or not self.producer_repeats:
            return found
        return Semantics.AT_LEAST_ONCE

    @property
    def producer_repeats(self) -> bool:
        """Tell whether a repeated publish has its effect again."""
        return PRODUCER_REPEATS[self.publishing, self.repetition]

    @property
    def repeated_by(self) -> tuple[str, ...]:
        """Name whoever can cause the effect to happen twice."""
        consumer = SEMANTICS[self.ack, self.repetition] is Semantics.AT_LEAST_ONCE
        return (("the producer",) if self.producer_repeats else ()) + (
            ("the consumer",) if consumer else ()
        )

    @property
    def final_effect(self) -> str:
        """Say it in one clause, with its scope."""
        words = f"{self.semantics} for {self.effect}"
        if self.repeated_by:
            words += f": duplicates by {listing(self.repeated_by)}"
        return words


MATRIX: Final = (
    SetUp(
        "not idempotent",
        "at-least-once",
        "not idempotent",
        Publishing.NEW_MESSAGE,
        Ack.AFTER,
        Repetition.APPLIED,
        "every effect",
    ),
    SetUp(
        "idempotent producer",
        "at-least-once",
        "not idempotent",
        Publishing.ONE_RECORD,
        Ack.AFTER,
        Repetition.APPLIED,
        "every effect",
    ),
    SetUp(
        "outbox",
        "durable publish",
        "idempotent: claim and rows in one transaction",
        Publishing.SAME_ID,
        Ack.AFTER,
        Repetition.RECOGNISED,
        "rows in the handler's database",
    ),
    SetUp(
        "transactional Kafka pipeline",
        "transactions configured",
        "output to Kafka only",
        Publishing.ONE_RECORD,
        Ack.WITHIN,
        Repetition.ONE_TRANSACTION,
        "records in Kafka, within the broker's transaction",
    ),
    SetUp(
        "outbox",
        "durable publish",
        "sends an e-mail, without a key",
        Publishing.SAME_ID,
        Ack.AFTER,
        Repetition.APPLIED,
        "the e-mail",
    ),
    SetUp(
        "outbox",
        "durable publish",
        "sends a notification with its id, which the provider recognises",
        Publishing.SAME_ID,
        Ack.AFTER,
        Repetition.RECOGNISED,
        "the notification",
    ),
)
"""The six rows."""
