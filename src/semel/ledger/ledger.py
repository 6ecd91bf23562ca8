"""The ledger in a SQL database.

Every writing method is one transaction that first takes the lock of its scope,
so writers of one scope run one after the other, and the rows that the checks read
do not change until the commit.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

from semel.errors import InDoubt, LedgerUnavailable, NeedsOperator
from semel.lease import Owner, Takeover
from semel.ledger import statements
from semel.ledger.database import MICROSECONDS, LedgerDatabase, Row, Session, TransactionMode
from semel.operate.stores import account_now
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
from semel.pipeline.source import BatchRange, Position, Positions
from semel.pipeline.txn import CycleId, Scope, SinkTxnId

# Between two backups, a scope has fewer starts than this.
EPOCH_LEAP: Final = 10_000

# Well below the number of parameters that either database takes in one statement.
PATHS_AT_ONCE: Final = 500


class SqlLedger:
    """A `semel.pipeline.ledger.Ledger`; may be shared by threads."""

    def __init__(self, database: LedgerDatabase) -> None:
        self._database = database

    @property
    def ledger_id(self) -> str:
        return self._database.ledger_id

    @property
    def url(self) -> str:
        return self._database.driver.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def exists(self) -> bool:
        """Return whether the ledger exists, without creating it as other methods do."""
        return self._database.exists()

    def acquire(
        self, scope: Scope, owner: Owner, seconds: float, takeover: Takeover = Takeover.WAIT
    ) -> ScopeLease:
        with self._writing(scope) as (session, known):
            rules.check_takeover(scope, known.owner, known.left_seconds, owner, takeover)
            taken = {
                "epoch": known.epoch + 1,
                "owner": json.dumps(owner.to_json()),
                "until": known.now + round(seconds * MICROSECONDS),
            }
            session.run(statements.TAKE_LEASE, {**_keys(scope), **taken})
        return ScopeLease(scope, owner, known.epoch + 1, seconds)

    def renew(self, lease: ScopeLease) -> None:
        with self._leased(lease) as (session, known):
            until = known.now + round(lease.seconds * MICROSECONDS)
            session.run(statements.RENEW_LEASE, {**_keys(lease.scope), "until": until})

    def release(self, lease: ScopeLease) -> None:
        with self._writing(lease.scope, lease.epoch) as (session, known):
            if (known.epoch, known.owner) == (lease.epoch, lease.owner):
                session.run(statements.RELEASE_LEASE, _keys(lease.scope))

    def scope_record(self, scope: Scope) -> ScopeRecord | None:
        with self._reading(scope) as session:
            found = self._read_scope(session, statements.READ_SCOPE, scope)
        return found.to_record() if found and found.epoch else None

    def scopes(self) -> list[Scope]:
        with self._database.transaction("semel:read", TransactionMode.READ) as session:
            found = session.run(statements.LIST_SCOPES)
        return [Scope(self.ledger_id, row["app"], row["query"]) for row in found]

    def generations(self, scope: Scope) -> list[Generation]:
        with self._reading(scope) as session:
            return _read_generations(session, scope)

    def open_generation(
        self, lease: ScopeLease, checkpoint: str, first_batch: int = 0
    ) -> Generation:
        with self._leased(lease) as (session, known):
            for opened in reversed(_read_generations(session, lease.scope)):
                if opened.checkpoint == checkpoint:
                    _use_generation(session, lease.scope, opened.number)
                    return opened
            return _add_generation(session, known, checkpoint, first_batch)

    def adopt_generation(
        self,
        lease: ScopeLease,
        checkpoint: str,
        first_batch: int,
        positions: Mapping[tuple[str, str], Position],
        paths: Mapping[str, Collection[str]] | None = None,
    ) -> Generation:
        with self._leased(lease) as (session, known):
            opened = _add_generation(session, known, checkpoint, first_batch)
            session.run(statements.FORGET_POSITIONS, _keys(lease.scope))
            _move(session, lease.scope, positions, opened.number)
            if paths is not None:
                session.run(statements.FORGET_PATHS, _keys(lease.scope))
                session.run(statements.FORGET_FOLDERS, _keys(lease.scope))
                _add_paths(session, lease.scope, paths)
            return opened

    def plan(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        with self._leased(lease, txn) as (session, known):
            attempt = _read_attempt(session, txn)
            winner = _read_winner(session, txn.cycle)
            rules.check_plan(txn, attempt, winner, known.mark, known.generation)
            if attempt is None:
                _add_attempt(session, txn, lease.epoch, CycleState.PLANNED, known.now)

    def set_range(self, lease: ScopeLease, txn: SinkTxnId, batch: BatchRange) -> None:
        with self._leased(lease, txn) as (session, _):
            rules.check_range(txn, _read_attempt(session, txn), batch)
            session.run(statements.SET_RANGE, {**_txn_keys(txn), "range": batch.to_json()})

    def set_prepared(
        self,
        lease: ScopeLease,
        txn: SinkTxnId,
        tokens: Mapping[str, Token],
        rows: Mapping[str, int],
    ) -> None:
        kept, counts = rules.as_json("a token", tokens), dict(rows)
        values = {"tokens": json.dumps(kept), "rows": json.dumps(counts)}
        with self._leased(lease, txn) as (session, _):
            rules.check_prepared(txn, _read_attempt(session, txn), kept, counts)
            session.run(statements.SET_PREPARED, {**_txn_keys(txn), **values})

    def decide_commit(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        scope, generation = txn.scope, txn.cycle.generation
        with self._writing(lease.scope, lease.epoch, deciding=txn) as (session, known):
            attempt = _read_attempt(session, txn)
            if attempt is not None and attempt.state.is_committed:
                return
            rules.check_lease(lease, known.epoch, known.owner, txn)
            batch = (attempt and attempt.range) or BatchRange()
            ends = rules.comparable(_read_ends(session, scope), batch, generation)
            standing = Positions(ends, _read_paths(session, scope, batch))
            winner = _read_winner(session, txn.cycle)
            batch = rules.check_commit(txn, attempt, winner, known.mark, standing)
            _move(session, scope, rules.next_positions(ends, batch), generation)
            _add_paths(session, scope, batch.paths)
            session.run(statements.DECIDE_COMMIT, {**_txn_keys(txn), "now": known.now})

    def decide_abort(self, txn: SinkTxnId, reason: str = "") -> Decision:
        # After a commit without an answer the database has dropped its connection, and this
        # new one waits for the scope's lock until the server has settled the old transaction.
        with self._writing(txn.scope, deciding=txn) as (session, known):
            attempt = _read_attempt(session, txn)
            if attempt is None:
                rules.check_unpruned(txn, known.pruned)
                _add_attempt(session, txn, 0, CycleState.ABORTED, known.now, reason)
            elif attempt.state.is_committed:
                return Decision.COMMIT
            elif not attempt.state.is_decided:
                why = {"now": known.now, "reason": _text(reason)}
                session.run(statements.DECIDE_ABORT, {**_txn_keys(txn), **why})
            return Decision.ABORT

    def abort_undecided(self, lease: ScopeLease, reason: str = "") -> list[SinkTxnId]:
        with self._leased(lease) as (session, known):
            why = {"now": known.now, "reason": _text(reason), "epoch": lease.epoch}
            found = session.run(statements.ABORT_UNDECIDED, {**_keys(lease.scope), **why})
        given_up = [_txn_of(lease.scope, row) for row in found]
        return sorted(given_up, key=lambda txn: (txn.cycle, txn.attempt))

    def finish(self, lease: ScopeLease, txn: SinkTxnId) -> None:
        with self._leased(lease, txn) as (session, known):
            attempt = _read_attempt(session, txn)
            rules.check_finish(txn, attempt)
            if attempt is not None and attempt.state is CycleState.COMMITTED:
                session.run(statements.FINISH, {**_txn_keys(txn), "now": known.now})
                _raise_mark(session, txn.scope)

    def attempt(self, txn: SinkTxnId) -> AttemptRecord | None:
        with self._reading(txn.scope) as session:
            return _read_attempt(session, txn)

    def attempts(self, cycle: CycleId) -> list[AttemptRecord]:
        with self._reading(cycle.scope) as session:
            found = session.run(statements.LIST_CYCLE, _cycle_keys(cycle))
        return [_attempt_of(cycle.scope, row) for row in found]

    def committed(self, cycle: CycleId) -> AttemptRecord | None:
        with self._reading(cycle.scope) as session:
            found = session.run(statements.READ_COMMITTED, _cycle_keys(cycle))
        return _attempt_of(cycle.scope, found[0]) if found else None

    def open_attempts(self, scope: Scope) -> list[AttemptRecord]:
        with self._reading(scope) as session:
            found = session.run(statements.LIST_OPEN, _keys(scope))
        return [_attempt_of(scope, row) for row in found]

    def positions(self, scope: Scope, batch: BatchRange | None = None) -> Positions:
        with self._reading(scope) as session:
            ends = _read_ends(session, scope)
            paths = _read_paths(session, scope, batch)
        return Positions({where: position for where, (position, _) in ends.items()}, paths)

    def history(self, scope: Scope, limit: int = 50) -> list[AttemptRecord]:
        with self._reading(scope) as session:
            found = session.run(statements.LIST_NEWEST, {**_keys(scope), "limit": limit})
        return [_attempt_of(scope, row) for row in found]

    def prune(self, scope: Scope, keep: int) -> int:
        rules.check_keep(keep)
        with self._writing(scope) as (session, known):
            if known.mark is None:
                return 0
            # The mark's own cycle is the newest of them, and always kept.
            newest = {**_cycle_keys(known.mark.cycle), "keep": max(keep, 1)}
            found = session.run(statements.FIRST_TO_PRUNE, newest)
            if not found:
                return 0
            top = CycleId(scope, found[0]["generation"], found[0]["batch"])
            gone = session.run(statements.PRUNE, _cycle_keys(top))
            cycles = [CycleId(scope, row["generation"], row["batch"]) for row in gone]
            if cycles:
                highest = max([*cycles, known.pruned or cycles[0]])
                session.run(statements.SET_PRUNED, _cycle_keys(highest))
            return len(gone)

    def rename_app(self, lease: ScopeLease, app: str) -> Scope:
        old, new = lease.scope, Scope(self.ledger_id, app, lease.scope.query)
        with self._leased(lease) as (session, known):
            taken = self._lock(session, new)
            has_cycles = bool(
                _read_generations(session, new)
                or session.run(statements.LIST_NEWEST, {**_keys(new), "limit": 1})
            )
            still_open = len(session.run(statements.LIST_OPEN, _keys(old)))
            rules.check_rename(old, new, still_open, has_cycles)
            session.run(statements.FORGET_SCOPE, _keys(new))
            renamed = {**_keys(old), "new": app}
            epoch = max(known.epoch, taken.epoch)
            session.run(statements.RENAME_SCOPE, {**renamed, "epoch": epoch})
            (last,) = session.run(statements.LAST_ACT, _keys(old))
            # Upwards first: the numbers must stay unique at every moment.
            (top,) = session.run(statements.LAST_ACT, _keys(new))
            session.run(statements.SHIFT_ACTS, {**_keys(new), "by": last["seq"] + top["seq"]})
            for table in ("generation", "attempt", "position", "folder", "act"):
                session.run(statements.RENAME_ROWS.format(table=f"semel_{table}"), renamed)
        return new

    def record_act(self, scope: Scope, who: str, act: str, why: str, detail: Any = None) -> None:
        account = account_now()
        if account is not None and (detail is None or isinstance(detail, Mapping)):
            # Beside the name that a person gives, as in the audit trail of messages.
            detail = {**(detail or {}), **account.details()}
        kept = rules.as_json("the detail of an act", detail or {})
        with self._writing(scope) as (session, known):
            _add_act(session, known, who, act, why, kept)

    def acts(self, scope: Scope) -> list[LedgerAct]:
        with self._reading(scope) as session:
            found = session.run(statements.LIST_ACTS, _keys(scope))
        return [_act_of(scope, row) for row in found]

    def restore(self, who: str, why: str, takeover: Takeover = Takeover.WAIT) -> None:
        """Fence every owner that the lost ledger had after the backup was made.

        Call it after the tables were restored, before a pipeline starts.  One transaction
        ends every lease, raises every epoch far enough and records the act in every scope;
        a repetition raises the epochs again, which does no harm.

        Raises:
            LeaseHeld: an owner may still run, and *takeover* is WAIT; nothing was changed.
        """
        with self._transaction("semel:restore") as session:
            for row in session.run(statements.LIST_EVERY_SCOPE):
                scope = Scope(self.ledger_id, row["app"], row["query"])
                known = self._lock(session, scope)
                left = known.left_seconds
                rules.check_takeover(scope, known.owner, left, Owner.here(), takeover)
                session.run(statements.LEAP_EPOCH, {**_keys(scope), "leap": EPOCH_LEAP})
                detail = {"epoch": known.epoch + EPOCH_LEAP, "takeover": takeover.value}
                _add_act(session, known, who, "ledger-restore", why, detail)

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def _transaction(self, name: str, deciding: SinkTxnId | None = None) -> Iterator[Session]:
        """Run a writing transaction.

        A lost answer to a commit matters only for decisions: all other writes can be
        repeated, so for them the ledger is merely unavailable.
        """
        try:
            with self._database.transaction(name, TransactionMode.WRITE) as session:
                yield session
        except InDoubt as error:
            if deciding is not None:
                raise InDoubt(f"{deciding}: {error}") from error
            raise LedgerUnavailable(self.url, "the connection was lost") from error

    @contextmanager
    def _writing(
        self, scope: Scope, epoch: int | None = None, deciding: SinkTxnId | None = None
    ) -> Iterator[tuple[Session, _ScopeRow]]:
        """Run a transaction that holds the scope's lock."""
        rules.check_scope(self.ledger_id, scope)
        with self._transaction(session_name(scope, epoch), deciding) as session:
            yield session, self._lock(session, scope)

    @contextmanager
    def _leased(
        self, lease: ScopeLease, txn: SinkTxnId | None = None
    ) -> Iterator[tuple[Session, _ScopeRow]]:
        """Run a transaction in which *lease* is the one in force."""
        with self._writing(lease.scope, lease.epoch) as (session, known):
            rules.check_lease(lease, known.epoch, known.owner, txn)
            yield session, known

    def _lock(self, session: Session, scope: Scope) -> _ScopeRow:
        found = self._read_scope(session, statements.LOCK_SCOPE, scope)
        if found is None:
            session.run(statements.ENTER_SCOPE, _keys(scope))
            found = self._read_scope(session, statements.LOCK_SCOPE, scope)
        assert found is not None
        return found

    def _read_scope(self, session: Session, statement: str, scope: Scope) -> _ScopeRow | None:
        """Read the scope, with or without its lock, as *statement* says."""
        worded = statement.format_map(self._database.driver.words)
        found = session.run(worded, _keys(scope))
        return _ScopeRow.of(scope, found[0]) if found else None

    @contextmanager
    def _reading(self, scope: Scope) -> Iterator[Session]:
        """Run a transaction in which a scope of another ledger has no rows."""
        if scope.ledger != self.ledger_id:
            yield _NO_ROWS
            return
        with self._database.transaction("semel:read", TransactionMode.READ) as session:
            yield session


