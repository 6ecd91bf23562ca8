"""Kill the processes of a consumer wherever it hurts, and audit what they leave behind.

    with Trial(folder, "shop.py:on_paid", effects="SELECT message_id FROM payment") as trial:
        for number in range(100):
            trial.put(f"m{number}", {"amount": number})
        for where in trial.KILLS:
            trial.run(crash_at=where)
        trial.run_until_done()
        trial.assert_clean()

Workers are forks of one process, so a kill costs a fraction of a second; a
killed worker's partitions go to others at once, as if the broker had seen its
connection end.

The audit reads only the broker's log and the tables, and uses no code of the consumer.
Every message must be in one final state, with its effect once if that is COMPLETED
and never otherwise, and no message may still wait.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from sqlalchemy import Column, ColumnElement, MetaData, select, text

from semel.memory.broker import FileBroker, MemoryBroker
from semel.message import Partition
from semel.messaging.handle.claims import ClaimState
from semel.messaging.outcome import is_delivery
from semel.messaging.records import Waits
from semel.messaging.send.outbox import CAUSATION_HEADER, MESSAGE_ID_HEADER
from semel.sql import tables
from semel.sql.session import HandlerSession
from semel.testing.kill import DEADLINE_SECONDS, EndedProcess, Running, Zygote, until_done
from semel.testing.sink_audit import quoted
from semel.testing.worker import Worker, consumer_of, found, opened

NEVER: Final = 1_000_000
"""More often than any test kills."""


class Trial:
    """A topic, a database, and any number of workers of one consumer."""

    KILLS: ClassVar = (
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

    def __init__(
        self,
        folder: Path,
        consumer: str,
        *,
        effects: str,
        zygote: Zygote | None = None,
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
        says otherwise no message is parked for them.  *zygote* forks the workers of several
        trials; without it a trial has one of its own, until its ``with`` block ends.  All other
        fields of a `Worker` may be given by its name.
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
        forks = zygote or Zygote("semel.testing.worker:main")
        self._own = None if zygote else forks
        self._program = forks.program(self.log)
        own = found(tables) if isinstance(tables, str) else tables
        asyncio.run(self._make_tables(own))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._own is not None:
            self._own.close()

    async def _make_tables(self, own: MetaData | None) -> None:
        async with opened(self.database) as database:
            await database.create_tables()
            if own is not None:
                async with database.engine.begin() as connection:
                    await connection.run_sync(own.create_all)

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
        text = self.worker.to_json(**changes)
        return self._program.start(text, crash_at=crash_at, stop_at=stop_at)

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
        return until_done(lambda: self.run(**changes), most_starts)

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
        consumer, broker = consumer_of(self.worker), self.broker
        partitions = broker.partitions(self.topic)
        ends = {partition: broker.store.bounds(partition)[1] for partition in partitions}
        read = [consumer.reading.read(record) for record in broker.records(self.topic)]
        async with opened(self.database) as database, database.begin() as unit:
            session = unit.session
            by = consumer.name
            claims, letters = tables.processed_message.c, tables.dead_letter.c
            states = await _rows(
                session, claims.message_id, claims.state, claims.consumer_name == by
            )
            dead = await _rows(session, letters.message_id, letters.outcome, letters.consumer == by)
            room, running = tables.waiting_message.c, tables.consumer_member.c
            waits = await _rows(session, room.message_id, room.waits, room.consumer == by)
            members = await _rows(session, running.name, running.partitions, running.consumer == by)
            accused = tables.crash_suspect.c
            suspects = await _rows(
                session, accused.message_id, accused.tries, accused.consumer == by
            )
            parents = select(tables.outbox_message.c.parent)
            sent = await session.execute(parents, execution_options=session.naming)
            unsent = sent.scalars().all()
            seen = (await session.execute(text(self._effects))).scalars().all()
            covered = {
                partition: frozenset(
                    offset
                    for kept in await unit.outcomes.ranges(consumer.name, partition)
                    if is_delivery(kept.outcome)
                    for offset in range(kept.first, kept.last + 1)
                )
                for partition in partitions
            }
        return FinalState(
            sent=frozenset(arrival.id for arrival in read),
            states={id: ClaimState(state) for id, state in states},
            effects=Counter(seen),
            dead_letters=Counter(id for id, _ in dead),
            parked=frozenset(id for id, waiting in waits if waiting == Waits.PARKED),
            waiting=frozenset(id for id, waiting in waits if waiting != Waits.PARKED),
            members=tuple(f"member {name} of {place}" for name, place in members),
            suspects=frozenset(f"suspect {id}, {tries} tries" for id, tries in suspects),
            ends=ends,
            committed=broker.committed(self.worker.group),
            covered=covered,
            unsent=tuple(parent.partition("/")[2] for parent in unsent),
            published=_published(broker, self.receipts) if self.receipts else {},
        )

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


FINAL = frozenset({ClaimState.COMPLETED, ClaimState.FAILED_TERMINAL, ClaimState.PARKED})


@dataclass(frozen=True, slots=True)
class FinalState:
    """What is in the tables and in the broker after the last worker has ended."""

    sent: frozenset[str]
    """The ids in the log."""

    states: Mapping[str, ClaimState]
    """By id: of its claim."""

    effects: Counter[str]
    """By id: how often the effect is there."""

    dead_letters: Counter[str]
    parked: frozenset[str]
    """In the waiting table, for a person."""

    waiting: frozenset[str]
    """In the waiting table, for their time or their turn."""

    members: tuple[str, ...]
    suspects: frozenset[str]
    ends: Mapping[Partition, int]
    committed: Mapping[Partition, int]
    covered: Mapping[Partition, frozenset[int]]
    """By partition: the offsets of which an outcome is kept."""

    unsent: tuple[str, ...] = ()
    """What is left in the outbox, by the message that caused it."""

    published: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By id of the cause: the different ids of outgoing messages that are at the broker."""


