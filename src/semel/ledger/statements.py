"""The statements of the ledger.

Plain SQL for SQLite (3.35 or newer) and PostgreSQL, with ``:named`` parameters.
``{now}`` is the database's clock in microseconds since 1970, ``{for_update}`` the
lock that keeps other writers of the scope out.
"""

from __future__ import annotations

from typing import Final

# The scope needs a row to lock.
ENTER_SCOPE: Final = """
    INSERT INTO semel_scope (app, query) VALUES (:app, :query)
    ON CONFLICT (app, query) DO NOTHING
"""

# Takes the scope's lock, and reads the time and everything that the checks need.
LOCK_SCOPE: Final = """
    SELECT epoch, owner, lease_until, generation, mark_generation, mark_batch, mark_attempt,
           pruned_generation, pruned_batch, {now} AS now
      FROM semel_scope
     WHERE app = :app AND query = :query
    {for_update}
"""

# The same without a lock.
READ_SCOPE: Final = LOCK_SCOPE.replace("{for_update}", "")

# A scope whose epoch is 0 was never owned.
LIST_SCOPES: Final = "SELECT app, query FROM semel_scope WHERE epoch > 0 ORDER BY app, query"

# A restore raises them all: the lost ledger may have had owners of any of them.
LIST_EVERY_SCOPE: Final = "SELECT app, query FROM semel_scope ORDER BY app, query"

# Sinks have seen epochs of the lost ledger: the next owner's epoch must be above them.
LEAP_EPOCH: Final = """
    UPDATE semel_scope SET epoch = epoch + :leap, owner = NULL, lease_until = 0
     WHERE app = :app AND query = :query
"""

# Every acquisition raises the epoch; the number is read from the locked row.
TAKE_LEASE: Final = """
    UPDATE semel_scope SET epoch = :epoch, owner = :owner, lease_until = :until
     WHERE app = :app AND query = :query
"""

# The epoch stays, because it fences the old owner.
RELEASE_LEASE: Final = """
    UPDATE semel_scope SET owner = NULL, lease_until = 0 WHERE app = :app AND query = :query
"""

RENEW_LEASE: Final = """
    UPDATE semel_scope SET lease_until = :until WHERE app = :app AND query = :query
"""

LIST_GENERATIONS: Final = """
    SELECT number, checkpoint, first_batch, opened_at
      FROM semel_generation
     WHERE app = :app AND query = :query
     ORDER BY number
"""

ADD_GENERATION: Final = """
    INSERT INTO semel_generation (app, query, number, checkpoint, first_batch, opened_at)
    VALUES (:app, :query, :number, :checkpoint, :first_batch, :now)
"""

USE_GENERATION: Final = """
    UPDATE semel_scope SET generation = :number WHERE app = :app AND query = :query
"""

_ATTEMPT: Final = """
    SELECT generation, batch, attempt, epoch, state, range_read, tokens, row_counts, reason,
           planned_at, decided_at, finished_at
      FROM semel_attempt
     WHERE app = :app AND query = :query
"""

_CYCLE: Final = " AND generation = :generation AND batch = :batch"

READ_ATTEMPT: Final = _ATTEMPT + _CYCLE + " AND attempt = :attempt"

LIST_CYCLE: Final = _ATTEMPT + _CYCLE + " ORDER BY seq"

# The condition is that of the unique index, so the planner can use it.
READ_COMMITTED: Final = _ATTEMPT + _CYCLE + " AND state IN ('committed', 'finished')"

# The condition is that of the partial index, so the planner can use it.
LIST_OPEN: Final = (
    _ATTEMPT + " AND state IN ('planned', 'prepared', 'committed') ORDER BY generation, batch, seq"
)

LIST_NEWEST: Final = _ATTEMPT + " ORDER BY seq DESC LIMIT :limit"

# The scope's lock is held, so two attempts never get the same number.
ADD_ATTEMPT: Final = """
    INSERT INTO semel_attempt (app, query, generation, batch, attempt, epoch, state, reason,
                               planned_at, decided_at, seq)
    VALUES (:app, :query, :generation, :batch, :attempt, :epoch, :state, :reason,
            :now, :decided_at,
            (SELECT coalesce(max(seq), 0) + 1 FROM semel_attempt
              WHERE app = :app AND query = :query))
"""

_THIS: Final = (
    " WHERE app = :app AND query = :query AND generation = :generation AND batch = :batch"
    " AND attempt = :attempt"
)

SET_RANGE: Final = "UPDATE semel_attempt SET range_read = :range" + _THIS

SET_PREPARED: Final = (
    "UPDATE semel_attempt SET state = 'prepared', tokens = :tokens, row_counts = :rows" + _THIS
)

# The decision; the condition makes it write-once even without the checks before it.
DECIDE_COMMIT: Final = (
    "UPDATE semel_attempt SET state = 'committed', decided_at = :now"
    + _THIS
    + " AND state = 'prepared'"
)

DECIDE_ABORT: Final = (
    "UPDATE semel_attempt SET state = 'aborted', decided_at = :now, reason = :reason"
    + _THIS
    + " AND state IN ('planned', 'prepared')"
)

# Only attempts of older owners: this owner's own may be running.
ABORT_UNDECIDED: Final = (
    "UPDATE semel_attempt SET state = 'aborted', decided_at = :now, reason = :reason"
    " WHERE app = :app AND query = :query"
    " AND state IN ('planned', 'prepared') AND epoch < :epoch"
    " RETURNING generation, batch, attempt"
)

