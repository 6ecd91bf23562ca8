"""The messaging half's stores in PostgreSQL and SQLite, by SQLAlchemy.

database    one transaction with all stores; engine: engines and their URLs
session     the session that handlers get: it cannot end the transaction
claims      the claims; claim_statements: their SQL
waiting inbox outbox    one store each
deadletters the dead letters, and the failed attempts
bookkeeping the books of consumers: running members, offsets, versions
store       what the stores share: statements, rows, filters, what may be deleted
operators   the stores of operators: audit trail, approvals, revisions, replays
dryrun      what a session changes, and what its commit would refuse
notify      NOTIFY wakes the relays of other processes
tables      all tables; types: their columns; schema: making and comparing them
faults      what a database's error means, by SQLSTATE or code

MySQL and MariaDB have other statements, and are not supported.
"""

from semel.errors import require

# Whoever uses one of these modules is told which extra to install.
require("sqlalchemy", "sqlalchemy")
