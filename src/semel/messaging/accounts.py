"""The account of the operating system behind a person's name, where that is known.

A name is whatever somebody says; the account is where they said it.  The audit
trail keeps both, and two people who decide one act have two accounts.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Account:
    """Where an act is done."""

    name: str
    """``user@host``."""

    shared: bool = False
    """Several people use it, as they say: it tells nobody from another."""

    def details(self) -> Mapping[str, Any]:
        """Return what the audit trail keeps of it."""
        said = {"account": self.name}
        return {**said, "shared_account": True} if self.shared else said


_ACCOUNT: ContextVar[Account | None] = ContextVar("semel_account", default=None)


def account_now() -> Account | None:
    """Return where acts are done just now; None where nobody has said."""
    return _ACCOUNT.get()


@contextmanager
def acting_from(account: Account) -> Iterator[None]:
    """Say where all acts of the block are done; their audit entries name the account."""
    token = _ACCOUNT.set(account)
    try:
        yield
    finally:
        _ACCOUNT.reset(token)


# They have a width of nothing and are no format characters; a name has no use for them.
_INVISIBLE: Final = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u3164\uffa0")


def same_name(one: str, other: str) -> bool:
    """Tell whether two names read the same, whatever their case, spaces and hidden signs.

    Letters of different alphabets that look alike are different: names are no proof.
    """
    return _plain(one) == _plain(other)


def _plain(name: str) -> str:
    seen = [sign for sign in unicodedata.normalize("NFKC", name) if not _is_hidden(sign)]
    folded = unicodedata.normalize("NFKC", "".join(seen).casefold())
    return " ".join(folded.split())


def _is_hidden(sign: str) -> bool:
    is_variation = "\ufe00" <= sign <= "\ufe0f" or "\U000e0100" <= sign <= "\U000e01ef"
    is_format = unicodedata.category(sign) == "Cf"
    is_control = unicodedata.category(sign) == "Cc" and not sign.isspace()
    return is_variation or is_format or is_control or sign in _INVISIBLE
