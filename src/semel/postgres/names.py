"""Names in SQL: kept exactly as written, and always quoted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from semel.errors import Misuse

_PART: Final = r'"(?:[^"]|"")+"|[^".]+'
_TABLE: Final = re.compile(rf"(?:({_PART})\.)?({_PART})")


def quoted(name: str) -> str:
    """Return *name* as a quoted identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """Return *value* as a string constant, valid for any standard_conforming_strings."""
    text = "'" + value.replace("'", "''") + "'"
    return f" E{text.replace(chr(92), chr(92) * 2)}" if "\\" in text else text


@dataclass(frozen=True, slots=True)
class TableName:
    """A table, with its schema if that is known.

    Upper and lower case are kept, as if everything were quoted: ``Entries`` is not
    ``entries``.  A dot separates the schema; double quotes protect a dot in a name.
    """

    schema: str | None
    table: str

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read ``table``, ``schema.table`` or ``"odd.schema"."odd table"``.

        Raises:
            Misuse: it is none of these.
        """
        found = _TABLE.fullmatch(text)
        if found is None:
            raise Misuse(f"{text!r} is not the name of a table: write schema.table or table")
        return cls(_unquoted(found[1]) if found[1] else None, _unquoted(found[2]))

    def __str__(self) -> str:
        parts = [self.schema, self.table] if self.schema else [self.table]
        return ".".join(quoted(part) for part in parts)


def _unquoted(part: str) -> str:
    return part[1:-1].replace('""', '"') if part.startswith('"') else part
