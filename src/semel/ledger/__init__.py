"""The ledger in SQL: statements written once, for SQLite and PostgreSQL."""
