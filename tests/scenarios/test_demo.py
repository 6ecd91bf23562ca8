"""The demo as its users run it, and its audit on data that somebody tampered with."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog
from rich.console import Console

from examples.demo.audit import count, open_store
from examples.demo.command import start_broker, tell
from examples.demo.payments import Payment, Producer, read_source
from examples.demo.pipeline import TABLE, create_iceberg_table
from examples.demo.place import Place, Variant
from examples.demo.run import Kill, Plan, RunReport
from semel.testing.services import SeaweedServer, jars
from semel.testing.services.processes import java
from tests.conftest import require

PLAN = Plan(seed=3, seconds=1, kills=1, per_second=400)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for all temporary files; PostgreSQL's own user must be able to enter it."""
    folder = Path(tempfile.mkdtemp(prefix="semel-test-demo-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def start_demo(temporary: Path, *options: str) -> subprocess.Popen[str]:
    require(java)
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        # As in a shell without job control, Ctrl-C would be ignored otherwise.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def processes_of(temporary: Path) -> list[str]:
    command = ["ps", "-axwwo", "pid=,args="]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line for line in table.splitlines() if str(temporary) in line]


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def assert_nothing_is_left(temporary: Path) -> None:
    # Spark's Python workers end by themselves, a moment after their JVM.
    wait_until(lambda: not processes_of(temporary), seconds=15)
    assert list(temporary.iterdir()) == []


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.seaweedfs
@pytest.mark.kill
@pytest.mark.slow
def test_a_killed_run_passes_its_audit_and_leaves_nothing(temporary: Path):
    demo = start_demo(temporary, "--seconds=3", "--kills=1", "--no-contrast")
    output, _ = demo.communicate(timeout=240)

    assert demo.returncode == 0, output
    assert "in 3 s from Kafka" in output
    assert "kill -9" in output
    assert output.count("✓ once") == 5
    assert "4,500" in output
    assert "the batch stands still" in output
    assert output.count("will be handled as") == 3
    assert "nothing waits any more" in output
    assert "Traceback" not in output
    assert "py4j" not in output
    assert_nothing_is_left(temporary)


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.seaweedfs
@pytest.mark.slow
def test_ctrl_c_ends_every_process_and_removes_every_file(temporary: Path):
    demo = start_demo(temporary, "--seconds=60", "--kills=0", "--files")
    wait_until(lambda: any(temporary.glob("*/semel/input/*.json")), seconds=90)

    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=60)

    assert demo.returncode == 130, output
    assert "nothing is left behind" in output
    assert "Traceback" not in output
    assert_nothing_is_left(temporary)


def test_without_kafka_the_payments_come_from_files(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SEMEL_SERVICES_DIR", str(tmp_path / "services"))
    monkeypatch.setattr(jars, "java", lambda: "/bin/false")
    console = Console(file=io.StringIO(), width=120)

    with ExitStack() as stack:
        assert start_broker(stack, tmp_path, console) is None

    announced, why = console.file.getvalue().splitlines()
    assert announced.startswith("Fetching Kafka once (55 MB)")
    assert "come from files, without Kafka: the jars of Kafka could not be fetched" in why


@pytest.fixture
def finished(tmp_path: Path, postgres_url: str, seaweedfs: SeaweedServer) -> Place:
    """A run whose sinks have what they should have."""
    folder = tmp_path / f"run{uuid.uuid4().hex}"
    place = Place(folder, postgres_url, "", seaweedfs.endpoint, seaweedfs.catalog_uri)
    place.make()
    create_iceberg_table(place)
    producer = Producer(place.input, PLAN.seed, PLAN.total, PLAN.per_second)
    producer.produce(elapsed_seconds=PLAN.seconds)
    payments = read_source(place.input)
    with psycopg.connect(postgres_url) as connection:
        connection.execute(TABLE)
        connection.cursor().executemany(
            "INSERT INTO entries (id, account, kind, amount, version) VALUES (%s, %s, %s, %s, %s)",
            payments,
        )
    large = [payment._asdict() for payment in payments if payment.is_large]
    place.large.mkdir()
    pq.write_table(pa.Table.from_pylist(large), place.large / "part-0.parquet")
    with open_store(place).open_output_stream(object_of(place, 0)) as file:
        pq.write_table(pa.Table.from_pylist(large), file)
    append_to_iceberg(place, payments)
    return place


def object_of(place: Place, number: int) -> str:
    return f"{place.objects.removeprefix('s3://')}/part-{number}.parquet"


def append_to_iceberg(place: Place, payments: list[Payment]) -> None:
    with closing(load_catalog("lake", **place.lake)) as catalog:
        rows = pa.Table.from_pylist([payment._asdict() for payment in payments])
        catalog.load_table(place.table).append(rows)


def exit_code_for(place: Place) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=120)
    report = RunReport(Variant.SEMEL, place, kills=[Kill(1, "in cycle 4 (flush)", 4)])
    code = tell([count(Variant.SEMEL, place)], [report], PLAN, console)
    return code, console.file.getvalue()


