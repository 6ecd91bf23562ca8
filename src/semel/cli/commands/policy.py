"""`semel policy lint | show | schema`: the policy file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer, Report, answering, table
from semel.cli.exits import ExitCode
from semel.cli.options import DebugOption, JsonOption
from semel.cli.reports.policy import (
    InvalidReport,
    PolicyFinding,
    PolicyLintReport,
    PolicyReview,
    SchemaReport,
    invalid_report,
    lint_report,
)
from semel.cli.reports.policy_show import PolicyShowReport, show_report
from semel.cli.words import counted
from semel.policy import Policy, PolicyInvalid, policy_schema

app = typer.Typer(no_args_is_help=True, help="Check and explain a policy file.")

FileArgument: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="The policy, in YAML.")
]
ConsumerOption: TypeAlias = Annotated[
    str | None, typer.Option("--consumer", metavar="NAME", help="Only this consumer.")
]


@app.command("lint")
def lint(
    file: FileArgument,
    consumer: ConsumerOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """State each consumer's real guarantee, answer the twenty questions, refuse what cannot hold.

    Exit code 1: something is refused, or warned of.  2: the file is invalid.

    Example: semel policy lint policy.yaml --consumer search-indexer
    """
    with answering("policy lint", as_json, debug) as answer:
        _give(answer, file, lambda policy: lint_report(policy, consumer), show_lint)


@app.command("show")
def show(
    file: FileArgument,
    consumer: ConsumerOption = None,
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="NAME", help="Only on this topic.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show what holds for each consumer on each topic, and where each value comes from.

    Exit code 2: the file is invalid.

    Example: semel policy show policy.yaml --consumer search-indexer --topic case-events
    """
    with answering("policy show", as_json, debug) as answer:
        _give(answer, file, lambda policy: show_report(policy, consumer, topic), show_effective)


@app.command("schema")
def schema(as_json: JsonOption = False, debug: DebugOption = False) -> None:
    """Print the JSON Schema of policy files, for editors that complete and check.

    Example: semel policy schema > policy.schema.json
    """
    with answering("policy schema", as_json, debug) as answer:
        answer.give(SchemaReport(policy_schema()), show_schema)


def _give(
    answer: Answer,
    file: Path,
    report: Callable[[Policy], Any],
    render: Callable[[Console, Any], None],
) -> None:
    """Answer about the policy, or with everything that is wrong with its file."""
    try:
        policy = Policy.load(file)
    except PolicyInvalid as error:
        answer.give(invalid_report(error), show_invalid)
        answer.code = ExitCode.USAGE
        return
    found: Report = report(policy)
    answer.give(found, render)


def show_invalid(console: Console, report: InvalidReport) -> None:
    """Print one line for each problem, as compilers do."""
    for problem in report.problems:
        where = f"{report.file}:{problem.line}" if problem.line else report.file
        console.print(f"{where}: {problem.words}", markup=False, soft_wrap=True)


_COLOURS = {"refused": "bold red", "warn": "yellow", "unknown": "yellow", "ok": "green"}


def show_lint(console: Console, report: PolicyLintReport) -> None:
    """Print guarantee, findings and answers of each consumer."""
    for review in report.reviews:
        _show_review(console, review)
    for finding in report.findings:
        _show_finding(console, finding)
    refused = counted(report.refused, "refusal")
    console.print(f"{report.file}: {refused}, {counted(report.warnings, 'warning')}")


def _show_review(console: Console, review: PolicyReview) -> None:
    title = review.consumer + (f" on {review.topic}" if review.topic else "")
    console.print(f"[bold]{escape(title)}[/]")
    console.print(f"  guarantee: {review.guarantee}", markup=False)
    for finding in review.findings:
        _show_finding(console, finding)
    rows = table("", "", "question", "answer")
    for one in review.answers:
        colour = _COLOURS[one.status]
        status = f"[{colour}]{one.status}[/]"
        rows.add_row(str(one.number), status, escape(one.question), escape(one.text))
    console.print(rows)
    console.print()


def _show_finding(console: Console, finding: PolicyFinding) -> None:
    colour = _COLOURS.get(finding.severity, "none")
    place = f"line {finding.line}, {finding.key}" if finding.line else finding.key
    named = f" (anti-pattern: {finding.anti_pattern})" if finding.anti_pattern else ""
    console.print(
        f"  [{colour}]{finding.severity}[/] {finding.code}{escape(named)}: "
        f"{escape(finding.sentence)}"
    )
    console.print(f"    {place}: {finding.fix}", markup=False)


def show_effective(console: Console, report: PolicyShowReport) -> None:
    """Print every key with its value and its origin."""
    for policy in report.policies:
        title = policy.consumer + (f" on {policy.topic}" if policy.topic else "")
        rows = table("key", "value", "from", title=escape(title))
        for one in policy.keys:
            rows.add_row(escape(one.key), escape(one.value), escape(one.origin))
        console.print(rows)
        console.print()


def show_schema(console: Console, report: SchemaReport) -> None:
    """Print the schema as it goes into a file."""
    console.print(json.dumps(report.schema, indent=2), markup=False, soft_wrap=True)
