"""A sink in memory: the reference implementation of the sink's contract.

It stages, holds and shows rows in a `MemoryStore` that several sink objects may
share, as several processes would share a database.  A stager in another process
than the store sends its rows in the receipt.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import math
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Final

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import Fenced
from semel.pipeline.sink import (
    Batch,
    Found,
    Guarantee,
    Receipt,
    Schema,
    SinkFatal,
    SinkFinding,
    SinkOK,
    SinkOutcome,
    Tally,
    Tenant,
    Token,
    digest_of,
    tally_of,
)
from semel.pipeline.txn import CycleId, Scope, SinkTxnId, checked_name

_TAG: Final = "$"


def rows_of(batch: Batch) -> list[Any]:
    """Return the rows of an Arrow batch, or of any other iterable, as a list."""
    to_pylist = getattr(batch, "to_pylist", None)
    return list(batch) if to_pylist is None else to_pylist()


def to_plain(value: Any) -> Any:
    """Return a value as JSON can hold it; types that JSON lacks are tagged.

    Raises:
        TypeError: the value's type is not one that a row can have.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_TAG: "float", "is": repr(value)}
        case Decimal():
            return {_TAG: "decimal", "is": str(value)}
        case dt.datetime():
            return {_TAG: "datetime", "is": value.isoformat()}
        case dt.date():
            return {_TAG: "date", "is": value.isoformat()}
        case dt.time():
            return {_TAG: "time", "is": value.isoformat()}
        case dt.timedelta():
            return {_TAG: "timedelta", "is": [value.days, value.seconds, value.microseconds]}
        case bytes() | bytearray() | memoryview():
            return {_TAG: "bytes", "is": base64.b64encode(value).decode()}
        case list():
            return [to_plain(item) for item in value]
        case tuple():
            return {_TAG: "tuple", "is": [to_plain(item) for item in value]}
        case Mapping() if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: to_plain(item) for key, item in value.items()}
        case Mapping():
            return {_TAG: "map", "is": [[to_plain(k), to_plain(v)] for k, v in value.items()]}
    raise TypeError(f"a row cannot hold a {type(value).__name__}")


def from_plain(value: Any) -> Any:
    """Read what `to_plain` wrote."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG in value:
        return _REVIVE[value[_TAG]](value["is"])
    return {key: from_plain(item) for key, item in value.items()}


def tally_rows(rows: Iterable[Any]) -> Tally:
    """Count and hash rows one by one: exact for every type, but slow."""
    return sum((Tally(1, _row_hash(row)) for row in rows), Tally())


def _row_hash(row: Any) -> int:
    text = json.dumps(to_plain(row), sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


_REVIVE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "float": float,
    "decimal": Decimal,
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "timedelta": lambda parts: dt.timedelta(*parts),
    "bytes": base64.b64decode,
    "tuple": lambda items: tuple(from_plain(item) for item in items),
    "map": lambda pairs: {from_plain(key): from_plain(item) for key, item in pairs},
}


@dataclass(frozen=True, slots=True)
class HeldRows:
    """The rows that one attempt prepared."""

    digest: str
    rows: tuple[Any, ...]
    tally: Tally
    since: float


@dataclass(frozen=True, slots=True)
class Shown:
    """The visible rows of one cycle, and the proof of its commit."""

    txn: SinkTxnId
    held: HeldRows
    since: float


@dataclass(eq=False)
class MemoryStore:
    """Rows staged, prepared and visible; any number of sink objects may share one.

    Take `lock` for every access.
    """

    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    clock: Clock = SYSTEM_CLOCK
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    staged: dict[SinkTxnId, dict[str, list[Any]]] = field(default_factory=dict, repr=False)
    prepared: dict[SinkTxnId, HeldRows] = field(default_factory=dict, repr=False)
    visible: dict[CycleId, Shown] = field(default_factory=dict, repr=False)
    marks: dict[Scope, SinkTxnId] = field(default_factory=dict, repr=False)
    epochs: dict[Scope, int] = field(default_factory=dict, repr=False)
    undone: set[SinkTxnId] = field(default_factory=set, repr=False)
    names: dict[Scope, str] = field(default_factory=dict, repr=False)
    """What the sink that committed last is called, by scope."""

    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        _STORES[self.uid] = self

    @classmethod
    def of(cls, uid: str) -> MemoryStore:
        """Return the store with this uid, making an empty one where this process has none."""
        return _store_here(uid) or cls(uid)

    def __reduce__(self) -> tuple[Callable[[str], MemoryStore], tuple[str]]:
        """Pickle only the uid: a store stays in its process."""
        return (MemoryStore.of, (self.uid,))

    def snapshot(self) -> Mapping[str, Any]:
        """Return a copy of the content, for comparisons in tests."""
        with self.lock:
            return {
                "staged": {
                    txn: {task: list(rows) for task, rows in tasks.items()}
                    for txn, tasks in self.staged.items()
                },
                "prepared": dict(self.prepared),
                "visible": dict(self.visible),
                "marks": dict(self.marks),
                "epochs": dict(self.epochs),
            }


_STORES: weakref.WeakValueDictionary[str, MemoryStore] = weakref.WeakValueDictionary()


def _store_here(uid: str) -> MemoryStore | None:
    """Return this process's store with this uid; a copy made by `fork` is not it."""
    store = _STORES.get(uid)
    return store if store is not None and store.pid == os.getpid() else None


