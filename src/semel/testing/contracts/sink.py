"""The contract of a two-phase sink, executable.

    class TestMySink(SinkContract):
        def make_sink(self): ...
        def visible_rows(self, sink): ...
        def leavings(self, sink): ...
        def lose(self, sink, txn): ...

Every operation is repeated, every operation is done by another process than
the one before it, and every token has been through JSON.
"""

from __future__ import annotations

import unittest
from collections.abc import Mapping

from semel.testing.contracts.sink_finish import SinkAborts, SinkCommits
from semel.testing.contracts.sink_keeping import (
    SinkFences,
    SinkMarks,
    SinkRecovers,
    SinkSweeps,
)
from semel.testing.contracts.sink_prepare import SinkIsLookedUp, SinkPrepares
from semel.testing.contracts.sink_rows import SinkObjects, SinkShowsRows


class SinkContract(
    SinkPrepares,
    SinkCommits,
    SinkAborts,
    SinkIsLookedUp,
    SinkRecovers,
    SinkSweeps,
    SinkFences,
    SinkMarks,
    SinkShowsRows,
    SinkObjects,
):
    """Subclass it in a test module, override the hooks of `SinkWorld`, and run pytest."""


def rules(contract: type[SinkContract] = SinkContract) -> list[str]:
    """List the contract's tests by name."""
    return [name for name in dir(contract) if name.startswith("test_")]


def violations(contract: type[SinkContract]) -> Mapping[str, Exception]:
    """Run the contract without pytest; return the tests that fail, each with its error.

    For sinks that are broken on purpose.  A test that is skipped did not fail.
    """
    broken: dict[str, Exception] = {}
    for name in rules(contract):
        try:
            getattr(contract(), name)()
        except unittest.SkipTest:
            continue
        except Exception as error:  # noqa: BLE001  any error means that the sink broke the test
            broken[name] = error
    return broken