@pytest.mark.postgres
@pytest.mark.seaweedfs
def test_the_audit_passes_what_is_right(finished: Place):
    code, output = exit_code_for(finished)

    assert code == 0
    assert output.count("✓ once") == 4


@pytest.mark.postgres
@pytest.mark.seaweedfs
@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM entries WHERE id = (SELECT min(id) FROM entries)",
        "INSERT INTO entries SELECT * FROM entries ORDER BY id LIMIT 1",
        "UPDATE entries SET amount = amount + 1 WHERE id = (SELECT min(id) FROM entries)",
        "INSERT INTO entries (id, account, kind, amount) VALUES ('x', 'acc-1', 'payment', 0)",
    ],
    ids=["missing", "twice", "changed", "foreign"],
)
def test_the_audit_convicts_one_wrong_row_in_postgres(finished: Place, statement: str):
    with psycopg.connect(finished.url) as connection:
        connection.execute(statement)

    code, output = exit_code_for(finished)

    assert code == 1
    assert output.count("✓ once") == 3
    assert "must never happen" in output


@pytest.mark.postgres
@pytest.mark.seaweedfs
def test_the_audit_convicts_a_file_that_is_there_twice(finished: Place):
    part = finished.large / "part-0.parquet"
    shutil.copy(part, finished.large / "part-1.parquet")

    code, output = exit_code_for(finished)

    assert code == 1
    large = sum(payment.is_large for payment in read_source(finished.input))
    assert f"{large}" in output


@pytest.mark.postgres
@pytest.mark.seaweedfs
def test_the_audit_convicts_a_file_that_is_gone(finished: Place):
    (finished.large / "part-0.parquet").unlink()

    code, _ = exit_code_for(finished)

    assert code == 1


@pytest.mark.postgres
@pytest.mark.seaweedfs
def test_the_audit_convicts_a_payment_that_is_in_iceberg_twice(finished: Place):
    append_to_iceberg(finished, read_source(finished.input)[:1])

    code, output = exit_code_for(finished)

    assert code == 1
    assert output.count("✓ once") == 3


@pytest.mark.postgres
@pytest.mark.seaweedfs
@pytest.mark.parametrize("number", [0, 1], ids=["gone", "twice"])
def test_the_audit_convicts_an_object_that_is_gone_or_there_twice(finished: Place, number: int):
    store = open_store(finished)
    if number:
        store.copy_file(object_of(finished, 0), object_of(finished, number))
    else:
        store.delete_file(object_of(finished, number))

    code, output = exit_code_for(finished)

    assert code == 1
    assert output.count("✓ once") == 3


def test_a_file_of_payments_appears_whole_and_the_total_is_exact(tmp_path: Path):
    producer = Producer(tmp_path, seed=5, total=1_001, per_second=100)

    producer.produce(elapsed_seconds=1.1)
    early = read_source(tmp_path)
    producer.produce(elapsed_seconds=60)

    assert len(early) == 100
    assert producer.is_done
    payments = read_source(tmp_path)
    assert len({payment.id for payment in payments}) == len(payments) == 1_001
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert all(isinstance(payment, Payment) for payment in payments)
