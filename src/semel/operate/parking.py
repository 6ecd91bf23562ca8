"""The parking lot: what a person can do with a message that waits.

    inspect    look at it, its revisions, its claim, and who did what with it
    classify   write what kind of problem it is
    fix        replace its payload; the original is kept
    release    send it, or its whole key, back to the consumer, in order
    skip       decide that it has no effect
    delete     remove it, with a second person's approval (`semel.operate.deletion`)

Each act is one transaction with its entry in the audit trail.  No message is handled here: the
retry worker handles what was released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from semel.errors import Misuse
from semel.message import digest_of
from semel.messaging.handle.claims import (
    REPLACED,
    SKIPPED,
    WITHOUT_EFFECT,
    ClaimRow,
    ClaimState,
    Failure,
)
from semel.messaging.outcome import Mark
from semel.messaging.records import HeldKey, WaitingFilter, WaitingMessage, Waits, is_made_up
from semel.messaging.settings import ReplayRules
from semel.operate.audit import (
    WAITING,
    NotPossible,
    acting,
    complete_without_effect,
    keep_payload,
    need_actor,
    need_allowed,
    need_no_live_lease,
    need_not_handled,
    need_payload,
    need_reason,
    need_there,
    need_waiting,
    remove_waiting,
    write_down,
)
from semel.operate.stores import (
    KEEP_ID,
    NEW_ID,
    Approval,
    AuditEntry,
    OperatorDatabase,
    OperatorUnit,
    Revision,
    readable_diff,
)

LABELS: Final = ("business", "schema", "poison", "data", "dependency", "compliance")
"""Suggested labels; any word is accepted."""

# A key with more parked messages is released in several calls.
MOST_PARKED: Final = 10_000


@dataclass(frozen=True, slots=True)
class WaitingList:
    """The answer of `waiting_messages`."""

    total: int
    """How many match; the list may hold fewer."""

    messages: Sequence[WaitingMessage]


@dataclass(frozen=True, slots=True)
class HeldKeys:
    """The answer of `held_keys`."""

    consumer: str
    keys: Sequence[HeldKey]
    has_more: bool
    """There are more than were asked for."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """All that is known of a waiting message."""

    message: WaitingMessage
    claim: ClaimRow | None
    revisions: Sequence[Revision]
    approvals: Sequence[Approval]
    acts: Sequence[AuditEntry]
    ahead: int
    """Messages of its key that must leave first."""

    behind: int
    """Messages of its key that wait for it."""


@dataclass(frozen=True, slots=True)
class KeepId:
    """Handle the revision under the message's own id; its claim expects the new payload."""


@dataclass(frozen=True, slots=True)
class NewId:
    """Handle the revision under another id; the old id counts as handled, without effect."""

    message_id: str
    second_effect: bool = False
    """Allow it for a message that was handled: the revision has an effect of its own."""


Ids: TypeAlias = KeepId | NewId


@dataclass(frozen=True, slots=True)
class Fixed:
    """A message whose payload was replaced; it still waits."""

    message_id: str
    """The id under which it will be handled."""

    revision: Revision
    diff: str


async def waiting_messages(
    database: OperatorDatabase, which: WaitingFilter, limit: int
) -> WaitingList:
    """List waiting messages in the order in which they came."""
    async with database.begin() as unit:
        found = await unit.waiting.outlines(which, limit)
        return WaitingList(await unit.waiting.count(which), found)


async def held_keys(database: OperatorDatabase, consumer: str, limit: int) -> HeldKeys:
    """List the keys whose later messages wait for an earlier one, the longest held first."""
    async with database.begin() as unit:
        keys = await unit.waiting.held_keys(consumer, limit + 1)
    return HeldKeys(consumer, keys[:limit], len(keys) > limit)


async def inspect(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str
) -> Inspection:
    """Return a waiting message with its payload; the audit trail says who looked.

    Raises:
        NoSuchMessage: it does not wait.
    """
    async with acting(database) as unit:
        message = await need_waiting(unit, consumer, message_id)
        await write_down(unit, actor, "park.inspect", consumer, message_id)
        queue = WaitingFilter(consumer, key=message.key, held=True)
        total = await unit.waiting.count(queue) if message.held else 1
        later = replace(queue, after_place=message.place)
        behind = await unit.waiting.count(later) if message.held else 0
        return Inspection(
            message,
            await unit.claims.look_up(consumer, message_id),
            await unit.revisions.of(consumer, message_id),
            await unit.approvals.about(consumer, message_id),
            await unit.audit.about(consumer, message_id),
            ahead=total - behind - 1,
            behind=behind,
        )


