"""How a command answers: a table or one JSON document on stdout, everything else on stderr.

    {"command": "status", "format": 1, "exit": 0, …the report's own keys…}
    {"command": "status", "format": 1, "exit": 75, "error": "ledger …: no answer"}

Keys are only ever added under one *format*.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from typing import Any, Final, TypeVar

import typer
from rich.console import Console

from semel.cli.options import DebugOption, JsonOption
from semel.cli.plain import PlainConsole, plain
from semel.cli.render import Line, Rows, document, print_lines
from semel.errors import Fenced, LeaseHeld, Misuse, Retryable, SemelError
from semel.messaging.redact import reason_of
from semel.secrets import scrubbed, scrubbed_values

FORMAT: Final = 1
"""The version of the JSON documents."""

# A pipe has no width; tables must not be folded to 80 columns there.
PIPE_COLUMNS: Final = 160

PROGRESS_SECONDS: Final = 1.0
"""Seconds between two progress lines: a line for every step would be too many to read."""


Result = TypeVar("Result")


class ExitCode(IntEnum):
    """What the exit code of every command means.

    Where a supervised query ends for the same reason, `semel.spark.supervise.Exit` has the same
    number.
    """

    OK = 0
    ATTENTION = 1
    USAGE = 2
    FENCED = 3
    OPERATOR = 4
    BUG = 70
    TRY_LATER = 75
    INTERRUPTED = 130


MEANS: Final[Mapping[ExitCode, str]] = {
    ExitCode.OK: "fine; nothing needs a person",
    ExitCode.ATTENTION: "the command worked and found something: stranded, different, weakened",
    ExitCode.USAGE: "wrong arguments, or they name a thing that does not exist",
    ExitCode.FENCED: "another process owns the scope",
    ExitCode.OPERATOR: "records contradict each other, or a thing is unusable; nothing was forced",
    ExitCode.BUG: "a fault in semel itself; --debug shows where",
    ExitCode.TRY_LATER: "something does not answer now; nothing is lost",
    ExitCode.INTERRUPTED: "Ctrl-C, or the answer to a question was no",
}
"""One line each, as `semel --help` prints them."""


def exit_code_of(error: BaseException) -> ExitCode:
    """Return the code with which an error ends the command."""
    match error:
        case Fenced() | LeaseHeld():
            return ExitCode.FENCED
        case Retryable():
            return ExitCode.TRY_LATER
        case Misuse():
            return ExitCode.USAGE
        case SemelError():
            return ExitCode.OPERATOR
    return ExitCode.BUG


class Answer:
    """The output of one command."""

    def __init__(self, command: str, as_json: bool, debug: bool) -> None:
        self.command = command
        self.as_json = as_json
        self.debug = debug
        self.console = _console(sys.stderr if as_json else sys.stdout)
        """Where people read: tables, plans and progress."""

        self.can_rehearse = False
        """The command has --dry-run."""

        self.code = ExitCode.OK
        self.report: dict[str, Any] = {}
        self._hidden: list[str] = []
        self._told_at = time.monotonic()
        self._later = ExitStack()

    def hide(self, url: str) -> None:
        """Keep the passwords of *url* out of everything that is printed from now on."""
        self._hidden.append(url)

    def later(self, close: Callable[[], None]) -> None:
        """Give something back when the command ends."""
        self._later.callback(close)

    def say(self, text: str) -> None:
        """Print a message, which is not part of the answer."""
        PlainConsole(file=sys.stderr, soft_wrap=True, highlight=False, emoji=False).print(
            self.scrub(text), markup=False
        )

    def tell(self, far: Callable[[], str]) -> None:
        """Say how far long work is, if nothing was said for a while; cheap to call often."""
        now = time.monotonic()
        if now - self._told_at >= PROGRESS_SECONDS:
            self._told_at = now
            self.say(far())

    def reply(
        self, result: Result, lines: Callable[[Result], Iterable[Line | Rows]], **more: Any
    ) -> None:
        """Make *result* the answer: as JSON with the keys *more*, or for people as *lines* puts it.

        Exit code 1 where it says that it `needs_attention`.
        """
        self.report = {**more, **document(result)}
        if getattr(result, "needs_attention", False):
            self.code = ExitCode.ATTENTION
        if not self.as_json:
            self.print(lines(result))

    def print(self, lines: Iterable[Line | Rows]) -> None:
        """Show what is about to be done, before the question whether to do it."""
        print_lines(self.console, lines)

    def confirm(self, question: str, yes: bool) -> None:
        """Go on only if the operator agrees.

        Raises:
            Misuse: the question cannot be asked.
            typer.Abort: the answer was no.
        """
        if yes:
            return
        if self.as_json:
            rehearsal = ", or use --dry-run" if self.can_rehearse else ""
            raise Misuse(f"with --json there is no question: add --yes to do it{rehearsal}")
        if not sys.stdin.isatty() and sys.stdin is sys.__stdin__:
            raise Misuse("there is no terminal to answer the question: add --yes to do it")
        # What a producer chose as an id must not act on the terminal.
        typer.confirm(plain(self.scrub(question)), abort=True, err=True)

    def scrub(self, text: str) -> str:
        """Return *text* without any password that a URL of this command carries."""
        for url in self._hidden:
            text = scrubbed(text, url)
        return text

    def fail(self, error: BaseException) -> None:
        """Make *error* the answer: one line that names the thing and the way out."""
        self.code = exit_code_of(error)
        line = self.scrub(reason_of(error))
        if self.debug:
            self.say(_traced(error))
        elif self.code is ExitCode.BUG:
            line += " (a fault in semel; --debug shows where)"
        self.report = {"error": line}
        self.say(f"semel {self.command}: {line}")

    def finish(self) -> None:
        """Print the JSON document, if one was asked for, and end with the code."""
        with suppress(Exception):  # the answer is complete; an error on closing does not change it
            self._later.close()
        if self.as_json:
            head = {"command": self.command, "format": FORMAT, "exit": int(self.code)}
            plain = json.loads(json.dumps(self.report, default=str))
            shown = head | scrubbed_values(plain, self.scrub)
            sys.stdout.write(json.dumps(shown, indent=2) + "\n")
            sys.stdout.flush()
        raise typer.Exit(int(self.code))


@contextmanager
def answering(
    command: str, as_json: JsonOption = False, debug: DebugOption = False
) -> Iterator[Answer]:
    """Run a command's body and end the process with its answer, even after an error."""
    answer = Answer(command, as_json, debug)
    try:
        yield answer
    except (typer.Abort, KeyboardInterrupt):
        answer.say(f"semel {command}: stopped; nothing more was changed")
        answer.report = {"error": "stopped"}
        answer.code = ExitCode.INTERRUPTED
    except SemelError as error:
        answer.fail(error)
    except Exception as error:  # noqa: BLE001  the top of the program: one line, and a code
        answer.fail(error)
    answer.finish()


def _traced(error: BaseException) -> str:
    """Say where an error and its causes were raised; Python's own words quote parameters."""
    told: list[str] = []
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        places = "".join(traceback.format_tb(one.__traceback__))
        told.append(f"Traceback (most recent call last):\n{places}{reason_of(one)}")
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return "\n\nwhich led to\n\n".join(reversed(told))


def _console(file: Any) -> Console:
    console = PlainConsole(file=file, highlight=False, emoji=False)
    if not console.is_terminal:
        return PlainConsole(file=file, highlight=False, emoji=False, width=PIPE_COLUMNS)
    return console
