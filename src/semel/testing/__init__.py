"""The kit that proves a sink, a ledger, a broker, a database or a consumer right.

    SinkContract, LedgerContract, BrokerContract, ClaimsContract    derive a test class
    ReceiverContract           a receiver of HTTP sinks, by its URL
    prove, ChaosContract       a sink of yours through every crash and every failing call
    Trial                      a consumer of yours, killed at the worst moments
    crash_at, Crash, CrashPoint    crash in this process, at a named point
    BrokerFailure              a call of the memory broker that fails when you say so
    FileBroker                 the memory broker, shared by several processes
    SimulatedClock             a clock that a test owns
    local_stage                the staging job without Spark
    audit_sinks                the source against what every sink shows, row by row
    plugin                     a pytest plugin: services as fixtures, loaded by pytest itself
    services                   real PostgreSQL, Kafka and Spark on this machine

Inside: `contracts/`, `services/`; `chaos`, `explore`, `world` and `faults` tell the histories
that `prove` goes through; `kill`, `trial` and `worker` kill processes; `crash`, `clock`,
`local`, `sink_audit`.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.crashpoints import CrashPoint
    from semel.memory.broker import BrokerFailure, FileBroker
    from semel.testing import services
    from semel.testing.chaos import ChaosContract, prove
    from semel.testing.clock import SimulatedClock
    from semel.testing.contracts.broker import BrokerContract
    from semel.testing.contracts.claims import ClaimsContract
    from semel.testing.contracts.ledger import LedgerContract
    from semel.testing.contracts.receiver import ReceiverContract
    from semel.testing.contracts.sink import SinkContract
    from semel.testing.crash import Crash, crash_at
    from semel.testing.local import local_stage
    from semel.testing.sink_audit import audit_sinks
    from semel.testing.trial import Trial

__all__ = [
    "BrokerContract",
    "BrokerFailure",
    "ChaosContract",
    "ClaimsContract",
    "Crash",
    "CrashPoint",
    "FileBroker",
    "LedgerContract",
    "ReceiverContract",
    "SimulatedClock",
    "SinkContract",
    "Trial",
    "audit_sinks",
    "crash_at",
    "local_stage",
    "prove",
    "services",
]

__getattr__ = lazily(
    __name__,
    {
        "BrokerContract": "semel.testing.contracts.broker",
        "BrokerFailure": "semel.memory.broker",
        "ChaosContract": "semel.testing.chaos",
        "ClaimsContract": "semel.testing.contracts.claims",
        "Crash": "semel.testing.crash",
        "CrashPoint": "semel.crashpoints",
        "FileBroker": "semel.memory.broker",
        "LedgerContract": "semel.testing.contracts.ledger",
        "ReceiverContract": "semel.testing.contracts.receiver",
        "SimulatedClock": "semel.testing.clock",
        "SinkContract": "semel.testing.contracts.sink",
        "Trial": "semel.testing.trial",
        "audit_sinks": "semel.testing.sink_audit",
        "crash_at": "semel.testing.crash",
        "local_stage": "semel.testing.local",
        "prove": "semel.testing.chaos",
        "services": "semel.testing.services",
    },
)


def __dir__() -> list[str]:
    return __all__
