"""`semel sink add`, `semel sink rename`, `semel sink move` and `semel app rename`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Annotated

from semel.cli.options import PipelineOption, option
from semel.cli.preamble import Operator, changing, command
from semel.cli.render import Line, counted
from semel.cli.target import load_object, need_pipeline
from semel.errors import Misuse
from semel.operate import backfill, places
from semel.pipeline.driver import Stage
from semel.pipeline.sink import TwoPhaseSink


@command("sink rename", changing, places.Renamed)
def rename(
    operator: Operator,
    *,
    old: Annotated[str, option("--from", "What the sink was called.", "NAME")],
    new: Annotated[str, option("--to", "What it is called in the pipeline now.", "NAME")],
    pipeline: PipelineOption = None,
) -> None:
    """Give a sink's records to its new name.

    Change the name in the program, then run this.  Nothing may be open: run `semel recover`
    with the old name first.

    Example: semel sink rename --pipeline payments:pipeline --from postgres --to entries
    --why "a second table comes"
    """
    known = need_pipeline(operator.answer, pipeline)
    operator.confirm("renaming changes records", f"Rename sink {old} of {known.scope} to {new}?")
    who, why, takeover = operator.name, operator.why, operator.takeover
    done = places.rename_sink(known, old, new, who=who, why=why, takeover=takeover)
    operator.answer.reply(done, _lines)


@command("sink move", changing, places.Renamed)
def move(
    operator: Operator,
    *,
    sink: Annotated[str, option("--sink", "The sink whose place is new.", "NAME")],
    pipeline: PipelineOption = None,
) -> None:
    """Accept that a sink writes to another place, or shares one that others have filled.

    What it wrote before stays where it is.

    Example: semel sink move --pipeline payments:pipeline --sink entries
    --why "the table was copied to the new server"
    """
    known = need_pipeline(operator.answer, pipeline)
    operator.confirm("moving changes records", f"Accept the new place of sink {sink}?")
    who, why, takeover = operator.name, operator.why, operator.takeover
    done = places.move_sink(known, sink, who=who, why=why, takeover=takeover)
    operator.answer.reply(done, _lines)


@command("sink add", changing, backfill.Backfill)
def add(
    operator: Operator,
    *,
    sink: Annotated[str, option("--sink", "The sink that is new in the pipeline.", "NAME")],
    reread: Annotated[
        str,
        option(
            "--reread",
            "A function that takes a cycle's BatchRange, and its label where it takes two "
            "arguments, and returns a static DataFrame with the stream's columns.",
            "MODULE:FUNCTION",
        ),
    ],
    from_beginning: Annotated[
        bool,
        option(
            "--from-beginning",
            "Fill the cycles that the ledger has forgotten as one, which reads each source from "
            "its beginning.",
        ),
    ] = False,
    pipeline: PipelineOption = None,
) -> None:
    """Give a sink the rows of every cycle that was committed without it.

    Add the sink to the program first.  The pipeline may be stopped or running; a sink that
    replaces rows by their keys must be filled before the pipeline runs with it.  After a crash
    the same command goes on where it stopped.  Exit code 1: the pipeline still runs without
    the sink; run the command again when it runs with it.

    Example: semel sink add --pipeline payments:pipeline --sink iceberg --reread payments:reread
    --why "analysts moved"
    """
    known = need_pipeline(operator.answer, pipeline)
    stage_past = _stage_past(reread)
    operator.confirm("filling writes rows", f"Fill sink {sink} of {known.scope} with its past?")
    way = backfill.Forgotten
    tell = operator.answer.tell
    done = backfill.add_sink(
        known,
        sink,
        stage_past,
        who=operator.name,
        why=operator.why,
        forgotten=way.FROM_THE_BEGINNING if from_beginning else way.REFUSED,
        takeover=operator.takeover,
        progress=lambda past, number, of: tell(lambda: f"{past.cycle.label}: {number} of {of}"),
    )
    operator.answer.reply(done, _filled_lines)


def _stage_past(spec: str) -> backfill.StagePast:
    function = load_object("--reread", spec)
    if not callable(function):
        raise Misuse(f"--reread {spec}: found {type(function).__name__}; it must be a function")
    takes_label = len(inspect.signature(function).parameters) > 1

    def stage_past(sink: TwoPhaseSink, past: backfill.PastCycle) -> Stage:
        from semel.spark.staging import stage_of

        with redirect_stdout(sys.stderr):
            label = (past.cycle.label,) if takes_label else ()
            return stage_of(function(past.range, *label), sink, spec)

    return stage_past


def _filled_lines(done: backfill.Backfill) -> Iterator[Line]:
    between = f", {done.first} to {done.last}" if done.cycles else ""
    before = f", after {counted(done.filled_before, 'cycle')} before" if done.filled_before else ""
    rows = counted(done.rows, "row")
    yield f"sink {done.sink}: filled {counted(done.cycles, 'cycle')}{between}, {rows}{before}"
    if not done.takes_part:
        yield (
            f"the pipeline has not run with sink {done.sink} yet: start it with the sink, then "
            f"run this again for the cycles until then"
        )


@command("app rename", changing, places.Renamed)
def rename_app(
    operator: Operator,
    *,
    old: Annotated[str, option("--from", "What the app was called.", "NAME")],
    pipeline: PipelineOption = None,
) -> None:
    """Give everything of an app to its new name, which is the pipeline's.

    Positions, history, checkpoints and the sinks' records follow, so that the pipeline goes on
    with its old checkpoint.  Nothing may be open: run `semel recover` with the old name first.

    Example: semel app rename --pipeline payments:pipeline --from pay --why "a better name"
    """
    known = need_pipeline(operator.answer, pipeline)
    operator.confirm("renaming changes records", f"Rename app {old} to {known.scope.app}?")
    who, why, takeover = operator.name, operator.why, operator.takeover
    done = places.rename_app(known, old, who=who, why=why, takeover=takeover)
    operator.answer.reply(done, _lines)


def _lines(done: places.Renamed) -> Iterator[Line]:
    yield f"{done.scope}: {done.what} {done.before or 'unknown'} is {done.after} now"