def session_name(scope: Scope, epoch: int | None) -> str:
    """Return the name under which a transaction writes, by which a successor finds it."""
    return f"semel:{scope.slug}:{'any' if epoch is None else epoch}"


class _NoRows:
    """The session for a scope of another ledger: every query returns no rows."""

    def run(self, statement: str, values: Mapping[str, Any] | None = None) -> list[Row]:
        return []


_NO_ROWS: Final = cast(Session, _NoRows())


@dataclass(frozen=True, slots=True)
class _ScopeRow:
    """The scope's row as read by a transaction, with the database's time."""

    scope: Scope
    epoch: int
    owner: Owner | None
    lease_until: int
    generation: int
    mark: SinkTxnId | None
    pruned: CycleId | None
    now: int

    @classmethod
    def of(cls, scope: Scope, row: Row) -> _ScopeRow:
        """Read a row of `LOCK_SCOPE`."""
        mark = pruned = None
        if row["mark_attempt"] is not None:
            cycle = CycleId(scope, row["mark_generation"], row["mark_batch"])
            mark = cycle.attempt(row["mark_attempt"])
        if row["pruned_generation"] is not None:
            pruned = CycleId(scope, row["pruned_generation"], row["pruned_batch"])
        with _reading_row(scope):
            owner = None if row["owner"] is None else Owner.from_json(json.loads(row["owner"]))
        plain = {name: row[name] for name in ("epoch", "lease_until", "generation", "now")}
        return cls(scope=scope, owner=owner, mark=mark, pruned=pruned, **plain)

    @property
    def left_seconds(self) -> float:
        """How long the lease still lasts."""
        if self.owner is None:
            return 0.0
        return max(0, self.lease_until - self.now) / MICROSECONDS

    def to_record(self) -> ScopeRecord:
        """Return the public part."""
        return ScopeRecord(
            self.scope, self.epoch, self.owner, self.left_seconds, self.mark, self.generation
        )


