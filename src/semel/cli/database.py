"""The common options of the message commands: a database, and who acts.

@command("dlq list", asking, DeadLetterList)
def list_letters(books: Books, *, limit: LimitOption = 50) -> None: ...
"""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeAlias, TypeVar

import typer

from semel.cli.answer import Answer, answering
from semel.cli.options import MOST_ROWS, DebugOption, JsonOption, YesOption, option
from semel.cli.plain import given
from semel.cli.render import Line, Rows, lasting
from semel.errors import MissingExtra, Misuse
from semel.operate.audit import need_some
from semel.operate.stores import Account, OperatorDatabase, OperatorUnit, acting_from
from semel.secrets import masked

DATABASE_VARIABLE: Final = "SEMEL_DATABASE"

# Long enough that most commands print nothing, short enough that none seems to hang.
STILL_SECONDS: Final = 5.0

AS_JSON_TOO: Final = ', or json:"…" for one that a shell cannot say.'

DatabaseOption: TypeAlias = Annotated[
    str | None,
    option(
        "--database",
        "Where the consumers keep their claims: postgresql://… or sqlite:///path.  "
        f"[${DATABASE_VARIABLE}]",
        "URL",
    ),
]
ActorOption: TypeAlias = Annotated[
    str | None, option("--actor --who", "Who does it, for the audit.  Default: your user.", "NAME")
]
ReasonOption: TypeAlias = Annotated[
    str, option("--reason --why", "Why it is done, for the audit.", "TEXT")
]
ConsumerOption: TypeAlias = Annotated[str, option("--consumer -c", "The consumer.", "NAME")]
ConsumerFilter: TypeAlias = Annotated[
    str | None, option("--consumer -c", "Only this consumer's.", "NAME")
]
KeyFilter: TypeAlias = Annotated[
    str | None, option("--key", "Only messages of this key.", "KEY", parser=given)
]
CodeFilter: TypeAlias = Annotated[str | None, option("--error-code", "Only this failure.", "CODE")]
LimitOption: TypeAlias = Annotated[
    int, option("--limit -n", "How many at most.", min=1, max=MOST_ROWS)
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
Given = ParamSpec("Given")


@dataclass(frozen=True, slots=True)
class Books:
    """The database that a command is about, and its answer; each question opens it anew."""

    url: str
    answer: Answer
    account: Account = field(default_factory=lambda: Account(this_account()))
    """What the audit trail says of where an act was done."""

    @property
    def database(self) -> str:
        """The URL, as people may read it."""
        return masked(self.url)

    def reply(
        self, result: Result, lines: Callable[[Result], Iterable[Line | Rows]], **more: Any
    ) -> None:
        """Answer with *result*, the database and the keys *more*."""
        self.answer.reply(result, lines, database=self.database, **more)

    def ask(
        self,
        question: Callable[Concatenate[OperatorDatabase, Given], Awaitable[Result]],
        *given: Given.args,
        **named: Given.kwargs,
    ) -> Result:
        """Open the database, ask the question with what is given, and close it.

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
                async with refusals(f"database {self.database}"):
                    return await question(database, *given, **named)
            finally:
                waiting.cancel()
                await database.close()

        with acting_from(self.account):
            return asyncio.run(whole())

    async def _say_that_it_lasts(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(STILL_SECONDS)
            self.answer.tell(lambda: f"still at work, for {lasting(time.monotonic() - began)}")


@dataclass(frozen=True, slots=True)
class Actor(Books):
    """Who changes something in the database, and why."""

    name: str = ""
    reason: str = ""
    yes: bool = False

    @property
    def given(self) -> dict[str, str]:
        """What every act takes, and its answer repeats."""
        return {"actor": self.name, "reason": self.reason}

    def confirm_about(
        self,
        need: Callable[[OperatorUnit, str, str], Awaitable[object]],
        consumer: str,
        messages: Iterable[str],
        question: str,
    ) -> None:
        """Check that some of the messages exist, and ask, unless --yes is given.

        Raises:
            NoSuchMessage: none of them exists, and nothing was asked.
        """
        self.ask(need_some, need, consumer, messages)
        self.confirm(question)

    def confirm(self, question: str) -> None:
        """Ask, unless --yes is given.

        Raises:
            Misuse: the question cannot be asked.
            typer.Abort: the answer was no.
        """
        self.answer.confirm(question, self.yes)


@contextmanager
def asking(
    name: str,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Iterator[Books]:
    """Answer about a database."""
    with answering(name, as_json, debug) as answer:
        yield Books(database_url(answer, database), answer)


@contextmanager
def inspecting(
    name: str,
    database: DatabaseOption = None,
    actor: ActorOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Iterator[Actor]:
    """Answer with what was in a message; the audit trail keeps who looked."""
    with answering(name, as_json, debug) as answer:
        yield Actor(database_url(answer, database), answer, name=actor or your_name())


@contextmanager
def acting(
    name: str,
    database: DatabaseOption = None,
    actor: ActorOption = None,
    reason: ReasonOption = "",
    yes: YesOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Iterator[Actor]:
    """Answer after a person's act, which the database's audit trail keeps."""
    with answering(name, as_json, debug) as answer:
        url = database_url(answer, database)
        yield Actor(url, answer, name=actor or your_name(), reason=reason, yes=yes)


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


def database_url(answer: Answer, url: str | None) -> str:
    """Return the database's URL, given or from the environment.

    Raises:
        Misuse: there is neither.
    """
    url = url or os.environ.get(DATABASE_VARIABLE)
    if not url:
        raise Misuse(f"say which database with --database URL (or ${DATABASE_VARIABLE})")
    answer.hide(url)
    return url
