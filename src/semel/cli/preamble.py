"""Preambles: options that several commands share, and the objects made from them.

    @command("status", looking, Status)
    def status(target: Target, *, files: FilesOption = False) -> None: ...

The command line gets the options of `looking` and of `status`; the command gets what
`looking` made, and its own options, and answers with a `Status`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any, Final, get_args, get_type_hints

from semel.cli.answer import Answer, answering
from semel.cli.database import DATABASE_VARIABLE, Books, this_account
from semel.cli.options import (
    AppOption,
    DebugOption,
    JsonOption,
    LedgerOption,
    PipelineOption,
    QueryOption,
    TakeoverOption,
    WhoOption,
    WhyOption,
    YesOption,
    who_is_it,
)
from semel.cli.target import Target, find_target
from semel.errors import Misuse, SemelError
from semel.lease import Takeover
from semel.messaging.records import is_plain_text
from semel.operate.audit import acting, write_down
from semel.operate.consumers import need_consumer
from semel.operate.stores import Account, OperatorDatabase, acting_from
from semel.secrets import masked

_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY

# Ids, keys and file names come from elsewhere, so any bytes are allowed.
_ANY_BYTES: Final = frozenset(
    {"message", "messages", "key", "new_id", "payload", "database", "ledger"}
)


@contextmanager
def looking(
    name: str,
    ledger: LedgerOption = None,
    pipeline: PipelineOption = None,
    app: AppOption = None,
    query: QueryOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Iterator[Target]:
    """Answer about the scopes of a ledger or of a pipeline."""
    with answering(name, as_json, debug) as answer:
        yield find_target(answer, ledger, pipeline, app, query)


@dataclass(frozen=True, slots=True)
class Operator:
    """Who changes something, why, and how far they go."""

    answer: Answer
    name: str
    why: str
    yes: bool
    takeover: Takeover

    def confirm(self, act: str, question: str) -> None:
        """Require a reason, and ask, unless --yes is given.

        Raises:
            Misuse: there is no reason, or the answer is no.
        """
        if not self.why:
            raise Misuse(f"{act}, and the audit needs a reason: add --why '…'")
        self.answer.confirm(question, self.yes)
        if url := os.environ.get(DATABASE_VARIABLE):
            self._write_down(url)

    def _write_down(self, url: str) -> None:
        """Write the act into the audit trail of the messages, before it is done.

        The ledger keeps it, too: a database that does not answer delays no recovery.
        """
        self.answer.hide(url)
        command = self.answer.command
        try:
            Books(url, self.answer).ask(_note_act, self.name, f"pipeline {command}", self.why)
        except SemelError as error:
            self.answer.say(f"semel {command}: not in the audit trail of {masked(url)}: {error}")


async def _note_act(database: OperatorDatabase, name: str, act: str, why: str) -> None:
    async with acting(database) as unit:
        await write_down(unit, name, act, reason=why)


@contextmanager
def changing(
    name: str,
    takeover: TakeoverOption = False,
    who: WhoOption = None,
    why: WhyOption = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> Iterator[Operator]:
    """Answer after an operator's act."""
    with answering(name, as_json, debug) as answer:
        force = Takeover.FORCE if takeover else Takeover.WAIT
        with acting_from(Account(this_account())):
            yield Operator(answer, who_is_it(who), why or "", yes, force)


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what the shell runs, and the keys of its JSON document."""

    run: Callable[..., None]
    report: type
    """What it answers with."""

    rehearsal: type | None
    """What it answers with after --dry-run, where that is something else."""

    adds: tuple[str, ...]
    """The keys that it adds to its answer."""


COMMANDS: Final[dict[str, Command]] = {}
"""Every command by its name, such as ``dlq list``."""


def command(
    name: str,
    preamble: Callable[..., AbstractContextManager[Any]],
    report: type,
    *makers: Callable[..., Any],
    rehearsal: type | None = None,
    adds: Iterable[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function: with the options of *preamble*, and what it makes of them.

    Each of *makers* makes one thing more, of options of its own.
    """
    _, *begun = _options(preamble)
    made_of = [_options(make) for make in makers]
    shared = [*chain.from_iterable(made_of), *begun]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def run(**given: Any) -> None:
            every = dict(given)
            taken = {option.name: given.pop(option.name) for option in shared}
            with preamble(name, **_of(taken, begun)) as made:
                _need_text(both, every)
                if isinstance(made, Books) and given.get("consumer"):
                    made.ask(need_consumer, given["consumer"])
                getattr(made, "answer", made).can_rehearse = "dry_run" in given
                more = [
                    make(**_of(taken, options))
                    for make, options in zip(makers, made_of, strict=True)
                ]
                function(made, *more, **given)

        own = [option for option in _options(function) if option.kind is _KEYWORD]
        both = [option.replace(kind=_KEYWORD) for option in (*own, *shared)]
        # Typer reads both; without the second it would take the command's own.
        run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in both}
        database = [option.name for option in begun if option.name == "database"]
        COMMANDS[name] = Command(run, report, rehearsal, (*database, *adds))
        return run

    return decorate


def _need_text(options: list[inspect.Parameter], given: dict[str, Any]) -> None:
    """Raise if an option or argument is not text.

    Raises:
        Misuse: the shell gave bytes that are not UTF-8.
    """
    for option in options:
        value = given[option.name]
        if option.name in _ANY_BYTES or not isinstance(value, str) or is_plain_text(value):
            continue
        info = get_args(option.annotation)[1]
        # Beside a type, Typer keeps an option's first name for its default.
        named = info.default if isinstance(info.default, str) else info.metavar
        raise Misuse(f"{named}: {value!r} is not UTF-8 text; look at the shell's encoding")


def _of(given: dict[str, Any], options: list[inspect.Parameter]) -> dict[str, Any]:
    return {option.name: given[option.name] for option in options}


def _options(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters
    return [one.replace(annotation=hints[name]) for name, one in parameters.items()]