@dataclass(frozen=True, slots=True)
class TrialAudit:
    """What is wrong, each a list of message ids or places; empty where all is well."""

    messages: int
    completed: int
    dead: int
    parked: int
    lost: tuple[str, ...] = ()
    """No claim, or one that is not final."""

    unexpected: tuple[str, ...] = ()
    """In another final state than the test expects."""

    missing_effects: tuple[str, ...] = ()
    """COMPLETED, without its effect."""

    doubled_effects: tuple[str, ...] = ()
    foreign_effects: tuple[str, ...] = ()
    """Of a message that is not COMPLETED."""

    letters: tuple[str, ...] = ()
    """Dead without a dead letter, or a dead letter of what is not dead."""

    left_waiting: tuple[str, ...] = ()
    """In the waiting table without a reason, or parked and not in it."""

    outgoing: tuple[str, ...] = ()
    """Whose outgoing message is unsent, missing, or there under several ids."""

    offsets: tuple[str, ...] = ()
    """Partitions whose committed offset is not their end."""

    uncovered: tuple[str, ...] = ()
    """Offsets of which no outcome is kept, and such as do not exist."""

    left_behind: tuple[str, ...] = ()
    """Rows of members and suspicions that are no longer needed."""

    @property
    def is_clean(self) -> bool:
        """Whether the audit found no problem."""
        return not any(getattr(self, name) for name in _FINDINGS)

    def table(self) -> str:
        """Print the numbers, and below them what was found."""
        text = [
            f"{self.messages} messages: {self.completed} completed, {self.dead} dead letters, "
            f"{self.parked} parked"
        ]
        for name in _FINDINGS:
            found: tuple[str, ...] = getattr(self, name)
            if found:
                text.append(f"{name.replace('_', ' ')}: {quoted(found)}")
        return "\n".join(text)

    def __str__(self) -> str:
        return self.table()


_FINDINGS = [f.name for f in fields(TrialAudit) if f.type == "tuple[str, ...]"]


def judged(
    found: FinalState,
    *,
    expected: Mapping[str, ClaimState] | None = None,
    sends: bool = True,
    relays: bool = True,
) -> TrialAudit:
    """Compare what was found with what must be.

    *expected* has the states that the test knows in advance.  *sends*: the handler writes one
    outgoing message per message; *relays*: a relay has taken them to the broker.
    """
    by_state = {
        state: {id for id in found.sent if found.states.get(id) is state} for state in FINAL
    }
    done = by_state[ClaimState.COMPLETED]
    dead, parked = by_state[ClaimState.FAILED_TERMINAL], by_state[ClaimState.PARKED]
    other = {id for id, state in (expected or {}).items() if found.states.get(id) is not state}
    letters = {id for id in found.dead_letters if not id.startswith("conflict:")}
    return TrialAudit(
        messages=len(found.sent),
        completed=len(done),
        dead=len(dead),
        parked=len(parked),
        lost=_listed(found.sent - done - dead - parked),
        unexpected=_listed(other),
        missing_effects=_listed(done - found.effects.keys()),
        doubled_effects=_listed(id for id, times in found.effects.items() if times > 1),
        foreign_effects=_listed(found.effects.keys() - done),
        letters=_listed((letters ^ dead) | {i for i, n in found.dead_letters.items() if n > 1}),
        left_waiting=_listed(found.waiting | (found.parked ^ parked)),
        outgoing=_listed(_outgoing(found, done, relays)) if sends else (),
        offsets=tuple(
            f"{partition}: {found.committed.get(partition, 0)} of {end}"
            for partition, end in found.ends.items()
            if found.committed.get(partition, 0) != end
        ),
        uncovered=tuple(
            f"{partition}/{offset}"
            for partition, end in found.ends.items()
            for offset in sorted(found.covered.get(partition, frozenset()) ^ frozenset(range(end)))
        ),
        left_behind=(*found.members, *sorted(found.suspects)),
    )


def _outgoing(found: FinalState, done: set[str], relays: bool) -> Iterable[str]:
    if not relays:
        counted = Counter(found.unsent)
        return {id for id in done | counted.keys() if counted[id] != (id in done)}
    wrong = {id for id in done if len(found.published.get(id, ())) != 1}
    return wrong | set(found.unsent) | (found.published.keys() - done)


def _listed(ids: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(ids))


async def _rows(
    session: HandlerSession, id: Column[Any], what: Column[Any], where: ColumnElement[bool]
) -> list[tuple[str, str]]:
    """Read two columns."""
    asked = select(id, what).where(where)
    found = await session.execute(asked, execution_options=session.naming)
    return [(str(one), str(other)) for one, other in found]


def _published(broker: MemoryBroker, topic: str) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for record in broker.records(topic):
        cause = record.headers[CAUSATION_HEADER].decode()
        found.setdefault(cause, set()).add(record.headers[MESSAGE_ID_HEADER].decode())
    return {cause: frozenset(ids) for cause, ids in found.items()}
