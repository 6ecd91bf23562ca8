"""Where the tables of the messaging half are in a PostgreSQL database, for every driver.

    a schema that the user names              in a URL, as in postgresql://db/shop?schema=billing
    the schema where the search path has them a database that got its tables without a schema
    the schema semel                          every other database, and every new one

Ask the database with `FIND`, and give its rows to `found`.  Name the schema in every statement: a
search path may change, and a user may have tables of the same names.  Tables that it has are left
to it in the user's own transactions: a service with tenants may set another path in each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from semel.errors import Misuse

SCHEMA: Final = "semel"
"""The schema of a new database."""

# PostgreSQL cuts longer names, and would then not find the schema again.
LONGEST_NAME: Final = 63

FIND: Final = """
SELECT space.nspname, pg_catalog.pg_table_is_visible(version.oid)
  FROM pg_catalog.pg_class AS version
  JOIN pg_catalog.pg_namespace AS space ON space.oid = version.relnamespace
 WHERE version.relname = 'semel_messaging' AND version.relkind IN ('r', 'p')
"""
"""Lists the schemas that have the tables; needs no right, and no parameter."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the tables of a database are."""

    schema: str
    are_there: bool = True
    """False: there are none yet, and this is where they belong."""

    by_search_path: bool = False


def found(rows: Iterable[Sequence[Any]], schema: str | None = None) -> Tables:
    """Return where the tables are, from the rows of `FIND` and the *schema* that the user names.

    Raises:
        Misuse: the search path has tables, and so has the schema semel: to choose wrongly would
            forget every claim.
    """
    known: dict[str, bool] = dict(rows)  # type: ignore[arg-type]
    if schema is not None:
        return Tables(schema, schema in known)
    visible = next((name for name, is_visible in known.items() if is_visible), SCHEMA)
    if visible != SCHEMA and SCHEMA in known:
        raise Misuse(
            f"there are tables of semel in the schemas {visible} and {SCHEMA}: say which ones are "
            f'meant, with SqlDatabase(url, schema="{visible}"), or in the URL: ?schema={visible}'
        )
    return Tables(visible, visible in known, by_search_path=visible != SCHEMA)


def split_schema(url: str) -> tuple[str, str | None]:
    """Split a URL into the one for the driver, and the schema that it names with ``?schema=``.

    Raises:
        Misuse: the schema cannot be the name of one.
    """
    place, mark, query = url.partition("?")
    rest = [one for one in query.split("&") if one.partition("=")[0] != "schema"]
    if not mark or len(rest) == query.count("&") + 1:
        return url, None
    named = [unquote(one.partition("=")[2]) for one in query.split("&") if one not in rest]
    return place + (mark if rest else "") + "&".join(rest), checked(named[-1])


def checked(schema: str) -> str:
    """Return the name of a schema, if it can be one.

    Raises:
        Misuse: it cannot.
    """
    if not 0 < len(schema.encode()) <= LONGEST_NAME or "\0" in schema:
        raise Misuse(f"a schema's name has 1 to {LONGEST_NAME} bytes, got {schema!r}")
    return schema


def lean_prefix(consumer: str) -> str:
    """Return how the tables of a consumer's lean claims are called; the day follows: 20261119."""
    return f"lean_claim_{hashlib.sha256(consumer.encode()).hexdigest()[:16]}_"
