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
