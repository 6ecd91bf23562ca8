"""JSON documents of commands, kept in a file: their keys are a promise to users.

    SEMEL_SNAPSHOTS=write pytest tests/unit/test_cli_snapshots.py …

rewrites the files.  A document may gain keys; it may not lose one, nor change a value.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
WRITE_VARIABLE: Final = "SEMEL_SNAPSHOTS"

_TIMES: Final = re.compile(r"(^|_)(at|since|timestamp|until|seconds|seconds_left|bytes)$")
_WORDS: Final = (
    (re.compile(r"process \d+ on \S+?(?=[\s,;]|$)"), "process <pid> on <host>"),
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f-]{27}\b"), "<uuid>"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "<sha256>"),
    (re.compile(r"\b[0-9a-f]{20,40}\b"), "<id>"),
    (re.compile(r"(?<=attempt )[0-9a-f]{8}\b"), "<id>"),
    (re.compile(r"(?<=g\d\.b\d\.)[0-9a-f]{8}\b"), "<id>"),
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+00:00)?"), "<time>"),
    (re.compile(r"\b\d+(\.\d+)? (ms|s|min|h)\b"), "<duration>"),
)


def normal(value: Any, folder: Path, key: str = "") -> Any:
    """Return a document without what differs from run to run."""
    if isinstance(value, Mapping):
        return {name: normal(one, folder, name) for name, one in value.items()}
    if isinstance(value, list):
        return [normal(one, folder, key) for one in value]
    if isinstance(value, str):
        text = value.replace(str(folder), "<folder>").replace(socket.gethostname(), "<host>")
        text = text.replace(f"{getpass.getuser()}@", "<user>@")
        for pattern, word in _WORDS:
            text = pattern.sub(word, text)
        return text
    if isinstance(value, int | float) and not isinstance(value, bool):
        if key == "pid":
            return "<pid>"
        return "<number>" if isinstance(value, float) or _TIMES.search(key) else value
    return value


def compare(name: str, documents: Mapping[str, Any]) -> None:
    """Compare *documents*, by command, with the file *name*, or write it."""
    file = FOLDER / f"{name}.json"
    if os.environ.get(WRITE_VARIABLE):
        file.write_text(json.dumps(documents, indent=1, sort_keys=True) + "\n")
    kept = json.loads(file.read_text())
    assert sorted(documents) == sorted(kept), "a command is missing, or was never written"
    for command, document in documents.items():
        assert _without_new_keys(document, kept[command]) == kept[command], command


def _without_new_keys(now: Any, before: Any) -> Any:
    if isinstance(now, Mapping) and isinstance(before, Mapping):
        return {k: _without_new_keys(v, before[k]) for k, v in now.items() if k in before}
    if isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        return [_without_new_keys(a, b) for a, b in zip(now, before, strict=True)]
    return now
