"""`semel ledger check | backup | restore`: the ledger itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import answering, table
from semel.cli.options import (
    DebugOption,
    JsonOption,
    LedgerOption,
    WhoOption,
    WhyOption,
    YesOption,
    who_is_it,
)
from semel.cli.reports.ledger import (
    BackupReport,
    LedgerCheck,
    RestoreReport,
    back_up,
    ledger_check,
)
from semel.cli.reports.ledger import restore as put_back
from semel.cli.target import ledger_url, need_ledger
from semel.cli.words import counted, listed, pairs
from semel.errors import Misuse
from semel.ledgers import open_ledger
from semel.sql.backup import Overwrite

app = typer.Typer(no_args_is_help=True, help="Look after the ledger itself.")


@app.command("check")
def check(
    ledger: LedgerOption = None, as_json: JsonOption = False, debug: DebugOption = False
) -> None:
    """Read all of the ledger and see that it hangs together.

    Exit code 1: it is in an odd place, or its records contradict each other.

    Example: semel ledger check --ledger sqlite:///payments.ledger
    """
    with answering("ledger check", as_json, debug) as answer:
        answer.give(ledger_check(need_ledger(answer, ledger)), show_check)


@app.command("backup")
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that does not exist yet.")],
    ledger: LedgerOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Copy the ledger to a file, as it is at one moment, while it is in use.

    Example: semel ledger backup payments.backup --ledger sqlite:///payments.ledger
    """
    with answering("ledger backup", as_json, debug) as answer:
        answer.give(back_up(need_ledger(answer, ledger), file), show_backup)


@app.command("restore")
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `ledger backup` wrote.")],
    ledger: LedgerOption = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace a ledger that knows more: those decisions are lost."),
    ] = False,
    who: WhoOption = None,
    why: WhyOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Replace the ledger by a backup; whoever still runs is fenced.

    Refuses to replace a ledger with a live owner, or with decisions that the backup lacks.
    A pipeline whose sinks know more than the restored ledger refuses to start.

    Example: semel ledger restore payments.backup --ledger sqlite:///payments.ledger
    --why "disk replaced"
    """
    with answering("ledger restore", as_json, debug) as answer:
        url = ledger_url(answer, ledger)
        opened = open_ledger(url)
        if not file.is_file():
            raise Misuse(f"there is no file {file}")
        answer.say(f"{opened.url} will hold what {file} holds; every lease in it is ended")
        if force:
            answer.say("--force: decisions that are there and not in the backup are lost")
        if not why:
            raise Misuse(
                "restoring changes everything, and the audit wants a reason: add --why '…'"
            )
        answer.confirm(f"Restore {opened.url} from {file}?", yes)
        overwrite = Overwrite.FORCE if force else Overwrite.REFUSE
        answer.give(put_back(opened, file, overwrite, who_is_it(who), why), show_restore)


def show_check(console: Console, report: LedgerCheck) -> None:
    """Print how the ledger hangs together."""
    console.print(f"ledger {report.ledger}  (id {report.ledger_id})", markup=False)
    right = ("epoch", "generations", "acts")
    rows = table("scope", "epoch", "generations", "mark", "attempts", "acts", right=right)
    for scope in report.scopes:
        rows.add_row(
            scope.scope,
            str(scope.epoch),
            str(scope.generations),
            scope.mark or "-",
            pairs(scope.attempts),
            str(scope.acts),
        )
    console.print(rows)
    for scope in report.scopes:
        for problem in scope.problems:
            console.print(f"[bold red]{scope.scope}[/]  {escape(problem)}")
    for weak in report.weakened_by:
        console.print(f"[bold red]weak[/]  {escape(weak.what)}")
    if not report.needs_attention:
        console.print("[green]it hangs together[/]")


def show_backup(console: Console, report: BackupReport) -> None:
    """Print what was copied."""
    scopes = f"{counted(len(report.scopes), 'scope')}: {listed(report.scopes)}"
    console.print(f"{report.file}: {counted(report.bytes, 'byte')}, {scopes}", markup=False)


def show_restore(console: Console, report: RestoreReport) -> None:
    """Print where the restored ledger stands."""
    console.print(f"restored {report.ledger} from {report.file}", markup=False)
    for scope, mark in report.marks.items():
        console.print(f"  {scope}: mark {mark or 'none'}", markup=False)
