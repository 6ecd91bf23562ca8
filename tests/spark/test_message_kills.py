"""Real kills of consumers on Spark: every message has one end, whatever died when."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.dataset as ds
import pytest
from confluent_kafka import Producer

from semel import SqlDatabase
from semel.crashpoints import CrashPoint
from semel.errors import Retryable
from semel.kafka.broker import KafkaBroker
from semel.lease import Takeover
from semel.message import Partition
from semel.operate import audit
from semel.operate.audit import CycleUnsettled
from semel.operate.parking import release
from semel.operate.replay import Replay, ReplayResult, ReplaySettings
from semel.operate.selection import Offsets
from semel.testing.services import KafkaServer, SparkCluster, jdbc_jars
from tests.conftest import require
from tests.spark.killing import REPOSITORY, end
from tests.spark.message_job import pipeline
from tests.spark.test_cluster import QUICK_EXECUTORS
from tests.unit.postgres.messages.message_place import asked, make_tables

pytestmark = [
    pytest.mark.spark,
    pytest.mark.kafka,
    pytest.mark.postgres,
    pytest.mark.kill,
    pytest.mark.timeout(900),
]

KEYS, VERSIONS = 8, 15
DEADLINE_SECONDS = 150

PARKED = "k5-4"
"""The message that is parked until a person repairs what it fails at, with its key behind it."""

_numbers = count(1)


class Trouble:
    """A topic with duplicates, poison, failures and versions in the wrong order; and its job.

    One key has a message that is parked, and so the job ends only after `finish` has released it.
    """

    def __init__(
        self,
        folder: Path,
        postgres: str,
        broker: KafkaServer,
        seed: int = 1,
        *,
        fells: bool = False,
    ) -> None:
        self.folder, self.postgres, self.broker = folder, postgres, broker
        self.topic = f"troubles-{next(_numbers)}"
        self.repaired, self.felled = folder / "repaired", folder / "felled"
        folder.mkdir(parents=True)
        chance = random.Random(seed)
        self.handled: dict[str, tuple[str, int]] = {}
        self.hopeless: set[str] = set()
        records: list[tuple[str, dict[str, Any] | None]] = []
        for version in range(1, VERSIONS + 1):
            for key in (f"k{number}" for number in range(KEYS)):
                message_id = f"{key}-{version}"
                is_hopeless = version == VERSIONS and chance.random() < 0.5
                told = {
                    "id": message_id,
                    "key": key,
                    "version": version,
                    "fails": 0 if key == "k5" else chance.choice([0] * 9 + [1, 2]),
                    "hopeless": is_hopeless,
                    "kills": str(folder / "killed") if message_id == "k3-7" else "",
                    "fells": str(self.felled) if fells and message_id == "k2-9" else "",
                    "parks": str(self.repaired) if message_id == PARKED else "",
                }
                records.append((message_id, told))
                if is_hopeless:
                    self.hopeless.add(message_id)
                else:
                    self.handled[message_id] = (key, version)
        for _ in range(10):  # the next version of a key overtakes the one before
            at = chance.randrange(len(records) - KEYS)
            if not records[at][0].startswith("k5"):
                records[at], records[at + KEYS] = records[at + KEYS], records[at]
        records += chance.sample(records, 15)
        for _ in range(3):
            records.insert(chance.randrange(len(records)), ("", None))
        self.records = len(records)
        broker.create_topic(self.topic, 2)
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for message_id, value in records:
            raw = b"{" if value is None else json.dumps(value).encode()
            key = message_id.split("-")[0]
            place = sum(key.encode()) % 2
            producer.produce(
                self.topic, raw, key, place, headers=[("message-id", message_id.encode())]
            )
        assert producer.flush(30) == 0
        make_tables(postgres)
        self.ask("create table effects (id text, key text, version bigint, seq bigserial)")

    @property
    def messages(self) -> int:
        """How many messages there are, unreadable records included."""
        return len(self.handled) + len(self.hopeless) + 3

    def ask(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            connection.execute("set search_path = public, semel")
            found = connection.execute(statement)  # type: ignore[call-overload]
            return found.fetchall() if found.description else []

    def start(self, *options: str, **environment: str) -> subprocess.Popen[str]:
        where = [str(self.folder), self.postgres, self.broker.bootstrap, self.topic]
        command = [sys.executable, "-m", "tests.spark.message_job", *where, str(self.messages)]
        with (self.folder / "stderr.txt").open("a") as errors:
            return subprocess.Popen(
                [*command, *options],
                cwd=REPOSITORY,
                env=os.environ | environment,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def run(
        self,
        *options: str,
        beside: Callable[[subprocess.Popen[str]], object] = lambda job: None,
        **environment: str,
    ) -> tuple[int, str]:
        """Run the job to its end, whatever that is, and *beside* it what a person does."""
        with ThreadPoolExecutor(1) as person:
            job = self.start(*options, **environment)
            try:
                acting = person.submit(beside, job)
                output, _ = job.communicate(timeout=DEADLINE_SECONDS)
            finally:
                end(job)
            acting.result()
        return job.returncode, output

    def kill_at(self, point: CrashPoint) -> int:
        """Run the job with a kill at the second passage of a point; return its exit code."""
        once = str(self.folder / f"{point.value.replace(':', '-')}.once")
        code, output = self.run(SEMEL_CRASH_AT=f"{point.value}#2", SEMEL_CRASH_ONCE=once)
        assert Path(once).exists(), f"{point} was not reached: {output}\n{self.last_words()}"
        return code

    def kill_after(self, seconds: float) -> None:
        """Kill the job some time after its start; it cannot be done, because of what is parked."""
        job = self.start()
        try:
            assert job.stdout is not None
            assert any(line.startswith("STARTED") for line in job.stdout), self.last_words()
            with suppress(subprocess.TimeoutExpired):
                job.wait(seconds)
            assert job.poll() is None, f"it ended by itself: {self.last_words()}"
        finally:
            end(job)

    def last_words(self) -> str:
        return (self.folder / "stderr.txt").read_text()[-3000:]

    def finish(self, *options: str) -> None:
        """Run the job to its end; as soon as it parks, repair and release that."""
        code, output = self.run(*options, beside=self.release)
        assert code == 0, f"{output}\n{self.last_words()}"

    def release(self, job: subprocess.Popen[str] | None = None) -> None:
        """Release what is parked, once, or as long as a job runs."""
        parked = "select message_id from waiting_message where waits = 'parked'"
        while True:
            for (message_id,) in self.ask(parked):
                self.repaired.touch()
                with suppress(*([] if job is None else [Retryable, CycleUnsettled])):
                    asked(
                        self.postgres,
                        lambda of, one=message_id: release(of, "indexer", one, actor="ann"),
                    )
            if job is None or job.poll() is not None:
                return
            time.sleep(0.3)

    def replay(self) -> Mapping[ReplayResult, int]:
        """Replay records that the job has not come to, once its first cycle has ended."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not self.ask("select 1 from cycle_outcome"):
            assert time.monotonic() < deadline, self.last_words()
            time.sleep(0.1)
        consumer = pipeline(self.folder, self.postgres, Takeover.WAIT).as_consumer()
        which = Offsets(Partition(self.topic, 0), 40, 60)
        careful = ReplaySettings(canary=())

        async def run(database: SqlDatabase) -> Mapping[ReplayResult, int]:
            reader = KafkaBroker(self.broker.bootstrap).reader()
            replay = Replay(consumer, database, which, careful, actor="ann", reader=reader)
            return (await replay.run()).counts

        return asked(self.postgres, run)

    def assert_every_message_has_one_end(self) -> None:
        effects = self.ask("select id, key, version from effects order by seq")
        assert Counter(one for one, _, _ in effects) == Counter(self.handled.keys())
        table = ds.dataset(self.folder / "files", format="parquet").to_table(["id"])
        assert Counter(table["id"].to_pylist()) == Counter(self.handled.keys())
        for key in {key for key, _ in self.handled.values()}:
            order = [version for _, of, version in effects if of == key]
            assert order == sorted(order), f"the versions of {key} were applied out of order"
        letters = self.ask("select message_id, outcome from dead_letter")
        assert {one for one, outcome in letters if outcome == "dlq"} == self.hopeless
        assert sum(o == "deserialization_failure" for _, o in letters) == 3
        states = Counter(state for (state,) in self.ask("select state from processed_message"))
        assert states == {"COMPLETED": len(self.handled), "FAILED_TERMINAL": len(self.hopeless) + 3}
        assert self.ask("select count(*) from waiting_message") == [(0,)]
        sent = self.ask("select count(*), count(distinct message_id) from outbox_message")
        assert sent == [(len(self.handled), len(self.handled))]
        assert self.ask("select sum(total)::int from cycle_outcome") == [(self.records,)]
        assert self.ask("select count(*) from crash_suspect") == [(0,)]
        left = self.ask("select relname from pg_class where relname like 'stg\\_%' and relkind='r'")
        assert left == []


