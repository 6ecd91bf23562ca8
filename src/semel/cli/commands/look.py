"""`semel status` and `semel history`: what the ledger knows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table
from semel.cli.options import MOST_ROWS
from semel.cli.preamble import begins_with, looking
from semel.cli.reports.attempts import AttemptReport, SourceReport
from semel.cli.reports.history import HistoryReport, ScopeHistory, history_report
from semel.cli.reports.status import Files, ScopeStatus, StatusReport, status_report
from semel.cli.target import Target
from semel.cli.words import at, counted, lasting, listed, pairs


@begins_with(looking, "status")
def status(
    answer: Answer,
    target: Target,
    *,
    files: Annotated[
        bool, typer.Option("--files", help="Count the committed files, which may take a while.")
    ] = False,
) -> None:
    """Show who owns each scope, and where it stands.

    Exit code 1: a scope has open cycles and nobody is at work on them.

    Example: semel status --ledger sqlite:///payments.ledger
    """
    counting = Files.COUNTED if files else Files.LEFT_OUT
    answer.give(status_report(target.ledger, target.scopes, counting), show_status)


@begins_with(looking, "history")
def history(
    answer: Answer,
    target: Target,
    *,
    limit: Annotated[
        int,
        typer.Option(
            "--limit", "-n", min=1, max=MOST_ROWS, help="How many attempts of each scope."
        ),
    ] = 20,
    cycle: Annotated[
        str | None, typer.Option("--cycle", metavar="g1.b42", help="All attempts of one cycle.")
    ] = None,
) -> None:
    """List the newest attempts at cycles, with rows and durations, and what operators did.

    Example: semel history --ledger sqlite:///payments.ledger --limit 50
    """
    answer.give(history_report(target.ledger, target.scopes, limit, cycle), show_history)


def show_status(console: Console, report: StatusReport) -> None:
    """Print a status report."""
    console.print(f"ledger {report.ledger}  (id {report.ledger_id})", markup=False)
    if not report.scopes:
        console.print("no scope has ever had an owner here", markup=False)
    for scope in report.scopes:
        console.print()
        _show_scope(console, scope)


def _show_scope(console: Console, scope: ScopeStatus) -> None:
    facts = table("", "")
    facts.show_header = False
    owner = scope.owner
    left = f", lease {lasting(owner.lease_left_seconds)} left" if owner.is_live else ""
    facts.add_row("owner", f"{owner}{left}, epoch {owner.epoch}")
    generation = scope.generation
    facts.add_row(
        "generation",
        f"{generation.number}, checkpoint {generation.checkpoint}, since {at(generation.opened_at)}"
        if generation
        else "none yet",
    )
    facts.add_row("mark", scope.mark or "nothing finished yet")
    oldest = scope.oldest_open_seconds
    age = "" if oldest is None else f" (the oldest for {lasting(oldest)})"
    facts.add_row("open cycles", f"{pairs(scope.open)}{age}")
    for source in scope.positions:
        facts.add_row(f"source {source.source}", escape(_position_words(source)))
    if scope.last:
        facts.add_row("last cycle", escape(_last_words(scope.last)))
    if scope.advice:
        facts.add_row("[bold red]next[/]", scope.advice)
    console.print(f"[bold]{scope.scope}[/]")
    console.print(facts)


def _position_words(source: SourceReport) -> str:
    words = []
    if source.ends:
        ends = [f"{name} {end:,}".strip() for name, end in source.ends.items()]
        words.append(f"{counted(len(ends), 'partition')}: {listed(ends)}")
    if source.files is not None:
        words.append(counted(source.files, "committed file"))
    return ", ".join(words) or "files (count them with --files)"


def _last_words(last: AttemptReport) -> str:
    rows = f"; rows: {pairs(last.rows)}" if last.rows else ""
    why = f"; {last.reason}" if last.reason else ""
    return f"{last.cycle} {last.state}, {lasting(last.age_seconds)} ago{rows}{why}"


def show_history(console: Console, report: HistoryReport) -> None:
    """Print a history report."""
    console.print(f"ledger {report.ledger}", markup=False)
    for scope in report.scopes:
        console.print()
        _show_attempts(console, scope)
        if scope.acts:
            _show_acts(console, scope)


def _show_attempts(console: Console, scope: ScopeHistory) -> None:
    right = ("staging", "committing")
    columns = ("cycle", "attempt", "state", "planned", *right, "rows", "read", "reason")
    rows = table(*columns, title=f"[bold]{scope.scope}[/]", right=right)
    for one in scope.attempts:
        rows.add_row(
            one.cycle,
            one.attempt[:8],
            one.state,
            at(one.planned_at),
            lasting(one.staging_seconds),
            lasting(one.committing_seconds),
            pairs(one.rows),
            escape("; ".join(one.read)) or "-",
            escape(one.reason) or "-",
        )
    console.print(rows)


def _show_acts(console: Console, scope: ScopeHistory) -> None:
    rows = table("when", "who", "act", "why", title=f"what operators did in {scope.scope}")
    for act in scope.acts:
        rows.add_row(at(act.at), escape(act.who), act.act, escape(act.why))
    console.print()
    console.print(rows)
