"""`semel explain` and `semel gaps list | close`: one message's story, and missing versions."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table, tell_shortened
from semel.cli.database import (
    Actor,
    Books,
    ConsumerFilter,
    LimitOption,
    MessageArgument,
    acting,
    asking,
)
from semel.cli.plain import given, shortened
from semel.cli.preamble import begins_with
from semel.cli.reports.explanation import (
    ExplainReport,
    GapList,
    GapReport,
    GapsClosed,
    MomentReport,
    explain_report,
    gap_reports,
)
from semel.cli.selection import load_consumer
from semel.cli.words import at, counted, listed
from semel.errors import Misuse
from semel.operate.explain import close_gaps, explain_message, open_gaps, pass_over_gaps

gaps_app = typer.Typer(no_args_is_help=True, help="Versions of aggregates that did not come.")


@begins_with(asking, "explain")
def explain(
    answer: Answer,
    books: Books,
    *,
    message: MessageArgument,
    consumer: ConsumerFilter = None,
    sent_to: Annotated[
        list[str] | None,
        typer.Option(
            "--sent-to", metavar="TOPIC", help="Look for what it sent there; may be repeated."
        ),
    ] = None,
) -> None:
    """Tell one message's story: where it came from, what was tried, who did what, what it sent.

    For every consumer that knows it; no payload is shown.  Of what it sent, the outbox has what
    was not delivered yet; with --sent-to the ids of the rest are computed, and consumers in this
    database are asked for them.  Exit code 1: nobody knows it.

    Example: semel explain m-17 --sent-to invoices --database postgresql://db/shop
    """
    found = books.ask(lambda database: explain_message(database, message, consumer, sent_to or ()))
    answer.give(explain_report(books.name, found), show_explanation)


@gaps_app.command("list")
@begins_with(asking, "gaps list")
def list_gaps(
    answer: Answer, books: Books, *, consumer: ConsumerFilter = None, limit: LimitOption = 50
) -> None:
    """List versions that did not come, the oldest gap first.

    Exit code 1: there are some.

    Example: semel gaps list --database postgresql://db/shop
    """
    found = books.ask(lambda database: open_gaps(database, consumer, limit))
    answer.give(GapList(books.name, gap_reports(found)), show_gaps)


@gaps_app.command("close")
@begins_with(acting, "gaps close")
def close(
    answer: Answer,
    books: Books,
    actor: Actor,
    *,
    consumer: Annotated[
        str,
        typer.Option(
            "--consumer",
            "-c",
            metavar="NAME",
            help="The consumer; with --pass-over as MODULE:NAME, for only itself reads versions.",
        ),
    ],
    key: Annotated[
        str, typer.Option("--key", metavar="KEY", parser=given, help="The aggregate's key.")
    ],
    pass_over: Annotated[
        bool,
        typer.Option(
            "--pass-over", help="The versions never come: the lowest one that waits is next."
        ),
    ] = False,
) -> None:
    """Take a key's gaps off the list; needs a reason, which the audit trail keeps.

    With --pass-over, what is missing behind the lowest version that waits stays on the list.

    Example: semel gaps close --consumer billing --key case-7 --reason "back-filled by hand"
    """
    if not actor.reason.strip():
        raise Misuse("closing a gap needs a reason, which the audit trail keeps: add --reason '…'")
    asked = {"actor": actor.name, "reason": actor.reason}
    if pass_over:
        handler = load_consumer(consumer)
        actor.confirm(answer, f"Go on without the missing versions of {key!r} for {handler.name}?")
        found = books.ask(lambda database: pass_over_gaps(database, handler, key, **asked))
    else:
        actor.confirm(answer, f"Close the gaps of {key!r} for {consumer}?")
        found = books.ask(lambda database: close_gaps(database, consumer, key, **asked))
    report = GapsClosed(books.name, gap_reports(found), pass_over, actor.name, actor.reason)
    answer.give(report, show_closed)


def show_explanation(console: Console, report: ExplainReport) -> None:
    """Print a story for each consumer."""
    console.print(f"[bold]{escape(report.message_id)}[/]")
    if report.stored_as != report.message_id:
        console.print(f"  stored as {report.stored_as}", markup=False)
    if report.other_names:
        console.print(f"  other ids: {listed(report.other_names)}", markup=False)
    if report.needs_attention:
        console.print("no consumer knows it")
    for story in report.stories:
        console.print(f"[bold]{escape(story.consumer)}[/]: {escape(story.standing)}")
        where = f"from {story.source}, " if story.source else ""
        key = f"key {story.key}, " if story.key is not None else ""
        attempts = counted(story.attempts, "attempt")
        console.print(f"  {where}{key}{attempts}, payload {story.payload_hash[:12]}", markup=False)
        console.print(f"  deliveries: {story.deliveries}", markup=False)
        console.print(f"  sent: {story.children}", markup=False)
        _show_moments(console, story.moments)
    if report.acts:
        console.print("[bold]for all consumers[/]")
        _show_moments(console, report.acts)


def _show_moments(console: Console, moments: list[MomentReport]) -> None:
    rows = table("  when", "what", "")
    for one in moments:
        rows.add_row(f"  {at(one.at)}", one.what, escape(one.words))
    console.print(rows)


def show_gaps(console: Console, report: GapList) -> None:
    """Print one line for each gap."""
    if not report.gaps:
        console.print("[green]nothing is missing[/]")
        return
    _show(console, report.gaps)


def show_closed(console: Console, report: GapsClosed) -> None:
    """Print what was closed."""
    _show(console, report.gaps)
    console.print("passed over" if report.passed_over else "closed")


def _show(console: Console, gaps: list[GapReport]) -> None:
    rows = table("consumer", "key", "missing", "came", "since", right=("came",))
    for gap in gaps:
        missing = f"{gap.first_missing} to {gap.last_missing}"
        if gap.first_missing == gap.last_missing:
            missing = str(gap.first_missing)
        key = escape(shortened(gap.key))
        rows.add_row(escape(gap.consumer), key, missing, str(gap.found), at(gap.since))
    console.print(rows)
    tell_shortened(console, (gap.key for gap in gaps))
