"""One local pipeline's folder, its destinations, and the audit of what kills left in them."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Consumer, TopicPartition
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from semel.arrow.tally import schema_from_text
from semel.ledgers import open_ledger
from semel.pipeline.sink import TwoPhaseSink
from semel.pipeline.txn import Scope
from semel.s3.reading import rows_of
from semel.s3.sink import S3Sink
from semel.testing.kill import Forked, Zygote
from semel.testing.services import CutProxy, KafkaServer, SeaweedServer
from semel.testing.sink_audit import Audit, audit_sinks
from tests.crash.local_driver import APP, TABLE, delta_of, lake_of, sink_of
from tests.crash.local_receiver import Receiver
from tests.kafka.committed import wait_for_commits

BATCH_ROWS = 6
KINDS = ("files", "jsonl", "postgres-staging", "postgres-prepared", "iceberg", "s3")
MODULES = (
    "semel.files.sink",
    "semel.iceberg.sink",
    "pyiceberg.catalog.sql",
    "semel.s3.sink",
    "semel.postgres.sink",
    "semel.postgres.ledger",
    "semel.ledger.sqlite",
    "pyarrow",
)
"""What the process imports that forks local drivers."""

# What must have happened before, for a restart to pass some windows.
UNDECIDED = "pre_commit_2pc:after"
DECIDED = "commit_txn:after"

COLUMNS = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.int64())])

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
        receiver: Receiver | None = None,
        kafka: KafkaServer | None = None,
        proxies: Sequence[CutProxy] = (),
        lake_on_s3: bool = False,
    ) -> None:
        """*through* is where the driver reaches PostgreSQL, if not at *postgres* itself.

        *ledger* is where it reaches its ledger, if not in a file.  It reaches the others
        through those of *proxies* that stand before them.  With *lake_on_s3* the tables of
        Iceberg and Delta are on SeaweedFS, and not in a folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.kinds = kinds
        self.postgres = postgres
        self.s3 = s3
        self.receiver = receiver
        self.kafka = kafka
        self._lake_on_s3 = lake_on_s3
        self._name = f"s{uuid.uuid4().hex[:8]}"
        numbers = range(batches * BATCH_ROWS)
        self.rows: Rows = [{"id": n, "name": f"row {n}", "amount": n * 10} for n in numbers]
        (folder / "source.jsonl").write_text("".join(json.dumps(r) + "\n" for r in self.rows))
        self.ledger = ledger or f"sqlite:///{folder / 'ledger'}"
        arguments = [str(folder), "--batch-rows", str(BATCH_ROWS), "--ledger", self.ledger]
        for kind in kinds:
            place = self._place(kind, through or postgres)
            for proxy in proxies:
                place = place.replace(f":{proxy.target_port}", f":{proxy.port}")
            if kind == "kafka" and kafka is not None and kafka.proxy in proxies:
                place = place.replace(kafka.bootstrap, kafka.cut_bootstrap)
            arguments += ["--sink", f"{kind}={place}"]
            if kind.startswith("postgres"):
                self._create_table(kind)
            elif kind == "iceberg":
                self._create_iceberg_table()
            elif kind == "delta":
                table, options = delta_of(self._place(kind))
                DeltaTable.create(table, COLUMNS, storage_options=options or None)
            elif kind == "kafka":
                assert kafka is not None
                kafka.create_topic(self._name, 2)
        self.program: Forked = zygote.program(folder / "log", *arguments)

    def _place(self, kind: str, postgres: str = "") -> str:
        if kind == "http":
            assert self.receiver is not None
            return self.receiver.url
        if kind == "kafka":
            assert self.kafka is not None
            return f"{self.kafka.bootstrap},{self._name},{self.folder / 'shards'}"
        if kind == "s3" or (self._lake_on_s3 and kind in ("iceberg", "delta")):
            assert self.s3 is not None
            if kind == "iceberg":
                return f"{self.s3.catalog_uri},{self.s3.endpoint},{self._name}"
            # A folder per scene: scenes share the bucket.
            return f"{self.s3.endpoint},s3://{self.s3.bucket}{self.folder}/{kind}"
        return postgres if kind.startswith("postgres") else str(self.folder / kind)

    def _create_table(self, kind: str) -> None:
        columns = "id bigint, name text, amount bigint, cycle text"
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            connection.execute(f"create table {_table(kind)} ({columns})")

    def _create_iceberg_table(self) -> None:
        (self.folder / "iceberg").mkdir()
        properties, namespace = lake_of(self._place("iceberg"))
        with contextlib.closing(load_catalog("lake", **properties)) as lake:
            lake.create_namespace(namespace)
            lake.create_table(f"{namespace}.{TABLE}", schema=COLUMNS)

    @contextlib.contextmanager
    def lake_table(self) -> Iterator[Any]:
        """Open the table of Iceberg."""
        properties, namespace = lake_of(self._place("iceberg"))
        with contextlib.closing(load_catalog("lake", **properties)) as lake:
            yield lake.load_table(f"{namespace}.{TABLE}")

    def delta_table(self) -> DeltaTable:
        """Open the table of Delta."""
        table, options = delta_of(self._place("delta"))
        return DeltaTable(table, storage_options=options or None)

    def sinks(self) -> list[TwoPhaseSink]:
        """Make the sinks as the driver does, for operators' questions."""
        return [sink_of(f"{kind}={self._place(kind, self.postgres)}") for kind in self.kinds]

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
        if kind == "delta":
            return self._rows_in_delta()
        if kind == "kafka":
            return self._records()
        if kind == "http":
            assert self.receiver is not None
            return self.receiver.rows()
        cycles = {}
        for folder in (self.folder / kind).glob("cycle=*"):
            label = folder.name.removeprefix("cycle=").partition("-")[0]
            cycles[label] = list(_rows_in(folder))
        return cycles

    def _rows_in_iceberg(self) -> Mapping[str, Rows]:
        cycles: dict[str, Rows] = {}
        with self.lake_table() as table:
            for task in table.scan().plan_files():
                with table.io.new_input(task.file.file_path).open() as file:
                    rows = pq.ParquetFile(file).read().to_pylist()
                cycles.setdefault(_cycle_of(task.file.file_path), []).extend(rows)
        return cycles

    def _rows_in_delta(self) -> Mapping[str, Rows]:
        cycles: dict[str, Rows] = {}
        table = self.delta_table()
        system = table.to_pyarrow_dataset().filesystem
        for path in table.to_pyarrow_dataset().files:
            rows = pq.read_table(path, filesystem=system, partitioning=None).to_pylist()
            cycles.setdefault(_cycle_of(path), []).extend(rows)
        return cycles

    def _records(self) -> Mapping[str, Rows]:
        """Read the topic; a record does not tell its cycle, but its row does."""
        assert self.kafka is not None
        wait_for_commits(self.kafka.bootstrap, self._name)
        cycles: dict[str, Rows] = {}
        consumer = Consumer(
            {
                "bootstrap.servers": self.kafka.bootstrap,
                "group.id": "audit",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 5,
            }
        )
        consumer.assign([TopicPartition(self._name, number, 0) for number in (0, 1)])
        ends = 0
        while ends < 2:
            record = consumer.poll(30)
            assert record is not None, "no broker answers"
            if record.error() is None:
                row = json.loads(record.value())
                cycles.setdefault(f"g1.b{row['id'] // BATCH_ROWS}", []).append(row)
            else:
                ends += 1
        consumer.close()
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
        if kind in ("iceberg", "delta") and self._lake_on_s3:
            return []  # the scenes that kill have their tables in folders
        if kind == "iceberg":
            with self.lake_table() as table:
                used = table.inspect.files()["file_path"].to_pylist()
            data = self.folder / "iceberg" / "lake" / "db" / TABLE / "data"
            files = [path for path in data.rglob("*.parquet") if f"file://{path}" not in used]
            return [str(path) for path in [*files, *data.glob("semel-*/prepared/*")]]
        if kind == "delta":
            root = self.folder / "delta"
            named = {root / path for path in self.delta_table().file_uris()}
            files = [path for path in root.rglob("*.parquet") if path not in named]
            # Of a record that was being written, the store's own "….avro#1" stays; it hides it.
            return [str(path) for path in [*files, *root.glob("_semel-*/prepared/*.avro")]]
        if kind == "http":
            assert self.receiver is not None
            ledger = open_ledger(self.ledger)
            slug = Scope(ledger.ledger_id, APP, "main").slug
            ledger.close()
            return [one["txn"] for one in self.receiver.pending(slug)]
        if kind == "kafka":
            shards = self.folder / "shards"
            kept = [*shards.glob("*/semel-*/prepared/*"), *shards.glob("*/semel-*/from=*/*/*")]
            return [str(path) for path in kept]
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


