"""`semel db create | upgrade | check`: the tables of the messaging half."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.markup import escape

from semel.cli.answer import Answer
from semel.cli.database import Books, asking
from semel.cli.preamble import begins_with
from semel.cli.reports.db import (
    TablesChange,
    TablesCheck,
    tables_checked,
    tables_created,
    tables_upgraded,
)

app = typer.Typer(no_args_is_help=True, help="Make and check the consumers' tables.")


@app.command("create")
@begins_with(asking, "db create")
def create(answer: Answer, books: Books) -> None:
    """Make the tables that consumers, inboxes and outboxes need; doing so again changes nothing.

    Refuses a database that has a table of the same name which semel did not make.  Nobody is
    asked: what was there before stays as it is.

    Example: semel db create --database postgresql://db/shop
    """
    answer.give(tables_created(books.url), show_change)


@app.command("upgrade")
@begins_with(asking, "db upgrade")
def upgrade(answer: Answer, books: Books) -> None:
    """Make the tables where there are none, or say that they are up to date.

    Of tables that Alembic made it writes the version down.  Two processes may do it at once.

    Example: semel db upgrade --database postgresql://db/shop
    """
    answer.give(tables_upgraded(books.url), show_change)


@app.command("check")
@begins_with(asking, "db check")
def check(answer: Answer, books: Books) -> None:
    """Compare the tables with what this semel needs, and name whatever is missing or different.

    Exit code 1: something is; each line ends with the way out.

    Example: semel db check --database postgresql://db/shop
    """
    answer.give(tables_checked(books.url), show_check)


def show_change(console: Console, report: TablesChange) -> None:
    """Print what became of the tables."""
    if not report.changed:
        done = f"the tables have version {report.after} already"
    elif report.before is None:
        done = f"made the tables of version {report.after}"
    else:
        done = f"the tables were there; wrote down that they have version {report.after}"
    console.print(f"{report.database}: {done}", markup=False)


def show_check(console: Console, report: TablesCheck) -> None:
    """Print what is wrong with the tables."""
    console.print(f"{report.database}: this semel needs version {report.version}", markup=False)
    for problem in report.problems:
        console.print(f"[bold red]wrong[/]  {escape(problem.what)}", soft_wrap=True)
        console.print(f"       {escape(problem.way_out)}", soft_wrap=True)
    if not report.problems:
        console.print("[green]nothing is missing[/]")
