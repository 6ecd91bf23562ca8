"""What must be true of every history of a consumer, and the plan that the judge compares with.

The judge asks the tables, the broker and the plan, never the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from semel.codec import unreadable_id
from semel.message import Coordinates, Partition
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import DeadLetterFilter, WaitingFilter
from semel.messaging.send.outbox import MESSAGE_ID_HEADER
from semel.operate.completeness import Extent, audit_completeness
from semel.policy.vocabulary import GiveUp
from tests.messaging.worlds import effects

if TYPE_CHECKING:
    from tests.messaging.jury_world import World

NAME: Final = "billing"
TOPIC: Final = "orders"
RECEIPTS: Final = "receipts"
P0: Final = Partition(TOPIC, 0)


class Invariant(StrEnum):
    """What is true of every history."""

    EFFECT_ONCE = "what is handled has its effect once, and nothing else has one"
    FINAL = "every message is in the one state in which it ends"
    ORDER = "the effects of a key are in the order of its messages"
    DURABLE = "no offset is passed before its message is durable in our own tables"
    COMPLETE = "the completeness audit finds every offset, and all are committed"
    BOUNDED = "no message is tried without end"
    PUBLISHED = "what an effect sends is published, in the order of its key"
    NOTHING_LEFT = "nothing waits, and nobody is suspected, in the end"


class Violation(BaseException):
    """An invariant does not hold; no engine can take it for a failure of its own."""

    def __init__(self, invariant: Invariant, history: str, what: str) -> None:
        super().__init__(invariant, history, what)
        self.invariant = invariant
        self.history = history

    def __str__(self) -> str:
        invariant, history, what = self.args
        return f"{history}: {invariant.name}: {what}"


@dataclass(frozen=True)
class Record:
    """One record of the plan."""

    id: str | None
    key: str
    value: bytes


def _record(id: str, key: str, more: str = "") -> Record:
    return Record(id, key, f'{{"id": "{id}", "more": "{more}"}}'.encode())


FAILS_ONCE, HOPELESS, EXHAUSTED, LAST = "o2", "o4", "o5", "o7"
PLAN: Final = [
    _record("o1", "a"),
    _record(FAILS_ONCE, "b"),
    _record("o3", "b"),
    _record(HOPELESS, "a"),
    _record("o1", "a"),
    _record(EXHAUSTED, "c"),
    _record(FAILS_ONCE, "b", "another payload"),
    Record(None, "a", b"not json"),
    _record("o6", "c"),
    _record(LAST, "a"),
]
EFFECTS: Final = {"a": ["o1", LAST], "b": [FAILS_ONCE, "o3"], "c": ["o6"]}


async def judge(world: World) -> None:
    """Compare what is there with the plan."""
    async with world.database.begin() as unit:
        ids = sorted({record.id for record in PLAN if record.id})
        rows = {id: await unit.claims.look_up(NAME, id) for id in ids}
        letters = await unit.dead_letters.find(DeadLetterFilter(NAME), 100)
        waiting = await unit.waiting.find(WaitingFilter(NAME), 100)
        unread = [unreadable_id(Coordinates(TOPIC, 0, n)) for n in range(len(PLAN))]
        notes = await unit.members.notes(NAME, [*ids, *unread])
        pending = await unit.outbox.read("outbox", 0, 100)
    judge_effects(world)
    _judge_states(world, rows, letters)
    await _judge_offsets(world)
    _judge_published(world, [entry.message_id for entry in pending])
    still = [one.message_id for one in waiting if one.message_id != world.kills]
    if still or notes:
        world.convict(Invariant.NOTHING_LEFT, f"{still} wait, {sorted(notes)} are suspected")


def _expected(world: World) -> dict[str, list[str]]:
    return {key: [id for id in ids if id != world.kills] for key, ids in EFFECTS.items()}


def judge_effects(world: World) -> None:
    """See that what should have an effect has it once, in order, and nothing else has one."""
    done = effects(world.database, "paid")
    for key, ids in _expected(world).items():
        found = [id for of_key, id in done if of_key == key]
        if sorted(found) != sorted(ids):
            world.convict(Invariant.EFFECT_ONCE, f"key {key} has {found} instead of {ids}")
        if found != ids:
            world.convict(Invariant.ORDER, f"key {key} has {found} instead of {ids}")


def _judge_states(world: World, rows: Mapping[str, Any], letters: Sequence[Any]) -> None:
    parks = world.way.gives_up is GiveUp.PARK
    ends = dict.fromkeys(rows, (ClaimState.COMPLETED, ""))
    ends[HOPELESS] = (ClaimState.FAILED_TERMINAL, "REJECTED")
    ends[EXHAUSTED] = (ClaimState.FAILED_TERMINAL, "DEPENDENCY_UNAVAILABLE")
    if parks:
        ends[EXHAUSTED] = (ClaimState.COMPLETED, "SKIPPED")
    if world.kills:
        ends[world.kills] = (ClaimState.PARKED, "CRASHED")
    for id, (state, code) in ends.items():
        row = rows[id]
        if row is None or row.state is not state:
            world.convict(Invariant.FINAL, f"{id} is {row and row.state} instead of {state}")
        elif code and code != (row.marker or row.error_code):
            world.convict(
                Invariant.FINAL, f"{id} has the code {row.marker or row.error_code}, not {code}"
            )
    buried = Counter(letter.error_code for letter in letters)
    due = Counter({"REJECTED": 1, "PAYLOAD_CONFLICT": 1, "DESERIALIZATION_FAILED": 1})
    due["DEPENDENCY_UNAVAILABLE"] = 0 if parks else 1
    if buried != +due:
        world.convict(Invariant.FINAL, f"dead letters {dict(buried)} instead of {dict(due)}")


async def _judge_offsets(world: World) -> None:
    committed = world.broker.committed(NAME).get(P0, 0)
    extent = {P0: Extent(first=0, committed=committed)}
    audits = await audit_completeness(world.database, NAME, extent, world.broker.reader())
    if committed != len(PLAN) or not all(audit.is_complete for audit in audits):
        missing = [audit.missing for audit in audits]
        world.convict(Invariant.COMPLETE, f"committed {committed}, without a trace {missing}")


def _judge_published(world: World, pending: list[str]) -> None:
    names = [record.headers[MESSAGE_ID_HEADER] for record in world.broker.records(RECEIPTS)]
    values = dict(zip(names, world.broker.records(RECEIPTS), strict=True))
    first = [values[name] for name in dict.fromkeys(names)]
    for key, ids in _expected(world).items():
        found = [str(record.value) for record in first if record.key == key.encode()]
        due = [str(f'{{"of":"{id}"}}'.encode()) for id in ids]
        if [one.replace(" ", "") for one in found] != due:
            world.convict(Invariant.PUBLISHED, f"key {key}: {found} instead of {due}")
    if pending or (not world.deaths and len(names) != len(first)):
        world.convict(Invariant.PUBLISHED, f"{pending} are left, {len(names)} sent")
