"""What the tables keep as text: headers as a JSON object of base64, nothing as nothing."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping


def headers_to_text(headers: Mapping[str, bytes]) -> str:
    """Write headers for a column; no headers are the empty text."""
    if not headers:
        return ""
    texts = {name: b64encode(value).decode("ascii") for name, value in headers.items()}
    return json.dumps(texts, separators=(",", ":"))


def headers_from_text(text: str) -> Mapping[str, bytes]:
    """Read what `headers_to_text` wrote."""
    if not text:
        return {}
    return {name: b64decode(value) for name, value in json.loads(text).items()}
