"""`semel lint`: what is done once, where, and under which failures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import answering
from semel.cli.options import DebugOption, JsonOption, PipelineOption
from semel.cli.reports.guarantees import LintReport, lint_report
from semel.cli.target import need_configured


def lint(
    pipeline: PipelineOption = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Ask the sinks first whether they can be reached and used."),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for sinks that state no guarantee, too.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """State the guarantee of each sink and of the whole pipeline, with its scope.

    Exit code 1: a setting weakens it.

    Example: semel lint --pipeline payments:pipeline
    """
    with answering("lint", as_json, debug) as answer:
        known = need_configured(answer, pipeline)
        if check:
            for sink in known.sinks:
                sink.check(None)
        answer.give(lint_report(known, strict), show_lint)


def show_lint(console: Console, report: LintReport) -> None:
    """Print the guarantees."""
    console.print(f"[bold]{report.scope}[/]: {escape(report.guarantee)}")
    _list(console, "failures covered", report.failures_covered)
    _list(console, "not covered", report.not_covered)
    for sink in report.sinks:
        console.print(f"\n[bold]sink {sink.sink}[/]")
        console.print(f"  what happens once: {sink.effect}", markup=False)
        console.print(f"  readers see: {sink.readers_see}", markup=False)
        _list(console, "not covered", sink.not_covered, "  ")
        _list(console, "[bold red]weakened by[/]", sink.weakened_by, "  ")
    weak = [f"{one.where}: {one.what}" for one in report.weakened_by]
    if weak:
        console.print()
        _list(console, "[bold red]weakened by[/]", weak)


def _list(console: Console, title: str, lines: Iterable[str], indent: str = "") -> None:
    lines = list(lines)
    if lines:
        console.print(f"{indent}{title}:")
    for line in lines:
        console.print(f"{indent}  - {line}", markup=False)
