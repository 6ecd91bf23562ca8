"""The command `semel`: every command in its group, and the answer to wrong arguments."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, cast

import typer
from typer.core import TyperGroup

from semel import __version__
from semel.cli.answer import MEANS, Answer
from semel.cli.commands import (  # noqa: F401  each declares its commands
    adopt,
    audit,
    claims,
    consumers,
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
    receiver,
    recover,
    replay,
    retention,
    run,
    sink,
    verify,
)
from semel.cli.preamble import COMMANDS
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

PANELS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("status", "doctor", "recover", "verify", "history", "cut", "lint", "adopt"), PIPELINES
    ),
    **dict.fromkeys(("consumers", "inbox", "run", "explain", "erase", "retention"), CONSUMERS),
}
"""The commands without a group, in the order of the help."""

GROUPS: Final[Mapping[str, tuple[str, str]]] = {
    "cycle": (PIPELINES, "Work on a single cycle."),
    "sink": (PIPELINES, "Give a new sink its past; change the name or the place of a sink."),
    "app": (PIPELINES, "Change the name of an app."),
    "ledger": (PIPELINES, "Look after the ledger itself."),
    "receiver": (PIPELINES, "Check a service that takes rows by HTTP."),
    "policy": (CONSUMERS, "Check and explain a policy file."),
    "consumer": (CONSUMERS, "Say who runs a consumer."),
    "db": (CONSUMERS, "Make and check the consumers' tables."),
    "claims": (CONSUMERS, "Look at what is handled under a lease now."),
    "dlq": (CONSUMERS, "Look at dead letters, and deal with them."),
    "parking": (CONSUMERS, "Look at waiting messages, and deal with them."),
    "replay": (CONSUMERS, "Handle messages again, carefully."),
    "gaps": (CONSUMERS, "Versions of aggregates that did not come."),
    "outbox": (CONSUMERS, "Look at an outbox, and at what its broker refused."),
    "audit": (CONSUMERS, "Read and verify the audit trail."),
}

for name, panel in PANELS.items():
    app.command(name, rich_help_panel=panel)(COMMANDS[name].run)
for group, (panel, words) in GROUPS.items():
    inner = typer.Typer(no_args_is_help=True, help=words)
    for name in COMMANDS:
        if name.startswith(f"{group} "):
            inner.command(name.removeprefix(f"{group} "))(COMMANDS[name].run)
    app.add_typer(inner, name=group, rich_help_panel=panel)


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
