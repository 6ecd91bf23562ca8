"""Deleting a message: one person asks, a second person approves or refuses.

The caller says who a person is: semel compares the names, and the accounts of the operating
system where they are known, and the audit trail keeps both.  An approval is valid for the payload
that was asked about: a message that was changed since then stays.  A deleted message's claim
stays, so the message is never handled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from semel.errors import Misuse
from semel.messaging.failed.deadletters import erase_letter_records
from semel.messaging.handle.claims import DELETED, ClaimState
from semel.messaging.outcome import Mark
from semel.messaging.receive.offsets import mark
from semel.messaging.records import DeadLetter, MessageFilter, WaitingMessage
from semel.operate.audit import (
    NotPossible,
    acting,
    close_claim,
    need_actor,
    need_letter,
    need_reason,
    need_waiting,
    remove_letter,
    remove_waiting,
    write_down,
)
from semel.operate.stores import (
    Account,
    Approval,
    ApprovalAsked,
    ApprovalDecision,
    OperatorDatabase,
    OperatorUnit,
    Revision,
    account_now,
    same_name,
)

ASKED: Final = "delete.ask"


class SamePerson(Misuse):
    """The person who asked for a deletion also tries to decide it."""

    def __init__(self, number: int, person: str) -> None:
        super().__init__(number, person)
        self.number = number
        self.person = person

    def __str__(self) -> str:
        return f"request {self.number} was made by {self.person}; a second person must decide it"


class SameAccount(Misuse):
    """A deletion would be approved from the same account that asked for it."""

    def __init__(self, number: int, account: str) -> None:
        super().__init__(number, account)
        self.number = number
        self.account = account

    def __str__(self) -> str:
        return (
            f"request {self.number} was also made from the account {self.account}; a second "
            f"person must approve it from another account, or say that several people share this "
            f"one (--shared-account), which the audit trail keeps"
        )


@dataclass(frozen=True, slots=True)
class OpenRequests:
    """The answer of `open_requests`."""

    requests: Sequence[Approval]


async def open_requests(
    database: OperatorDatabase, consumer: str | None, limit: int
) -> OpenRequests:
    """List the deletions that wait for a second person, the oldest first."""
    async with database.begin() as unit:
        return OpenRequests(await unit.approvals.open_ones(consumer, limit))


async def ask_to_delete(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str
) -> Approval:
    """Ask for the deletion of a waiting message; nothing is deleted yet.

    Raises:
        NoSuchMessage: it does not wait.
        Misuse: no reason is given, or it was asked for already.
    """
    async with acting(database) as unit:
        seen = await need_waiting(unit, consumer, message_id)
        return await _ask(unit, ApprovalAsked.DELETE_WAITING, seen, actor, reason)


async def ask_to_delete_dead_letter(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str
) -> Approval:
    """Ask for the deletion of a dead letter; nothing is deleted yet.

    Raises:
        NoSuchMessage: there is no such letter.
        Misuse: no reason is given, or it was asked for already.
    """
    async with acting(database) as unit:
        seen = await need_letter(unit, consumer, message_id)
        return await _ask(unit, ApprovalAsked.DELETE_LETTER, seen, actor, reason)


async def approve_delete(
    database: OperatorDatabase, number: int, *, actor: str, reason: str = ""
) -> Approval:
    """Delete what another person asked to delete, its revisions' payloads included.

    Its record in the outbox for a dead-letter topic is deleted, too; a record that was already
    sent to that topic stays there.

    Raises:
        SamePerson: *actor* asked for it.
        SameAccount: it was asked for from the account that approves it now.
        NoSuchMessage: it is gone: it was handled, skipped, or sent back since.
        NotPossible: its payload was changed since it was asked for, or it is being handled.
        Misuse: there is no such request, or it was decided already.
    """
    async with acting(database) as unit:
        request = await _decide(unit, number, actor, ApprovalDecision.APPROVED)
        await _need_another_account(unit, request)
        consumer, message_id = request.consumer, request.message_id
        seen: WaitingMessage | DeadLetter
        if request.act is ApprovalAsked.DELETE_LETTER:
            seen = await need_letter(unit, consumer, message_id)
            _need_the_same(request, seen)
            await remove_letter(unit, consumer, message_id)
            await mark(unit, consumer, Mark.DELETED, seen.source)
            await unit.inbox.close(consumer, message_id, DELETED)
            await unit.inbox.erase(MessageFilter(message_id=message_id, consumer=consumer))
        else:
            seen = await need_waiting(unit, consumer, message_id)
            _need_the_same(request, seen)
            await remove_waiting(unit, seen, Mark.DELETED)
            # Another operator may have fixed it between the two statements.
            revisions = await unit.revisions.of(consumer, message_id)
            _need_the_same(request, revisions[-1] if revisions else None)
        await close_claim(unit, consumer, message_id, ClaimState.FAILED_TERMINAL, DELETED)
        await erase_letter_records(unit, consumer, message_id)
        await unit.revisions.erase(MessageFilter(consumer, message_id))
        await unit.attempts.erase(MessageFilter(consumer, message_id))
        await _audit(unit, "delete.approve", request, actor, reason)
        return request


async def refuse_delete(
    database: OperatorDatabase, number: int, *, actor: str, reason: str = ""
) -> Approval:
    """Keep what another person asked to delete.

    Raises:
        SamePerson: *actor* asked for it.
        Misuse: there is no such request, or it was decided already.
    """
    async with acting(database) as unit:
        request = await _decide(unit, number, actor, ApprovalDecision.REFUSED)
        await _audit(unit, "delete.refuse", request, actor, reason)
        return request


async def _ask(
    unit: OperatorUnit,
    act: ApprovalAsked,
    seen: WaitingMessage | DeadLetter,
    actor: str,
    reason: str,
) -> Approval:
    consumer, message_id = seen.consumer, seen.message_id
    actor, reason = need_actor(actor), need_reason(reason, "deleting a message")
    for known in await unit.approvals.about(consumer, message_id):
        if known.act is act and known.decision is ApprovalDecision.OPEN:
            raise Misuse(
                f"{known.asked_by} already asked to delete {message_id!r}: request "
                f"{known.number} waits for a second person"
            )
    request = await unit.approvals.ask(act, consumer, message_id, actor, reason, seen.payload_hash)
    await _audit(unit, ASKED, request, actor, reason)
    return request


async def open_request(database: OperatorDatabase, number: int) -> Approval:
    """Return a request that waits for a second person.

    Raises:
        Misuse: there is no such request, or it was decided already.
    """
    async with database.begin() as unit:
        return await _need_open(unit, number)


async def _need_open(unit: OperatorUnit, number: int) -> Approval:
    request = await unit.approvals.get(number)
    if request is None:
        raise Misuse(f"there is no request {number}")
    if request.decision is not ApprovalDecision.OPEN:
        raise Misuse(f"request {number} was decided already")
    return request


async def _decide(
    unit: OperatorUnit, number: int, actor: str, decision: ApprovalDecision
) -> Approval:
    request = await _need_open(unit, number)
    if same_name(request.asked_by, need_actor(actor)):
        raise SamePerson(number, request.asked_by)
    decided = await unit.approvals.decide(number, actor.strip(), decision)
    if decided is None:
        raise Misuse(f"request {number} was decided already")
    return decided


async def _need_another_account(unit: OperatorUnit, request: Approval) -> None:
    account = account_now()
    if account is None or account.shared:
        return
    for entry in await unit.audit.about(request.consumer, request.message_id):
        details = entry.act.details
        is_asking = entry.act.act == ASKED and details.get("request") == request.number
        asked_from = Account(str(details.get("account", "")))
        if is_asking and same_name(asked_from.user, account.user):
            raise SameAccount(request.number, asked_from.name)


def _need_the_same(request: Approval, found: WaitingMessage | DeadLetter | Revision | None) -> None:
    """Raise NotPossible if the message's payload is not the one that was asked about."""
    if found is not None and found.payload_hash != request.payload_hash:
        why = (
            f"its payload was changed after {request.asked_by} asked to delete it; refuse "
            f"request {request.number}, and ask again"
        )
        raise NotPossible(request.consumer, request.message_id, why)


async def _audit(unit: OperatorUnit, act: str, request: Approval, actor: str, reason: str) -> None:
    details = {
        "request": request.number,
        "what": request.act.value,
        "asked_by": request.asked_by,
        "hash": request.payload_hash,
    }
    await write_down(unit, actor, act, request.consumer, request.message_id, reason, **details)
