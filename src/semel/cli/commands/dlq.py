"""`semel dlq list | show | retry | park | skip | delete`: the dead letters."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table, tell_shortened
from semel.cli.database import (
    Actor,
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
from semel.cli.messages import act_on_each, payload_lines
from semel.cli.plain import shortened
from semel.cli.preamble import begins_with
from semel.cli.reports.deadletters import LetterList, LetterReport, letter_list, letter_report
from semel.cli.reports.parking import RequestAnswer, request_report
from semel.cli.words import at, counted, pairs, some_of
from semel.messaging.records import DeadLetterFilter
from semel.operate.deadletters import (
    MOST_RETRIES,
    park_dead_letter,
    retry_dead_letter,
    skip_dead_letter,
)
from semel.operate.deletion import ask_to_delete_dead_letter
from semel.operate.stores import OperatorDatabase

app = typer.Typer(no_args_is_help=True, help="Look at dead letters, and deal with them.")


@app.command("list")
@begins_with(asking, "dlq list")
def list_letters(
    answer: Answer,
    books: Books,
    *,
    consumer: ConsumerFilter = None,
    key: KeyFilter = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="NAME", help="Only from this topic.")
    ] = None,
    error_code: CodeFilter = None,
    outcome: Annotated[
        str | None,
        typer.Option(
            "--outcome",
            metavar="NAME",
            help="dlq, deserialization_failure, schema_incompatible or conflict.",
        ),
    ] = None,
    limit: LimitOption = 50,
) -> None:
    """List dead letters, the oldest first, without their payloads.

    Example: semel dlq list --database postgresql://db/shop --consumer billing
    """
    which = DeadLetterFilter(
        consumer=consumer, key=key, topic=topic, error_code=error_code, outcome=outcome
    )
    report = books.ask(lambda database: letter_list(database, books.name, which, limit))
    answer.give(report, show_letters)


@app.command("show")
@begins_with(inspecting, "dlq show")
def show(
    answer: Answer,
    books: Books,
    actor: str,
    *,
    message: MessageArgument,
    consumer: ConsumerOption,
) -> None:
    """Show one dead letter with its payload; that you looked is written to the audit trail.

    Example: semel dlq show m-17 --consumer billing --database postgresql://db/shop
    """
    answer.give(
        books.ask(lambda d: letter_report(d, books.name, consumer, message, actor)),
        show_letter,
    )


@app.command("retry")
@begins_with(acting, "dlq retry")
def retry(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    messages: MessagesArgument,
    consumer: ConsumerOption,
    at_most: Annotated[
        int, typer.Option("--at-most", min=1, help="How often one letter may be sent back.")
    ] = MOST_RETRIES,
) -> None:
    """Send dead letters back to their consumer, under their own ids.

    They wait for the consumer's retry worker, due at once.  Exit code 1: one of them could
    not be sent back.

    Example: semel dlq retry m-17 m-18 --consumer billing --reason "fixed in 2.4.1"
    """

    async def act(database: OperatorDatabase, message_id: str) -> str:
        given = actor.given
        times = await retry_dead_letter(database, consumer, message_id, **given, at_most=at_most)
        return f"sent back (attempt {times})"

    actor.confirm(answer, f"Send {counted(len(messages), 'dead letter')} back to {consumer}?")
    act_on_each(answer, books, actor, messages, act, consumer=consumer)


@app.command("park")
@begins_with(acting, "dlq park")
def park(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    messages: MessagesArgument,
    consumer: ConsumerOption,
) -> None:
    """Move dead letters to the parking lot, where they can be fixed.

    Example: semel dlq park m-17 --consumer billing --reason "the amount must be corrected"
    """
    actor.confirm(answer, f"Park {counted(len(messages), 'dead letter')} of {consumer}?")
    act_on_each(
        answer,
        books,
        actor,
        messages,
        lambda database, one: park_dead_letter(database, consumer, one, **actor.given),
        "parked",
        consumer=consumer,
    )


@app.command("skip")
@begins_with(acting, "dlq skip")
def skip(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    messages: MessagesArgument,
    consumer: ConsumerOption,
) -> None:
    """Decide that dead letters have no effect, now and ever; needs a reason.

    Example: semel dlq skip m-17 --consumer billing --reason "a test order"
    """
    actor.confirm(answer, f"Skip {counted(len(messages), 'dead letter')} of {consumer} for good?")
    act_on_each(
        answer,
        books,
        actor,
        messages,
        lambda database, one: skip_dead_letter(database, consumer, one, **actor.given),
        "skipped",
        consumer=consumer,
    )


@app.command("delete")
@begins_with(acting, "dlq delete")
def delete(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    message: MessageArgument,
    consumer: ConsumerOption,
) -> None:
    """Ask for the deletion of a dead letter; another person approves it.

    The approval is `semel parking approve`, with the number that this prints.

    Example: semel dlq delete m-17 --consumer billing --reason "sent to the wrong topic"
    """
    actor.confirm(answer, f"Ask to delete the dead letter {message} of {consumer}?")
    request = books.ask(
        lambda database: ask_to_delete_dead_letter(
            database, consumer, message, actor=actor.name, reason=actor.reason
        )
    )
    answer.give(RequestAnswer(books.name, request_report(request), actor.name), show_asked)


def show_letters(console: Console, report: LetterList) -> None:
    """Print a list of dead letters."""
    rows = table("consumer", "message", "key", "outcome", "code", "attempts", "failed", "reason")
    for one in report.letters:
        rows.add_row(
            one.consumer,
            escape(shortened(one.message_id)),
            escape(shortened(one.key or "-")),
            one.outcome,
            one.error_code,
            str(one.attempts),
            at(one.last_failed_at),
            escape("(erased) " if one.erased else "") + escape(one.reason),
        )
    console.print(rows)
    tell_shortened(console, (name for one in report.letters for name in (one.message_id, one.key)))
    shown = len(report.letters)
    console.print(some_of(shown, report.total, "dead letter", report.database), markup=False)


def show_letter(console: Console, report: LetterReport) -> None:
    """Print one dead letter."""
    one = report.letter
    facts = {
        "message": f"{one.message_id} of {one.consumer}, {one.outcome}",
        "key": one.key or "-",
        "source": one.source or "-",
        "reason": one.reason,
        "exception": f"{one.exception or '-'} ({one.error_code})",
        "attempts": f"{one.attempts}, first failed {at(one.first_failed_at)}, "
        f"last {at(one.last_failed_at)}",
        "owner": one.owner or "nobody",
        "type": f"{report.message_type or '-'}, schema {report.schema_version or '-'}",
        "correlation": report.correlation_id or "-",
        "headers": pairs(report.headers),
        "sent back": f"{report.sent_back} times",
        "acts": "; ".join(report.acts),
    }
    show_facts(console, facts)
    for line in payload_lines(report.payload):
        console.print(line, markup=False)


def show_facts(console: Console, facts: dict[str, str]) -> None:
    """Print names and values below each other."""
    rows = table("", "")
    rows.show_header = False
    for name, value in facts.items():
        rows.add_row(name, escape(value))
    console.print(rows)


def show_asked(console: Console, report: RequestAnswer) -> None:
    """Print the number that the second person needs."""
    request = report.request
    console.print(
        f"request {request.number} waits for a second person: "
        f"semel parking approve {request.number}",
        markup=False,
    )
