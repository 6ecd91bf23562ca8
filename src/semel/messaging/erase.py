"""Erasing a person's payloads everywhere, with hashes and the audit trail kept.

What is erased stays visible where it was, and can never be handled: a waiting
message is parked, an outgoing one is not sent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Final

from semel.errors import Misuse
from semel.message import digest_of
from semel.messaging.acts import ERASED, need_actor, need_reason, overrule
from semel.messaging.audit import Act
from semel.messaging.claims import ClaimState, Failure
from semel.messaging.database import Database, Unit
from semel.messaging.deadletters import DeadLetterFilter
from semel.messaging.revisions import RevisionFilter
from semel.messaging.waiting import WaitingFilter

PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Erased:
    """How many payloads were removed, by where they were."""

    dead_letters: int = 0
    waiting: int = 0
    revisions: int = 0
    inbox: int = 0
    outbox: int = 0

    @property
    def total(self) -> int:
        """All together."""
        return self.dead_letters + self.waiting + self.revisions + self.inbox + self.outbox


async def erase(
    database: Database,
    *,
    key: str | None = None,
    message_id: str | None = None,
    actor: str,
    reason: str,
) -> Erased:
    """Remove payloads and headers of a key's messages, or of one message, for all consumers.

    An id that a person gave the message counts as its own.  All of it is one transaction.
    The audit entry says how much was erased and why, by whom, and holds no payload; of the
    key it has the hash, for the key itself may name a person.

    Raises:
        Misuse: both or neither of *key* and *message_id* is given, or no reason.
    """
    actor, reason = need_actor(actor), need_reason(reason, "erasing")
    if (key is None) == (message_id is None):
        raise Misuse("say what to erase: a key, or a message id")
    async with database.begin() as unit:
        erased = Erased()
        if key is not None:
            erased = await _erase(unit, key=key)
        for name in sorted(await _names(unit, message_id)):
            more = await _erase(unit, message_id=name)
            erased = Erased(*(a + b for a, b in zip(_counts(erased), _counts(more), strict=True)))
        details = asdict(erased)
        if key is not None:
            details["key_hash"] = digest_of(key.encode("utf-8", "surrogatepass"))
        await unit.audit.append(
            Act(actor, "erase", message_id=message_id or "", reason=reason, details=details)
        )
    return erased


async def _names(unit: Unit, message_id: str | None) -> set[str]:
    """Collect all ids under which a message is or was known."""
    known: set[str] = set()
    todo = set() if message_id is None else {message_id}
    while todo:
        name = todo.pop()
        known.add(name)
        todo |= await unit.revisions.other_names(name) - known
    return known


async def _erase(unit: Unit, *, key: str | None = None, message_id: str | None = None) -> Erased:
    await _park_claims(unit, WaitingFilter(key=key, message_id=message_id))
    return Erased(
        await unit.dead_letters.erase(DeadLetterFilter(key=key, message_id=message_id)),
        await unit.waiting.erase(WaitingFilter(key=key, message_id=message_id)),
        await unit.revisions.erase(RevisionFilter(key=key, message_id=message_id)),
        await unit.inbox.erase(key=key, message_id=message_id),
        await unit.outbox.erase(key=key, message_id=message_id),
    )


async def _park_claims(unit: Unit, which: WaitingFilter) -> None:
    """Close the claims of what cannot be handled any more to deliveries that repeat it."""
    while page := await unit.waiting.find(which, PAGE):
        for message in page:
            if message.erased_at is None:
                parked = Failure(ClaimState.PARKED, message.attempts, ERASED)
                await overrule(unit, message.consumer, message.message_id, parked)
        which = replace(which, after_place=page[-1].place)


def _counts(erased: Erased) -> tuple[int, ...]:
    return tuple(asdict(erased).values())
