"""Kill the processes of a consumer wherever it hurts, and audit what they leave behind.

    with Zygote("semel.testing.worker:main") as zygote:
        trial = Trial(zygote, folder, "shop.py:on_paid", effects="SELECT message_id FROM payment")
        for number in range(100):
            trial.put(f"m{number}", {"amount": number})
        for where in KILLS:
            trial.run(crash_at=where)
        trial.run_until_done()
        trial.assert_clean()

Workers are forks of one process, so a kill costs a fraction of a second; a
killed worker's partitions go to others at once, as if the broker had seen its
connection end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from sqlalchemy import MetaData

from semel.crashpoints import CRASH_VARIABLE, STOP_VARIABLE
from semel.memory.broker import FileBroker
from semel.messaging.handle.claims import ClaimState
from semel.messaging.send.outbox import MESSAGE_ID_HEADER
from semel.sql.tables import metadata
from semel.testing.kill import DEADLINE_SECONDS, DeadlineMissed, EndedProcess, Running, Zygote
from semel.testing.trial_audit import FinalState, TrialAudit, find, judged
from semel.testing.worker import Worker, consumer_of, found, open_database

KILLS: Final = (
    "claim:after",
    "handle:after",
    "message_commit:before",
    "message_commit:after",
    "outcomes:after",
    "settle:before",
    "settle:after",
    "member_leave:before",
)
"""Windows that every consumer passes."""

NEVER: Final = 1_000_000
"""More often than any test kills."""


class Trial:
    """A topic, a database, and any number of workers of one consumer."""

    def __init__(
        self,
        zygote: Zygote,
        folder: Path,
        consumer: str,
        *,
        effects: str,
        database: str = "",
        through: str = "",
        topic: str = "messages",
        partitions: int = 1,
        receipts: str = "",
        tables: MetaData | str | None = None,
        policy: Mapping[str, Any] | None = None,
        **worker: Any,
    ) -> None:
        """Make the topic and the tables.

        *effects* is a statement that returns the message id of every effect there is.
        *database* is by default a SQLite file in *folder*; *through* is where the workers
        reach it, if not there.  *receipts* is the topic of the handler's outgoing messages;
        *tables* are the handler's own, or named as the consumer is.  *policy* replaces settings
        of the consumer; kills are not the fault of the messages that they hit, so unless it
        says otherwise no message is parked for them.  All other fields of a `Worker` may be given
        by its name.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log = folder / "log"
        self.topic = topic
        self.database = database or f"sqlite:///{folder / 'database'}"
        self.receipts = receipts
        self.worker = Worker(
            through or self.database,
            str(folder / "broker"),
            consumer,
            (topic,),
            policy={"poison_attempts": NEVER, **(policy or {})},
            **worker,
        )
        topics = {topic: partitions, **({receipts: 1} if receipts else {})}
        self.broker = FileBroker(self.worker.broker, topics)
        self._effects = effects
        self._program = zygote.program(self.log)
        own = found(tables) if isinstance(tables, str) else tables
        asyncio.run(self._make_tables([metadata] if own is None else [metadata, own]))

    async def _make_tables(self, all_of: list[MetaData]) -> None:
        database = open_database(self.database)
        async with database.engine.begin() as connection:
            for each in all_of:
                await connection.run_sync(each.create_all)
        await database.close()

    def put(
        self, id: str, payload: Any, key: str | None = None, partition: int | None = None
    ) -> None:
        """Send one message, as JSON."""
        self.broker.put(
            self.topic,
            json.dumps(payload).encode(),
            None if key is None else key.encode(),
            {MESSAGE_ID_HEADER: id.encode()},
            partition,
        )

    def start(self, *, crash_at: str = "", stop_at: str = "", **changes: Any) -> Running:
        """Start a worker, which kills or stops itself at a window, if one is named."""
        planned = {CRASH_VARIABLE: crash_at, STOP_VARIABLE: stop_at}
        environment = {name: where for name, where in planned.items() if where}
        running = self._program.start(self.worker.to_json(**changes), environment=environment)
        if stop_at:
            running.wait_until_stopped()
        return running

    def run(
        self, *, crash_at: str = "", seconds: float = DEADLINE_SECONDS, **changes: Any
    ) -> EndedProcess:
        """Run a worker until it ends or is killed."""
        return self.end(self.start(crash_at=crash_at, **changes), seconds)

    def end(self, running: Running, seconds: float = DEADLINE_SECONDS) -> EndedProcess:
        """Wait for a worker's end; if it was killed, the broker notices."""
        try:
            ended = running.wait(seconds)
        finally:
            self.has_ended(running.pid)
        return ended

    def kill(self, running: Running) -> EndedProcess:
        """Kill a worker now."""
        running.kill()
        return self.end(running)

    def has_ended(self, pid: int) -> None:
        """Put a dead worker's members out of the group, without waiting for their sessions."""
        with self.broker.changing(self.worker.group) as group:
            for name in [name for name in group.members if name.startswith(f"{pid}.")]:
                group.leave(name, self.broker.clock.monotonic(), self.broker.patience)

    def run_until_done(self, most_starts: int = 20, **changes: Any) -> int:
        """Start workers until one ends with 0; return how often that was.

        Raises:
            DeadlineMissed: none did.
        """
        for number in range(1, most_starts + 1):
            ended = self.run(**changes)
            if ended.code == 0:
                return number
        raise DeadlineMissed(f"not done after {most_starts} starts:\n{ended.output}")

    def windows(self, **changes: Any) -> list[str]:
        """Run a worker, and list the windows that it passed, each once, in order."""
        trace = self.folder / "trace"
        trace.unlink(missing_ok=True)
        self.run(trace=str(trace), **changes)
        return list(dict.fromkeys(trace.read_text().split()))

    def found(self) -> FinalState:
        """Look at the broker and the tables."""
        return asyncio.run(self._found())

    async def _found(self) -> FinalState:
        database = open_database(self.database)
        try:
            return await find(
                self.broker,
                database,
                consumer_of(self.worker),
                self.worker.group,
                self.worker.topics,
                effects=self._effects,
                receipts=self.receipts,
            )
        finally:
            await database.close()

    def audit(self, expected: Mapping[str, ClaimState] | None = None) -> TrialAudit:
        """Say what is wrong, after the last worker has ended."""
        return judged(
            self.found(),
            expected=expected,
            sends=bool(self.receipts),
            relays=self.worker.relays,
        )

    def assert_clean(self, expected: Mapping[str, ClaimState] | None = None) -> TrialAudit:
        """Fail with the audit's table unless every message is where it belongs, once."""
        result = self.audit(expected)
        assert result.is_clean, f"\n{result.table()}\n{self.last_words}"
        return result

    @property
    def last_words(self) -> str:
        """The end of what the workers have said."""
        return self.log.read_text()[-3000:] if self.log.exists() else ""
