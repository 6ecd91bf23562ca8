"""`semel run` on a real broker: a process that consumes, is stopped, and is killed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
import time
from contextlib import closing
from itertools import count

import pytest

from semel.kafka.client import kafka
from semel.testing.services import Child

pytestmark = pytest.mark.kafka

SHOP = """
import asyncio
import gc
import os
from pathlib import Path

from sqlalchemy import text

from semel import Outbox, consumer
from semel.messaging import FromPayload


@consumer("billing", id_from=FromPayload("id"))
async def billing(message, session):
    await session.execute(text("INSERT INTO paid VALUES (:id)"), {"id": message.id})
    await Outbox().add(session, message.payload["to"], {"paid": message.id})
    if any(one is text for one in gc.get_objects()):
        Path(__file__).with_name("collected").touch()
    while message.id == os.environ.get("HOLD"):
        Path(__file__).with_name("held").touch()
        await asyncio.sleep(0.05)
"""

_numbers = count(1)


class Shop:
    """A topic of payments, a database, and the service between them."""

    def __init__(self, server, folder):
        self.server = server
        self.folder = folder
        self.topic = f"run-payments-{next(_numbers)}"
        self.invoices = f"{self.topic}-invoices"
        server.create_topic(self.topic)
        server.create_topic(self.invoices)
        (folder / "run_shop.py").write_text(SHOP)
        with closing(sqlite3.connect(folder / "shop.db")) as connection:
            connection.execute("CREATE TABLE paid (id text)")

    def pay(self, *ids):
        producer = kafka.Producer({"bootstrap.servers": self.server.bootstrap})
        for number in ids:
            value = json.dumps({"id": f"p{number}", "to": self.invoices})
            producer.produce(self.topic, value, key=str(number))
        producer.flush()

    def start(self, *options, **environment):
        return Child(
            [
                *(sys.executable, "-m", "semel", "run", "run_shop:billing"),
                *("--topic", self.topic, "--group", self.topic, *options),
            ],
            self.folder / f"run-{next(_numbers)}.log",
            {
                "PYTHONPATH": os.pathsep.join([str(self.folder), *sys.path]),
                "SEMEL_BROKER": f"kafka://{self.server.bootstrap}",
                "SEMEL_DATABASE": f"sqlite:///{self.folder}/shop.db",
                **environment,
            },
        )

    def paid(self):
        with closing(sqlite3.connect(self.folder / "shop.db")) as connection:
            return sorted(number for (number,) in connection.execute("SELECT id FROM paid"))

    def client(self):
        settings = {"bootstrap.servers": self.server.bootstrap, "group.id": self.topic}
        return kafka.Consumer({**settings, "enable.auto.commit": False})

    def committed(self):
        with closing(self.client()) as client:
            (found,) = client.committed([kafka.TopicPartition(self.topic, 0)], timeout=10)
        return found.offset

    def sent(self):
        with closing(self.client()) as client:
            place = kafka.TopicPartition(self.invoices, 0)
            return client.get_watermark_offsets(place, timeout=10)[1]


@pytest.fixture
def shop(kafka_server, tmp_path):
    return Shop(kafka_server, tmp_path)


def until(holds, service, seconds=60.0):
    ends = time.monotonic() + seconds
    while not holds():
        assert service.is_alive(), service.last_lines()
        assert time.monotonic() < ends, service.last_lines()
        time.sleep(0.05)


def ended(service, seconds=60.0):
    """Wait for the end of a service; return its exit code and its last line."""
    ends = time.monotonic() + seconds
    while service.is_alive():
        assert time.monotonic() < ends, service.last_lines()
        time.sleep(0.05)
    service.end()
    return service.exit_code, service.last_lines().splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_service_handles_commits_and_ends_with_0_after_a_signal(shop, number):
    shop.pay(1, 2, 2, 3)
    service = shop.start("--create-tables")

    until(lambda: len(shop.paid()) == 3, service)
    service.end(number)

    assert service.exit_code == 0, service.last_lines()
    assert shop.paid() == ["p1", "p2", "p3"]
    assert shop.committed() == 4
    starts, *_, stopped, answer = service.log.read_text().splitlines()
    assert starts.endswith(
        f"INFO semel.run: service starts consumer=billing group={shop.topic} "
        f"topics={shop.topic} mode=transactional"
    )
    assert "service stopped" in stopped
    assert answer == f"consumer billing, group {shop.topic}: stopped"


@pytest.mark.kill
@pytest.mark.parametrize("mode", ["transactional", "batched"])
def test_a_service_that_is_killed_and_started_again_has_each_effect_once(shop, mode):
    ids = [f"p{number}" for number in range(10, 30)]
    shop.pay(*range(10, 30))
    options = ("--create-tables", "--mode", mode, "--max-records", "20")

    killed = shop.start(*options, HOLD="p25")
    until((shop.folder / "held").exists, killed)
    killed.end(signal.SIGKILL)
    service = shop.start(*options)
    until(lambda: shop.committed() == 20, service)
    service.end()

    assert killed.exit_code == -signal.SIGKILL
    assert service.exit_code == 0, service.last_lines()
    assert shop.paid() == ids


def test_a_relay_in_the_same_process_sends_what_handlers_wrote(shop):
    shop.pay(1, 2, 3)
    many = ("--concurrency", "20")  # more lanes than a database has connections by default
    service = shop.start("--create-tables", "--relay", *many, "--log-json", "--json")

    until(lambda: shop.sent() == 3, service)
    service.end()

    assert service.exit_code == 0, service.last_lines()
    logs, brace, document = service.log.read_text().partition("\n{\n")
    told = [json.loads(line) for line in logs.splitlines()]
    assert (told[0]["message"], told[0]["topics"]) == ("service starts", shop.topic)
    assert (told[-1]["message"], told[-1]["level"]) == ("service stopped", "info")
    answer = json.loads(brace + document)
    assert (answer["command"], answer["exit"], answer["sent"]) == ("run", 0, 3)
    assert not (shop.folder / "collected").exists(), "collections walk the loaded code"


def test_a_topic_that_does_not_exist_is_a_mistake(shop):
    service = shop.start("--create-tables", "--topic", "nowhere")

    code, line = ended(service)

    assert code == 2
    assert "has no topic nowhere: create it first" in line


def test_records_that_are_gone_before_they_were_handled_call_an_operator(shop):
    shop.pay(1, 2, 3)
    with closing(shop.client()) as client:
        client.commit(offsets=[kafka.TopicPartition(shop.topic, 0, 1)], asynchronous=False)
    admin = kafka.admin.AdminClient({"bootstrap.servers": shop.server.bootstrap})
    for answer in admin.delete_records([kafka.TopicPartition(shop.topic, 0, 3)]).values():
        answer.result(30)
    service = shop.start("--create-tables")

    code, line = ended(service)

    assert code == 4
    assert "records that were not handled are gone" in line
    assert "--reset-offsets" in line
    assert shop.paid() == []
