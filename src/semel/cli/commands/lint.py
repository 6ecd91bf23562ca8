"""`semel lint`: what is done once, where, and under which failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from rich.text import Text

from semel.cli.answer import Answer, answering
from semel.cli.options import PipelineOption, option
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Shape, bold, items, red
from semel.cli.target import need_configured
from semel.operate.guarantee import PipelineGuarantee, SinkGuarantee, guarantee_of

Shape(
    SinkGuarantee,
    Field("effect", "guarantee.effect"),
    Field("readers_see", "guarantee.readers_see"),
    Field("not_covered", "guarantee.not_covered"),
    Field("weakened_by", "guarantee.weakened_by"),
    whole=True,
)


@command("lint", answering, PipelineGuarantee)
def lint(
    answer: Answer,
    *,
    pipeline: PipelineOption = None,
    check: Annotated[
        bool, option("--check", "Ask the sinks first whether they can be reached and used.")
    ] = False,
    strict: Annotated[
        bool, option("--strict", "Exit with 1 for sinks that state no guarantee, too.")
    ] = False,
) -> None:
    """State the guarantee of each sink and of the whole pipeline, with its scope.

    Exit code 1: a setting weakens it.

    Example: semel lint --pipeline payments:pipeline
    """
    known = need_configured(answer, pipeline)
    if check:
        for sink in known.sinks:
            sink.check(None)
    scope = f"{known.app}/{known.query}"
    found = guarantee_of(scope, known.ledger, known.sinks, known.settings, strict=strict)
    answer.reply(found, _lint_lines)


def _lint_lines(found: PipelineGuarantee) -> Iterator[Line]:
    yield Text.assemble((found.scope, "bold"), f": {found.guarantee}")
    yield from items("failures covered", found.failures_covered)
    yield from items("not covered", found.not_covered)
    for sink in found.sinks:
        yield None
        yield bold(f"sink {sink.sink}")
        yield f"  what happens once: {sink.guarantee.effect}"
        yield f"  readers see: {sink.guarantee.readers_see}"
        yield from items("not covered", sink.guarantee.not_covered, "  ")
        yield from items(red("weakened by"), sink.guarantee.weakened_by, "  ")
    if found.weakened_by:
        yield None
        weak = (f"{one.where}: {one.what}" for one in found.weakened_by)
        yield from items(red("weakened by"), weak)
