"""Nested Arrow values as JSON text, more exact than Python's own encoder."""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any


def json_text(value: Any) -> str:
    """Write *value* as JSON.

    Decimals stay numbers with all their digits; bytes become base64, times ISO 8601;
    numbers that JSON does not have (NaN, infinities) become their names as text.
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return repr(value) if math.isfinite(value) else f'"{value}"'
        case Decimal():
            return format(value, "f")
        case str():
            return json.dumps(value, ensure_ascii=False)
        case bytes():
            return f'"{base64.b64encode(value).decode()}"'
        case dt.datetime() | dt.date() | dt.time():
            return f'"{value.isoformat()}"'
        case dt.timedelta():
            return str(value.total_seconds())
        case Mapping():
            pairs = (f"{_name(key)}:{json_text(item)}" for key, item in value.items())
            return f"{{{','.join(pairs)}}}"
        case list() | tuple():
            return f"[{','.join(map(json_text, value))}]"
    return json.dumps(str(value), ensure_ascii=False)


def _name(key: Any) -> str:
    text = json_text(key)
    return text if text.startswith('"') else json.dumps(text)