def _read_attempt(session: Session, txn: SinkTxnId) -> AttemptRecord | None:
    found = session.run(statements.READ_ATTEMPT, _txn_keys(txn))
    return _attempt_of(txn.scope, found[0]) if found else None


def _read_winner(session: Session, cycle: CycleId) -> SinkTxnId | None:
    """Return the cycle's committed attempt."""
    found = session.run(statements.READ_COMMITTED, _cycle_keys(cycle))
    return cycle.attempt(found[0]["attempt"]) if found else None


def _read_generations(session: Session, scope: Scope) -> list[Generation]:
    """Read the checkpoints of the scope, oldest first."""
    found = session.run(statements.LIST_GENERATIONS, _keys(scope))
    return [
        Generation(
            row["number"], row["checkpoint"], row["first_batch"], row["opened_at"] / MICROSECONDS
        )
        for row in found
    ]


def _add_generation(
    session: Session, known: _ScopeRow, checkpoint: str, first_batch: int
) -> Generation:
    """Write the next generation, and use it from now on."""
    number = len(_read_generations(session, known.scope)) + 1
    made = {"number": number, "checkpoint": checkpoint, "first_batch": first_batch}
    session.run(statements.ADD_GENERATION, {**_keys(known.scope), **made, "now": known.now})
    _use_generation(session, known.scope, number)
    return Generation(number, checkpoint, first_batch, known.now / MICROSECONDS)


