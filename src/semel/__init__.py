"""semel makes the effect of a message happen once.

    ExactlyOnce              one decision per Spark micro-batch, over many sinks
    semel.sinks              the sinks that can take part in it
    run_commit_cycle         the seven steps, over a coordinator of your own

    consumer, Runner         one message, one transaction: claim, handle, commit, then the broker
    IdempotentConsumerBase   the same for those who own their sessions
    Outbox                   messages that become durable with the handler's rows
    Policy                   what topics promise and how consumers keep it

Importing this needs no third-party package; using a name imports what it needs.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.ledgers import open_ledger
    from semel.message import Message
    from semel.messaging.classic import IdempotentConsumerBase, MessageEnvelope
    from semel.messaging.consumer import consumer
    from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
    from semel.messaging.receive.runner import Runner
    from semel.outboxes import Outbox
    from semel.pipeline.cycle import (
        CommitAborted,
        CommitFatal,
        CommitSucceeded,
        Coordinator,
        run_commit_cycle,
    )
    from semel.pipeline.driver import Driver, Settings
    from semel.pipeline.recovery import RecoveryDecision
    from semel.pipeline.sink import SinkFatal, SinkOK, SinkRetryable, TwoPhaseSink
    from semel.pipeline.twophase import with_two_phase_sinks
    from semel.pipeline.txn import SinkTxnId
    from semel.policy import Policy
    from semel.spark.exactly_once import ExactlyOnce
    from semel.sql.claims import SqlAlchemyProcessedMessageStore
    from semel.sql.database import SqlDatabase

__version__ = "0.1.0"

__all__ = [
    "CommitAborted",
    "CommitFatal",
    "CommitSucceeded",
    "Coordinator",
    "Driver",
    "ExactlyOnce",
    "IdempotentConsumerBase",
    "Message",
    "MessageEnvelope",
    "NonRetryableMessageError",
    "Outbox",
    "Policy",
    "RecoveryDecision",
    "RetryableMessageError",
    "Runner",
    "Settings",
    "SinkFatal",
    "SinkOK",
    "SinkRetryable",
    "SinkTxnId",
    "SqlAlchemyProcessedMessageStore",
    "SqlDatabase",
    "TwoPhaseSink",
    "consumer",
    "open_ledger",
    "run_commit_cycle",
    "with_two_phase_sinks",
]

__getattr__ = lazily(
    __name__,
    {
        "CommitAborted": "semel.pipeline.cycle",
        "CommitFatal": "semel.pipeline.cycle",
        "CommitSucceeded": "semel.pipeline.cycle",
        "Coordinator": "semel.pipeline.cycle",
        "Driver": "semel.pipeline.driver",
        "ExactlyOnce": "semel.spark.exactly_once",
        "IdempotentConsumerBase": "semel.messaging.classic",
        "Message": "semel.message",
        "MessageEnvelope": "semel.messaging.classic",
        "NonRetryableMessageError": "semel.messaging.failure",
        "Outbox": "semel.outboxes",
        "Policy": "semel.policy",
        "RecoveryDecision": "semel.pipeline.recovery",
        "RetryableMessageError": "semel.messaging.failure",
        "Runner": "semel.messaging.receive.runner",
        "Settings": "semel.pipeline.driver",
        "SinkFatal": "semel.pipeline.sink",
        "SinkOK": "semel.pipeline.sink",
        "SinkRetryable": "semel.pipeline.sink",
        "SinkTxnId": "semel.pipeline.txn",
        "SqlAlchemyProcessedMessageStore": "semel.sql.claims",
        "SqlDatabase": "semel.sql.database",
        "TwoPhaseSink": "semel.pipeline.sink",
        "consumer": "semel.messaging.consumer",
        "open_ledger": "semel.ledgers",
        "run_commit_cycle": "semel.pipeline.cycle",
        "with_two_phase_sinks": "semel.pipeline.twophase",
    },
)
