"""The checks before the first batch: the table, the rights, the mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from semel.errors import Permanent
from semel.events import log
from semel.pipeline.sink import Guarantee
from semel.postgres.connect import MOST_CONNECTIONS, OWN_PATH, Connection, is_permanent, words
from semel.postgres.schema import Fitted, TargetTable, create_statement, find_target, fit
from semel.postgres.statements import (
    TableName,
    Write,
    create_rejects,
    insert_reject,
    literal,
    quoted,
)

# Every task of a batch needs a slot, and so does every losing attempt until it is rolled back.
SLOTS_WANTED: Final = 16

# A share of fewer rows says little: one bad row may be all of them.
_FEW_ROWS: Final = 100

# Other clients may use the pooler, too, and get a process between two of our queries.
_POOLER_ROUNDS: Final = 2

READERS_SEE: Final = {
    "staging": "whole batches or nothing",
    "prepared": (
        "part of a batch for a moment, between its first COMMIT PREPARED and its last; if the "
        "driver dies there, until the next start"
    ),
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The settings of a sink."""

    sink: str
    table: TableName
    key: tuple[str, ...]
    write: Write
    version_column: str
    cycle_column: str
    mode: str
    create_table: str
    rejects: str = ""
    """The table for rows that can never be written; empty if there is none."""

    most_rejects: float = 1.0
    """The largest share of a batch that may go there, unless the batch is small."""

    speculates: bool = False
    """Two copies of one task may run at the same time."""

    @property
    def filled(self) -> tuple[str, ...]:
        """The columns that semel fills itself."""
        return (self.cycle_column,) if self.cycle_column else ()

    def most_rejected(self, rows: int) -> int | None:
        """Return how many of *rows* may be rejected; None for all."""
        return int(rows * self.most_rejects) if rows >= _FEW_ROWS else None


@dataclass(frozen=True, slots=True)
class Checked:
    """The result: the table, the mode to use, and weaknesses of the server."""

    target: TargetTable
    mode: str
    weaknesses: tuple[str, ...]
    rejects: str = ""
    """The reject table with its schema, quoted; empty if there is none."""


def check(connection: Connection, wanted: Wanted, schema: Any) -> Checked | None:
    """Check what can be checked; None if the table will only be created with the schema.

    Raises:
        Permanent: something is missing or wrong; the message has the statement to run.
    """
    found = find_target(connection, wanted.table)
    if found == "does not exist" and wanted.create_table == "if-missing":
        if schema is None:
            return None
        statement = create_statement(wanted.table, schema, wanted.key, wanted.cycle_column)
        with connection.transaction():
            connection.execute(OWN_PATH)
            connection.execute(statement.encode())
        log.info("table created", extra={"sink": wanted.sink, "statement": statement})
        found = find_target(connection, wanted.table)
    if isinstance(found, str):
        raise Permanent(_missing(connection, wanted, schema, found))
    problems = [*_rights(connection, wanted, found), *_columns(wanted, found)]
    if problems:
        raise Permanent(f"table {found.name}: {'; '.join(problems)}")
    rejects = _rejects(connection, wanted, found)
    fitted = None if schema is None else fit(found, schema, wanted.filled)
    if fitted is not None:
        _warn_about_nulls(wanted, schema, fitted)
    mode = _mode(connection, wanted, found, fitted)
    return Checked(found, mode, weaknesses(connection), rejects)


def _rejects(connection: Connection, wanted: Wanted, target: TargetTable) -> str:
    """Return the reject table, created if it was missing, with its schema: the target's own."""
    if not wanted.rejects:
        return ""
    name = TableName.parse(wanted.rejects)
    name = TableName(name.schema or target.name.schema, name.table)
    try:
        if isinstance(find_target(connection, name), str):
            connection.execute(create_rejects(name).encode())
        # Checks the right, the columns and their types, and writes nothing.
        connection.execute(
            f"EXPLAIN {insert_reject(name)} '', '', '', '', '', '{{}}'::json".encode()
        )
    except psycopg.Error as error:
        if not is_permanent(error):
            raise
        user = quoted(connection.info.user)
        raise Permanent(
            f"sink {wanted.sink}: rows cannot be rejected to {name}: {words(error)}; it needs "
            f"{create_rejects(name)}; GRANT INSERT ON {name} TO {user};"
        ) from None
    return str(name)


