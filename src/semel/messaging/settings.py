"""How one consumer behaves: what the policy says, as the engine needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from semel.errors import Misuse
from semel.messaging.claims import StalePolicy
from semel.messaging.lanes import Order
from semel.messaging.retry import GiveUp, RetryMode, RetryPolicy
from semel.messaging.sequence import GapPolicy


class Mode(StrEnum):
    """How messages are claimed."""

    TRANSACTIONAL = "transactional"
    """Claim, effect and state in one transaction."""

    BATCHED = "batched"
    """The same, many messages in one transaction."""

    LEASED = "leased"
    """A lease first, for long handlers and effects outside the database."""


class Duplicates(StrEnum):
    """What happens to a message that was handled before (S2-7, S2-8)."""

    SKIP = "skip"
    """Nothing; right wherever outgoing messages go through the outbox."""

    INVOKE = "invoke"
    """The handler runs with ``message.is_duplicate``: it writes nothing and sends everything."""


class BatchPolicy(StrEnum):
    """What a failed message means for its batch (S3-13, S3-37)."""

    INDEPENDENT = "independent"
    """The others go on; with order per key, all but those of its key."""

    STOP = "stop"
    """Nothing behind it is handled before it is."""

    DEAD_LETTER = "dead-letter"
    """It waits in the retry table, then among the dead letters; its partition never waits."""

    FAIL_BATCH = "fail-batch"
    """Nothing of the batch is kept; all of it comes back."""


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The behaviour of one consumer."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    on_exhausted: GiveUp = GiveUp.DEAD_LETTER
    """Where a message goes whose attempts are used up."""

    on_hopeless: GiveUp = GiveUp.DEAD_LETTER
    """Where a message goes that no attempt can help."""

    dead_letter_owner: str = ""
    dead_letter_topic: str = ""
    """Where dead letters are published to, besides being kept; empty: nowhere."""

    dead_letter_outbox: str = "outbox"
    """The outbox through which they go there; its relay must run."""

    review_dead_letters: bool = False
    """A person must have looked at a dead letter before it is handled again."""

    duplicates: Duplicates = Duplicates.SKIP
    order: Order = Order.KEY
    holds_keys: bool = False
    """A waiting message holds its key: later ones queue behind it (needs order per key)."""

    versioned: bool = False
    gaps: GapPolicy = GapPolicy.RETRY
    keeps_results: bool = False
    lease_seconds: float = 60.0
    stale: StalePolicy = StalePolicy.RECLAIM
    stale_grace_seconds: float = 300.0
    """How long `StalePolicy.WAIT` waits behind the end of a lease before it parks."""

    poison_attempts: int = 3
    """How often a message may take its process with it before it is parked."""

    batch: BatchPolicy = BatchPolicy.INDEPENDENT
    chunk: int = 20
    """Messages per savepoint in a batch: one each would cost more than half of the gain."""

    held_retry_seconds: float = 1.0
    """When a message comes back that is held elsewhere, or could not be asked for."""

    conflict_tries: int = 4
    """How often a whole transaction is run again after a deadlock or serialization failure."""

    def __post_init__(self) -> None:
        if self.holds_keys and self.order is Order.NONE:
            raise Misuse("keys can only be held by a consumer that keeps order per key")
        if self.chunk < 1 or self.poison_attempts < 1 or self.conflict_tries < 1:
            raise Misuse("chunk, poison_attempts and conflict_tries count from 1")

    @property
    def stores_retries(self) -> bool:
        """A failed message waits in the retry table, and its partition goes on."""
        return self.retry.mode is RetryMode.RETRY_TABLE or self.batch is BatchPolicy.DEAD_LETTER
