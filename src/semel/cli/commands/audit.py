"""`semel audit list | verify`: what operators did, and that nobody changed the record of it."""

from __future__ import annotations

import re
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table
from semel.cli.database import Books, ConsumerFilter, LimitOption, asking
from semel.cli.options import MOST
from semel.cli.plain import given
from semel.cli.preamble import begins_with
from semel.cli.reports.audit import AuditList, AuditVerification, audit_list, audit_verification
from semel.cli.words import at, counted, pairs
from semel.errors import Misuse
from semel.operate.audit import NotedHead

app = typer.Typer(no_args_is_help=True, help="Read and verify the audit trail.")


@app.command("list")
@begins_with(asking, "audit list")
def list_entries(
    answer: Answer,
    books: Books,
    *,
    consumer: ConsumerFilter = None,
    message: Annotated[
        str | None,
        typer.Option(
            "--message", metavar="ID", parser=given, help="Only entries about this message."
        ),
    ] = None,
    after: Annotated[
        int | None,
        typer.Option("--after", metavar="NUMBER", min=0, max=MOST, help="Entries behind this one."),
    ] = None,
    limit: LimitOption = 50,
) -> None:
    """List what people did: the newest entries, or those about one message.

    Example: semel audit list --consumer billing --message m-17 --database postgresql://db/shop
    """
    if (consumer is None) != (message is None):
        raise Misuse("give --consumer and --message together: a message is a consumer's")
    about = (consumer, message) if consumer is not None and message is not None else None
    report = books.ask(lambda database: audit_list(database, books.name, about, after, limit))
    answer.give(report, show_entries)


@app.command("verify")
@begins_with(asking, "audit verify")
def verify(
    answer: Answer,
    books: Books,
    *,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="NUMBER:HASH",
            help="What an earlier verification printed: finds an end that was cut off.",
        ),
    ] = None,
) -> None:
    """Walk the whole chain of the audit trail, and compare its end with its head.

    Exit code 1: somebody changed it.

    Example: semel audit verify --database postgresql://db/shop
    """
    noted = _noted(head)

    def progress(done: int, of: int) -> None:
        if done < of:  # else the answer itself comes next
            answer.tell(lambda: f"{done:,} of {counted(of, 'entry', 'entries')} are whole so far")

    report = books.ask(lambda database: audit_verification(database, books.name, noted, progress))
    answer.give(report, show_verification)


def _noted(head: str | None) -> NotedHead | None:
    if head is None:
        return None
    found = re.fullmatch(r"(\d+):([0-9a-f]{64})", head.strip())
    if found is None:
        raise Misuse("--head is a number, a colon, and 64 hex digits, as `audit verify` prints it")
    return NotedHead(int(found[1]), found[2])


def show_entries(console: Console, report: AuditList) -> None:
    """Print entries of the trail."""
    rows = table("number", "when", "who", "act", "message", "reason", "details", right=("number",))
    for entry in report.entries:
        message = f"{entry.consumer} {entry.message_id}".strip()
        rows.add_row(
            str(entry.number),
            at(entry.at),
            escape(entry.actor),
            entry.act,
            escape(message) or "-",
            escape(entry.reason) or "-",
            escape(pairs(entry.details)),
        )
    console.print(rows)


def show_verification(console: Console, report: AuditVerification) -> None:
    """Print whether the chain is whole."""
    if report.whole:
        entries = counted(report.entries or 0, "entry", "entries")
        console.print(f"[green]the chain is whole[/], {entries}")
        console.print(f"head {report.head}", markup=False)
    else:
        console.print(f"[bold red]the chain is broken[/]: {escape(report.broken)}")
