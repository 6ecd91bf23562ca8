"""`semel recover`: settle what an earlier owner left, after saying how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from semel.cli.answer import Answer
from semel.cli.commands.doctor import show_attempts, show_stranded
from semel.cli.options import PipelineOption
from semel.cli.preamble import Operator, begins_with, changing
from semel.cli.reports.recovery import (
    Recovered,
    RecoveryPlan,
    carry_out,
    nothing_done,
    recovery_plan,
)
from semel.cli.target import need_pipeline
from semel.cli.words import counted, pairs
from semel.errors import LeaseHeld
from semel.lease import Takeover

# Fewer are settled before a bar could be read.
MANY = 20


@begins_with(changing, "recover")
def recover(
    answer: Answer,
    operator: Operator,
    *,
    pipeline: PipelineOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show the decisions; take no lease and change nothing at all."
        ),
    ] = False,
) -> None:
    """Finish what is committed and give up what is not, in every sink.

    Says what it will do and asks before it does it; who and why are kept in the ledger.  A
    start of the job does the same by itself.  Exit code 1: with --dry-run, there is something
    to settle; else, something is left that only a person can settle.

    Example: semel recover --pipeline payments:pipeline --dry-run
    """
    known = need_pipeline(answer, pipeline)
    plan = recovery_plan(known)
    if dry_run:
        answer.give(plan, show_plan)
        return
    if plan.is_empty and not plan.blocked_by:
        answer.give(nothing_done(known, operator.name, operator.why), show_recovered)
        return
    answer.show(plan, show_plan)
    if plan.owner.is_live and operator.takeover is not Takeover.FORCE:
        raise LeaseHeld(plan.scope, str(plan.owner), plan.owner.lease_left_seconds)
    question = f"Recover {plan.scope} in {plan.ledger}?"
    operator.confirm(answer, "recovery changes things", question)
    with _bar(answer, plan.steps) as step:
        done = carry_out(known, plan, operator.name, operator.why, operator.takeover, step)
    answer.give(done, show_recovered)


def show_plan(console: Console, plan: RecoveryPlan) -> None:
    """Print what recovery would do."""
    console.print(f"[bold]{plan.scope}[/] in {escape(plan.ledger)}, {plan.owner}")
    if plan.is_empty:
        console.print("nothing to settle")
    else:
        decisions = Counter(one.decision for one in plan.stranded)
        count = counted(len(plan.attempts), "open cycle")
        console.print(f"{count}; in the sinks: {pairs(decisions)}", markup=False)
        if plan.attempts:
            show_attempts(console, plan.attempts)
        if plan.stranded:
            show_stranded(console, plan.stranded)
        console.print("then: whatever losing attempts have left in the sinks is swept")
    for block in plan.blocked_by:
        console.print(f"[bold red]in the way[/]  {escape(block)}")


def show_recovered(console: Console, done: Recovered) -> None:
    """Print what recovery did."""
    if done.epoch is None:
        console.print(f"{done.scope}: nothing to settle; nothing was changed", markup=False)
        return
    console.print(
        f"[green]recovered[/] [bold]{done.scope}[/] as epoch {done.epoch}: "
        f"{counted(len(done.finished), 'cycle')} finished, "
        f"{counted(len(done.aborted), 'attempt')} given up, swept: {pairs(done.swept)}"
    )
    for left in done.left_as_is:
        console.print(
            f"left as it is: {left.cycle} (attempt {left.attempt[:8]}) in sink {left.sink!r}, "
            f"{left.ledger_says}",
            markup=False,
        )


@contextmanager
def _bar(answer: Answer, steps: int) -> Iterator[Callable[[], None]]:
    if steps < MANY:
        yield lambda: None
        return
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"settling {counted(steps, 'transaction')}", total=steps)
        yield lambda: progress.advance(task)
