"""The sinks that can take part in one commit decision."""

from typing import TYPE_CHECKING

from semel.lazy import lazily

if TYPE_CHECKING:
    from semel.files.sink import FilesSink
    from semel.memory.sink import MemorySink
    from semel.postgres.sink import PostgresSink

__all__ = ["FilesSink", "MemorySink", "PostgresSink"]

__getattr__ = lazily(
    __name__,
    {
        "FilesSink": "semel.files.sink",
        "MemorySink": "semel.memory.sink",
        "PostgresSink": "semel.postgres.sink",
    },
)
