"""The audit trail: what operators did, in a chain that shows every change to it.

Each entry carries the hash of the one before it.  Whoever changes, removes or
inserts an entry breaks the chain at that place; whoever cuts off its end must
also change the head, so the head's hash is worth writing down elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from semel.messaging.accounts import account_now
from semel.messaging.ids import stored_id

if TYPE_CHECKING:
    from semel.messaging.database import Database

FIRST_HASH: Final = "0" * 64
"""What the first entry has for the hash of the one before it."""


@dataclass(frozen=True, slots=True)
class Act:
    """Something that a person or a command did."""

    actor: str
    act: str
    """A verb with its noun: ``park.release``, ``dlq.replay``, ``delete.approve``."""

    consumer: str = ""
    message_id: str = ""
    reason: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One act, in its place in the chain."""

    number: int
    at: float
    act: Act
    previous_hash: str
    hash: str


def hash_of(number: int, at: float, act: Act, previous_hash: str) -> str:
    """Return an entry's hash over all that it says and the hash before it."""
    said = [
        number,
        # Microseconds, as the databases keep it: a float's digits are not the same everywhere.
        round(at * 1_000_000),
        act.actor,
        act.act,
        act.consumer,
        act.message_id,
        act.reason,
        act.details,
        previous_hash,
    ]
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def recorded(act: Act) -> Act:
    """Return an act as every database keeps it, so that its hash is the same everywhere.

    Text may hold anything that came with a message, and details are JSON from here on; they
    name the account that the act is done from, where that is known.
    """
    account = account_now()
    details = {**act.details, **account.details()} if account else act.details
    return Act(
        plain(act.actor),
        plain(act.act),
        plain(act.consumer),
        stored_id(act.message_id),
        plain(act.reason),
        json.loads(json.dumps(details)),
    )


def plain(text: str) -> str:
    """Return words as every database takes them; what came with a message may be anything."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def break_in(entries: Sequence[AuditEntry], before: AuditEntry | None = None) -> str | None:
    """Say where a stretch of the chain is broken; None where it is whole."""
    number = before.number if before else 0
    previous = before.hash if before else FIRST_HASH
    for entry in entries:
        if entry.number != number + 1:
            return f"entry {number + 1} is missing: {entry.number} follows {number}"
        if entry.previous_hash != previous:
            return f"entry {entry.number} does not follow the entry before it"
        if entry.hash != hash_of(entry.number, entry.at, entry.act, entry.previous_hash):
            return f"entry {entry.number} was changed"
        number, previous = entry.number, entry.hash
    return None


class AuditTrail(Protocol):
    """The trail, in one open transaction: an act and its entry are durable together.

    The contract is executable: `semel.testing.contracts.AuditContract`.
    """

    async def append(self, act: Act) -> AuditEntry:
        """Write an act at the end of the chain; writers wait for one another."""
        ...

    async def read(self, after: int, limit: int) -> Sequence[AuditEntry]:
        """Return the entries behind number *after*, in order."""
        ...

    async def about(self, consumer: str, message_id: str) -> Sequence[AuditEntry]:
        """Return the entries about one message, in order."""
        ...

    async def head(self) -> tuple[int, str]:
        """Return number and hash of the last entry, as the head's own record has them."""
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """The chain is whole, and ends where its head says."""

    entries: int
    hash: str
    """Of the last entry; worth writing down elsewhere."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Somebody changed the trail."""

    where: str


@dataclass(frozen=True, slots=True)
class NotedHead:
    """What somebody wrote down of the trail's end, outside of this database."""

    number: int
    hash: str


PAGE: Final = 1000


async def verify(
    database: Database,
    noted: NotedHead | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Verified | Broken:
    """Walk the whole chain, a page per transaction, and compare its end with the head.

    Entries may be appended meanwhile.  An end that was cut off together with the head shows
    only against a head that was *noted* before.  *progress* hears behind every page how many
    entries were found whole, and how many there are.
    """
    last: AuditEntry | None = None
    while True:
        async with database.begin() as unit:
            # The head first: whatever it says, the entries behind this line must have.
            number, head_hash = await unit.audit.head()
            page = await unit.audit.read(last.number if last else 0, PAGE)
        where = break_in(page, last) or _against(noted, page)
        if where is not None:
            return Broken(where)
        if not page:
            return _end(last, number, head_hash, noted)
        last = page[-1]
        progress(last.number, number)


def _against(noted: NotedHead | None, page: Sequence[AuditEntry]) -> str | None:
    for entry in page:
        if noted is not None and entry.number == noted.number and entry.hash != noted.hash:
            return f"entry {entry.number} is not the one that was noted"
    return None


def _end(
    last: AuditEntry | None, number: int, head_hash: str, noted: NotedHead | None
) -> Verified | Broken:
    found = last.number if last else 0
    if noted is not None and noted.number > found:
        return Broken(f"the trail ends at {found}, and {noted.number} was noted")
    if number != found:
        return Broken(f"the trail ends at {found}, and its head says {number}")
    if head_hash != (last.hash if last else FIRST_HASH):
        return Broken(f"the head has another hash than entry {found}")
    return Verified(found, head_hash)