async def classify(
    database: OperatorDatabase,
    consumer: str,
    message_id: str,
    label: str,
    *,
    actor: str,
    reason: str = "",
) -> None:
    """Write what kind of problem a waiting message is; an empty label removes the last one.

    Raises:
        NoSuchMessage: it does not wait.
    """
    async with acting(database) as unit:
        before = await need_waiting(unit, consumer, message_id)
        labelled = await unit.waiting.label(consumer, message_id, label)
        need_there(labelled, consumer, message_id, WAITING)
        details = {"label": label, "before": before.label}
        await write_down(unit, actor, "park.classify", consumer, message_id, reason, **details)


async def fix(
    database: OperatorDatabase,
    consumer: str,
    message_id: str,
    payload: bytes,
    *,
    ids: Ids,
    actor: str,
    reason: str,
) -> Fixed:
    """Replace the payload of a waiting message, which keeps its place and still waits.

    The original is kept as revision 0.  The audit trail keeps the hashes of both payloads,
    never the payloads.

    Raises:
        NoSuchMessage: it does not wait.
        NotPossible: it was erased, is being handled, or was handled and *ids* does not allow a
            second effect.
        Misuse: nothing would change, or the new id is in use.
    """
    reason = need_reason(reason, "fixing a message")
    new_hash = digest_of(payload)
    async with acting(database) as unit:
        before = await need_waiting(unit, consumer, message_id)
        need_payload(before)
        new_id = await _new_id(unit, before, ids, payload)
        revised = await unit.waiting.revise(consumer, message_id, payload, new_hash, new_id)
        need_there(revised, consumer, message_id, WAITING)
        await need_no_live_lease(unit, consumer, message_id)
        revision = await _add_revision(
            unit, before, payload, ids, actor=need_actor(actor), reason=reason
        )
        if isinstance(ids, NewId):
            await _rename(unit, before, revision, ids)
        else:
            await unit.claims.expect_payload(consumer, message_id, new_hash)
        details = {
            "revision": revision.number,
            "ids": revision.id_policy,
            "hash_before": before.payload_hash,
            "hash": new_hash,
        }
        if revision.new_id is not None:
            details["new_id"] = revision.new_id
        await write_down(unit, actor, "park.fix", consumer, message_id, reason, **details)
    return Fixed(new_id, revision, readable_diff(before.payload, payload))


async def release(
    database: OperatorDatabase,
    consumer: str,
    message_id: str,
    *,
    actor: str,
    reason: str = "",
    rules: ReplayRules | None = None,
) -> None:
    """Send a parked message back to its consumer, which handles it when it is its turn.

    Its attempts count from 1 again.  Later messages of its key stay behind it.  *rules* is what
    the policy says about replays, as `ReplayRules.of_policy` reads it.

    Raises:
        NoSuchMessage: it does not wait.
        NotPossible: the policy forbids it; or it is not parked, was erased, or its id was handled
            already or generated.
    """
    async with acting(database) as unit:
        message = await need_waiting(unit, consumer, message_id)
        await need_allowed(unit, message, rules)
        await release_parked(unit, message)
        await write_down(unit, actor, "park.release", consumer, message_id, reason)


async def release_key(
    database: OperatorDatabase,
    consumer: str,
    key: str,
    *,
    actor: str,
    reason: str = "",
    rules: ReplayRules | None = None,
) -> list[str]:
    """Send all parked messages of a key back to their consumer, in the order they came.

    Returns their ids.  All are released or none.

    Raises:
        NotPossible: the policy forbids one; or one of them was erased, or its id was handled
            already: skip or fix it first.
        Misuse: nothing is parked under the key.
    """
    async with acting(database) as unit:
        which = WaitingFilter(consumer, key=key, waits=Waits.PARKED)
        messages = await unit.waiting.outlines(which, MOST_PARKED)
        if not messages:
            raise Misuse(f"consumer {consumer} has nothing parked under the key {key!r}")
        for message in messages:
            await need_allowed(unit, message, rules)
            await release_parked(unit, message)
            one = (consumer, message.message_id)
            await write_down(unit, actor, "park.release", *one, reason, with_key=True)
    return [message.message_id for message in messages]


