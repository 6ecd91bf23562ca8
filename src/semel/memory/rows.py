"""Rows as plain JSON and back, so that they can travel in a receipt and be hashed."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

from semel.pipeline.sink import Batch, Tally

_TAG: Final = "$"


def rows_of(batch: Batch) -> list[Any]:
    """Return the rows of an Arrow batch, or of any other iterable, as a list."""
    to_pylist = getattr(batch, "to_pylist", None)
    return list(batch) if to_pylist is None else to_pylist()


def to_plain(value: Any) -> Any:
    """Write a value as JSON can hold it; what JSON lacks is tagged with its type.

    Raises:
        TypeError: the value's type is not one that a row can have.
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {_TAG: "float", "is": repr(value)}
        case Decimal():
            return {_TAG: "decimal", "is": str(value)}
        case dt.datetime():
            return {_TAG: "datetime", "is": value.isoformat()}
        case dt.date():
            return {_TAG: "date", "is": value.isoformat()}
        case dt.time():
            return {_TAG: "time", "is": value.isoformat()}
        case dt.timedelta():
            return {_TAG: "timedelta", "is": [value.days, value.seconds, value.microseconds]}
        case bytes() | bytearray() | memoryview():
            return {_TAG: "bytes", "is": base64.b64encode(value).decode()}
        case list():
            return [to_plain(item) for item in value]
        case tuple():
            return {_TAG: "tuple", "is": [to_plain(item) for item in value]}
        case Mapping() if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: to_plain(item) for key, item in value.items()}
        case Mapping():
            return {_TAG: "map", "is": [[to_plain(k), to_plain(v)] for k, v in value.items()]}
    raise TypeError(f"a row cannot hold a {type(value).__name__}")


def from_plain(value: Any) -> Any:
    """Read what `to_plain` wrote."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG in value:
        return _REVIVE[value[_TAG]](value["is"])
    return {key: from_plain(item) for key, item in value.items()}


def tally_rows(rows: Iterable[Any]) -> Tally:
    """Count and hash rows one by one: exact for every type, and as slow as that sounds."""
    return sum((Tally(1, _row_hash(row)) for row in rows), Tally())


def _row_hash(row: Any) -> int:
    text = json.dumps(to_plain(row), sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


_REVIVE: Final[Mapping[str, Callable[[Any], Any]]] = {
    "float": float,
    "decimal": Decimal,
    "datetime": dt.datetime.fromisoformat,
    "date": dt.date.fromisoformat,
    "time": dt.time.fromisoformat,
    "timedelta": lambda parts: dt.timedelta(*parts),
    "bytes": base64.b64decode,
    "tuple": lambda items: tuple(from_plain(item) for item in items),
    "map": lambda pairs: {from_plain(key): from_plain(item) for key, item in pairs},
}
