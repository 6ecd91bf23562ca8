"""`semel lint`: what is done once, where, and under which failures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.text import Text

from semel.cli.answer import answering
from semel.cli.options import DebugOption, JsonOption, PipelineOption
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
        scope = f"{known.app}/{known.query}"
        found = guarantee_of(scope, known.ledger, known.sinks, known.settings, strict=strict)
        answer.reply(found, lint_lines)


def lint_lines(found: PipelineGuarantee) -> Iterator[Line]:
    """Put the guarantees for people."""
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
