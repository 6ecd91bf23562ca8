"""`semel dlq list | show | retry | park | skip | delete`: the dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import typer

from semel.cli.answer import Answer
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
from semel.cli.messages import (
    act_on_each,
    acts_of,
    headers_of,
    headers_shown,
    is_erased,
    payload_lines,
    payload_shown,
    reason_shown,
    reply_asked,
)
from semel.cli.preamble import begins_with
from semel.cli.render import Field, Line, Rows, Shape, at, column, counted, facts, name_of, some_of
from semel.messaging.records import DeadLetter, DeadLetterFilter
from semel.operate.deadletters import (
    MOST_RETRIES,
    LetterInspection,
    dead_letters,
    inspect_dead_letter,
    park_dead_letter,
    retry_dead_letter,
    skip_dead_letter,
)
from semel.operate.deletion import ask_to_delete_dead_letter

app = typer.Typer(no_args_is_help=True, help="Look at dead letters, and deal with them.")

LETTER = Shape(
    DeadLetter,
    Field("consumer", head="consumer"),
    Field("message_id", head="message", cell=name_of),
    Field("key", head="key", cell=name_of),
    Field("source", means="Topic, partition and offset of the record."),
    Field("outcome", head="outcome"),
    Field("error_code", head="code"),
    Field("attempts", head="attempts"),
    Field("first_failed_at"),
    Field("last_failed_at", head="failed", cell=at),
    column("reason", reason_shown),
    Field("reason"),
    Field("exception"),
    Field("owner"),
    Field("erased", is_erased),
)
Shape(
    LetterInspection,
    Field("letter", "message"),
    Field("payload", payload_shown),
    Field("headers", headers_shown),
    Field("message_type", "message.message_type"),
    Field("schema_version", "message.schema_version"),
    Field("correlation_id", "message.correlation_id"),
    Field("timestamp", "message.timestamp", means="The broker's time of the record."),
    Field("expected_hash", "message.expected_hash"),
    Field("sent_back"),
    Field("acts", acts_of),
)


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
    found = books.ask(lambda database: dead_letters(database, which, limit))
    total = some_of(len(found.letters), found.total, "dead letter", books.name)
    answer.reply(found, lambda _: (LETTER.table(found.letters), total), database=books.name)


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
    """Show one dead letter with its payload; the audit trail says that you looked.

    Example: semel dlq show m-17 --consumer billing --database postgresql://db/shop
    """
    found = books.ask(lambda d: inspect_dead_letter(d, consumer, message, actor=actor))
    answer.reply(found, inspection_lines, database=books.name)


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
    actor.confirm(answer, f"Send {counted(len(messages), 'dead letter')} back to {consumer}?")
    act = partial(retry_dead_letter, at_most=at_most)
    note = "sent back (attempt {})".format
    act_on_each(answer, books, actor, act, messages, note, consumer=consumer)


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
    act_on_each(answer, books, actor, park_dead_letter, messages, "parked", consumer=consumer)


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
    """Decide that dead letters never have an effect; needs a reason.

    Example: semel dlq skip m-17 --consumer billing --reason "a test order"
    """
    actor.confirm(
        answer, f"Skip {counted(len(messages), 'dead letter')} of {consumer} permanently?"
    )
    act_on_each(answer, books, actor, skip_dead_letter, messages, "skipped", consumer=consumer)


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
    """Ask for the deletion of a dead letter; a second person must approve it.

    The approval is `semel parking approve`, with the number that this prints.

    Example: semel dlq delete m-17 --consumer billing --reason "sent to the wrong topic"
    """
    actor.confirm(answer, f"Ask to delete the dead letter {message} of {consumer}?")
    reply_asked(answer, books, actor, ask_to_delete_dead_letter, consumer, message)


def inspection_lines(found: LetterInspection) -> Iterator[Line | Rows]:
    """Put one dead letter for people."""
    one = found.message
    yield facts(
        {
            "message": f"{one.message_id} of {one.consumer}, {one.outcome}",
            "key": one.key,
            "source": one.source,
            "reason": one.reason,
            "exception": f"{one.exception or '-'} ({one.error_code})",
            "attempts": f"{one.attempts}, first failed {at(one.first_failed_at)}, "
            f"last {at(one.last_failed_at)}",
            "owner": one.owner or "none",
            "type": f"{one.message_type or '-'}, schema {one.schema_version or '-'}",
            "correlation": one.correlation_id,
            "headers": headers_of(one.headers),
            "sent back": f"{found.sent_back} times",
            "acts": acts_of(found),
        }
    )
    yield from payload_lines(payload_shown(found))
