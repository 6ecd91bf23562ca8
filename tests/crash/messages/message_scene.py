"""A pipeline of messages without Spark: seven batches, a handler that fails, and what must be true.

The pass is a script of its own: it knows of the sink only what `ComeBack` and `SeenClaim` say.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import psycopg
import pyarrow as pa

from semel.arrow.changes import to_batch
from semel.lease import Takeover
from semel.memory.ledger import MemoryLedger
from semel.messaging.changes import ComeBack, MessageChange, Op, SeenClaim, SeenWaiting, detail_of
from semel.messaging.handle.claims import ClaimState
from semel.pipeline.cycle import CommitSucceeded
from semel.pipeline.driver import CycleReplayed, Driver, Settings
from semel.pipeline.source import BatchRange
from semel.pipeline.twophase import Backoff, one_by_one
from semel.pipeline.txn import CycleId, SinkTxnId
from semel.postgres.connect import pool
from semel.postgres.messages import MessagesSink
from semel.postgres.sink import PostgresSink
from semel.sql.database import SqlDatabase
from semel.testing.crash import Crash

CONSUMER: Final = "indexer"
TASKS: Final = 2
FAILS: Final = {"b1": 2}
"""How often the handler fails at a message."""

POISON: Final = "d1"
"""The message that becomes a dead letter."""

BATCHES: Final = (
    ("a1", "b1", "c1"),
    ("a2", "b2", "c2"),
    ("a1", "b3", "d1"),
    ("b2", "c3"),
    ("e1", "e1", "a3"),
    ("b4",),
    ("c4", "d2", "b1"),
)
"""The ids of the messages; the first letter is the key."""

MESSAGES: Final = sorted({name for batch in BATCHES for name in batch})
HANDLED: Final = [name for name in MESSAGES if name != POISON]
EFFECTS: Final = pa.schema([("id", pa.string()), ("key", pa.string())])
_BOOKS: Final = "semel"


@dataclass
class Pass:
    """What the handling of one batch changes, by task."""

    changes: list[list[MessageChange]] = field(default_factory=lambda: [[] for _ in range(TASKS)])
    effects: list[list[str]] = field(default_factory=lambda: [[] for _ in range(TASKS)])
    stuck: dict[str, int | None] = field(default_factory=dict)
    handled: Counter[str] = field(default_factory=Counter)
    """By key; a key's version is the number of its messages that were handled."""

    def drain(self, back: ComeBack) -> None:
        """Handle what comes back, in order, until one of its key has to wait again."""
        queues = {row.key: row.place for row in back.rows}
        self.stuck |= back.held
        for row in back.rows:
            if queues[row.key] and row.key not in self.stuck:
                attempt = row.attempts + 1
                if self._succeeds(row.message_id, attempt):
                    self._change(row, Op.TAKE, "COMPLETED", attempt)
                else:
                    self._change(row, Op.AGAIN, "FAILED_RETRYABLE", attempt)
                    self.stuck[row.key or ""] = queues[row.key]

    def handle(self, batch: tuple[str, ...], offset: int, known: dict[str, SeenClaim]) -> None:
        """Handle new messages; those of a key that waits go behind it."""
        seen: set[str] = set()
        for number, name in enumerate(batch):
            if name in known or name in seen:
                continue
            seen.add(name)
            if name[0] in self.stuck:
                self._claim(name, "PARKED", 0)
                self._wait(name, offset + number, "behind", 0)
            elif name == POISON:
                self._claim(name, "FAILED_TERMINAL", 1)
                detail = detail_of(payload=name.encode(), topic="events", reason="poison")
                self._add(name, MessageChange(Op.LETTER, name, payload_hash="h", detail=detail))
                detail = detail_of(number=1, failure_class="poison")
                self._add(name, MessageChange(Op.ATTEMPT, name, detail=detail))
            elif self._succeeds(name, 1):
                self._claim(name, "COMPLETED", 1)
            else:
                self._claim(name, "FAILED_RETRYABLE", 1)
                self.stuck[name[0]] = None
                self._wait(name, offset + number, "retry", 1)

    def finish(self, versions: Mapping[str, int | None]) -> None:
        """Raise the version of every key by the number of its messages that were handled."""
        for key, number in self.handled.items():
            seen = versions.get(key)
            change = MessageChange(Op.VERSION, key=key, version=(seen or 0) + number)
            change.seen_version = seen
            self._add(key, change)

    def _task(self, name: str) -> int:
        return ord(name[0]) % TASKS

    def _add(self, name: str, change: MessageChange) -> None:
        self.changes[self._task(name)].append(change)

    def _succeeds(self, name: str, attempt: int) -> bool:
        if attempt <= FAILS.get(name, 0):
            return False
        self.effects[self._task(name)].append(name)
        self.handled[name[0]] += 1
        sent = detail_of(outbox="outbox", topic="out", payload=b"", headers={})
        self._add(name, MessageChange(Op.SEND, name, key=name[0], detail=sent))
        return True

    def _change(self, row: SeenWaiting, op: Op, state: str, attempts: int) -> None:
        change = MessageChange(op, row.message_id, key=row.key, state=state, attempts=attempts)
        change.place, change.payload_hash = row.place, row.payload_hash
        change.seen_state, change.seen_attempts = row.claim_state, row.attempts
        change.seen_waits = row.waits.value
        if op is Op.AGAIN:
            change.detail = detail_of(waits="retry", reason="again")
        self._add(row.message_id, change)

    def _claim(self, name: str, state: str, attempts: int) -> None:
        change = MessageChange(Op.CLAIM, name, state=state, attempts=attempts, payload_hash="h")
        self._add(name, change)

    def _wait(self, name: str, offset: int, waits: str, attempts: int) -> None:
        change = MessageChange(Op.WAIT, name, key=name[0], payload_hash="h", attempts=attempts)
        change.state, change.place = "held", self.stuck[name[0]]
        change.topic, change.partition, change.offset = "events", 0, offset
        change.detail = detail_of(waits=waits, held=True, payload=name.encode())
        self._add(name, change)


