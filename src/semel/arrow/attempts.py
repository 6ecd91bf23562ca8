"""What a table sink keeps beside its table: data files by attempt, and small records of them.

    <root>/semel-<scope slug>/
      about.avro                         whose they are: ledger, app, query and sink
      fence/<epoch>.avro                 the highest epoch
      prepared/<txn label>.avro          a promise: the token, and the files to commit
      committed/<txn label>.avro         the newest few: which files belong to the commit
      from=g1.b0/txn=<txn label>/…       what tasks write; the table refers to the winners' files

Nothing is moved, so that it works on object stores.  The records hold JSON; they end in
``.avro`` because buckets made for tables refuse names other than those of data files, and
readers of Parquet must not meet them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from semel.errors import require
from semel.pipeline.sink import Leftover
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

fs: Any = require("pyarrow.fs", "files")

PREPARED: Final = "prepared"
COMMITTED: Final = "committed"

_SUFFIX: Final = ".avro"
_UNFINISHED: Final = ".tmp"
_ABOUT: Final = f"about{_SUFFIX}"
_GROUP: Final = "from="
_FOLDER: Final = "txn="

# Attempts lie in groups of this many batches: a sweep lists the newest two groups, not
# every batch since the table was made.
_BATCHES_PER_GROUP: Final = 100

# A listing that races with a new record may miss it; with this many it never misses all.
_KEEP: Final = 8


def folder_of(txn: SinkTxnId) -> str:
    """Return the folder of the attempt's data files, relative to the root."""
    return f"{_home(txn.scope)}/{_group(txn.cycle)}/{_FOLDER}{txn.label}"


def is_file_of(txn: SinkTxnId, path: str) -> bool:
    """Return whether a data file belongs to the attempt; its app may have been renamed since."""
    return f"/{_FOLDER}{txn.label}/" in path


