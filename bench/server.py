"""A PostgreSQL server that keeps its promises, and the ways into it that are not semel's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pyarrow as pa
from pyspark.sql import DataFrame

from semel.postgres.encode import TRAILER
from semel.postgres.schema import TargetTable, find_target
from semel.postgres.statements import TableName
from semel.postgres.writer import RowEncoder
from semel.testing.services import PostgresServer

COLUMNS = "id text, account text, amount numeric(18,2), at timestamptz, n integer"
RAW_CHUNK_BYTES = 1 << 20


@contextmanager
def postgres() -> Iterator[Database]:
    """Start a server with fsync and synchronous commits, and memory for a million rows."""
    settings = {
        "shared_buffers": "1GB",
        "max_wal_size": "8GB",
        "max_prepared_transactions": "1200",
        "max_locks_per_transaction": "256",
    }
    with PostgresServer(18, settings).start() as server:
        yield Database(server)


class Database:
    """One database and what benchmarks do in it."""

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.url = server.url
        self._connection = psycopg.connect(self.url, autocommit=True)

    def run(self, *statements: str) -> None:
        """Execute statements, each in a transaction of its own."""
        for statement in statements:
            self._connection.execute(statement.encode())

    def count(self, table: str) -> int:
        """Count the rows of a table."""
        row = self._connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
        assert row is not None
        return int(row[0])

    def make(self, table: str) -> None:
        """Make the table, with a unique text index."""
        self.run(f"CREATE TABLE {table} ({COLUMNS})", f"CREATE UNIQUE INDEX ON {table} (id)")

    def clear(self, *tables: str) -> None:
        """Empty tables, and let no earlier write be flushed on the next one's time."""
        self.run(f"TRUNCATE {', '.join(tables)}", "CHECKPOINT")

    def jdbc_append(self, frame: DataFrame, table: str) -> None:
        """Append with Spark's own writer, tuned."""
        url = f"jdbc:postgresql://127.0.0.1:{self._server.port}/postgres"
        (
            frame.write.format("jdbc")
            .option("url", f"{url}?reWriteBatchedInserts=true")
            .option("driver", "org.postgresql.Driver")
            .option("user", "postgres")
            .option("password", self._server.password)
            .option("dbtable", table)
            .option("batchsize", 10_000)
            .mode("append")
            .save()
        )

    def ready_bytes(self, table: str, halves: Sequence[pa.Table]) -> list[list[bytes]]:
        """Encode rows for `copy_ready`, for one connection each."""
        return [self._encoded(table, half) for half in halves]

    def _encoded(self, table: str, rows: pa.Table) -> list[bytes]:
        target = find_target(self._connection, TableName.parse(table))
        assert isinstance(target, TargetTable)
        writer = RowEncoder(target, rows.schema)
        whole = b"".join(
            bytes(chunk) for batch in rows.to_batches() for chunk in writer.chunks(batch)
        )
        whole += TRAILER
        return [
            whole[begin : begin + RAW_CHUNK_BYTES]
            for begin in range(0, len(whole), RAW_CHUNK_BYTES)
        ]

    def copy_ready(self, table: str, parts: Sequence[Sequence[bytes]]) -> None:
        """Copy ready bytes into a table, on one connection each: nothing can be faster."""

        def copy(chunks: Sequence[bytes]) -> None:
            with psycopg.connect(self.url) as connection, connection.cursor() as cursor:
                statement = f"COPY {table} FROM STDIN (FORMAT binary)"
                with cursor.copy(statement.encode()) as copying:
                    for chunk in chunks:
                        copying.write(chunk)

        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(copy, parts))
