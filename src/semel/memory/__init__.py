"""A broker, a sink and a ledger in one process's memory, under the same contracts."""
