"""The database's own clock, in microseconds since 1970.

Leases and due times are compared where they are written: a worker's clock may
jump, and nothing changes.
"""

from __future__ import annotations

import math
from typing import Any, Final

from sqlalchemy import BigInteger
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

MICROSECONDS: Final = 1_000_000

# Of the years 1 to 9999: what can be shown as a date, too.
FIRST_SECOND: Final = -62_135_596_800.0
LAST_SECOND: Final = 253_402_300_799.0


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


def told_us(seconds: float) -> int:
    """Turn a time that somebody else gave into what the tables keep; no number is too large.

    A producer that counts nanoseconds for milliseconds is far beyond every BIGINT.
    """
    if math.isnan(seconds):
        return 0
    return to_us(min(max(seconds, FIRST_SECOND), LAST_SECOND))


def to_seconds(us: int | None) -> float:
    """Turn what the tables keep into seconds; 0 where there is nothing."""
    return 0.0 if us is None else us / MICROSECONDS
