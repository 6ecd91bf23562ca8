"""PostgreSQL: the sink, and the ledger for drivers on several machines."""

from semel.errors import require

require("psycopg", "postgres")