async def skip(
    database: OperatorDatabase, consumer: str, message_id: str, *, actor: str, reason: str
) -> None:
    """Decide that a waiting message has no effect; the next one of its key is handled.

    Its claim is completed with the marker SKIPPED, so a repetition is a duplicate.  The payload
    is kept as a revision.

    Raises:
        NoSuchMessage: it does not wait.
        NotPossible: it is being handled.
        Misuse: no reason is given.
    """
    reason = need_reason(reason, "skipping a message")
    async with acting(database) as unit:
        message = await need_waiting(unit, consumer, message_id)
        await remove_waiting(unit, message, Mark.SKIPPED)
        await keep_payload(unit, message)
        await complete_without_effect(unit, consumer, message_id, SKIPPED)
        details = {"hash": message.payload_hash}
        await write_down(unit, actor, "park.skip", consumer, message_id, reason, **details)


async def release_parked(unit: OperatorUnit, message: WaitingMessage) -> None:
    """Send a parked message back in the open transaction, as `release` does.

    Raises:
        NotPossible: it is not parked, was erased, or its id was handled already or generated.
    """
    consumer, message_id = message.consumer, message.message_id
    need_payload(message)
    if is_made_up(message_id):
        why = (
            "it has a generated id, because its record had none or its id has another payload; "
            "assign one with `semel parking fix --new-id`, or skip it"
        )
        raise NotPossible(consumer, message_id, why)
    if not await unit.waiting.release(consumer, message_id):
        why = f"it is not parked (it waits: {message.waits}), or was released a moment ago"
        raise NotPossible(consumer, message_id, why)
    await need_not_handled(unit, consumer, message_id)
    await unit.claims.reopen(consumer, message_id)


async def _new_id(unit: OperatorUnit, message: WaitingMessage, ids: Ids, payload: bytes) -> str:
    """Return the id to handle the revision under; raise if it cannot be used."""
    consumer = message.consumer
    if isinstance(ids, KeepId):
        if payload == message.payload:
            raise Misuse(f"message {message.message_id!r} already has exactly this payload")
        await need_not_handled(unit, consumer, message.message_id)
        return message.message_id
    taken = (
        await unit.waiting.get(consumer, ids.message_id)
        or await unit.claims.look_up(consumer, ids.message_id)
        or await unit.dead_letters.get(consumer, ids.message_id)
        or await unit.inbox.get(consumer, ids.message_id)
    )
    if is_made_up(ids.message_id):
        raise Misuse(f"{ids.message_id!r} looks like an id that semel generates; choose another id")
    if not ids.message_id or taken:
        raise Misuse(
            f"the id {ids.message_id!r} is empty or in use at consumer {consumer}; choose another"
        )
    return ids.message_id


async def _add_revision(
    unit: OperatorUnit, before: WaitingMessage, payload: bytes, ids: Ids, *, actor: str, reason: str
) -> Revision:
    original = Revision.of(before)
    if not await unit.revisions.of(before.consumer, before.message_id):
        await unit.revisions.add(original)
    revised = replace(
        original,
        payload=payload,
        payload_hash=digest_of(payload),
        actor=actor,
        reason=reason,
        id_policy=NEW_ID if isinstance(ids, NewId) else KEEP_ID,
        new_id=ids.message_id if isinstance(ids, NewId) else None,
    )
    return await unit.revisions.add(revised)


async def _rename(
    unit: OperatorUnit, before: WaitingMessage, revision: Revision, ids: NewId
) -> None:
    """Complete the old id's claim, and write at the new id where it comes from."""
    consumer, new_id = before.consumer, ids.message_id
    await complete_without_effect(unit, consumer, before.message_id, REPLACED)
    # A completed claim never changes: if a worker completed it first, the message was handled.
    old = await unit.claims.look_up(consumer, before.message_id)
    if old is not None and old.marker not in WITHOUT_EFFECT and not ids.second_effect:
        why = (
            "it was handled already, and under another id it would have its effect a second "
            "time; skip it, or allow that (`semel parking fix --second-effect`)"
        )
        raise NotPossible(consumer, before.message_id, why)
    # Another operator may have released or parked it since it was read.
    now = await need_waiting(unit, consumer, new_id)
    state = ClaimState.FAILED_RETRYABLE if now.waits is Waits.RETRY else ClaimState.PARKED
    waits = Failure(state, 0, before.error_code, payload_hash=revision.payload_hash)
    await unit.claims.decide(consumer, new_id, waits)
    came_from = f"revision {revision.number} of {before.message_id}"
    await unit.revisions.add(replace(Revision.of(now), actor=revision.actor, reason=came_from))
