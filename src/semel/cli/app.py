"""The command `semel`, put together."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from semel import __version__
from semel.cli.commands import (
    adopt,
    audit,
    claims,
    cycle,
    db,
    dlq,
    doctor,
    erase,
    explain,
    ledger,
    lint,
    look,
    outbox,
    parking,
    policy,
    recover,
    replay,
    retention,
    verify,
)
from semel.cli.exits import MEANS
from semel.cli.root import Root

PIPELINES: Final = "Pipelines"
CONSUMERS: Final = "Consumers"


def _epilog() -> str:
    codes = [f"- {code.value}: {words}" for code, words in MEANS.items()]
    return "\n\n".join(
        [
            "Exit codes:",
            *codes,
            "Every command takes --json: one document on stdout with the keys command, format and "
            "exit, then the command's own, or error.",
        ]
    )


app = typer.Typer(
    name="semel",
    cls=Root,
    help="What pipelines and consumers hold, what is stuck and why, and the safe way out.",
    epilog=_epilog(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

app.command(rich_help_panel=PIPELINES)(look.status)
app.command(rich_help_panel=PIPELINES)(doctor.doctor)
app.command(rich_help_panel=PIPELINES)(recover.recover)
app.command(rich_help_panel=PIPELINES)(verify.verify)
app.command(rich_help_panel=PIPELINES)(look.history)
app.command(rich_help_panel=PIPELINES)(lint.lint)
app.command(rich_help_panel=PIPELINES)(adopt.adopt)
app.command(rich_help_panel=CONSUMERS)(explain.explain)
app.command(rich_help_panel=CONSUMERS)(erase.erase)
app.command(rich_help_panel=CONSUMERS)(retention.retention)
app.add_typer(cycle.app, name="cycle", rich_help_panel=PIPELINES)
app.add_typer(ledger.app, name="ledger", rich_help_panel=PIPELINES)
app.add_typer(policy.app, name="policy", rich_help_panel=CONSUMERS)
app.add_typer(db.app, name="db", rich_help_panel=CONSUMERS)
app.add_typer(claims.app, name="claims", rich_help_panel=CONSUMERS)
app.add_typer(dlq.app, name="dlq", rich_help_panel=CONSUMERS)
app.add_typer(parking.app, name="parking", rich_help_panel=CONSUMERS)
app.add_typer(replay.app, name="replay", rich_help_panel=CONSUMERS)
app.add_typer(explain.gaps_app, name="gaps", rich_help_panel=CONSUMERS)
app.add_typer(outbox.app, name="outbox", rich_help_panel=CONSUMERS)
app.add_typer(audit.app, name="audit", rich_help_panel=CONSUMERS)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"semel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass
