"""The writer of one task's rows: fits them to the target, encodes and copies them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakValueDictionary

import psycopg
from psycopg.abc import PQGen
from psycopg.pq.abc import PGconn
from psycopg.waiting import Ready, Wait

from semel.arrow.tally import schema_to_text, tally
from semel.crashpoints import CrashPoint, reach
from semel.errors import Permanent, Retryable, SemelError, require
from semel.pipeline.sink import Batch, Receipt, StageAnew, Tally
from semel.pipeline.txn import SinkTxnId
from semel.postgres.books import run
from semel.postgres.connect import (
    Address,
    Connection,
    is_of_a_row,
    pool,
    session,
    translated,
    words,
)
from semel.postgres.encode import (
    HEADER,
    TRAILER,
    EncodedColumn,
    encode_rows,
    has_longer,
    json_text,
    nothing,
    plain,
    texts,
)
from semel.postgres.schema import Fitted, TargetTable, fit
from semel.postgres.statements import quoted

pa: Any = require("pyarrow", "postgres")
pc: Any = require("pyarrow.compute", "postgres")

# The rows encoded at once: enough for numpy to be fast, few enough for memory.
_MOST_ROWS: Final = 20_000
_MOST_BYTES: Final = 8 * 2**20


class RowEncoder:
    """Encodes the batches of one task and counts their rows."""

    def __init__(
        self,
        target: TargetTable,
        schema: Any,
        filled: Sequence[str] = (),
        last_field: bytes = b"",
        key: Sequence[str] = (),
        *,
        keeps_refused: bool = False,
    ) -> None:
        self.target = target
        self.schema = schema
        self.tally = Tally()
        self.fitted = fit(target, schema, filled)
        self._last_field = last_field
        self._key = key
        self.keeps_refused = keeps_refused
        """Whether a row that cannot be encoded is staged as JSON, with the reason."""

        self._began = False
        self._was_cut = False

    @property
    def has_begun(self) -> bool:
        """Whether the header of binary COPY was returned."""
        return self._began

    @property
    def is_exact(self) -> bool:
        """Whether the rows can be read back as they were written."""
        return not self._was_cut and all(fitted.wire.is_exact for fitted in self.fitted)

    def detail(self) -> dict[str, Any]:
        """Describe the columns for a receipt."""
        columns = [
            [f.column.name, f.column.type.cast_sql if f.wire.is_cast else ""] for f in self.fitted
        ]
        numbered = [f.column.name for f in self.fitted if f.column.is_identity_always]
        return {
            "columns": columns,
            "numbered": numbered,
            "schema": schema_to_text(self.schema) if self.is_exact else "",
        }

    def chunks(self, batch: Batch) -> Iterator[memoryview | bytes]:
        """Encode a batch, in parts of bounded size.

        Raises:
            Permanent: a value does not fit into its column.
        """
        if not self._began:
            self._began = True
            yield HEADER
        self.tally += tally(batch)
        rows = batch.num_rows
        step = max(1, min(_MOST_ROWS, rows * _MOST_BYTES // max(1, batch.nbytes)))
        for begin in range(0, rows, step):
            part = batch.slice(begin, step)
            fields = self._fields(part)
            yield encode_rows(fields, part.num_rows, self._last_field)

    def _fields(self, part: Batch) -> list[EncodedColumn]:
        if not self.keeps_refused:
            return [self._encoded(f, part, i) for i, f in enumerate(self.fitted)]
        refused: dict[int, str] = {}
        for i, fitted in enumerate(self.fitted):
            kind = f"column {quoted(fitted.column.name)} ({fitted.column.type.sql})"
            for place, why in _all_refused(fitted, plain(part.column(i))):
                refused.setdefault(place, f"{kind}: {why}")
        if not refused:
            nulls = nothing(None)
            return [*(self._encoded(f, part, i) for i, f in enumerate(self.fitted)), nulls, nulls]
        self._was_cut = True  # what is visible will not be what was staged
        is_good = pa.array([place not in refused for place in range(part.num_rows)])
        kept = part.from_arrays(
            [pc.if_else(is_good, plain(c), pa.scalar(None, plain(c).type)) for c in part.columns],
            names=part.schema.names,
        )
        rows = {place: json_text(part.slice(place, 1).to_pylist()[0]) for place in refused}
        notes = (
            pa.array([note.get(place) for place in range(part.num_rows)], pa.string())
            for note in (refused, rows)
        )
        return [
            *(self._encoded(f, kept, i) for i, f in enumerate(self.fitted)),
            *(texts(note) for note in notes),
        ]

    def _encoded(self, fitted: Fitted, part: Batch, place: int) -> Any:
        values, most = plain(part.column(place)), fitted.wire.most_characters
        if most is not None and not self._was_cut:
            self._was_cut = has_longer(values, most)
        try:
            return _encoded(fitted, values)
        except ValueError as error:  # Arrow's errors about values are ValueErrors
            name = quoted(fitted.column.name)
            row = _named(part.slice(_first_refused(fitted, values), 1), self._key)
            # A traceback with the cause would quote the value.
            raise Permanent(
                f"table {self.target.name}, column {name} ({fitted.column.type.sql}): "
                f"{_why(error)}{row}"
            ) from None


NOT_CONVERTED: Final = "a value is out of range, or cannot be converted"


def _encoded(fitted: Fitted, values: Any) -> Any:
    most = fitted.wire.most_characters
    if most is not None and has_longer(values, most, spaces=False):
        raise ValueError(f"a text has more than {most} characters")
    return fitted.wire.encode(values)


def _why(error: ValueError) -> str:
    """Return our own words; Arrow's text quotes the value."""
    return NOT_CONVERTED if isinstance(error, pa.ArrowException) else str(error)


def _all_refused(fitted: Fitted, values: Any, begin: int = 0) -> Iterator[tuple[int, str]]:
    """Yield the place of every value that cannot be encoded, and why."""
    try:
        _encoded(fitted, values)
    except ValueError as error:
        if len(values) == 1:
            yield begin, _why(error)
            return
        middle = len(values) // 2
        yield from _all_refused(fitted, values.slice(0, middle), begin)
        yield from _all_refused(fitted, values.slice(middle), begin + middle)


def _first_refused(fitted: Fitted, values: Any) -> int:
    """Return the place of the first value that cannot be encoded."""
    low, high = 0, len(values)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            _encoded(fitted, values.slice(low, middle - low))
        except ValueError:
            high = middle
        else:
            low = middle
    return low


def _named(row: Batch, key: Sequence[str]) -> str:
    """Return a row's key, in words."""
    if not key or not set(key) <= set(row.schema.names):
        return ""
    values = ", ".join(str(row.column(name)[0].as_py()) for name in key)
    return f"; row ({', '.join(key)}) = ({values})"


@dataclass(frozen=True, slots=True)
class TaskStager:
    """The executor's side: every task attempt has a place of its own for its rows."""

    place: Callable[[TaskStager, str, str], TaskPlace]
    address: Address
    application: str
    schema: str
    sink: str
    target: TargetTable
    txn: SinkTxnId
    epoch: int
    filled: tuple[str, ...]
    """The column for the cycle's name, if there is one: semel fills it itself."""

    lock_seconds: float
    key: tuple[str, ...] = ()
    """The columns that name a row in errors."""

    keeps_refused: bool = False
    """Whether rows that cannot be encoded are staged for the reject table."""

    shared: str = ""
    """Equal for the sinks that write in one transaction; empty for a sink alone."""

    def open(self, task: str) -> TaskWriter:
        """Start to stage for one task attempt; nothing happens before the first row."""
        if not self.shared:
            alone = TaskSession(self.address, self.application, self.sink)
            return TaskWriter(alone, self.place(self, task, self.sink))
        key = (self.address.database, self.application, self.shared, self.place, self.txn, task)
        found = _SESSIONS.get(key)
        if found is None or found.is_over:
            found = _SESSIONS[key] = TaskSession(self.address, self.application, self.sink)
        return TaskWriter(found, self.place(self, task, found.first))


class TaskPlace(Protocol):
    """Where one task attempt's rows go: its own table, or a prepared transaction."""

    mode: str
    sink: str
    task: str
    name: str

    def fit(self, schema: Any) -> RowEncoder:
        """Fit rows of *schema* to the target."""

    @property
    def opening(self) -> Sequence[str]:
        """The statements that begin the transaction."""

    def creating(self, rows: RowEncoder) -> Sequence[str]:
        """Return the statements before the first row."""

    def copying(self, rows: RowEncoder) -> str:
        """Return the statement that copies."""

    def record(self, tally: Tally) -> str:
        """Return the statement that records the rows in the same transaction."""

    @property
    def closing(self) -> str:
        """The statement that ends the transaction, so that its rows survive this process."""

    def closed(self) -> None:
        """The transaction has ended."""

    def undo(self, connection: Connection) -> None:
        """Remove the rows after `closing`."""


