"""The ledger in memory: lost with its process, and the reference for the others."""

from __future__ import annotations

import threading
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from semel.clock import SYSTEM_CLOCK, Clock
from semel.errors import Misuse
from semel.lease import Owner, Takeover
from semel.pipeline import rules
from semel.pipeline.ledger import (
    AttemptRecord,
    CycleState,
    Decision,
    Generation,
    LedgerAct,
    ScopeLease,
    ScopeRecord,
)
from semel.pipeline.sink import Token
from semel.pipeline.source import BatchRange, Position, Positions, SourceKind
from semel.pipeline.txn import CycleId, Scope, SinkTxnId


@dataclass(slots=True)
class _Held:
    """Everything the ledger holds for one scope."""

    epoch: int = 0
    owner: Owner | None = None
    lease_until: float = 0.0
    mark: SinkTxnId | None = None
    pruned: CycleId | None = None
    generation: int = 0
    generations: list[Generation] = field(default_factory=list)
    attempts: dict[SinkTxnId, AttemptRecord] = field(default_factory=dict)
    ends: dict[tuple[str, str], tuple[Position, int]] = field(default_factory=dict)
    """With the generation that wrote each."""

    paths: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    acts: list[LedgerAct] = field(default_factory=list)


class MemoryLedger:
    """A `semel.pipeline.ledger.Ledger` for tests and trials; may be shared by threads."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK, ledger_id: str | None = None) -> None:
        self._clock = clock
        self._ledger_id = ledger_id or str(uuid.uuid4())
        self._lock = threading.RLock()
        self._scopes: defaultdict[Scope, _Held] = defaultdict(_Held)

    def __reduce__(self) -> NoReturn:
        raise Misuse(
            "a MemoryLedger belongs to one process and cannot be sent to another; "
            "use sqlite:///… or postgresql://…"
        )

    def __repr__(self) -> str:
        return f"MemoryLedger(ledger_id={self._ledger_id!r})"

    @property
    def ledger_id(self) -> str:
        return self._ledger_id

    @property
    def url(self) -> str:
        return "memory:"

    def acquire(
        self, scope: Scope, owner: Owner, seconds: float, takeover: Takeover = Takeover.WAIT
    ) -> ScopeLease:
        with self._lock:
            held = self._of(scope)
            left = held.lease_until - self._clock.monotonic()
            rules.check_takeover(scope, held.owner, left, owner, takeover)
            held.epoch += 1
            held.owner = owner
            held.lease_until = self._clock.monotonic() + seconds
            return ScopeLease(scope, owner, held.epoch, seconds)

    def renew(self, lease: ScopeLease) -> None:
        with self._lock:
            held = self._fenced(lease)
            held.lease_until = self._clock.monotonic() + lease.seconds

    def release(self, lease: ScopeLease) -> None:
        with self._lock:
            held = self._of(lease.scope)
            if (held.epoch, held.owner) == (lease.epoch, lease.owner):
                held.owner = None
                held.lease_until = 0.0

    def scope_record(self, scope: Scope) -> ScopeRecord | None:
        with self._lock:
            held = self._read(scope)
            if held.epoch == 0:
                return None
            left = held.lease_until - self._clock.monotonic() if held.owner else 0.0
            return ScopeRecord(
                scope, held.epoch, held.owner, max(0.0, left), held.mark, held.generation
            )

    def scopes(self) -> list[Scope]:
        with self._lock:
            owned = [scope for scope, held in self._scopes.items() if held.epoch]
            return sorted(owned, key=lambda scope: (scope.app, scope.query))

    def generations(self, scope: Scope) -> list[Generation]:
        with self._lock:
            return list(self._read(scope).generations)

    def open_generation(
        self, lease: ScopeLease, checkpoint: str, first_batch: int = 0
    ) -> Generation:
        with self._lock:
            held = self._fenced(lease)
            for known in reversed(held.generations):
                if known.checkpoint == checkpoint:
                    held.generation = known.number
                    return known
            return self._next_generation(held, checkpoint, first_batch)

    def adopt_generation(
        self,
        lease: ScopeLease,
        checkpoint: str,
        first_batch: int,
        positions: Mapping[tuple[str, str], Position],
        paths: Mapping[str, Collection[str]] | None = None,
    ) -> Generation:
        with self._lock:
            held = self._fenced(lease)
            opened = self._next_generation(held, checkpoint, first_batch)
            held.ends = {where: (at, opened.number) for where, at in positions.items()}
            if paths is not None:
                held.paths.clear()
                held.paths.update({source: set(listed) for source, listed in paths.items()})
            return opened

    def _next_generation(self, held: _Held, checkpoint: str, first_batch: int) -> Generation:
        number = len(held.generations) + 1
        opened = Generation(number, checkpoint, first_batch, self._clock.now())
        held.generations.append(opened)
        held.generation = number
        return opened

    def plan(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        with self._lock:
            held = self._fenced(lease, txn)
            known = held.attempts.get(txn)
            rules.check_plan(txn, known, _winner(held, txn.cycle), held.mark, held.generation)
            if known is None:
                held.attempts[txn] = self._new(txn, lease.epoch, CycleState.PLANNED)

    def set_range(self, lease: ScopeLease, txn: SinkTxnId, batch: BatchRange) -> None:
        with self._lock:
            held = self._fenced(lease, txn)
            rules.check_range(txn, held.attempts.get(txn), batch)
            kept = BatchRange.from_json(batch.to_json())
            held.attempts[txn] = replace(held.attempts[txn], range=kept)

    def set_prepared(
        self,
        lease: ScopeLease,
        txn: SinkTxnId,
        tokens: Mapping[str, Token],
        rows: Mapping[str, int],
    ) -> None:
        with self._lock:
            held = self._fenced(lease, txn)
            kept, counts = rules.as_json("a token", tokens), dict(rows)
            rules.check_prepared(txn, held.attempts.get(txn), kept, counts)
            held.attempts[txn] = replace(
                held.attempts[txn], state=CycleState.PREPARED, tokens=kept, rows=counts
            )

    def decide_commit(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        with self._lock:
            known = self._of(txn.scope).attempts.get(txn)
            if known is not None and known.state.is_committed:
                return
            held = self._fenced(lease, txn)
            batch = (known and known.range) or BatchRange()
            ends = rules.comparable(held.ends, batch, txn.cycle.generation)
            standing = Positions(ends, _committed_paths(held, batch))
            batch = rules.check_commit(txn, known, _winner(held, txn.cycle), held.mark, standing)
            for where, position in rules.next_positions(ends, batch).items():
                held.ends[where] = (position, txn.cycle.generation)
            for source in batch.sources:
                if source.kind is SourceKind.FILES:
                    held.paths[source.source].update(source.paths)
            held.attempts[txn] = replace(
                held.attempts[txn], state=CycleState.COMMITTED, decided_at=self._clock.now()
            )

    def decide_abort(self, txn: SinkTxnId, reason: str = "") -> Decision:
        with self._lock:
            held = self._of(txn.scope)
            known = held.attempts.get(txn)
            if known is None:
                rules.check_unpruned(txn, held.pruned)
                known = self._new(txn, 0, CycleState.PLANNED)
            if known.state.is_committed:
                return Decision.COMMIT
            if not known.state.is_decided:
                held.attempts[txn] = replace(
                    known, state=CycleState.ABORTED, reason=reason, decided_at=self._clock.now()
                )
            return Decision.ABORT

    def abort_undecided(self, lease: ScopeLease, reason: str = "") -> list[SinkTxnId]:
        with self._lock:
            held = self._fenced(lease)
            left = [
                txn
                for txn, known in held.attempts.items()
                if not known.state.is_decided and known.epoch < lease.epoch
            ]
            for txn in left:
                self.decide_abort(txn, reason)
            return left

    def finish(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        with self._lock:
            held = self._fenced(lease, txn)
            known = held.attempts.get(txn)
            rules.check_finish(txn, known)
            if known is not None and known.state is CycleState.COMMITTED:
                held.attempts[txn] = replace(
                    known, state=CycleState.FINISHED, finished_at=self._clock.now()
                )
                held.mark = _raised(held)

    def attempt(self, txn: SinkTxnId) -> AttemptRecord | None:
        with self._lock:
            return self._read(txn.scope).attempts.get(txn)

    def attempts(self, cycle: CycleId) -> list[AttemptRecord]:
        with self._lock:
            known = self._read(cycle.scope).attempts.values()
            return [record for record in known if record.txn.cycle == cycle]

    def committed(self, cycle: CycleId) -> AttemptRecord | None:
        with self._lock:
            held = self._read(cycle.scope)
            winner = _winner(held, cycle)
            return held.attempts[winner] if winner else None

    def open_attempts(self, scope: Scope) -> list[AttemptRecord]:
        over = (CycleState.FINISHED, CycleState.ABORTED)
        with self._lock:
            known = self._read(scope).attempts.values()
            still_open = [record for record in known if record.state not in over]
            return sorted(still_open, key=lambda record: record.txn.cycle)

    def positions(self, scope: Scope, batch: BatchRange | None = None) -> Positions:
        with self._lock:
            held = self._read(scope)
            return Positions(
                {where: position for where, (position, _) in held.ends.items()},
                _committed_paths(held, batch),
            )

    def history(self, scope: Scope, limit: int = 50) -> list[AttemptRecord]:
        with self._lock:
            return list(reversed(self._read(scope).attempts.values()))[:limit]

    def prune(self, scope: Scope, keep: int) -> int:
        rules.check_keep(keep)
        with self._lock:
            held = self._of(scope)
            if held.mark is None:
                return 0
            top = held.mark.cycle
            newest = sorted({txn.cycle for txn in held.attempts if txn.cycle <= top}, reverse=True)
            over = (CycleState.FINISHED, CycleState.ABORTED)
            cycles = set(newest[max(keep, 1) :])
            gone = [
                txn
                for txn, record in held.attempts.items()
                if txn.cycle in cycles and record.state in over
            ]
            for txn in gone:
                del held.attempts[txn]
                held.pruned = max(held.pruned or txn.cycle, txn.cycle)
            return len(gone)

    def rename_app(self, lease: ScopeLease, app: str) -> Scope:
        old, new = lease.scope, Scope(self._ledger_id, app, lease.scope.query)
        with self._lock:
            held, taken = self._fenced(lease), self._read(new)
            has_cycles = bool(taken.generations or taken.attempts)
            rules.check_rename(old, new, len(self.open_attempts(old)), has_cycles)

            def renamed(txn: SinkTxnId) -> SinkTxnId:
                return replace(txn, cycle=replace(txn.cycle, scope=new))

            held.attempts = {
                renamed(txn): replace(record, txn=renamed(txn))
                for txn, record in held.attempts.items()
            }
            held.mark = renamed(held.mark) if held.mark else None
            held.pruned = replace(held.pruned, scope=new) if held.pruned else None
            held.acts = [replace(act, scope=new) for act in held.acts] + taken.acts
            held.epoch, held.owner = max(held.epoch, taken.epoch), None
            self._scopes[new] = self._scopes.pop(old)
        return new

    def record_act(self, scope: Scope, who: str, act: str, why: str, detail: Any = None) -> None:
        kept = rules.as_json("the detail of an act", detail or {})
        with self._lock:
            self._of(scope).acts.append(LedgerAct(scope, self._clock.now(), who, act, why, kept))

    def acts(self, scope: Scope) -> list[LedgerAct]:
        with self._lock:
            return self._read(scope).acts[::-1]

    def close(self) -> None:
        """Do nothing: there are no connections."""

    def _read(self, scope: Scope) -> _Held:
        return self._scopes.get(scope) or _Held()

    def _of(self, scope: Scope) -> _Held:
        rules.check_scope(self._ledger_id, scope)
        return self._scopes[scope]

    def _fenced(self, lease: ScopeLease, txn: SinkTxnId | None = None) -> _Held:
        """Return the data of the scope if *lease* is in force."""
        held = self._of(lease.scope)
        rules.check_lease(lease, held.epoch, held.owner, txn)
        return held

    def _new(self, txn: SinkTxnId, epoch: int, state: CycleState) -> AttemptRecord:
        return AttemptRecord(txn, epoch, state, None, {}, {}, "", self._clock.now(), None, None)


def _winner(held: _Held, cycle: CycleId) -> SinkTxnId | None:
    for txn, record in held.attempts.items():
        if txn.cycle == cycle and record.state.is_committed:
            return txn
    return None


def _raised(held: _Held) -> SinkTxnId | None:
    """Return the highest finished cycle with no unfinished commit below it."""
    stuck = [t.cycle for t, r in held.attempts.items() if r.state is CycleState.COMMITTED]
    done = [t for t, r in held.attempts.items() if r.state is CycleState.FINISHED]
    below = [txn for txn in done if not stuck or txn.cycle < min(stuck)]
    return max(below, key=lambda txn: txn.cycle, default=held.mark)


def _committed_paths(held: _Held, batch: BatchRange | None) -> dict[str, set[str]]:
    if batch is None:
        return {source: set(paths) for source, paths in held.paths.items()}
    files = [source for source in batch.sources if source.kind is SourceKind.FILES]
    return {s.source: held.paths.get(s.source, set()) & set(s.paths) for s in files}
