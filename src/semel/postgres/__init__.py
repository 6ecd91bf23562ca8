"""PostgreSQL: the sink, and the ledger for drivers on several machines.

sink        rows in a table, once each
messages    the sink for what a batch of messages changes; the registry; what a pass asks
lean        claims of 32 bytes, in a table for each day, and the filters of days that are over
message_statements   its list of statements, and the tables that they name
staging     staging mode: one table per task, one final transaction; the way out if it is refused
prepared    prepared mode: a prepared transaction per task
database    the sink's sessions, fences, locks and held transactions
books       the sink's own tables, and the answers that they give
checks      what is found out before the first batch
schema      the target table, and which type goes into which
writer      the rows of one task: fitted to the target, encoded, copied
encode      binary COPY
refusals    why the server refused rows: columns and keys, no other values
statements  quoting, the token, and how staged rows become visible
connect     few connections, reused; errors by SQLSTATE
ledger      the ledger in PostgreSQL
"""

from semel.errors import require

require("psycopg", "postgres")
