"""The database's own clock, in microseconds since 1970.

Leases and due times are compared where they are written: a worker's clock may
jump, and nothing changes.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

MICROSECONDS: Final = 1_000_000


class now_us(FunctionElement[int]):
    """The time of the statement, not that of the transaction's begin."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_us, "postgresql")
def _postgresql(element: now_us, compiler: Any, **options: Any) -> str:
    return "(extract(epoch from clock_timestamp()) * 1000000)::bigint"


@compiles(now_us, "sqlite")
def _sqlite(element: now_us, compiler: Any, **options: Any) -> str:
    # CURRENT_TIMESTAMP has whole seconds; %f has milliseconds behind the point.
    return (
        "(CAST(strftime('%s', 'now') AS INTEGER) * 1000000"
        " + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER) * 1000)"
    )


def to_us(seconds: float) -> int:
    """Turn seconds into what the tables keep."""
    return round(seconds * MICROSECONDS)


def to_seconds(us: int | None) -> float:
    """Turn what the tables keep into seconds; 0 where there is nothing."""
    return 0.0 if us is None else us / MICROSECONDS
