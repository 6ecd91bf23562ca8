"""The common options of the message commands: a database, and who acts.

@begins_with(asking, "dlq list")
def list_letters(answer: Answer, books: Books, *, limit: LimitOption = 50) -> None: ...
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Final, TypeAlias, TypeVar

import typer

from semel.cli.answer import Answer, answering
from semel.cli.options import MOST_ROWS, DebugOption, JsonOption, YesOption
from semel.cli.plain import given
from semel.cli.render import lasting
from semel.errors import MissingExtra, Misuse
from semel.operate.stores import Account, OperatorDatabase, acting_from
from semel.secrets import masked

DATABASE_VARIABLE: Final = "SEMEL_DATABASE"

# Long enough that most commands print nothing, short enough that none seems to hang.
STILL_SECONDS: Final = 5.0

AS_JSON_TOO: Final = ', or json:"…" for one that a shell cannot say.'

DatabaseOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="Where the consumers keep their claims: postgresql://… or sqlite:///path.  "
        f"[${DATABASE_VARIABLE}]",
    ),
]
ActorOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--actor", "--who", metavar="NAME", help="Who does it, for the audit.  Default: your user."
    ),
]
ReasonOption: TypeAlias = Annotated[
    str,
    typer.Option("--reason", "--why", metavar="TEXT", help="Why it is done, for the audit."),
]
ConsumerOption: TypeAlias = Annotated[
    str, typer.Option("--consumer", "-c", metavar="NAME", help="The consumer.")
]
ConsumerFilter: TypeAlias = Annotated[
    str | None, typer.Option("--consumer", "-c", metavar="NAME", help="Only this consumer's.")
]
KeyFilter: TypeAlias = Annotated[
    str | None,
    typer.Option("--key", metavar="KEY", parser=given, help="Only messages of this key."),
]
CodeFilter: TypeAlias = Annotated[
    str | None, typer.Option("--error-code", metavar="CODE", help="Only this failure.")
]
LimitOption: TypeAlias = Annotated[
    int, typer.Option("--limit", "-n", min=1, max=MOST_ROWS, help="How many at most.")
]
MessageArgument: TypeAlias = Annotated[
    str, typer.Argument(metavar="ID", parser=given, help=f"The message's id{AS_JSON_TOO}")
]
MessagesArgument: TypeAlias = Annotated[
    list[str], typer.Argument(metavar="ID…", parser=given, help=f"The messages' ids{AS_JSON_TOO}")
]
AnyMessagesArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID…]", parser=given, help=f"The messages' ids{AS_JSON_TOO}"),
]

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Books:
    """The database that a command is about; each question opens it anew."""

    url: str
    tell: Callable[[Callable[[], str]], None] = lambda far: None
    """Where a question that takes long says so."""

    account: Account = field(default_factory=lambda: Account(this_account()))
    """What the audit trail says of where an act was done."""

    @property
    def name(self) -> str:
        """The URL, as people may read it."""
        return masked(self.url)

    def ask(self, question: Callable[[OperatorDatabase], Awaitable[Result]]) -> Result:
        """Open the database, ask, and close it.

        Raises:
            Misuse: there is no such database, it has none of semel's tables, or the package
                that opens it is not installed; or its role lacks a right.
            Permanent: the database refuses it.
        """
        try:
            from semel.sql.database import open_existing
            from semel.sql.faults import refusals
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "sqlalchemy", "sqlalchemy") from error

        async def whole() -> Result:
            database = await open_existing(self.url)
            waiting = asyncio.create_task(self._say_that_it_lasts())
            try:
                async with refusals(f"database {self.name}"):
                    return await question(database)
            finally:
                waiting.cancel()
                await database.close()

        with acting_from(self.account):
            return asyncio.run(whole())

    async def _say_that_it_lasts(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(STILL_SECONDS)
            self.tell(lambda: f"still at work, for {lasting(time.monotonic() - began)}")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who changes something, and why."""

    name: str
    reason: str
    yes: bool

    @property
    def given(self) -> dict[str, str]:
        """What every act takes, and its answer repeats."""
        return {"actor": self.name, "reason": self.reason}

    def confirm(self, answer: Answer, question: str) -> None:
        """Ask, unless --yes is given.

        Raises:
            Misuse: the question cannot be asked.
            typer.Abort: the answer was no.
        """
        answer.confirm(question, self.yes)


@contextmanager
def asking(
    name: str,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Iterator[tuple[Answer, Books]]:
    """Answer about a database."""
    with answering(name, as_json, debug) as answer:
        yield answer, _books(answer, database)


@contextmanager
def inspecting(
    name: str,
    database: DatabaseOption = None,
    actor: ActorOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Iterator[tuple[Answer, Books, str]]:
    """Answer with what was in a message; the audit trail keeps who looked."""
    with answering(name, as_json, debug) as answer:
        yield answer, _books(answer, database), actor or your_name()


@contextmanager
def acting(
    name: str,
    database: DatabaseOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    yes: YesOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Iterator[tuple[Answer, Books, Actor]]:
    """Answer after a person's act, which the database's audit trail keeps."""
    with answering(name, as_json, debug) as answer:
        yield answer, _books(answer, database), Actor(actor or your_name(), reason, yes)


def this_account() -> str:
    """Return the user of the operating system and the host; ignores the environment."""
    try:
        import pwd

        user = pwd.getpwuid(os.getuid()).pw_name
    except ModuleNotFoundError:
        user = getpass.getuser()  # a system without such accounts
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def your_name() -> str:
    """Name the user who typed the command; without the host, for a person has several."""
    try:
        return getpass.getuser()
    except (OSError, KeyError) as error:
        # A container may run with a number that has no name.
        raise Misuse("say who you are, with --actor: the system has no name for you") from error


def _books(answer: Answer, url: str | None) -> Books:
    url = url or os.environ.get(DATABASE_VARIABLE)
    if not url:
        raise Misuse(f"say which database with --database URL (or ${DATABASE_VARIABLE})")
    answer.hide(url)
    return Books(url, answer.tell)
