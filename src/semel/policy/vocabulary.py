"""Every enum of the policy: the words of the file, and those of the answers about it.

The engine uses the same ones, so this module needs the standard library only.
"""

from __future__ import annotations

from enum import StrEnum


class Semantics(StrEnum):
    """The four delivery semantics, from the weakest to the strongest (S3-1)."""

    AT_MOST_ONCE = "at-most-once"
    """A message may be lost, and is not repeated."""
    AT_LEAST_ONCE = "at-least-once"
    """A message is not lost, and may be repeated."""
    EFFECTIVELY_ONCE = "effectively-once"
    """Repetitions happen and are recognised: the effect is applied once."""
    EXACTLY_ONCE = "exactly-once"
    """Effect and acknowledgement are one transaction; only ever within a scope."""


class Ordering(StrEnum):
    """Which order the messages of a topic keep, from the weakest to the strongest."""

    NONE = "none"
    """Any order is allowed."""
    PER_KEY = "per-key"
    """Messages of one key are handled in the order of their partition."""
    GLOBAL = "global"
    """All messages, in one order: one partition, one worker, and no way to scale."""


class ReplayAllowed(StrEnum):
    """Whether messages may be sent to a consumer again, from the freest to the strictest."""

    YES = "true"
    """They may."""
    NOT_FOR_SIDE_EFFECT = "false-for-side-effect"
    """They may, unless the consumer has side effects."""
    NO = "false"
    """They may not."""


class Strategy(StrEnum):
    """How a consumer recognises that a message has had its effect already (S3-16)."""

    PROCESSED_MESSAGE = "processed-message"
    """By the claim alone."""
    AGGREGATE_VERSION_UPSERT = "aggregate-version-upsert"
    """A projection is upserted by aggregate id, if the version is newer."""
    UNIQUE_EVENT_ID = "unique-event-id"
    """The row carries the event's id under a unique constraint: audit rows."""
    STATE_VERSION_CHECK = "state-version-check"
    """A transition happens only from the state or version it expects: workflows."""
    DETERMINISTIC_DOCUMENT_ID = "deterministic-document-id"
    """The document's id follows from the message: search indexes."""
    OVERWRITE_BY_KEY = "overwrite-by-key"
    """The value of the key is replaced: caches."""
    NOTIFICATION_ID = "notification-id"
    """A notification's id follows from the message; its provider may or may not recognise it."""
    PROVIDER_IDEMPOTENCY_KEY = "provider-idempotency-key"
    """An external API gets a key that follows from the message."""
    NONE = "none"
    """It does not: no claim is taken, and every delivery is handled."""


class Duplicates(StrEnum):
    """What happens to a message that was handled before (S2-7, S2-8)."""

    SKIP = "skip"
    """Nothing: it is acknowledged.  Right wherever outgoing messages go through the outbox."""
    INVOKE = "invoke"
    """The handler runs with ``is_duplicate`` set: it writes nothing and sends everything again."""


class CommitTiming(StrEnum):
    """When a message is acknowledged to the broker (S3-11)."""

    BEFORE_PROCESSING = "before-processing"
    """Before the work: a crash loses the message."""
    AFTER_PROCESSING = "after-processing"
    """After the handler returned."""
    AFTER_DB_TRANSACTION = "after-db-transaction"
    """After the handler's database transaction committed."""
    IN_OUTPUT_TRANSACTION = "in-output-transaction"
    """In the broker transaction that also writes the output records."""
    AFTER_SIDE_EFFECT = "after-side-effect"
    """After the external call."""


class Engine(StrEnum):
    """What runs a consumer."""

    SERVICE = "service"
    """Services: each message in a transaction of its own, or of its batch."""
    SPARK = "spark"
    """A pipeline: many messages, and the rows of its sinks, under one decision."""


class Mode(StrEnum):
    """How a claim and the handler's work belong together."""

    TRANSACTIONAL = "transactional"
    """Claim, work and completion are one database transaction."""
    BATCHED = "batched"
    """The same, many messages in one transaction; a file says ``batch`` instead."""
    LEASED = "leased"
    """The claim is committed first, under a lease: for long handlers and outside effects."""


class StalePolicy(StrEnum):
    """What becomes of a lease that ran out (S3-20); none of them blocks for ever."""

    RECLAIM = "reclaim"
    """The next delivery takes it over."""
    WAIT = "wait"
    """It is left alone for a while longer, then parked."""
    INSPECT = "inspect"
    """The consumer's own function says whether the effect happened."""
    ABANDON = "abandon"
    """It is parked at once."""


class BackoffShape(StrEnum):
    """How the waits between attempts grow."""

    EXPONENTIAL_JITTER = "exponential-jitter"
    """They double, and each is shortened at random."""
    EXPONENTIAL = "exponential"
    """They double."""


class RetryMode(StrEnum):
    """Where a message waits for its next attempt (S3-26)."""

    BLOCKING = "blocking"
    """In the broker: its partition stands still until it is due.  Keeps every order."""
    RETRY_TABLE = "retry-table"
    """In our own table; with order per key, the key's later messages wait behind it."""
    RETRY_TOPIC = "retry-topic"
    """In another topic, for consumers on Kafka: the outbox's relay sends it there, and the same
    consumer reads it when it is due.
    """


class GiveUp(StrEnum):
    """Where a message goes that is not tried again."""

    DEAD_LETTER = "dlq"
    """To the dead letters; later messages of its key go on without it."""
    PARK = "park"
    """Into the parking lot; with order per key, later messages of its key wait behind it."""


class GapPolicy(StrEnum):
    """What happens when versions of an aggregate are missing (S3-35)."""

    RETRY = "retry"
    """The message is tried again later, as often as the retry policy says."""
    FETCH = "fetch"
    """The consumer's own function brings the state up to the version before."""
    REBUILD = "rebuild"
    """The consumer's own function rebuilds the aggregate, this message included."""
    PARK_KEY = "park-key"
    """The key waits for a person, with its later messages behind it."""
    ALERT = "alert"
    """The message is applied across the gap; the gap is reported, and listed until it is closed."""


class Intent(StrEnum):
    """Where the intent of a side effect becomes durable before it is carried out."""

    OUTBOX = "outbox"
    """In the outbox, with the handler's own transaction."""


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


class Severity(StrEnum):
    """How much a finding matters, from the least to the most."""

    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARN = "warn"
    """Something is weaker than it could be, or missing."""
    REFUSED = "refused"
    """The combination cannot keep what it promises."""


class AntiPattern(StrEnum):
    """The ten common ones (S3-60)."""

    ASSUMING_NO_DUPLICATES = "assuming no duplicates"
    COMMITTING_BEFORE_PROCESSING = "committing before processing critical messages"
    RETRYING_FOREVER = "retrying poison for ever"
    DLQ_WITHOUT_OWNER = "a DLQ with no owner"
    GLOBAL_ORDERING = "a global ordering requirement"
    SIDE_EFFECTS_WITHOUT_IDEMPOTENCY = "side effects without idempotency"
    IGNORING_UNREADABLE = "ignoring deserialization failures"
    EXACTLY_ONCE_CHECKBOX = "treating exactly-once as a broker's checkbox"
    NO_LAG_ALERT = "no lag alert"
    REPLAY_UNSAFE = "replay-unsafe consumers"


class PolicyStatus(StrEnum):
    """How good an answer is."""

    OK = "ok"
    """Stated, and nothing speaks against it."""
    UNKNOWN = "unknown"
    """The policy does not say."""
    WARN = "warn"
    """A finding warns."""
    REFUSED = "refused"
    """A finding refuses."""