class TaskSession:
    """The connection and the transaction of one task attempt, for one sink or several.

    One sink copies at a time: the copy of another one ends first, and goes on with a new
    statement.  The last writer that finishes ends the transaction.
    """

    def __init__(self, address: Address, application: str, first: str) -> None:
        self._address = address
        self._application = application
        self.first = first
        """The sink that has opened it: a task that stages one sink after another has several."""

        self._writing = 0
        self._connection: Connection | None = None
        self._copying: Any = None
        self._copy: psycopg.Copy | None = None
        self._copier: TaskPlace | None = None
        self._finished: list[TaskPlace] = []
        self._records: list[str] = []
        self._is_durable = False
        self.is_over = False
        """Committed, or discarded."""

    def join(self) -> None:
        """Wait for one more writer before the transaction ends."""
        self._writing += 1

    def create(self, place: TaskPlace, rows: RowEncoder) -> None:
        """Make the place for a writer's rows; begin the transaction if it is the first."""
        self._end_copy()
        self._check()
        statements = place.creating(rows)
        if self._connection is None:
            self._connection = pool().take(self._address, self._application)
            statements = [*place.opening, *statements]
        if statements:
            run(self._connection, statements)

    def copy(self, place: TaskPlace, rows: RowEncoder) -> psycopg.Copy:
        """Return the open copy of this writer."""
        if self._copy is not None and self._copier is place:
            return self._copy
        self._end_copy()
        self._check()
        assert self._connection is not None
        self._copier = place
        self._copying = self._connection.cursor().copy(place.copying(rows).encode())
        copy: psycopg.Copy = self._copying.__enter__()
        self._copy = copy
        if rows.has_begun:
            copy.write(HEADER)
        return copy

    def _end_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is None or self._copier is None:
            return
        with _translated(self._copier):
            copy.write(TRAILER)
            copying, self._copying = self._copying, None
            copying.__exit__(None, None, None)

    def finish(self, place: TaskPlace, tally: Tally | None) -> None:
        """Record a writer's rows; the last writer makes everything durable."""
        self._end_copy()
        self._check()
        self._writing -= 1
        if tally is not None:
            reach(CrashPoint.POSTGRES_STAGE_COPIED, place.sink)
            self._records.append(place.record(tally))
            self._finished.append(place)
        if self._writing > 0:
            return
        if self._connection is not None:
            run(self._connection, [*self._records, self._finished[0].closing])
            pool().give_back(self._connection)
            for each in self._finished:
                each.closed()
        self._is_durable = self.is_over = True

    def _check(self) -> None:
        if self.is_over:
            raise Retryable("the task's transaction was discarded with another sink's rows")

    def discard(self, place: TaskPlace) -> None:
        """Drop the rows of all writers, or this one's if the transaction has ended."""
        if not self.is_over:
            self.is_over = True
            if self._connection is not None:
                abandon(self._connection, self._copying)
        elif self._is_durable and place in self._finished:
            with session(self._address, self._application) as another:
                place.undo(another)


# The sessions of tasks with several sinks: their writers find each other here.
_SESSIONS: WeakValueDictionary[Hashable, TaskSession] = WeakValueDictionary()


class TaskWriter:
    """One task attempt's rows for one sink."""

    def __init__(self, session: TaskSession, place: TaskPlace) -> None:
        self._session = session
        self._place = place
        self._rows: RowEncoder | None = None
        session.join()

    def write(self, batch: Batch) -> None:
        """Copy the rows to their place, invisible to readers."""
        if not batch.num_rows:
            return
        with self._translated():
            if self._rows is None:
                rows = self._place.fit(batch.schema)
                self._session.create(self._place, rows)
                self._rows = rows
            copy = self._session.copy(self._place, self._rows)
            for chunk in self._rows.chunks(batch):
                send(copy, chunk)

    def finish(self) -> Receipt:
        """Make the copied rows survive this process, and return their receipt.

        Several sinks of one task are durable together, when the last of them has finished.
        """
        place, rows = self._place, self._rows
        with self._translated():
            self._session.finish(place, rows.tally if rows else None)
        if rows is None:
            return Receipt(place.task, detail={"mode": place.mode})
        detail = {"mode": place.mode, "piece": place.name, **rows.detail()}
        return Receipt(place.task, rows.tally, detail)

    def discard(self) -> None:
        with suppress(psycopg.Error, SemelError):
            self._session.discard(self._place)

    def _translated(self) -> AbstractContextManager[None]:
        return _translated(self._place)


@contextmanager
def _translated(place: TaskPlace) -> Iterator[None]:
    where = f"sink {place.sink}, staging"
    with translated(where):
        try:
            yield
        except psycopg.Error as error:
            if place.mode == "prepared" and is_of_a_row(error):
                # Staging mode, which the next attempt uses, finds the rows and names their keys.
                raise StageAnew(f"{where}: {words(error)}") from None
            raise


def send(copy: psycopg.Copy, chunk: memoryview | bytes) -> None:
    """Send a chunk to the server, and wait until it is sent.

    psycopg only passes it to libpq, whose buffer grows without limit if the server is slower.
    """
    copy.write(chunk)
    copy.connection.wait(_flush(copy.connection.pgconn))


def _flush(pgconn: PGconn) -> PQGen[None]:
    # https://www.postgresql.org/docs/current/libpq-async.html#LIBPQ-PQFLUSH
    while pgconn.flush():
        ready = yield Wait.RW
        if ready & Ready.R:
            pgconn.consume_input()


def abandon(connection: Connection, copying: Any) -> None:
    """End a copy and its connection, in any state."""
    given_up = GivenUp("the rows were discarded")
    with suppress(psycopg.Error, GivenUp):
        if copying is not None:
            copying.__exit__(GivenUp, given_up, None)
    connection.close()
    pool().give_back(connection)


class GivenUp(Exception):
    """Raised inside a copy to abandon it."""
