"""semel makes the effect of a message happen once.

One batch at a time, under one decision:

    ExactlyOnce              what a Spark query is given as `foreachBatch`
    MessagePipeline          a policy and a handler of messages, run by Spark
    Driver                   the same without Spark
    run_commit_cycle         the seven steps, over a coordinator of your own

One message at a time, in one transaction:

    consumer, Runner         claim, handle, commit, then tell the broker
    IdempotentConsumerBase   the same for those who own their sessions
    Outbox                   messages that become durable with the handler's rows
    Policy                   what topics promise and how consumers keep it

Four more doors: `semel.sinks`, `semel.messaging`, `semel.operate`, `semel.testing`.
Everything else may move.  Importing a door needs no third-party package; using a name
imports what it needs.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel import errors, events
    from semel.ledgers import open_ledger
    from semel.message import Message
    from semel.messaging.classic import IdempotentConsumerBase, MessageEnvelope
    from semel.messaging.failure import NonRetryableMessageError, RetryableMessageError
    from semel.messaging.handler import consumer
    from semel.messaging.receive.runner import Runner
    from semel.outboxes import Outbox
    from semel.pipeline.cycle import (
        CommitAborted,
        CommitFatal,
        CommitSucceeded,
        Coordinator,
        Step,
        run_commit_cycle,
    )
    from semel.pipeline.driver import Driver, Settings
    from semel.pipeline.recovery import RecoveryDecision
    from semel.pipeline.source import BatchRange
    from semel.pipeline.twophase import with_two_phase_sinks
    from semel.pipeline.txn import CycleId
    from semel.policy.model import Policy
    from semel.spark.exactly_once import ExactlyOnce
    from semel.spark.messages.handling import Send
    from semel.spark.messages.pipeline import MessagePipeline
    from semel.sql.claims import SqlAlchemyProcessedMessageStore
    from semel.sql.database import SqlDatabase

__version__ = "0.1.0"

__all__ = [
    "BatchRange",
    "CommitAborted",
    "CommitFatal",
    "CommitSucceeded",
    "Coordinator",
    "CycleId",
    "Driver",
    "ExactlyOnce",
    "IdempotentConsumerBase",
    "Message",
    "MessageEnvelope",
    "MessagePipeline",
    "NonRetryableMessageError",
    "Outbox",
    "Policy",
    "RecoveryDecision",
    "RetryableMessageError",
    "Runner",
    "Send",
    "Settings",
    "SqlAlchemyProcessedMessageStore",
    "SqlDatabase",
    "Step",
    "consumer",
    "errors",
    "events",
    "open_ledger",
    "run_commit_cycle",
    "with_two_phase_sinks",
]

__getattr__ = lazily(
    __name__,
    {
        "BatchRange": "semel.pipeline.source",
        "CommitAborted": "semel.pipeline.cycle",
        "CommitFatal": "semel.pipeline.cycle",
        "CommitSucceeded": "semel.pipeline.cycle",
        "Coordinator": "semel.pipeline.cycle",
        "CycleId": "semel.pipeline.txn",
        "Driver": "semel.pipeline.driver",
        "ExactlyOnce": "semel.spark.exactly_once",
        "IdempotentConsumerBase": "semel.messaging.classic",
        "Message": "semel.message",
        "MessageEnvelope": "semel.messaging.classic",
        "MessagePipeline": "semel.spark.messages.pipeline",
        "NonRetryableMessageError": "semel.messaging.failure",
        "Outbox": "semel.outboxes",
        "Policy": "semel.policy.model",
        "RecoveryDecision": "semel.pipeline.recovery",
        "RetryableMessageError": "semel.messaging.failure",
        "Runner": "semel.messaging.receive.runner",
        "Send": "semel.spark.messages.handling",
        "Settings": "semel.pipeline.driver",
        "SqlAlchemyProcessedMessageStore": "semel.sql.claims",
        "SqlDatabase": "semel.sql.database",
        "Step": "semel.pipeline.cycle",
        "consumer": "semel.messaging.handler",
        "errors": "semel.errors",
        "events": "semel.events",
        "open_ledger": "semel.ledgers",
        "run_commit_cycle": "semel.pipeline.cycle",
        "with_two_phase_sinks": "semel.pipeline.twophase",
    },
)


def __dir__() -> list[str]:
    return __all__
