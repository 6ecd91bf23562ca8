"""What a receiver remembers: chunks, prepared transactions, and one proof per cycle.

Every act is one transaction that first locks its scope's row, so acts of a scope run one after
the other, in SQLite and in PostgreSQL alike.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final

from semel.errors import Misuse, reason_of, require
from semel.pipeline.txn import LABEL

sa: Any = require("sqlalchemy", "receiver")

_META: Final = sa.MetaData()
_SCOPES: Final = sa.Table(
    "semel_receiver_scope",
    _META,
    sa.Column("slug", sa.String(20), primary_key=True),
    sa.Column("ledger", sa.String(64)),
    sa.Column("app", sa.String(40)),
    sa.Column("query", sa.String(40)),
    sa.Column("sink", sa.String(40)),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("mark", sa.String(200)),
)
_CHUNKS: Final = sa.Table(
    "semel_receiver_chunk",
    _META,
    sa.Column("txn", sa.String(220), primary_key=True),
    sa.Column("task", sa.String(80), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("encoding", sa.String(10), nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
)
_PREPARED: Final = sa.Table(
    "semel_receiver_prepared",
    _META,
    sa.Column("txn", sa.String(220), primary_key=True),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("chunks", sa.Text, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)
_PROOFS: Final = sa.Table(
    "semel_receiver_proof",
    _META,
    # Keyed by the cycle: two attempts of a cycle can never both be committed.
    sa.Column("cycle", sa.String(120), primary_key=True),
    sa.Column("txn", sa.String(220), nullable=False),
    sa.Column("token", sa.Text, nullable=False),
    sa.Column("at", sa.Float, nullable=False),
)
_ROWS: Final = sa.Table(
    "semel_received",
    _META,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    sa.Column("cycle", sa.String(120), nullable=False),
    sa.Column("row", sa.Text, nullable=False),
)

# Rows that are in memory together.
_AT_ONCE: Final = 1_000

# The proofs of so many cycles are kept; of older ones only the mark tells.
_REMEMBERED: Final = 16

Apply = Callable[[Any, str, Iterator[dict[str, Any]]], None]
"""Gets the connection of the commit's transaction, the cycle, and its rows."""


