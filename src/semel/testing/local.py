"""A staging job without Spark: the rows of one batch, divided over tasks in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from semel.crashpoints import CrashPoint, reach
from semel.pipeline.driver import Stage
from semel.pipeline.sink import Batch, Receipt, TwoPhaseSink
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

    A task that fails discards what it wrote, and the failure is the step's.
    """

    def stage(txn: SinkTxnId) -> Mapping[str, Sequence[Receipt]]:
        return {
            sink.name: [
                _run_task(sink, txn, new_task(txn, task), as_batch(rows[task::tasks]))
                for task in range(tasks)
            ]
            for sink in sinks
        }

    return stage


def _run_task(sink: TwoPhaseSink, txn: SinkTxnId, task: str, batch: Any) -> Receipt:
    reach(CrashPoint.STAGE_BEFORE, sink.name)
    writer = sink.stager(txn).open(task)
    try:
        writer.write(batch)
        reach(CrashPoint.STAGE_WRITTEN, sink.name)
        receipt = writer.finish()
    except Exception:
        writer.discard()
        raise
    reach(CrashPoint.STAGE_AFTER, sink.name)
    return receipt
