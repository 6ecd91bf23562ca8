"""A sink's access to its database: sessions, fences, locks and held transactions.

A held transaction has two advisory locks, one for its attempt and one for its
cycle.  A process that needs one of them ends the session that holds it, if that
session has the same or an older epoch: its rows are staged, and the transaction
can be run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus

from semel.errors import Fenced, NeedsOperator, Permanent, Retryable
from semel.pipeline.txn import Scope, SinkTxnId
from semel.postgres.books import Known, SinkBooks, lock_key, run
from semel.postgres.connect import (
    LOCK_NOT_AVAILABLE,
    Address,
    Connection,
    Purpose,
    application_name,
    epoch_of,
    pool,
    session,
    translated,
)
from semel.postgres.statements import literal

_IDLE: Final = TransactionStatus.IDLE
_GONE: Final = TransactionStatus.UNKNOWN

_POLL_SECONDS: Final = 0.02
_FENCE_SECONDS: Final = 30.0
_END_MILLIS: Final = 500

_HOLDERS: Final = """
SELECT DISTINCT l.pid, a.application_name, a.usename = session_user
  FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
 WHERE l.pid <> pg_backend_pid()
   AND l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
   AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
   AND (l.classid::bigint << 32 | l.objid::bigint) = ANY (%s)
"""


class SinkDatabase:
    """One sink's access to its database; pickles without its connections."""

    def __init__(
        self, sink: str, address: Callable[[], Address], schema: str, lock_seconds: float
    ) -> None:
        self.sink = sink
        self.books = SinkBooks(schema, sink)
        self.lock_seconds = lock_seconds
        self._address = address
        self._epochs: dict[Scope, int] = {}
        self._held: dict[SinkTxnId, Connection] = {}
        self._seals: dict[SinkTxnId, Mapping[str, str]] = {}
        self._is_ready = False

    def join(self, leader: SinkDatabase) -> None:
        """Share the held transactions of another sink of the same database."""
        self._held, self._seals = leader._held, leader._seals

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_held": {}, "_seals": {}, "_is_ready": False}

    @property
    def address(self) -> Address:
        """The address of the database, with the current password."""
        return self._address()

    def epoch(self, scope: Scope) -> int:
        """Return the epoch of this object's fence; 0 if there is none."""
        return self._epochs.get(scope, 0)

    def application(self, scope: Scope | None) -> str:
        """Return the name of this owner's sessions."""
        return application_name(scope, self.epoch(scope) if scope else 0)

    @contextmanager
    def session(self, scope: Scope | None = None) -> Iterator[Connection]:
        """Lend a connection; create semel's tables, and translate PostgreSQL's errors."""
        with self.asking(scope) as connection:
            self._get_ready(connection)
            yield connection

    @contextmanager
    def asking(self, scope: Scope | None = None) -> Iterator[Connection]:
        """Lend a connection for reading only; creates no tables, see `has_books`."""
        with (
            translated(f"sink {self.sink}"),
            session(self.address, self.application(scope)) as connection,
        ):
            yield connection

    @contextmanager
    def another(self, scope: Scope) -> Iterator[Connection]:
        """Lend a second connection for one statement, beside a held one, even at the limit."""
        with session(self.address, self.application(scope), Purpose.STATEMENT) as connection:
            yield connection

    def has_books(self, connection: Connection) -> bool:
        """Return whether semel's tables exist; before the first owner they do not."""
        return self._is_ready or self.books.exist(connection)

    def _get_ready(self, connection: Connection) -> None:
        if not self._is_ready:
            self.books.create(connection)
            self._is_ready = True

    # Fencing

    def fence(self, scope: Scope, epoch: int) -> None:
        """End the sessions of older epochs, and refuse them from now on."""
        deadline = time.monotonic() + _FENCE_SECONDS
        with (
            translated(f"sink {self.sink}"),
            session(self.address, application_name(scope, epoch)) as connection,
        ):
            self._get_ready(connection)
            while not self._try_fence(connection, scope, epoch):
                if time.monotonic() > deadline:
                    raise Retryable(
                        f"sink {self.sink}: a session of an older owner of {scope} holds the "
                        f"fence and does not end; end it (see application_name in pg_stat_activity)"
                    )
        self._epochs[scope] = epoch

    def check_fence(self, scope: Scope) -> None:
        """Raise if a newer owner has ended this owner's session.

        Raises:
            Fenced: there is a newer owner.  Without an answer nothing is raised.
        """
        with (
            suppress(Retryable, Permanent),
            translated(f"sink {self.sink}"),
            # More connections of the pool may have been ended, too.
            closing(self.address.connect(self.application(scope))) as connection,
        ):
            self._check_newest(connection, scope, self.epoch(scope))

    def _check_newest(self, connection: Connection, scope: Scope, mine: int) -> int | None:
        """Return the newest epoch; raise Fenced if it is newer than *mine*."""
        table, where = self.books.table("sink_fence"), self.books.where(scope)
        seen = run(connection, [f"SELECT epoch FROM {table} WHERE {where}"])[0]
        newest: int | None = seen[0][0] if seen else None
        if newest is not None and newest > mine:
            raise Fenced(self._fenced(scope, mine, newest))
        return newest

    def _try_fence(self, connection: Connection, scope: Scope, epoch: int) -> bool:
        table = self.books.table("sink_fence")
        newest = self._check_newest(connection, scope, epoch)
        self._end_older(connection, scope, epoch)
        if newest == epoch:
            return True  # an update would wait for our own held transactions, which share-lock it
        names = [scope.slug, self.sink, scope.ledger, scope.app, scope.query]
        try:
            run(
                connection,
                [
                    "BEGIN",
                    "SET LOCAL lock_timeout = '500ms'",
                    f"INSERT INTO {table} AS known (scope, sink, ledger, app, query, epoch) "
                    f"VALUES ({', '.join(map(literal, names))}, {epoch}) "
                    f"ON CONFLICT (scope, sink) DO UPDATE SET epoch = EXCLUDED.epoch "
                    f"WHERE known.epoch < EXCLUDED.epoch",
                    "COMMIT",
                ],
            )
        except psycopg.Error as error:
            connection.execute("ROLLBACK")
            if error.sqlstate != LOCK_NOT_AVAILABLE:
                raise
            return False
        self._check_newest(connection, scope, epoch)
        return True

    def _end_older(self, connection: Connection, scope: Scope, epoch: int) -> None:
        # Sessions of other roles may have any name: the fence row is the fence, and they cannot
        # lock it.
        sessions = connection.execute(
            "SELECT pid, application_name FROM pg_catalog.pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid() "
            "AND usename = session_user AND starts_with(application_name, %s)",
            [f"semel:{scope.slug}:"],
        ).fetchall()
        for pid, name in sessions:
            theirs = epoch_of(name, scope)
            if theirs is not None and theirs < epoch:
                connection.execute("SELECT pg_terminate_backend(%s, %s)", [pid, _END_MILLIS])

    def _fenced(self, scope: Scope, mine: int, newest: int) -> str:
        return (
            f"sink {self.sink}: scope {scope} belongs to epoch {newest}, this process holds "
            f"{mine}; it was fenced and must stop"
        )

    # Transactions

    def begin(
        self,
        connection: Connection,
        txn: SinkTxnId,
        books: SinkBooks,
        *,
        as_owner: bool = False,
        with_cycle: bool = False,
    ) -> dict[str, Known]:
        """Begin a transaction with the attempt's locks; return its records, by sink.

        *as_owner* checks the fence, and locks it until the transaction ends; *with_cycle*
        locks the cycle against its other attempts, too.

        Raises:
            Fenced: a newer owner exists.
            Retryable: a newer owner holds the lock.
        """
        keys = [self._lock_key(txn, sink) for sink in books.sinks]
        if with_cycle:
            slug, cycle = txn.scope.slug, txn.cycle.label
            keys += [lock_key("cycle", slug, sink, cycle) for sink in books.sinks]
        fence = f"SELECT epoch FROM {books.table('sink_fence')} " + (
            f"WHERE {books.where(txn.scope)} FOR SHARE" if as_owner else "WHERE false"
        )
        tried = ", ".join(f"pg_try_advisory_xact_lock({key})" for key in keys)
        statements = [
            *self._begin,
            fence,
            f"SELECT {tried}",
            *books.questions(txn),
        ]
        deadline = time.monotonic() + self.lock_seconds
        is_foreign = False
        while True:
            _, _, epochs, locked, *answers = run(connection, statements)
            mine = self.epoch(txn.scope)
            newest = max((epoch for (epoch,) in epochs), default=0)
            if newest > mine:
                connection.execute("ROLLBACK")
                raise Fenced(self._fenced(txn.scope, mine, newest))
            # A lock that another role has taken keeps no session of this one out; the key of
            # the proof decides between two attempts, with or without the lock.
            if all(locked[0]) or is_foreign:
                return books.known(txn, answers)
            connection.execute("ROLLBACK")
            is_foreign = self._evict(connection, txn.scope, keys)
            if time.monotonic() > deadline:
                raise Retryable(f"sink {self.sink}: {txn} is held by another session")
            time.sleep(_POLL_SECONDS)

    def begin_together(
        self, connection: Connection, txns: Sequence[SinkTxnId]
    ) -> dict[SinkTxnId, Known]:
        """Begin a transaction with the locks of those of *txns* that no other session holds."""
        tried = ", ".join(
            f"pg_try_advisory_xact_lock({self._lock_key(txn, self.sink)})" for txn in txns
        )
        asked = [question for txn in txns for question in self.books.questions(txn)]
        _, _, locked, *answers = run(connection, [*self._begin, f"SELECT {tried}", *asked])
        each = len(answers) // len(txns)
        return {
            txn: self.books.known(txn, answers[number * each : (number + 1) * each])[self.sink]
            for number, (txn, is_ours) in enumerate(zip(txns, locked[0], strict=True))
            if is_ours
        }

    @property
    def _begin(self) -> tuple[str, str]:
        return "BEGIN", f"SET LOCAL lock_timeout = '{int(self.lock_seconds * 1000)}ms'"

    def _lock_key(self, txn: SinkTxnId, sink: str) -> int:
        return lock_key("attempt", txn.scope.slug, sink, txn.label)

    def _evict(self, connection: Connection, scope: Scope, keys: Sequence[int]) -> bool:
        """End our sessions that hold *keys*; return whether only other roles hold them.

        If no session holds them any more, another process of ours may take them again.
        """
        ours = {held.info.backend_pid: txn for txn, held in self._held.items() if not held.closed}
        holders = connection.execute(_HOLDERS, [list(keys)]).fetchall()
        for pid, name, is_ours in holders:
            if not is_ours:
                continue
            theirs = epoch_of(name, scope)
            if pid in ours:
                self.release(ours[pid])
            elif theirs is not None and theirs <= self.epoch(scope):
                connection.execute("SELECT pg_terminate_backend(%s)", [pid])
        return bool(holders) and not any(is_ours for _, _, is_ours in holders)

    # Held transactions

    def take(self, scope: Scope) -> Connection:
        """Lend a connection beyond the call; the caller must `give_back` or `hold` it."""
        return pool().take(self.address, self.application(scope))

    @contextmanager
    def taken(self, scope: Scope) -> Iterator[Connection]:
        """Lend a connection as `session` does, without translating errors; roll back at the end."""
        connection = self.take(scope)
        try:
            self._get_ready(connection)
            yield connection
        finally:
            give_back(connection)

    def hold(self, txn: SinkTxnId, connection: Connection, seals: Mapping[str, str]) -> None:
        """Store an open transaction, with the seals of its tokens, until it is over."""
        self._held[txn] = connection
        self._seals[txn] = seals

    def held(self, txn: SinkTxnId, seals: Mapping[str, str]) -> Connection | None:
        """Return and remove the open transaction of *txn*, if this process still has it.

        Raises:
            NeedsOperator: a token differs from what was prepared; nothing is removed.
        """
        known = self._seals.get(txn, {})
        for sink, seal in seals.items():
            if txn in self._held and known.get(sink) != seal:
                raise NeedsOperator(f"{txn}: the token of {sink} differs from what was prepared")
        self._seals.pop(txn, None)
        connection = self._held.pop(txn, None)
        if connection is not None and connection.closed:
            give_back(connection)
            return None
        return connection

    def release(self, txn: SinkTxnId) -> None:
        """Roll back an open transaction; its rows stay staged."""
        self._seals.pop(txn, None)
        connection = self._held.pop(txn, None)
        if connection is not None:
            give_back(connection)

    def close(self) -> None:
        """Roll back held transactions and close idle connections."""
        for txn in [*self._held]:
            self.release(txn)
        pool().close_idle(database=self.address.database)


def give_back(connection: Connection) -> None:
    """Roll back, and return a connection to the pool."""
    with suppress(psycopg.Error):
        if connection.info.transaction_status not in (_IDLE, _GONE):
            connection.execute("ROLLBACK")
    pool().give_back(connection)
