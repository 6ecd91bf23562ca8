"""A sink that hands the rows of a cycle to a function, after the decision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from semel.arrow.area import Area
from semel.arrow.held import HeldSink
from semel.arrow.rowfiles import safe_name
from semel.arrow.tally import tally
from semel.errors import NeedsOperator, Permanent, Retryable, SemelError, reason_of, require
from semel.pipeline.sink import Batch, Guarantee, Receipt, Schema, Tally
from semel.pipeline.txn import SinkTxnId

pa: Any = require("pyarrow", "files")

OnCommit = Callable[[str, Any], None]
"""Gets the cycle's name, the same whenever it is called for it, and the rows as a table."""


class CallbackSink(HeldSink):
    """Calls ``on_commit(cycle, rows)`` on the driver, with all rows of a cycle, once it is decided.

    *rows* of the call are a `pyarrow.Table`.  It is called again after a crash, or after an
    exception: *cycle* is the key by which to recognise that.  Cycles without rows are left out.
    *staging* is a folder that the driver and all executors mount, or the URI of a bucket, where
    rows wait for the decision.
    """

    kind = "callback"
    uncounted = (
        "only the function knows where it has put the rows; compare the source with what was "
        "staged (--reread)"
    )

    def __init__(
        self, on_commit: OnCommit, rows: Any = None, *, staging: str, name: str = "callback"
    ) -> None:
        super().__init__(rows, name, staging)
        self._on_commit = on_commit

    def __repr__(self) -> str:
        return f"CallbackSink({self.target!r}, name={self.name!r})"

    @property
    def target(self) -> str:
        """The function's name."""
        return str(getattr(self._on_commit, "__qualname__", type(self._on_commit).__qualname__))

    def stager(self, txn: SinkTxnId) -> RowStager:
        return RowStager(self._area, txn)

    def _send(self, txn: SinkTxnId, promise: Mapping[str, Any]) -> None:
        found, batches = Tally(), []
        for chunk in promise["chunks"]:
            for batch in self._area.batches(txn, chunk["file"]):
                found += tally(batch)
                batches.append(batch)
        if found != Tally(*promise["tally"]):
            raise NeedsOperator(f"{txn}: the staged rows are not those that its tasks wrote")
        if not batches:
            return
        cycle = f"{txn.scope.slug}.{txn.cycle.label}"
        try:
            self._on_commit(cycle, pa.Table.from_batches(batches))
        except SemelError:
            raise
        except Exception as error:
            raise Retryable(f"{self.target} raised {reason_of(error)}") from error

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect=f"{self.target} is called with the rows of each cycle",
            readers_see="what the function does, after the decision",
            not_covered=(f"a place {self._area.label} that loses what it has confirmed",),
            weakened_by=(
                "the function is called again after a crash or an exception: what it does counts "
                "once only if it is done by the key of the cycle",
            ),
        )

    def close(self) -> None:
        """Do nothing: no connection is held between calls."""


@dataclass(frozen=True, slots=True)
class RowStager:
    """The settings that a task needs to keep rows for one transaction."""

    area: Area
    txn: SinkTxnId

    def open(self, task: str) -> RowWriter:
        self.area.check_shared(self.txn.scope)
        return RowWriter(self, task)


class RowWriter:
    """The rows of one task attempt, as an Arrow file; a task without rows has none."""

    def __init__(self, stager: RowStager, task: str) -> None:
        self._stager, self._task = stager, task
        self._file = f"{safe_name(task)}.arrow"
        self._writing = contextlib.ExitStack()
        self._writer: Any = None
        self._schema: Schema = None
        self._tally = Tally()

    def write(self, batch: Batch) -> None:
        """Append rows to the file."""
        batch = batch.replace_schema_metadata(None)
        if batch.num_rows == 0:
            return
        area, txn = self._stager.area, self._stager.txn
        with area.faults() as system:
            if self._writer is None:
                self._schema = batch.schema
                system.create_dir(area.folder(txn))
                stream = system.open_output_stream(f"{area.folder(txn)}/{self._file}")
                self._writing.enter_context(stream)
                self._writer = self._writing.enter_context(pa.ipc.new_stream(stream, self._schema))
            elif not batch.schema.equals(self._schema):
                raise Permanent("a batch has another schema than the one before")
            self._writer.write_batch(batch)
        self._tally += tally(batch)

    def finish(self) -> Receipt:
        if self._writer is None:
            return Receipt(self._task, self._tally, {"chunks": []})
        area, txn = self._stager.area, self._stager.txn
        with area.faults():
            self._writing.close()
            size = area.sealed(txn, self._file)
        chunk = {"file": self._file, "size": size, "rows": self._tally.rows}
        return Receipt(self._task, self._tally, {"chunks": [chunk]})

    def discard(self) -> None:
        """Remove the file, as far as possible."""
        with contextlib.suppress(Exception):
            self._writing.close()
        with contextlib.suppress(Exception):
            self._stager.area.delete(self._stager.txn, self._file)
