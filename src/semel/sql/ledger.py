"""The ledger in a SQL database.

Every writing method is one transaction that first takes the lock of its
scope: writers of one scope take turns, and what the checks read stays true
until the commit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from semel.errors import InDoubt, LedgerUnavailable
from semel.lease import Owner, Takeover
from semel.pipeline import rules
from semel.pipeline.ledger import Act, AttemptRecord, Generation, Lease, ScopeRecord
from semel.pipeline.positions import Position, Positions
from semel.pipeline.sink import Token
from semel.pipeline.source import BatchRange
from semel.pipeline.states import CycleState, Decision
from semel.pipeline.txn import CycleId, Scope, SinkTxnId
from semel.sql import questions, rows, statements
from semel.sql.database import Database, Mode, Session
from semel.sql.rows import MICROSECONDS, ScopeRow, cycle_keys, keys, txn_keys


class SqlLedger:
    """A `semel.pipeline.ledger.Ledger`; may be shared by threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @property
    def ledger_id(self) -> str:
        """A random id given when the ledger was made; part of every scope."""
        return self._database.ledger_id

    @property
    def url(self) -> str:
        """Where the ledger is, without secrets."""
        return self._database.driver.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def exists(self) -> bool:
        """Tell whether the ledger is there, without making it: every other method would."""
        return self._database.exists()

    def acquire(
        self, scope: Scope, owner: Owner, seconds: float, takeover: Takeover = Takeover.WAIT
    ) -> Lease:
        """Become the owner of *scope* and bump its epoch."""
        with self._writing(scope) as (session, known):
            rules.check_takeover(scope, known.owner, known.left_seconds, owner, takeover)
            taken = {
                "epoch": known.epoch + 1,
                "owner": json.dumps(owner.to_json()),
                "until": known.now + round(seconds * MICROSECONDS),
            }
            session.run(statements.TAKE_LEASE, {**keys(scope), **taken})
        return Lease(scope, owner, known.epoch + 1, seconds)

    def renew(self, lease: Lease) -> None:
        """Prolong the lease by its length from now, on the ledger's clock."""
        with self._leased(lease) as (session, known):
            until = known.now + round(lease.seconds * MICROSECONDS)
            session.run(statements.RENEW_LEASE, {**keys(lease.scope), "until": until})

    def release(self, lease: Lease) -> None:
        """Let the next owner start at once; nothing happens if the lease is no longer ours."""
        with self._writing(lease.scope, lease.epoch) as (session, known):
            if (known.epoch, known.owner) == (lease.epoch, lease.owner):
                session.run(statements.RELEASE_LEASE, keys(lease.scope))

    def scope_record(self, scope: Scope) -> ScopeRecord | None:
        """Return what is known of *scope*; None if it never had an owner."""
        with self._reading(scope) as session:
            found = questions.scope_row(session, statements.READ_SCOPE, scope)
        return found.to_record() if found and found.epoch else None

    def scopes(self) -> list[Scope]:
        """List every scope that ever had an owner, by name."""
        with self._database.transaction("semel:read", Mode.READ) as session:
            found = session.run(statements.LIST_SCOPES)
        return [Scope(self.ledger_id, row["app"], row["query"]) for row in found]

    def generations(self, scope: Scope) -> list[Generation]:
        """List the checkpoints of *scope*, oldest first."""
        with self._reading(scope) as session:
            return questions.generations(session, scope)

    def open_generation(self, lease: Lease, checkpoint: str, first_batch: int = 0) -> Generation:
        """Return the newest generation of *checkpoint*, making it the next one if it is new."""
        with self._leased(lease) as (session, known):
            for opened in reversed(questions.generations(session, lease.scope)):
                if opened.checkpoint == checkpoint:
                    questions.use_generation(session, lease.scope, opened.number)
                    return opened
            return questions.next_generation(session, known, checkpoint, first_batch)

    def adopt_generation(
        self,
        lease: Lease,
        checkpoint: str,
        first_batch: int,
        positions: Mapping[tuple[str, str], Position],
        paths: Mapping[str, Collection[str]] | None = None,
    ) -> Generation:
        """Make *checkpoint* the next generation, whatever came before."""
        with self._leased(lease) as (session, known):
            opened = questions.next_generation(session, known, checkpoint, first_batch)
            session.run(statements.FORGET_POSITIONS, keys(lease.scope))
            questions.move(session, lease.scope, positions, opened.number)
            if paths is not None:
                session.run(statements.FORGET_PATHS, keys(lease.scope))
                questions.add_paths(session, lease.scope, paths)
            return opened

    def plan(self, lease: Lease, txn: SinkTxnId) -> None:
        """Record a new attempt as PLANNED; repeating it changes nothing."""
        with self._leased(lease, txn) as (session, known):
            attempt = questions.attempt(session, txn)
            winner = questions.winner(session, txn.cycle)
            rules.check_plan(txn, attempt, winner, known.mark, known.generation)
            if attempt is None:
                questions.add(session, txn, lease.epoch, CycleState.PLANNED, known.now)

    def set_range(self, lease: Lease, txn: SinkTxnId, batch: BatchRange) -> None:
        """Keep what the batch read with the undecided attempt; repeatable with the same range."""
        with self._leased(lease, txn) as (session, _):
            rules.check_range(txn, questions.attempt(session, txn), batch)
            session.run(statements.SET_RANGE, {**txn_keys(txn), "range": batch.to_json()})

    def set_prepared(
        self,
        lease: Lease,
        txn: SinkTxnId,
        tokens: Mapping[str, Token],
        rows: Mapping[str, int],
    ) -> None:
        """Keep every sink's token and move PLANNED to PREPARED; repeatable with the same tokens."""
        kept, counts = rules.as_json("a token", tokens), dict(rows)
        values = {"tokens": json.dumps(kept), "rows": json.dumps(counts)}
        with self._leased(lease, txn) as (session, _):
            rules.check_prepared(txn, questions.attempt(session, txn), kept, counts)
            session.run(statements.SET_PREPARED, {**txn_keys(txn), **values})

    def decide_commit(self, lease: Lease, txn: SinkTxnId) -> None:
        """Decide COMMIT and advance the positions to the range's end, by compare-and-set."""
        scope, generation = txn.scope, txn.cycle.generation
        with self._writing(lease.scope, lease.epoch, deciding=txn) as (session, known):
            attempt = questions.attempt(session, txn)
            if attempt is not None and attempt.state.is_committed:
                return
            rules.check_lease(lease, known.epoch, known.owner, txn)
            batch = (attempt and attempt.range) or BatchRange()
            ends = rules.comparable(questions.ends(session, scope), batch, generation)
            standing = Positions(ends, questions.committed_paths(session, scope, batch))
            winner = questions.winner(session, txn.cycle)
            batch = rules.check_commit(txn, attempt, winner, known.mark, standing)
            questions.move(session, scope, rules.next_positions(ends, batch), generation)
            questions.add_paths(session, scope, batch.paths)
            session.run(statements.DECIDE_COMMIT, {**txn_keys(txn), "now": known.now})

    def decide_abort(self, txn: SinkTxnId, reason: str = "") -> Decision:
        """Decide ABORT unless the attempt is decided; return the decision that stands."""
        # After a commit without an answer `Database` has dropped its connection, and this one
        # waits on the scope's lock until the server has settled what the old one sent.
        with self._writing(txn.scope, deciding=txn) as (session, known):
            attempt = questions.attempt(session, txn)
            if attempt is None:
                rules.check_unpruned(txn, known.pruned)
                questions.add(session, txn, 0, CycleState.ABORTED, known.now, reason)
            elif attempt.state.is_committed:
                return Decision.COMMIT
            elif not attempt.state.is_decided:
                why = {"now": known.now, "reason": rows.text(reason)}
                session.run(statements.DECIDE_ABORT, {**txn_keys(txn), **why})
            return Decision.ABORT

    def abort_undecided(self, lease: Lease, reason: str = "") -> list[SinkTxnId]:
        """Decide ABORT for every undecided attempt of an older epoch, all at once."""
        with self._leased(lease) as (session, known):
            why = {"now": known.now, "reason": rows.text(reason), "epoch": lease.epoch}
            found = session.run(statements.ABORT_UNDECIDED, {**keys(lease.scope), **why})
        given_up = [rows.txn_of(lease.scope, row) for row in found]
        return sorted(given_up, key=lambda txn: (txn.cycle, txn.attempt))

    def finish(self, lease: Lease, txn: SinkTxnId) -> None:
        """Move COMMITTED to FINISHED and raise the mark; repeatable."""
        with self._leased(lease, txn) as (session, known):
            attempt = questions.attempt(session, txn)
            rules.check_finish(txn, attempt)
            if attempt is not None and attempt.state is CycleState.COMMITTED:
                session.run(statements.FINISH, {**txn_keys(txn), "now": known.now})
                questions.raise_mark(session, txn.scope)

    def attempt(self, txn: SinkTxnId) -> AttemptRecord | None:
        """Return one attempt; None if unknown or pruned."""
        with self._reading(txn.scope) as session:
            return questions.attempt(session, txn)

    def attempts(self, cycle: CycleId) -> list[AttemptRecord]:
        """List a cycle's attempts, oldest first."""
        with self._reading(cycle.scope) as session:
            found = session.run(statements.LIST_CYCLE, cycle_keys(cycle))
        return [rows.attempt_of(cycle.scope, row) for row in found]

    def committed(self, cycle: CycleId) -> AttemptRecord | None:
        """Return the cycle's committed attempt, if it has one that is not pruned."""
        with self._reading(cycle.scope) as session:
            found = session.run(statements.READ_COMMITTED, cycle_keys(cycle))
        return rows.attempt_of(cycle.scope, found[0]) if found else None

    def open_attempts(self, scope: Scope) -> list[AttemptRecord]:
        """List what is PLANNED, PREPARED or COMMITTED, in the order of cycles."""
        with self._reading(scope) as session:
            found = session.run(statements.LIST_OPEN, keys(scope))
        return [rows.attempt_of(scope, row) for row in found]

    def positions(self, scope: Scope, batch: BatchRange | None = None) -> Positions:
        """Return the positions; of file sources, which paths of *batch* are committed."""
        with self._reading(scope) as session:
            ends = questions.ends(session, scope)
            paths = questions.committed_paths(session, scope, batch)
        return Positions({where: position for where, (position, _) in ends.items()}, paths)

    def history(self, scope: Scope, limit: int = 50) -> list[AttemptRecord]:
        """List the newest attempts, newest first."""
        with self._reading(scope) as session:
            found = session.run(statements.LIST_NEWEST, {**keys(scope), "limit": limit})
        return [rows.attempt_of(scope, row) for row in found]

    def prune(self, scope: Scope, keep: int) -> int:
        """Forget finished and aborted attempts below the mark but the newest *keep* cycles'."""
        rules.check_keep(keep)
        with self._writing(scope) as (session, known):
            if known.mark is None:
                return 0
            # The mark's own cycle is the newest of them, and always kept.
            newest = {**cycle_keys(known.mark.cycle), "keep": max(keep, 1)}
            found = session.run(statements.FIRST_TO_PRUNE, newest)
            if not found:
                return 0
            top = CycleId(scope, found[0]["generation"], found[0]["batch"])
            gone = session.run(statements.PRUNE, cycle_keys(top))
            cycles = [CycleId(scope, row["generation"], row["batch"]) for row in gone]
            if cycles:
                highest = max([*cycles, known.pruned or cycles[0]])
                session.run(statements.SET_PRUNED, cycle_keys(highest))
            return len(gone)

    def record_act(self, scope: Scope, who: str, act: str, why: str, detail: Any = None) -> None:
        """Keep what an operator did."""
        kept = json.dumps(rules.as_json("the detail of an act", detail or {}))
        with self._writing(scope) as (session, known):
            done = {"who": rows.text(who), "act": rows.text(act), "why": rows.text(why)}
            when = {"detail": kept, "now": known.now}
            session.run(statements.ADD_ACT, {**keys(scope), **done, **when})

    def acts(self, scope: Scope) -> list[Act]:
        """List what operators did, newest first."""
        with self._reading(scope) as session:
            found = session.run(statements.LIST_ACTS, keys(scope))
        return [rows.act_of(scope, row) for row in found]

    def close(self) -> None:
        """Give the connection back; the ledger can be used again afterwards."""
        self._database.close()

    @contextmanager
    def _writing(
        self, scope: Scope, epoch: int | None = None, deciding: SinkTxnId | None = None
    ) -> Iterator[tuple[Session, ScopeRow]]:
        """Run a transaction that holds the scope's lock.

        Only of a decision it matters whether a lost answer was yes: everything else is
        simply done again.
        """
        rules.check_scope(self.ledger_id, scope)
        try:
            with self._database.transaction(session_name(scope, epoch), Mode.WRITE) as session:
                yield session, self._lock(session, scope)
        except InDoubt as error:
            if deciding is not None:
                raise InDoubt(f"{deciding}: {error}") from error
            raise LedgerUnavailable(self.url, "the connection was lost") from error

    @contextmanager
    def _leased(
        self, lease: Lease, txn: SinkTxnId | None = None
    ) -> Iterator[tuple[Session, ScopeRow]]:
        """Run a transaction in which *lease* is the one in force."""
        with self._writing(lease.scope, lease.epoch) as (session, known):
            rules.check_lease(lease, known.epoch, known.owner, txn)
            yield session, known

    def _lock(self, session: Session, scope: Scope) -> ScopeRow:
        found = questions.scope_row(session, statements.LOCK_SCOPE, scope)
        if found is None:
            session.run(statements.ENTER_SCOPE, keys(scope))
            found = questions.scope_row(session, statements.LOCK_SCOPE, scope)
        assert found is not None
        return found

    @contextmanager
    def _reading(self, scope: Scope) -> Iterator[Session]:
        """Run a transaction in which another ledger's scope is simply not there."""
        if scope.ledger != self.ledger_id:
            yield questions.NOTHING
            return
        with self._database.transaction("semel:read", Mode.READ) as session:
            yield session


def session_name(scope: Scope, epoch: int | None) -> str:
    """Say in whose name a transaction writes, so that a successor can tell it."""
    return f"semel:{scope.slug}:{'any' if epoch is None else epoch}"
