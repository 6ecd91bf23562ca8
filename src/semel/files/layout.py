"""The folders and files of a files sink.

    <path>/
      cycle=g1.b42-<scope slug>/           what readers see: one folder per cycle
        part-<task>-00000.parquet
        _semel-token.json                  the proof: whose it is, and its files
      _semel/<scope slug>/                 out of sight
        scope.json                         ledger, app, query, and the sink's name
        staged/<txn label>/<task>/         what tasks write
        prepared/<txn label>/              what prepare has collected and sealed with a token
        undone/<txn label>/                the proof of a cycle whose rows were taken away
        marks/<txn label>                  empty files: the highest committed cycle
        fence/<epoch>                      empty files: the highest epoch

Spark's and Arrow's readers skip names that begin with ``_`` or ``.``.
Marks and fences are empty files because creating one is atomic, needs no lock
that a stopped process could hold, and cannot be half-written.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from semel.files.disk import make_folders, names_in, sync_folder, write_whole
from semel.pipeline.sink import Tenant
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

HIDDEN: Final = "_semel"
TOKEN_FILE: Final = "_semel-token.json"

# A listing that races with a new mark may miss it; with this many older marks it never
# misses all.
_KEEP: Final = 8


@dataclass(frozen=True, slots=True)
class StagedFile:
    """One file of one task."""

    name: str
    rows: int
    size: int
    hash: str


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of a folder's token: its attempt, and its files."""

    label: str
    scope: str
    digest: str
    files: Mapping[str, int]
    """Sizes in bytes, by name."""

    rest: Mapping[str, Any] = field(default_factory=dict)
    at: float = 0.0

    def is_of(self, txn: SinkTxnId) -> bool:
        """Return whether the folder belongs to this attempt."""
        return self.label == txn.label and self.scope == txn.scope.slug


@dataclass(frozen=True, slots=True)
class Foreign:
    """A folder that exists but was not made by semel, or is incomplete."""

    reason: str


class Layout:
    """The folders and files of one scope under one path."""

    def __init__(self, path: str, scope: Scope) -> None:
        self.path = path
        self.scope = scope
        self.home = os.path.join(path, HIDDEN, scope.slug)

    def make(self, sink: str) -> None:
        """Create the scope's folders, durably."""
        slug = self.scope.slug
        inside = [f"{HIDDEN}/{slug}/{name}" for name in ("prepared", "marks", "fence")]
        make_folders(self.path, HIDDEN, f"{HIDDEN}/{slug}", *inside)
        if not os.path.exists(self.about):
            self.name(sink)

    @property
    def about(self) -> str:
        """The file that says whose folder it is."""
        return os.path.join(self.home, "scope.json")

    def name(self, sink: str) -> None:
        """Record whose folder it is."""
        scope = self.scope
        names = {"ledger": scope.ledger, "app": scope.app, "query": scope.query, "sink": sink}
        write_whole(self.about, names)

    def staged(self, txn: SinkTxnId) -> str:
        """Return the folder in which tasks of *txn* write."""
        return os.path.join(self.home, "staged", txn.label)

    def prepared(self, txn: SinkTxnId) -> str:
        """Return the folder of the prepared files of *txn*."""
        return os.path.join(self.home, "prepared", txn.label)

    def undone(self, txn: SinkTxnId) -> str:
        """Return the folder to which a visible one is moved when its cycle is undone."""
        return os.path.join(self.home, "undone", txn.label)

    def shown(self, cycle: CycleId) -> str:
        """Return the visible folder of *cycle*.  Its name never looks like a number to a reader."""
        return os.path.join(self.path, f"cycle={cycle.label}-{self.scope.slug}")

    def txns(self, what: str) -> Iterator[SinkTxnId]:
        """List the transactions in ``staged``, ``prepared`` or ``marks``."""
        for name in names_in(os.path.join(self.home, what)):
            with contextlib.suppress(ValueError):  # not ours
                yield SinkTxnId.parse(self.scope, name)

    def mark(self) -> SinkTxnId | None:
        """Return the highest committed cycle."""
        return max(self.txns("marks"), key=lambda txn: txn.cycle, default=None)

    def raise_mark(self, txn: SinkTxnId) -> None:
        """Store *txn* as the mark if it is higher, durably."""
        marks = os.path.join(self.home, "marks")
        mark = self.mark()
        if mark is None or mark.cycle < txn.cycle:
            _touch(os.path.join(marks, txn.label))
        sync_folder(marks)  # even if it existed: its writer may have crashed before the sync
        for old in sorted(self.txns("marks"), key=lambda txn: txn.cycle)[:-_KEEP]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(marks, old.label))

    def epoch(self) -> int:
        """Return the newest epoch that has fenced; 0 before the first."""
        names = names_in(os.path.join(self.home, "fence"))
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def raise_epoch(self, epoch: int) -> None:
        """Store *epoch*, durably."""
        fence = os.path.join(self.home, "fence")
        _touch(os.path.join(fence, f"{epoch:012d}"))
        sync_folder(fence)
        for old in [name for name in names_in(fence) if name.isdecimal()][:-_KEEP]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(fence, old))


