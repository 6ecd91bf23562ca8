"""What semel keeps in SQL databases: statements written once, for SQLite and PostgreSQL alike."""
