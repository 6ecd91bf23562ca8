"""The command line as a whole: with --json, a wrong argument is answered in JSON, too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final, cast

import typer
from typer.core import TyperGroup

from semel.cli.answer import Answer
from semel.errors import Misuse

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
