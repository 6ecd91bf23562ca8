"""Many numbers as one parameter: an array where there are arrays, else JSON.

A parameter for each of two thousand numbers would cost more than what is done
with them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ARRAY, BigInteger, Boolean, ColumnElement, Dialect, Text, bindparam
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine


class Numbers(TypeDecorator[Sequence[int]]):
    """A list of whole numbers."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the type that the database has."""
        if dialect.name == "postgresql":
            return dialect.type_descriptor(ARRAY(BigInteger()))
        return dialect.type_descriptor(Text())

    def process_bind_param(self, value: Sequence[int] | None, dialect: Dialect) -> Any:
        """Write the list as the database takes it."""
        if value is None or dialect.name == "postgresql":
            return value
        return json.dumps(list(value))


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
    return f"{column} = ANY ({numbers})"


@compiles(among, "sqlite")
def _sqlite(element: among, compiler: Any, **options: Any) -> str:
    column, numbers = (compiler.process(part, **options) for part in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({numbers}))"
