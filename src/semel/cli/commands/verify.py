"""`semel verify`: what was staged, what is visible, what the source holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Annotated

from rich.text import Text

from semel.cli.answer import Answer, answering
from semel.cli.options import MOST_ROWS, PipelineOption, option
from semel.cli.preamble import command
from semel.cli.render import Field, Line, Rows, Shape, counted
from semel.cli.target import load_object, need_pipeline
from semel.errors import Misuse
from semel.operate import verification
from semel.operate.status import Pipeline
from semel.pipeline.sink import Tally
from semel.pipeline.source import BatchRange

EVERY = sys.maxsize // 8


def hash_of(count: verification.RowCount) -> str | None:
    """Sixteen hex digits."""
    return None if count.hash is None else f"{count.hash:016x}"


def _count(count: verification.RowCount | None) -> str:
    if count is None:
        return "-"
    return f"{count.rows:,} {(hash_of(count) or '')[:8]}".rstrip()


def _words(verdict: verification.Verdict | None) -> str:
    return "-" if verdict is None else verdict.replace("_", " ")


def _colour(verdict: verification.Verdict | None) -> str:
    if verdict in (None, verification.Verdict.CANNOT_TELL):
        return ""
    return "green" if verdict in verification.FINE else "bold red"


Shape(verification.RowCount, Field("rows"), Field("hash", hash_of))
CHECK = Shape(
    verification.SinkCheck,
    Field("cycle", head="cycle"),
    Field("sink", head="sink"),
    Field("staged", head="staged", cell=_count, right=True),
    Field("visible", head="visible", cell=_count, right=True),
    Field("verdict", head="verdict", cell=_words, style=_colour),
    Field("source", head="source", cell=_count, right=True),
    Field("source_verdict", head="against staged", cell=_words, style=_colour),
    Field("reason", head="reason"),
)


@command("verify", answering, verification.Verification)
def verify(
    answer: Answer,
    *,
    pipeline: PipelineOption = None,
    newest: Annotated[
        int, option("--newest -n", "How many cycles, the newest first.", min=1, max=MOST_ROWS)
    ] = 20,
    cycle: Annotated[
        list[str] | None, option("--cycle", "This cycle; may be given several times.", "g1.b42")
    ] = None,
    every: Annotated[bool, option("--all", "Every cycle that the ledger remembers.")] = False,
    source: Annotated[
        bool, option("--source", "Read the source again, too; needs --reread.")
    ] = False,
    reread: Annotated[
        str | None,
        option(
            "--reread",
            "A function that takes a cycle's BatchRange and returns a static DataFrame with "
            "the stream's columns; implies --source.",
            "MODULE:FUNCTION",
        ),
    ] = None,
) -> None:
    """Compare, per cycle and sink, the rows that were staged with those that readers see.

    Rows are counted and hashed; their order does not matter.  A sink that cannot attribute rows to
    cycles says so.  Exit code 1: something differs or does not answer.

    Example: semel verify --pipeline payments:pipeline --cycle g1.b42
    """
    if source and not reread:
        raise Misuse(
            "--source needs --reread module:function, which reads a cycle's range again and "
            "returns a static DataFrame with the stream's columns"
        )
    known = need_pipeline(answer, pipeline)
    records = verification.cycles_to_verify(known, EVERY if every else newest, cycle or ())
    again = _reread(known, reread) if reread else None
    answer.reply(verification.verify(known, records, again), _verify_lines)


def _reread(pipeline: Pipeline, spec: str) -> verification.Reread:
    function = load_object("--reread", spec)
    if not callable(function):
        raise Misuse(f"--reread {spec}: found {type(function).__name__}; it must be a function")

    def read(batch: BatchRange) -> dict[str, Tally]:
        from semel.spark.staging import tally_source

        with redirect_stdout(sys.stderr):
            return tally_source(function(batch), pipeline.sinks, spec)

    return read


def _verify_lines(found: verification.Verification) -> Iterator[Line | Rows]:
    yield Text.assemble((str(found.scope), "bold"), f" in {found.ledger}")
    with_source = any(check.source_verdict for check in found.checks)
    yield CHECK.table(found.checks, without=() if with_source else ("source", "against staged"))
    bad = [check.needs_attention for check in found.checks].count(True)
    unknown = [verification.Verdict.CANNOT_TELL in check.verdicts for check in found.checks].count(
        True
    )
    cycles = counted(found.cycles, "cycle")
    if bad:
        yield f"{cycles}: {counted(bad, 'comparison')} failed"
    elif unknown:
        yield f"{cycles}: nothing differs; {unknown} could not be compared"
    else:
        yield f"{cycles}: nothing differs"
