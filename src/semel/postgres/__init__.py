"""PostgreSQL: the sink, and the ledger for drivers on several machines.

sink        rows in a table, once each
staging     staging mode: one table per task, one final transaction
prepared    prepared mode: a prepared transaction per task
writer      the rows of one task: fitted to the target, encoded, copied
encode      binary COPY; wires: which type goes into which; numeric and jsontext: two hard types
statements  how staged rows become visible
books       the sink's own tables; answers: what they say; inventory: what they hold
checks      what is found out before the first batch; schema: the target table
database    sessions, fences, locks; connect: few connections, reused
faults      errors by SQLSTATE; explain: which rows a constraint refused
resolve     the way out of a cycle that cannot be finished
verify      the rows of a cycle, read back
names       quoting
ledger      the ledger in PostgreSQL
"""

from semel.errors import require

require("psycopg", "postgres")
