"""`semel parking …`: messages that wait, and what a person can do with them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from semel.cli.answer import Answer
from semel.cli.commands.dlq import show_asked
from semel.cli.commands.parking_tables import (
    show_decided,
    show_fixed,
    show_keys,
    show_requests,
    show_waiting,
    show_waiting_list,
)
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
from semel.cli.messages import act_on_each, reply_acts
from semel.cli.options import MOST
from semel.cli.plain import given
from semel.cli.preamble import begins_with
from semel.cli.reports.parking import (
    FixReport,
    RequestAnswer,
    key_list,
    request_list,
    request_report,
    waiting_list,
    waiting_report,
)
from semel.cli.words import counted
from semel.errors import Misuse
from semel.messaging.records import WaitingFilter, Waits
from semel.operate.acts import Acts, Done, need_reason
from semel.operate.deletion import approve_delete, ask_to_delete, refuse_delete
from semel.operate.parking import (
    LABELS,
    Ids,
    KeepId,
    NewId,
    classify,
    fix,
    inspect,
    release,
    release_key,
    skip,
)
from semel.operate.stores import readable_diff

app = typer.Typer(no_args_is_help=True, help="Look at waiting messages, and deal with them.")

SHARED_VARIABLE: Final = "SEMEL_SHARED_ACCOUNT"

PayloadOption: TypeAlias = Annotated[
    str, typer.Option("--payload", metavar="FILE", help="The new payload; - reads it from stdin.")
]


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
    report = books.ask(lambda database: waiting_list(database, books.name, which, limit))
    answer.give(report, show_waiting_list)


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
    """Show a waiting message with payload and revisions; that you looked is written down.

    Example: semel parking show m-17 --consumer billing --database postgresql://db/shop
    """
    answer.give(
        books.ask(lambda d: waiting_report(d, books.name, consumer, message, actor)),
        show_waiting,
    )


@app.command("keys")
@begins_with(asking, "parking keys")
def keys(
    answer: Answer, books: Books, *, consumer: ConsumerOption, limit: LimitOption = 50
) -> None:
    """List the keys that are held: their first message, and how many queue up behind it.

    Example: semel parking keys --consumer billing --database postgresql://db/shop
    """
    report = books.ask(lambda database: key_list(database, books.name, consumer, limit))
    answer.give(report, show_keys)


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
    """Write what waiting messages are.

    Example: semel parking classify m-17 --consumer billing --label data
    """
    asked = f"Classify {counted(len(messages), 'message')} of {consumer} as {label!r}?"
    actor.confirm(answer, asked)
    act_on_each(
        answer,
        books,
        actor,
        messages,
        lambda database, one: classify(database, consumer, one, label, **actor.given),
        f"classified as {label}",
        consumer=consumer,
    )


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
            "--new-id", metavar="ID", help="Handle it under this id; the old one is over."
        ),
    ] = None,
    second_effect: Annotated[
        bool,
        typer.Option("--second-effect", help="With --new-id: also if it was handled already."),
    ] = False,
) -> None:
    """Replace a waiting message's payload, after showing the difference; needs a reason.

    The original and every revision are kept.  The message waits on: release it afterwards.
    One that was handled already has its effect a second time under a new id, and only if you
    say so.

    Example: semel parking fix m-17 --consumer billing --payload fixed.json --keep-id
    --reason "the currency was missing"
    """
    ids = _ids(keep_id, new_id, second_effect)
    need_reason(actor.reason, "fixing a message")
    new = sys.stdin.buffer.read() if payload == "-" else _content(payload)
    # Whoever sees the difference has seen the payload: that is written down first.
    seen = books.ask(lambda database: inspect(database, consumer, message, actor=actor.name))
    diff = readable_diff(seen.message.payload, new)
    answer.console.print(diff, markup=False, end="")
    actor.confirm(answer, f"Replace the payload of {message} of {consumer}?")
    done = books.ask(
        lambda database: fix(
            database, consumer, message, new, ids=ids, actor=actor.name, reason=actor.reason
        )
    )
    number = done.revision.number
    given = (consumer, message, done.message_id, number, done.diff, actor.name, actor.reason)
    answer.give(FixReport(books.name, *given), show_fixed)


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

    They wait for the consumer's retry worker, due at once; later messages of a key stay
    behind until their turn.  Exit code 1: one of them could not be released.

    Example: semel parking release --key customer-7 --consumer billing
    """
    if bool(messages) == (key is not None):
        raise Misuse("say what to release: message ids, or --key")
    if messages:
        actor.confirm(answer, f"Release {counted(len(messages), 'message')} of {consumer}?")
        act_on_each(
            answer,
            books,
            actor,
            messages,
            lambda database, one: release(database, consumer, one, **actor.given),
            "released",
            consumer=consumer,
        )
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
    """Decide that waiting messages have no effect, now and ever; needs a reason.

    The next message of the key has its turn.

    Example: semel parking skip m-17 --consumer billing --reason "a test order"
    """
    actor.confirm(answer, f"Skip {counted(len(messages), 'message')} of {consumer} for good?")
    act_on_each(
        answer,
        books,
        actor,
        messages,
        lambda database, one: skip(database, consumer, one, **actor.given),
        "skipped",
        consumer=consumer,
    )


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
    """Ask for the deletion of a waiting message; another person approves it.

    Example: semel parking delete m-17 --consumer billing --reason "sent to the wrong topic"
    """
    actor.confirm(answer, f"Ask to delete message {message} of {consumer}?")
    request = books.ask(
        lambda database: ask_to_delete(
            database, consumer, message, actor=actor.name, reason=actor.reason
        )
    )
    answer.give(RequestAnswer(books.name, request_report(request), actor.name), show_asked)


@app.command("requests")
@begins_with(asking, "parking requests")
def requests(
    answer: Answer, books: Books, *, consumer: ConsumerFilter = None, limit: LimitOption = 50
) -> None:
    """List the deletions that wait for a second person, dead letters' included.

    Example: semel parking requests --database postgresql://db/shop
    """
    report = books.ask(lambda database: request_list(database, books.name, consumer, limit))
    answer.give(report, show_requests)


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

    Whoever asked cannot approve, and neither can anybody from the same account of the
    operating system, unless that is shared.

    Example: semel parking approve 3 --actor bob --database postgresql://db/shop
    """
    books = replace(books, account=replace(books.account, shared=shared_account))
    decide = refuse_delete if refuse else approve_delete
    question = f"Refuse request {number}?" if refuse else f"Delete for good, by request {number}?"
    actor.confirm(answer, question)
    request = books.ask(
        lambda database: decide(database, number, actor=actor.name, reason=actor.reason)
    )
    answer.give(RequestAnswer(books.name, request_report(request), actor.name), show_decided)


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
