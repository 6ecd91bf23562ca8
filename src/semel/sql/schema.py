"""The ledger's tables, version by version.

    semel_ledger_meta   which version this is, and the ledger's id
    semel_scope         lease, epoch, mark and generation in use of each (app, query)
    semel_generation    the checkpoints of a scope
    semel_attempt       every attempt at every cycle, with its decision
    semel_position      where each partition's committed records end
    semel_path          the committed files of file sources
    semel_act           what operators did

A version never changes once it was released: a new one is added below it.
Times are microseconds since 1970; JSON is text.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from semel.errors import LedgerUnusable

if TYPE_CHECKING:
    from semel.sql.database import Session

MIGRATIONS: Final[Mapping[int, tuple[str, ...]]] = {
    1: (
        # There is one ledger, hence one row.
        """
        CREATE TABLE semel_ledger_meta (
            only_row integer PRIMARY KEY CHECK (only_row = 1),
            version bigint NOT NULL,
            ledger_id text NOT NULL
        )
        """,
        # The epoch is the fence, and it only rises; an epoch of 0 never had an owner.
        """
        CREATE TABLE semel_scope (
            app text NOT NULL,
            query text NOT NULL,
            epoch bigint NOT NULL DEFAULT 0,
            owner text,
            lease_until bigint NOT NULL DEFAULT 0,
            generation bigint NOT NULL DEFAULT 0,
            mark_generation bigint,
            mark_batch bigint,
            mark_attempt text,
            PRIMARY KEY (app, query),
            CHECK ((mark_generation IS NULL) = (mark_attempt IS NULL)),
            CHECK ((mark_batch IS NULL) = (mark_attempt IS NULL))
        )
        """,
        # An operator may adopt one checkpoint several times, each time as a new generation.
        """
        CREATE TABLE semel_generation (
            app text NOT NULL,
            query text NOT NULL,
            number bigint NOT NULL,
            checkpoint text NOT NULL,
            first_batch bigint NOT NULL,
            opened_at bigint NOT NULL,
            PRIMARY KEY (app, query, number)
        )
        """,
        # Decided means dated; committed means that the range is known.
        """
        CREATE TABLE semel_attempt (
            app text NOT NULL,
            query text NOT NULL,
            generation bigint NOT NULL,
            batch bigint NOT NULL,
            attempt text NOT NULL,
            seq bigint NOT NULL,
            epoch bigint NOT NULL,
            state text NOT NULL
                CHECK (state IN ('planned', 'prepared', 'committed', 'finished', 'aborted')),
            range_read text,
            tokens text NOT NULL DEFAULT '{}',
            row_counts text NOT NULL DEFAULT '{}',
            reason text NOT NULL DEFAULT '',
            planned_at bigint NOT NULL,
            decided_at bigint,
            finished_at bigint,
            PRIMARY KEY (app, query, generation, batch, attempt),
            UNIQUE (app, query, seq),
            CHECK ((decided_at IS NULL) = (state IN ('planned', 'prepared'))),
            CHECK ((finished_at IS NOT NULL) = (state = 'finished')),
            CHECK (range_read IS NOT NULL OR state NOT IN ('committed', 'finished'))
        )
        """,
        # A cycle has at most one COMMIT, ever, whatever the code above believes.
        """
        CREATE UNIQUE INDEX semel_attempt_one_commit
            ON semel_attempt (app, query, generation, batch)
            WHERE state IN ('committed', 'finished')
        """,
        # Recovery lists what is open without reading what is over.
        """
        CREATE INDEX semel_attempt_open
            ON semel_attempt (app, query, generation, batch, seq)
            WHERE state IN ('planned', 'prepared', 'committed')
        """,
        # The generation tells ephemeral positions of an older checkpoint from those in use.
        """
        CREATE TABLE semel_position (
            app text NOT NULL,
            query text NOT NULL,
            source text NOT NULL,
            source_partition text NOT NULL,
            ends_at bigint NOT NULL,
            topic_id text NOT NULL,
            generation bigint NOT NULL,
            PRIMARY KEY (app, query, source, source_partition)
        )
        """,
        # Apart from the positions: there are millions of files and few partitions.
        """
        CREATE TABLE semel_path (
            app text NOT NULL,
            query text NOT NULL,
            source text NOT NULL,
            path text NOT NULL,
            PRIMARY KEY (app, query, source, path)
        )
        """,
        """
        CREATE TABLE semel_act (
            app text NOT NULL,
            query text NOT NULL,
            seq bigint NOT NULL,
            acted_at bigint NOT NULL,
            who text NOT NULL,
            act text NOT NULL,
            why text NOT NULL,
            detail text NOT NULL,
            PRIMARY KEY (app, query, seq)
        )
        """,
    ),
    2: (
        # Up to where attempts were forgotten: an unknown attempt below it is not judged.
        "ALTER TABLE semel_scope ADD COLUMN pruned_generation bigint",
        "ALTER TABLE semel_scope ADD COLUMN pruned_batch bigint",
        # Version 1 did not say, so everything at or below the mark counts as forgotten.
        "UPDATE semel_scope SET pruned_generation = mark_generation, pruned_batch = mark_batch",
    ),
}

VERSION: Final = max(MIGRATIONS)

TABLES: Final = (
    "semel_scope",
    "semel_generation",
    "semel_attempt",
    "semel_position",
    "semel_path",
    "semel_act",
)
"""What a backup holds, beside the ledger's id and version."""

_META = "SELECT version, ledger_id FROM semel_ledger_meta"
_MAKE = "INSERT INTO semel_ledger_meta (only_row, version, ledger_id) VALUES (1, :version, :id)"
_UPGRADE = "UPDATE semel_ledger_meta SET version = :version"


def prepare(session: Session, url: str) -> str:
    """Make the tables, or bring older ones up to date; return the ledger's id.

    Two processes may do it at once.

    Raises:
        LedgerUnusable: the tables are of a newer version than this code.
    """
    from semel.sql.database import Mode

    session.begin("semel:schema", Mode.READ)
    try:
        version, ledger_id = _standing(session)
    finally:
        session.rollback()
    if version < VERSION:
        session.begin("semel:schema", Mode.WRITE)
        try:
            session.lock_schema()
            version, ledger_id = _standing(session)
            if version == 0:
                ledger_id = str(uuid.uuid4())
                make(session, VERSION, ledger_id)
            else:
                upgrade(session, version)
            session.commit()
        except BaseException:
            session.rollback()
            raise
    elif version > VERSION:
        raise LedgerUnusable(
            url,
            f"it has schema version {version}, and this semel knows versions up to {VERSION}; "
            f"upgrade semel, or restore a backup made before the upgrade",
        )
    return ledger_id


def _standing(session: Session) -> tuple[int, str]:
    if not session.has_table("semel_ledger_meta"):
        return 0, ""
    (meta,) = session.run(_META)
    return meta["version"], meta["ledger_id"]


def make(session: Session, version: int, ledger_id: str) -> None:
    """Make the tables as they were in *version*."""
    for number in range(1, version + 1):
        for statement in MIGRATIONS[number]:
            session.run(statement)
    session.run(_MAKE, {"version": version, "id": ledger_id})


def upgrade(session: Session, version: int) -> None:
    """Bring tables of *version* up to date."""
    for number in range(version + 1, VERSION + 1):
        for statement in MIGRATIONS[number]:
            session.run(statement)
    session.run(_UPGRADE, {"version": VERSION})
