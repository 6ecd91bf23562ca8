"""Exactly-once micro-batches on Spark: `foreachBatch`, the staging job, supervision.

exactly_once  the function that Spark calls for every batch
staging       one pass of the plan for all sinks; another, for `semel verify`, that only counts
query         the running query: its checkpoint, its sources, what is refused
kafka         its Kafka sources: the ids of their topics, where they start, a group's offsets
checkpoint    what a batch covers, read from the checkpoint
supervise     restarts the query, and knows when not to
messages/     a consumer that Spark runs: `MessagePipeline`
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.spark.exactly_once import CycleFatal, CycleGaveUp, ExactlyOnce
    from semel.spark.messages.pipeline import MessagePipeline
    from semel.spark.supervise import Exit

__all__ = ["CycleFatal", "CycleGaveUp", "ExactlyOnce", "Exit", "MessagePipeline"]

__getattr__ = lazily(
    __name__,
    {
        "CycleFatal": "semel.spark.exactly_once",
        "CycleGaveUp": "semel.spark.exactly_once",
        "ExactlyOnce": "semel.spark.exactly_once",
        "Exit": "semel.spark.supervise",
        "MessagePipeline": "semel.spark.messages.pipeline",
    },
)
