"""The audit trail: what people did, and a check that no entry was changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from semel.operate.stores import FIRST_HASH, AuditEntry, hash_of

if TYPE_CHECKING:
    from semel.operate.stores import OperatorDatabase


@dataclass(frozen=True, slots=True)
class AuditEntries:
    """The answer of `audit_entries`."""

    entries: Sequence[AuditEntry]


async def audit_entries(
    database: OperatorDatabase,
    *,
    about: tuple[str, str] | None = None,
    after: int | None = None,
    limit: int = 50,
) -> AuditEntries:
    """List entries: those about a consumer's message, those after a number, or the newest."""
    async with database.begin() as unit:
        if about is not None:
            found = await unit.audit.about(*about)
            return AuditEntries([entry for entry in found if entry.number > (after or 0)][-limit:])
        number, _ = await unit.audit.head()
        start = max(number - limit, 0) if after is None else after
        return AuditEntries(await unit.audit.read(start, limit))


def break_in(entries: Sequence[AuditEntry], before: AuditEntry | None = None) -> str | None:
    """Return where a stretch of the chain is broken; None if it is whole."""
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


@dataclass(frozen=True, slots=True)
class Verified:
    """The chain is whole, and ends where its head says."""

    entries: int
    hash: str
    """Of the last entry.  Write it down outside of this database."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Somebody changed the trail."""

    where: str

    needs_attention: ClassVar = True


@dataclass(frozen=True, slots=True)
class NotedHead:
    """The end of the trail as a person noted it outside of this database."""

    number: int
    hash: str


PAGE: Final = 1000


async def verify_audit(
    database: OperatorDatabase,
    noted: NotedHead | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Verified | Broken:
    """Walk the whole chain, a page per transaction, and compare its end with the head.

    Entries may be appended meanwhile.  If somebody cut off the end together with the head,
    only a head that was *noted* before shows it.  *progress* is called after every page with
    the number of entries that were read, and of all entries.
    """
    last: AuditEntry | None = None
    while True:
        async with database.begin() as unit:
            # Read the head first, so the entries that are read next contain all that it counts.
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
