"""`semel ledger check | backup | restore`: the ledger itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from semel.cli.answer import Answer, answering
from semel.cli.options import LedgerOption
from semel.cli.preamble import Operator, changing, command
from semel.cli.render import Field, Line, Rows, Shape, bold, counted, listed, red
from semel.cli.target import need_ledger
from semel.operate.ledger import (
    Backup,
    LedgerCheck,
    Restoration,
    ScopeCheck,
    back_up_ledger,
    check_ledger,
    restore_ledger,
)

SCOPE = Shape(
    ScopeCheck,
    Field("scope", head="scope"),
    Field("epoch", head="epoch", right=True),
    Field("generations", head="generations", right=True),
    Field("mark", head="mark"),
    Field("attempts", head="attempts"),
    Field("acts", head="acts", right=True),
    Field("problems"),
)


@command("ledger check", answering, LedgerCheck)
def check(answer: Answer, *, ledger: LedgerOption = None) -> None:
    """Read all of the ledger, and check that its records agree with each other.

    Exit code 1: they contradict each other, or the ledger is in an unsafe place.

    Example: semel ledger check --ledger sqlite:///payments.ledger
    """
    answer.reply(check_ledger(need_ledger(answer, ledger)), _check_lines)


@command("ledger backup", answering, Backup)
def backup(
    answer: Answer,
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that does not exist yet.")],
    ledger: LedgerOption = None,
) -> None:
    """Copy the ledger to a file, as it is at one moment, while it is in use.

    For a ledger in PostgreSQL it names the pg_dump command to run instead.

    Example: semel ledger backup payments.backup --ledger sqlite:///payments.ledger
    """
    answer.reply(back_up_ledger(need_ledger(answer, ledger), file), _backup_lines)


@command("ledger restore", changing, Restoration)
def restore(operator: Operator, *, ledger: LedgerOption = None) -> None:
    """Fence the owners of a lost ledger, after a backup was put in its place.

    Put the backup in place first: copy the file, or run pg_restore.  This command then ends
    every lease and raises every epoch by 10,000, above those that the lost ledger gave out.
    It refuses while an owner may still run.  A pipeline whose sinks know more than the
    restored ledger refuses to start.

    Example: semel ledger restore --ledger sqlite:///payments.ledger --why "disk replaced"
    """
    answer = operator.answer
    opened = need_ledger(answer, ledger)
    answer.say(f"{opened.url}: every lease in it ends, and every epoch is raised")
    operator.confirm("restoring fences every owner", f"Go on with {opened.url} as it was restored?")
    done = restore_ledger(opened, operator.name, operator.why, operator.takeover)
    answer.reply(done, _restore_lines)


def _check_lines(found: LedgerCheck) -> Iterator[Line | Rows]:
    yield f"ledger {found.ledger}  (id {found.ledger_id})"
    yield SCOPE.table(found.scopes)
    for scope in found.scopes:
        yield from (red(scope.scope, f"  {problem}") for problem in scope.problems)
    yield from (red("weak", f"  {weak.what}") for weak in found.weakened_by)
    if not found.needs_attention:
        yield bold("the records agree with each other", "green")


def _backup_lines(made: Backup) -> Iterator[Line]:
    scopes = f"{counted(len(made.scopes), 'scope')}: {listed(map(str, made.scopes))}"
    yield f"{made.file}: {counted(made.bytes, 'byte')}, {scopes}"


def _restore_lines(done: Restoration) -> Iterator[Line]:
    yield f"{done.ledger}: owners of the lost ledger are fenced"
    for scope, mark in done.marks.items():
        yield f"  {scope}: epoch {done.epochs[scope]}, mark {mark or 'none'}"
