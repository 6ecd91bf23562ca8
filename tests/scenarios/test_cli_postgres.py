"""The commands on real things: a ledger and a sink in PostgreSQL, and files beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from semel.crashpoints import CrashPoint
from semel.pipeline.driver import Driver, Settings
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff, one_by_one
from semel.pipeline.txn import CycleId
from semel.postgres.ledger import PostgresLedger
from semel.sinks import FilesSink, PostgresSink
from semel.testing.crash import Crash, crash_at
from semel.testing.local import local_stage
from tests.unit.cli.cli_world import MODULE, Shell, World, publish

pytestmark = pytest.mark.postgres

WHY = ("--why", "the test wants it", "--who", "ann", "--yes")


class Place:
    """A pipeline into PostgreSQL and files; every driver is another process's."""

    def __init__(self, url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = url
        self.folder = folder
        self.ledger = PostgresLedger(url)
        self.monkeypatch = monkeypatch
        self.shell = Shell(World())
        self.driver = self.new_driver()

    def new_driver(self) -> Driver:
        sinks = [
            PostgresSink(self.url, "entries", cycle_column="cycle", name="table"),
            FilesSink(str(self.folder / "lake"), name="lake"),
        ]
        settings = Settings(commit_backoff=Backoff(tries=2, first_seconds=0.0))
        driver = Driver("shop", self.ledger, sinks, settings=settings, each=one_by_one)
        publish(self.monkeypatch, driver=driver)
        return driver

    def run(self, batch: int) -> None:
        if not self.driver.is_started:
            self.driver.start()
        if not self.ledger.generations(self.driver.scope):
            self.ledger.open_generation(self.driver.lease, "checkpoint-1")
        rows = [{"id": 100 * batch + n, "note": f"row {n}"} for n in range(20)]
        schema = pa.schema([("id", pa.int64()), ("note", pa.string())])
        self.driver.run_cycle(
            CycleId(self.driver.scope, 1, batch),
            lambda: BatchRange.of_offsets({"orders/0": (20 * batch, 20 * batch + 20)}),
            local_stage(
                self.driver.sinks,
                rows,
                as_batch=lambda some: pa.RecordBatch.from_pylist(list(some), schema),
            ),
        )

    def die_at(self, batch: int, point: CrashPoint) -> None:
        """Lose the driver: its connections are cut and its lease is over."""
        with crash_at(point), pytest.raises(Crash):
            self.run(batch)
        for sink in self.driver.sinks:
            sink.close()
        self.ledger.release(self.driver.lease)
        self.driver = self.new_driver()

    def ask(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        return self.shell.ask(*arguments, code=code)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            found = connection.execute(statement)
            return found.fetchall() if found.description else []


@pytest.fixture
def place(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute("CREATE TABLE entries (id bigint PRIMARY KEY, note text, cycle text)")
    return Place(postgres_url, tmp_path, monkeypatch)


def test_asking_makes_no_ledger_in_a_database(postgres_url: str) -> None:
    done = Shell(World()).type("status", "--ledger", postgres_url, "--json")

    assert done.exit_code == 2
    assert "there is no ledger" in json.loads(done.stdout)["error"]
    with psycopg.connect(postgres_url) as connection:
        found = connection.execute("SELECT to_regnamespace('semel')").fetchone()
    assert found == (None,)


def test_what_was_staged_is_what_readers_see_until_somebody_changes_it(place: Place) -> None:
    place.run(0)
    place.run(1)

    verified = place.ask("verify")
    place.query("UPDATE entries SET note = 'changed' WHERE id = 103")
    changed = place.ask("verify", code=1)

    assert {check["verdict"] for check in verified["checks"]} == {"equal"}
    wrong = [(c["cycle"], c["sink"]) for c in changed["checks"] if c["verdict"] == "different"]
    assert wrong == [("g1.b1", "table")]


@pytest.mark.parametrize(
    ("point", "rows"), [(CrashPoint.COMMIT_TXN_BEFORE, 0), (CrashPoint.COMMIT_2PC_BEFORE, 20)]
)
def test_the_doctor_sees_what_a_crash_left_and_recovery_settles_it(
    place: Place, point: CrashPoint, rows: int
) -> None:
    place.die_at(0, point)

    document = place.ask("doctor", code=1)
    place.ask("recover", "--dry-run", code=1)
    place.ask("recover", *WHY)

    found = {(s["sink"], s["found"]) for s in document["scopes"][0]["stranded"]}
    assert found == {("table", "held"), ("lake", "held")}
    assert all(s["evidence"] for s in document["scopes"][0]["stranded"])
    assert place.query("SELECT count(*) FROM entries") == [(rows,)]
    healthy = place.ask("doctor")
    assert healthy["scopes"][0]["problems"] == []


def test_a_stuck_cycle_is_diverted_and_finished(place: Place) -> None:
    place.die_at(0, CrashPoint.COMMIT_2PC_BEFORE)
    place.query("INSERT INTO entries VALUES (7, 'foreign', 'none')")

    stuck = place.ask("recover", *WHY, code=4)
    done = place.ask("cycle", "resolve", "--cycle", "g1.b0", "--divert", "rejects",
                     "--sink", "table", *WHY)  # fmt: skip
    rest = place.ask("recover", *WHY)

    assert "semel cycle resolve" in stuck["error"]
    table = next(sink for sink in done["sinks"] if sink["sink"] == "table")
    lake = next(sink for sink in done["sinks"] if sink["sink"] == "lake")
    assert (table["written"], table["diverted"]) == (19, 1)
    # Recovery had finished the other sink, though this one could not be.
    assert lake["did"] == "nothing"
    assert done["finished"]
    assert rest["finished"] == []
    assert place.query("SELECT count(*) FROM entries") == [(20,)]
    acts = [act.act for act in place.ledger.acts(place.driver.scope)]
    assert "cycle-resolve-done" in acts


def test_a_stopped_server_is_silence_and_not_a_fault(place: Place) -> None:
    place.run(0)
    sinks = [PostgresSink("postgresql://u:secret@127.0.0.1:1/x", "entries", name="table")]
    publish(place.monkeypatch, driver=Driver("shop", place.ledger, sinks))

    done = place.shell.type("doctor", "--pipeline", f"{MODULE}:driver", "--json")

    assert done.exit_code == 1
    kinds = {p["kind"] for p in json.loads(done.stdout)["scopes"][0]["problems"]}
    assert kinds == {"sink_silent"}
    assert "secret" not in done.output


def test_looking_makes_nothing_where_nothing_was_written_yet(place: Place) -> None:
    assert place.ledger.ledger_id
    tables = "SELECT schemaname, relname FROM pg_stat_user_tables ORDER BY 1, 2"
    before = place.query(tables)

    place.ask("lint")
    place.ask("verify")
    assert place.query(tables) == before

    place.ask("doctor")
    place.ask("recover", "--dry-run")
    assert not (place.folder / "lake").exists()
    assert place.ledger.scopes() == []


def test_lint_says_what_readers_see(place: Place) -> None:
    document = place.ask("lint", "--check")

    assert [sink["stated"] for sink in document["sinks"]] == [True, True]
    assert "entries" in document["sinks"][0]["effect"]


def test_a_ledger_in_a_database_names_pg_dump_and_is_restored(place: Place) -> None:
    place.run(0)
    place.driver.stop()
    url = ("--ledger", place.url, "--json")

    told = place.shell.type("ledger", "backup", "copy", *url)
    back = place.shell.type("ledger", "restore", *url, *WHY)

    assert told.exit_code == 2, told.output
    assert (
        "pg_dump --format=custom --table='semel.semel_*' "
        "--exclude-table='semel.semel_messaging' --file=copy" in told.stdout
    )
    assert back.exit_code == 0, back.output
    assert json.loads(back.stdout)["marks"] == {"shop/main": "g1.b0"}
