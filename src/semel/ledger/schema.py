"""The ledger's tables.

    semel_ledger_meta   which version this is, and the ledger's id
    semel_scope         lease, epoch, mark and generation in use of each (app, query)
    semel_generation    the checkpoints of a scope
    semel_attempt       every attempt at every cycle, with its decision
    semel_position      where each partition's committed records end
    semel_folder        the folders of committed files
    semel_path          the committed files of file sources, by folder
    semel_act           what operators did

Times are microseconds since 1970; JSON is text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

VERSION: Final = 1

TABLES: Final[Mapping[str, str]] = {
    # There is one ledger, hence one row.
    "semel_ledger_meta": """
        CREATE TABLE semel_ledger_meta (
            only_row integer PRIMARY KEY CHECK (only_row = 1),
            version bigint NOT NULL,
            ledger_id text NOT NULL
        )
    """,
    # The epoch is the fence, and it only rises; an epoch of 0 never had an owner.
    # An unknown attempt at or below the pruned cycle may have been deleted: it is not decided.
    "semel_scope": """
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
            pruned_generation bigint,
            pruned_batch bigint,
            PRIMARY KEY (app, query),
            CHECK ((mark_generation IS NULL) = (mark_attempt IS NULL)),
            CHECK ((mark_batch IS NULL) = (mark_attempt IS NULL))
        )
    """,
    # An operator may adopt one checkpoint several times, each time as a new generation.
    "semel_generation": """
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
    # A decided attempt has its date; a committed one has its source range.
    "semel_attempt": """
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
    # The generation distinguishes ephemeral positions of an older checkpoint from current ones.
    "semel_position": """
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
    # There are millions of files and few folders: what they share is written once.
    "semel_folder": """
        CREATE TABLE semel_folder (
            id bigint PRIMARY KEY,
            app text NOT NULL,
            query text NOT NULL,
            source text NOT NULL,
            folder text NOT NULL,
            UNIQUE (app, query, source, folder)
        )
    """,
    "semel_path": """
        CREATE TABLE semel_path (
            folder bigint NOT NULL,
            name text NOT NULL,
            PRIMARY KEY (folder, name)
        )
    """,
    "semel_act": """
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
}

INDEXES: Final = (
    # A cycle has at most one COMMIT, ever, even if the code above has a bug.
    """
        CREATE UNIQUE INDEX semel_attempt_one_commit
            ON semel_attempt (app, query, generation, batch)
            WHERE state IN ('committed', 'finished')
    """,
    # Recovery lists the open attempts without reading the finished ones.
    """
        CREATE INDEX semel_attempt_open
            ON semel_attempt (app, query, generation, batch, seq)
            WHERE state IN ('planned', 'prepared', 'committed')
    """,
)