def find_store(uid: str) -> MemoryStore | None:
    """Return the store that a staging task writes to; None in a worker process, which has none."""
    return _store_here(uid)


class MemorySink:
    """Rows in this process's memory, once each.

    *store* lets a second object work on the same rows, as another process would.
    """

    def __init__(
        self, name: str = "memory", rows: Any = None, *, store: MemoryStore | None = None
    ) -> None:
        self.name = checked_name("sink", name)
        self.rows = rows
        self.store = store or MemoryStore()
        self._epochs: dict[Scope, int] = {}

    def __repr__(self) -> str:
        return f"MemorySink({self.name!r})"

    @property
    def visible(self) -> list[Any]:
        """The rows that readers see, in the order of the commits."""
        with self.store.lock:
            return [row for shown in self.store.visible.values() for row in shown.held.rows]

    @property
    def visible_by_cycle(self) -> Mapping[CycleId, list[Any]]:
        """The rows that readers see, by the cycle that brought them."""
        with self.store.lock:
            return {cycle: list(shown.held.rows) for cycle, shown in self.store.visible.items()}

    def check(self, schema: Schema | None) -> None:
        """Accept rows of every schema."""

    def fence(self, scope: Scope, epoch: int) -> None:
        with self.store.lock:
            newest = self.store.epochs.get(scope, 0)
            if epoch < newest:
                raise Fenced(_fenced_reason(self.name, scope, epoch, newest))
            self.store.epochs[scope] = epoch
            self._epochs[scope] = epoch

    def stager(self, txn: SinkTxnId) -> MemoryStager:
        return MemoryStager(self.store.uid, txn)

    def prepare(self, txn: SinkTxnId, receipts: Sequence[Receipt]) -> SinkOutcome:
        digest = digest_of(receipts)
        with self.store.lock:
            newest = self.store.epochs.get(txn.scope, 0)
            mine = self._epochs.get(txn.scope, 0)
            if mine < newest:
                return SinkFatal(_fenced_reason(self.name, txn.scope, mine, newest))
            shown = self.store.visible.get(txn.cycle)
            known = shown.held if shown and shown.txn == txn else self.store.prepared.get(txn)
            if known is not None:
                if known.digest != digest:
                    return SinkFatal(f"{txn} was prepared before, with other rows")
                return SinkOK(_token(txn, known))
            if shown is not None:
                return SinkFatal(f"{txn.cycle} was committed by another attempt, {shown.txn}")
            mark = self.store.marks.get(txn.scope)
            if mark is not None and txn.cycle <= mark.cycle:
                return SinkFatal(
                    f"{txn} is at or below the mark {mark}: another attempt was committed"
                )
            return self._hold(txn, receipts, digest)

    def _hold(self, txn: SinkTxnId, receipts: Sequence[Receipt], digest: str) -> SinkOutcome:
        staged = self.store.staged.get(txn, {})
        rows: list[Any] = []
        for receipt in receipts:
            part = (
                from_plain(receipt.detail["rows"])
                if "rows" in receipt.detail
                else staged.get(receipt.task)
            )
            if part is None or tally_rows(part) != receipt.tally:
                return SinkFatal(
                    f"{txn}: the staged rows of task {receipt.task} are missing or changed"
                )
            rows += part
        held = HeldRows(digest, tuple(rows), tally_of(receipts), self.store.clock.now())
        self.store.prepared[txn] = held
        return SinkOK(_token(txn, held))

    def commit(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Move the held rows to the visible ones."""
        with self.store.lock:
            shown = self.store.visible.get(txn.cycle)
            if shown is not None and shown.txn != txn:
                return SinkFatal(f"{txn.cycle} was committed by another attempt, {shown.txn}")
            held = shown.held if shown else self.store.prepared.get(txn)
            if held is None:
                return SinkFatal(f"{txn} is not held here: never prepared, aborted, or lost")
            if dict(token) != _token(txn, held):
                return SinkFatal(f"{txn} is held with other rows than those of its token")
            if shown is None:
                self.store.visible[txn.cycle] = Shown(txn, held, self.store.clock.now())
            self.store.prepared.pop(txn, None)
            self.store.staged.pop(txn, None)
            mark = self.store.marks.get(txn.scope)
            if mark is None or mark.cycle < txn.cycle:
                self.store.marks[txn.scope] = txn
            self.store.names[txn.scope] = self.name
            return SinkOK()

    def abort(self, txn: SinkTxnId, token: Token | None) -> SinkOutcome:
        with self.store.lock:
            shown = self.store.visible.get(txn.cycle)
            if shown is not None and shown.txn == txn:
                return SinkFatal(f"{txn} is committed and cannot be aborted; nothing was deleted")
            self.store.prepared.pop(txn, None)
            self.store.staged.pop(txn, None)
            return SinkOK()

    def look_up(self, txn: SinkTxnId, token: Token | None) -> SinkFinding:
        with self.store.lock:
            shown = self.store.visible.get(txn.cycle)
            if txn in self.store.undone:
                return SinkFinding(Found.GONE, "its rows were taken away")
            if shown is not None and shown.txn == txn:
                rows = shown.held.tally.rows
                return SinkFinding(Found.VISIBLE, f"{rows} rows are visible", shown.since)
            held = self.store.prepared.get(txn)
            if held is not None:
                return SinkFinding(Found.HELD, f"{held.tally.rows} rows are held", held.since)
            if shown is not None:
                return SinkFinding(Found.GONE, f"{shown.txn} committed the cycle", shown.since)
            staged = len(self.store.staged.get(txn, {}))
            return SinkFinding(Found.GONE, f"not held; {staged} tasks have staged for it")

    def recover(self, scope: Scope) -> list[SinkTxnId]:
        with self.store.lock:
            held = [txn for txn in self.store.prepared if txn.scope == scope]
        return sorted(held, key=lambda txn: (txn.cycle, txn.attempt))

    def sweep(self, scope: Scope, is_loser: Callable[[SinkTxnId], bool]) -> list[SinkTxnId]:
        with self.store.lock:
            shown = {shown.txn for shown in self.store.visible.values()}
            kept = {*self.store.staged, *self.store.prepared}
            swept = [txn for txn in kept if txn.scope == scope and (txn in shown or is_loser(txn))]
            for txn in swept:
                self.store.staged.pop(txn, None)
                self.store.prepared.pop(txn, None)
        return sorted(swept, key=lambda txn: (txn.cycle, txn.attempt))

    def mark(self, scope: Scope) -> SinkTxnId | None:
        with self.store.lock:
            return self.store.marks.get(scope)

    def check_undo(self, txn: SinkTxnId, token: Token) -> str:
        with self.store.lock:
            shown = self.store.visible.get(txn.cycle)
            if shown is None or shown.txn != txn or dict(token) != _token(txn, shown.held):
                return f"{txn} is not visible here with these rows"
            return ""

    def undo(self, txn: SinkTxnId, token: Token) -> SinkOutcome:
        """Leave the proof of the commit, without rows."""
        with self.store.lock:
            if txn in self.store.undone:
                return SinkOK()
            if wrong := self.check_undo(txn, token):
                return SinkFatal(wrong)
            shown = self.store.visible[txn.cycle]
            nothing = replace(shown.held, rows=(), tally=Tally())
            self.store.visible[txn.cycle] = replace(shown, held=nothing)
            self.store.undone.add(txn)
            return SinkOK()

    def find_place(self) -> str:
        """Return nothing: memory does not last from one process to the next."""
        return ""

    def tenants(self) -> list[Tenant]:
        with self.store.lock:
            return [
                Tenant(scope, self.store.names.get(scope, self.name), mark.label)
                for scope, mark in self.store.marks.items()
            ]

    def rename(self, old: Tenant, new: Tenant) -> None:
        with self.store.lock:
            if (mark := self.store.marks.pop(old.scope, None)) is not None:
                cycle = replace(mark.cycle, scope=new.scope)
                self.store.marks[new.scope] = replace(mark, cycle=cycle)
            self.store.epochs[new.scope] = self.store.epochs.pop(old.scope, 0)
            self.store.names[new.scope] = new.sink

    def visible_tally(self, cycle: CycleId, token: Token) -> Tally | None:
        return tally_rows(self.visible_by_cycle.get(cycle, []))

    def guarantee(self) -> Guarantee:
        return Guarantee(
            effect="rows in this process's memory, once each while it lives",
            readers_see="whole batches or nothing",
            not_covered=("the end of the process: nothing is durable",),
        )

    def close(self) -> None:
        """Do nothing: there are no connections."""


@dataclass(frozen=True, slots=True)
class MemoryStager:
    """The executor's side: in the store's own process, or in any other."""

    store_uid: str
    txn: SinkTxnId

    def open(self, task: str) -> MemoryWriter:
        return MemoryWriter(find_store(self.store_uid), self.txn, task)


class MemoryWriter:
    """The rows of one task attempt, staged in the store or carried to the receipt."""

    def __init__(self, store: MemoryStore | None, txn: SinkTxnId, task: str) -> None:
        self._store = store
        self._txn = txn
        self._task = task
        self._rows: list[Any] = []
        self._keep([])

    def write(self, batch: Batch) -> None:
        self._keep(rows_of(batch))

    def _keep(self, rows: list[Any]) -> None:
        self._rows += rows
        if self._store is not None:
            with self._store.lock:
                # A task cannot know whether its transaction was aborted meanwhile.
                self._store.staged.setdefault(self._txn, {})[self._task] = self._rows

    def finish(self) -> Receipt:
        """Return the receipt; in another process than the store, with the rows in it."""
        self._keep([])
        detail = {} if self._store is not None else {"rows": to_plain(self._rows)}
        return Receipt(self._task, tally_rows(self._rows), detail)

    def discard(self) -> None:
        if self._store is not None:
            with self._store.lock:
                tasks = self._store.staged.get(self._txn, {})
                tasks.pop(self._task, None)
                if not tasks:
                    self._store.staged.pop(self._txn, None)


def _token(txn: SinkTxnId, held: HeldRows) -> dict[str, Any]:
    return {"attempt": txn.attempt, "digest": held.digest, "rows": held.tally.rows}


def _fenced_reason(sink: str, scope: Scope, mine: int, newest: int) -> str:
    return (
        f"sink {sink}: scope {scope} belongs to epoch {newest}, this process holds {mine}; "
        f"it was fenced and must stop"
    )
