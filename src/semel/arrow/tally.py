"""A row count and an order-independent hash of Arrow batches.

    row hash = scramble(Σ columns: hash of the value, seeded with the column's name and kind)
    tally    = (rows, Σ rows: row hash  mod 2**64)

Equal rows have equal hashes, independent of batches, slices, encodings and the
order of rows and columns.  Rows that are read back must first be cast to the
staged schema: the scale of a decimal and the kind of a column (integer, text, …)
are part of the hash, the width of an integer is not.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any, Final

from semel.arrow.columns import hasher_of, scramble
from semel.errors import require
from semel.pipeline.sink import Batch, Schema, Tally

np: Any = require("numpy", "files")
pa: Any = require("pyarrow", "files")

# The temporary arrays of this many rows fit into a core's cache.
_ROWS_AT_ONCE: Final = 1 << 13


def tally(batch: Batch) -> Tally:
    """Count and hash the rows of a `pyarrow.RecordBatch`."""
    rows = batch.num_rows
    hashers = [
        hasher_of(name, column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    total = 0
    for start in range(0, rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, rows)
        sums = np.zeros(stop - start, np.uint64)
        for hasher in hashers:
            sums += hasher(start, stop)
        total += int(scramble(sums).sum(dtype=np.uint64))
    return Tally(rows, total % 2**64)


def tally_all(batches: Iterable[Batch]) -> Tally:
    """Add up the tallies of several batches."""
    return sum((tally(batch) for batch in batches), Tally())


def schema_to_text(schema: Schema) -> str:
    """Return a schema as one line of text for a token."""
    return base64.b64encode(schema.remove_metadata().serialize()).decode()


def schema_from_text(text: str) -> Schema:
    """Read what `schema_to_text` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
