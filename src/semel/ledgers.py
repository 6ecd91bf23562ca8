"""Ledgers by their URL.

sqlite:///relative.ledger  sqlite:////absolute.ledger   one file, one host
postgresql://user@host/database                         many hosts
memory:                                                 this process only, for trials
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from semel.errors import Misuse
from semel.pipeline.ledger import Ledger
from semel.secrets import masked


def open_ledger(ledger: str | Ledger) -> Ledger:
    """Return the ledger for a URL; an open ledger is returned unchanged.

    Connects on the first call to the ledger, not here.

    Raises:
        Misuse: the URL's scheme is not one of a ledger.
    """
    if not isinstance(ledger, str):
        return ledger
    scheme = ledger.partition(":")[0]
    if scheme not in _OPENERS:
        raise Misuse(
            f"{masked(ledger)!r} is not a ledger's URL; use sqlite:///file, "
            f"postgresql://user@host/database, or memory: (for one process)"
        )
    return _OPENERS[scheme](ledger)


def _sqlite(url: str) -> Ledger:
    from semel.ledger.sqlite import SqliteLedger

    return SqliteLedger(url)


def _postgres(url: str) -> Ledger:
    from semel.postgres.ledger import PostgresLedger

    return PostgresLedger(url)


def _memory(url: str) -> Ledger:
    from semel.memory.ledger import MemoryLedger

    if url != "memory:":
        raise Misuse(f"{url!r}: a ledger in memory has no name; use memory:")
    return MemoryLedger()


_OPENERS: Final[Mapping[str, Callable[[str], Ledger]]] = {
    "sqlite": _sqlite,
    "postgresql": _postgres,
    "postgres": _postgres,
    "memory": _memory,
}
