"""`semel parking …`: messages that wait, and what a person can do with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from semel.cli.database import (
    Actor,
    AnyMessagesArgument,
    Books,
    CodeFilter,
    ConsumerFilter,
    ConsumerOption,
    KeyFilter,
    LimitOption,
    MessageArgument,
    MessagesArgument,
    acting,
    asking,
    inspecting,
)
from semel.cli.messages import (
    ACTED,
    CONTENT,
    Payload,
    Request,
    act_on_each,
    acts_of,
    content_facts,
    is_erased,
    payload_lines,
    payload_of,
    payload_shown,
    reason_shown,
    reply_acts,
    reply_asked,
)
from semel.cli.options import MOST, option
from semel.cli.plain import given
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, at, column, counted, facts, name_of, some_of
from semel.cli.selection import ForbiddingOption, rules_of
from semel.errors import Misuse
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import HeldKey, WaitingFilter, WaitingMessage, Waits
from semel.operate import deletion, parking
from semel.operate.audit import Acts, Done, need_reason, need_waiting
from semel.operate.stores import Approval, ApprovalDecision, Revision, readable_diff

SHARED_VARIABLE: Final = "SEMEL_SHARED_ACCOUNT"


def due_at(message: WaitingMessage) -> float | None:
    """When it is tried again, if it waits for that."""
    return message.due_at if message.waits is Waits.RETRY else None


def claim_state(found: parking.Inspection) -> ClaimState | None:
    """The state of its claim."""
    return found.claim.state if found.claim else None


def revised_payload(revision: Revision) -> Payload:
    """What it was changed to."""
    return payload_of(revision.payload, revision.payload_hash)


WAITING = Shape(
    WaitingMessage,
    Field("consumer", head="consumer"),
    Field("message_id", head="message", cell=name_of),
    Field(
        "waits",
        head="waits",
        means="For its time, for a person, or behind an earlier message of its key.",
    ),
    Field("key", head="key", cell=name_of),
    Field("label", head="label"),
    Field("error_code", head="code"),
    Field("attempts", head="attempts"),
    Field("since", head="since", cell=at),
    column("reason", reason_shown),
    Field("reason"),
    Field("exception"),
    Field("due_at", due_at),
    Field("source", means="Topic, partition and offset of the record."),
    Field("erased", is_erased),
)
HELD_KEY = Shape(
    HeldKey,
    Field("key", head="key", cell=name_of),
    Field("head", means="The message that must leave first."),
    column("head", "head.message_id", name_of),
    column("waits", "head.waits"),
    Field("behind", head="behind", right=True),
    Field("since", head="held since", cell=at),
    column("reason", "head.reason"),
)
Shape(
    Revision,
    Field("number"),
    Field("actor"),
    Field("reason"),
    Field("ids", "id_policy"),
    Field("new_id"),
    Field("at"),
    Field("payload", revised_payload),
)
Shape(
    parking.Inspection,
    Field("message"),
    Field("claim", claim_state),
    *CONTENT,
    Field("first_failed_at", "message.first_failed_at"),
    Field("ahead"),
    Field("behind"),
    Field("revisions"),
    Field("requests", "approvals"),
    Field("acts", acts_of),
)
Shape(
    parking.Fixed,
    Field("handled_as", "message_id"),
    Field("revision", "revision.number", means="Its number."),
    Field("diff", means="What changed, as a unified diff."),
)


@command("parking list", asking, parking.WaitingList)
def list_waiting(
    books: Books,
    *,
    consumer: ConsumerFilter = None,
    key: KeyFilter = None,
    waits: Annotated[Waits | None, option("--waits", "Only those that wait for this.")] = None,
    label: Annotated[
        str | None, option("--label", "Only those classified as this.", "WORD")
    ] = None,
    error_code: CodeFilter = None,
    limit: LimitOption = 50,
) -> None:
    """List messages that wait for a person, for their time, or behind another, in order.

    Example: semel parking list --database postgresql://db/shop --consumer billing --waits parked
    """
    which = WaitingFilter(
        consumer=consumer, key=key, waits=waits, label=label, error_code=error_code
    )
    found = books.ask(parking.waiting_messages, which, limit)
    total = some_of(len(found.messages), found.total, "waiting message", books.database)
    books.reply(found, lambda _: (WAITING.table(found.messages), total))


@command("parking show", inspecting, parking.Inspection)
def show(actor: Actor, *, message: MessageArgument, consumer: ConsumerOption) -> None:
    """Show a waiting message with payload and revisions; the audit trail says that you looked.

    Example: semel parking show m-17 --consumer billing --database postgresql://db/shop
    """
    actor.reply(actor.ask(parking.inspect, consumer, message, actor=actor.name), _inspection_lines)


@command("parking keys", asking, parking.HeldKeys)
def keys(books: Books, *, consumer: ConsumerOption, limit: LimitOption = 50) -> None:
    """List the keys that are held: their first message, and how many wait behind it.

    Example: semel parking keys --consumer billing --database postgresql://db/shop
    """
    books.reply(books.ask(parking.held_keys, consumer, limit), _key_lines)


@command("parking classify", acting, Acts, adds=("consumer", *ACTED))
def classify_messages(
    actor: Actor,
    *,
    messages: MessagesArgument,
    consumer: ConsumerOption,
    label: Annotated[str, option("--label", f"Such as {', '.join(parking.LABELS)}.", "WORD")],
) -> None:
    """Write what kind of problem waiting messages are.

    Example: semel parking classify m-17 --consumer billing --label data
    """
    actor.confirm_about(
        need_waiting,
        consumer,
        messages,
        f"Classify {counted(len(messages), 'message')} of {consumer} as {label!r}?",
    )
    act, note = partial(parking.classify, label=label), f"classified as {label}"
    act_on_each(actor, act, messages, note, consumer=consumer)


@command("parking fix", acting, parking.Fixed, adds=("consumer", "message_id", "actor", "reason"))
def fix_message(
    actor: Actor,
    *,
    message: MessageArgument,
    consumer: ConsumerOption,
    payload: Annotated[str, option("--payload", "The new payload; - reads it from stdin.", "FILE")],
    keep_id: Annotated[bool, option("--keep-id", "Handle it under its own id.")] = False,
    new_id: Annotated[
        str | None, option("--new-id", "Handle it under this id; the old id is finished.", "ID")
    ] = None,
    second_effect: Annotated[
        bool, option("--second-effect", "With --new-id: even if it was handled already.")
    ] = False,
) -> None:
    """Replace a waiting message's payload, after showing the difference; needs a reason.

    The original and every revision are kept.  The message still waits: release it afterwards.
    A message that was handled already has its effect a second time under a new id, so that
    needs --second-effect.

    Example: semel parking fix m-17 --consumer billing --payload fixed.json --keep-id
    --reason "the currency was missing"
    """
    ids = _ids(keep_id, new_id, second_effect)
    need_reason(actor.reason, "fixing a message")
    new = sys.stdin.buffer.read() if payload == "-" else _content(payload)
    # The difference shows the payload, so the audit trail must say who looked before it is shown.
    seen = actor.ask(parking.inspect, consumer, message, actor=actor.name)
    diff = readable_diff(seen.message.payload, new)
    actor.answer.console.print(diff, markup=False, end="")
    actor.confirm_about(
        need_waiting, consumer, [message], f"Replace the payload of {message} of {consumer}?"
    )
    done = actor.ask(parking.fix, consumer, message, new, ids=ids, **actor.given)
    line = (
        f"revision {done.revision.number} of {message} will be handled as {done.message_id}; "
        f"release it with `semel parking release`"
    )
    asked = {"consumer": consumer, "message_id": message, **actor.given}
    actor.reply(done, lambda _: (line,), **asked)


@command("parking release", acting, Acts, adds=("consumer", *ACTED))
def release_messages(
    actor: Actor,
    *,
    messages: AnyMessagesArgument = None,
    consumer: ConsumerOption,
    key: Annotated[
        str | None, option("--key", "All parked messages of this key.", "KEY", parser=given)
    ] = None,
    policy: ForbiddingOption = None,
) -> None:
    """Send parked messages back to their consumer: by id, or a whole key in its order.

    They wait for the consumer's retry worker, due at once; later messages of a key wait until
    it is their turn.  Exit code 1: one of them could not be released.

    A policy that forbids replays forbids this, too: --policy, $SEMEL_POLICY, or that of a
    running process of the consumer.

    Example: semel parking release --key customer-7 --consumer billing --policy policy.yaml
    """
    if bool(messages) == (key is not None):
        raise Misuse("say what to release: message ids, or --key")
    if messages:
        actor.confirm_about(
            need_waiting,
            consumer,
            messages,
            f"Release {counted(len(messages), 'message')} of {consumer}?",
        )
        act = partial(parking.release, rules=rules_of(policy, consumer))
        act_on_each(actor, act, messages, "released", consumer=consumer)
        return
    which = WaitingFilter(consumer, key=key, waits=Waits.PARKED)
    if not actor.ask(parking.waiting_messages, which, 1).total:
        raise Misuse(f"consumer {consumer} has nothing parked under the key {key!r}")
    actor.confirm(f"Release everything that is parked under {key!r} of {consumer}?")
    rules = rules_of(policy, consumer)
    ids = actor.ask(parking.release_key, consumer, key or "", rules=rules, **actor.given)
    done = Acts([Done(message_id, True, note="released") for message_id in ids])
    reply_acts(actor, done, consumer=consumer)


@command("parking skip", acting, Acts, adds=("consumer", *ACTED))
def skip_messages(actor: Actor, *, messages: MessagesArgument, consumer: ConsumerOption) -> None:
    """Decide that waiting messages never have an effect; needs a reason.

    The next message of the key is handled.

    Example: semel parking skip m-17 --consumer billing --reason "a test order"
    """
    actor.confirm_about(
        need_waiting,
        consumer,
        messages,
        f"Skip {counted(len(messages), 'message')} of {consumer} permanently?",
    )
    act_on_each(actor, parking.skip, messages, "skipped", consumer=consumer)


@command("parking delete", acting, Request)
def delete(actor: Actor, *, message: MessageArgument, consumer: ConsumerOption) -> None:
    """Ask for the deletion of a waiting message; a second person must approve it.

    Example: semel parking delete m-17 --consumer billing --reason "sent to the wrong topic"
    """
    actor.confirm_about(
        need_waiting, consumer, [message], f"Ask to delete message {message} of {consumer}?"
    )
    reply_asked(actor, deletion.ask_to_delete, consumer, message)


@command("parking requests", asking, deletion.OpenRequests)
def requests(books: Books, *, consumer: ConsumerFilter = None, limit: LimitOption = 50) -> None:
    """List the deletions that wait for a second person, of dead letters, too.

    Example: semel parking requests --database postgresql://db/shop
    """
    found = books.ask(deletion.open_requests, consumer, limit)
    total = f"{counted(len(found.requests), 'open request')} in {books.database}"
    lines = (*map(request_line, found.requests), total)
    books.reply(found, lambda _: lines)


@command("parking approve", acting, Request)
def approve(
    actor: Actor,
    *,
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", min=1, max=MOST, help="Of the request.")
    ],
    refuse: Annotated[bool, option("--refuse", "Keep the message instead.")] = False,
    shared_account: Annotated[
        bool,
        option(
            "--shared-account",
            "Several people use this account of the system; the audit trail says so.",
            envvar=SHARED_VARIABLE,
        ),
    ] = False,
) -> None:
    """Delete what another person asked to delete, or refuse to.

    The person who asked cannot approve, and the approval must come from another account of
    the operating system, unless the account is shared.

    Example: semel parking approve 3 --actor bob --database postgresql://db/shop
    """
    actor = replace(actor, account=replace(actor.account, shared=shared_account))
    decide = deletion.refuse_delete if refuse else deletion.approve_delete
    asked = actor.ask(deletion.open_request, number)
    what = f"{asked.message_id} of {asked.consumer}"
    actor.confirm(f"Keep {what}?" if refuse else f"Delete {what} permanently?")
    decided = Request(actor.ask(decide, number, **actor.given), actor.name)
    actor.reply(decided, _decided_lines)


def _inspection_lines(found: parking.Inspection) -> Iterator[Line | Rows]:
    one, due = found.message, due_at(found.message)
    yield facts(
        {
            "message": f"{one.message_id} of {one.consumer}, {one.waits}"
            + (f", due {at(due)}" if due is not None else ""),
            "claim": claim_state(found) or "none",
            "key": f"{one.key or '-'}; {found.ahead} ahead, {found.behind} behind",
            "label": one.label,
            "source": one.source,
            "reason": one.reason,
            "exception": f"{one.exception or '-'} ({one.error_code or '-'})",
            "attempts": f"{one.attempts}, first failed {at(one.first_failed_at or None)}",
            "since": at(one.since),
            **content_facts(one),
            "acts": acts_of(found),
        }
    )
    for revision in found.revisions:
        new = f", as {revision.new_id}" if revision.new_id else ""
        who = f"by {revision.actor}: {revision.reason}" if revision.actor else "the original"
        state = f"revision {revision.number} {revision.id_policy}{new}"
        yield f"{state}  {who}  {revision.payload_hash[:12]}"
    yield from map(request_line, found.approvals)
    yield from payload_lines(payload_shown(found))


def _key_lines(found: parking.HeldKeys) -> Iterator[Line | Rows]:
    yield HELD_KEY.table(found.keys)
    more = "; there are more, see --limit" if found.has_more else ""
    yield f"{counted(len(found.keys), 'held key')} of {found.consumer}{more}"


def request_line(request: Approval) -> str:
    """Put a request for people."""
    return (
        f"request {request.number} ({request.decision or 'open'}): {request.act} "
        f"{request.message_id} of {request.consumer}, asked by {request.asked_by} at "
        f"{at(request.asked_at)}: {request.reason}"
    )


def _decided_lines(decided: Request) -> Iterator[Line]:
    one = decided.request
    done = "deleted" if one.decision is ApprovalDecision.APPROVED else "kept"
    message = f"message {one.message_id} of {one.consumer}"
    yield f"request {one.number} {one.decision}: {message} was {done}"


def _ids(keep_id: bool, new_id: str | None, second_effect: bool) -> parking.Ids:
    if keep_id == (new_id is not None):
        raise Misuse("choose one of --keep-id and --new-id ID")
    if new_id is None and second_effect:
        raise Misuse("--second-effect needs --new-id ID: an id has one effect")
    return parking.KeepId() if new_id is None else parking.NewId(new_id, second_effect)


def _content(name: str) -> bytes:
    path = Path(name)
    if not path.is_file():
        raise Misuse(f"there is no file {name}")
    try:
        return path.read_bytes()
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise Misuse(
            f"{name} cannot be read: {why}; let this user read it, or pipe it in with -"
        ) from error
