"""`semel erase` and `semel retention`: payloads that must go, and rows that may."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from semel.cli.answer import Answer
from semel.cli.database import Actor, Books, ConsumerOption, acting
from semel.cli.preamble import begins_with
from semel.cli.reports.audit import EraseReport, RetentionReport
from semel.cli.words import counted, lasting
from semel.errors import Misuse
from semel.messaging.audit import Act
from semel.messaging.database import Database
from semel.messaging.erase import erase as erase_payloads
from semel.messaging.retention import DAY_SECONDS, DEFAULT_SAFETY, Pruned, Retention, prune


@begins_with(acting, "erase")
def erase(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    key: Annotated[
        str | None, typer.Option("--key", metavar="KEY", help="All messages of this key.")
    ] = None,
    message: Annotated[
        str | None,
        typer.Option("--message", metavar="ID", help="This message, under every id it was given."),
    ] = None,
) -> None:
    """Remove payloads and headers everywhere, for all consumers; needs a reason.

    From dead letters, waiting messages, their revisions, the inbox and the outbox.  Hashes and
    the audit trail stay.  What is erased is never handled and never sent.

    Example: semel erase --key customer-7 --reason "request 4711 of the customer"
    """
    if (key is None) == (message is None):
        raise Misuse("say what to erase: --key, or --message")
    what = f"the key {key!r}" if key is not None else f"message {message!r}"
    actor.confirm(answer, f"Erase every payload of {what} in {books.name}, for good?")
    erased = books.ask(
        lambda database: erase_payloads(
            database, key=key, message_id=message, actor=actor.name, reason=actor.reason
        )
    )
    report = EraseReport(
        books.name,
        erased.dead_letters,
        erased.waiting,
        erased.revisions,
        erased.inbox,
        erased.outbox,
        actor.name,
        actor.reason,
    )
    answer.give(report, show_erased)


@begins_with(acting, "retention")
def retention(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    consumer: ConsumerOption,
    ttl: Annotated[
        float, typer.Option("--ttl-days", min=0.0, help="How long claims are kept.")
    ] = 14.0,
    topic: Annotated[
        float, typer.Option("--topic-days", min=0.0, help="How long the broker keeps messages.")
    ] = 7.0,
    replay: Annotated[
        float, typer.Option("--replay-days", min=0.0, help="How far back you may replay.")
    ] = 7.0,
    letters: Annotated[
        float, typer.Option("--dlq-days", min=0.0, help="How old dead letters may become.")
    ] = 7.0,
    parked: Annotated[
        float, typer.Option("--parking-days", min=0.0, help="How long messages may be parked.")
    ] = 7.0,
    safety: Annotated[
        float, typer.Option("--safety", min=1.0, help="The longest window is multiplied by this.")
    ] = DEFAULT_SAFETY,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="How many rows one transaction deletes.")
    ] = 1000,
) -> None:
    """Delete a consumer's old claims and processed inbox messages, in small transactions.

    Only those whose message is over.  Refuses a time to live that one of the windows outlasts,
    and stops while a replay of the consumer runs.

    Example: semel retention --consumer billing --ttl-days 30 --topic-days 14 --yes
    """
    settings = Retention(
        ttl_seconds=ttl * DAY_SECONDS,
        topic_retention_seconds=topic * DAY_SECONDS,
        replay_window_seconds=replay * DAY_SECONDS,
        dead_letter_age_seconds=letters * DAY_SECONDS,
        parking_age_seconds=parked * DAY_SECONDS,
        safety=safety,
        batch=batch,
    )
    age = lasting(settings.ttl_seconds)
    actor.confirm(answer, f"Delete what is over and older than {age} of {consumer}?")

    def progress(pruned: Pruned) -> None:
        answer.say(f"{counted(pruned.total, 'row')} deleted so far")

    async def prune_and_note(database: Database) -> Pruned:
        pruned = await prune(database, consumer, settings, progress)
        if pruned.total:
            details = {**asdict(pruned), "ttl_seconds": settings.ttl_seconds}
            act = Act(actor.name, "retention", consumer, "", actor.reason, details)
            async with database.begin() as unit:
                await unit.audit.append(act)
        return pruned

    pruned = books.ask(prune_and_note)
    report = RetentionReport(
        books.name,
        consumer,
        settings.ttl_seconds,
        settings.shortest_seconds,
        pruned.claims,
        pruned.inbox,
        pruned.keys,
    )
    answer.give(report, show_retention)


def show_erased(console: Console, report: EraseReport) -> None:
    """Print how much was erased."""
    console.print(
        f"erased: {report.dead_letters} dead letters, {report.waiting} waiting messages, "
        f"{report.revisions} revisions, {report.inbox} in the inbox, {report.outbox} in the outbox",
        markup=False,
    )


def show_retention(console: Console, report: RetentionReport) -> None:
    """Print how much was deleted."""
    console.print(
        f"deleted: {counted(report.claims, 'claim')}, {report.inbox} of the inbox, "
        f"{counted(report.keys, 'lock')} of keys",
        markup=False,
    )
