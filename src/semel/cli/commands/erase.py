"""`semel erase`: payloads that must go."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from semel.cli.answer import Answer
from semel.cli.database import Actor, Books, acting
from semel.cli.plain import given
from semel.cli.preamble import begins_with
from semel.cli.reports.audit import EraseReport
from semel.cli.words import counted
from semel.errors import Misuse
from semel.operate.retention import erase as erase_payloads


@begins_with(acting, "erase")
def erase(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", parser=given, help="All messages of this key."),
    ] = None,
    message: Annotated[
        str | None,
        typer.Option(
            "--message",
            metavar="ID",
            parser=given,
            help="This message, under every id it was given.",
        ),
    ] = None,
) -> None:
    """Remove payloads and headers everywhere, for all consumers; needs a reason.

    From dead letters, waiting messages, their revisions, the inbox, the outbox and kept
    results.  What is erased is never handled and never sent.  Hashes and the audit trail stay.
    What is not stored is not covered: where a message is being handled, run it again.

    Example: semel erase --key customer-7 --reason "request 4711 of the customer"
    """
    if (key is None) == (message is None):
        raise Misuse("say what to erase: --key, or --message")
    what = f"the key {key!r}" if key is not None else f"message {message!r}"
    actor.confirm(answer, f"Erase every payload of {what} in {books.name}, for good?")

    def progress(messages: int) -> None:
        answer.tell(lambda: f"{counted(messages, 'waiting message')} closed so far")

    erased = books.ask(
        lambda database: erase_payloads(
            database,
            key=key,
            message_id=message,
            actor=actor.name,
            reason=actor.reason,
            progress=progress,
        )
    )
    report = EraseReport(
        books.name,
        erased.dead_letters,
        erased.waiting,
        erased.revisions,
        erased.inbox,
        erased.outbox,
        erased.results,
        erased.in_progress,
        erased.left,
        actor.name,
        actor.reason,
    )
    answer.give(report, show_erased)


def show_erased(console: Console, report: EraseReport) -> None:
    """Print how much was erased."""
    console.print(
        f"erased: {report.dead_letters} dead letters, {report.waiting} waiting messages, "
        f"{report.revisions} revisions, {report.inbox} in the inbox, {report.outbox} in the "
        f"outbox, {report.results} kept results",
        markup=False,
    )
    console.print(report.left, markup=False)
