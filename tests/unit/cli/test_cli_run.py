"""`semel run`: what is typed wrongly ends it with a sentence, before a message is read."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import types

import pytest
from typer.testing import CliRunner

from semel.cli.app import app
from semel.cli.commands.run import _service
from semel.cli.logs import JsonLines, LogLevel, TextLines, logging_to_stderr
from semel.codec import FromHeader
from semel.errors import Misuse
from semel.kafka import broker as kafka_broker
from semel.kafka.broker import KafkaBroker
from semel.memory.broker import MemoryBroker
from semel.messaging.handler import consumer
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RunnerSettings
from semel.policy.vocabulary import Mode
from tests.snapshots import compare, normal
from tests.unit.policy.policy_texts import CLEAN_CONSUMER, CLEAN_TOPIC, merged, text_of

SILENT = "kafka://ann:s3cret@127.0.0.1:1?security.protocol=PLAINTEXT"
"""A broker at a port where nothing listens."""


async def bill(message, session):
    pass


@pytest.fixture(autouse=True)
def _shop(tmp_path, monkeypatch):
    """A module with consumers, and an environment that names a database and a broker."""
    module = types.ModuleType("run_shop")
    vars(module).update(
        billing=consumer("billing", id_from=FromHeader("id"))(bill),
        leased=consumer("leased", mode=Mode.LEASED)(bill),
        number=7,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("SEMEL_DATABASE", f"sqlite:///{tmp_path}/shop.db")
    monkeypatch.setenv("SEMEL_BROKER", SILENT)
    monkeypatch.setattr(kafka_broker, "CALL_SECONDS", 0.5)


def ask(*arguments, code):
    done = CliRunner().invoke(app, ["run", *arguments, "--json"])
    assert done.exit_code == code, done.output
    assert "s3cret" not in done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run_shop:billing"], "say what to read with --topic NAME"),
        (["nowhere:billing", "-t", "t"], "consumer nowhere:billing: there is no module 'nowhere'"),
        (["run_shop:nothing", "-t", "t"], "has no 'nothing'; it has: billing, leased, number"),
        (["run_shop:number", "-t", "t"], "consumer run_shop:number: found a int; it must be"),
        (["run_shop", "-t", "t"], "write it as module:name"),
        (["run_shop:leased", "-t", "t", "--mode", "batched"], "is one of mode leased"),
        (["run_shop:billing", "-t", "t", "--policy", "no.yaml"], "no.yaml"),
        (["run_shop:billing", "-t", "t"], "shop.db"),
        (["run_shop:billing", "-t", "t", "--database", "mysql://db/shop"], "PostgreSQL or SQLite"),
        (
            ["run_shop:billing", "-t", "t", "--create-tables", "--database", "sqlite://"],
            "a database in memory is gone when this command ends",
        ),
        (
            ["run_shop:billing", "-t", "t", "--broker", "amqp://ann:s3cret@b/"],
            "--broker amqp://ann:***@b/ is not the URL of a broker; write kafka://host:port",
        ),
        (["run_shop:billing", "-t", "t", "--broker", "kafka://"], "has the form kafka://host:port"),
        (["run_shop:billing", "-t", "t", "--broker", "kafka://b?x"], "has the form kafka://host"),
        (
            ["run_shop:billing", "-t", "t", "--broker", "kafka://b?enable.auto.commit=true"],
            "never by a timer",
        ),
    ],
)
def test_a_mistake_is_named(arguments, said):
    assert said in ask(*arguments, code=2)["error"]


def test_the_document_of_a_stopped_service_keeps_its_keys(tmp_path, monkeypatch):
    async def serve(*_, **__):
        return 3

    monkeypatch.setattr("semel.cli.commands.run._serve", serve)

    stopped = ask("run_shop:billing", "-t", "payments", "--relay", code=0)

    compare("run", {"run": normal(stopped, tmp_path)})


def test_the_pool_has_a_connection_for_every_lane(monkeypatch):
    async def subscribe(broker, service):
        return await MemoryBroker({"t": 1}).subscribe(service.group, service.topics)

    async def run(runner):
        pools.append(runner.database.most_connections)

    pools = []
    monkeypatch.setattr("semel.cli.commands.run._subscribe", subscribe)
    monkeypatch.setattr(Runner, "run_until_signal", run)

    ask("run_shop:billing", "-t", "t", "--create-tables", code=0)
    ask("run_shop:billing", "-t", "t", "--concurrency", "40", code=0)

    assert pools[0] == 15
    assert pools[1] >= 43


def test_a_broker_and_a_database_must_be_named(monkeypatch):
    monkeypatch.delenv("SEMEL_BROKER")

    assert "(or $SEMEL_BROKER)" in ask("run_shop:billing", "-t", "t", code=2)["error"]

    monkeypatch.delenv("SEMEL_DATABASE")

    assert "(or $SEMEL_DATABASE)" in ask("run_shop:billing", "-t", "t", code=2)["error"]


def test_missing_tables_are_named_with_the_command_that_makes_them(tmp_path):
    (tmp_path / "shop.db").touch()

    error = ask("run_shop:billing", "-t", "t", code=2)["error"]

    assert "lacks the table" in error
    assert "semel db create" in error


def test_a_broker_that_does_not_answer_may_answer_later(tmp_path):
    error = ask("run_shop:billing", "-t", "t", "--create-tables", code=75)["error"]

    assert error.startswith("no Kafka broker answers at 127.0.0.1:1")
    assert "start the broker, or correct --broker" in error
    assert (tmp_path / "shop.db").exists()


def test_a_database_that_does_not_answer_may_answer_later():
    url = "postgresql://ann:s3cret@127.0.0.1:1/shop"

    ask("run_shop:billing", "-t", "t", "--database", url, code=75)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_it_without_an_error(monkeypatch, number):
    def interrupted(broker, topics):
        os.kill(os.getpid(), number)
        time.sleep(0.3)

    monkeypatch.setattr(KafkaBroker, "topic_ids", interrupted)
    before = signal.getsignal(number)

    served = ask("run_shop:billing", "-t", "t", "--create-tables", code=0)

    assert (served["consumer"], served["group"], served["topics"]) == ("billing", "billing", ["t"])
    assert signal.getsignal(number) == before


def policy_file(folder, **changes):
    file = folder / "policy.yaml"
    file.write_text(text_of(merged(CLEAN_CONSUMER, changes), CLEAN_TOPIC))
    return file


def test_a_policy_gives_topics_and_settings_and_options_win_over_the_runners(tmp_path):
    file = policy_file(
        tmp_path, retry={"maxAttempts": 7}, batch={"size": 50, "policy": "independent"}
    )
    given = consumer("c", id_from=FromHeader("id"))(bill)

    service = _service(given, file, None, None, {"concurrency": None, "max_records": 9})

    assert (service.group, service.topics) == ("c", ("t",))
    assert service.consumer.settings.retry.max_attempts == 7
    assert service.settings == RunnerSettings(mode=Mode.BATCHED, max_records=9)


def test_a_policy_that_contradicts_the_consumer_is_refused(tmp_path):
    file = policy_file(tmp_path)

    with pytest.raises(Misuse, match="its policy takes the id from the header 'id'"):
        _service(consumer("c", id_from=FromHeader("other"))(bill), file, None, None, {})
    with pytest.raises(Misuse, match="policy has mode transactional, the code leased"):
        _service(
            consumer("c", id_from=FromHeader("id"), mode=Mode.LEASED)(bill), file, None, None, {}
        )
    with pytest.raises(Misuse, match="there is no topic 'other'"):
        _service(consumer("c", id_from=FromHeader("id"))(bill), file, None, ["other"], {})


def test_without_a_policy_the_consumers_own_settings_hold():
    settings = ConsumerSettings(chunk=3)
    given = consumer("c", policy=settings, mode=Mode.LEASED)(bill)

    service = _service(given, None, "g", ["a", "b", "a"], {"concurrency": 2})

    assert service.consumer is given
    assert (service.group, service.topics) == ("g", ("a", "b"))
    assert service.settings == RunnerSettings(mode=Mode.LEASED, concurrency=2)


def warned(as_json, message, **extra):
    """Return the line that a warning makes."""
    record = logging.LogRecord("semel.messaging", logging.WARNING, "", 1, message, (), None)
    record.created = 1_700_000_000.25
    vars(record).update(extra)
    lines = JsonLines if as_json else TextLines
    return lines(lambda text: text.replace("s3cret", "***")).format(record)


def test_a_log_line_carries_its_fields():
    line = warned(False, "runner waits", consumer="billing", why='said "no"\nat s3cret', tries=3)

    assert line == (
        "2023-11-14T22:13:20.250Z WARNING semel.messaging: runner waits consumer=billing "
        'why="said \\"no\\"\\nat ***" tries=3'
    )


def test_a_log_line_as_json_carries_its_fields_and_keeps_its_own():
    line = warned(True, "runner waits", consumer="billing", why="no\ns3cret", level="mine")

    assert json.loads(line) == {
        "time": "2023-11-14T22:13:20.250Z",
        "level": "warning",
        "logger": "semel.messaging",
        "message": "runner waits",
        "consumer": "billing",
        "why": "no\n***",
    }


@pytest.mark.parametrize("as_json", [True, False])
def test_an_error_is_logged_with_its_traceback(capsys, as_json):
    with logging_to_stderr(LogLevel.ERROR, as_json=as_json, scrub=str):
        logging.getLogger("shop").warning("too unimportant")
        try:
            _ = 1 / 0
        except ZeroDivisionError:
            logging.getLogger("shop").exception("it failed", extra={"order": 7})
    logging.getLogger("shop").error("after the command")

    said = capsys.readouterr().err
    assert "ZeroDivisionError" in said
    assert "unimportant" not in said
    assert "after the command" not in said
    first = said.splitlines()[0]
    assert json.loads(first)["order"] == 7 if as_json else first.endswith("it failed order=7")
