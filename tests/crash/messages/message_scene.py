"""A pipeline of messages without Spark: the pass, the sinks, and what must be true in the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa

from semel.arrow.changes import to_batch
from semel.codec import FromPayload, Reading
from semel.lease import Takeover
from semel.memory.ledger import MemoryLedger
from semel.message import Coordinates, Message, Record
from semel.messaging.failure import (
    CLASSIFICATION,
    NonRetryableMessageError,
    RetryableMessageError,
)
from semel.messaging.handle.claims import SKIPPED
from semel.messaging.settings import ConsumerSettings, RetryPolicy
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.driver import CycleReplayed, Driver, Settings
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff, one_by_one
from semel.pipeline.txn import CycleId, SinkTxnId
from semel.policy.vocabulary import GapPolicy, GiveUp, RetryMode
from semel.postgres.connect import pool
from semel.postgres.lean import LeanClaims, lean_id
from semel.postgres.messages import MessagesSink
from semel.postgres.sink import PostgresSink
from semel.spark.messages.handling import (
    Arrival,
    MessagePass,
    PassSettings,
    Send,
    stored_record,
)
from semel.testing.clock import SimulatedClock
from semel.testing.crash import Crash
from tests.unit.postgres.messages.message_place import connect, make_tables

CONSUMER: Final = "indexer"
TASKS: Final = 2
ATTEMPTS: Final = 3
FAILS: Final = {"b1": 2, "f1": ATTEMPTS}
"""How often the handler fails at a message."""

POISON: Final = "d1"
BATCHES: Final = (
    ("a1", "b1", "c1", "f1"),
    ("a2", "b2", "c2", "s1"),
    ("a1", "b3", "d1"),
    ("b2", "c3"),
    ("e1", "e1", "a3", "f2"),
    ("b4",),
    ("c4", "a2"),
)
"""The ids of the messages: the key, and its version."""

ENDS: Final = dict.fromkeys(sorted({name for batch in BATCHES for name in batch}), "COMPLETED") | {
    POISON: "FAILED_TERMINAL",
    "f1": "PARKED",
    "f2": "PARKED",  # behind it
}
"""What becomes of each message if nobody acts."""

ATTEMPTED: Final = {("b1", 1), ("b1", 2), ("d1", 1), ("f1", 1), ("f1", 2), ("f1", 3)}
QUESTIONS: Final = {
    "claims": "SELECT message_id, state, replace(marker, 'BEHIND', '') FROM processed_message "
    "ORDER BY 1",
    "ends": "SELECT id, 'COMPLETED' FROM effects UNION ALL "
    "SELECT message_id, 'PARKED' FROM waiting_message UNION ALL "
    "SELECT message_id, 'FAILED_TERMINAL' FROM dead_letter ORDER BY 1",
    "sent": "SELECT key, count(*) FROM outbox_message GROUP BY 1 ORDER BY 1",
    "versions": "SELECT key, version FROM aggregate_version ORDER BY 1",
    "order": "SELECT key, array_agg(id ORDER BY number) FROM effects GROUP BY 1 ORDER BY 1",
    "attempts": "SELECT message_id, number FROM failed_attempt ORDER BY 1, 2",
    "counts": "SELECT sum(total) FROM cycle_outcome",
    "left": "SELECT tablename FROM pg_tables WHERE tablename ~ '^stg_' UNION ALL "
    "SELECT attempt FROM sink_attempt WHERE state = 'prepared' UNION ALL "
    "SELECT message_id FROM crash_suspect",
}
EFFECTS: Final = pa.schema([("id", pa.string()), ("key", pa.string())])
SETTINGS: Final = ConsumerSettings(
    retry=RetryPolicy(ATTEMPTS, 0.0, 0.0, jitter=False, mode=RetryMode.RETRY_TABLE),
    on_exhausted=GiveUp.PARK,
    versioned=True,
    gaps=GapPolicy.ALERT,
)
READING: Final = Reading(
    FromPayload("id"), key_from=FromPayload("key"), version_from=FromPayload("version")
)
LEASE_SECONDS: Final = 30.0


def record_of(name: str, offset: int = 0, **more: Any) -> Record:
    told = {"id": name, "key": name[0], "version": int(name[1:]), **more}
    return Record(Coordinates("events", 0, offset), json.dumps(told).encode())


@dataclass
class Scene:
    """A database, a ledger, and the processes that come one after the other."""

    url: str
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    """The ledger's: leases end when a test says so."""

    claims: str = "all"
    attempts: int = 0
    repaired: set[str] = field(default_factory=set)
    """Messages at which the handler fails no more."""

    def __post_init__(self) -> None:
        self.ledger = MemoryLedger(self.clock)
        self.of_pass = PassSettings(
            *(CONSUMER, self.handle, READING, SETTINGS, CLASSIFICATION, {"effects": 0}, [dict]),
            is_lean=self.claims == "lean",
        )

    def handle(self, message: Message) -> Iterator[Any]:
        if message.id not in self.repaired and "fixed" not in message.payload:
            if message.id == POISON:
                raise NonRetryableMessageError("no")
            if message.attempt <= FAILS.get(message.id, 0):
                raise RetryableMessageError("not yet")
        yield "effects", {"id": message.id, "key": message.key}
        yield Send("out", {}, key=message.key)

    def run(self) -> None:
        """Start a process, recover, and run every batch, and empty ones while something is due."""
        sinks = [
            PostgresSink(self.url, "effects", name="effects", lock_seconds=0.3),
            MessagesSink(self.url, CONSUMER, lock_seconds=0.3),
        ]
        sinks[1].claims = self.claims  # type: ignore[attr-defined]
        again = Backoff(tries=4, first_seconds=0.0)
        settings = Settings(
            LEASE_SECONDS, Takeover.FORCE, cycle_backoff=again, commit_backoff=again
        )
        driver = Driver(CONSUMER, self.ledger, sinks, settings=settings, each=one_by_one)
        sinks[0].check(EFFECTS)
        sinks[1].check(None)
        driver.start()
        for number in self._cycles(sinks[1]):
            cycle = CycleId(driver.scope, 1, number)
            batch = BATCHES[number] if number < len(BATCHES) else ()
            begin, before = sum(map(len, BATCHES[:number])), self.attempts

            def stage(txn: SinkTxnId, batch=batch, begin=begin, before=before):
                return self._stage(sinks, txn, batch, begin, is_again=self.attempts > before)

            span = {"events/0": (begin, begin + len(batch))}
            outcome = driver.run_cycle(cycle, lambda span=span: BatchRange.of_offsets(span), stage)
            assert isinstance(outcome, CommitSucceeded | CycleReplayed), outcome
        driver.stop()

    def _cycles(self, messages: MessagesSink) -> Iterator[int]:
        yield from range(len(BATCHES))
        for number in range(len(BATCHES), len(BATCHES) + 10):
            if not messages.is_due():
                return
            yield number

    def _stage(self, sinks, txn, batch, begin, *, is_again):
        """Handle what comes back and what is new, as an attempt on Spark does."""
        self.attempts += 1
        effects, messages = sinks
        reader = messages.reader()
        is_careful = is_again or bool(reader.suspects())
        back = messages.come_back()
        arrivals = [Arrival(stored_record(row), row.key, row) for row in back.rows]
        arrivals += [Arrival(record_of(n, at), n[0]) for at, n in enumerate(batch, begin)]
        receipts = {sink.name: [] for sink in sinks}
        tasks = 1 if is_again else TASKS
        for task in range(tasks):
            passed = MessagePass(
                self.of_pass,
                reader,
                back.held,
                lambda *outcome: None,
                is_careful=is_careful,
                is_alone=is_again,
            )
            made = passed.run([one for one in arrivals if ord(one.route) % tasks == task])
            rows = pa.RecordBatch.from_pylist(made.rows.get(0, []), schema=EFFECTS)
            changes = to_batch([*made.changes, *passed.finish()])
            for sink, part in ((effects, rows), (messages, changes)):
                writer = sink.stager(txn).open(f"t{self.attempts}-{task}")
                writer.write(part)
                receipts[sink.name].append(writer.finish())
        return receipts

    def survive(self) -> None:
        """Run to the end, or to a crash: it ends the process's sessions, and then its lease."""
        try:
            self.run()
        except Crash:
            pool().close_all()
            self.clock.advance(LEASE_SECONDS)

    def verdicts(
        self, ends: Mapping[str, str] | None = None, by_service: str | None = None
    ) -> list[str]:
        """Return what is wrong in the end.

        *ends* are those that differ from `ENDS`, because a person acted; *by_service* is the
        message that a service has handled.
        """
        acted = ends or {}
        expected = ENDS | acted
        handled = [name for name, end in expected.items() if end == "COMPLETED"]
        applied = {name[0]: int(name[1:]) for name in handled}
        order = {key: [name for name in handled if name[0] == key] for key in applied}
        sent = Counter(name[0] for name in handled if name != by_service)
        wanted: dict[str, Any] = {
            "claims": [
                (name, *(("COMPLETED", end) if end == SKIPPED else (end, "")))
                for name, end in expected.items()
            ],
            "ends": [(name, end) for name, end in expected.items() if end != SKIPPED],
            "sent": sent.items(),
            "versions": applied.items(),
            "order": order.items(),
            "counts": [(sum(map(len, BATCHES)),)],
            "left": [],
            "attempts": [one for one in ATTEMPTED if one[0] not in acted],
        }
        with connect(self.url) as database:
            found = {
                what: database.execute(question.encode()).fetchall()
                for what, question in QUESTIONS.items()
            }
            tables = LeanClaims("semel", CONSUMER).days(database)
            lean = [
                one
                for day in tables
                for (one,) in database.execute(f"SELECT id FROM {day.table}".encode()).fetchall()
            ]
        named = {lean_id(name): name for name in expected}
        found["claims"] = sorted(
            [*found["claims"], *((named[one], "COMPLETED", "") for one in lean)]
        )
        found["attempts"] = [one for one in found["attempts"] if one[0] not in acted]
        return [f"{what} {found[what]}" for what in wanted if sorted(wanted[what]) != found[what]]


def make_scene(url: str) -> Scene:
    """Create the messaging tables, and the table of the effects."""
    make_tables(url)
    with connect(url) as database:
        database.execute(
            "CREATE TABLE public.effects (number bigint GENERATED BY DEFAULT AS IDENTITY, "
            "id text PRIMARY KEY, key text)"
        )
    return Scene(url)
