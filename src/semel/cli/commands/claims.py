"""`semel claims list`: what is being handled under a lease, and what nobody finished."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table, tell_shortened
from semel.cli.database import Books, ConsumerOption, LimitOption, asking
from semel.cli.plain import shortened
from semel.cli.preamble import begins_with
from semel.cli.reports.claims import ClaimList, claim_list
from semel.cli.words import at, counted, lasting

app = typer.Typer(no_args_is_help=True, help="Look at what is being handled under a lease.")


@app.command("list")
@begins_with(asking, "claims list")
def list_claims(
    answer: Answer,
    books: Books,
    *,
    consumer: ConsumerOption,
    stale: Annotated[
        bool, typer.Option("--stale", help="Only those whose lease has run out.")
    ] = False,
    limit: LimitOption = 50,
) -> None:
    """List the claims of a leased consumer that are in progress, the oldest lease first.

    Exit code 1: a lease has run out.  Its owner died, hangs, or cannot reach the database;
    the consumer's stale policy says what becomes of the message.

    Example: semel claims list --consumer exports --stale --database postgresql://db/shop
    """
    report = books.ask(lambda d: claim_list(d, books.name, consumer, limit, stale=stale))
    answer.give(report, show_claims)


def show_claims(console: Console, report: ClaimList) -> None:
    """Print one line for each claim."""
    rows = table("message", "lease", "owner", "attempts", "source", "since", "code")
    for one in report.claims:
        if one.is_stale:
            lease = f"[red]ended {lasting(-one.seconds_left)} ago[/]"
        else:
            lease = f"{lasting(one.seconds_left)} left"
        rows.add_row(
            escape(shortened(one.message_id)),
            lease,
            escape(one.owner),
            str(one.attempts),
            escape(one.source or "-"),
            at(one.first_seen_at),
            one.error_code or "-",
        )
    console.print(rows)
    tell_shortened(console, (one.message_id for one in report.claims))
    found = counted(len(report.claims), "claim")
    more = "; there are more, see --limit" if report.has_more else ""
    console.print(f"{found} of {report.consumer} in progress{more}", markup=False)
