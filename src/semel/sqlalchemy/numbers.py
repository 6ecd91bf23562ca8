"""Many numbers as one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Boolean, ColumnElement, Dialect, Text, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator


class Numbers(TypeDecorator[Sequence[int]]):
    """A list of whole numbers, as the text that the database makes a list of.

    asyncpg would look at every element of a real array, which takes twice as long.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[int] | None, dialect: Dialect) -> str:
        """Write an array of PostgreSQL, or one of JSON."""
        first, last = "{}" if dialect.name == "postgresql" else "[]"
        return first + ",".join(map(str, value or ())) + last


class among(FunctionElement[bool]):
    """``column`` is one of the numbers of the parameter *name*."""

    type = Boolean()
    inherit_cache = True

    def __init__(self, column: ColumnElement[int], name: str) -> None:
        super().__init__(column, bindparam(name, type_=Numbers()))

    def self_group(self, against: Any = None) -> Any:
        """Stay as it is: compared with 1, as SQLite's truths are, it would use no index."""
        return self


@compiles(among, "postgresql")
def _postgresql(element: among, compiler: Any, **options: Any) -> str:
    column, numbers = (compiler.process(part, **options) for part in element.clauses)
    return f"{column} = ANY (({numbers})::bigint[])"


@compiles(among, "sqlite")
def _sqlite(element: among, compiler: Any, **options: Any) -> str:
    column, numbers = (compiler.process(part, **options) for part in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({numbers}))"