FINISH: Final = (
    "UPDATE semel_attempt SET state = 'finished', finished_at = :now"
    + _THIS
    + " AND state = 'committed'"
)

# The mark must stay below the first cycle that is committed and unfinished.
FIRST_UNFINISHED: Final = """
    SELECT generation, batch FROM semel_attempt
     WHERE app = :app AND query = :query AND state IN ('planned', 'prepared', 'committed')
       AND state = 'committed'
     ORDER BY generation, batch LIMIT 1
"""

LAST_COMMITTED: Final = """
    SELECT generation, batch, attempt FROM semel_attempt
     WHERE app = :app AND query = :query AND state IN ('committed', 'finished')
     ORDER BY generation DESC, batch DESC LIMIT 1
"""

LAST_COMMITTED_BELOW: Final = """
    SELECT generation, batch, attempt FROM semel_attempt
     WHERE app = :app AND query = :query AND state IN ('committed', 'finished')
       AND (generation, batch) < (:generation, :batch)
     ORDER BY generation DESC, batch DESC LIMIT 1
"""

RAISE_MARK: Final = """
    UPDATE semel_scope
       SET mark_generation = :generation, mark_batch = :batch, mark_attempt = :attempt
     WHERE app = :app AND query = :query
"""

LIST_POSITIONS: Final = """
    SELECT source, source_partition, ends_at, topic_id, generation
      FROM semel_position
     WHERE app = :app AND query = :query
     ORDER BY source, source_partition
"""

MOVE_POSITION: Final = """
    INSERT INTO semel_position
           (app, query, source, source_partition, ends_at, topic_id, generation)
    VALUES (:app, :query, :source, :partition, :end, :topic_id, :generation)
    ON CONFLICT (app, query, source, source_partition) DO UPDATE
       SET ends_at = excluded.ends_at, topic_id = excluded.topic_id,
           generation = excluded.generation
"""

# Only an operator's adopt does this.
FORGET_POSITIONS: Final = "DELETE FROM semel_position WHERE app = :app AND query = :query"

# Only an operator's `adopt --repeat-files` does these two.
FORGET_PATHS: Final = """
    DELETE FROM semel_path WHERE folder IN
           (SELECT id FROM semel_folder WHERE app = :app AND query = :query)
"""

FORGET_FOLDERS: Final = "DELETE FROM semel_folder WHERE app = :app AND query = :query"

LIST_PATHS: Final = """
    SELECT f.source AS source, f.folder AS folder, p.name AS name
      FROM semel_folder f JOIN semel_path p ON p.folder = f.id
     WHERE f.app = :app AND f.query = :query
"""

FIND_FOLDER: Final = """
    SELECT id FROM semel_folder
     WHERE app = :app AND query = :query AND source = :source AND folder = :folder
"""

# The id is random, so that two scopes never wait for each other.
ADD_FOLDER: Final = """
    INSERT INTO semel_folder (id, app, query, source, folder)
    VALUES (:id, :app, :query, :source, :folder)
"""

# ``{names}`` becomes the parameters of a slice of the batch's names in one folder.
FIND_PATHS: Final = "SELECT name FROM semel_path WHERE folder = :folder AND name IN ({names})"

# A path that exists would be a file committed twice: the primary key refuses it.
ADD_PATH: Final = "INSERT INTO semel_path (folder, name) VALUES (:folder, :name)"

# The newest cycle that pruning may delete: the one after the cycles that are kept.
FIRST_TO_PRUNE: Final = """
    SELECT DISTINCT generation, batch FROM semel_attempt
     WHERE app = :app AND query = :query AND (generation, batch) <= (:generation, :batch)
     ORDER BY generation DESC, batch DESC LIMIT 1 OFFSET :keep
"""

PRUNE: Final = """
    DELETE FROM semel_attempt
     WHERE app = :app AND query = :query AND (generation, batch) <= (:generation, :batch)
       AND state IN ('finished', 'aborted')
    RETURNING generation, batch
"""

SET_PRUNED: Final = """
    UPDATE semel_scope SET pruned_generation = :generation, pruned_batch = :batch
     WHERE app = :app AND query = :query
"""

ADD_ACT: Final = """
    INSERT INTO semel_act (app, query, acted_at, who, act, why, detail, seq)
    VALUES (:app, :query, :now, :who, :act, :why, :detail,
            (SELECT coalesce(max(seq), 0) + 1 FROM semel_act
              WHERE app = :app AND query = :query))
"""

LIST_ACTS: Final = """
    SELECT acted_at, who, act, why, detail FROM semel_act
     WHERE app = :app AND query = :query
     ORDER BY seq DESC
"""

# A start under the new name, which was refused, has left such a row.
FORGET_SCOPE: Final = "DELETE FROM semel_scope WHERE app = :app AND query = :query"

# The epoch must be above every one that either name has had.
RENAME_SCOPE: Final = """
    UPDATE semel_scope SET app = :new, epoch = :epoch, owner = NULL, lease_until = 0
     WHERE app = :app AND query = :query
"""

# ``{table}`` is one of the tables with an app and a query.
RENAME_ROWS: Final = "UPDATE {table} SET app = :new WHERE app = :app AND query = :query"

# The acts of both names are kept: those of the old one come first.
SHIFT_ACTS: Final = """
    UPDATE semel_act SET seq = seq + :by WHERE app = :app AND query = :query
"""

LAST_ACT: Final = """
    SELECT coalesce(max(seq), 0) AS seq FROM semel_act WHERE app = :app AND query = :query
"""
