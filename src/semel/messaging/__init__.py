"""One message at a time.

    broker ──▶ receive ──▶ handle ──▶ commit ──▶ tell the broker
                             │  └────▶ send: the outbox, a relay takes it on
                             └──▶ failed: retry, park, dead letter

    handler     what `@consumer` makes of a handler
    settings    how a consumer and its runner behave, and how a policy becomes that
    outcome     what became of a delivery, and what follows: one table
    failure     classes of failures, their codes, and whether to try again
    redact      what may be logged of an exception
    records     the rows: claims, waiting messages, dead letters
    changes     what a batch on Spark changes in these rows
    database    the protocol of the stores
    tables      where a PostgreSQL database has the tables
    classic     the class for those who own their sessions
    receive/  handle/  failed/  send/    the four stations

Users import the names below from here; the most used ones (`consumer`, `Message`, `Runner`,
`Outbox`, `SqlDatabase`) are in `semel`.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.codec import FromCoordinates, FromHeader, FromKey, FromPayload, RawCodec, Reading
    from semel.errors import Retryable
    from semel.faststream.binding import Semel
    from semel.kafka.broker import KafkaBroker
    from semel.kafka.codecs import AvroCodec, JsonSchemaCodec, ProtobufCodec
    from semel.memory.broker import MemoryBroker
    from semel.message import Coordinates, Partition, Record
    from semel.messaging import outcome
    from semel.messaging.classic import consume_envelope
    from semel.messaging.failed.retries import retry_due
    from semel.messaging.failure import FailureClass
    from semel.messaging.handle.attempt import classify, handle_message
    from semel.messaging.handle.batch import consume_many
    from semel.messaging.handle.claims import ClaimRequest, NotClaimable
    from semel.messaging.handle.lease import handle_leased
    from semel.messaging.handler import dispatcher
    from semel.messaging.receive.broker import Outgoing
    from semel.messaging.receive.inbox import Inbox, InboxWorker
    from semel.messaging.send.outbox import idempotency_key
    from semel.messaging.send.relay import Relay
    from semel.messaging.settings import (
        ConsumerSettings,
        Order,
        RetryPolicy,
        RunnerSettings,
        settings_of,
    )
    from semel.policy.vocabulary import (
        BatchPolicy,
        Duplicates,
        GapPolicy,
        GiveUp,
        Mode,
        RetryMode,
        StalePolicy,
    )
    from semel.sql.claims import claim_sync
    from semel.sql.engine import made_ready, open_engine
    from semel.sql.notify import OutboxSignal
    from semel.sql.tables import metadata

__all__ = [
    "AvroCodec",
    "BatchPolicy",
    "ClaimRequest",
    "ConsumerSettings",
    "Coordinates",
    "Duplicates",
    "FailureClass",
    "FromCoordinates",
    "FromHeader",
    "FromKey",
    "FromPayload",
    "GapPolicy",
    "GiveUp",
    "Inbox",
    "InboxWorker",
    "JsonSchemaCodec",
    "KafkaBroker",
    "MemoryBroker",
    "Mode",
    "NotClaimable",
    "Order",
    "OutboxSignal",
    "Outgoing",
    "Partition",
    "ProtobufCodec",
    "RawCodec",
    "Reading",
    "Record",
    "Relay",
    "RetryMode",
    "RetryPolicy",
    "Retryable",
    "RunnerSettings",
    "Semel",
    "StalePolicy",
    "claim_sync",
    "classify",
    "consume_envelope",
    "consume_many",
    "dispatcher",
    "handle_leased",
    "handle_message",
    "idempotency_key",
    "made_ready",
    "metadata",
    "open_engine",
    "outcome",
    "retry_due",
    "settings_of",
]

__getattr__ = lazily(
    __name__,
    {
        "AvroCodec": "semel.kafka.codecs",
        "BatchPolicy": "semel.policy.vocabulary",
        "ClaimRequest": "semel.messaging.handle.claims",
        "ConsumerSettings": "semel.messaging.settings",
        "Coordinates": "semel.message",
        "Duplicates": "semel.policy.vocabulary",
        "FailureClass": "semel.messaging.failure",
        "FromCoordinates": "semel.codec",
        "FromHeader": "semel.codec",
        "FromKey": "semel.codec",
        "FromPayload": "semel.codec",
        "GapPolicy": "semel.policy.vocabulary",
        "GiveUp": "semel.policy.vocabulary",
        "Inbox": "semel.messaging.receive.inbox",
        "InboxWorker": "semel.messaging.receive.inbox",
        "JsonSchemaCodec": "semel.kafka.codecs",
        "KafkaBroker": "semel.kafka.broker",
        "MemoryBroker": "semel.memory.broker",
        "Mode": "semel.policy.vocabulary",
        "NotClaimable": "semel.messaging.handle.claims",
        "Order": "semel.messaging.settings",
        "OutboxSignal": "semel.sql.notify",
        "Outgoing": "semel.messaging.receive.broker",
        "Partition": "semel.message",
        "ProtobufCodec": "semel.kafka.codecs",
        "RawCodec": "semel.codec",
        "Reading": "semel.codec",
        "Record": "semel.message",
        "Relay": "semel.messaging.send.relay",
        "RetryMode": "semel.policy.vocabulary",
        "RetryPolicy": "semel.messaging.settings",
        "Retryable": "semel.errors",
        "RunnerSettings": "semel.messaging.settings",
        "Semel": "semel.faststream.binding",
        "StalePolicy": "semel.policy.vocabulary",
        "claim_sync": "semel.sql.claims",
        "classify": "semel.messaging.handle.attempt",
        "consume_envelope": "semel.messaging.classic",
        "consume_many": "semel.messaging.handle.batch",
        "dispatcher": "semel.messaging.handler",
        "handle_leased": "semel.messaging.handle.lease",
        "handle_message": "semel.messaging.handle.attempt",
        "idempotency_key": "semel.messaging.send.outbox",
        "made_ready": "semel.sql.engine",
        "metadata": "semel.sql.tables",
        "open_engine": "semel.sql.engine",
        "outcome": "semel.messaging.outcome",
        "retry_due": "semel.messaging.failed.retries",
        "settings_of": "semel.messaging.settings",
    },
)


def __dir__() -> list[str]:
    return __all__
