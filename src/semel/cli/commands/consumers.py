"""`semel consumers`, `semel inbox` and `semel consumer`: what each has, and who runs it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer

from semel.cli.database import Actor, Books, ConsumerOption, LimitOption, acting, asking
from semel.cli.messages import is_erased
from semel.cli.options import LEDGER_VARIABLE, LedgerOption
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, at, bold, cell_of, counted, name_of
from semel.cli.target import open_existing
from semel.messaging.records import InboxMessage
from semel.messaging.tables import split_schema
from semel.operate.consumers import (
    ConsumerOverview,
    HandedOver,
    InboxList,
    Overview,
    hand_over,
    inbox_messages,
    overview,
    pipeline_of,
)
from semel.operate.outbox import OutboxStatus


def _red(value: object) -> str:
    return "bold red" if value else ""


def _run_by(pipeline: str | None) -> str:
    return "services" if pipeline is None else f"Spark: {pipeline}"


CONSUMER = Shape(
    ConsumerOverview,
    Field("consumer", head="consumer"),
    Field("pipeline", head="run by", cell=_run_by),
    Field("processes", head="processes", right=True),
    Field("lag", head="lag", right=True),
    Field("standing_since", head="stands still since", cell=at, style=_red),
    Field("inbox", head="inbox", right=True),
    Field("retries", head="retries", right=True),
    Field("dead_letters", head="dead letters", right=True, style=_red),
    Field("parked", head="parked", right=True, style=_red),
    Field("parked_keys", head="keys", right=True),
    Field("gaps", head="gaps", right=True, style=_red),
    Field("stale_claims", head="stale claims", right=True, style=_red),
    Field("needs_attention"),
)
MESSAGE = Shape(
    InboxMessage,
    Field("message_id", head="message", cell=name_of),
    Field("key", head="key", cell=name_of),
    Field("received_at", head="received", cell=at),
    Field("due_at", head="due", cell=at, means="Null where its worker has settled it."),
    Field("attempts", head="attempts", right=True),
    Field("error", head="error"),
    Field("erased", is_erased),
)


@command("consumers", asking, Overview)
def consumers(books: Books) -> None:
    """Show every consumer: its processes and lag, and what waits for a person.

    Columns in which no consumer has anything are left out; --json has them all.
    The lag is what its processes wrote last, every 20 seconds.  Exit code 1: something needs a
    person, stands still, or waits without a process.

    Example: semel consumers --database postgresql://db/shop
    """
    books.reply(books.ask(overview), _overview_lines)


@command("inbox", asking, InboxList)
def inbox(books: Books, *, consumer: ConsumerOption, limit: LimitOption = 50) -> None:
    """List what a consumer's inbox has not handled, the oldest first, without payloads.

    Exit code 1: one of them failed; `semel explain` tells its story.

    Example: semel inbox --consumer billing --database postgresql://db/shop
    """
    books.reply(books.ask(inbox_messages, consumer, limit), _inbox_lines)


@command("consumer hand-over", acting, HandedOver, adds=("actor", "reason"))
def give_to_services(
    actor: Actor,
    *,
    consumer: Annotated[str, typer.Argument(metavar="NAME", help="The consumer.")],
    ledger: LedgerOption = None,
) -> None:
    """Let services run a consumer that a pipeline on Spark runs; needs a reason.

    Stop the pipeline first.  Refused while one of its cycles is not settled.  Its ledger is
    --ledger, or else the database itself.  The other way round needs no command: stop the
    services, and start the pipeline.

    Example: semel consumer hand-over billing --reason "the service takes over again"
    """
    actor.ask(pipeline_of, consumer)
    url = ledger or os.environ.get(LEDGER_VARIABLE) or _without_driver(actor.url)
    books = open_existing(actor.answer, url, "; name the pipeline's own with --ledger")
    actor.confirm(f"Hand consumer {consumer} over to services?")
    done = actor.ask(hand_over, consumer, books, **actor.given)
    actor.reply(done, _handed_over, **actor.given)


def _without_driver(database: str) -> str:
    """Return the URL of the ledger that is in the same database."""
    url, _ = split_schema(database)
    scheme, rest = url.split(":", 1)
    return f"{scheme.partition('+')[0]}:{rest}"


def _handed_over(done: HandedOver) -> Iterator[Line | Rows]:
    yield f"{done.pipeline} no longer runs {done.consumer}: services may claim for it again"


def _overview_lines(found: Overview) -> Iterator[Line | Rows]:
    if found.consumers:
        yield CONSUMER.table(found.consumers, without=_empty_columns(found))
    else:
        yield "no consumer has written anything here"
    for one in found.outboxes:
        yield _outbox_line(one)


def _empty_columns(found: Overview) -> set[str]:
    """Name the columns in which no consumer has anything: all of them fit no terminal."""
    named = {"consumer", "processes"}
    return {
        one.head
        for one in CONSUMER.columns
        if one.head not in named and not any(map(one.read, found.consumers))
    }


def _outbox_line(status: OutboxStatus) -> Line:
    numbers = status.numbers
    line = f"outbox {status.outbox}: {cell_of(numbers.pending)} pending"
    line += f", {cell_of(numbers.parked)} parked"
    if status.leader is None or status.leader.seconds_left <= 0:
        line += ", no relay runs"
    return bold(line, _red(status.needs_attention))


def _inbox_lines(found: InboxList) -> Iterator[Line | Rows]:
    yield MESSAGE.table(found.messages)
    more = "; there are more, see --limit" if found.has_more else ""
    shown = counted(len(found.messages), "message")
    yield f"{shown} in inbox {found.consumer}, {found.due:,} due{more}"
