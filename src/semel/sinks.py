"""The sinks that can take part in one commit decision, and the parts for your own sink.

FilesSink, IcebergSink, KafkaSink       ready to use
HttpSink, receiver                      rows to a service, and the service that takes them
HttpPostSink                            rows to a service that takes them by single POSTs
CallbackSink                            rows to a function, after the decision
PostgresSink, S3Sink, MemorySink        ready to use
MessagesSink                            what a batch of messages changes in semel's tables
DeltaSink                               ready to use
committed_objects, read_committed       what readers of an S3 sink see
TwoPhaseSink                            the methods of a sink
SinkTxnId, Receipt, Tally               its arguments
SinkOK, SinkRetryable, SinkFatal        its answers
SinkFinding, Found, Guarantee           its answers to questions
CountsVisibleRows, KnowsItsPlace, ReplacesRows    three more abilities that a sink can have
UndoesCycles                            the ability to take the rows of one cycle away again
"""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.arrow.callback import CallbackSink
    from semel.arrow.tally import tally
    from semel.delta.sink import DeltaSink
    from semel.files.sink import FilesSink
    from semel.http.posts import HttpPostSink
    from semel.http.receiver import receiver
    from semel.http.sink import HttpSink
    from semel.iceberg.sink import IcebergSink
    from semel.kafka.sink import KafkaSink
    from semel.memory.sink import MemorySink
    from semel.pipeline.sink import (
        CountsVisibleRows,
        Found,
        Guarantee,
        KnowsItsPlace,
        Receipt,
        ReplacesRows,
        SinkFatal,
        SinkFinding,
        SinkOK,
        SinkRetryable,
        Tally,
        Tenant,
        TwoPhaseSink,
        UndoesCycles,
        digest_of,
    )
    from semel.pipeline.txn import SinkTxnId
    from semel.postgres.messages import MessagesSink
    from semel.postgres.sink import PostgresSink
    from semel.s3.reading import committed_objects, read_committed
    from semel.s3.sink import S3Sink

__all__ = [
    "CallbackSink",
    "CountsVisibleRows",
    "DeltaSink",
    "FilesSink",
    "Found",
    "Guarantee",
    "HttpPostSink",
    "HttpSink",
    "IcebergSink",
    "KafkaSink",
    "KnowsItsPlace",
    "MemorySink",
    "MessagesSink",
    "PostgresSink",
    "Receipt",
    "ReplacesRows",
    "S3Sink",
    "SinkFatal",
    "SinkFinding",
    "SinkOK",
    "SinkRetryable",
    "SinkTxnId",
    "Tally",
    "Tenant",
    "TwoPhaseSink",
    "UndoesCycles",
    "committed_objects",
    "digest_of",
    "read_committed",
    "receiver",
    "tally",
]

__getattr__ = lazily(
    __name__,
    {
        "CountsVisibleRows": "semel.pipeline.sink",
        "CallbackSink": "semel.arrow.callback",
        "DeltaSink": "semel.delta.sink",
        "FilesSink": "semel.files.sink",
        "Found": "semel.pipeline.sink",
        "Guarantee": "semel.pipeline.sink",
        "HttpPostSink": "semel.http.posts",
        "HttpSink": "semel.http.sink",
        "IcebergSink": "semel.iceberg.sink",
        "KafkaSink": "semel.kafka.sink",
        "KnowsItsPlace": "semel.pipeline.sink",
        "MemorySink": "semel.memory.sink",
        "MessagesSink": "semel.postgres.messages",
        "PostgresSink": "semel.postgres.sink",
        "Receipt": "semel.pipeline.sink",
        "ReplacesRows": "semel.pipeline.sink",
        "S3Sink": "semel.s3.sink",
        "SinkFatal": "semel.pipeline.sink",
        "SinkFinding": "semel.pipeline.sink",
        "SinkOK": "semel.pipeline.sink",
        "SinkRetryable": "semel.pipeline.sink",
        "SinkTxnId": "semel.pipeline.txn",
        "Tally": "semel.pipeline.sink",
        "Tenant": "semel.pipeline.sink",
        "TwoPhaseSink": "semel.pipeline.sink",
        "UndoesCycles": "semel.pipeline.sink",
        "committed_objects": "semel.s3.reading",
        "digest_of": "semel.pipeline.sink",
        "read_committed": "semel.s3.reading",
        "receiver": "semel.http.receiver",
        "tally": "semel.arrow.tally",
    },
)


def __dir__() -> list[str]:
    return __all__
