"""The options that several commands share."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated, Final, TypeAlias

import typer

LEDGER_VARIABLE: Final = "SEMEL_LEDGER"
PIPELINE_VARIABLE: Final = "SEMEL_PIPELINE"

MOST: Final = 2**63 - 1
"""The largest number that a database keeps."""

MOST_ROWS: Final = 10**9
"""More rows than a person reads."""

LedgerOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--ledger",
        metavar="URL",
        help=f"The ledger: sqlite:///path or postgresql://…  [${LEDGER_VARIABLE}]",
    ),
]
PipelineOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--pipeline",
        metavar="MODULE:NAME",
        help="An ExactlyOnce or a Driver, or a function without arguments that returns one; "
        f"the module is looked for in this folder first.  [${PIPELINE_VARIABLE}]",
    ),
]
AppOption: TypeAlias = Annotated[
    str | None, typer.Option("--app", metavar="NAME", help="Only the scopes of this app.")
]
QueryOption: TypeAlias = Annotated[
    str | None, typer.Option("--query", metavar="NAME", help="Only the scopes of this query.")
]
JsonOption: TypeAlias = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON document on stdout; messages go to stderr."),
]
DebugOption: TypeAlias = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.")
]
YesOption: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
WhoOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--who", metavar="NAME", help="Who does it, for the audit.  Default: you@this-host."
    ),
]
WhyOption: TypeAlias = Annotated[
    str | None,
    typer.Option("--why", metavar="TEXT", help="Why it is done, for the audit; required."),
]
TakeoverOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--takeover",
        help="Take the scope from an owner whose lease is still live; that owner is fenced.",
    ),
]


def who_is_it(who: str | None) -> str:
    """Name the operator: as given, or the user and the host."""
    if who:
        return who
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = "unknown"  # a container may run with a number that has no name
    return f"{user}@{socket.gethostname()}"
