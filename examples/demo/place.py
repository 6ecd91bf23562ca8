"""Where the demo keeps its files.

<folder>/postgres/        the server's cluster and its log
<folder>/kafka/           the broker's, if payments come from Kafka
<folder>/store/           the object store's, with the Iceberg table and the objects in S3
<folder>/<variant>/       input/, checkpoint/, large/ (Parquet), events-<n>.jsonl, spark.log
<folder>/semel/           and ledger.db, pipeline.py
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from semel.testing import services


class Variant(StrEnum):
    """Who writes the batches."""

    SEMEL = "semel"
    """`ExactlyOnce`: all sinks under one decision."""

    PLAIN = "plain"
    """An ordinary foreachBatch function that writes to two, one after the other."""


@dataclass(frozen=True, slots=True)
class Place:
    """The files of one variant's run."""

    folder: Path
    url: str
    """The database that this variant writes to."""

    bootstrap: str = ""
    """The Kafka broker that payments come from; empty if they come from files."""

    s3: str = ""
    """The URL of the object store."""

    catalog: str = ""
    """The URL of its Iceberg catalog."""

    @property
    def topic(self) -> str:
        """Where payments arrive, if that is Kafka."""
        return f"payments-{self.folder.name}"

    @property
    def input(self) -> Path:
        """Where payments arrive, if those are files."""
        return self.folder / "input"

    @property
    def checkpoint(self) -> Path:
        """Spark's checkpoint of the query."""
        return self.folder / "checkpoint"

    @property
    def large(self) -> Path:
        """The Parquet files of large payments."""
        return self.folder / "large"

    @property
    def objects(self) -> str:
        """The objects of large payments, in S3."""
        return f"s3://{services.SeaweedServer.bucket}/{self.folder.name}/large"

    @property
    def table(self) -> str:
        """The Iceberg table."""
        return f"{self.folder.name}.entries"

    @property
    def lake(self) -> dict[str, str]:
        """How pyiceberg finds and enters the catalog."""
        return services.SeaweedServer.properties_of(self.catalog, self.s3)

    @property
    def ledger(self) -> str:
        """The URL of the ledger."""
        return f"sqlite:///{self.folder / 'ledger.db'}"

    @property
    def source_ended(self) -> Path:
        """Exists once no more payments will come."""
        return self.folder / "source-ended"

    @property
    def mended(self) -> Path:
        """Exists once nothing waits for a person any more."""
        return self.folder / "mended"

    @property
    def outage(self) -> Path:
        """Exists while the provider is down that the handler asks."""
        return self.folder / "provider-is-down"

    @property
    def log(self) -> Path:
        """What Spark and Python print."""
        return self.folder / "spark.log"

    @property
    def scratch(self) -> Path:
        """What a killed JVM leaves behind."""
        return self.folder / "scratch"

    def events(self, driver: int) -> Path:
        """What the driver with this number tells."""
        return self.folder / f"events-{driver}.jsonl"

    def make(self) -> None:
        """Create the folders that must be there before the first driver."""
        for folder in (self.folder, self.input, self.scratch):
            folder.mkdir(parents=True)