class Attempts:
    """The attempts of one scope under *root*, a path of the Arrow file system.

    Records lie in a folder whose name begins with *records*, data files in ``semel-…``.
    """

    def __init__(self, system: Any, root: str, scope: Scope, records: str = "semel") -> None:
        self.scope = scope
        self._fs = system
        self._root = f"{root.rstrip('/')}/" if root else ""
        self._records = f"{records}-{scope.slug}"

    def epoch(self) -> int:
        """Return the newest epoch that has fenced; 0 before the first."""
        return max((int(name) for name in self._names("fence") if name.isdecimal()), default=0)

    def raise_epoch(self, epoch: int) -> None:
        """Store *epoch*."""
        self._put(f"{self._root}{self._records}/fence/{epoch:012d}{_SUFFIX}", b"{}")
        for name in sorted(self._names("fence"))[:-_KEEP]:
            self._delete(f"{self._root}{self._records}/fence/{name}{_SUFFIX}")

    def name(self, sink: str) -> None:
        """Record whose attempts these are: a scope's slug does not tell."""
        names = [self.scope.ledger, self.scope.app, self.scope.query, sink]
        self._put(f"{self._root}{self._records}/{_ABOUT}", json.dumps(names).encode())

    def named(self) -> list[tuple[Scope, str]]:
        """List the scopes that have named themselves beside this table, with their sinks."""
        found = []
        prefix = self._records.removesuffix(self.scope.slug)
        for folder, _ in self._list("", recursive=False):
            with contextlib.suppress(FileNotFoundError, ValueError, TypeError):  # not ours
                if not folder.startswith(prefix):
                    continue
                with self._fs.open_input_stream(f"{self._root}{folder}/{_ABOUT}") as file:
                    *names, sink = map(str, json.loads(file.read()))
                scope = Scope(*names)
                if folder == f"{prefix}{scope.slug}":
                    found.append((scope, sink))
        return found

    def records(self, kind: str) -> list[SinkTxnId]:
        """List the attempts that have a record, in the order of their cycles."""
        found = []
        for name in self._names(kind):
            with contextlib.suppress(ValueError):  # not ours
                found.append(SinkTxnId.parse(self.scope, name))
        return sorted(found, key=lambda txn: (txn.cycle, txn.attempt))

    def read(self, kind: str, txn: SinkTxnId) -> dict[str, Any] | None:
        """Return the record; None if there is none, or if its writer died while writing it."""
        try:
            with self._fs.open_input_stream(self._record(kind, txn)) as file:
                content = json.loads(file.read())
        except (FileNotFoundError, ValueError):
            return None
        mine = isinstance(content, dict) and content.get("txn") == [self.scope.slug, txn.label]
        return content if mine else None

    def write(self, kind: str, txn: SinkTxnId, content: Mapping[str, Any]) -> None:
        """Store the record, or replace it."""
        text = json.dumps({**content, "txn": [self.scope.slug, txn.label]})
        self._put(self._record(kind, txn), text.encode())

    def remove_record(self, kind: str, txn: SinkTxnId) -> None:
        """Remove the record; a missing one is no error."""
        self._delete(self._record(kind, txn))
        if self._fs.type_name == "local":  # buckets made for tables refuse the name
            self._delete(f"{self._record(kind, txn)}{_UNFINISHED}")

    def keep_committed(self, txn: SinkTxnId, content: Mapping[str, Any]) -> None:
        """Turn the promise of *txn* into the record of its commit, and drop the oldest ones."""
        self.write(COMMITTED, txn, content)
        self.remove_record(PREPARED, txn)
        for old in self.records(COMMITTED)[:-_KEEP]:
            self.remove_record(COMMITTED, old)

    def committed(self, txn: SinkTxnId) -> dict[str, Any] | None:
        """Return the record of a commit; None if it is one of the older ones."""
        return self.read(COMMITTED, txn)

    def files(self, txn: SinkTxnId) -> dict[str, int]:
        """Return the sizes of the attempt's data files, by their path below the root."""
        return {path: info.size for path, info in self._list(folder_of(txn)) if info.size}

    def with_files(self, mark: SinkTxnId | None) -> set[SinkTxnId]:
        """List the attempts that have files, from the group before the mark's on."""
        return set(self._recent(mark))

    def leftovers(
        self, mark: SinkTxnId | None, is_done: Callable[[SinkTxnId], bool]
    ) -> list[Leftover]:
        """List the recent attempts that have files, and are neither promised nor done."""
        promised, found = self.records(PREPARED), []
        for txn, infos in self._recent(mark).items():
            if txn not in promised and not is_done(txn):
                size = sum(info.size for info in infos)
                times = [info.mtime.timestamp() for info in infos if info.mtime is not None]
                what = f"{len(infos):,} file(s), {size:,} bytes"
                found.append(Leftover(txn, what, min(times, default=None)))
        return sorted(found, key=lambda one: (one.txn.cycle, one.txn.attempt))

    def _recent(self, mark: SinkTxnId | None) -> dict[SinkTxnId, list[Any]]:
        """Return the files of the recent attempts, as the file system describes them."""
        found: dict[SinkTxnId, list[Any]] = {}
        for group, _ in self._list(_home(self.scope), recursive=False):
            name = group.rpartition("/")[2]
            if not name.startswith(_GROUP) or not self._is_recent(name, mark):
                continue
            for path, info in self._list(group):
                if not info.size:
                    continue  # a folder, which some object stores list as an empty object
                label = path.removeprefix(f"{group}/{_FOLDER}").partition("/")[0]
                with contextlib.suppress(ValueError):  # not ours
                    found.setdefault(SinkTxnId.parse(self.scope, label), []).append(info)
        return found

    def _is_recent(self, group: str, mark: SinkTxnId | None) -> bool:
        try:
            first = CycleId.parse(self.scope, group.removeprefix(_GROUP))
        except ValueError:
            return False
        if mark is None:
            return True
        oldest = max(mark.cycle.batch - 2 * _BATCHES_PER_GROUP, 0)
        return first >= CycleId(self.scope, mark.cycle.generation, oldest)

    def remove_files(self, txn: SinkTxnId) -> None:
        """Remove the attempt's folder."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_dir(f"{self._root}{folder_of(txn)}")

    def remove_paths(self, paths: Iterable[str]) -> None:
        """Remove files, by their paths below the root."""
        for path in paths:
            self._delete(f"{self._root}{path}")

    def _record(self, kind: str, txn: SinkTxnId) -> str:
        return f"{self._root}{self._records}/{kind}/{txn.label}{_SUFFIX}"

    def _names(self, kind: str) -> list[str]:
        return [
            path.rpartition("/")[2].removesuffix(_SUFFIX)
            for path, _ in self._list(f"{self._records}/{kind}", recursive=False)
            if path.endswith(_SUFFIX)
        ]

    def _list(self, below: str, recursive: bool = True) -> Iterator[tuple[str, Any]]:
        folder = f"{self._root}{below}"
        what = fs.FileSelector(folder, allow_not_found=True, recursive=recursive)
        for info in self._fs.get_file_info(what):
            yield info.path.removeprefix(self._root), info

    def _put(self, path: str, content: bytes) -> None:
        if self._fs.type_name != "local":
            # Unbuffered, Arrow hands its own buffers to file systems written in Python, and
            # that of deltalake takes bytes only.
            with self._fs.open_output_stream(path, buffer_size=len(content) + 1) as file:
                file.write(content)
            return
        # Unlike an object store, a file system shows a file while it is being written.
        self._fs.create_dir(path.rpartition("/")[0], recursive=True)
        with self._fs.open_output_stream(f"{path}{_UNFINISHED}") as file:
            file.write(content)
        sync(self._fs, f"{path}{_UNFINISHED}")
        self._fs.move(f"{path}{_UNFINISHED}", path)
        sync(self._fs, path.rpartition("/")[0])

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(path)


def sync(system: Any, path: str) -> None:
    """Make a file or a folder durable; what an object store has taken, is."""
    if system.type_name == "local":
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _home(scope: Scope) -> str:
    return f"semel-{scope.slug}"


def _group(cycle: CycleId) -> str:
    first = cycle.batch - cycle.batch % _BATCHES_PER_GROUP
    return f"{_GROUP}{CycleId(cycle.scope, cycle.generation, first).label}"
