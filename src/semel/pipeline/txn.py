"""The ids of a scope, a cycle and a transaction.

    Scope (ledger, app, query)  ──▶  CycleId (generation, batch)  ──▶  SinkTxnId (attempt)

A cycle's id is stable across restarts; the attempt keeps two stagings of one
cycle apart.  Names in other systems carry the fixed-length `slug`.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass
from functools import total_ordering
from typing import Final

from semel.errors import Misuse

NAME: Final = re.compile(r"[a-z0-9_-]{1,40}")

# Ids become names of folders and parts of statements, and a ledger's rows are only evidence.
ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


LABEL: Final = re.compile(r"g(\d+)\.b(\d+)")


class InvalidName(Misuse, ValueError):
    """A name or an id has characters that are unsafe as a name in another system."""


def checked_name(what: str, name: str) -> str:
    """Return *name* if it is valid for an app, a query or a sink.

    Raises:
        InvalidName: it has other characters, or is too long.
    """
    if not NAME.fullmatch(name):
        raise InvalidName(
            f"{what} {name!r} is not a valid name; use 1 to 40 of: lower-case letters, digits, _ -"
        )
    return name


def _check_id(what: str, value: str) -> None:
    if not ID.fullmatch(str(value)):  # SQLite stores any value in any column
        raise InvalidName(
            f"{what} {value!r} is not a valid id; ids have 1 to 64 letters, digits, _ -"
        )


@dataclass(frozen=True, slots=True)
class Scope:
    """The unit of ownership: it has a lease, an epoch, open cycles, marks and recovery."""

    ledger: str
    app: str
    query: str

    def __post_init__(self) -> None:
        _check_id("ledger", self.ledger)
        checked_name("app", self.app)
        checked_name("query", self.query)

    @property
    def slug(self) -> str:
        """Twenty hex digits that identify the scope in other systems."""
        return _slug(self.ledger, self.app, self.query)

    def __str__(self) -> str:
        return f"{self.app}/{self.query}"


@total_ordering
@dataclass(frozen=True, slots=True)
class CycleId:
    """One batch of one checkpoint generation; ordered within its scope."""

    scope: Scope
    generation: int
    batch: int

    def __post_init__(self) -> None:
        if not LABEL.fullmatch(self.label):
            raise InvalidName(f"{self.label!r} is not a generation and a batch")

    @property
    def slug(self) -> str:
        """Twenty hex digits that identify the cycle in other systems."""
        return _slug(self.scope.slug, str(self.generation), str(self.batch))

    @property
    def label(self) -> str:
        """The place within the scope, readable and parseable: ``g1.b42``."""
        return f"g{self.generation}.b{self.batch}"

    @classmethod
    def parse(cls, scope: Scope, label: str) -> CycleId:
        """Read what `label` wrote.

        Raises:
            ValueError: it is not such a label.
        """
        match = LABEL.fullmatch(label)
        if match is None:
            raise ValueError(f"{label!r} is not a cycle's label")
        return cls(scope, int(match[1]), int(match[2]))

    def attempt(self, attempt: str | None = None) -> SinkTxnId:
        """Return an attempt at this cycle: a new one, unless *attempt* is given."""
        return SinkTxnId(self, attempt or uuid.uuid4().hex)

    def __lt__(self, other: CycleId) -> bool:
        return (self.generation, self.batch) < (other.generation, other.batch)

    def __str__(self) -> str:
        return f"{self.scope}/{self.label}"


@dataclass(frozen=True, slots=True)
class SinkTxnId:
    """One attempt at one cycle: what is staged, prepared and recovered."""

    cycle: CycleId
    attempt: str

    def __post_init__(self) -> None:
        _check_id("attempt", self.attempt)

    @property
    def scope(self) -> Scope:
        """The scope of the cycle."""
        return self.cycle.scope

    @property
    def slug(self) -> str:
        """Thirty-two hex digits that identify the transaction in other systems."""
        return f"{self.cycle.slug}{_slug(self.attempt)[:12]}"

    @property
    def label(self) -> str:
        """The place within the scope, readable and parseable: ``g1.b42.<attempt>``."""
        return f"{self.cycle.label}.{self.attempt}"

    @classmethod
    def parse(cls, scope: Scope, label: str) -> SinkTxnId:
        """Read what `label` wrote.

        Raises:
            ValueError: it is not such a label.
        """
        cycle, _, attempt = label.rpartition(".")
        return cls(CycleId.parse(scope, cycle), attempt)

    def __str__(self) -> str:
        return f"{self.cycle}.{self.attempt[:8]}"


def _slug(*parts: str) -> str:
    return hashlib.sha256("\x00".join(parts).encode()).hexdigest()[:20]