def refuse_pooler(sink: str, one: Connection, other: Connection) -> None:
    """Refuse a pooler in transaction mode.

    Settings, held transactions and ending an older owner's sessions need a server process
    that belongs to one connection.

    Raises:
        Permanent: two connections shared a process, or one connection changed its process.
    """
    for _ in range(_POOLER_ROUNDS):
        # Not strictly alternating: a pooler that alternates its processes would look honest.
        mine, its, its_again, mine_again = map(_process, (one, other, other, one))
        if mine == its or (mine, its) != (mine_again, its_again):
            raise Permanent(
                f"sink {sink}: the pooler is in transaction mode, and semel needs sessions of its "
                f"own: connect to the server directly, or use a pool in session mode "
                f"(PgBouncer: pool_mode = session)"
            )


def check_connections(sink: str, connection: Connection, wanted: int | None) -> None:
    """Refuse a limit of connections that the server does not allow.

    Raises:
        Permanent: the message has both numbers.
    """
    row = connection.execute(
        "SELECT sum(CASE name WHEN 'max_connections' THEN 1 ELSE -1 END * setting::int)::int "
        "FROM pg_catalog.pg_settings WHERE name IN "
        "('max_connections', 'superuser_reserved_connections', 'reserved_connections')"
    ).fetchone()
    assert row is not None
    # One more than the limit, for a statement beside held transactions.
    most = (wanted or MOST_CONNECTIONS) + 1
    if most > row[0]:
        raise Permanent(
            f"sink {sink}: a process may open {most} connections (connections={most - 1} and one "
            f"for short statements), and the server allows {row[0]}: give the sink "
            f"connections={max(1, row[0] - 1)} or fewer, or raise max_connections"
        )


def _process(connection: Connection) -> int:
    row = connection.execute("SELECT pg_backend_pid()").fetchone()
    assert row is not None
    return int(row[0])


def guarantee(wanted: Wanted, checked: Checked | None) -> Guarantee:
    """Return the guarantee of the sink with its settings."""
    mode = checked.mode if checked else wanted.mode
    readers = READERS_SEE.get(
        mode,
        f"{READERS_SEE['staging']}; in prepared mode, if that is chosen: {READERS_SEE['prepared']}",
    )
    effect = {
        Write.APPEND: f"rows in table {wanted.table}, each appended once",
        Write.IGNORE: f"rows in table {wanted.table}, each inserted once unless its key is there",
        Write.UPSERT: f"rows in table {wanted.table}, each key written once per batch",
    }[wanted.write]
    return Guarantee(
        effect=effect,
        readers_see=readers,
        not_covered=(
            "effects of triggers outside the database",
            "rows that other programs write, change or delete",
            "a database restored to an earlier time than the ledger",
        ),
        weakened_by=checked.weaknesses if checked else (),
    )


def _missing(connection: Connection, wanted: Wanted, schema: Any, why: str) -> str:
    text = f"table {wanted.table} {why} in database {connection.info.dbname}"
    lower = TableName(wanted.table.schema, wanted.table.table.lower())
    if lower != wanted.table and isinstance(find_target(connection, lower), TargetTable):
        text += f" (there is {lower}: upper and lower case are kept as written)"
    if schema is None:
        return text
    statement = create_statement(wanted.table, schema, wanted.key, wanted.cycle_column)
    return f'{text}: {statement} Or let semel do so: create_table="if-missing"'


def _rights(connection: Connection, wanted: Wanted, target: TargetTable) -> list[str]:
    needed = ["INSERT"]
    if wanted.write is Write.UPSERT:
        needed += ["UPDATE", "SELECT"]
    if wanted.write is Write.IGNORE and wanted.key:
        needed += ["SELECT"]
    table = literal(str(target.name))
    asked = ", ".join(f"has_any_column_privilege({table}, {literal(right)})" for right in needed)
    row = connection.execute(f"SELECT current_user::text, {asked}".encode()).fetchone()
    assert row is not None
    user, *granted = row
    lacking = [right for right, has in zip(needed, granted, strict=True) if not has]
    if not lacking:
        return []
    rights = ", ".join(lacking)
    return [f"role {user} may not {rights}: GRANT {rights} ON {target.name} TO {quoted(user)};"]


