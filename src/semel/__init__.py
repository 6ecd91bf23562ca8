"""semel makes the effect of a message happen once.

    ExactlyOnce          one decision per Spark micro-batch, over many sinks
    semel.sinks          the sinks that can take part in it
    run_commit_cycle     the seven steps, over a coordinator of your own

Importing this needs no third-party package; using a name imports what it needs.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.ledgers import open_ledger
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
    from semel.spark.exactly_once import ExactlyOnce

__version__ = "0.1.0"

__all__ = [
    "CommitAborted",
    "CommitFatal",
    "CommitSucceeded",
    "Coordinator",
    "Driver",
    "ExactlyOnce",
    "RecoveryDecision",
    "Settings",
    "SinkFatal",
    "SinkOK",
    "SinkRetryable",
    "SinkTxnId",
    "TwoPhaseSink",
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
        "RecoveryDecision": "semel.pipeline.recovery",
        "Settings": "semel.pipeline.driver",
        "SinkFatal": "semel.pipeline.sink",
        "SinkOK": "semel.pipeline.sink",
        "SinkRetryable": "semel.pipeline.sink",
        "SinkTxnId": "semel.pipeline.txn",
        "TwoPhaseSink": "semel.pipeline.sink",
        "open_ledger": "semel.ledgers",
        "run_commit_cycle": "semel.pipeline.cycle",
        "with_two_phase_sinks": "semel.pipeline.twophase",
    },
)
