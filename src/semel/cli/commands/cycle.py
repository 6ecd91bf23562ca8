"""`semel cycle resolve` and `semel cycle undo`: one cycle, settled by an operator."""

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


UNDOING = Shape(
    resolution.SinkOfUndo,
    Field("sink", head="sink"),
    Field("rows", head="rows", right=True),
    Field("will", head="will"),
    Field("reason", head="reason"),
    Field("refusal", head="cannot, because"),
)


@command("cycle undo", changing, resolution.Undone, rehearsal=resolution.UndoPlan)
def undo(
    operator: Operator,
    *,
    cycle: Annotated[str, option("--cycle", "The finished cycle; see `semel history`.", "g1.b42")],
    pipeline: PipelineOption = None,
    without: Annotated[
        list[str] | None,
        option("--without", "Leave this sink as it is; may be given several times.", "SINK"),
    ] = None,
    dry_run: Annotated[
        bool, option("--dry-run", "Ask every sink whether it can; change nothing at all.")
    ] = False,
) -> None:
    """Take the rows of one finished cycle away again, in every sink or in none.

    For a batch that should never have been written.  The undo is decided once in the ledger, in
    a scope of its own; who and why are kept.  Refused as a whole if a sink cannot take its rows
    away.  Offsets do not go back, and what readers have read they keep.  After a crash run it
    again.  Exit code 1: with --dry-run, a sink cannot.

    Example: semel cycle undo --pipeline payments:pipeline --cycle g1.b42 --why "wrong rates"
    """
    known = need_pipeline(operator.answer, pipeline)
    left_out = tuple(without or ())
    plan = resolution.plan_undo(known, cycle, left_out)
    if dry_run:
        operator.answer.reply(plan, _undo_lines)
        return
    operator.answer.print(_undo_lines(plan))
    operator.confirm("an undo changes things", f"Undo {plan.scope}/{cycle}?")
    done = resolution.undo(
        known, cycle, left_out, who=operator.name, why=operator.why, takeover=operator.takeover
    )
    operator.answer.reply(done, _undone_lines)


def _undo_lines(plan: resolution.UndoPlan) -> Iterator[Line | Rows]:
    yield Text.assemble((f"{plan.scope}/{plan.cycle}", "bold"), f" in {plan.ledger}")
    yield UNDOING.table(plan.sinks)
    if plan.undone_before:
        yield "the decision to undo it stands: what a crash left of it is ended, and no more"


def _undone_lines(done: resolution.Undone) -> Iterator[Line]:
    if done.plan.undone_before:
        yield f"{done.plan.cycle} was undone before, by {done.decided_by}; nothing more was decided"
        return
    names = ", ".join(one.sink for one in done.plan.sinks if one.will == "undo")
    yield Text.assemble(("undone ", "green"), f"{done.plan.cycle} in {names}, by {done.decided_by}")


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