def _columns(wanted: Wanted, target: TargetTable) -> list[str]:
    """Check the columns that the settings name."""
    problems = []
    named = [*wanted.key, *filter(None, [wanted.version_column])]
    for name in named:
        if target.column(name) is None:
            problems.append(f"there is no column {quoted(name)}")
    if wanted.cycle_column:
        column = target.column(wanted.cycle_column)
        if column is None:
            problems.append(
                f"there is no column {quoted(wanted.cycle_column)}: ALTER TABLE {target.name} "
                f"ADD COLUMN {quoted(wanted.cycle_column)} text;"
            )
        elif column.type.kind != "text":
            problems.append(f"column {quoted(wanted.cycle_column)} must be text")
    settles = wanted.write is not Write.APPEND and wanted.key
    if settles and not problems and frozenset(wanted.key) not in target.keys:
        keys = ", ".join(map(quoted, wanted.key))
        problems.append(
            f"no unique index is on exactly ({keys}): "
            f"CREATE UNIQUE INDEX ON {target.name} ({keys});"
        )
    return problems


def _warn_about_nulls(wanted: Wanted, schema: Any, fitted: Sequence[Fitted]) -> None:
    strict = [
        f.column.name
        for field, f in zip(schema, fitted, strict=True)
        if field.nullable and f.column.is_not_null and f.column.name not in wanted.key
    ]
    if strict:
        log.info(
            f"sink {wanted.sink}: {', '.join(map(quoted, strict))} may be null in the rows and "
            f"not in the table; a null there fails the batch before its decision"
        )


def _mode(
    connection: Connection, wanted: Wanted, target: TargetTable, fitted: Sequence[Fitted] | None
) -> str:
    """Choose the mode, or check that the chosen one is possible."""
    if wanted.mode == "staging" or wanted.rejects:
        return "staging"
    slots, used = slots_of(connection)
    cast = [f.column.name for f in fitted or () if f.wire.is_cast]
    # The copy of a task would wait for the key that the first one has prepared.
    collides = "with speculation, a task and its copy would insert the same unique keys"
    if wanted.mode == "prepared":
        if used >= slots:
            log.warning(
                f"sink {wanted.sink}: staging mode instead of prepared: {used} of {slots} slots "
                f"for prepared transactions are in use; raise max_prepared_transactions (a server "
                f"setting, changed at a restart; one slot for every task of a batch)"
            )
            return "staging"
        if cast:
            raise Permanent(
                f"table {target.name}: text can be cast to {', '.join(map(quoted, cast))} in "
                f"staging mode only: use mode='staging'"
            )
        if wanted.speculates and target.is_exclusive:
            log.warning(f"sink {wanted.sink}: staging mode instead of prepared: {collides}")
            return "staging"
        return "prepared"
    why_not = (
        f"prepared mode can only append, and write is {wanted.write!r}"
        if wanted.write is not Write.APPEND
        else f"text is cast to {', '.join(map(quoted, cast))}"
        if cast
        else collides
        if wanted.speculates and target.is_exclusive
        else f"the server has {slots} slots for prepared transactions, {used} of them in use"
        if slots - used < SLOTS_WANTED
        else ""
    )
    mode = "staging" if why_not else "prepared"
    why = why_not or f"it only appends, and {slots - used} slots are free"
    log.info(f"sink {wanted.sink}: mode auto chose {mode}: {why}; readers see {READERS_SEE[mode]}")
    return mode


def slots_of(connection: Connection) -> tuple[int, int]:
    """Return the server's slots for prepared transactions, and how many are in use."""
    row = connection.execute(
        "SELECT current_setting('max_prepared_transactions')::int, count(*) "
        "FROM pg_catalog.pg_prepared_xacts"
    ).fetchone()
    assert row is not None
    slots, used = row
    return slots, used


def weaknesses(connection: Connection) -> tuple[str, ...]:
    """Return settings of the server that weaken what it promises."""
    rows = connection.execute(
        "SELECT name FROM pg_catalog.pg_settings "
        "WHERE name IN ('fsync', 'full_page_writes') AND setting = 'off'"
    ).fetchall()
    return tuple(
        f"{name} is off: a crash of the server's machine can lose or damage rows; turn it on"
        for (name,) in rows
    )
