"""The command `semel`: every command in its group, and the answer to wrong arguments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperGroup

from semel import __version__
from semel.cli.answer import MEANS, Answer
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
from semel.errors import Misuse

PIPELINES: Final = "Pipelines"
CONSUMERS: Final = "Consumers"


# Of Click, or of Typer's own copy of it: that depends on Typer's version.
_UsageError: Final = cast(type[Exception], typer.BadParameter.__mro__[1])


class Root(TyperGroup):
    """The group that holds every command."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **more: Any) -> Any:
        """Run the command that *args* name; the shell's where there are none."""
        given = list(sys.argv[1:] if args is None else args)
        if "--json" not in given or not more.get("standalone_mode", True):
            return super().main(given, *rest, **more)
        try:
            code = super().main(given, *rest, **{**more, "standalone_mode": False})
        except _UsageError as error:
            _answer(error)
        sys.exit(code)


def _answer(error: Any) -> None:
    """Say what is wrong with the arguments, where a script looks for it."""
    path = error.ctx.command_path if error.ctx is not None else ""
    answer = Answer(path.partition(" ")[2], as_json=True, debug=False)
    answer.fail(Misuse(f"{error.format_message()} (see semel {answer.command} --help)"))
    try:
        answer.finish()
    except typer.Exit as done:
        sys.exit(done.exit_code)


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
