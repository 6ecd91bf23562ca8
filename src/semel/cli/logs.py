"""Log lines of a service on stderr: time, level and message, then the line's own fields.

    2026-11-18T09:04:11.203Z WARNING semel.messaging: runner waits consumer=billing why="no answer"

With `--log-json`, each line is one JSON document with the same fields as keys.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, Final

from semel.cli.plain import plain

_USUAL: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
_WORD: Final = re.compile(r"[^\s\"'=]+")


class LogLevel(StrEnum):
    """The least important lines that are written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@contextmanager
def logging_to_stderr(
    level: LogLevel, *, as_json: bool, scrub: Callable[[str], str]
) -> Iterator[None]:
    """Write the log lines of all packages while the block runs, without what *scrub* removes."""
    root = logging.getLogger()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(scrub) if as_json else TextLines(scrub))
    before = root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


class TextLines(logging.Formatter):
    """Lines for people, and for tools that read ``name=value``; a traceback follows its line."""

    def __init__(self, scrub: Callable[[str], str]) -> None:
        super().__init__()
        self._scrub = scrub

    def format(self, record: logging.LogRecord) -> str:
        """Write a record; text of other people cannot act on a terminal."""
        return plain(self._scrub(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Write the line without its traceback."""
        head = f"{_at(record)} {record.levelname} {record.name}: {record.message}"
        return " ".join([head, *(f"{name}={_word(v)}" for name, v in _fields(record).items())])


class JsonLines(TextLines):
    """One JSON document per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a record and its traceback."""
        head = {
            "time": _at(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            head["traceback"] = self.formatException(record.exc_info)
        # Twice: a field of the same name as one of ours is left out, and ours stay in front.
        return self._scrub(json.dumps({**head, **_fields(record), **head}, default=str))


def _at(record: logging.LogRecord) -> str:
    at = dt.datetime.fromtimestamp(record.created, dt.UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _USUAL}


def _word(value: Any) -> str:
    text = str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text, ensure_ascii=False)
