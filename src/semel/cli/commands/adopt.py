"""`semel adopt`: an operator's word that a checkpoint may go on."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table
from semel.cli.options import LedgerOption
from semel.cli.preamble import Operator, begins_with, changing
from semel.cli.reports.adoption import AdoptionPlan, AdoptReport, adoption_plan
from semel.cli.target import ledger_url, open_existing
from semel.cli.words import counted
from semel.ledgers import open_ledger
from semel.pipeline.adopt import adopt as adopt_checkpoint
from semel.pipeline.txn import Scope


@begins_with(changing, "adopt")
def adopt(
    answer: Answer,
    operator: Operator,
    *,
    app: Annotated[str, typer.Option("--app", metavar="NAME", help="The pipeline's app.")],
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", metavar="PATH", help="The checkpoint to go on with.")
    ],
    ledger: LedgerOption = None,
    query: Annotated[
        str, typer.Option("--query", metavar="NAME", help="The pipeline's query.")
    ] = "main",
    state_lost: Annotated[
        bool, typer.Option("--state-lost", help="Accept that a stateful query starts empty.")
    ] = False,
    repeat_files: Annotated[
        bool,
        typer.Option("--repeat-files", help="Forget which files were committed: read them again."),
    ] = False,
    create_ledger: Annotated[
        bool,
        typer.Option("--create-ledger", help="Make the ledger if there is none yet."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what it means; change nothing.")
    ] = False,
) -> None:
    """Accept a checkpoint whose start does not follow from the ledger.

    For a new checkpoint after the old one was lost, and for the checkpoint of a query that ran
    without semel until now.  Shows what would be repeated and what left out, asks, and keeps
    who and why in the ledger.

    Example: semel adopt --ledger sqlite:///pay.ledger --app payments --checkpoint /data/cp
    --why "disk lost, gap accepted"
    """
    from semel.spark.checkpoint import open_checkpoint

    url = ledger_url(answer, ledger)
    opened = (
        open_ledger(url)
        if create_ledger and not dry_run
        else open_existing(answer, url, " (or make one with --create-ledger)")
    )
    found_at = open_checkpoint(checkpoint)
    found = found_at.adoptable()
    scope = Scope(opened.ledger_id, app, query)
    plan = adoption_plan(opened, scope, checkpoint, found_at, found)
    if dry_run:
        answer.give(AdoptReport(False, operator.name, operator.why, None, plan), show_adopted)
        return
    answer.show(plan, show_plan)
    question = f"Adopt {checkpoint} for {scope}?"
    operator.confirm(answer, "adopting changes positions", question)
    generation = adopt_checkpoint(
        opened,
        scope,
        found,
        who=operator.name,
        why=operator.why,
        state_lost=state_lost,
        repeat_files=repeat_files,
        takeover=operator.takeover,
    )
    report = AdoptReport(True, operator.name, operator.why, generation.number, plan)
    answer.give(report, show_result)


def show_plan(console: Console, plan: AdoptionPlan) -> None:
    """Print what adopting means, in words."""
    console.print(f"[bold]{plan.scope}[/] in {escape(plan.ledger)}, {plan.owner}")
    state = ", stateful" if plan.is_stateful else ""
    before = f"generation {plan.generation_before}" if plan.generation_before else "no generation"
    console.print(
        f"checkpoint {plan.checkpoint} (id {plan.checkpoint_id}{state}) goes on with batch "
        f"{plan.first_batch}; the ledger has {before} so far",
        markup=False,
    )
    if plan.is_known:
        console.print("it is the checkpoint in use already")
    if plan.positions:
        rows = table(
            "source", "partition", "before", "after", "means", "", right=("before", "after")
        )
        for one in plan.positions:
            means = one.means if one.means in ("continues", "new") else f"[bold red]{one.means}[/]"
            rows.add_row(
                one.source,
                escape(one.partition) or "-",
                "-" if one.before is None else f"{one.before:,}",
                "-" if one.after is None else f"{one.after:,}",
                means,
                one.words,
            )
        console.print(rows)
    if plan.files_repeated:
        count = counted(len(plan.files_repeated), "file")
        console.print(
            f"[bold red]overlap[/] {count} of the next batch committed already; semel refuses that "
            f"batch unless --repeat-files is given: {escape(', '.join(plan.files_repeated[:5]))}"
        )
    for cycle in plan.open_cycles:
        console.print(f"[bold red]in the way[/]  {cycle}: settle it with `semel recover` first")


def show_result(console: Console, report: AdoptReport) -> None:
    """Print that it was done."""
    console.print(
        f"[green]adopted[/]: {report.plan.scope} goes on as generation {report.generation}"
    )


def show_adopted(console: Console, report: AdoptReport) -> None:
    """Print what adopting would mean."""
    show_plan(console, report.plan)