def _cycle_of(path: str) -> str:
    found = re.search(r"/txn=(g\d+\.b\d+)\.", path)
    return found[1] if found else "rewritten"


def _table(kind: str) -> str:
    return f"{TABLE}_{kind.partition('-')[2]}"


def _rows_in(folder: Path) -> Iterable[dict[str, Any]]:
    for path in folder.iterdir():
        if path.suffix == ".parquet":
            yield from pq.read_table(path, partitioning=None).to_pylist()
        elif path.suffix == ".jsonl":
            yield from map(json.loads, path.read_text().splitlines())


@dataclass(frozen=True)
class Way:
    """How a process gets to a window: after another kill, or after a failure."""

    window: str
    killed_before_at: str = ""
    options: tuple[str, ...] = ()

    def kill(self, scene: Scene, occurrence: int = 1) -> None:
        if self.killed_before_at:
            scene.program.run(crash_at=self.killed_before_at)
        ended = scene.program.run(*self.options, crash_at=f"{self.window}#{occurrence}")
        assert ended.was_killed, f"{self} was not reached:\n{ended.output}"


def ways(make_scene: Callable[[], Scene]) -> list[Way]:
    """Find every window that the driver can pass, by walking."""
    found: dict[str, Way] = {}
    for before, options in [("", ()), (UNDECIDED, ()), (DECIDED, ()), ("", ("--fail-first",))]:
        scene = make_scene()
        if before:
            scene.program.run(crash_at=before)
        for window in scene.windows(*options):
            found.setdefault(window, Way(window, before, options))
    return list(found.values())
