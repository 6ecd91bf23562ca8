"""`semel cycle resolve`: carry a stuck cycle through, by an operator's word."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table
from semel.cli.options import PipelineOption
from semel.cli.preamble import Operator, begins_with, changing
from semel.cli.reports.resolution import (
    Choice,
    ResolutionPlan,
    ResolveReport,
    Way,
    resolution_plan,
)
from semel.cli.reports.resolution import resolve as carry_through
from semel.cli.target import need_pipeline
from semel.errors import Misuse

app = typer.Typer(no_args_is_help=True, help="Work on a single cycle.")


@app.command("resolve")
@begins_with(changing, "cycle resolve")
def resolve(
    answer: Answer,
    operator: Operator,
    *,
    cycle: Annotated[
        str, typer.Option("--cycle", metavar="g1.b42", help="The stuck cycle; see `semel doctor`.")
    ],
    pipeline: PipelineOption = None,
    sink: Annotated[
        str | None, typer.Option("--sink", metavar="NAME", help="Only this sink.")
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Commit again, now that the cause is gone.")
    ] = False,
    divert: Annotated[
        str | None,
        typer.Option(
            "--divert",
            metavar="TABLE",
            help="Commit what can be committed; the refused rows go to this reject table.",
        ),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(
            "--without",
            metavar="SINK",
            help="Give up the rows of a sink that is not configured any more: they are lost there.",
        ),
    ] = None,
) -> None:
    """Carry through a cycle that is committed and that recovery cannot finish.

    For the rare cycle that a foreign writer made unfinishable after a crash.  When every sink
    is done, the cycle is finished in the ledger.  Who and why are kept.  Exit code 1: the
    cycle is still stuck.

    Example: semel cycle resolve --pipeline payments:pipeline --cycle g1.b42 --divert rejects
    --why "foreign rows took the keys"
    """
    choice = _choice(sink, retry, divert, without)
    known = need_pipeline(answer, pipeline)
    record, plan = resolution_plan(known, cycle, choice)
    answer.show(plan, show_plan)
    question = f"Resolve {plan.scope}/{cycle} by {choice.way}?"
    operator.confirm(answer, "resolving changes things", question)
    report = carry_through(
        known, record, plan, choice, operator.name, operator.why, operator.takeover
    )
    answer.give(report, show_resolved)


def _choice(sink: str | None, retry: bool, divert: str | None, without: str | None) -> Choice:
    chosen = [retry, divert is not None, without is not None]
    if chosen.count(True) != 1:
        raise Misuse("choose one of --retry, --divert TABLE and --without SINK")
    if without is not None:
        if sink is not None:
            raise Misuse("--without names its sink itself: leave --sink out")
        return Choice(Way.WITHOUT, without)
    if divert is not None:
        return Choice(Way.DIVERT, sink, divert)
    return Choice(Way.RETRY, sink)


def show_plan(console: Console, plan: ResolutionPlan) -> None:
    """Print how every sink stands and what will be done with it."""
    console.print(
        f"[bold]{plan.scope}/{plan.cycle}[/] (attempt {plan.attempt[:8]}) is {plan.state}"
    )
    rows = table("sink", "rows", "found", "evidence", "will", right=("rows",))
    for one in plan.sinks:
        count = "-" if one.rows is None else f"{one.rows:,}"
        rows.add_row(one.sink, count, one.found, escape(one.evidence) or "-", one.will)
    console.print(rows)


def show_resolved(console: Console, report: ResolveReport) -> None:
    """Print what became of every sink."""
    for one in report.sinks:
        word = "[green]done[/]" if one.is_done else "[bold red]not done[/]"
        counts = f", {one.diverted} rows diverted to {one.reject_table}" if one.diverted else ""
        console.print(
            f"{one.sink}: {one.did}, {word}{escape(counts)} {escape(one.reason)}".rstrip()
        )
    console.print(
        "the cycle is finished"
        if report.finished
        else "the cycle is still committed and unfinished; see `semel doctor`"
    )
