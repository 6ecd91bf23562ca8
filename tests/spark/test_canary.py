"""A password and a row's value are searched for in everything that a job writes about itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.spark.killing import ROWS_A_FILE, Scene

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(300)]

PASSWORD = "canary/p@ss?word"
SPELLINGS = (PASSWORD, "canary%2Fp%40ss%3Fword", "p@ss?word")
VALUE = 987_654_321_987


def test_no_output_of_a_good_or_failing_batch_has_a_password_or_a_rows_value(
    tmp_path: Path, postgres_url: str
) -> None:
    scene = Scene(tmp_path / "job", postgres_url, files=3)
    worst = scene.folder / "in" / "00002.json"
    lines = worst.read_text().splitlines()
    lines[7] = json.dumps(json.loads(lines[7]) | {"amount": VALUE})
    worst.write_text("\n".join(lines) + "\n")
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"create role canary login superuser password '{PASSWORD}'")
    where = urlsplit(postgres_url)
    scene.postgres = where._replace(
        netloc=f"canary:{SPELLINGS[1]}@{where.hostname}:{where.port}"
    ).geturl()
    (scene.folder / "events").mkdir()
    logged = {
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{scene.folder / 'events'}",
        "spark.eventLog.compress": "false",
        "spark.log.level": "INFO",
    }
    settings = [word for name, value in logged.items() for word in ("--set", f"{name}={value}")]
    told = []

    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"alter table entries add constraint small check (amount < {VALUE})")
        told.append(scene.run(*settings))
        connection.execute("alter table entries drop constraint small")
        connection.execute("alter table entries alter amount type integer")
        told.append(scene.run(*settings))
        count = connection.execute("select count(*) from entries").fetchone()

    assert [code for code, _ in told] == [65, 65], scene.last_words()
    assert count == (2 * ROWS_A_FILE,)
    assert "violates check constraint" in told[0][1]
    assert 'column "amount" (integer): a value is out of range' in told[1][1]
    written = {f"run {number}": output.encode() for number, (_, output) in enumerate(told)}
    for command in ("status", "history"):
        asked = [sys.executable, "-m", "semel", command, "--json"]
        url = f"sqlite:///{scene.folder / 'job.ledger'}"
        run = subprocess.run([*asked, "--ledger", url], capture_output=True, check=False)
        assert json.loads(run.stdout)
        written[command] = run.stdout + run.stderr
    for path in scene.folder.rglob("*"):
        if path.is_file() and path.relative_to(scene.folder).parts[0] not in ("in", "all", "large"):
            written[str(path)] = path.read_bytes()
    assert any("events" in name for name in written)
    assert any(b"SparkListenerTaskEnd" in content for content in written.values())
    for canary in (*SPELLINGS, str(VALUE)):
        assert [name for name, content in written.items() if canary.encode() in content] == []