def _use_generation(session: Session, scope: Scope, number: int) -> None:
    session.run(statements.USE_GENERATION, {**_keys(scope), "number": number})


def _read_ends(session: Session, scope: Scope) -> dict[tuple[str, str], tuple[Position, int]]:
    """Read the position of every partition, and the generation that wrote it."""
    return {
        (row["source"], row["source_partition"]): (
            Position(row["ends_at"], row["topic_id"]),
            row["generation"],
        )
        for row in session.run(statements.LIST_POSITIONS, _keys(scope))
    }


def _read_paths(session: Session, scope: Scope, batch: BatchRange | None) -> dict[str, set[str]]:
    """Read which of the batch's paths are committed; without a batch, every committed path."""
    found: dict[str, set[str]] = {}
    if batch is None:
        for row in session.run(statements.LIST_PATHS, _keys(scope)):
            found.setdefault(row["source"], set()).add(row["folder"] + row["name"])
        return found
    for source, paths in batch.paths.items():
        known = found.setdefault(source, set())
        for folder, names in _by_folder(paths).items():
            number = _find_folder(session, scope, source, folder)
            for start in range(0, 0 if number is None else len(names), PATHS_AT_ONCE):
                asked = names[start : start + PATHS_AT_ONCE]
                values = {f"name{at}": name for at, name in enumerate(asked)}
                named = ", ".join(f":{name}" for name in values)
                statement = statements.FIND_PATHS.format(names=named)
                listed = session.run(statement, {"folder": number, **values})
                known.update(folder + row["name"] for row in listed)
    return found


