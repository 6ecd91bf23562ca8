"""Exactly-once micro-batches on Spark: `foreachBatch`, the staging job, supervision."""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.spark.exactly_once import CycleFatal, CycleGaveUp, ExactlyOnce
    from semel.spark.supervise import Exit

__all__ = ["CycleFatal", "CycleGaveUp", "ExactlyOnce", "Exit"]

__getattr__ = lazily(
    __name__,
    {
        "CycleFatal": "semel.spark.exactly_once",
        "CycleGaveUp": "semel.spark.exactly_once",
        "ExactlyOnce": "semel.spark.exactly_once",
        "Exit": "semel.spark.supervise",
    },
)
