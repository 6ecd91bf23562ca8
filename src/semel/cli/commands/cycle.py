"""`semel cycle resolve`: finish a stuck cycle by an operator's decision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from rich.text import Text

from semel.cli.options import PipelineOption, option
from semel.cli.preamble import Operator, changing, command
from semel.cli.render import Field, Line, Rows, Shape
from semel.cli.target import need_pipeline
from semel.errors import Misuse
from semel.operate import resolution

SINK = Shape(
    resolution.SinkOfCycle,
    Field("sink", head="sink"),
    Field("rows", head="rows", right=True),
    Field("found", head="found"),
    Field("evidence", head="evidence"),
    Field("will", head="will"),
)


@command("cycle resolve", changing, resolution.Resolution)
def resolve(
    operator: Operator,
    *,
    cycle: Annotated[str, option("--cycle", "The stuck cycle; see `semel doctor`.", "g1.b42")],
    pipeline: PipelineOption = None,
    sink: Annotated[str | None, option("--sink", "Only this sink.", "NAME")] = None,
    retry: Annotated[bool, option("--retry", "Commit again, now that the cause is gone.")] = False,
    divert: Annotated[
        str | None,
        option(
            "--divert",
            "Commit what can be committed; the refused rows go to this reject table.",
            "TABLE",
        ),
    ] = None,
    without: Annotated[
        str | None,
        option(
            "--without",
            "Give up the rows of a sink that is not configured any more, or that has lost them; "
            "`semel sink add` can write them again.",
            "SINK",
        ),
    ] = None,
    abandon: Annotated[
        bool,
        option(
            "--abandon",
            "With --without: also if the sink holds the rows and refuses them; they are dropped "
            "there, after one more try.",
        ),
    ] = False,
) -> None:
    """Carry through a cycle that is committed and that recovery cannot finish.

    For the rare cycle that a foreign writer made unfinishable after a crash.  When every sink
    is done, the cycle is finished in the ledger.  Who and why are kept.  Exit code 1: the
    cycle is still stuck.

    Example: semel cycle resolve --pipeline payments:pipeline --cycle g1.b42 --divert rejects
    --why "foreign rows took the keys"
    """
    choice = _choice(sink, retry, divert, without, abandon)
    known = need_pipeline(operator.answer, pipeline)
    record, plan = resolution.plan_resolution(known, cycle, choice)
    operator.answer.print(_plan_lines(plan))
    question = f"Resolve {plan.scope}/{cycle} by {choice.way}?"
    operator.confirm("resolving changes things", question)
    done = resolution.resolve(
        known,
        record,
        plan,
        choice,
        who=operator.name,
        why=operator.why,
        takeover=operator.takeover,
    )
    operator.answer.reply(done, _resolved_lines)


def _choice(
    sink: str | None, retry: bool, divert: str | None, without: str | None, abandon: bool
) -> resolution.Choice:
    chosen = [retry, divert is not None, without is not None]
    if chosen.count(True) != 1:
        raise Misuse("choose one of --retry, --divert TABLE and --without SINK")
    if abandon and without is None:
        raise Misuse("--abandon needs the sink whose rows are given up: --without SINK --abandon")
    if without is not None:
        if sink is not None:
            raise Misuse("--without names its sink itself: leave --sink out")
        way = resolution.Way.ABANDON if abandon else resolution.Way.WITHOUT
        return resolution.Choice(way, without)
    if divert is not None:
        return resolution.Choice(resolution.Way.DIVERT, sink, divert)
    return resolution.Choice(resolution.Way.RETRY, sink)


def _plan_lines(plan: resolution.ResolutionPlan) -> Iterator[Line | Rows]:
    name = (f"{plan.scope}/{plan.cycle}", "bold")
    yield Text.assemble(name, f" (attempt {plan.attempt[:8]}) is {plan.state}")
    yield SINK.table(plan.sinks)


def _resolved_lines(done: resolution.Resolution) -> Iterator[Line]:
    for one in done.sinks:
        word = ("done", "green") if one.is_done else ("not done", "bold red")
        counts = f", {one.diverted} rows diverted to {one.reject_table}" if one.diverted else ""
        yield Text.assemble(f"{one.sink}: {one.did}, ", word, f"{counts} {one.reason}".rstrip())
    yield (
        "the cycle is finished"
        if done.finished
        else "the cycle is still committed and unfinished; see `semel doctor`"
    )
