"""A pipeline without Spark, small enough to be killed a thousand times.

    python -m tests.crash.local_driver FOLDER --sink files=/lake --sink postgres-staging=URL

It reads ``source.jsonl`` in FOLDER in batches, stages every batch in two
tasks, and commits it to all sinks under one decision.  As Spark does, it
notes a batch as done only after its cycle: a restart may run it again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from semel.crashpoints import CrashPoint, install, reach
from semel.errors import Fenced, Retryable, SemelError
from semel.lease import Takeover
from semel.ledgers import open_ledger
from semel.pipeline.cycle import CommitAborted, CommitFatal
from semel.pipeline.driver import CycleReplayed, Driver, Heartbeat, Settings, Stage
from semel.pipeline.sink import Receipt, TwoPhaseSink
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff
from semel.pipeline.txn import CycleId, SinkTxnId
from semel.testing.local import local_stage
from semel.testing.services import SeaweedServer

APP: Final = "local"
TABLE: Final = "entries"

DONE: Final = 0
FENCED: Final = 3
"""A newer owner exists."""

STOPPED: Final = 4
"""An outcome or a start that asks for another start, or for a person."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the source is done; return how it ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.local_driver")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sink", action="append", required=True, help="kind=where, repeatable")
    parser.add_argument("--ledger", help="its URL; by default a SQLite file in FOLDER")
    parser.add_argument("--batch-rows", type=int, default=10)
    parser.add_argument("--lease-seconds", type=float, default=30.0)
    parser.add_argument("--takeover", type=Takeover, default=Takeover.WAIT)
    parser.add_argument("--fail-first", action="store_true", help="lose the first batch's staging")
    parser.add_argument("--trace", type=Path, help="a file for the name of every window passed")
    options = parser.parse_args(arguments)
    if options.trace is not None:
        _trace(options.trace)
    return _run(options)


def sink_of(spec: str) -> TwoPhaseSink:
    """Make the sink that ``kind=where`` describes; its name is the kind."""
    kind, _, where = spec.partition("=")
    if kind in ("files", "jsonl"):
        from semel.files.sink import FilesSink

        return FilesSink(where, name=kind, format="jsonl" if kind == "jsonl" else "parquet")
    if kind == "iceberg":
        from semel.iceberg.sink import IcebergSink

        properties, namespace = lake_of(where)
        return IcebergSink(f"{namespace}.{TABLE}", catalog="lake", properties=properties)
    if kind in ("postgres-staging", "postgres-prepared"):
        from semel.postgres.sink import PostgresSink

        mode: Any = kind.partition("-")[2]
        table = f"{TABLE}_{mode}"
        # With books of its own each keeps its mode; together they would share one transaction.
        books = f"semel_{mode}"
        return PostgresSink(
            where, table, name=kind, mode=mode, cycle_column="cycle", bookkeeping_schema=books
        )
    if kind == "s3":
        from semel.s3.sink import S3Sink

        os.environ["AWS_ACCESS_KEY_ID"] = SeaweedServer.access_key
        os.environ["AWS_SECRET_ACCESS_KEY"] = SeaweedServer.secret_key
        endpoint, _, url = where.partition(",")
        return S3Sink(url, name=kind, endpoint=endpoint, region=SeaweedServer.region)
    if kind == "delta":
        from semel.delta.sink import DeltaSink

        table, options = delta_of(where)
        return DeltaSink(table, options=options, name=kind)
    if kind == "http":
        from semel.http.sink import HttpSink

        return HttpSink(where, name=kind, tries=2)
    if kind == "kafka":
        return _kafka_sink(where)
    raise SystemExit(f"no sink is called {kind!r}")


def _kafka_sink(where: str) -> TwoPhaseSink:
    """Make a sink whose records have a row's id as the key, and the row as the value."""
    import pyarrow as pa

    from semel.kafka.sink import KafkaSink

    class RowSink(KafkaSink):
        def stager(self, txn: SinkTxnId) -> Any:
            return Recording(super().stager(txn))

    class Recording:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def open(self, task: str) -> Any:
            writer = self._inner.open(task)
            write = writer.write
            writer.write = lambda batch: write(pa.RecordBatch.from_pylist(records(batch)))
            return writer

    def records(batch: Any) -> list[dict[str, str]]:
        return [{"key": str(row["id"]), "value": json.dumps(row)} for row in batch.to_pylist()]

    bootstrap, topic, staging = where.split(",")
    return RowSink(bootstrap, topic, staging=staging, name="kafka")


