"""`semel doctor`: what is wrong, with evidence, and what to read about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

from rich.text import Text

from semel.cli.options import option
from semel.cli.preamble import command, looking
from semel.cli.render import Field, Line, Rows, Shape, bold, column, lasting, red, start_of
from semel.cli.target import Target
from semel.operate.doctor import (
    Diagnosis,
    LeftBehind,
    OpenAttempt,
    Patient,
    Problem,
    ScopeDiagnosis,
    Stranded,
    diagnose,
)


def _decision(one: OpenAttempt | Stranded) -> str:
    return "in flight" if one.in_flight else one.decision


OPEN_ATTEMPT = Shape(
    OpenAttempt,
    Field("scope", "record.txn.scope"),
    Field("cycle", "record.txn.cycle.label", head="open cycle"),
    Field("attempt", "record.txn.attempt", head="attempt", cell=start_of),
    Field("state", "record.state", head="state"),
    Field("age_seconds", head="age", cell=lasting, right=True),
    Field("rows", "record.rows", head="rows"),
    column("decision", _decision),
    Field("epoch", "record.epoch"),
    whole=True,
)
STRANDED = Shape(
    Stranded,
    Field("sink", head="sink"),
    Field("cycle", "txn.cycle.label", head="cycle"),
    Field("attempt", "txn.attempt", head="attempt", cell=start_of),
    Field("found", "finding.found", head="found"),
    Field("evidence", "finding.evidence", head="evidence"),
    Field("age_seconds", head="age", cell=lasting, right=True),
    Field("ledger_says", head="ledger says"),
    column("decision", _decision),
    Field("decision"),
    whole=True,
)
LEFT_BEHIND = Shape(
    LeftBehind,
    Field("sink", head="sink"),
    Field("cycle", "txn.cycle.label", head="cycle"),
    Field("attempt", "txn.attempt", head="attempt", cell=start_of),
    Field("what", head="left behind"),
    Field("age_seconds", head="age", cell=lasting, right=True),
    Field("ledger_says", head="ledger says"),
    Field("is_swept", head="swept"),
    whole=True,
)
Shape(Problem, Field("runbook"), whole=True)


@command("doctor", looking, Diagnosis)
def doctor(
    target: Target,
    *,
    strict: Annotated[bool, option("--strict", "Exit with 1 for weakening settings, too.")] = False,
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
    target.answer.reply(diagnose(target.ledger, patients, strict=strict), _doctor_lines)


def _doctor_lines(found: Diagnosis) -> Iterator[Line | Rows]:
    yield f"ledger {found.ledger}"
    for scope in found.scopes:
        yield None
        yield from _scope_lines(scope)
    if found.weakened_by:
        yield None
        yield bold("settings that weaken the guarantee")
        yield from (f"  {weak.where}: {weak.what}" for weak in found.weakened_by)
    if not found.needs_attention:
        yield None
        yield bold("nothing needs attention", "green")


def _scope_lines(scope: ScopeDiagnosis) -> Iterator[Line | Rows]:
    yield Text.assemble((str(scope.scope), "bold"), f"  {scope.owner}")
    asked = ", ".join(scope.sinks_asked)
    yield f"sinks asked: {asked}" if asked else "sinks not asked: give --pipeline to ask them"
    yield from unfinished_lines(scope.attempts, scope.stranded)
    if scope.left_behind:
        yield LEFT_BEHIND.table(scope.left_behind)
    for problem in scope.problems:
        yield red(problem.kind, f"  {problem.what}")
        yield f"    read {problem.runbook}"


def unfinished_lines(
    attempts: Sequence[OpenAttempt], stranded: Sequence[Stranded]
) -> Iterator[Line | Rows]:
    """Put what the ledger has open and what sinks hold, with evidence."""
    if attempts:
        yield OPEN_ATTEMPT.table(attempts)
    if stranded:
        yield STRANDED.table(stranded)
