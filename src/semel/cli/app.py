"""The command `semel`, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from semel import __version__
from semel.cli.commands import (
    adopt,
    audit,
    completeness,
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
    help="What a pipeline's ledger and sinks hold, what is stuck and why, and the safe way out.",
    epilog=_epilog(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

app.command()(look.status)
app.command()(doctor.doctor)
app.command()(recover.recover)
app.command()(verify.verify)
app.command()(look.history)
app.command()(lint.lint)
app.command()(adopt.adopt)
app.command()(explain.explain)
app.command()(erase.erase)
app.command()(retention.retention)
app.add_typer(cycle.app, name="cycle")
app.add_typer(ledger.app, name="ledger")
app.add_typer(policy.app, name="policy")
app.add_typer(db.app, name="db")
app.add_typer(dlq.app, name="dlq")
app.add_typer(parking.app, name="parking")
app.add_typer(replay.app, name="replay")
app.add_typer(explain.gaps_app, name="gaps")
app.add_typer(outbox.app, name="outbox")
audit.app.command("completeness")(completeness.completeness)
app.add_typer(audit.app, name="audit")


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
