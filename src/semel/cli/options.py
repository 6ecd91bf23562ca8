"""The options that several commands share."""

from __future__ import annotations

import getpass
import socket
from typing import Annotated, Any, Final, TypeAlias

import typer

LEDGER_VARIABLE: Final = "SEMEL_LEDGER"
PIPELINE_VARIABLE: Final = "SEMEL_PIPELINE"

MOST: Final = 2**63 - 1
"""The largest number that a database keeps."""

MOST_ROWS: Final = 10**9
"""More rows than a person reads."""


def option(names: str, words: str, metavar: str | None = None, **more: Any) -> Any:
    """Make an option: its names, such as ``--limit -n``, and what the help says of it."""
    return typer.Option(*names.split(), help=words, metavar=metavar, **more)


LedgerOption: TypeAlias = Annotated[
    str | None,
    option(
        "--ledger", f"The ledger: sqlite:///path or postgresql://…  [${LEDGER_VARIABLE}]", "URL"
    ),
]
PipelineOption: TypeAlias = Annotated[
    str | None,
    option(
        "--pipeline",
        "An ExactlyOnce or a Driver, or a function without arguments that returns one; "
        f"the module is looked for in this folder first.  [${PIPELINE_VARIABLE}]",
        "MODULE:NAME",
    ),
]
AppOption: TypeAlias = Annotated[
    str | None, option("--app", "Only the scopes of this app.", "NAME")
]
QueryOption: TypeAlias = Annotated[
    str | None, option("--query", "Only the scopes of this query.", "NAME")
]
JsonOption: TypeAlias = Annotated[
    bool, option("--json", "Print one JSON document on stdout; messages go to stderr.")
]
DebugOption: TypeAlias = Annotated[bool, option("--debug", "Show the traceback of an error.")]
YesOption: TypeAlias = Annotated[bool, option("--yes -y", "Do it without asking.")]
WhoOption: TypeAlias = Annotated[
    str | None, option("--who", "Who does it, for the audit.  Default: you@this-host.", "NAME")
]
WhyOption: TypeAlias = Annotated[
    str | None, option("--why", "Why it is done, for the audit; required.", "TEXT")
]
TakeoverOption: TypeAlias = Annotated[
    bool,
    option(
        "--takeover",
        "Take the scope from an owner whose lease is still live; that owner is fenced.",
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
