"""What a handler wanted to write is in no reason and no log, and in nothing once it is erased."""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError

from semel.codec import FromHeader
from semel.memory.broker import MemoryBroker
from semel.message import Coordinates, Message
from semel.messaging.failed.retries import retry_due
from semel.messaging.handle.attempt import handle_message
from semel.messaging.handle.batch import consume_many
from semel.messaging.handle.lease import handle_leased
from semel.messaging.handler import consumer
from semel.messaging.receive.inbox import Inbox
from semel.messaging.receive.runner import Runner
from semel.messaging.settings import ConsumerSettings, RetryPolicy, RunnerSettings
from semel.operate.explain import explain_message
from semel.operate.replay import Replay
from semel.operate.retention import erase
from semel.operate.selection import Letters
from semel.outboxes import Outbox
from semel.policy.vocabulary import GiveUp, RetryMode
from semel.sql.tables import metadata
from tests.messaging.act_world import ANN
from tests.messaging.incoming import work_once
from tests.messaging.places import InPostgres, InSqlite
from tests.stores.world import in_world

SECRET = "SECRETANN"
KEY = "customer-7"
PAYLOAD = json.dumps({"mail": SECRET}).encode()
ADD = text("INSERT INTO person (mail) VALUES (:mail)")
ONCE = ConsumerSettings(retry=RetryPolicy(max_attempts=1), dead_letter_topic="payments.dlq")
PARKS = replace(ONCE, on_exhausted=GiveUp.PARK, on_hopeless=GiveUp.PARK)
LATER = ConsumerSettings(
    retry=RetryPolicy(max_attempts=9, initial_delay_seconds=0.0, mode=RetryMode.RETRY_TABLE)
)
RETRYABLE = {IntegrityError: "PRECONDITION_FAILED"}


def message(message_id: str, raw: bytes = PAYLOAD) -> Message:
    headers = {"message-id": message_id.encode(), "mail": SECRET.encode()}
    source = Coordinates("payments", 0, 7)
    return Message(message_id, json.loads(raw), raw, KEY, headers=headers, source=source)


def adding(name: str, policy: ConsumerSettings, **options: Any) -> Any:
    @consumer(name, policy=policy, id_from=FromHeader("message-id"), **options)
    async def handle(message: Message, session: Any) -> None:
        await session.execute(ADD, {"mail": message.payload["mail"]})

    return handle


def adding_by_itself(name: str, database: Any) -> Any:
    @consumer(name, policy=ONCE)
    async def handle(message: Message, lease: Any) -> None:
        async with database.engine.begin() as connection:
            await connection.execute(ADD, {"mail": SECRET})

    return handle


def raises(error: BaseException) -> str:
    """Be a rule that fails, as one does that looks for what is not there."""
    raise error


def answering() -> Any:
    outbox = Outbox()

    @consumer("answers", policy=ConsumerSettings(keeps_results=True))
    async def handle(message: Message, session: Any) -> dict[str, str]:
        await outbox.add(session, "mails", {"mail": SECRET}, key="mail-1")
        return {"mail": SECRET}

    return handle


async def in_every_mode(world: Any) -> None:
    """Let a message fail in every mode at a row that is there already, and be handled once."""
    database = world.database
    async with database.engine.begin() as connection:
        await connection.execute(text("CREATE TABLE person (mail text UNIQUE)"))
        await connection.execute(ADD, {"mail": SECRET})

    await handle_message(adding("buries", ONCE), database, message("single"))
    await handle_message(adding("parks", PARKS), database, message("parked"))
    retries = adding("retries", LATER, rules=RETRYABLE)
    await handle_message(retries, database, message("retried"))
    await retry_due(retries, database)
    many = [message("b1"), message("b2", b'{"mail": "other"}'), message("b3")]
    await consume_many(adding("batches", ONCE), database, many)
    await handle_leased(adding_by_itself("leases", database), database, message("leased"), "w1")
    for name, policy, rules in (("inbox", ONCE, None), ("slow inbox", LATER, RETRYABLE)):
        handle = adding(name, policy, rules=rules or {})
        await Inbox(handle, database).store(message("stored"))
        await work_once(handle, database)
    await handle_message(answering(), database, message("answered"))
    await Inbox(answering(), database).store_and_handle(message("answered at once"))
    await Replay(adding("buries", ONCE), database, Letters(), name="again", actor="ann").run()


async def places_of(world: Any, *, but: tuple[str, ...] = ()) -> set[str]:
    """Name the columns of semel's tables that have the secret, headers read as they are sent."""
    found = set()
    async with world.database.engine.connect() as connection:
        for table in metadata.sorted_tables:
            for row in await connection.execute(select(table)):
                for name, value in row._mapping.items():
                    if name not in but and SECRET in readable(name, value):
                        found.add(f"{table.name}.{name}")
    return found


def readable(name: str, value: object) -> str:
    if name == "headers" and value:
        said = json.loads(str(value))
        return str({one: base64.b64decode(coded) for one, coded in said.items()})
    return str(value)


