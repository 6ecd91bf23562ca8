"""How one consumer and its runner behave: what the policy says, as the engine needs it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from semel.errors import Misuse
from semel.messaging.checked import choose, count_from_one, lasting, not_negative
from semel.messaging.claims import StalePolicy
from semel.messaging.lanes import Order
from semel.messaging.retry import GiveUp, RetryMode, RetryPolicy
from semel.messaging.sequence import FIRST_VERSION, GapPolicy


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
    holds_keys: bool | None = None
    """A waiting message holds its key: later ones queue behind it (needs order per key).

    None: wherever order per key could be lost otherwise; see `holds_waiting_keys`.
    """

    versioned: bool = False
    first_version: int = FIRST_VERSION
    """Where the producer begins to count: a key's later version that comes first is a gap."""

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
    """Messages per savepoint in a batch, or more: one each would cost more than half of the gain.

    They become more while nothing fails, and so many again with the next failure.
    """

    held_retry_seconds: float = 1.0
    """When a message comes back that is held elsewhere, or could not be asked for."""

    conflict_tries: int = 4
    """How often a whole transaction is run again after a deadlock or serialization failure."""

    def __post_init__(self) -> None:
        choose(
            self,
            on_exhausted=GiveUp,
            on_hopeless=GiveUp,
            duplicates=Duplicates,
            order=Order,
            gaps=GapPolicy,
            stale=StalePolicy,
            batch=BatchPolicy,
        )
        count_from_one(self, "poison_attempts", "chunk", "conflict_tries")
        lasting(self, "lease_seconds")
        not_negative(self, "stale_grace_seconds", "held_retry_seconds")
        self._check_order()

    def _check_order(self) -> None:
        if self.holds_keys and self.order is Order.NONE:
            raise Misuse("keys can only be held by a consumer that keeps order per key")
        if self.holds_keys is False and self.order is Order.KEY and self._lets_others_pass:
            raise Misuse(
                "holds_keys=False lets later messages of a key overtake one that waits in the "
                "retry table or is parked, against order=Order.KEY; leave it out, or use "
                "order=Order.NONE"
            )
        if self.order is Order.PARTITION and self.stores_retries:
            raise Misuse(
                "order=Order.PARTITION is lost where a failed message waits in the retry table: "
                "its partition goes on; use RetryMode.BLOCKING (and no BatchPolicy.DEAD_LETTER), "
                "or order=Order.KEY, which holds the key and not the partition"
            )

    @property
    def stores_retries(self) -> bool:
        """A failed message waits in the retry table, and its partition goes on."""
        return self.retry.mode is RetryMode.RETRY_TABLE or self.batch is BatchPolicy.DEAD_LETTER

    @property
    def holds_waiting_keys(self) -> bool:
        """A message in the waiting room holds its key: later ones queue up behind it.

        So it is with order per key wherever a policy puts messages there.  A dead letter is
        not in the waiting room, and holds nothing.
        """
        if self.order is not Order.KEY:
            return False
        return self._lets_others_pass if self.holds_keys is None else self.holds_keys

    @property
    def _lets_others_pass(self) -> bool:
        """The partition goes on behind a message that waits."""
        parks_gaps = self.versioned and self.gaps is GapPolicy.PARK_KEY
        gives_up = GiveUp.PARK in (self.on_exhausted, self.on_hopeless)
        return self.stores_retries or gives_up or parks_gaps


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """How a runner works, apart from what its consumer's policy says."""

    mode: Mode = Mode.TRANSACTIONAL
    max_records: int = 100
    """Records per fetch; after a crash, so many per partition are handled one at a time."""

    concurrency: int = 1
    """Lanes at once, or batches at once."""

    wait_seconds: float = 0.5
    """How long a fetch waits for the first record."""

    stop_seconds: float = 30.0
    """How long a stop waits for running handlers before it cancels them."""

    cancel_seconds: float = 5.0
    """How long a cancelled handler may take to clean up before it is left behind."""

    member_seconds: float = 60.0
    """How long this process's row outlives it."""

    lag_seconds: float = 10.0
    """How often the lag is measured."""

    def __post_init__(self) -> None:
        choose(self, mode=Mode)
        count_from_one(self, "max_records", "concurrency")
        lasting(self, "member_seconds")
        not_negative(self, "wait_seconds", "stop_seconds", "cancel_seconds", "lag_seconds")

    def check_batch(self, policy: BatchPolicy) -> None:
        """Make sure that a batch policy can be carried out.

        Raises:
            Misuse: it needs the whole batch in one transaction, and would be ignored.
        """
        whole = self.mode is Mode.BATCHED and self.concurrency == 1
        if policy in (BatchPolicy.STOP, BatchPolicy.FAIL_BATCH) and not whole:
            raise Misuse(
                f"batch policy {policy.value!r} is about one batch at a time, and the runner has "
                f"mode {self.mode.value!r} with concurrency {self.concurrency}; use "
                f"mode=Mode.BATCHED with concurrency=1, or BatchPolicy.INDEPENDENT"
            )
