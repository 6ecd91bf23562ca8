"""Everything that can go wrong, grouped by what the caller must do next.

    SemelError
    ├── Retryable      nothing happened; try again later
    ├── Permanent      it will never work; this input or this set-up must change
    ├── InDoubt        it may have happened; look it up before doing anything
    ├── Fenced         a newer owner exists; stop now and write nothing more
    ├── NeedsOperator  only recovery or a person can settle it; stop
    └── Misuse         the program is wrong; no input can make this call valid

Catch a group, never a leaf: the group is the promise, leaves come and go.
"""

from __future__ import annotations

import re
from typing import Any, Final


class SemelError(Exception):
    """The root of every error that semel raises on purpose."""


class Retryable(SemelError):
    """Nothing happened; the same call may succeed later."""


class Permanent(SemelError):
    """The same call will always fail until the set-up changes: a missing table, a wrong type."""


class InDoubt(SemelError):
    """A commit was sent and no answer came back.

    Neither retry nor abort: the other side may already have committed.  Look
    it up first.
    """


class Fenced(SemelError):
    """A newer owner of the scope exists; this process must stop and write nothing more."""


class NeedsOperator(SemelError):
    """Two records contradict each other, or a promise cannot be kept: semel stops.

    It changes nothing, so that a person finds the evidence as it was.
    """


class Misuse(SemelError):
    """The program or its settings are wrong; no input can make this call valid."""


NEVER_PASSES: Final = (Permanent, Fenced, NeedsOperator, Misuse)
"""The groups in which the same call would fail again; it is not repeated."""


class LeaseHeld(Retryable):
    """Another live process owns the scope."""

    def __init__(self, scope: str, owner: str, seconds_left: float) -> None:
        super().__init__(scope, owner, seconds_left)
        self.scope = scope
        self.owner = owner
        self.seconds_left = seconds_left

    def __str__(self) -> str:
        return (
            f"scope {self.scope} is owned by {self.owner}, whose lease ends in "
            f"{self.seconds_left:.1f} s; wait for it, stop that process, or take over "
            f"explicitly (takeover=Takeover.FORCE, or semel … --takeover)"
        )


class LeaseLost(Fenced):
    """The epoch in the ledger is newer than this process's own."""

    def __init__(self, scope: str, epoch: int, current: int) -> None:
        super().__init__(scope, epoch, current)
        self.scope = scope
        self.epoch = epoch
        self.current = current

    def __str__(self) -> str:
        if self.epoch == self.current:
            return f"scope {self.scope}: the lease of epoch {self.epoch} was released, or restored"
        return (
            f"scope {self.scope}: this process holds epoch {self.epoch}, the ledger is at "
            f"{self.current}; it was fenced, changes nothing more and must stop"
        )


class LedgerUnavailable(Retryable):
    """The ledger cannot be read or written now; no decision was taken."""

    def __init__(self, ledger: str, reason: str) -> None:
        super().__init__(ledger, reason)
        self.ledger = ledger
        self.reason = reason

    def __str__(self) -> str:
        return f"ledger {self.ledger}: {self.reason}; no decision was taken and nothing is lost"


class LedgerUnusable(Permanent):
    """The ledger is corrupt, read-only, full, of a newer version, or not a ledger."""

    def __init__(self, ledger: str, reason: str) -> None:
        super().__init__(ledger, reason)
        self.ledger = ledger
        self.reason = reason

    def __str__(self) -> str:
        return f"ledger {self.ledger}: {self.reason}"


class MissingExtra(Misuse):
    """A part of semel was used whose third-party package is not installed."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(module, extra)
        self.module = module
        self.extra = extra

    def __str__(self) -> str:
        return f"{self.module} is not installed; install it with: pip install 'semel[{self.extra}]'"


MOST_BYTES: Final = 8 * 1024
"""How much of a reason is stored, published and shown."""


def cut(text: str) -> str:
    """Return a reason in at most `MOST_BYTES` of UTF-8: its head, its tail, and what is missing."""
    if len(text) * 4 <= MOST_BYTES:
        return text
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) <= MOST_BYTES:
        return text
    # The marker in between has fewer than 64 bytes.
    half = MOST_BYTES // 2 - 32
    head, tail = (raw[:half].decode("utf-8", "ignore"), raw[-half:].decode("utf-8", "ignore"))
    return f"{head} … ({len(raw) - 2 * half:,} bytes cut) … {tail}"


def reason_of(error: BaseException) -> str:
    """Return an exception's text as one line of limited length, for reasons and logs."""
    return cut(line_of(error))


def line_of(error: BaseException) -> str:
    """Return an exception's whole text as one line."""
    try:
        text = " ".join((servers_words(error) or str(error)).split())
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the error: its class still has a name
        text = ""
    if isinstance(error, SemelError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# Of the errors of class 22, and only of these, the server's sentence may quote a value:
# invalid input syntax for type integer: "…".
_VALUE_CLASS: Final = "22"
_QUOTED: Final = re.compile(r"\s*:?\s*[\"'`«»„“”‘’].*", re.DOTALL)


def servers_words(error: BaseException) -> str:
    """Return the sentence of a PostgreSQL error without values; empty for another error.

    The driver's own text adds the detail and the context, which quote whole rows.
    """
    said = getattr(getattr(error, "diag", None), "message_primary", None)
    if not isinstance(said, str):
        return ""
    is_value = str(getattr(error, "sqlstate", "")).startswith(_VALUE_CLASS)
    return _QUOTED.sub(" (the value is not shown)", said) if is_value else said


def require(module: str, extra: str) -> Any:
    """Import *module*, or raise an error that names the extra to install.

    Raises:
        MissingExtra: the package is not installed.
    """
    import importlib

    # Imported on use: a consumer needs no Spark, and a Spark task needs no SQLAlchemy.
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The package may be there, and lack one that it needs itself.
        raise MissingExtra((error.name or module).partition(".")[0], extra) from error
