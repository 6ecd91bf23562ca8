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
    TakeoverOption,
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
from semel.cli.reports.ledger import restore as fence
from semel.cli.target import need_ledger
from semel.cli.words import counted, listed, pairs
from semel.errors import Misuse
from semel.lease import Takeover

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

    Of a ledger in PostgreSQL it names the pg_dump command that does so.

    Example: semel ledger backup payments.backup --ledger sqlite:///payments.ledger
    """
    with answering("ledger backup", as_json, debug) as answer:
        answer.give(back_up(need_ledger(answer, ledger), file), show_backup)


@app.command("restore")
def restore(
    ledger: LedgerOption = None,
    takeover: TakeoverOption = False,
    who: WhoOption = None,
    why: WhyOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Fence the owners of a lost ledger, after a backup was put in its place.

    Put the backup in place first: copy the file, or run pg_restore.  This command then ends
    every lease and raises every epoch by 10,000, above those that the lost ledger gave out.
    It refuses while an owner may still run.  A pipeline whose sinks know more than the
    restored ledger refuses to start.

    Example: semel ledger restore --ledger sqlite:///payments.ledger --why "disk replaced"
    """
    with answering("ledger restore", as_json, debug) as answer:
        opened = need_ledger(answer, ledger)
        answer.say(f"{opened.url}: every lease in it ends, and every epoch is raised")
        if not why:
            raise Misuse(
                "restoring fences every owner, and the audit wants a reason: add --why '…'"
            )
        answer.confirm(f"Go on with {opened.url} as it was restored?", yes)
        chosen = Takeover.FORCE if takeover else Takeover.WAIT
        answer.give(fence(opened, chosen, who_is_it(who), why), show_restore)


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
    console.print(f"{report.ledger}: owners of the lost ledger are fenced", markup=False)
    for scope, mark in report.marks.items():
        stands = f"epoch {report.epochs[scope]}, mark {mark or 'none'}"
        console.print(f"  {scope}: {stands}", markup=False)
