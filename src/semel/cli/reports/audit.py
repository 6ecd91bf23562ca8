"""The audit trail: what people did, and whether the chain is whole; erasing and retention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semel.operate.audit import NotedHead, Verified, verify
from semel.operate.stores import AuditEntry, OperatorDatabase


@dataclass(frozen=True, slots=True)
class EntryReport:
    """One entry of the audit trail."""

    number: int
    at: float
    actor: str
    act: str
    consumer: str
    message_id: str
    reason: str
    details: Mapping[str, Any]
    hash: str
    """The sha256 over the entry and the hash of the one before it."""


@dataclass(frozen=True, slots=True)
class AuditList:
    """The answer to `semel audit list`."""

    database: str
    entries: list[EntryReport]

    @property
    def needs_attention(self) -> bool:
        """A list needs none."""
        return False


@dataclass(frozen=True, slots=True)
class AuditVerification:
    """The answer to `semel audit verify`."""

    database: str
    whole: bool
    entries: int | None
    """How many entries the chain has, where it is whole."""

    head: str | None
    """Number and hash of the last entry, as `--head` takes them; write it down elsewhere."""

    broken: str
    """Where it is broken; empty where it is whole."""

    @property
    def needs_attention(self) -> bool:
        """Tell whether somebody changed the trail."""
        return not self.whole


@dataclass(frozen=True, slots=True)
class EraseReport:
    """The answer to `semel erase`."""

    database: str
    dead_letters: int
    waiting: int
    revisions: int
    inbox: int
    outbox: int
    results: int
    """What handlers had returned, where their consumer keeps it."""

    in_progress: int
    """How many of the messages a worker is handling under a lease: run it again later."""

    left: str
    """What erasing did not do, in a sentence."""

    actor: str
    reason: str

    @property
    def needs_attention(self) -> bool:
        """What was done needs none."""
        return False


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """The answer to `semel retention`."""

    database: str
    consumer: str
    ttl_seconds: float
    shortest_seconds: float
    """The shortest time to live that the windows allow."""

    claims: int
    """Deleted; likewise the following."""

    inbox: int
    attempts: int
    """Failed attempts of messages that are gone."""

    keys: int
    """Locks of keys."""

    replays: int
    gaps: int
    notes: int
    approvals: int
    outcomes: int
    """Ranges of offsets that the broker has deleted; with a reader alone."""

    @property
    def needs_attention(self) -> bool:
        """What was done needs none."""
        return False


async def audit_list(
    database: OperatorDatabase,
    name: str,
    about: tuple[str, str] | None,
    after: int | None,
    limit: int,
) -> AuditList:
    """List entries: those about a message, those behind a number, or the newest."""
    async with database.begin() as unit:
        if about is not None:
            entries: Sequence[AuditEntry] = await unit.audit.about(*about)
            entries = [entry for entry in entries if entry.number > (after or 0)][-limit:]
        else:
            number, _ = await unit.audit.head()
            entries = await unit.audit.read(
                max(number - limit, 0) if after is None else after, limit
            )
    return AuditList(name, [_entry(entry) for entry in entries])


async def audit_verification(
    database: OperatorDatabase,
    name: str,
    noted: NotedHead | None,
    progress: Callable[[int, int], None],
) -> AuditVerification:
    """Walk the whole chain."""
    found = await verify(database, noted, progress)
    if isinstance(found, Verified):
        head = f"{found.entries}:{found.hash}"
        return AuditVerification(name, True, found.entries, head, "")
    return AuditVerification(name, False, None, None, found.where)


def _entry(entry: AuditEntry) -> EntryReport:
    act = entry.act
    return EntryReport(
        entry.number,
        entry.at,
        act.actor,
        act.act,
        act.consumer,
        act.message_id,
        act.reason,
        dict(act.details),
        entry.hash,
    )