def test_a_driver_killed_at_one_point_after_another_gives_every_message_one_end(
    tmp_path: Path,
    postgres_url: str,
    kafka_server: KafkaServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(audit, "SETTLE_SECONDS", 0.5)
    trouble = Trouble(tmp_path / "job", postgres_url, kafka_server)

    for point in (CrashPoint.COMMIT_TXN_AFTER, CrashPoint.TOKENS_AFTER):
        assert trouble.kill_at(point) == -signal.SIGKILL
    with pytest.raises(CycleUnsettled):
        trouble.release()
    assert trouble.kill_at(CrashPoint.SPARK_BATCH_AFTER) == -signal.SIGKILL
    trouble.release()
    # A worker dies, and Spark tries its task again; another one dies of a message.
    assert trouble.kill_at(CrashPoint.STAGE_WRITTEN) == 0
    trouble.finish()

    trouble.assert_every_message_has_one_end()


def test_an_executor_killed_while_a_key_is_parked_and_offsets_are_replayed_changes_nothing(
    tmp_path: Path, postgres_url: str, kafka_server: KafkaServer
) -> None:
    trouble = Trouble(tmp_path / "job", postgres_url, kafka_server, fells=True)

    with require(SparkCluster(workers=1).start) as cluster, ThreadPoolExecutor(1) as person:
        settings = [QUICK_EXECUTORS, *map("=".join, cluster.session_settings.items())]
        options = [word for setting in settings for word in ("--set", setting)]
        replayed = person.submit(trouble.replay)
        trouble.finish("--master", cluster.master_url, *options)

    assert replayed.result()[ReplayResult.SENT] > 0
    assert trouble.felled.exists()
    trouble.assert_every_message_has_one_end()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_random_kills_give_every_message_one_end(
    tmp_path: Path, postgres_url: str, kafka_server: KafkaServer, seed: int
) -> None:
    trouble = Trouble(tmp_path / "job", postgres_url, kafka_server, seed)
    chance = random.Random(seed)

    for _ in range(5):
        trouble.kill_after(chance.uniform(0.0, 8.0))
    trouble.finish()

    trouble.assert_every_message_has_one_end()


@pytest.mark.soak
def test_an_owner_that_wakes_after_a_takeover_changes_nothing(
    tmp_path: Path, postgres_url: str, kafka_server: KafkaServer
) -> None:
    trouble = Trouble(tmp_path / "job", postgres_url, kafka_server)
    first = trouble.start()
    try:
        assert first.stdout is not None
        for line in first.stdout:
            if line.startswith("CycleEnded"):
                break
        os.killpg(first.pid, signal.SIGSTOP)
        trouble.finish("--takeover")
        os.killpg(first.pid, signal.SIGCONT)
        first.wait(60)
    finally:
        end(first)

    trouble.assert_every_message_has_one_end()


@pytest.mark.soak
def test_plain_spark_writes_messages_twice_under_the_same_kill(
    tmp_path: Path, postgres_url: str, kafka_server: KafkaServer
) -> None:
    require(jdbc_jars)
    trouble = Trouble(tmp_path / "job", postgres_url, kafka_server)

    trouble.run("--plain", SEMEL_CRASH_AT=f"{CrashPoint.SPARK_BATCH_AFTER.value}#2")
    trouble.run("--plain")

    effects = trouble.ask("select id, count(*) from effects group by id having count(*) > 1")
    assert effects, "the control must be convicted"
