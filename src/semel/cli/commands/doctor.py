"""`semel doctor`: what is wrong, with evidence, and what to read about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, table
from semel.cli.preamble import begins_with, looking
from semel.cli.reports.doctor import DoctorReport, Patient, ScopeDiagnosis, doctor_report
from semel.cli.reports.stranded import OpenAttempt, Stranded
from semel.cli.target import Target
from semel.cli.words import lasting, pairs


@begins_with(looking, "doctor")
def doctor(
    answer: Answer,
    target: Target,
    *,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for weakening settings, too.")
    ] = False,
) -> None:
    """Find every stranded transaction, with evidence and the decision that follows.

    Also: sinks that do not answer, a ledger older than its sinks, slow commits, and every
    setting that weakens the guarantee.  Changes nothing.  With --ledger alone the sinks are
    not asked.  Exit code 1: something needs attention.

    Example: semel doctor --pipeline payments:pipeline
    """
    known = target.pipeline
    patients = [
        Patient(scope, known.sinks if known else (), known.settings if known else None)
        for scope in target.scopes
    ]
    answer.give(doctor_report(target.ledger, patients, strict), show_doctor)


def show_doctor(console: Console, report: DoctorReport) -> None:
    """Print a doctor's report."""
    console.print(f"ledger {report.ledger}", markup=False)
    for scope in report.scopes:
        console.print()
        _show_scope(console, scope)
    if report.weakened_by:
        console.print("\n[bold]settings that weaken the guarantee[/]")
        for weak in report.weakened_by:
            console.print(f"  {weak.where}: {weak.what}", markup=False)
    if not report.needs_attention:
        console.print("\n[green]nothing needs attention[/]")


def _show_scope(console: Console, scope: ScopeDiagnosis) -> None:
    console.print(f"[bold]{scope.scope}[/]  {scope.owner}")
    asked = ", ".join(scope.sinks_asked)
    console.print(
        f"sinks asked: {asked}" if asked else "sinks not asked: give --pipeline to ask them",
        markup=False,
    )
    if scope.attempts:
        show_attempts(console, scope.attempts)
    if scope.stranded:
        show_stranded(console, scope.stranded)
    for problem in scope.problems:
        console.print(f"[bold red]{problem.kind}[/]  {escape(problem.what)}")
        console.print(f"    read {problem.runbook}", markup=False)


def show_attempts(console: Console, attempts: Sequence[OpenAttempt]) -> None:
    """Print what the ledger has open."""
    right = ("age",)
    rows = table("open cycle", "attempt", "state", "age", "rows", "decision", right=right)
    for one in attempts:
        decision = "in flight" if one.in_flight else one.decision
        rows.add_row(
            one.cycle,
            one.attempt[:8],
            one.state,
            lasting(one.age_seconds),
            pairs(one.rows),
            decision,
        )
    console.print(rows)


def show_stranded(console: Console, stranded: Sequence[Stranded]) -> None:
    """Print what sinks hold, with evidence."""
    columns = ("sink", "cycle", "attempt", "found", "evidence", "age", "ledger says", "decision")
    rows = table(*columns, right=("age",))
    for one in stranded:
        rows.add_row(
            one.sink,
            one.cycle,
            one.attempt[:8],
            one.found,
            escape(one.evidence),
            lasting(one.age_seconds),
            one.ledger_says,
            "in flight" if one.in_flight else one.decision,
        )
    console.print(rows)