def lake_of(where: str) -> tuple[dict[str, str], str]:
    """Describe a catalog: ``folder``, or ``catalog,store,namespace`` of SeaweedFS."""
    if "," not in where:
        return sql_catalog(where), "db"
    catalog, store, namespace = where.split(",")
    return SeaweedServer.properties_of(catalog, store), namespace


def delta_of(where: str) -> tuple[str, dict[str, str]]:
    """Describe a table of Delta: ``folder``, or ``store,s3://…`` of SeaweedFS."""
    store, _, url = where.rpartition(",")
    options = {
        "aws_endpoint": store,
        "aws_access_key_id": SeaweedServer.access_key,
        "aws_secret_access_key": SeaweedServer.secret_key,
        "aws_region": SeaweedServer.region,
        "aws_allow_http": "true",
    }
    return url, options if store else {}


def sql_catalog(folder: str) -> dict[str, str]:
    """Describe an Iceberg catalog in SQLite with its warehouse, both in *folder*."""
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/lake",
    }


def _run(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    rows = [json.loads(line) for line in (folder / "source.jsonl").read_text().splitlines()]
    ledger = open_ledger(options.ledger or f"sqlite:///{folder / 'ledger'}")
    driver = Driver(
        APP,
        ledger,
        [sink_of(spec) for spec in options.sink],
        settings=Settings(
            lease_seconds=options.lease_seconds,
            takeover=options.takeover,
            cycle_backoff=Backoff(tries=2, first_seconds=0.01),
            tidy_every=2,
        ),
    )
    heartbeat: Heartbeat | None = None
    try:
        report = driver.start()
        _say("recovered", f"finished {len(report.finished)}, aborted {len(report.aborted)}")
        ledger.open_generation(driver.lease, "checkpoint")
        heartbeat = Heartbeat(ledger, driver.lease).start()
        return _run_batches(driver, options, rows)
    except Fenced as error:
        _say("fenced", str(error))
        return FENCED
    except (SemelError, OSError) as error:
        _say("retryable" if isinstance(error, Retryable) else "stopped", str(error))
        return STOPPED
    finally:
        if heartbeat is not None:
            heartbeat.stop()
        driver.stop()


def _run_batches(driver: Driver, options: argparse.Namespace, rows: list[Any]) -> int:
    import pyarrow as pa

    size: int = options.batch_rows
    finished: Path = options.folder / "checkpoint"
    finished.mkdir(exist_ok=True)
    losing = options.fail_first
    for batch, start in enumerate(range(0, len(rows), size)):
        if (finished / str(batch)).exists():
            continue
        part = rows[start : start + size]
        stage = local_stage(driver.sinks, part, as_batch=pa.RecordBatch.from_pylist)
        reach(CrashPoint.SPARK_BATCH_BEFORE)
        outcome = driver.run_cycle(
            CycleId(driver.scope, 1, batch),
            partial(BatchRange.of_offsets, {"": (start, start + len(part))}),
            _losing(stage) if losing else stage,
        )
        losing = losing and isinstance(outcome, CycleReplayed)
        _say(type(outcome).__name__, f"batch {batch} {getattr(outcome, 'reason', '')}")
        if isinstance(outcome, CommitFatal) and isinstance(outcome.cause, Fenced):
            raise outcome.cause
        if isinstance(outcome, CommitFatal | CommitAborted):
            return STOPPED
        reach(CrashPoint.SPARK_BATCH_AFTER)
        (finished / str(batch)).touch()
    _say("done", f"{len(rows)} rows")
    return DONE


def _losing(stage: Stage) -> Stage:
    """Stage, and fail the first time."""
    times = count()

    def staged(txn: SinkTxnId) -> Mapping[str, Sequence[Receipt]]:
        receipts = stage(txn)
        if next(times) == 0:
            raise OSError("the executors are gone")
        return receipts

    return staged


def _trace(path: Path) -> None:
    """Write down every window before whatever the environment has planned for it."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(point: CrashPoint, sink: str | None) -> None:
        os.write(file, f"{point.at(sink)}\n".encode())
        if planned is not None:
            planned(point, sink)

    planned = install(None)
    install(hook)


def _say(what: str, more: str) -> None:
    print(f"{what}: {more}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