@dataclass
class Scene:
    """A database, a ledger, and the processes that come one after the other."""

    url: str
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    attempts: int = 0

    def connect(self) -> psycopg.Connection:
        """Return a connection of somebody else."""
        options = "-c search_path=semel,public"
        return psycopg.connect(self.url, autocommit=True, options=options)

    def run(self) -> None:
        """Start a process, recover, and run every batch, and empty ones until nothing waits."""
        sinks = [
            PostgresSink(self.url, "effects", name="effects", lock_seconds=0.3),
            MessagesSink(self.url, CONSUMER, lock_seconds=0.3),
        ]
        backoff = Backoff(tries=4, first_seconds=0.0)
        settings = Settings(takeover=Takeover.FORCE, cycle_backoff=backoff, commit_backoff=backoff)
        driver = Driver("indexer", self.ledger, sinks, settings=settings, each=one_by_one)
        sinks[0].check(EFFECTS)
        sinks[1].check(None)
        driver.start()
        for number in self._cycles(sinks[1]):
            cycle = CycleId(driver.scope, 1, number)
            batch = BATCHES[number] if number < len(BATCHES) else ()
            begin = sum(map(len, BATCHES[:number]))

            def stage(txn: SinkTxnId, batch=batch, begin=begin):
                return self._stage(sinks, txn, batch, begin)

            span = {"events/0": (begin, begin + len(batch))}
            outcome = driver.run_cycle(cycle, lambda span=span: BatchRange.of_offsets(span), stage)
            assert isinstance(outcome, CommitSucceeded | CycleReplayed), outcome
        driver.stop()

    def _cycles(self, messages: MessagesSink) -> Iterator[int]:
        yield from range(len(BATCHES))
        for number in range(len(BATCHES), len(BATCHES) + 10):
            if not messages.is_due() and not messages.come_back().held:
                return
            yield number

    def _stage(self, sinks, txn, batch, begin):
        self.attempts += 1
        effects, messages = sinks
        made = Pass()
        made.drain(messages.come_back())
        reader = messages.reader()
        made.handle(batch, begin, dict(reader.claims(sorted(set(batch)))))
        made.finish(reader.versions(made.handled))
        receipts = {sink.name: [] for sink in sinks}
        for task in range(TASKS):
            rows = [{"id": name, "key": name[0]} for name in made.effects[task]]
            staged = [
                (effects, pa.RecordBatch.from_pylist(rows, schema=EFFECTS)),
                (messages, to_batch(made.changes[task])),
            ]
            for sink, rows_of_task in staged:
                writer = sink.stager(txn).open(f"t{self.attempts}-{task}")
                writer.write(rows_of_task)
                receipts[sink.name].append(writer.finish())
        return receipts

    def survive(self) -> None:
        """Run to the end, whatever crash is installed; a crash ends the process's sessions."""
        try:
            self.run()
        except Crash:
            pool().close_all()

    def verdicts(
        self,
        without_effect: Collection[str] = (),
        by_others: Collection[str] = (),
    ) -> list[str]:
        """Return what is wrong in the end.

        *without_effect* are the messages that were skipped, *by_others* those that a service
        has handled.
        """
        wrong = []
        with self.connect() as database:
            effects = database.execute("SELECT id FROM effects ORDER BY number").fetchall()
            names = [name for (name,) in effects]
            expected = [name for name in HANDLED if name not in without_effect]
            if sorted(names) != expected:
                wrong.append(f"effects {names}")
            sent = database.execute("SELECT message_id FROM outbox_message ORDER BY 1").fetchall()
            if sent != [(name,) for name in expected if name not in by_others]:
                wrong.append(f"sent {sent}")
            versions = database.execute("SELECT key, version FROM aggregate_version").fetchall()
            if dict(versions) != Counter(name[0] for name in expected if name not in by_others):
                wrong.append(f"versions {versions}")
            letters = database.execute(
                "SELECT message_id FROM dead_letter UNION ALL SELECT message_id FROM failed_attempt"
            ).fetchall()
            if letters != [(POISON,), (POISON,)]:
                wrong.append(f"letters {letters}")
            for key in {name[0] for name in names}:
                of_key = [name for name in names if name[0] == key]
                if of_key != sorted(of_key):
                    wrong.append(f"order {of_key}")
            claims = database.execute(
                "SELECT message_id, state FROM processed_message ORDER BY 1"
            ).fetchall()
            ends = {POISON: ClaimState.FAILED_TERMINAL}
            if claims != [(name, ends.get(name, ClaimState.COMPLETED)) for name in MESSAGES]:
                wrong.append(f"claims {claims}")
            left = database.execute(
                f"SELECT message_id FROM waiting_message UNION ALL "
                f"SELECT tablename FROM pg_tables WHERE schemaname = '{_BOOKS}' "
                f"AND tablename ~ '^stg_' UNION ALL "
                f"SELECT attempt FROM {_BOOKS}.sink_attempt WHERE state = 'prepared'"
            ).fetchall()
            if left:
                wrong.append(f"left {left}")
        return wrong


def make_scene(url: str) -> Scene:
    """Create the messaging tables, and the table of the effects."""

    async def create() -> None:
        database = SqlDatabase(url)
        await database.create_tables()
        await database.close()

    asyncio.run(create())
    scene = Scene(url)
    with scene.connect() as database:
        database.execute(
            "CREATE TABLE public.effects (number bigint GENERATED BY DEFAULT AS IDENTITY, "
            "id text PRIMARY KEY, key text)"
        )
    return scene