async def reasons(world: Any) -> dict[str, list[str]]:
    """Return every column of a failure's words."""
    columns = {"dead_letter": "reason", "waiting_message": "reason", "inbox_message": "error"}
    found = {}
    async with world.database.engine.connect() as connection:
        for table, column in columns.items():
            rows = await connection.execute(select(metadata.tables[table].c[column]))
            found[table] = [one for one in rows.scalars() if one]
    return found


class OnlyOneTransaction:
    """A database that answers for one transaction, so that its failure cannot be written."""

    def __init__(self, database: Any) -> None:
        self.classification = database.classification
        self._begins = iter([database.begin])

    def begin(self) -> Any:
        for begin in self._begins:
            return begin()
        raise ConnectionError("away")


def said_in(records: list[logging.LogRecord]) -> str:
    """Return all that a handler of logs could write."""
    formatter = logging.Formatter()
    return "\n".join(formatter.format(record) + repr(vars(record)) for record in records)


class Secrets:
    """What holds on every SQL database."""

    @pytest.fixture(autouse=True)
    def _logs(self, caplog):
        caplog.set_level(logging.DEBUG, logger="semel")
        self.caplog = caplog

    @in_world
    async def test_no_reason_has_what_a_handler_wanted_to_write(self, world):
        await in_every_mode(world)

        # The headers of a dead letter's record are the message's own, and its reason.
        assert await places_of(world, but=("payload", "headers", "result")) == set()
        said = await reasons(world)
        assert {table: len(words) for table, words in said.items()} == {
            "dead_letter": 5,
            "waiting_message": 3,
            "inbox_message": 2,
        }
        assert all("IntegrityError: " in one for words in said.values() for one in words)
        async with world.database.begin() as unit:
            sent = await unit.outbox.read("outbox", 0, 100)
        told = [entry.headers.get("dead-letter-reason", b"") for entry in sent]
        assert sum(b"IntegrityError: " in one for one in told) >= 4
        assert not any(SECRET.encode() in one for one in told)
        for name in ("single", "parked", "retried", "b1", "leased", "stored"):
            assert SECRET not in str(await explain_message(world.database, name))

    @in_world
    async def test_nothing_has_it_once_it_is_erased(self, world):
        await in_every_mode(world)
        before = await places_of(world)
        assert {"dead_letter.payload", "waiting_message.payload", "inbox_message.result"} < before
        assert {"outbox_message.headers", "processed_message.result"} < before

        await erase(world.database, key=KEY, **ANN)

        assert await places_of(world) == set()
        said = await reasons(world)
        assert set(said["dead_letter"] + said["waiting_message"]) == {"its payload was erased"}
        assert set(said["inbox_message"]) == {"ERASED"}

    @in_world
    async def test_what_an_exception_quotes_goes_with_its_message(self, world):
        @consumer("quotes", policy=ONCE)
        async def handle(message: Message, session: Any) -> None:
            raise ValueError(f"no such customer: {SECRET}")

        await handle_message(handle, world.database, message("m1"))
        await handle_message(replace(handle, settings=PARKS), world.database, message("m2"))
        await Inbox(handle, world.database).store(message("m3"))
        await work_once(handle, world.database)
        assert {"dead_letter.reason", "waiting_message.reason"} < await places_of(world)

        for name in ("m1", "m2", "m3"):
            await erase(world.database, message_id=name, **ANN)

        assert await places_of(world) == set()

    @in_world
    async def test_no_log_has_it(self, world):
        await in_every_mode(world)
        once = OnlyOneTransaction(world.database)
        await handle_message(adding("unwritten", ONCE), once, message("unwritten"))

        ours = [record for record in self.caplog.records if record.name.startswith("semel")]
        assert any("failure could not be written" in record.getMessage() for record in ours)
        assert SECRET not in said_in(ours)

    @in_world
    async def test_no_log_of_a_runner_has_it(self, world):
        async with world.database.engine.begin() as connection:
            await connection.execute(text("CREATE TABLE person (mail text UNIQUE)"))
            await connection.execute(ADD, {"mail": SECRET})
        broker = MemoryBroker({"t": 1})
        for number in range(3):
            broker.put("t", PAYLOAD, headers={"message-id": str(number).encode()})
        subscription = await broker.subscribe("g", ["t"])
        await broker.settled("g")
        settings = RunnerSettings(wait_seconds=0.01)
        handle = adding("runs", ONCE, rules={IntegrityError: raises})
        runner = Runner(handle, subscription, world.database, settings)
        await runner.run_until_idle()
        await broker.close()

        ours = [record for record in self.caplog.records if record.name.startswith("semel")]
        assert len((await reasons(world))["dead_letter"]) == 3
        assert "a rule failed" in {record.getMessage() for record in ours}
        assert SECRET not in said_in(ours)


class TestInSqlite(InSqlite, Secrets):
    pass


class TestInPostgres(InPostgres, Secrets):
    pass
