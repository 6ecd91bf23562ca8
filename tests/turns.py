"""Which tests run beside which, when two processes share them."""

from __future__ import annotations

from typing import Final

from xdist.scheduler import LoadScopeScheduling

JVM: Final = (
    "tests/kafka/",
    "tests/spark/",
    "tests/services/",
    "tests/scenarios/test_demo.py",
    "tests/scenarios/test_demo_service.py",
    "tests/test_docs.py",
    "tests/unit/test_bench.py",
    "tests/unit/files/test_files_readers.py",
)
"""Where tests start a JVM, which has two cores' work for itself."""


class Turns(LoadScopeScheduling):
    """The tests of a file stay in one process; those that start a JVM all run in the same.

    Except Kafka's, which wait for the broker's timers most of the time, and share one broker.
    """

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/kafka/"):
            return "kafka"
        return "jvm" if nodeid.startswith(JVM) else nodeid.split("::", 1)[0]
