"""`semel policy lint | show | schema`: the policy file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import typer
from rich.text import Text

from semel.cli.answer import Answer, ExitCode, answering
from semel.cli.options import option
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, bold, counted
from semel.policy.effective import EffectiveKey, EffectivePolicies, effective_policies
from semel.policy.guarantee import Promise
from semel.policy.lint import Linted, Review, lint_policy
from semel.policy.model import Policy, policy_schema
from semel.policy.questions import PolicyAnswer
from semel.policy.reader import PolicyInvalid, PolicyProblem
from semel.policy.rules import Finding
from semel.policy.vocabulary import Engine

FileArgument: TypeAlias = Annotated[
    Path, typer.Argument(metavar="FILE", help="The policy, in YAML.")
]
ConsumerOption: TypeAlias = Annotated[
    str | None, option("--consumer", "Only this consumer.", "NAME")
]
Result = TypeVar("Result")

_COLOURS = {"refused": "bold red", "warn": "yellow", "unknown": "yellow", "ok": "green"}


@dataclass(frozen=True, slots=True)
class PolicySchema:
    """The answer to `semel policy schema`."""

    schema: dict[str, Any]
    """The JSON Schema; without --json it is all that is printed."""


def what_is_invalid(error: PolicyInvalid) -> str:
    """The file, and that it is invalid."""
    return f"{error.name}: the policy is invalid"


def by_line(error: PolicyInvalid) -> list[PolicyProblem]:
    """Every problem, in the order of the file."""
    return sorted(error.problems, key=lambda problem: problem.line or 0)


def in_one_line(problem: PolicyProblem) -> str:
    """All of it in one line."""
    return str(problem)


Shape(
    PolicyInvalid,
    Field("error", what_is_invalid),
    Field("file", "name"),
    Field("problems", by_line),
)
Shape(PolicyProblem, Field("words", in_one_line), whole=True)
Shape(Linted, Field("refused"), Field("warnings"), whole=True)
Shape(
    Review,
    Field("guarantee", "guarantee.sentence"),
    Field("promises", "guarantee.promises", means="The same, effect by effect."),
    whole=True,
)
Shape(Promise, Field("sentence"), whole=True)
ANSWER = Shape(
    PolicyAnswer,
    Field("number", head=" "),
    Field("status", head=" ", style=lambda status: _COLOURS[status]),
    Field("question", head="question"),
    Field("text", head="answer"),
    whole=True,
)
KEY = Shape(
    EffectiveKey,
    Field("key", head="key"),
    Field("value", head="value"),
    Field("origin", head="from"),
    Field("line"),
)


@command("policy lint", answering, Linted)
def lint(
    answer: Answer,
    *,
    file: FileArgument,
    consumer: ConsumerOption = None,
    engine: Annotated[
        Engine, option("--engine", "What runs the consumers: services, or pipelines on Spark.")
    ] = Engine.SERVICE,
) -> None:
    """State each consumer's real guarantee, answer the twenty questions, refuse what cannot hold.

    Exit code 1: something is refused, or warned of.  2: the file is invalid.

    Example: semel policy lint policy.yaml --consumer search-indexer
    """
    _reply(answer, file, lambda policy: lint_policy(policy, consumer, engine), _lint_lines)


@command("policy show", answering, EffectivePolicies)
def show(
    answer: Answer,
    *,
    file: FileArgument,
    consumer: ConsumerOption = None,
    topic: Annotated[str | None, option("--topic", "Only on this topic.", "NAME")] = None,
) -> None:
    """Show what holds for each consumer on each topic, and where each value comes from.

    Exit code 2: the file is invalid.

    Example: semel policy show policy.yaml --consumer search-indexer --topic case-events
    """
    _reply(answer, file, lambda p: effective_policies(p, consumer, topic), _effective_lines)


@command("policy schema", answering, PolicySchema)
def schema(answer: Answer) -> None:
    """Print the JSON Schema of policy files, for editors that complete and check.

    Example: semel policy schema > policy.schema.json
    """
    answer.reply(PolicySchema(policy_schema()), _schema_lines)


def _reply(
    answer: Answer,
    file: Path,
    ask: Callable[[Policy], Result],
    lines: Callable[[Result], Iterator[Line | Rows]],
) -> None:
    """Answer about the policy, or with everything that is wrong with its file."""
    try:
        policy = Policy.load(file)
    except PolicyInvalid as error:
        answer.reply(error, _invalid_lines)
        answer.code = ExitCode.USAGE
    else:
        answer.reply(ask(policy), lines)


def _invalid_lines(error: PolicyInvalid) -> Iterator[Line]:
    for one in by_line(error):
        where = f"{error.name}:{one.line}" if one.line else error.name
        yield f"{where}: {one}"


def _lint_lines(linted: Linted) -> Iterator[Line | Rows]:
    for review in linted.reviews:
        yield bold(_title(review.consumer, review.topic))
        yield f"  guarantee: {review.guarantee.sentence}"
        yield from _finding_lines(review.findings)
        yield ANSWER.table(review.answers)
        yield None
    yield from _finding_lines(linted.findings)
    refused, warnings = counted(linted.refused, "refusal"), counted(linted.warnings, "warning")
    yield f"{linted.file}: {refused}, {warnings}"


def _finding_lines(findings: Iterable[Finding]) -> Iterator[Line]:
    for finding in findings:
        place = f"line {finding.line}, {finding.key}" if finding.line else finding.key
        named = f" (anti-pattern: {finding.anti_pattern})" if finding.anti_pattern else ""
        said = f" {finding.code}{named}: {finding.sentence}"
        yield Text.assemble("  ", (finding.severity, _COLOURS.get(finding.severity, "")), said)
        yield f"    {place}: {finding.fix}"


def _effective_lines(found: EffectivePolicies) -> Iterator[Line | Rows]:
    for policy in found.policies:
        yield bold(_title(policy.consumer, policy.topic))
        yield KEY.table(policy.keys)
        yield None


def _schema_lines(found: PolicySchema) -> Iterator[Line]:
    yield json.dumps(found.schema, indent=2)


def _title(consumer: str, topic: str | None) -> str:
    return consumer + (f" on {topic}" if topic else "")
