"""The oracle of the messaging half: compares delivered messages with their outcomes.

It reads only the broker's log and the tables, and uses no code of the consumer.
Every message must be in one final state, with its effect once if that is COMPLETED
and never otherwise, and no message may still wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sqlalchemy import Column, ColumnElement, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from semel.memory.broker import MemoryBroker
from semel.message import Partition
from semel.messaging.consumer import Consumer
from semel.messaging.handle.claims import ClaimState
from semel.messaging.outcome import is_delivery
from semel.messaging.records import Waits
from semel.messaging.send.outbox import CAUSATION_HEADER, MESSAGE_ID_HEADER
from semel.sql import tables
from semel.sql.database import SqlDatabase

FINAL = frozenset({ClaimState.COMPLETED, ClaimState.FAILED_TERMINAL, ClaimState.PARKED})
MOST_LISTED = 5


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
                more = f" … and {len(found) - MOST_LISTED} more" if len(found) > MOST_LISTED else ""
                listed = ", ".join(found[:MOST_LISTED])
                text.append(f"{name.replace('_', ' ')}: {listed}{more}")
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


async def find(
    broker: MemoryBroker,
    database: SqlDatabase,
    consumer: Consumer,
    group: str,
    topics: Iterable[str],
    *,
    effects: str,
    receipts: str = "",
) -> FinalState:
    """Look at everything.

    *effects* is a statement that returns the message id of every effect; *receipts* is the
    topic to which the handler's outgoing messages go, if it has one.
    """
    topics = list(topics)
    partitions = [p for topic in topics for p in broker.partitions(topic)]
    ends = {partition: broker.store.bounds(partition)[1] for partition in partitions}
    read = [consumer.reading.read(record) for topic in topics for record in broker.records(topic)]
    async with database.begin() as unit:
        session = unit.session
        by = consumer.name
        claims, letters = tables.processed_message.c, tables.dead_letter.c
        states = await _rows(session, claims.message_id, claims.state, claims.consumer_name == by)
        dead = await _rows(session, letters.message_id, letters.outcome, letters.consumer == by)
        room, running = tables.waiting_message.c, tables.consumer_member.c
        waits = await _rows(session, room.message_id, room.waits, room.consumer == by)
        members = await _rows(session, running.name, running.partitions, running.consumer == by)
        accused = tables.crash_suspect.c
        suspects = await _rows(session, accused.message_id, accused.tries, accused.consumer == by)
        unsent = (await session.execute(select(tables.outbox_message.c.parent))).scalars().all()
        seen = (await session.execute(text(effects))).scalars().all()
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
        committed=broker.committed(group),
        covered=covered,
        unsent=tuple(parent.partition("/")[2] for parent in unsent),
        published=_published(broker, receipts) if receipts else {},
    )


async def _rows(
    session: AsyncSession, id: Column[Any], what: Column[Any], where: ColumnElement[bool]
) -> list[tuple[str, str]]:
    """Read two columns."""
    found = await session.execute(select(id, what).where(where))
    return [(str(one), str(other)) for one, other in found]


def _published(broker: MemoryBroker, topic: str) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for record in broker.records(topic):
        cause = record.headers[CAUSATION_HEADER].decode()
        found.setdefault(cause, set()).add(record.headers[MESSAGE_ID_HEADER].decode())
    return {cause: frozenset(ids) for cause, ids in found.items()}
