"""`semel outbox status | parked | retry | drop`: what is on its way out."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table, tell_shortened
from semel.cli.database import (
    Actor,
    AnyMessagesArgument,
    Books,
    LimitOption,
    MessagesArgument,
    acting,
    asking,
)
from semel.cli.messages import act_on_each
from semel.cli.plain import shortened
from semel.cli.preamble import begins_with
from semel.cli.reports.outbox import (
    OutboxStatus,
    ParkedList,
    outbox_status,
    parked_list,
)
from semel.cli.words import at, counted, lasting, some_of
from semel.errors import Misuse
from semel.operate.outbox import drop as drop_message
from semel.operate.outbox import parked_ids, send_again

app = typer.Typer(no_args_is_help=True, help="Look at an outbox, and at what its broker refused.")

OutboxOption: TypeAlias = Annotated[
    str, typer.Option("--outbox", metavar="NAME", help="Which outbox.")
]
AllOption: TypeAlias = Annotated[
    bool, typer.Option("--all", help="Every parked message instead of named ones.")
]
TopicFilter: TypeAlias = Annotated[
    str | None, typer.Option("--topic", metavar="TOPIC", help="With --all: only this topic's.")
]
RefusalFilter: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--refused-with", metavar="TEXT", help="With --all: only where the reason says this."
    ),
]


@app.command("status")
@begins_with(asking, "outbox status")
def status(answer: Answer, books: Books, *, outbox: OutboxOption = "outbox") -> None:
    """Show how many messages wait, for how long, and who relays them.

    Exit code 1: messages are parked, or they wait and nobody relays.

    Example: semel outbox status --database postgresql://db/shop
    """
    answer.give(books.ask(lambda d: outbox_status(d, books.name, outbox)), show_status)


@app.command("parked")
@begins_with(asking, "outbox parked")
def parked(
    answer: Answer, books: Books, *, outbox: OutboxOption = "outbox", limit: LimitOption = 50
) -> None:
    """List messages that the broker will never take as they are, without their payloads.

    Example: semel outbox parked --database postgresql://db/shop
    """
    answer.give(books.ask(lambda d: parked_list(d, books.name, outbox, limit)), show_parked)


@app.command("retry")
@begins_with(acting, "outbox retry")
def retry(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    messages: AnyMessagesArgument = None,
    every: AllOption = False,
    topic: TopicFilter = None,
    refused_with: RefusalFilter = None,
    outbox: OutboxOption = "outbox",
) -> None:
    """Let the relay send parked messages again; their keys go on behind them.

    With --all: every one, or those of a topic or with a reason.  One whose payload was erased
    is not among them.  Exit code 1: one of them could not be sent again.

    Example: semel outbox retry m-17 --reason "the topic exists now"
    """
    filters = (topic, refused_with)
    meant = messages or []
    if bool(meant) is every or (meant and filters != (None, None)):
        raise Misuse("name the messages, or say --all; --topic and --refused-with go with --all")
    if every:
        meant = books.ask(lambda d: parked_ids(d, outbox, topic=topic, refused_with=refused_with))
    if meant:
        actor.confirm(answer, f"Send {counted(len(meant), 'message')} of {outbox} again?")
    act_on_each(
        answer,
        books,
        actor,
        meant,
        lambda database, one: send_again(database, outbox, one, **actor.given),
        "the relay sends it again",
        outbox=outbox,
    )


@app.command("drop")
@begins_with(acting, "outbox drop")
def drop(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    messages: MessagesArgument,
    outbox: OutboxOption = "outbox",
) -> None:
    """Give parked messages up: nobody will get them; needs a reason.

    Their keys go on without them.  Exit code 1: one of them could not be dropped.

    Example: semel outbox drop m-17 --reason "the customer was told by phone"
    """
    actor.confirm(answer, f"Drop {counted(len(messages), 'message')} of {outbox} for good?")
    act_on_each(
        answer,
        books,
        actor,
        messages,
        lambda database, one: drop_message(database, outbox, one, **actor.given),
        "dropped",
        outbox=outbox,
    )


def show_status(console: Console, report: OutboxStatus) -> None:
    """Print how an outbox stands."""
    leader = report.leader
    if leader is None:
        relays = "no relay ever ran"
    elif leader.seconds_left > 0:
        relays = f"{leader.owner}, for {lasting(leader.seconds_left)} more unless renewed"
    else:
        relays = f"nobody; the last was {leader.owner or 'stopped'}"
    rows = table("", "")
    rows.show_header = False
    rows.add_row("outbox", escape(f"{report.outbox} in {report.database}"))
    rows.add_row("pending", counted(report.pending, "message"))
    rows.add_row("oldest", lasting(report.oldest_seconds) if report.pending else "-")
    rows.add_row("parked", counted(report.parked, "message"))
    rows.add_row("relayed by", escape(relays))
    console.print(rows)


def show_parked(console: Console, report: ParkedList) -> None:
    """Print a list of parked messages."""
    rows = table("message", "topic", "key", "attempts", "written", "reason", right=("attempts",))
    for one in report.messages:
        rows.add_row(
            escape(shortened(one.message_id)),
            escape(one.topic),
            escape(shortened(one.key or "-")),
            str(one.attempts),
            at(one.created_at),
            escape("(erased) " if one.erased else "") + escape(one.reason),
        )
    console.print(rows)
    tell_shortened(console, (name for one in report.messages for name in (one.message_id, one.key)))
    shown = len(report.messages)
    console.print(some_of(shown, report.total, "parked message", report.outbox), markup=False)
