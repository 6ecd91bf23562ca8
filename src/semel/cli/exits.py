"""What the exit code of every command means.

Where a supervised query ends for the same reason, `semel.spark.supervise.Exit`
has the same number.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from semel.errors import Fenced, LeaseHeld, Misuse, Retryable, SemelError


class ExitCode(IntEnum):
    """What a script that calls `semel` goes by."""

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
    """Say with which code an error ends the command."""
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
