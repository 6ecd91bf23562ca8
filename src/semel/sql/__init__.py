"""The stores of the messaging half in PostgreSQL and SQLite, through SQLAlchemy.

database    one transaction with all stores; engine: engines and their URLs
session     the session that handlers get: it cannot end the transaction
claims      the claims, and their SQL
waiting inbox outbox    one store each
deadletters the dead letters, and the failed attempts
bookkeeping running members, crash notes, outcomes of offsets, versions
store       what the stores share: statements, rows, filters, what may be deleted
operators   the stores of operators: audit trail, approvals, revisions, replays
dryrun      what a session changes, and what its commit would refuse
notify      NOTIFY wakes the relays of other processes
tables      all tables; types: their columns; schema: create and compare them
faults      what a database's error means, by SQLSTATE or code

MySQL and MariaDB are not supported: they have no ON CONFLICT.
"""

from semel.errors import require

# An import without SQLAlchemy fails here, with an error that names the extra to install.
require("sqlalchemy", "sqlalchemy")
