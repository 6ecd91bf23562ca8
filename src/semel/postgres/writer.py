"""The writer of one task's rows: fits them to the target, encodes and copies them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

import psycopg
from psycopg.abc import PQGen
from psycopg.pq.abc import PGconn
from psycopg.waiting import Ready, Wait

from semel.arrow.tally import schema_to_text, tally
from semel.crashpoints import CrashPoint, reach
from semel.errors import Permanent, SemelError, require
from semel.pipeline.sink import Batch, Receipt, Tally
from semel.pipeline.txn import SinkTxnId
from semel.postgres.connect import Address, Connection, pool, session, translated
from semel.postgres.encode import HEADER, TRAILER, encode_rows, has_longer, plain
from semel.postgres.schema import Fitted, TargetTable, fit
from semel.postgres.statements import quoted

pa: Any = require("pyarrow", "postgres")

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
    ) -> None:
        self.target = target
        self.schema = schema
        self.tally = Tally()
        self.fitted = fit(target, schema, filled)
        self._last_field = last_field
        self._key = key
        self._began = False
        self._was_cut = False

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
        rows = batch.num_rows
        step = max(1, min(_MOST_ROWS, rows * _MOST_BYTES // max(1, batch.nbytes)))
        for begin in range(0, rows, step):
            part = batch.slice(begin, step)
            fields = [self._encoded(f, part, i) for i, f in enumerate(self.fitted)]
            self.tally += tally(part)
            yield encode_rows(fields, part.num_rows, self._last_field)

    def _encoded(self, fitted: Fitted, part: Batch, place: int) -> Any:
        values, most = plain(part.column(place)), fitted.wire.most_characters
        if most is not None and not self._was_cut:
            self._was_cut = has_longer(values, most)
        try:
            return _encoded(fitted, values)
        except ValueError as error:  # Arrow's errors about values are ValueErrors
            name = quoted(fitted.column.name)
            row = _named(part.slice(_first_refused(fitted, values), 1), self._key)
            # Arrow's own text quotes the value, and so would a traceback with the cause.
            why = NOT_CONVERTED if isinstance(error, pa.ArrowException) else str(error)
            raise Permanent(
                f"table {self.target.name}, column {name} ({fitted.column.type.sql}): {why}{row}"
            ) from None


NOT_CONVERTED: Final = "a value is out of range, or cannot be converted"


def _encoded(fitted: Fitted, values: Any) -> Any:
    most = fitted.wire.most_characters
    if most is not None and has_longer(values, most, spaces=False):
        raise ValueError(f"a text has more than {most} characters")
    return fitted.wire.encode(values)


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

    place: Callable[[TaskStager, str], TaskPlace]
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

    def open(self, task: str) -> TaskWriter:
        """Start to stage for one task attempt; nothing happens before the first row."""
        return TaskWriter(self.address, self.application, self.place(self, task))


class TaskPlace(Protocol):
    """Where one task attempt's rows go: its own table, or a prepared transaction."""

    mode: str
    sink: str
    task: str
    name: str

    def fit(self, schema: Any) -> RowEncoder:
        """Fit rows of *schema* to the target."""

    def begin(self, connection: Connection, rows: RowEncoder) -> str:
        """Begin the transaction; return the statement that copies."""

    def finish(self, connection: Connection, tally: Tally) -> None:
        """End the transaction, so that its rows survive this process."""

    def undo(self, connection: Connection) -> None:
        """Remove the rows of `finish`."""


class TaskWriter:
    """One task attempt's rows, copied to their place in a single transaction."""

    def __init__(self, address: Address, application: str, place: TaskPlace) -> None:
        self._address = address
        self._application = application
        self._place = place
        self._rows: RowEncoder | None = None
        self._connection: Connection | None = None
        self._copying: Any = None
        self._copy: psycopg.Copy | None = None
        self._is_finished = False

    def write(self, batch: Batch) -> None:
        """Copy the rows to their place, invisible to readers."""
        if not batch.num_rows:
            return
        with self._translated():
            if self._rows is None:
                self._rows = self._place.fit(batch.schema)
            copy = self._copy or self._begin(self._rows)
            for chunk in self._rows.chunks(batch):
                send(copy, chunk)

    def _begin(self, rows: RowEncoder) -> psycopg.Copy:
        self._connection = pool().take(self._address, self._application)
        statement = self._place.begin(self._connection, rows)
        self._copying = self._connection.cursor().copy(statement.encode())
        copy: psycopg.Copy = self._copying.__enter__()
        self._copy = copy
        return copy

    def finish(self) -> Receipt:
        """Make the copied rows survive this process, and return their receipt."""
        place = self._place
        if self._rows is None or self._copy is None or self._connection is None:
            return Receipt(place.task, detail={"mode": place.mode})
        with self._translated():
            self._copy.write(TRAILER)
            self._copying.__exit__(None, None, None)
            reach(CrashPoint.POSTGRES_STAGE_COPIED, place.sink)
            place.finish(self._connection, self._rows.tally)
        self._is_finished = True
        pool().give_back(self._connection)
        detail = {"mode": place.mode, "piece": place.name, **self._rows.detail()}
        return Receipt(place.task, self._rows.tally, detail)

    def discard(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with suppress(psycopg.Error, SemelError):
            if not self._is_finished:
                abandon(connection, self._copying)
                return
            with session(self._address, self._application) as another:
                self._place.undo(another)

    def _translated(self) -> AbstractContextManager[None]:
        return translated(f"sink {self._place.sink}, staging")


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
