"""One local pipeline's folder, its destinations, and the audit of what kills left in them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import load_catalog

from semel.arrow.tally import schema_from_text
from semel.ledgers import open_ledger
from semel.pipeline.txn import Scope
from semel.s3.reading import rows_of
from semel.s3.sink import S3Sink
from semel.testing.audit import Audit, audit_sinks
from semel.testing.kill import Forked, Zygote
from semel.testing.services import SeaweedServer
from tests.crash.local_driver import APP, TABLE, sink_of, sql_catalog

BATCH_ROWS = 6
KINDS = ("files", "jsonl", "postgres-staging", "postgres-prepared", "iceberg", "s3")

Rows = list[dict[str, Any]]


class Scene:
    """A source of so many batches, and one destination for every kind."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        kinds: Sequence[str],
        batches: int,
        postgres: str = "",
        through: str = "",
        ledger: str = "",
        s3: SeaweedServer | None = None,
    ) -> None:
        """*through* is where the driver reaches PostgreSQL, if not at *postgres* itself.

        *ledger* is where it reaches its ledger, if not in a file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.kinds = kinds
        self.postgres = postgres
        self.s3 = s3
        numbers = range(batches * BATCH_ROWS)
        self.rows: Rows = [{"id": n, "name": f"row {n}", "amount": n * 10} for n in numbers]
        (folder / "source.jsonl").write_text("".join(json.dumps(r) + "\n" for r in self.rows))
        self.ledger = ledger or f"sqlite:///{folder / 'ledger'}"
        arguments = [str(folder), "--batch-rows", str(BATCH_ROWS), "--ledger", self.ledger]
        for kind in kinds:
            arguments += ["--sink", f"{kind}={self._place(kind, through or postgres)}"]
            if kind.startswith("postgres"):
                self._create_table(kind)
            elif kind == "iceberg":
                self._create_iceberg_table()
        self.program: Forked = zygote.program(folder / "log", *arguments)

    def _place(self, kind: str, postgres: str) -> str:
        if kind == "s3":
            assert self.s3 is not None
            # A folder per scene: scenes share the bucket.
            return f"{self.s3.endpoint},s3://{self.s3.bucket}{self.folder}"
        return postgres if kind.startswith("postgres") else str(self.folder / kind)

    def _create_table(self, kind: str) -> None:
        columns = "id bigint, name text, amount bigint, cycle text"
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            connection.execute(f"create table {_table(kind)} ({columns})")

    def _create_iceberg_table(self) -> None:
        (self.folder / "iceberg").mkdir()
        with self._lake() as lake:
            lake.create_namespace("db")
            columns = [("id", pa.int64()), ("name", pa.string()), ("amount", pa.int64())]
            lake.create_table(f"db.{TABLE}", schema=pa.schema(columns))

    def _lake(self) -> Any:
        where = sql_catalog(str(self.folder / "iceberg"))
        return contextlib.closing(load_catalog("lake", **where))

    def windows(self, *options: str, crash_at: str | None = None) -> list[str]:
        """Run the driver, and list the windows that it passed, each once, in order."""
        trace = self.folder / "trace"
        trace.unlink(missing_ok=True)
        self.program.run("--trace", str(trace), *options, crash_at=crash_at)
        return list(dict.fromkeys(trace.read_text().split()))

    def audit(self) -> Audit:
        """Compare every destination with the source, row by row and cycle by cycle."""
        found = {kind: self._found(kind) for kind in self.kinds}
        sizes = range(0, len(self.rows), BATCH_ROWS)
        by_batch = {
            f"g1.b{batch}": self.rows[start : start + BATCH_ROWS]
            for batch, start in enumerate(sizes)
        }
        ledger = open_ledger(self.ledger)
        ends = ledger.positions(Scope(ledger.ledger_id, APP, "main")).ends
        ledger.close()
        return audit_sinks(
            self.rows,
            {
                kind: [row for rows in cycles.values() for row in rows]
                for kind, cycles in found.items()
            },
            left_behind={kind: self._left(kind) for kind in self.kinds},
            cycles=found,
            cycle_rows=by_batch,
            ends={"": (len(self.rows), max((at.end for at in ends.values()), default=0))},
        )

    def assert_clean(self) -> None:
        """Fail with the audit's table unless every row is everywhere once."""
        result = self.audit()
        assert result.is_clean, f"\n{result.table()}\n{(self.folder / 'log').read_text()[-3000:]}"

    def _found(self, kind: str) -> Mapping[str, Rows]:
        if kind.startswith("postgres"):
            return self._rows_in_postgres(kind)
        if kind == "iceberg":
            return self._rows_in_iceberg()
        if kind == "s3":
            return self._rows_in_s3()
        cycles = {}
        for folder in (self.folder / kind).glob("cycle=*"):
            label = folder.name.removeprefix("cycle=").partition("-")[0]
            cycles[label] = list(_rows_in(folder))
        return cycles

    def _rows_in_iceberg(self) -> Mapping[str, Rows]:
        cycles: dict[str, Rows] = {}
        with self._lake() as lake:
            for task in lake.load_table(f"db.{TABLE}").scan().plan_files():
                cycle = re.search(r"/txn=(g\d+\.b\d+)\.", task.file.file_path)
                path = task.file.file_path.removeprefix("file://")
                rows = pq.ParquetFile(path).read().to_pylist()
                cycles.setdefault(cycle[1] if cycle else "rewritten", []).extend(rows)
        return cycles

    def _rows_in_s3(self) -> Mapping[str, Rows]:
        sink = self._s3_sink()
        found = {}
        for name, _ in sink.store.names("_commits/"):
            manifest = sink.store.get(f"_commits/{name}")
            schema = schema_from_text(manifest["token"]["schema"])
            batches = rows_of(sink.store, manifest, schema)
            rows = [row for batch in batches for row in batch.to_pylist()]
            found[name.partition("-")[0]] = rows
        sink.close()
        return found

    def _s3_sink(self) -> S3Sink:
        sink = sink_of(f"s3={self._place('s3', '')}")
        assert isinstance(sink, S3Sink)
        return sink

    def _rows_in_postgres(self, kind: str) -> Mapping[str, Rows]:
        cycles: dict[str, Rows] = {}
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            for n, name, amount, cycle in connection.execute(f"select * from {_table(kind)}"):
                label = cycle.rpartition("/")[2].partition("@")[0]
                cycles.setdefault(label, []).append({"id": n, "name": name, "amount": amount})
        return cycles

    def _left(self, kind: str) -> list[str]:
        if kind == "iceberg":
            with self._lake() as lake:
                used = lake.load_table(f"db.{TABLE}").inspect.files()["file_path"].to_pylist()
            data = self.folder / "iceberg" / "lake" / "db" / TABLE / "data"
            files = [path for path in data.rglob("*.parquet") if f"file://{path}" not in used]
            return [str(path) for path in [*files, *data.glob("semel-*/prepared/*")]]
        if kind == "s3":
            sink = self._s3_sink()
            left = [name for name, _ in sink.store.names("_semel/") if "/prepared/" in name]
            left += [upload.key for upload in sink.open_uploads()]
            sink.close()
            return left
        if not kind.startswith("postgres"):
            hidden = self.folder / kind / "_semel"
            return [
                str(path.relative_to(hidden))
                for what in ("staged", "prepared")
                for path in hidden.glob(f"*/{what}/*")
            ]
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            staged = connection.execute(
                "select relname from pg_class c join pg_namespace n on n.oid = relnamespace "
                "where nspname = 'semel' and relkind = 'r' and relname like 'stg%'"
            ).fetchall()
            prepared = connection.execute(
                "select gid from pg_prepared_xacts where database = current_database()"
            ).fetchall()
        return [name for (name,) in [*staged, *prepared]]


def _table(kind: str) -> str:
    return f"{TABLE}_{kind.partition('-')[2]}"


def _rows_in(folder: Path) -> Iterable[dict[str, Any]]:
    for path in folder.iterdir():
        if path.suffix == ".parquet":
            yield from pq.read_table(path, partitioning=None).to_pylist()
        elif path.suffix == ".jsonl":
            yield from map(json.loads, path.read_text().splitlines())