def _add_paths(session: Session, scope: Scope, paths: Mapping[str, Iterable[str]]) -> None:
    """Store files, by source, as committed."""
    for source, listed in paths.items():
        for folder, names in _by_folder(listed).items():
            number = _find_folder(session, scope, source, folder)
            if number is None:
                number = secrets.randbits(62)
                made = {"id": number, "source": source, "folder": folder}
                session.run(statements.ADD_FOLDER, {**_keys(scope), **made})
            rows = ({"folder": number, "name": name} for name in names)
            session.run_many(statements.ADD_PATH, rows)


def _find_folder(session: Session, scope: Scope, source: str, folder: str) -> int | None:
    wanted = {**_keys(scope), "source": source, "folder": folder}
    found = session.run(statements.FIND_FOLDER, wanted)
    return found[0]["id"] if found else None


def _by_folder(paths: Iterable[str]) -> dict[str, list[str]]:
    """Return the names by folder; a folder ends with its slash."""
    found: dict[str, list[str]] = {}
    for path in paths:
        head, slash, name = path.rpartition("/")
        found.setdefault(head + slash, []).append(name)
    return found


def _move(
    session: Session,
    scope: Scope,
    positions: Mapping[tuple[str, str], Position],
    generation: int,
) -> None:
    session.run_many(
        statements.MOVE_POSITION,
        (
            {
                **_keys(scope),
                "source": source,
                "partition": partition,
                "end": position.end,
                "topic_id": position.topic_id,
                "generation": generation,
            }
            for (source, partition), position in positions.items()
        ),
    )


