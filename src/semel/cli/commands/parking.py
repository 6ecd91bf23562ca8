"""`semel parking …`: messages that wait, and what a person can do with them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from semel.cli.answer import Answer
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
    Payload,
    Request,
    act_on_each,
    acts_of,
    headers_of,
    headers_shown,
    is_erased,
    payload_lines,
    payload_of,
    payload_shown,
    reason_shown,
    reply_acts,
    reply_asked,
)
from semel.cli.options import MOST
from semel.cli.plain import given
from semel.cli.preamble import begins_with
from semel.cli.render import Field, Line, Rows, Shape, at, column, counted, facts, name_of, some_of
from semel.errors import Misuse
from semel.messaging.handle.claims import ClaimState
from semel.messaging.records import HeldKey, WaitingFilter, WaitingMessage, Waits
from semel.operate.acts import Acts, Done, need_reason
from semel.operate.deletion import approve_delete, ask_to_delete, open_requests, refuse_delete
from semel.operate.parking import (
    LABELS,
    Fixed,
    HeldKeys,
    Ids,
    Inspection,
    KeepId,
    NewId,
    classify,
    fix,
    held_keys,
    inspect,
    release,
    release_key,
    skip,
    waiting_messages,
)
from semel.operate.stores import Approval, ApprovalDecision, Revision, readable_diff

app = typer.Typer(no_args_is_help=True, help="Look at waiting messages, and deal with them.")

SHARED_VARIABLE: Final = "SEMEL_SHARED_ACCOUNT"

PayloadOption: TypeAlias = Annotated[
    str, typer.Option("--payload", metavar="FILE", help="The new payload; - reads it from stdin.")
]


def due_at(message: WaitingMessage) -> float | None:
    """When it is tried again, if it waits for that."""
    return message.due_at if message.waits is Waits.RETRY else None


def claim_state(found: Inspection) -> ClaimState | None:
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
    Inspection,
    Field("message"),
    Field("claim", claim_state),
    Field("payload", payload_shown),
    Field("headers", headers_shown),
    Field("message_type", "message.message_type"),
    Field("schema_version", "message.schema_version"),
    Field("correlation_id", "message.correlation_id"),
    Field("first_failed_at", "message.first_failed_at"),
    Field("ahead"),
    Field("behind"),
    Field("revisions"),
    Field("requests", "approvals"),
    Field("acts", acts_of),
)
Shape(
    Fixed,
    Field("handled_as", "message_id"),
    Field("revision", "revision.number", means="Its number."),
    Field("diff", means="What changed, as a unified diff."),
)


@app.command("list")
@begins_with(asking, "parking list")
def list_waiting(
    answer: Answer,
    books: Books,
    *,
    consumer: ConsumerFilter = None,
    key: KeyFilter = None,
    waits: Annotated[
        Waits | None, typer.Option("--waits", help="Only those that wait for this.")
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", metavar="WORD", help="Only those classified as this.")
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
    found = books.ask(lambda database: waiting_messages(database, which, limit))
    total = some_of(len(found.messages), found.total, "waiting message", books.name)
    answer.reply(found, lambda _: (WAITING.table(found.messages), total), database=books.name)


@app.command("show")
@begins_with(inspecting, "parking show")
def show(
    answer: Answer,
    books: Books,
    actor: str,
    *,
    message: MessageArgument,
    consumer: ConsumerOption,
) -> None:
    """Show a waiting message with payload and revisions; the audit trail says that you looked.

    Example: semel parking show m-17 --consumer billing --database postgresql://db/shop
    """
    found = books.ask(lambda database: inspect(database, consumer, message, actor=actor))
    answer.reply(found, inspection_lines, database=books.name)


@app.command("keys")
@begins_with(asking, "parking keys")
def keys(
    answer: Answer, books: Books, *, consumer: ConsumerOption, limit: LimitOption = 50
) -> None:
    """List the keys that are held: their first message, and how many wait behind it.

    Example: semel parking keys --consumer billing --database postgresql://db/shop
    """
    found = books.ask(lambda database: held_keys(database, consumer, limit))
    answer.reply(found, key_lines, database=books.name)


@app.command("classify")
@begins_with(acting, "parking classify")
def classify_messages(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    messages: MessagesArgument,
    consumer: ConsumerOption,
    label: Annotated[
        str,
        typer.Option("--label", metavar="WORD", help=f"Such as {', '.join(LABELS)}."),
    ],
) -> None:
    """Write what kind of problem waiting messages are.

    Example: semel parking classify m-17 --consumer billing --label data
    """
    actor.confirm(
        answer, f"Classify {counted(len(messages), 'message')} of {consumer} as {label!r}?"
    )
    act, note = partial(classify, label=label), f"classified as {label}"
    act_on_each(answer, books, actor, act, messages, note, consumer=consumer)


@app.command("fix")
@begins_with(acting, "parking fix")
def fix_message(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    message: MessageArgument,
    consumer: ConsumerOption,
    payload: PayloadOption,
    keep_id: Annotated[bool, typer.Option("--keep-id", help="Handle it under its own id.")] = False,
    new_id: Annotated[
        str | None,
        typer.Option(
            "--new-id", metavar="ID", help="Handle it under this id; the old id is finished."
        ),
    ] = None,
    second_effect: Annotated[
        bool,
        typer.Option("--second-effect", help="With --new-id: even if it was handled already."),
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
    seen = books.ask(lambda database: inspect(database, consumer, message, actor=actor.name))
    diff = readable_diff(seen.message.payload, new)
    answer.console.print(diff, markup=False, end="")
    actor.confirm(answer, f"Replace the payload of {message} of {consumer}?")
    done = books.ask(lambda database: fix(database, consumer, message, new, ids=ids, **actor.given))
    line = (
        f"revision {done.revision.number} of {message} will be handled as {done.message_id}; "
        f"release it with `semel parking release`"
    )
    asked = {"consumer": consumer, "message_id": message, **actor.given}
    answer.reply(done, lambda _: (line,), database=books.name, **asked)


@app.command("release")
@begins_with(acting, "parking release")
def release_messages(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    messages: AnyMessagesArgument = None,
    consumer: ConsumerOption,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", parser=given, help="All parked messages of this key."),
    ] = None,
) -> None:
    """Send parked messages back to their consumer: by id, or a whole key in its order.

    They wait for the consumer's retry worker, due at once; later messages of a key wait until
    it is their turn.  Exit code 1: one of them could not be released.

    Example: semel parking release --key customer-7 --consumer billing
    """
    if bool(messages) == (key is not None):
        raise Misuse("say what to release: message ids, or --key")
    if messages:
        actor.confirm(answer, f"Release {counted(len(messages), 'message')} of {consumer}?")
        act_on_each(answer, books, actor, release, messages, "released", consumer=consumer)
        return
    actor.confirm(answer, f"Release everything that is parked under {key!r} of {consumer}?")
    ids = books.ask(lambda database: release_key(database, consumer, key or "", **actor.given))
    done = Acts([Done(message_id, True, note="released") for message_id in ids])
    reply_acts(answer, books, actor, done, consumer=consumer)


@app.command("skip")
@begins_with(acting, "parking skip")
def skip_messages(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    messages: MessagesArgument,
    consumer: ConsumerOption,
) -> None:
    """Decide that waiting messages never have an effect; needs a reason.

    The next message of the key is handled.

    Example: semel parking skip m-17 --consumer billing --reason "a test order"
    """
    actor.confirm(answer, f"Skip {counted(len(messages), 'message')} of {consumer} permanently?")
    act_on_each(answer, books, actor, skip, messages, "skipped", consumer=consumer)


@app.command("delete")
@begins_with(acting, "parking delete")
def delete(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    message: MessageArgument,
    consumer: ConsumerOption,
) -> None:
    """Ask for the deletion of a waiting message; a second person must approve it.

    Example: semel parking delete m-17 --consumer billing --reason "sent to the wrong topic"
    """
    actor.confirm(answer, f"Ask to delete message {message} of {consumer}?")
    reply_asked(answer, books, actor, ask_to_delete, consumer, message)


@app.command("requests")
@begins_with(asking, "parking requests")
def requests(
    answer: Answer, books: Books, *, consumer: ConsumerFilter = None, limit: LimitOption = 50
) -> None:
    """List the deletions that wait for a second person, of dead letters, too.

    Example: semel parking requests --database postgresql://db/shop
    """
    found = books.ask(lambda database: open_requests(database, consumer, limit))
    total = f"{counted(len(found.requests), 'open request')} in {books.name}"
    lines = (*map(request_line, found.requests), total)
    answer.reply(found, lambda _: lines, database=books.name)


@app.command("approve")
@begins_with(acting, "parking approve")
def approve(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    number: Annotated[
        int, typer.Argument(metavar="NUMBER", min=1, max=MOST, help="Of the request.")
    ],
    refuse: Annotated[bool, typer.Option("--refuse", help="Keep the message instead.")] = False,
    shared_account: Annotated[
        bool,
        typer.Option(
            "--shared-account",
            envvar=SHARED_VARIABLE,
            help="Several people use this account of the system; the audit trail says so.",
        ),
    ] = False,
) -> None:
    """Delete what another person asked to delete, or refuse to.

    The person who asked cannot approve, and the approval must come from another account of
    the operating system, unless the account is shared.

    Example: semel parking approve 3 --actor bob --database postgresql://db/shop
    """
    books = replace(books, account=replace(books.account, shared=shared_account))
    decide = refuse_delete if refuse else approve_delete
    question = (
        f"Refuse request {number}?" if refuse else f"Delete permanently, by request {number}?"
    )
    actor.confirm(answer, question)
    decided = Request(books.ask(lambda d: decide(d, number, **actor.given)), actor.name)
    answer.reply(decided, decided_lines, database=books.name)


def inspection_lines(found: Inspection) -> Iterator[Line | Rows]:
    """Put one waiting message for people."""
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
            "type": f"{one.message_type or '-'}, schema {one.schema_version or '-'}",
            "correlation": one.correlation_id,
            "headers": headers_of(one.headers),
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


def key_lines(found: HeldKeys) -> Iterator[Line | Rows]:
    """Put held keys for people."""
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


def decided_lines(decided: Request) -> Iterator[Line]:
    """Put what became of a request for people."""
    one = decided.request
    done = "deleted" if one.decision is ApprovalDecision.APPROVED else "kept"
    message = f"message {one.message_id} of {one.consumer}"
    yield f"request {one.number} {one.decision}: {message} was {done}"


def _ids(keep_id: bool, new_id: str | None, second_effect: bool) -> Ids:
    if keep_id == (new_id is not None):
        raise Misuse("choose one of --keep-id and --new-id ID")
    if new_id is None and second_effect:
        raise Misuse("--second-effect needs --new-id ID: an id has one effect")
    return KeepId() if new_id is None else NewId(new_id, second_effect)


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