def seal(folder: str, txn: SinkTxnId, token: Mapping[str, Any], files: list[StagedFile]) -> None:
    """Write the token into a folder that has all its files; the folder is not yet synced."""
    write_whole(
        os.path.join(folder, TOKEN_FILE),
        {
            **token,
            "txn": txn.label,
            "scope": txn.scope.slug,
            "by": str(txn.scope),
            "files": {file.name: file.size for file in files},
        },
    )


def read_seal(folder: str) -> Seal | Foreign | None:
    """Return the folder's token; None if there is no such folder."""
    try:
        with open(os.path.join(folder, TOKEN_FILE), encoding="utf-8") as file:
            content = json.load(file)
            at = os.fstat(file.fileno()).st_mtime
        label, scope = str(content.pop("txn")), str(content.pop("scope"))
        sizes = {str(name): int(size) for name, size in content.pop("files").items()}
        return Seal(label, scope, str(content["digest"]), sizes, content, at)
    except FileNotFoundError:
        if not os.path.lexists(folder):
            return None
        return Foreign(f"{folder} has no {TOKEN_FILE}: semel did not make it")
    except NotADirectoryError:
        return Foreign(f"{folder} is not a folder")
    except (ValueError, KeyError, AttributeError, TypeError):
        return Foreign(f"{folder} has a {TOKEN_FILE} that semel did not write")


def what_is_wrong(folder: str, files: Mapping[str, int]) -> str | None:
    """Compare the files that readers would see in *folder* with the token's."""
    present = {name for name in names_in(folder) if not is_hidden(name)}
    missing, strange = files.keys() - present, present - files.keys()
    if missing:
        return f"{folder} lacks {_some(missing)}"
    if strange:
        return f"{folder} also has {_some(strange)}, which semel did not write"
    for name, size in files.items():
        found = os.stat(os.path.join(folder, name)).st_size
        if found != size:
            return f"{os.path.join(folder, name)} has {found} bytes instead of {size}"
    return None


def is_hidden(name: str) -> bool:
    """Return whether readers skip a name."""
    return name.startswith(("_", "."))


def _touch(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def _some(names: set[str]) -> str:
    listed = ", ".join(sorted(names)[:3])
    return listed if len(names) <= 3 else f"{listed} and {len(names) - 3} more"


def tenants_of(path: str) -> list[Tenant]:
    """List the scopes that have committed under *path*."""
    found = []
    for slug in names_in(os.path.join(path, HIDDEN)):
        about = os.path.join(path, HIDDEN, slug, "scope.json")
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError), open(about) as text:
            names = json.load(text)
            scope = Scope(names["ledger"], names["app"], names["query"])
            if scope.slug == slug and (mark := Layout(path, scope).mark()) is not None:
                found.append(Tenant(scope, str(names["sink"]), mark.label))
    return found
