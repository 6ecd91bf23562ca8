"""What a database lacks of the tables that the code needs, in sentences with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Column, Connection, Index, MetaData, Table, inspect
from sqlalchemy.engine.interfaces import (
    ReflectedColumn,
    ReflectedIndex,
    ReflectedPrimaryKeyConstraint,
)
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

# The same type by another name, with no difference that a statement could see.
_SAME_TYPES: Final = {"VARCHAR": "TEXT"}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the tables, and what to do about it."""

    what: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.what}; {self.way_out}"


def differences(connection: Connection, needed: MetaData) -> Iterator[Problem]:
    """Compare the database's tables with *needed*, and name every difference that matters."""
    found = _Found.of(connection, list(needed.tables))
    for table in needed.sorted_tables:
        if table.name in found.columns:
            yield from _Compared(connection, found, table).problems()
        else:
            make = _one_line(CreateTable(table), connection)
            yield Problem(
                f"table {table.name} is missing",
                f"restore it from a backup, or make it anew, empty: {make}",
            )
            yield from (_missing_index(connection, index) for index in _indexes(table))


@dataclass(frozen=True, slots=True)
class _Found:
    """What the database says about all tables, asked at once; by table."""

    columns: dict[str, list[ReflectedColumn]]
    keys: dict[str, ReflectedPrimaryKeyConstraint]
    indexes: dict[str, list[ReflectedIndex]]

    @classmethod
    def of(cls, connection: Connection, tables: list[str]) -> _Found:
        ask = inspect(connection)
        return cls(
            {
                name: found
                for (_, name), found in ask.get_multi_columns(filter_names=tables).items()
            },
            {
                name: found
                for (_, name), found in ask.get_multi_pk_constraint(filter_names=tables).items()
            },
            {
                name: found
                for (_, name), found in ask.get_multi_indexes(filter_names=tables).items()
            },
        )


class _Compared:
    """One table as it is, beside what it should be."""

    def __init__(self, connection: Connection, found: _Found, table: Table) -> None:
        self._connection = connection
        self._table = table
        self._columns = {each["name"]: each for each in found.columns[table.name]}
        self._key = found.keys[table.name]["constrained_columns"]
        self._indexes = {each["name"]: each for each in found.indexes.get(table.name, [])}

    def problems(self) -> Iterator[Problem]:
        """Name what differs: columns, the key, indexes."""
        for column in self._table.columns:
            yield from self._of_column(column)
        yield from self._of_strange_columns()
        yield from self._of_key()
        for index in _indexes(self._table):
            yield from self._of_index(index)

    def _of_column(self, column: Column[Any]) -> Iterator[Problem]:
        name = f"column {column.name} of table {self._table.name}"
        found = self._columns.get(column.name)
        if found is None:
            definition = _one_line(CreateColumn(column), self._connection)
            yield Problem(
                f"{name} is missing", f"ALTER TABLE {self._table.name} ADD COLUMN {definition}"
            )
            return
        wanted, has = self._type(column.type), self._type(found["type"])
        if wanted != has:
            yield Problem(
                f"{name} has the type {has}, not {wanted}", f"change its type to {wanted}"
            )
        if column.nullable and not found["nullable"]:
            yield Problem(f"{name} refuses NULL", "let it be NULL: semel writes none there")

    def _of_strange_columns(self) -> Iterator[Problem]:
        for name, found in self._columns.items():
            silent = found["default"] is None and not found["nullable"]
            if name not in self._table.columns and silent:
                yield Problem(
                    f"column {name} of table {self._table.name} is not semel's, and every insert "
                    f"fails without a value for it",
                    "drop it, give it a default, or let it be NULL",
                )

    def _of_key(self) -> Iterator[Problem]:
        wanted = [column.name for column in self._table.primary_key]
        if list(self._key) != wanted:
            yield Problem(
                f"the primary key of table {self._table.name} is ({', '.join(self._key)}), "
                f"not ({', '.join(wanted)})",
                "make it so: without that key, a message can be claimed twice",
            )

    def _of_index(self, index: Index) -> Iterator[Problem]:
        found = self._indexes.get(index.name)
        if found is None:
            yield _missing_index(self._connection, index)
            return
        columns = [column.name for column in index.columns]
        if list(found["column_names"]) != columns or bool(found["unique"]) != index.unique:
            make = _one_line(CreateIndex(index), self._connection)
            yield Problem(
                f"index {index.name} of table {self._table.name} is another one",
                f"DROP INDEX {index.name}, then {make}",
            )

    def _type(self, kind: Any) -> str:
        name = str(kind.compile(self._connection.dialect)).upper()
        return _SAME_TYPES.get(name, name)


def _indexes(table: Table) -> list[Index]:
    return sorted(table.indexes, key=lambda index: str(index.name))


def _missing_index(connection: Connection, index: Index) -> Problem:
    what = f"index {index.name} of table {index.table.name if index.table is not None else ''}"
    return Problem(f"{what} is missing", _one_line(CreateIndex(index), connection))


def _one_line(statement: Any, connection: Connection) -> str:
    return " ".join(str(statement.compile(dialect=connection.dialect)).split())