class Refusal(Exception):
    """The receiver will not do it: the HTTP status, and the reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(status, reason)
        self.status = status
        self.reason = reason


def keep_rows(connection: Any, cycle: str, rows: Iterable[dict[str, Any]]) -> None:
    """Insert the rows of a cycle into the table ``semel_received``, as JSON."""
    rows = iter(rows)
    while found := [{"cycle": cycle, "row": json.dumps(row)} for row in islice(rows, _AT_ONCE)]:
        connection.execute(_ROWS.insert(), found)


class ReceiverStore:
    """The receiver's tables; *apply* writes a cycle's rows in the transaction of its commit."""

    def __init__(self, url: str, apply: Apply = keep_rows, validate: Apply | None = None) -> None:
        kind = sa.engine.make_url(url).get_backend_name()
        if kind not in ("sqlite", "postgresql"):
            raise Misuse(f"a receiver's store is SQLite or PostgreSQL, not {kind}")
        self.engine = sa.create_engine(
            url, poolclass=sa.pool.NullPool if kind == "sqlite" else None
        )
        if kind == "sqlite":
            sa.event.listen(self.engine, "connect", _own_transactions)
            sa.event.listen(self.engine, "begin", _begin_immediate)
        self._apply = apply
        self._validate = validate
        _META.create_all(self.engine)

    def close(self) -> None:
        """Close the connections."""
        self.engine.dispose()

    @contextmanager
    def _locked(self, slug: str) -> Iterator[Any]:
        """Begin a transaction that no other of this scope runs beside."""
        with self.engine.begin() as connection:
            lock = _SCOPES.update().where(_SCOPES.c.slug == slug).values(slug=slug)
            connection.execute(lock)
            yield connection

    def fence(self, slug: str, epoch: int, about: Mapping[str, str]) -> None:
        """Refuse older epochs of a scope from now on."""
        with self._locked(slug) as connection:
            known = self._scope(connection, slug)
            if known is None:
                new = {"slug": slug, "epoch": epoch, "mark": None, **about}
                connection.execute(_SCOPES.insert().values(**new))
            elif known.epoch > epoch:
                raise Refusal(409, f"the scope belongs to epoch {known.epoch}, not to {epoch}")
            else:
                change = _SCOPES.update().where(_SCOPES.c.slug == slug).values(epoch=epoch)
                connection.execute(change)

    def rename(self, old: str, new: str, epoch: int, about: Mapping[str, str]) -> None:
        """Give a scope's mark and epoch to another one; repeatable."""
        with self._locked(old) as connection:
            known, other = self._scope(connection, old), self._scope(connection, new)
            if known is not None and epoch < known.epoch:
                raise Refusal(409, f"epoch {epoch} was fenced by epoch {known.epoch}")
            if old != new and known is not None:
                if other is not None and other.mark:
                    raise Refusal(409, "the new name has committed here, too")
                connection.execute(_SCOPES.delete().filter_by(slug=new))
                newest = max(known.epoch, other.epoch if other is not None else 0)
                moved = _SCOPES.update().where(_SCOPES.c.slug == old)
                connection.execute(moved.values(slug=new, epoch=newest))
            connection.execute(_SCOPES.update().where(_SCOPES.c.slug == new).values(**about))

    def put_chunk(self, txn: str, task: str, number: int, body: bytes, encoding: str) -> str:
        """Store a chunk; the same again changes nothing, another one is refused."""
        digest = hashlib.sha256(body).hexdigest()
        where = {"txn": txn, "task": task, "number": number}
        with self._locked(txn.partition(".")[0]) as connection:
            query = sa.select(_CHUNKS.c.digest).filter_by(**where)
            known = connection.execute(query).scalar()
            if known is None:
                values = {**where, "digest": digest, "encoding": encoding, "body": body}
                connection.execute(_CHUNKS.insert().values(**values))
            elif known != digest:
                raise Refusal(
                    409, f"chunk {number} of task {task} was sent before, with other rows"
                )
        return digest

    def drop_task(self, txn: str, task: str) -> None:
        """Delete the chunks of a task, unless its transaction is prepared."""
        with self._locked(txn.partition(".")[0]) as connection:
            if self._prepared(connection, txn) is None:
                connection.execute(_CHUNKS.delete().filter_by(txn=txn, task=task))

    def prepare(self, txn: str, epoch: int, token: Any, chunks: Sequence[Sequence[Any]]) -> None:
        """Promise to commit exactly these chunks."""
        slug, cycle, text = txn.partition(".")[0], _cycle(txn), _text(token)
        with self._locked(slug) as connection:
            scope, proof = self._scope(connection, slug), self._proof(connection, cycle)
            newest = scope.epoch if scope is not None else 0
            if epoch < newest:
                raise Refusal(409, f"epoch {epoch} was fenced by epoch {newest}")
            known = self._prepared(connection, txn)
            if proof is not None:
                if proof.txn != txn:
                    raise Refusal(409, f"another attempt was committed: {proof.txn}")
                known = proof
            if known is not None:
                if known.token != text:
                    raise Refusal(409, "it was prepared before, with other rows")
                return
            if scope is not None and scope.mark and _order(txn) <= _order(f"{slug}.{scope.mark}"):
                raise Refusal(409, f"it is at or below the mark {scope.mark}")
            query = sa.select(_CHUNKS.c.task, _CHUNKS.c.number, _CHUNKS.c.digest).filter_by(txn=txn)
            have = {(task, number): digest for task, number, digest in connection.execute(query)}
            for task, number, digest, _ in chunks:
                if have.get((task, number)) != digest:
                    raise Refusal(410, f"chunk {number} of task {task} is not here")
            self._try(connection, txn, chunks)
            values = {"txn": txn, "token": text, "chunks": json.dumps(chunks), "at": time.time()}
            connection.execute(_PREPARED.insert().values(**values))

    def _try(self, connection: Any, txn: str, chunks: Sequence[Sequence[Any]]) -> None:
        """Refuse rows that the service would refuse after the decision; keeps nothing."""
        if self._validate is None:
            return
        try:
            with connection.begin_nested() as trial:
                self._validate(connection, _cycle(txn), self._rows(connection, txn, chunks))
                trial.rollback()
        except (Refusal, OSError, sa.exc.OperationalError):
            raise  # of the chunks, or of a service that does not answer now: not of the rows
        except Exception as error:
            words = reason_of(getattr(error, "orig", None) or error)
            raise Refusal(422, f"the service refuses the rows: {words}") from error

    def commit(self, txn: str, token: Any) -> None:
        """Apply the chunks, write the proof and raise the mark: one transaction."""
        slug, cycle, text = txn.partition(".")[0], _cycle(txn), _text(token)
        with self._locked(slug) as connection:
            proof, held = self._proof(connection, cycle), self._prepared(connection, txn)
            if proof is not None and proof.txn != txn:
                raise Refusal(409, f"another attempt was committed: {proof.txn}")
            known = proof or held
            if known is None:
                raise Refusal(410, "it is not prepared: never, aborted, or lost")
            if known.token != text:
                raise Refusal(409, "the token differs from what is held")
            if proof is not None:
                return
            proved = self._proved(connection, slug)
            if len(proved) >= _REMEMBERED and _order(txn) < _order(proved[0]):
                raise Refusal(409, f"it is below the oldest cycle that is remembered, {proved[0]}")
            rows = self._rows(connection, txn, json.loads(held.chunks))
            self._apply(connection, cycle, rows)
            values = {"cycle": cycle, "txn": txn, "token": text, "at": time.time()}
            connection.execute(_PROOFS.insert().values(**values))
            scope = self._scope(connection, slug)
            label = txn.partition(".")[2]
            if scope is not None and (
                scope.mark is None or _order(f"{slug}.{scope.mark}") < _order(txn)
            ):
                raised = _SCOPES.update().where(_SCOPES.c.slug == slug).values(mark=label)
                connection.execute(raised)
            self._forget(connection, txn)
            old = [_cycle(one) for one in proved[: 1 - _REMEMBERED] if _order(one) < _order(txn)]
            connection.execute(_PROOFS.delete().where(_PROOFS.c.cycle.in_(old[:_AT_ONCE])))

    def abort(self, txn: str) -> None:
        """Forget everything of an attempt that is not committed; leftovers of one that is, too."""
        with self._locked(txn.partition(".")[0]) as connection:
            proof = self._proof(connection, _cycle(txn))
            if proof is not None and proof.txn == txn:
                raise Refusal(409, f"{txn.partition('.')[2]} is committed")
            self._forget(connection, txn)

    def look_up(self, txn: str) -> dict[str, Any]:
        """Say what is known of an attempt."""
        with self.engine.begin() as connection:
            proof = self._proof(connection, _cycle(txn))
            if proof is not None and proof.txn == txn:
                return {"state": "visible", "evidence": "its proof is here", "since": proof.at}
            held = self._prepared(connection, txn)
            if held is not None and self._missing(connection, txn, json.loads(held.chunks)) is None:
                return {"state": "held", "evidence": "it is prepared", "since": held.at}
            why = "not prepared, or aborted" if held is None else "some of its chunks are lost"
            return {"state": "gone", "evidence": why}

    def pending(self, slug: str) -> list[dict[str, Any]]:
        """List every attempt of a scope of which something is stored but not committed."""
        with self.engine.begin() as connection:
            held = connection.execute(
                sa.select(_PREPARED.c.txn).where(_PREPARED.c.txn.startswith(f"{slug}."))
            ).scalars()
            found = dict.fromkeys(held, "held")
            staged = connection.execute(
                sa.select(_CHUNKS.c.txn).distinct().where(_CHUNKS.c.txn.startswith(f"{slug}."))
            ).scalars()
            for txn in staged:
                found.setdefault(txn, "staged")
            finished = connection.execute(
                sa.select(_PROOFS.c.txn).where(_PROOFS.c.txn.in_(list(found)))
            ).scalars()
            for txn in finished:
                found[txn] = "finished"
        return [{"txn": txn.partition(".")[2], "state": state} for txn, state in found.items()]

    def tidy(self, txn: str) -> None:
        """Delete the chunks that losing tasks of a committed attempt left."""
        with self._locked(txn.partition(".")[0]) as connection:
            proof = self._proof(connection, _cycle(txn))
            if proof is not None and proof.txn == txn:
                self._forget(connection, txn)

    def scopes(self) -> list[dict[str, Any]]:
        """List the scopes with their marks."""
        with self.engine.begin() as connection:
            return [dict(row._mapping) for row in connection.execute(sa.select(_SCOPES))]

    def _rows(
        self, connection: Any, txn: str, chunks: Sequence[Sequence[Any]]
    ) -> Iterator[dict[str, Any]]:
        if (missing := self._missing(connection, txn, chunks)) is not None:
            raise Refusal(410, f"chunk {missing} was lost")
        for task, number, *_ in chunks:
            query = sa.select(_CHUNKS.c.body, _CHUNKS.c.encoding)
            where = {"txn": txn, "task": task, "number": number}
            body, encoding = connection.execute(query.filter_by(**where)).one()
            raw: Any = io.BytesIO(body)
            for line in gzip.GzipFile(fileobj=raw) if encoding == "gzip" else raw:
                yield json.loads(line)

    def _missing(self, connection: Any, txn: str, chunks: Sequence[Sequence[Any]]) -> str | None:
        query = sa.select(_CHUNKS.c.task, _CHUNKS.c.number).filter_by(txn=txn)
        have = {(task, number) for task, number in connection.execute(query)}
        lost = [f"{number} of {task}" for task, number, *_ in chunks if (task, number) not in have]
        return lost[0] if lost else None

    def _forget(self, connection: Any, txn: str) -> None:
        for table in (_PREPARED, _CHUNKS):
            connection.execute(table.delete().where(table.c.txn == txn))

    def _scope(self, connection: Any, slug: str) -> Any:
        return connection.execute(sa.select(_SCOPES).filter_by(slug=slug)).first()

    def _prepared(self, connection: Any, txn: str) -> Any:
        return connection.execute(sa.select(_PREPARED).filter_by(txn=txn)).first()

    def _proved(self, connection: Any, slug: str) -> list[str]:
        """List the transactions of a scope that have a proof, in the order of their cycles."""
        query = sa.select(_PROOFS.c.txn).where(_PROOFS.c.cycle.startswith(f"{slug}."))
        return sorted(connection.execute(query).scalars(), key=_order)

    def _proof(self, connection: Any, cycle: str) -> Any:
        return connection.execute(sa.select(_PROOFS).filter_by(cycle=cycle)).first()


def _cycle(txn: str) -> str:
    return txn.rpartition(".")[0]


def _order(txn: str) -> tuple[int, int]:
    match = LABEL.fullmatch(_cycle(txn).partition(".")[2])
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _text(token: Any) -> str:
    return json.dumps(token, sort_keys=True)


def _own_transactions(connection: Any, _: Any) -> None:
    # Python's sqlite3 begins transactions of its own otherwise, and only before some statements.
    connection.isolation_level = None


def _begin_immediate(connection: Any) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE")
