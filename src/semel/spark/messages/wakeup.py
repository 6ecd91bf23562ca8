"""The source that wakes a query without new records: a waiting message is due, or was released.

It delivers no rows.  Spark asks for its newest offset before every batch, and it moves that only
if something is due; the rows are then read by the batch itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from semel.errors import Retryable
from semel.spark.checkpoint import SIGNAL
from semel.spark.messages.frames import KAFKA

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession


def waiting_stream(spark: SparkSession, name: str, is_due: Callable[[], bool]) -> DataFrame:
    """Return a stream with a batch's columns and no rows, that moves when *is_due* says so."""

    def due() -> bool:
        try:
            return is_due()
        except Retryable:
            return False  # the database is asked again at the next trigger

    source = _source_of(f"semel-waiting-{name}", due)
    spark.dataSource.register(source)
    return spark.readStream.format(source.name()).load()


def _source_of(name: str, is_due: Callable[[], bool]) -> Any:
    """Return a data source class: made here, so that Spark pickles it by value."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    bases: tuple[type, ...] = (DataSourceStreamReader,)
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

        bases += (SupportsTriggerAvailableNow,)
    except ImportError:  # before Spark 4.2 a Python source ends an availableNow query after a pass
        pass

    # Spark gives the start from version 4.2 on.
    def asked(self: Any, start: Any = None, limit: Any = None) -> dict[str, int]:
        if self.target is not None:
            return dict(self.target)
        self.last = start or self.last
        if is_due():
            self.last = {SIGNAL: time.time_ns() // 1_000_000}
        return dict(self.last)

    def begin(self: Any) -> None:
        self.last, self.target = {SIGNAL: 0}, None

    def fix(self: Any) -> None:
        self.target = {SIGNAL: time.time_ns() // 1_000_000} if is_due() else None

    def no_rows(self: Any, partition: Any) -> Iterator[Any]:
        return iter(())

    reader = type(
        "WaitingReader",
        bases,
        {
            "__init__": begin,
            "initialOffset": lambda self: {SIGNAL: 0},
            "latestOffset": asked,
            "prepareForTriggerAvailableNow": fix,
            "partitions": lambda self, start, end: [InputPartition(0)],
            "read": no_rows,
            "commit": lambda self, end: None,
            "stop": lambda self: None,
        },
    )
    return type(
        "WaitingSource",
        (DataSource,),
        {
            "name": classmethod(lambda cls: name),
            "schema": lambda self: KAFKA,
            "streamReader": lambda self, schema: reader(),
        },
    )
