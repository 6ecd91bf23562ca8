"""Reading a cycle's source range again, to count the rows that each sink should have.

    frame ──▶ select(one column per sink) ──▶ mapInArrow: tally every sink's rows ──▶ add up

It uses the same columns and the same hash as staging, so that the two can be
compared; nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from semel.errors import Misuse
from semel.pipeline.sink import Tally, TwoPhaseSink
from semel.spark.staging import rows_of, select_rows

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

# The hash is an unsigned 64-bit number, which Spark's integers cannot hold.
TALLIES: Final = "sink int, rows bigint, hash string"


def tally_source(
    frame: DataFrame | Any, sinks: Sequence[TwoPhaseSink], reader: str = "the reader"
) -> dict[str, Tally]:
    """Return the count and hash of each sink's rows of *frame*, in one pass.

    *reader* is the name of the frame's source in errors.

    Raises:
        Misuse: it is not a static DataFrame.
    """
    if getattr(frame, "isStreaming", None) is not False:
        raise Misuse(
            f"{reader} returned {type(frame).__name__}, and must return a static DataFrame with "
            f"the stream's columns (spark.read…, not spark.readStream…)"
        )
    found = dict.fromkeys((sink.name for sink in sinks), Tally())
    for row in select_rows(frame, sinks).mapInArrow(_Count(len(sinks)), TALLIES).collect():
        name = sinks[row["sink"]].name
        found[name] += Tally(row["rows"], int(row["hash"]))
    return found


class _Count:
    """The function that runs in a task."""

    def __init__(self, sinks: int) -> None:
        self._sinks = sinks

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        from semel.arrow.tally import tally

        totals = [Tally()] * self._sinks
        for batch in batches:
            for index in range(self._sinks):
                totals[index] += tally(rows_of(batch.column(index)))
        yield pa.RecordBatch.from_pydict(
            {
                "sink": pa.array(range(self._sinks), pa.int32()),
                "rows": pa.array([total.rows for total in totals], pa.int64()),
                "hash": [str(total.hash) for total in totals],
            }
        )
