"""`semel sink rename`, `semel sink move` and `semel app rename`: names and places change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from semel.cli.options import PipelineOption, option
from semel.cli.preamble import Operator, changing, command
from semel.cli.render import Line
from semel.cli.target import need_pipeline
from semel.operate import places


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
