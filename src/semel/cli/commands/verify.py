"""`semel verify`: what was staged, what is visible, what the source holds."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import answering, table
from semel.cli.options import MOST_ROWS, DebugOption, JsonOption, PipelineOption
from semel.cli.reports.verification import (
    Reread,
    SinkCheck,
    TallyReport,
    VerifyReport,
    cycles_to_verify,
    verify_report,
)
from semel.cli.target import Pipeline, load_object, need_pipeline
from semel.cli.words import counted
from semel.errors import Misuse
from semel.pipeline.sink import Tally
from semel.pipeline.source import BatchRange

EVERY = sys.maxsize // 8


def verify(
    pipeline: PipelineOption = None,
    newest: Annotated[
        int,
        typer.Option(
            "--newest", "-n", min=1, max=MOST_ROWS, help="How many cycles, the newest first."
        ),
    ] = 20,
    cycle: Annotated[
        list[str] | None,
        typer.Option("--cycle", metavar="g1.b42", help="This cycle; may be given several times."),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every cycle that the ledger remembers.")
    ] = False,
    source: Annotated[
        bool, typer.Option("--source", help="Read the source again, too; needs --reread.")
    ] = False,
    reread: Annotated[
        str | None,
        typer.Option(
            "--reread",
            metavar="MODULE:FUNCTION",
            help="A function that takes a cycle's BatchRange and returns a static DataFrame with "
            "the stream's columns; implies --source.",
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare, per cycle and sink, the rows that were staged with those that readers see.

    Rows are counted and hashed, whatever their order.  A sink that cannot attribute rows to
    cycles says so.  Exit code 1: something differs or does not answer.

    Example: semel verify --pipeline payments:pipeline --cycle g1.b42
    """
    with answering("verify", as_json, debug) as answer:
        if source and not reread:
            raise Misuse(
                "--source needs --reread module:function, which reads a cycle's range again and "
                "returns a static DataFrame with the stream's columns"
            )
        known = need_pipeline(answer, pipeline)
        records = cycles_to_verify(known, EVERY if every else newest, cycle or ())
        again = _reread(known, reread) if reread else None
        answer.give(verify_report(known, records, again), show_verify)


def _reread(pipeline: Pipeline, spec: str) -> Reread:
    function = load_object("--reread", spec)
    if not callable(function):
        raise Misuse(f"--reread {spec}: found {type(function).__name__}; it must be a function")

    def read(batch: BatchRange) -> dict[str, Tally]:
        from semel.spark.reread import tally_source

        with redirect_stdout(sys.stderr):
            return tally_source(function(batch), pipeline.sinks, spec)

    return read


def show_verify(console: Console, report: VerifyReport) -> None:
    """Print a verification, one line per cycle and sink."""
    console.print(f"[bold]{report.scope}[/] in {escape(report.ledger)}")
    with_source = any(check.source_verdict for check in report.checks)
    columns = ["cycle", "sink", "staged", "visible", "verdict"]
    columns += ["source", "against staged"] if with_source else []
    rows = table(*columns, "reason", right=("staged", "visible", "source"))
    for check in report.checks:
        cells = [check.cycle, check.sink, _tally(check.staged), _tally(check.visible)]
        cells.append(_colored(check.verdict))
        if with_source:
            cells += [_tally(check.source), _colored(check.source_verdict or "-")]
        rows.add_row(*cells, escape(check.reason) or "-")
    console.print(rows)
    console.print(_summary(report), markup=False)


def _summary(report: VerifyReport) -> str:
    verdicts = [_judged(check) for check in report.checks]
    bad, open_questions = verdicts.count("bad"), verdicts.count("cannot_tell")
    cycles = counted(report.cycles, "cycle")
    if bad:
        return f"{cycles}: {counted(bad, 'comparison')} failed"
    if open_questions:
        return f"{cycles}: nothing differs; {open_questions} could not be compared"
    return f"{cycles}: nothing differs"


def _judged(check: SinkCheck) -> str:
    verdicts = {check.verdict, check.source_verdict or check.verdict}
    if verdicts - {"equal", "equal_rows", "cannot_tell"}:
        return "bad"
    return "cannot_tell" if "cannot_tell" in verdicts else "fine"


def _tally(tally: TallyReport | None) -> str:
    if tally is None:
        return "-"
    return f"{tally.rows:,}" + (f" {tally.hash[:8]}" if tally.hash else "")


def _colored(verdict: str) -> str:
    words = verdict.replace("_", " ")
    if verdict in ("equal", "equal_rows"):
        return f"[green]{words}[/]"
    return words if verdict in ("cannot_tell", "-") else f"[bold red]{words}[/]"
