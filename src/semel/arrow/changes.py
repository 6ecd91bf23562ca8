"""Message changes as Arrow batches: what a pass over messages gives to their sink."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Final

from semel.errors import require
from semel.messaging.changes import NAMES, TYPES, MessageChange
from semel.pipeline.sink import Batch, Schema

pa: Any = require("pyarrow", "files")

_ROW: Final = attrgetter(*NAMES)


@cache
def arrow_schema() -> Schema:
    """Return the schema of message changes."""
    kinds = {"integer": pa.int32(), "bigint": pa.int64(), "text": pa.string()}
    return pa.schema([(name, kinds[TYPES.get(name, "text")]) for name in NAMES])


def to_batch(changes: Sequence[MessageChange]) -> Batch:
    """Return changes as one batch, in their order."""
    columns = list(zip(*map(_ROW, changes), strict=True)) or [()] * len(NAMES)
    return pa.record_batch(list(map(list, columns)), schema=arrow_schema())


def alike(one: MessageChange, columns: Mapping[str, Sequence[Any]], number: int) -> Batch:
    """Return a number of changes that differ from *one* in these columns only."""
    made = []
    for column in arrow_schema():
        if column.name in columns:
            made.append(pa.array(columns[column.name], column.type))
        else:
            value = pa.scalar(getattr(one, column.name), column.type)
            made.append(pa.repeat(value, number))
    return pa.record_batch(made, schema=arrow_schema())
