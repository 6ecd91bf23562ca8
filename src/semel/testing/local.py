"""A staging job without Spark: the rows of one batch, divided over tasks in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from semel.crashpoints import CrashPoint, reach
from semel.pipeline.driver import Stage
from semel.pipeline.sink import Batch, Receipt, Stager, StagingWriter, TwoPhaseSink
from semel.pipeline.txn import SinkTxnId

Row = TypeVar("Row")


def local_stage(
    sinks: Sequence[TwoPhaseSink],
    rows: Sequence[Row],
    *,
    tasks: int = 2,
    as_batch: Callable[[Sequence[Row]], Batch] = list,
    new_task: Callable[[SinkTxnId, int], str] = lambda txn, task: f"{task}-0",
) -> Stage:
    """Make a `Stage` that writes *rows* to every sink, the n-th row by task n modulo *tasks*.

    Each task has the writers of all sinks open at once, as one on Spark has.  A task that fails
    discards what it wrote, and the failure is the step's.
    """

    def stage(txn: SinkTxnId) -> Mapping[str, Sequence[Receipt]]:
        stagers = [(sink.name, sink.stager(txn)) for sink in sinks]
        told = [
            _run_task(stagers, new_task(txn, task), as_batch(rows[task::tasks]))
            for task in range(tasks)
        ]
        return {sink.name: [receipts[n] for receipts in told] for n, sink in enumerate(sinks)}

    return stage


def _run_task(stagers: Sequence[tuple[str, Stager]], task: str, batch: Any) -> list[Receipt]:
    writers: list[StagingWriter] = []
    receipts = []
    try:
        for name, stager in stagers:
            reach(CrashPoint.STAGE_BEFORE, name)
            writers.append(stager.open(task))
        for (name, _), writer in zip(stagers, writers, strict=True):
            writer.write(batch)
            reach(CrashPoint.STAGE_WRITTEN, name)
        for (name, _), writer in zip(stagers, writers, strict=True):
            receipts.append(writer.finish())
            reach(CrashPoint.STAGE_AFTER, name)
    except Exception:
        for writer in writers:
            with contextlib.suppress(Exception):  # one failed discard must not stop the others
                writer.discard()
        raise
    return receipts
