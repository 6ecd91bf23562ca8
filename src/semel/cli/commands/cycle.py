"""`semel cycle resolve`: finish a stuck cycle by an operator's decision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from semel.cli.answer import Answer
from semel.cli.options import PipelineOption
from semel.cli.preamble import Operator, begins_with, changing
from semel.cli.render import Field, Line, Rows, Shape
from semel.cli.target import need_pipeline
from semel.errors import Misuse
from semel.operate.resolution import (
    Choice,
    Resolution,
    ResolutionPlan,
    SinkOfCycle,
    Way,
    plan_resolution,
)
from semel.operate.resolution import resolve as carry_through

SINK = Shape(
    SinkOfCycle,
    Field("sink", head="sink"),
    Field("rows", head="rows", right=True),
    Field("found", head="found"),
    Field("evidence", head="evidence"),
    Field("will", head="will"),
)

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
    record, plan = plan_resolution(known, cycle, choice)
    answer.print(plan_lines(plan))
    question = f"Resolve {plan.scope}/{cycle} by {choice.way}?"
    operator.confirm(answer, "resolving changes things", question)
    done = carry_through(
        known,
        record,
        plan,
        choice,
        who=operator.name,
        why=operator.why,
        takeover=operator.takeover,
    )
    answer.reply(done, resolved_lines)


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


def plan_lines(plan: ResolutionPlan) -> Iterator[Line | Rows]:
    """Put how every sink stands and what will be done with it."""
    name = (f"{plan.scope}/{plan.cycle}", "bold")
    yield Text.assemble(name, f" (attempt {plan.attempt[:8]}) is {plan.state}")
    yield SINK.table(plan.sinks)


def resolved_lines(done: Resolution) -> Iterator[Line]:
    """Put what became of every sink."""
    for one in done.sinks:
        word = ("done", "green") if one.is_done else ("not done", "bold red")
        counts = f", {one.diverted} rows diverted to {one.reject_table}" if one.diverted else ""
        yield Text.assemble(f"{one.sink}: {one.did}, ", word, f"{counts} {one.reason}".rstrip())
    yield (
        "the cycle is finished"
        if done.finished
        else "the cycle is still committed and unfinished; see `semel doctor`"
    )
