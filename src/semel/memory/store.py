"""What a memory sink keeps: the outside world, as far as the sink objects are concerned."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from semel.clock import SYSTEM_CLOCK, Clock
from semel.pipeline.sink import Tally
from semel.pipeline.txn import CycleId, Scope, SinkTxnId


@dataclass(frozen=True, slots=True)
class Held:
    """What one attempt prepared."""

    digest: str
    rows: tuple[Any, ...]
    tally: Tally
    since: float


@dataclass(frozen=True, slots=True)
class Shown:
    """What one cycle made visible: the proof of its commit, and its rows."""

    txn: SinkTxnId
    held: Held
    since: float


@dataclass(eq=False)
class MemoryStore:
    """Rows staged, prepared and visible; any number of sink objects may share one.

    Everything is reached under `lock`.
    """

    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    clock: Clock = SYSTEM_CLOCK
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    staged: dict[SinkTxnId, dict[str, list[Any]]] = field(default_factory=dict, repr=False)
    prepared: dict[SinkTxnId, Held] = field(default_factory=dict, repr=False)
    visible: dict[CycleId, Shown] = field(default_factory=dict, repr=False)
    marks: dict[Scope, SinkTxnId] = field(default_factory=dict, repr=False)
    epochs: dict[Scope, int] = field(default_factory=dict, repr=False)
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        _STORES[self.uid] = self

    @classmethod
    def of(cls, uid: str) -> MemoryStore:
        """Return the store with this uid, making an empty one where this process has none."""
        return find_store(uid) or cls(uid)

    def __reduce__(self) -> tuple[Callable[[str], MemoryStore], tuple[str]]:
        """A store stays in its process: what travels is its uid."""
        return (MemoryStore.of, (self.uid,))

    def snapshot(self) -> Mapping[str, Any]:
        """Copy everything that is kept, for comparisons in tests."""
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


def find_store(uid: str) -> MemoryStore | None:
    """Return this process's store with this uid; a copy made by `fork` is not it."""
    store = _STORES.get(uid)
    return store if store is not None and store.pid == os.getpid() else None