def _add_attempt(
    session: Session, txn: SinkTxnId, epoch: int, state: CycleState, now: int, reason: str = ""
) -> None:
    values = {
        "epoch": epoch,
        "state": state.value,
        "reason": _text(reason),
        "now": now,
        "decided_at": now if state.is_decided else None,
    }
    session.run(statements.ADD_ATTEMPT, {**_txn_keys(txn), **values})


def _add_act(session: Session, known: _ScopeRow, who: str, act: str, why: str, detail: Any) -> None:
    done = {"who": _text(who), "act": _text(act), "why": _text(why), "detail": json.dumps(detail)}
    session.run(statements.ADD_ACT, {**_keys(known.scope), **done, "now": known.now})


def _raise_mark(session: Session, scope: Scope) -> None:
    """Move the mark to the highest finished cycle with no unfinished commit below it."""
    stuck = session.run(statements.FIRST_UNFINISHED, _keys(scope))
    if stuck:
        below = {"generation": stuck[0]["generation"], "batch": stuck[0]["batch"]}
        found = session.run(statements.LAST_COMMITTED_BELOW, {**_keys(scope), **below})
    else:
        found = session.run(statements.LAST_COMMITTED, _keys(scope))
    for row in found:
        mark = _txn_of(scope, row)
        session.run(statements.RAISE_MARK, _txn_keys(mark))


def _keys(scope: Scope) -> dict[str, Any]:
    return {"app": scope.app, "query": scope.query}


def _cycle_keys(cycle: CycleId) -> dict[str, Any]:
    return {**_keys(cycle.scope), "generation": cycle.generation, "batch": cycle.batch}


def _txn_keys(txn: SinkTxnId) -> dict[str, Any]:
    return {**_cycle_keys(txn.cycle), "attempt": txn.attempt}


def _txn_of(scope: Scope, row: Row) -> SinkTxnId:
    return CycleId(scope, row["generation"], row["batch"]).attempt(row["attempt"])


@contextmanager
def _reading_row(of: SinkTxnId | Scope) -> Iterator[None]:
    """Refuse a row with values that this code cannot have written."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        words = f"{of}: its row in the ledger was damaged, or changed by hand: restore a backup"
        raise NeedsOperator(words) from error


def _attempt_of(scope: Scope, row: Row) -> AttemptRecord:
    txn = _txn_of(scope, row)
    with _reading_row(txn):
        read = row["range_read"]
        return AttemptRecord(
            txn=txn,
            epoch=row["epoch"],
            state=CycleState(row["state"]),
            range=None if read is None else BatchRange.from_json(read),
            tokens={sink: dict(token) for sink, token in json.loads(row["tokens"]).items()},
            rows=dict(json.loads(row["row_counts"])),
            reason=row["reason"],
            planned_at=row["planned_at"] / MICROSECONDS,
            decided_at=_seconds(row["decided_at"]),
            finished_at=_seconds(row["finished_at"]),
        )


def _act_of(scope: Scope, row: Row) -> LedgerAct:
    """Read a row of an act."""
    with _reading_row(scope):
        at, detail = row["acted_at"] / MICROSECONDS, dict(json.loads(row["detail"]))
        return LedgerAct(scope, at, row["who"], row["act"], row["why"], detail)


def _text(words: str) -> str:
    """Return *words* without NUL, which PostgreSQL does not accept in a text."""
    return words.replace("\x00", "")


def _seconds(microseconds: int | None) -> float | None:
    return None if microseconds is None else microseconds / MICROSECONDS
