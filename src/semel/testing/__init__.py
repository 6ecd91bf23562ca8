"""The kit that proves a sink, a ledger, a broker, a database or a consumer right.

    SinkContract, LedgerContract, BrokerContract, ClaimsContract    derive a test class
    violations                 the broken rules of such a class, without pytest
    prove                      a sink of yours through every crash and every failing call
    Trial, Zygote, KILLS       a consumer of yours, killed at the worst moments
    crash_at, Crash, CrashPoint, reach    crash in this process, at a named point
    FileBroker, BrokerFailure, Failing, Call, SimulatedClock    a broker that fails when you say so
    local_stage                the staging job without Spark
    audit_sinks                the source against what every sink shows, row by row
    services                   real PostgreSQL, Kafka and Spark on this machine

Inside: `contracts/`, `services/`; `chaos`, `explore`, `world` and `faults` tell the histories
that `prove` goes through; `kill`, `zygote`, `trial`, `trial_audit` and `worker` kill processes;
`crash`, `clock`, `local`, `audit`.
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.crashpoints import CrashPoint, reach
    from semel.memory.broker import BrokerFailure, Call, Failing, FileBroker
    from semel.testing import services
    from semel.testing.audit import audit_sinks
    from semel.testing.chaos import ChaosContract, prove
    from semel.testing.clock import SimulatedClock
    from semel.testing.contracts.broker import BrokerContract
    from semel.testing.contracts.broker_world import BrokerAbility
    from semel.testing.contracts.claims import ClaimsContract
    from semel.testing.contracts.ledger import LedgerContract
    from semel.testing.contracts.sink import SinkContract, violations
    from semel.testing.contracts.sink_world import Capability
    from semel.testing.crash import Crash, crash_at
    from semel.testing.kill import Zygote
    from semel.testing.local import local_stage
    from semel.testing.trial import KILLS, Trial

__all__ = [
    "KILLS",
    "BrokerAbility",
    "BrokerContract",
    "BrokerFailure",
    "Call",
    "Capability",
    "ChaosContract",
    "ClaimsContract",
    "Crash",
    "CrashPoint",
    "Failing",
    "FileBroker",
    "LedgerContract",
    "SimulatedClock",
    "SinkContract",
    "Trial",
    "Zygote",
    "audit_sinks",
    "crash_at",
    "local_stage",
    "prove",
    "reach",
    "services",
    "violations",
]

__getattr__ = lazily(
    __name__,
    {
        "BrokerAbility": "semel.testing.contracts.broker_world",
        "BrokerContract": "semel.testing.contracts.broker",
        "BrokerFailure": "semel.memory.broker",
        "Call": "semel.memory.broker",
        "Capability": "semel.testing.contracts.sink_world",
        "ChaosContract": "semel.testing.chaos",
        "ClaimsContract": "semel.testing.contracts.claims",
        "Crash": "semel.testing.crash",
        "CrashPoint": "semel.crashpoints",
        "Failing": "semel.memory.broker",
        "FileBroker": "semel.memory.broker",
        "KILLS": "semel.testing.trial",
        "LedgerContract": "semel.testing.contracts.ledger",
        "SimulatedClock": "semel.testing.clock",
        "SinkContract": "semel.testing.contracts.sink",
        "Trial": "semel.testing.trial",
        "Zygote": "semel.testing.kill",
        "audit_sinks": "semel.testing.audit",
        "crash_at": "semel.testing.crash",
        "local_stage": "semel.testing.local",
        "prove": "semel.testing.chaos",
        "reach": "semel.crashpoints",
        "services": "semel.testing.services",
        "violations": "semel.testing.contracts.sink",
    },
)


def __dir__() -> list[str]:
    return __all__
