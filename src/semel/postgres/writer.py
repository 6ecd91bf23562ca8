"""The way of one task's rows: fitted to the target, encoded, copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

import psycopg
from psycopg.abc import PQGen
from psycopg.pq.abc import PGconn
from psycopg.waiting import Ready, Wait

from semel.arrow.tally import schema_to_text, tally
from semel.errors import Permanent
from semel.pipeline.sink import Batch, Tally
from semel.postgres.connect import Connection, pool
from semel.postgres.encode import HEADER, TRAILER, encode_rows, plain
from semel.postgres.names import quoted
from semel.postgres.schema import Fitted, Target, fit

# What is encoded at once: enough for numpy, little enough for memory.
_MOST_ROWS: Final = 20_000
_MOST_BYTES: Final = 8 * 2**20


class Rows:
    """Encodes the batches of one task and keeps count of them."""

    def __init__(
        self, target: Target, schema: Any, filled: Sequence[str] = (), last_field: bytes = b""
    ) -> None:
        self.target = target
        self.schema = schema
        self.tally = Tally()
        self.fitted = fitted_columns(target, schema, filled)
        self._last_field = last_field
        self._began = False

    @property
    def is_exact(self) -> bool:
        """Whether the rows can be read back as they were written."""
        return all(fitted.wire.is_exact for fitted in self.fitted)

    def detail(self) -> dict[str, Any]:
        """Describe the columns for a receipt."""
        columns = [
            [f.column.name, f.column.type.sql if f.wire.is_cast else ""] for f in self.fitted
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
            fields = [self._encoded(f, part.column(i)) for i, f in enumerate(self.fitted)]
            self.tally += tally(part)
            yield encode_rows(fields, part.num_rows, self._last_field)

    def end(self) -> bytes:
        """Return what ends the copy."""
        return TRAILER

    def _encoded(self, fitted: Fitted, column: Any) -> Any:
        try:
            return fitted.wire.encode(plain(column))
        except ValueError as error:  # Arrow's errors about values are such
            name = quoted(fitted.column.name)
            raise Permanent(
                f"table {self.target.name}, column {name} ({fitted.column.type.sql}): {error}"
            ) from error


def send(copy: psycopg.Copy, chunk: memoryview | bytes) -> None:
    """Hand a chunk to the server, and wait until it has taken it.

    psycopg only hands it to libpq, whose buffer grows as long as the server is the slower one.
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
    """End a copy and its connection, whatever state they are in."""
    given_up = GivenUp("the rows were discarded")
    with suppress(psycopg.Error, GivenUp):
        if copying is not None:
            copying.__exit__(GivenUp, given_up, None)
    connection.close()
    pool().give_back(connection)


class GivenUp(Exception):
    """Told to a copy that is not to be finished."""


def fitted_columns(target: Target, schema: Any, filled: Sequence[str]) -> list[Fitted]:
    """Fit the rows' columns to the target's.

    Raises:
        Permanent: they do not fit; the message lists every reason, with the way out.
    """
    found = fit(target, schema, filled)
    fitted = [item for item in found if isinstance(item, Fitted)]
    problems = [item for item in found if isinstance(item, str)]
    if problems:
        raise Permanent(f"table {target.name} does not fit the rows: {'; '.join(problems)}")
    return fitted
